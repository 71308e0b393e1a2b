"""The client for code without an event loop. Generated from ``aio.py`` by `make gen`: do not edit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvgrpc.client.aio import Client
from kvgrpc.client.blocking import BlockingClient
from kvgrpc.client.engines import Engines
from kvgrpc.client.sources import Sources
from kvgrpc.client.watch import WatchPart
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
    from kvgrpc.client.following.sync_follower import SyncEventFollower

T = TypeVar("T")


class SyncClient(BlockingClient):
    """``Client`` for plain code and any thread but the loop's own: ``with SyncClient("127.0.0.1:8998") as client``."""

    def follow(self, *, engine: str = "", dp: int = 0, live: bool = False) -> SyncEventFollower:
        """A follower of one stream of the process, to be started: ``with client.follow() as follower``."""
        from kvgrpc.client.following.sync_follower import SyncEventFollower

        return SyncEventFollower(self.address, engine=engine, dp=dp, live=live, security=self._security)

    def close(self) -> None:
        """Closes the connection; the client opens a new one when it is used again."""
        return self._run(self._client.close())

    def connect(self) -> None:
        """Begins to connect, which the first call would do. Waits for nothing."""
        return self._run(self._client.connect())

    def list_engines(
        self, *, role: common_pb2.Role.ValueType = common_pb2.ROLE_UNSPECIFIED, include_rows: bool = False
    ) -> Engines:
        """All engines, ordered by name; ``warming_up`` of the list says that there may be more."""
        return self._run(self._client.list_engines(role=role, include_rows=include_rows))

    def get_engine(self, engine: str) -> registry_service_pb2.Engine:
        """One engine with all of its rows."""
        return self._run(self._client.get_engine(engine))

    def resolve_ranks(
        self,
        engine: str,
        role: common_pb2.Role.ValueType,
        selectors: Sequence[registry_service_pb2.RankSelector] = (),
        wait_ready: bool = False,
    ) -> registry_service_pb2.Engine:
        """The engine with the selected rows; with ``wait_ready`` once it is READY."""
        return self._run(self._client.resolve_ranks(engine, role, selectors, wait_ready))

    def watch_engines(
        self,
        *,
        engine: str = "",
        role: common_pb2.Role.ValueType = common_pb2.ROLE_UNSPECIFIED,
        without_pools: bool = False,
    ) -> Iterator[registry_service_pb2.WatchEnginesResponse]:
        """The full state of the registry, then what changes. It is not resumed by itself: watch again.

        Raises PeerUnreachable when nothing comes for ``timeout`` seconds, at least 15 (a message comes each 5 seconds).
        Close the iterator (``contextlib.closing``) to end it early.
        """
        seconds = self._seconds_of_watch_engines(engine=engine, role=role, without_pools=without_pools)
        return self._iterate(self._client.watch_engines(engine=engine, role=role, without_pools=without_pools), seconds)

    def deregister(self, ranks: Sequence[common_pb2.RankRef]) -> int:
        """Removes the rows of these incarnations from the registry; how many were there. One that lives comes back with
        its next renewal."""
        return self._run(self._client.deregister(ranks))

    def list_sessions(self) -> list[transfer_service_pb2.Session]:
        """All sessions of the rank."""
        return self._run(self._client.list_sessions())

    def list_newest_failed_rooms(self, most: int = 256) -> list[transfer_service_pb2.Room]:
        """The rooms that failed last at the rank, the newest first; at most ``most`` of them."""
        return self._run(self._client.list_newest_failed_rooms(most))

    def list_slowest_rooms(self, most: int = 256) -> list[transfer_service_pb2.Room]:
        """Of the last 256 rooms that went well at the rank, those that took longest, the slowest first."""
        return self._run(self._client.list_slowest_rooms(most))

    def list_rooms(
        self,
        *,
        states: Sequence[transfer_service_pb2.RoomState.ValueType] = (),
        held_only: bool = False,
        most_pages: int | None = None,
    ) -> list[transfer_service_pb2.Room]:
        """The rooms of the rank, ordered by room and attempt; ``most_pages``: only the first pages of 1,000 rooms."""
        return self._run(self._client.list_rooms(states=states, held_only=held_only, most_pages=most_pages))

    def count_rooms(self, *, states: Sequence[transfer_service_pb2.RoomState.ValueType] = ()) -> int:
        """Returns how many rooms the rank knows, of these states or of all."""
        return self._run(self._client.count_rooms(states=states))

    def ask_ranks(self, call: Callable[[Client], Awaitable[T]], timeout: float | None = None) -> list[RankAnswer[T]]:
        """``Fleet.ask`` of the registry at this address: what ``call`` returns, or raises, for each of its ranks.

        ``timeout``: seconds that one answer may take, where that is not the client's.
        """
        seconds = self._seconds_of_ask_ranks(call, timeout)
        return self._run(self._client.ask_ranks(call, timeout), seconds)

    def get_room(self, room: int, attempt: int = 0) -> transfer_service_pb2.Room:
        """One room with its parts."""
        return self._run(self._client.get_room(room, attempt))

    def cancel_room(self, room: int, attempt: int = 0, cause: str = "") -> transfer_service_pb2.Room:
        """Cancels one room; it as it is now."""
        return self._run(self._client.cancel_room(room, attempt, cause))

    def get_topology(
        self, prefill: transfer_service_pb2.EngineShape, decode: transfer_service_pb2.EngineShape
    ) -> list[transfer_service_pb2.OwedPart]:
        """Returns which prefill ranks owe what to which decode ranks, for any two engines."""
        return self._run(self._client.get_topology(prefill, decode))

    def get_rank(self) -> transfer_service_pb2.GetRankResponse:
        """Returns who the rank is and the shapes of its pools."""
        return self._run(self._client.get_rank())

    def list_streams(self) -> list[event_service_pb2.EventStream]:
        """The event streams of the process."""
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
        """One Watch, from Begin on. Where a connection breaks it goes on behind the last batch, with the same log.

        ``typed``: messages instead of payloads, and then only events of these ``tiers`` and ``groups`` (empty: all). A
        batch, or a part of a snapshot, that would be a message above 4 MiB comes as payload even then, unfiltered.

        Raises PeerUnreachable, or what a server said when it went, once nothing could be heard for ``timeout`` seconds,
        at least 3 (heartbeats come each second); at once what refuses the first call, and what another call cannot mend
        (STALE_LOG, EVENTS_COMPACTED: ``follow`` mends these too). Close the iterator (``contextlib.closing``) to end
        the Watch early.
        """
        return self._iterate(
            self._client.watch(
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
        )

    def score(
        self, request: index_service_pb2.ScoreRequest, *, once_within: float | None = None
    ) -> index_service_pb2.ScoreResponse:
        """Returns who holds the beginnings of requests, of an index (``kvgrpc serve index``).

        ``once_within``: asked once, and for so many seconds at most.
        """
        return self._run(self._client.score(request, once_within=once_within))

    def plan(
        self, request: index_service_pb2.PlanRequest, *, once_within: float | None = None
    ) -> index_service_pb2.PlanResponse:
        """Returns where to run requests, and from whom to pull which part of their prompts; as ``score``.

        With ``reserve`` a repeated call may count a request twice, for the second until its engine tells what it has to
        do: ``once_within`` repeats none.
        """
        return self._run(self._client.plan(request, once_within=once_within))

    def list_sources(self, *, states: Sequence[index_service_pb2.IndexSourceState.ValueType] = ()) -> Sources:
        """The caches that an index follows, in these states (none: in all)."""
        return self._run(self._client.list_sources(states=states))

    def lookup(
        self, pages: prefetch_service_pb2.PromptPages, *, without_storage: bool = False
    ) -> prefetch_service_pb2.LookupResponse:
        """Returns how many leading pages of a prompt are on device, host and in storage."""
        return self._run(self._client.lookup(pages, without_storage=without_storage))

    def start_prefetch(
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
        return self._run(
            self._client.start_prefetch(
                pages, request_id=request_id, timeout=timeout, priority=priority, tenant=tenant, engines=engines
            )
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
        """Begins to write the leading pages that the host has to storage; otherwise as ``start_prefetch``."""
        return self._run(
            self._client.start_backup(pages, request_id=request_id, timeout=timeout, priority=priority, tenant=tenant)
        )

    def terminate_prefetch(self, operation_id: str) -> prefetch_service_pb2.CacheOperation:
        """Cuts an operation short; it as it is now, and whether it is quiescent."""
        return self._run(self._client.terminate_prefetch(operation_id))

    def watch_operations(
        self, operation_ids: Sequence[str] = (), *, open_only: bool = False
    ) -> Iterator[prefetch_service_pb2.WatchOperationsResponse]:
        """One watch, from the present state on; ends when the operations that are named have ended. Close it as
        ``watch``."""
        return self._iterate(self._client.watch_operations(operation_ids, open_only=open_only))

    def list_operations(self, *, open_only: bool = False) -> list[prefetch_service_pb2.CacheOperation]:
        """Prefetches and backups of the rank, in the order in which they began."""
        return self._run(self._client.list_operations(open_only=open_only))

    def get_cache_info(self) -> prefetch_service_pb2.GetCacheInfoResponse:
        """Returns what the rank's cache is made of, and how full its tiers are."""
        return self._run(self._client.get_cache_info())

    def list_pulls(self, *, open_only: bool = False) -> pull_service_pb2.ListPullsResponse:
        """Returns what the rank took from other engines' host caches and lent to them: in flight, then the last that
        ended."""
        return self._run(self._client.list_pulls(open_only=open_only))

    def purge_pages(self, request: prefetch_service_pb2.PurgePagesRequest) -> prefetch_service_pb2.PurgePagesResponse:
        """Drops pages that nobody uses; how many went."""
        return self._run(self._client.purge_pages(request))

    def pin_pages(
        self, pages: prefetch_service_pb2.PromptPages, seconds: float
    ) -> prefetch_service_pb2.PinPagesResponse:
        """Keeps the leading pages that device and host have from eviction; 0 seconds end it."""
        return self._run(self._client.pin_pages(pages, seconds))

    def get_server_info(self) -> server_service_pb2.GetServerInfoResponse:
        """Returns who this is, since when, and what it can do."""
        return self._run(self._client.get_server_info())

    def drain(self, grace: float = 30.0) -> server_service_pb2.DrainResponse:
        """Drains the process; returns when it is drained, at most some seconds after ``grace``."""
        seconds = self._seconds_of_drain(grace)
        return self._run(self._client.drain(grace), seconds)

    def undrain(self) -> None:
        """Takes a drain of the process back; one that does not drain stays as it is."""
        seconds = self._seconds_of_undrain()
        return self._run(self._client.undrain(), seconds)

    def list_callers(self) -> list[server_service_pb2.Caller]:
        """Callers that have calls open at the process, follow it, or have rows there; ordered by name and address."""
        return self._run(self._client.list_callers())

    def health(self, service: str = "") -> str:
        """ "SERVING" or "NOT_SERVING", of one service or (empty) of all together."""
        return self._run(self._client.health(service))
