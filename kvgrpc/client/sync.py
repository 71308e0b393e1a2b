"""The same client for code without an event loop: each call runs on the process's loop thread and blocks."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvgrpc.client.aio import Client
from kvgrpc.client.engines import Engines
from kvgrpc.client.sources import Sources
from kvgrpc.client.watch import WatchPart
from kvgrpc.errors import PeerUnreachable
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.rpc.within import check_seconds
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

if TYPE_CHECKING:
    from kvgrpc.client.fleet import RankAnswer
    from kvgrpc.client.sync_follower import SyncEventFollower

T = TypeVar("T")
_MARGIN_SECONDS = 5.0
_ENGINE_MARGIN_SECONDS = 15.0
# Each rank has its own timeout; thousands of them that do not answer are asked one after another.
_FLEET_SECONDS = 600.0


class SyncClient:
    """``Client`` for plain code and any thread but the loop's own: ``with SyncClient("127.0.0.1:8998") as client``."""

    def __init__(self, address: str, security: ClientSecurity | None = None, timeout: float = 10.0) -> None:
        self._client = Client(address, security, timeout)
        self._security = security
        self._seconds = timeout + _MARGIN_SECONDS
        self._loop = LoopThread.shared()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        return self._client.address

    def close(self) -> None:
        """As ``Client.close``."""
        self._run(self._client.close())

    def list_engines(
        self, *, role: common_pb2.Role.ValueType = common_pb2.ROLE_UNSPECIFIED, include_rows: bool = False
    ) -> Engines:
        """As ``Client.list_engines``."""
        return self._run(self._client.list_engines(role=role, include_rows=include_rows))

    def get_engine(self, engine: str) -> registry_service_pb2.Engine:
        """As ``Client.get_engine``."""
        return self._run(self._client.get_engine(engine))

    def resolve_ranks(
        self,
        engine: str,
        role: common_pb2.Role.ValueType,
        selectors: Sequence[registry_service_pb2.RankSelector] = (),
        wait_ready: bool = False,
    ) -> registry_service_pb2.Engine:
        """As ``Client.resolve_ranks``."""
        return self._run(self._client.resolve_ranks(engine, role, selectors, wait_ready))

    def watch_engines(
        self,
        *,
        engine: str = "",
        role: common_pb2.Role.ValueType = common_pb2.ROLE_UNSPECIFIED,
        without_pools: bool = False,
    ) -> Iterator[registry_service_pb2.WatchEnginesResponse]:
        """As ``Client.watch_engines``; blocks for each message (one comes each 5 seconds)."""
        messages = self._client.watch_engines(engine=engine, role=role, without_pools=without_pools)
        return self._iterate(messages, self._seconds + _ENGINE_MARGIN_SECONDS)

    def list_sessions(self) -> list[transfer_service_pb2.Session]:
        """As ``Client.list_sessions``."""
        return self._run(self._client.list_sessions())

    def list_newest_failed_rooms(self, most: int = 256) -> list[transfer_service_pb2.Room]:
        """As ``Client.list_newest_failed_rooms``."""
        return self._run(self._client.list_newest_failed_rooms(most))

    def list_rooms(
        self,
        *,
        states: Sequence[transfer_service_pb2.RoomState.ValueType] = (),
        held_only: bool = False,
        most_pages: int | None = None,
    ) -> list[transfer_service_pb2.Room]:
        """As ``Client.list_rooms``."""
        return self._run(self._client.list_rooms(states=states, held_only=held_only, most_pages=most_pages))

    def count_rooms(self, *, states: Sequence[transfer_service_pb2.RoomState.ValueType] = ()) -> int:
        """As ``Client.count_rooms``."""
        return self._run(self._client.count_rooms(states=states))

    def ask_ranks(self, call: Callable[[Client], Awaitable[T]], timeout: float | None = None) -> list[RankAnswer[T]]:
        """As ``Client.ask_ranks``."""
        return self._loop.run(self._client.ask_ranks(call, timeout), _FLEET_SECONDS)

    def get_room(self, room: int, attempt: int = 0) -> transfer_service_pb2.Room:
        """As ``Client.get_room``."""
        return self._run(self._client.get_room(room, attempt))

    def cancel_room(self, room: int, attempt: int = 0, cause: str = "") -> transfer_service_pb2.Room:
        """As ``Client.cancel_room``."""
        return self._run(self._client.cancel_room(room, attempt, cause))

    def get_topology(
        self, prefill: transfer_service_pb2.EngineShape, decode: transfer_service_pb2.EngineShape
    ) -> list[transfer_service_pb2.OwedPart]:
        """As ``Client.get_topology``."""
        return self._run(self._client.get_topology(prefill, decode))

    def get_rank(self) -> transfer_service_pb2.GetRankResponse:
        """As ``Client.get_topology``."""
        return self._run(self._client.get_rank())

    def list_streams(self) -> list[event_service_pb2.EventStream]:
        """As ``Client.list_streams``."""
        return self._run(self._client.list_streams())

    def watch(
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
    ) -> Iterator[WatchPart]:
        """As ``Client.watch``; blocks for each part (heartbeats come each second)."""
        parts = self._client.watch(
            mode=mode,
            engine=engine,
            dp=dp,
            log_id=log_id,
            from_sequence=from_sequence,
            end_sequence=end_sequence,
            typed=typed,
            tiers=tiers,
            groups=groups,
        )
        return self._iterate(parts)

    def follow(self, *, engine: str = "", dp: int = 0, live: bool = False) -> SyncEventFollower:
        """A follower of one stream of the process, to be started: ``with client.follow() as follower``."""
        from kvgrpc.client.sync_follower import SyncEventFollower

        return SyncEventFollower(self.address, engine=engine, dp=dp, live=live, security=self._security)

    def score(self, request: index_service_pb2.ScoreRequest) -> index_service_pb2.ScoreResponse:
        """As ``Client.score``."""
        return self._run(self._client.score(request))

    def list_sources(self, *, states: Sequence[index_service_pb2.IndexSourceState.ValueType] = ()) -> Sources:
        """As ``Client.list_sources``."""
        return self._run(self._client.list_sources(states=states))

    def lookup(
        self, pages: prefetch_service_pb2.PromptPages, *, without_storage: bool = False
    ) -> prefetch_service_pb2.LookupResponse:
        """As ``Client.lookup``."""
        return self._run(self._client.lookup(pages, without_storage=without_storage))

    def start_prefetch(
        self,
        pages: prefetch_service_pb2.PromptPages,
        *,
        request_id: str = "",
        timeout: float | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> prefetch_service_pb2.CacheOperation:
        """As ``Client.start_prefetch``."""
        return self._run(
            self._client.start_prefetch(pages, request_id=request_id, timeout=timeout, priority=priority, tenant=tenant)
        )

    def start_backup(
        self,
        pages: prefetch_service_pb2.PromptPages,
        *,
        request_id: str = "",
        timeout: float | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> prefetch_service_pb2.CacheOperation:
        """As ``Client.start_backup``."""
        return self._run(
            self._client.start_backup(pages, request_id=request_id, timeout=timeout, priority=priority, tenant=tenant)
        )

    def terminate_prefetch(self, operation_id: str) -> prefetch_service_pb2.CacheOperation:
        """As ``Client.terminate_prefetch``."""
        return self._run(self._client.terminate_prefetch(operation_id))

    def watch_operations(
        self, operation_ids: Sequence[str] = (), *, open_only: bool = False
    ) -> Iterator[prefetch_service_pb2.WatchOperationsResponse]:
        """As ``Client.watch_operations``; blocks for each message (one comes each second at least)."""
        return self._iterate(self._client.watch_operations(operation_ids, open_only=open_only))

    def list_operations(self, *, open_only: bool = False) -> list[prefetch_service_pb2.CacheOperation]:
        """As ``Client.list_operations``."""
        return self._run(self._client.list_operations(open_only=open_only))

    def get_cache_info(self) -> prefetch_service_pb2.GetCacheInfoResponse:
        """As ``Client.get_cache_info``."""
        return self._run(self._client.get_cache_info())

    def list_pulls(self, *, open_only: bool = False) -> pull_service_pb2.ListPullsResponse:
        """As ``Client.list_pulls``."""
        return self._run(self._client.list_pulls(open_only=open_only))

    def purge_pages(self, request: prefetch_service_pb2.PurgePagesRequest) -> prefetch_service_pb2.PurgePagesResponse:
        """As ``Client.purge_pages``."""
        return self._run(self._client.purge_pages(request))

    def pin_pages(
        self, pages: prefetch_service_pb2.PromptPages, seconds: float
    ) -> prefetch_service_pb2.PinPagesResponse:
        """As ``Client.pin_pages``."""
        return self._run(self._client.pin_pages(pages, seconds))

    def get_server_info(self) -> server_service_pb2.GetServerInfoResponse:
        """As ``Client.get_server_info``."""
        return self._run(self._client.get_server_info())

    def drain(self, grace: float = 30.0) -> server_service_pb2.DrainResponse:
        """As ``Client.drain``."""
        check_seconds("grace", grace)
        return self._run(self._client.drain(grace), self._seconds + 2 * grace)

    def health(self, service: str = "") -> str:
        """As ``Client.health``."""
        return self._run(self._client.health(service))

    def _iterate(self, parts: AsyncIterator[T], seconds: float | None = None) -> Iterator[T]:
        ended = object()

        async def following() -> object:
            return await anext(parts, ended)

        async def close() -> None:
            await parts.aclose()  # type: ignore[attr-defined]  # it is an async generator

        try:
            while True:
                part = self._run(following(), seconds)
                if part is ended:
                    return
                yield part  # type: ignore[misc]  # the sentinel is the only other value
        finally:
            # A program may end without closing it; the loop's thread no longer runs then.
            if not sys.is_finalizing():
                self._run(close())

    def _run(self, coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        try:
            return self._loop.run(coroutine, seconds or self._seconds)
        except TimeoutError as error:
            raise PeerUnreachable(f"{self.address}: {error}", metadata={"address": self.address}) from None
