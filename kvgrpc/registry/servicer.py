"""RegistryService over gRPC: decode, call the store, encode. Errors leave as domain exceptions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc.aio
from google.protobuf import duration_pb2

from kvgrpc.errors import KvGrpcError, ServerDraining, StaleEpoch, TooManyRequests
from kvgrpc.model import Role
from kvgrpc.paging import MAX_PAGE, numbers_token, page_size, page_token, read_numbers_token, read_page_token
from kvgrpc.registry import wire
from kvgrpc.registry.addresses import peer_is_local
from kvgrpc.registry.model import BEFORE_ALL, Absence, EngineChange, RankRow, ResolvedEngine, coordinates_of
from kvgrpc.registry.store.base import Store
from kvgrpc.registry.streams import MissingStreams
from kvgrpc.registry.watching import Watching
from kvgrpc.rpc.callers import NewsReader, check_scope, check_speaker
from kvgrpc.rpc.turns import PIECE_SECONDS, in_pieces, next_turn
from kvgrpc.rpc.waiters import Waiters, longest_wait
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1 import registry_service_pb2_grpc
from kvgrpc.v1.server_service_pb2 import RegistryLimits

MAX_PAGE_BYTES = 1 << 20
MAX_RESOLVED_BYTES = 3 << 20
# Waiting calls must not use up what a server admits (4,096 unary calls), or no rank could register and end the wait.
MAX_WAITERS = 2_048
# A page of ListEngines with rows ends behind so many, those of engines that have too many to be listed among them.
MAX_ROWS_LOOKED_AT = 16_384
# Leases that are renewed in one turn of the loop: 65,536 take 20 ms.
_LEASES_OF_A_TURN = 4_096
# Of rows that are read. Half a piece: beside hand-offs one rests four times as long as it took, and half a one twice.
_TURN_OF_ROWS_SECONDS = PIECE_SECONDS / 2

_Context = grpc.aio.ServicerContext[Any, Any]


def add_registry_to_server(servicer: RegistryServicer, server: grpc.aio.Server) -> None:
    """Adds the service as the generated function does, but answers with rows are encoded already: those of
    WatchEngines once for all who read it, the others piece by piece."""
    encoded: dict[str, Any] = {
        "GetEngine": _unary(servicer.get_encoded, pb.GetEngineRequest),
        "ListEngines": _unary(servicer.list_encoded, pb.ListEnginesRequest),
        "ResolveRanks": _unary(servicer.resolve_encoded, pb.ResolveRanksRequest),
        "WatchEngines": grpc.unary_stream_rpc_method_handler(
            servicer.watch_encoded, request_deserializer=pb.WatchEnginesRequest.FromString
        ),
    }
    service = pb.DESCRIPTOR.services_by_name["RegistryService"].full_name
    # Of two handlers of one method the first one counts.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, encoded),))
    registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, server)
    # Of registered ones the last, and they count first where the library knows them.
    server.add_registered_method_handlers(service, encoded)


def _unary(behaviour: Any, request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(behaviour, request_deserializer=request.FromString)


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
        """The limits that GetServerInfo says of a registry."""
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

    def undrain(self) -> None:
        """Takes rows, streams and waiting calls again; those that a drain ended stay ended."""
        self._draining = False
        self._waiters.undrain()
        self._watching.undrain()

    def readers(self) -> Iterator[NewsReader]:
        """The readers of WatchEngines, and how far behind they are."""
        return self._watching.readers()

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
        begun = time.thread_time()
        for row in wire.rows_in_pieces(request, self._pools, peer_is_local=peer_is_local(context.peer())):
            if row is not None:
                check_speaker(row.ref, row.role, f"rows[{len(rows)}].rank")
                rows.append(row)
            if time.thread_time() - begun > _TURN_OF_ROWS_SECONDS:
                await next_turn()
                begun = time.thread_time()
        self._refuse_if_draining()
        try:
            leases = await self.store.register(rows)
        except StaleEpoch as error:
            self._note_fenced(rows, error)
            raise
        return pb.RegisterResponse(leases=wire.leases_to_pb(leases), ttl=self._ttl, registry_id=self.store.registry_id)

    async def KeepAlive(self, request_iterator: object, context: _Context) -> AsyncIterator[pb.KeepAliveResponse]:
        drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streams.add(drained)
        try:
            while (request := await self._next_request(context, drained)) is not grpc.aio.EOF:
                unknown = await self._renew(wire.lease_ids(request))
                yield pb.KeepAliveResponse(unknown_lease_ids=unknown, ttl=self._ttl)
        finally:
            self._streams.discard(drained)

    async def _renew(self, lease_ids: Sequence[int]) -> list[int]:
        unknown = await self.store.keep_alive(lease_ids[:_LEASES_OF_A_TURN])
        for start in range(_LEASES_OF_A_TURN, len(lease_ids), _LEASES_OF_A_TURN):
            await next_turn()
            unknown += await self.store.keep_alive(lease_ids[start : start + _LEASES_OF_A_TURN])
        return unknown

    async def Deregister(self, request: pb.DeregisterRequest, context: _Context) -> pb.DeregisterResponse:
        refs, table = wire.refs_to_deregister(request), self.store.table
        for index, ref in enumerate(refs):
            engine = table.find(ref.rank.engine, None) if ref.rank.engine else None
            check_scope(ref, None if engine is None else engine.role, f"ranks[{index}]")
        return pb.DeregisterResponse(removed=await self.store.deregister(refs))

    async def GetEngine(self, request: pb.GetEngineRequest, context: _Context) -> pb.GetEngineResponse:
        return pb.GetEngineResponse.FromString(await self.get_encoded(request, context))

    async def get_encoded(self, request: pb.GetEngineRequest, context: _Context) -> bytes:
        wire.check_engine(request.engine)
        question = f"GetEngine {request.engine}"
        after = read_numbers_token(question, request.page_token, 4) or BEFORE_ALL
        size = page_size(request.page_size)
        engine = self.store.table.get(request.engine, after, size + 1)
        if engine is None:
            raise self._absence(request.engine, None)
        rows = await self._rows_that_fit(engine.rows[:size])
        more = pb.GetEngineResponse()
        if len(rows) < len(engine.rows):
            last = engine.rows[len(rows) - 1].ref.rank
            more.next_page_token = numbers_token(question, coordinates_of(last))
        found = wire.engine_to_bytes(engine, rows)
        return wire.joined(pb.GetEngineResponse, "engine", [found]) + more.SerializeToString()

    async def ListEngines(self, request: pb.ListEnginesRequest, context: _Context) -> pb.ListEnginesResponse:
        return pb.ListEnginesResponse.FromString(await self.list_encoded(request, context))

    async def list_encoded(self, request: pb.ListEnginesRequest, context: _Context) -> bytes:
        role = wire.optional_role(request.role)
        question = f"ListEngines {request.role} {request.include_rows}"
        after = read_page_token(question, request.page_token)
        size = page_size(request.page_size)
        engines = self.store.table.list_engines(role, after, size + 1, rows=request.include_rows)
        response = pb.ListEnginesResponse(warming_up=self.store.warming_up_for > 0)
        found, left, looked_at = list[bytes](), MAX_PAGE_BYTES, 0
        for engine in engines[:size]:
            message = await self._engine_with_rows(engine)
            left -= len(message)
            looked_at += len(engine.rows)
            if (left < 0 or looked_at > MAX_ROWS_LOOKED_AT) and found:
                break
            found.append(message)
        if len(found) < len(engines):
            response.next_page_token = page_token(question, engines[len(found) - 1].name)
        return wire.joined(pb.ListEnginesResponse, "engines", found) + response.SerializeToString()

    async def ResolveRanks(self, request: pb.ResolveRanksRequest, context: _Context) -> pb.ResolveRanksResponse:
        return pb.ResolveRanksResponse.FromString(await self.resolve_encoded(request, context))

    async def resolve_encoded(self, request: pb.ResolveRanksRequest, context: _Context) -> bytes:
        if request.engine:  # else any of its role
            wire.check_engine(request.engine)
        role = wire.optional_role(request.role)
        selectors = wire.selectors_from_pb(request.selectors)
        if request.wait_ready:
            await self._until_ready(request.engine, role, context.time_remaining())
        found = self.store.table.select(request.engine, role, selectors)
        if found is None:
            raise self._absence(request.engine, role)
        engine, matching = found
        rows = await self._all_rows(matching, None if request.without_pools else self._pools)
        return wire.joined(pb.ResolveRanksResponse, "engine", [wire.engine_to_bytes(engine, rows)])

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

    def _note_fenced(self, rows: Sequence[RankRow], error: StaleEpoch) -> None:
        """Notes the one that asks as why the rank is missing, if no incarnation is there: it runs, and in vain."""
        table = self.store.table
        for row in rows:
            if str(row.ref.rank) == error.metadata.get("rank") and table.leased(row.ref.rank) is None:
                table.departures.note(row.ref, Absence.FENCED, time.time())

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

    async def _rows_that_fit(self, rows: Sequence[RankRow]) -> list[bytes]:
        """The first rows up to one page of bytes, at least one."""
        left = MAX_PAGE_BYTES

        def encoded() -> Iterator[bytes]:
            nonlocal left
            for row in rows:
                message = wire.row_to_bytes(row, self._pools)
                left -= len(message)
                if left < 0 and row is not rows[0]:
                    return
                yield message

        return await in_pieces(encoded())

    async def _engine_with_rows(self, engine: ResolvedEngine) -> bytes:
        rows = await self._rows_that_fit(engine.rows)
        return wire.engine_to_bytes(engine, rows if len(rows) == len(engine.rows) else ())

    async def _all_rows(self, matching: Iterator[RankRow | None], pools: wire.PoolCache | None) -> list[bytes]:
        size = count = 0

        def encoded() -> Iterator[bytes]:
            nonlocal size, count
            for row in matching:
                message = b"" if row is None else wire.row_to_bytes(row, pools)
                size, count = size + len(message), count + (row is not None)
                if size > MAX_RESOLVED_BYTES and count > 1:
                    raise _too_many_rows(count, size)
                yield message

        return list(filter(None, await in_pieces(encoded())))


def _too_many_rows(count: int, size: int) -> TooManyRequests:
    return TooManyRequests(
        f"the selectors fit {count} rows of {size} bytes and more: narrow them, or page through GetEngine",
        metadata={"limit": MAX_RESOLVED_BYTES, "value": size, "scope": "bytes of rows in one answer"},
    )
