"""Followers of engines: readers of WatchEngines, each at its own speed, none able to hold another or to grow."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvgrpc.errors import ServerDraining, TooManyRequests
from kvgrpc.observability import metrics
from kvgrpc.registry.feed import Feed
from kvgrpc.registry.model import EngineChange, EngineFilter
from kvgrpc.registry.store.base import Store
from kvgrpc.registry.table import EngineTable
from kvgrpc.registry.wire import PoolCache
from kvgrpc.rpc.callers import NewsReader, Who, who
from kvgrpc.v1 import registry_service_pb2 as pb

MAX_WATCHERS = 8_192
HEARTBEAT_SECONDS = 5.0
# Changes that follow each other faster are gathered: what 10,000 ranks that register cause must not be multiplied by
# what follows them.
PACE_SECONDS = 0.02

_METHOD = "/kvgrpc.v1.RegistryService/WatchEngines"
_WARMING_UP = pb.WatchEnginesResponse(warming_up=True).SerializeToString()


class Watching:
    """The readers of one registry. Lives on one event loop.

    A reader holds one message at a time, and a position in what all readers of its filter share.
    """

    def __init__(self, store: Store, pools: PoolCache, *, max_watchers: int = MAX_WATCHERS) -> None:
        self._store = store
        self._pools = pools
        self._max_watchers = max_watchers
        self._feeds: dict[EngineFilter, Feed] = {}
        self._reading: dict[_Reader, None] = {}
        self._waiting: list[EngineChange] = []
        self._resting = False
        self._draining = False

    @property
    def watchers(self) -> int:
        return sum(feed.readers for feed in self._feeds.values())

    def publish(self, changes: Sequence[EngineChange]) -> None:
        """Tells the readers: at once, or with what else comes within the pace."""
        if self._feeds:
            self._waiting.extend(changes)
            if not self._resting:
                self._publish_waiting()
                self._rest()

    def drain(self) -> None:
        """Ends all readers, now and later, with ServerDraining."""
        self._draining = True
        for feed in self._feeds.values():
            feed.wake()

    def undrain(self) -> None:
        self._draining = False

    def readers(self) -> Iterator[NewsReader]:
        """Each with the changes that it was not sent yet."""
        for reader in self._reading:
            behind = reader.feed.count_behind(reader.position)
            yield NewsReader(reader.caller, _METHOD, reader.since, behind)

    async def follow(self, only: EngineFilter) -> AsyncIterator[bytes]:
        """Encoded responses for one reader, without end. Raises TooManyRequests, ServerDraining."""
        with self._begun(only) as reader:
            feed, said = reader.feed, False
            while True:
                self._refuse_if_draining()
                messages, position = await feed.behind(reader.position)
                warming_up = self._store.warming_up_for > 0
                for message in messages or ([] if warming_up == said else [b""]):
                    yield message + _WARMING_UP if warming_up else message
                reader.position, said = position, warming_up
                if not messages and not await feed.change(self._until_next_message()):
                    yield _WARMING_UP if said else b""

    def _until_next_message(self) -> float:
        """Until the next message at the latest: a heartbeat, or that the registry knows everybody now."""
        warming_up_for = self._store.warming_up_for
        return min(warming_up_for or HEARTBEAT_SECONDS, HEARTBEAT_SECONDS)

    @contextmanager
    def _begun(self, only: EngineFilter) -> Iterator[_Reader]:
        if self.watchers >= self._max_watchers:
            raise TooManyRequests(
                f"{self.watchers} readers follow engines already",
                metadata={"limit": self._max_watchers, "value": self.watchers + 1, "scope": "watchers"},
                retry_after=1.0,
            )
        feed = self._feeds.get(only)
        if feed is None:
            feed = self._feeds[only] = Feed(only, self._table, self._pools)
        feed.readers += 1
        reader = _Reader(feed)
        self._reading[reader] = None
        metrics.REGISTRY_WATCH_READERS.inc()
        try:
            yield reader
        finally:
            del self._reading[reader]
            metrics.REGISTRY_WATCH_READERS.dec()
            feed.readers -= 1
            if not feed.readers:
                del self._feeds[only]

    def _table(self) -> EngineTable:
        """For a full state, which must not be ahead of what was published."""
        self._publish_waiting()
        return self._store.table

    def _publish_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        by_engine = defaultdict[str, list[EngineChange]](list)
        for change in waiting:
            by_engine[change.engine.name].append(change)
        for only, feed in self._feeds.items():
            told = by_engine.get(only.engine) if only.engine else waiting
            if told:
                feed.publish(told)

    def _rest(self) -> None:
        self._resting = True
        asyncio.get_running_loop().call_later(PACE_SECONDS, self._end_rest)

    def _end_rest(self) -> None:
        self._resting = False
        if self._waiting:
            self._publish_waiting()
            self._rest()

    def _refuse_if_draining(self) -> None:
        if self._draining:
            raise ServerDraining("the registry drains", retry_after=1.0)


@dataclass(slots=True, eq=False)
class _Reader:
    """A reader, and up to where all was handed to its stream; -1: nothing yet."""

    feed: Feed
    position: int = -1
    caller: Who = field(default_factory=who)
    since: float = field(default_factory=time.time)
