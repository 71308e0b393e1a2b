"""RegistryService over gRPC: decode, call the store, encode. Errors leave as domain exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
from google.protobuf import duration_pb2

from kvgrpc.errors import KvGrpcError, ServerDraining, TooManyRequests
from kvgrpc.model import Role
from kvgrpc.paging import MAX_PAGE, numbers_token, page_size, page_token, read_numbers_token, read_page_token
from kvgrpc.registry import wire
from kvgrpc.registry.addresses import peer_is_local
from kvgrpc.registry.model import BEFORE_ALL, EngineChange, RankRow, ResolvedEngine, coordinates_of
from kvgrpc.registry.store.base import Store
from kvgrpc.registry.streams import MissingStreams
from kvgrpc.registry.watching import Watching
from kvgrpc.rpc.callers import check_scope, check_speaker
from kvgrpc.rpc.waiters import Waiters
from kvgrpc.rpc.waiting import longest_wait
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1 import registry_service_pb2_grpc
from kvgrpc.v1.server_service_pb2 import RegistryLimits

MAX_PAGE_BYTES = 1 << 20
MAX_RESOLVED_BYTES = 3 << 20
# Waiting calls must not use up what a server admits (4,096 unary calls), or no rank could register and end the wait.
MAX_WAITERS = 2_048
# Decoding so many takes 5 ms; between them the loop is everybody's.
REGIONS_IN_A_TURN = 1_024

_Context = grpc.aio.ServicerContext[Any, Any]


def add_registry_to_server(servicer: RegistryServicer, server: grpc.aio.Server) -> None:
    """As the generated function does it, but what WatchEngines sends is encoded already, once for all who read it."""
    encoded: grpc.RpcMethodHandler[pb.WatchEnginesRequest, bytes] = grpc.unary_stream_rpc_method_handler(
        servicer.watch_encoded, request_deserializer=pb.WatchEnginesRequest.FromString
    )
    service = pb.DESCRIPTOR.services_by_name["RegistryService"].full_name
    # Of two handlers of one method the first one counts.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"WatchEngines": encoded}),))
    registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, server)
    # Of registered ones the last, and they count first where the library knows them.
    server.add_registered_method_handlers(service, {"WatchEngines": encoded})


class RegistryServicer(registry_service_pb2_grpc.RegistryServiceServicer):
    """A store behind RegistryService; lives on the event loop on which ``start`` was called.

    Add it to a server with ``add_registry_to_server``; the server's interceptor turns the exceptions of
    ``kvgrpc.errors`` into statuses.
    """

    def __init__(self, store: Store, *, max_waiters: int = MAX_WAITERS) -> None:
        self.store = store
        self._pools = wire.PoolCache()
        # By the engine's name, or by role where none was named.
        self._waiters = Waiters[str | Role | None](
            max_waiters, "waiting ResolveRanks calls", draining="the registry drains"
        )
        self._watching = Watching(store, self._pools)
        self._missing_streams = MissingStreams()
        self._ttl = duration_pb2.Duration()
        self._ttl.FromMicroseconds(round(store.ttl * 1e6))
        self._streams: set[asyncio.Future[None]] = set()
        self._draining = False

    @property
    def limits(self) -> RegistryLimits:
        """What GetServerInfo says of a registry."""
        return RegistryLimits(
            max_page_size=MAX_PAGE,
            max_rows_per_request=wire.MAX_ROWS_PER_REQUEST,
            max_leases_per_request=wire.MAX_LEASES_PER_REQUEST,
            lease_ttl=self._ttl,
        )

    async def start(self) -> None:
        """Starts to count time; leases do not run out before."""
        await self.store.start(self._on_change)

    def drain(self) -> None:
        """Ends streams and waiting calls with SERVER_DRAINING, and takes no more rows. Reads go on."""
        self._draining = True
        self._waiters.drain()
        self._watching.drain()
        for drained in self._streams:
            if not drained.done():
                drained.set_result(None)

    async def close(self) -> None:
        """Drains and closes the store."""
        self.drain()
        await self.store.close()

    @property
    def healthy(self) -> bool:
        """True between ``start`` and ``close``, as long as the store's own tasks run."""
        return self.store.healthy

    async def Register(self, request: pb.RegisterRequest, context: _Context) -> pb.RegisterResponse:
        self._refuse_if_draining()
        rows: list[RankRow] = []
        in_this_turn = 0
        for row in wire.rows_to_register(request, self._pools, peer_is_local=peer_is_local(context.peer())):
            check_speaker(row.ref, row.role, f"rows[{len(rows)}].rank")
            rows.append(row)
            in_this_turn += 1 + sum(len(pool.regions) for pool in row.pools)
            if in_this_turn >= REGIONS_IN_A_TURN:
                in_this_turn = 0
                await asyncio.sleep(0)
        self._refuse_if_draining()
        leases = await self.store.register(rows)
        return pb.RegisterResponse(leases=wire.leases_to_pb(leases), ttl=self._ttl, registry_id=self.store.registry_id)

    async def KeepAlive(self, request_iterator: object, context: _Context) -> AsyncIterator[pb.KeepAliveResponse]:
        drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streams.add(drained)
        try:
            while (request := await self._next_request(context, drained)) is not grpc.aio.EOF:
                unknown = await self.store.keep_alive(wire.lease_ids(request))
                yield pb.KeepAliveResponse(unknown_lease_ids=unknown, ttl=self._ttl)
        finally:
            self._streams.discard(drained)

    async def Deregister(self, request: pb.DeregisterRequest, context: _Context) -> pb.DeregisterResponse:
        refs = wire.refs_to_deregister(request)
        for index, ref in enumerate(refs):
            engine = self.store.table.find(ref.rank.engine, None) if ref.rank.engine else None
            check_scope(ref, None if engine is None else engine.role, f"ranks[{index}]")
        return pb.DeregisterResponse(removed=await self.store.deregister(refs))

    async def GetEngine(self, request: pb.GetEngineRequest, context: _Context) -> pb.GetEngineResponse:
        question = f"GetEngine {request.engine}"
        after = read_numbers_token(question, request.page_token, 4) or BEFORE_ALL
        size = page_size(request.page_size)
        engine = self.store.table.get(request.engine, after, size + 1)
        if engine is None:
            raise self._absence(request.engine, None)
        rows = self._rows_that_fit(engine.rows[:size])
        response = pb.GetEngineResponse(engine=wire.engine_to_pb(engine, rows))
        if len(rows) < len(engine.rows):
            last = engine.rows[len(rows) - 1].ref.rank
            response.next_page_token = numbers_token(question, coordinates_of(last))
        return response

    async def ListEngines(self, request: pb.ListEnginesRequest, context: _Context) -> pb.ListEnginesResponse:
        role = wire.optional_role(request.role)
        question = f"ListEngines {request.role} {request.include_rows}"
        after = read_page_token(question, request.page_token)
        size = page_size(request.page_size)
        engines = self.store.table.list_engines(role, after, size + 1, rows=request.include_rows)
        response = pb.ListEnginesResponse(warming_up=self.store.warming_up_for > 0)
        left = MAX_PAGE_BYTES
        for engine in engines[:size]:
            message = self._engine_with_rows(engine)
            left -= message.ByteSize()
            if left < 0 and response.engines:
                break
            response.engines.append(message)
        if len(response.engines) < len(engines):
            response.next_page_token = page_token(question, response.engines[-1].name)
        return response

    async def ResolveRanks(self, request: pb.ResolveRanksRequest, context: _Context) -> pb.ResolveRanksResponse:
        role = wire.optional_role(request.role)
        selectors = wire.selectors_from_pb(request.selectors)
        if request.wait_ready:
            await self._until_ready(request.engine, role, context.time_remaining())
        engine = self.store.table.select(request.engine, role, selectors)
        if engine is None:
            raise self._absence(request.engine, role)
        pools = None if request.without_pools else self._pools
        rows = [wire.row_to_pb(row, pools) for row in engine.rows]
        _check_fits(rows)
        return pb.ResolveRanksResponse(engine=wire.engine_to_pb(engine, rows))

    async def WatchEngines(
        self, request: pb.WatchEnginesRequest, context: _Context
    ) -> AsyncIterator[pb.WatchEnginesResponse]:
        async for message in self.watch_encoded(request, context):
            yield pb.WatchEnginesResponse.FromString(message)

    async def watch_encoded(self, request: pb.WatchEnginesRequest, context: _Context) -> AsyncIterator[bytes]:
        """WatchEngines with responses as bytes."""
        self._refuse_if_draining()
        only = wire.filter_from_pb(request)
        async for message in self._watching.follow(only):
            yield message

    def _on_change(self, changes: Sequence[EngineChange]) -> None:
        for change in changes:
            if change.engine.ready:
                self._waiters.wake(change.engine.name)
                self._waiters.wake(change.engine.role)
        self._watching.publish(changes)
        self._missing_streams.heed(changes)

    def _absence(self, engine: str, role: Role | None) -> KvGrpcError:
        return self.store.table.absence(engine, role, self.store.warming_up_for)

    async def _until_ready(self, engine: str, role: Role | None, remaining: float | None) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + longest_wait(remaining)
        while True:
            found = self.store.table.find(engine, role)
            if found is not None and found.ready:
                return
            if loop.time() >= end or not await self._waiters.wait([engine or role], end - loop.time()):
                raise self._absence(engine, role)

    async def _next_request(self, context: _Context, drained: asyncio.Future[None]) -> Any:
        """The next message of a keepalive stream, or EOF. A drain does not wait for it: it may be seconds away."""
        self._refuse_if_draining()
        reading = asyncio.ensure_future(context.read())
        try:
            await asyncio.wait((reading, drained), return_when=asyncio.FIRST_COMPLETED)
            self._refuse_if_draining()
            return reading.result()
        finally:
            reading.cancel()

    def _refuse_if_draining(self) -> None:
        if self._draining:
            raise ServerDraining("the registry drains", retry_after=1.0)

    def _rows_that_fit(self, rows: Sequence[RankRow]) -> list[pb.RankRow]:
        """The first rows up to one page of bytes, at least one."""
        encoded: list[pb.RankRow] = []
        left = MAX_PAGE_BYTES
        for row in rows:
            message = wire.row_to_pb(row, self._pools)
            left -= message.ByteSize()
            if left < 0 and encoded:
                break
            encoded.append(message)
        return encoded

    def _engine_with_rows(self, engine: ResolvedEngine) -> pb.Engine:
        rows = self._rows_that_fit(engine.rows)
        return wire.engine_to_pb(engine, rows if len(rows) == len(engine.rows) else ())


def _check_fits(rows: Sequence[pb.RankRow]) -> None:
    size = sum(row.ByteSize() for row in rows) if len(rows) > 8 else 0
    if size > MAX_RESOLVED_BYTES:
        raise TooManyRequests(
            f"the selectors fit {len(rows)} rows of {size} bytes: narrow them, or page through GetEngine",
            metadata={"limit": MAX_RESOLVED_BYTES, "value": size, "scope": "bytes of rows in one answer"},
        )
