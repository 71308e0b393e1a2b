"""The asynchronous client. One object talks to one address; all of it belongs to the event loop that it is used on."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.client.cursor import Cursor
from kvgrpc.client.engines import Engines
from kvgrpc.client.sources import Sources
from kvgrpc.client.stall import StallDetector
from kvgrpc.client.watch import WatchPart, part_of
from kvgrpc.errors import InvalidRequest, KvGrpcError, PeerUnreachable
from kvgrpc.net import check_target
from kvgrpc.rpc.dialing.channel import open_channel, retire
from kvgrpc.rpc.dialing.retry import may_repeat, repeated
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.rpc.status import error_from
from kvgrpc.rpc.within import LONGEST_SECONDS, check_seconds
from kvgrpc.v1 import (
    common_pb2,
    event_service_pb2,
    index_service_pb2,
    prefetch_service_pb2,
    pull_service_pb2,
    registry_service_pb2,
    server_service_pb2,
    transfer_service_pb2,
)
from kvgrpc.v1.event_service_pb2_grpc import EventServiceStub
from kvgrpc.v1.index_service_pb2_grpc import IndexServiceStub
from kvgrpc.v1.prefetch_service_pb2_grpc import PrefetchServiceStub
from kvgrpc.v1.pull_service_pb2_grpc import PullServiceStub
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from kvgrpc.v1.server_service_pb2_grpc import ServerServiceStub
from kvgrpc.v1.transfer_service_pb2_grpc import TransferServiceStub

if TYPE_CHECKING:
    from kvgrpc.client.fleet import RankAnswer
    from kvgrpc.client.following.follower import EventFollower

T = TypeVar("T")
_LEAST_IDLE_SECONDS = 3.0
_RAW, _TYPED = event_service_pb2.WATCH_ENCODING_RAW, event_service_pb2.WATCH_ENCODING_TYPED
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0
_LEAST_ENGINE_IDLE_SECONDS = 15.0
# A server asks its registry for up to 10 s.
_UNDRAIN_SECONDS = 15.0


class Client:
    """Reads and steers one kvgrpc process: ``async with Client("127.0.0.1:8998") as client``.

    Answers are the protobuf messages of ``kvgrpc.v1``. Reads are repeated while the server is away, within ``timeout``
    seconds. Raises the exceptions of ``kvgrpc.errors``; PeerUnreachable when nobody answers in time. Certificates that
    were replaced are read again when a call fails.
    """

    def __init__(self, address: str, security: ClientSecurity | None = None, timeout: float = 10.0) -> None:
        self.address = check_target(address)
        if not 0 < timeout <= LONGEST_SECONDS:
            raise InvalidRequest.of("timeout", timeout, f"above 0 and at most {LONGEST_SECONDS:g} seconds")
        self._timeout = timeout
        self._security = security or ClientSecurity()
        self._stamp: tuple[object, ...] = ()
        self._outdated = False
        self._closing: asyncio.Task[None] | None = None
        self._opened: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; the client opens a new one when it is used again."""
        channel, self._opened = self._opened, None
        if channel is not None:
            await channel.close()

    async def connect(self) -> None:
        """Begins to connect, which the first call would do. Waits for nothing."""
        self._channel().get_state(try_to_connect=True)

    # Registry.

    async def list_engines(
        self, *, role: common_pb2.Role.ValueType = common_pb2.ROLE_UNSPECIFIED, include_rows: bool = False
    ) -> Engines:
        """All engines, ordered by name; ``warming_up`` of the list says that there may be more."""
        stub = RegistryServiceStub(self._channel())
        found = Engines()

        async def page(token: str) -> tuple[Iterable[registry_service_pb2.Engine], str]:
            request = registry_service_pb2.ListEnginesRequest(page_token=token, role=role, include_rows=include_rows)
            response = await self._read(stub.ListEngines, request)
            found.warming_up |= response.warming_up
            return response.engines, response.next_page_token

        found.extend(await _pages(page))
        return found

    async def get_engine(self, engine: str) -> registry_service_pb2.Engine:
        """One engine with all of its rows."""
        stub = RegistryServiceStub(self._channel())

        async def page(token: str) -> tuple[Iterable[registry_service_pb2.Engine], str]:
            request = registry_service_pb2.GetEngineRequest(engine=engine, page_token=token, page_size=1000)
            response = await self._read(stub.GetEngine, request)
            return [response.engine], response.next_page_token

        whole, *others = await _pages(page)
        for other in others:
            whole.rows.extend(other.rows)
        return whole

    async def resolve_ranks(
        self,
        engine: str,
        role: common_pb2.Role.ValueType,
        selectors: Sequence[registry_service_pb2.RankSelector] = (),
        wait_ready: bool = False,
    ) -> registry_service_pb2.Engine:
        """The engine with the selected rows; with ``wait_ready`` once it is READY."""
        request = registry_service_pb2.ResolveRanksRequest(
            engine=engine, role=role, selectors=selectors, wait_ready=wait_ready
        )
        response: registry_service_pb2.ResolveRanksResponse = await self._read(
            RegistryServiceStub(self._channel()).ResolveRanks, request
        )
        return response.engine

    async def watch_engines(
        self,
        *,
        engine: str = "",
        role: common_pb2.Role.ValueType = common_pb2.ROLE_UNSPECIFIED,
        without_pools: bool = False,
    ) -> AsyncIterator[registry_service_pb2.WatchEnginesResponse]:
        """The full state of the registry, then what changes. It is not resumed by itself: watch again.

        Raises PeerUnreachable when nothing comes for ``timeout`` seconds, at least 15 (a message comes each 5 seconds).
        Close the iterator (``contextlib.aclosing``) to end it early.
        """
        request = registry_service_pb2.WatchEnginesRequest(engine=engine, role=role, without_pools=without_pools)
        call = RegistryServiceStub(self._channel()).WatchEngines(request)
        async with aclosing(self._messages(call, max(self._timeout, _LEAST_ENGINE_IDLE_SECONDS))) as messages:
            async for message in messages:
                yield message

    async def deregister(self, ranks: Sequence[common_pb2.RankRef]) -> int:
        """Removes the rows of these incarnations from the registry; how many were there. One that lives comes back with
        its next renewal."""
        request = registry_service_pb2.DeregisterRequest(ranks=ranks)
        stub = RegistryServiceStub(self._channel())
        response: registry_service_pb2.DeregisterResponse = await self._read(stub.Deregister, request)
        return response.removed

    # Hand-offs.

    async def list_sessions(self) -> list[transfer_service_pb2.Session]:
        """All sessions of the rank."""
        stub = TransferServiceStub(self._channel())

        async def page(token: str) -> tuple[Iterable[transfer_service_pb2.Session], str]:
            response = await self._read(
                stub.ListSessions, transfer_service_pb2.ListSessionsRequest(page_token=token, page_size=1000)
            )
            return response.sessions, response.next_page_token

        return await _pages(page)

    async def list_newest_failed_rooms(self, most: int = 256) -> list[transfer_service_pb2.Room]:
        """The rooms that failed last at the rank, the newest first; at most ``most`` of them."""
        request = transfer_service_pb2.ListRoomsRequest(newest_failed=True, page_size=most)
        response: transfer_service_pb2.ListRoomsResponse = await self._read(
            TransferServiceStub(self._channel()).ListRooms, request
        )
        return list(response.rooms)

    async def list_slowest_rooms(self, most: int = 256) -> list[transfer_service_pb2.Room]:
        """Of the last 256 rooms that went well at the rank, those that took longest, the slowest first."""
        request = transfer_service_pb2.ListRoomsRequest(slowest=True, page_size=most)
        response: transfer_service_pb2.ListRoomsResponse = await self._read(
            TransferServiceStub(self._channel()).ListRooms, request
        )
        return list(response.rooms)

    async def list_rooms(
        self,
        *,
        states: Sequence[transfer_service_pb2.RoomState.ValueType] = (),
        held_only: bool = False,
        most_pages: int | None = None,
    ) -> list[transfer_service_pb2.Room]:
        """The rooms of the rank, ordered by room and attempt; ``most_pages``: only the first pages of 1,000 rooms."""
        stub = TransferServiceStub(self._channel())

        async def page(token: str) -> tuple[Iterable[transfer_service_pb2.Room], str]:
            request = transfer_service_pb2.ListRoomsRequest(
                page_token=token, page_size=1000, states=states, held_only=held_only
            )
            response = await self._read(stub.ListRooms, request)
            return response.rooms, response.next_page_token

        return await _pages(page, most_pages)

    async def count_rooms(self, *, states: Sequence[transfer_service_pb2.RoomState.ValueType] = ()) -> int:
        """Returns how many rooms the rank knows, of these states or of all."""
        if states:
            return len(await self.list_rooms(states=states))
        stub = TransferServiceStub(self._channel())
        response: transfer_service_pb2.ListRoomsResponse = await self._read(
            stub.ListRooms, transfer_service_pb2.ListRoomsRequest(page_size=1)
        )
        return response.total

    async def ask_ranks(
        self, call: Callable[[Client], Awaitable[T]], timeout: float | None = None
    ) -> list[RankAnswer[T]]:
        """``Fleet.ask`` of the registry at this address: what ``call`` returns, or raises, for each of its ranks.

        ``timeout``: seconds that one answer may take, where that is not the client's.
        """
        from kvgrpc.client.fleet import Fleet

        return await Fleet(self.address, self._security, timeout or self._timeout).ask(call)

    async def get_room(self, room: int, attempt: int = 0) -> transfer_service_pb2.Room:
        """One room with its parts."""
        request = transfer_service_pb2.GetRoomRequest(room=room, attempt=attempt)
        stub = TransferServiceStub(self._channel())
        response: transfer_service_pb2.GetRoomResponse = await self._read(stub.GetRoom, request)
        return response.room

    async def cancel_room(self, room: int, attempt: int = 0, cause: str = "") -> transfer_service_pb2.Room:
        """Cancels one room; it as it is now."""
        request = transfer_service_pb2.CancelRoomRequest(room=room, attempt=attempt, cause=cause)
        stub = TransferServiceStub(self._channel())
        response: transfer_service_pb2.CancelRoomResponse = await self._read(stub.CancelRoom, request)
        return response.room

    async def get_topology(
        self, prefill: transfer_service_pb2.EngineShape, decode: transfer_service_pb2.EngineShape
    ) -> list[transfer_service_pb2.OwedPart]:
        """Returns which prefill ranks owe what to which decode ranks, for any two engines."""
        stub = TransferServiceStub(self._channel())
        request = transfer_service_pb2.GetTopologyRequest(prefill=prefill, decode=decode)
        response: transfer_service_pb2.GetTopologyResponse = await self._read(stub.GetTopology, request)
        return list(response.parts)

    async def get_rank(self) -> transfer_service_pb2.GetRankResponse:
        """Returns who the rank is and the shapes of its pools."""
        stub = TransferServiceStub(self._channel())
        request = transfer_service_pb2.GetRankRequest()
        response: transfer_service_pb2.GetRankResponse = await self._read(stub.GetRank, request)
        return response

    # Events.

    async def list_streams(self) -> list[event_service_pb2.EventStream]:
        """The event streams of the process."""
        stub = EventServiceStub(self._channel())

        async def page(token: str) -> tuple[Iterable[event_service_pb2.EventStream], str]:
            request = event_service_pb2.ListStreamsRequest(page_token=token, page_size=1000)
            response = await self._read(stub.ListStreams, request)
            return response.streams, response.next_page_token

        return await _pages(page)

    async def watch(
        self,
        *,
        mode: event_service_pb2.WatchMode.ValueType = event_service_pb2.WATCH_MODE_REPLAY,
        engine: str = "",
        dp: int = 0,
        log_id: str = "",
        from_sequence: int | None = None,
        end_sequence: int | None = None,
        typed: bool = False,
        tiers: Sequence[common_pb2.Tier.ValueType] = (),
        groups: Sequence[int] = (),
    ) -> AsyncIterator[WatchPart]:
        """One Watch, from Begin on. Where a connection breaks it goes on behind the last batch, with the same log.

        ``typed``: messages instead of payloads, and then only events of these ``tiers`` and ``groups`` (empty: all). A
        batch, or a part of a snapshot, that would be a message above 4 MiB comes as payload even then, unfiltered.

        Raises PeerUnreachable, or what a server said when it went, once nothing could be heard for ``timeout`` seconds,
        at least 3 (heartbeats come each second); at once what refuses the first call, and what another call cannot mend
        (STALE_LOG, EVENTS_COMPACTED: ``follow`` mends these too). Close the iterator (``contextlib.aclosing``) to end
        the Watch early.
        """
        cursor = Cursor(
            event_service_pb2.WatchRequest(
                engine=engine,
                dp=dp,
                log_id=log_id,
                mode=mode,
                from_sequence=from_sequence,
                end_sequence=end_sequence,
                encoding=_TYPED if typed else _RAW,
                tiers=tiers,
                groups=groups,
            )
        )
        idle_timeout, pause = max(self._timeout, _LEAST_IDLE_SECONDS), _FIRST_PAUSE_SECONDS
        clock = asyncio.get_running_loop().time
        failed: KvGrpcError | None = None
        heard = clock()
        while not cursor.complete:
            call = EventServiceStub(self._channel()).Watch(cursor.request)
            try:
                async with aclosing(self._messages(call, idle_timeout)) as messages:
                    async for message in messages:
                        failed, pause = None, _FIRST_PAUSE_SECONDS
                        part = part_of(message) if cursor.hear(message) else None
                        if part is not None:
                            yield part
                        heard = clock()
                return
            except KvGrpcError as error:
                failed = failed or error
                if not cursor.begun or not may_repeat(error):
                    raise
            if clock() + pause >= heard + idle_timeout:
                raise failed
            await asyncio.sleep(pause * (0.5 + random.random() / 2))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def follow(self, *, engine: str = "", dp: int = 0, live: bool = False) -> EventFollower:
        """A follower of one stream of the process, to be started: ``async with client.follow() as follower``."""
        from kvgrpc.client.following.follower import EventFollower

        return EventFollower(self.address, engine=engine, dp=dp, live=live, security=self._security)

    # The index.

    async def score(
        self, request: index_service_pb2.ScoreRequest, *, once_within: float | None = None
    ) -> index_service_pb2.ScoreResponse:
        """Returns who holds the beginnings of requests, of an index (``kvgrpc serve index``).

        ``once_within``: asked once, and for so many seconds at most.
        """
        response: index_service_pb2.ScoreResponse = await self._ask_index("Score", request, once_within)
        return response

    async def plan(
        self, request: index_service_pb2.PlanRequest, *, once_within: float | None = None
    ) -> index_service_pb2.PlanResponse:
        """Returns where to run requests, and from whom to pull which part of their prompts; as ``score``.

        With ``reserve`` a repeated call may count a request twice, for the second until its engine tells what it has to
        do: ``once_within`` repeats none.
        """
        response: index_service_pb2.PlanResponse = await self._ask_index("Plan", request, once_within)
        return response

    async def list_sources(self, *, states: Sequence[index_service_pb2.IndexSourceState.ValueType] = ()) -> Sources:
        """The caches that an index follows, in these states (none: in all)."""
        stub = IndexServiceStub(self._channel())
        found = Sources()

        async def page(token: str) -> tuple[Iterable[index_service_pb2.IndexSource], str]:
            request = index_service_pb2.ListSourcesRequest(page_token=token, page_size=1000, states=states)
            response: index_service_pb2.ListSourcesResponse = await self._read(stub.ListSources, request)
            found.counts = {count.state: count.sources for count in response.counts}
            found.not_followed = list(response.not_followed)
            return response.sources, response.next_page_token

        found.extend(await _pages(page))
        return found

    # The hierarchical cache.

    async def lookup(
        self, pages: prefetch_service_pb2.PromptPages, *, without_storage: bool = False
    ) -> prefetch_service_pb2.LookupResponse:
        """Returns how many leading pages of a prompt are on device, host and in storage."""
        stub = PrefetchServiceStub(self._channel())
        request = prefetch_service_pb2.LookupRequest(pages=pages, without_storage=without_storage)
        response: prefetch_service_pb2.LookupResponse = await self._read(stub.Lookup, request)
        return response

    async def start_prefetch(
        self,
        pages: prefetch_service_pb2.PromptPages,
        *,
        request_id: str = "",
        timeout: float | None = None,
        priority: int = 0,
        tenant: str = "",
        engines: Sequence[str] = (),
    ) -> prefetch_service_pb2.CacheOperation:
        """Begins to bring pages from storage to the host. Repeated while the server is away if ``request_id`` is given,
        by default a new one; ``timeout``: seconds that the operation may take; ``engines``: whose host caches pages
        may come from, besides storage; none named: whichever the rank finds."""
        request = prefetch_service_pb2.StartPrefetchRequest(
            request_id=request_id or uuid.uuid4().hex, pages=pages, priority=priority, tenant=tenant, engines=engines
        )
        if timeout is not None:
            check_seconds("timeout", timeout)
            request.timeout.FromMicroseconds(round(timeout * 1e6))
        response = await self._read(PrefetchServiceStub(self._channel()).StartPrefetch, request)
        operation: prefetch_service_pb2.CacheOperation = response.operation
        return operation

    async def start_backup(
        self,
        pages: prefetch_service_pb2.PromptPages,
        *,
        request_id: str = "",
        timeout: float | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> prefetch_service_pb2.CacheOperation:
        """Begins to write the leading pages that the host has to storage; otherwise as ``start_prefetch``."""
        request = prefetch_service_pb2.StartBackupRequest(
            request_id=request_id or uuid.uuid4().hex, pages=pages, priority=priority, tenant=tenant
        )
        if timeout is not None:
            check_seconds("timeout", timeout)
            request.timeout.FromMicroseconds(round(timeout * 1e6))
        response = await self._read(PrefetchServiceStub(self._channel()).StartBackup, request)
        operation: prefetch_service_pb2.CacheOperation = response.operation
        return operation

    async def terminate_prefetch(self, operation_id: str) -> prefetch_service_pb2.CacheOperation:
        """Cuts an operation short; it as it is now, and whether it is quiescent."""
        request = prefetch_service_pb2.TerminatePrefetchRequest(operation_id=operation_id)
        response = await self._read(PrefetchServiceStub(self._channel()).TerminatePrefetch, request)
        operation: prefetch_service_pb2.CacheOperation = response.operation
        return operation

    async def watch_operations(
        self, operation_ids: Sequence[str] = (), *, open_only: bool = False
    ) -> AsyncIterator[prefetch_service_pb2.WatchOperationsResponse]:
        """One watch, from the present state on; ends when the operations that are named have ended. Close it as
        ``watch``."""
        request = prefetch_service_pb2.WatchOperationsRequest(operation_ids=operation_ids, open_only=open_only)
        call = PrefetchServiceStub(self._channel()).WatchOperations(request)
        async with aclosing(self._messages(call, max(self._timeout, _LEAST_IDLE_SECONDS))) as messages:
            async for message in messages:
                yield message

    async def list_operations(self, *, open_only: bool = False) -> list[prefetch_service_pb2.CacheOperation]:
        """Prefetches and backups of the rank, in the order in which they began."""
        stub = PrefetchServiceStub(self._channel())

        async def page(token: str) -> tuple[Iterable[prefetch_service_pb2.CacheOperation], str]:
            request = prefetch_service_pb2.ListOperationsRequest(page_token=token, page_size=1000, open_only=open_only)
            response = await self._read(stub.ListOperations, request)
            return response.operations, response.next_page_token

        return await _pages(page)

    async def get_cache_info(self) -> prefetch_service_pb2.GetCacheInfoResponse:
        """Returns what the rank's cache is made of, and how full its tiers are."""
        stub = PrefetchServiceStub(self._channel())
        request = prefetch_service_pb2.GetCacheInfoRequest()
        response: prefetch_service_pb2.GetCacheInfoResponse = await self._read(stub.GetCacheInfo, request)
        return response

    async def list_pulls(self, *, open_only: bool = False) -> pull_service_pb2.ListPullsResponse:
        """Returns what the rank took from other engines' host caches and lent to them: in flight, then the last that
        ended."""
        request = pull_service_pb2.ListPullsRequest(open_only=open_only)
        response: pull_service_pb2.ListPullsResponse = await self._read(
            PullServiceStub(self._channel()).ListPulls, request
        )
        return response

    async def purge_pages(
        self, request: prefetch_service_pb2.PurgePagesRequest
    ) -> prefetch_service_pb2.PurgePagesResponse:
        """Drops pages that nobody uses; how many went."""
        stub = PrefetchServiceStub(self._channel())
        response: prefetch_service_pb2.PurgePagesResponse = await self._read(stub.PurgePages, request)
        return response

    async def pin_pages(
        self, pages: prefetch_service_pb2.PromptPages, seconds: float
    ) -> prefetch_service_pb2.PinPagesResponse:
        """Keeps the leading pages that device and host have from eviction; 0 seconds end it."""
        check_seconds("seconds", seconds)
        request = prefetch_service_pb2.PinPagesRequest(pages=pages)
        request.duration.FromMicroseconds(round(seconds * 1e6))
        response: prefetch_service_pb2.PinPagesResponse = await self._read(
            PrefetchServiceStub(self._channel()).PinPages, request
        )
        return response

    # The process.

    async def get_server_info(self) -> server_service_pb2.GetServerInfoResponse:
        """Returns who this is, since when, and what it can do."""
        stub = ServerServiceStub(self._channel())
        request = server_service_pb2.GetServerInfoRequest()
        response: server_service_pb2.GetServerInfoResponse = await self._read(stub.GetServerInfo, request)
        return response

    async def drain(self, grace: float = 30.0) -> server_service_pb2.DrainResponse:
        """Drains the process; returns when it is drained, at most some seconds after ``grace``."""
        check_seconds("grace", grace)
        request = server_service_pb2.DrainRequest()
        request.grace.FromMilliseconds(round(grace * 1000))
        stub = ServerServiceStub(self._channel())
        # The server takes 5 s more for the writes of rooms that it cancels.
        seconds = max(self._timeout, grace + 10.0)
        response: server_service_pb2.DrainResponse = await self._read(stub.Drain, request, seconds)
        return response

    async def undrain(self) -> None:
        """Takes a drain of the process back; one that does not drain stays as it is."""
        request = server_service_pb2.UndrainRequest()
        await self._read(ServerServiceStub(self._channel()).Undrain, request, max(self._timeout, _UNDRAIN_SECONDS))

    async def list_callers(self) -> list[server_service_pb2.Caller]:
        """Callers that have calls open at the process, follow it, or have rows there; ordered by name and address."""
        stub = ServerServiceStub(self._channel())

        async def page(token: str) -> tuple[Iterable[server_service_pb2.Caller], str]:
            request = server_service_pb2.ListCallersRequest(page_token=token, page_size=1000)
            response = await self._read(stub.ListCallers, request)
            return response.callers, response.next_page_token

        return await _pages(page)

    async def health(self, service: str = "") -> str:
        """ "SERVING" or "NOT_SERVING", of one service or (empty) of all together."""
        stub: Any = health_pb2_grpc.HealthStub(self._channel())
        response: health_pb2.HealthCheckResponse = await self._read(
            stub.Check, health_pb2.HealthCheckRequest(service=service)
        )
        return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)

    def _channel(self) -> grpc.aio.Channel:
        if self._outdated and self._opened is not None:
            retire(self._opened)
            self._opened = None
        if self._opened is None:
            self._outdated = False
            self._stamp = self._security.stamp
            self._opened = open_channel(self.address, self._security)
        return self._opened

    async def _messages(self, call: Any, seconds: float) -> AsyncGenerator[Any, None]:
        """Returns what a stream says until it ends, or is silent for so long."""
        stream = StallDetector(call, seconds)
        try:
            while (message := await stream.next_message()) is not None:
                yield message
        except grpc.aio.AioRpcError as error:
            raise self._domain_error(error) from None
        except TimeoutError as error:
            raise PeerUnreachable(f"{self.address}: {error}", metadata={"address": self.address}) from None
        finally:
            stream.close()
            call.cancel()

    async def _ask_index(self, name: str, request: Any, once_within: float | None) -> Any:
        method = getattr(IndexServiceStub(self._channel()), name)
        return await (self._read(method, request) if once_within is None else self._once(method, request, once_within))

    async def _read(self, method: Callable[..., Any], request: Any, timeout: float | None = None) -> Any:
        return await repeated(lambda seconds: self._once(method, request, seconds), timeout or self._timeout)

    async def _once(self, method: Callable[..., Any], request: Any, seconds: float) -> Any:
        try:
            return await method(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            self._outdated = self._security.stamp != self._stamp
            raise self._domain_error(error) from None

    def _domain_error(self, error: grpc.aio.AioRpcError) -> KvGrpcError:
        known = error_from(error)
        silent = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        if silent and known.reason == KvGrpcError.reason:
            text = f"nobody answered at {self.address}: {error.details() or error.code().name}"
            return PeerUnreachable(text, metadata={"address": self.address})
        return known


async def _pages(page: Callable[[str], Awaitable[tuple[Iterable[T], str]]], most_pages: int | None = None) -> list[T]:
    found: list[T] = []
    token, pages, seen = "", 0, set[str]()
    while True:
        rows, token = await page(token)
        found.extend(rows)
        pages += 1
        if not token or pages == most_pages:
            return found
        if token in seen:
            raise KvGrpcError("the server names a page that it named before: its list has no end")
        seen.add(token)
        await asyncio.sleep(0)
