"""The same followers for code without an event loop: they live on the process's loop thread, each call asks there."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from kvgrpc.client.following.follower import EventFollower
from kvgrpc.client.following.prefix_index import ANY_LABELS, EVERY_CACHE, PrefixIndex
from kvgrpc.events.following.index import Match
from kvgrpc.events.following.messages import FollowerCounts, FollowerState
from kvgrpc.events.following.planning import Placement, PlanQuestion
from kvgrpc.events.following.sources import CacheScore, Freshness, Question, Source, Wanted
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.rpc.within import check_seconds

T = TypeVar("T")
_ASK_SECONDS = 10.0


class SyncEventFollower:
    """``EventFollower`` for plain code, from any thread: ``with SyncEventFollower("127.0.0.1:50051") as follower``."""

    def __init__(
        self,
        address: str,
        *,
        engine: str = "",
        dp: int = 0,
        live: bool = False,
        security: ClientSecurity | None = None,
    ) -> None:
        self._loop = LoopThread.shared()
        self._follower = _on(
            self._loop, lambda: EventFollower(address, engine=engine, dp=dp, live=live, security=security)
        )

    def __enter__(self) -> SyncEventFollower:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """See ``EventFollower.start``."""
        self._loop.run(self._follower.start(), _ASK_SECONDS)

    def close(self) -> None:
        """See ``EventFollower.close``."""
        self._loop.run(self._follower.close(), _ASK_SECONDS)

    @property
    def cache(self) -> tuple[str, int]:
        """See ``EventFollower.cache``."""
        return self._follower.cache

    @property
    def state(self) -> FollowerState:
        """See ``EventFollower.state``."""
        return self._follower.state

    @property
    def freshness(self) -> Freshness:
        """See ``EventFollower.freshness``."""
        return _on(self._loop, lambda: self._follower.freshness)

    @property
    def counts(self) -> FollowerCounts:
        """See ``EventFollower.counts``."""
        return self._follower.counts

    @property
    def last_error(self) -> Exception | None:
        """See ``EventFollower.last_error``."""
        return self._follower.last_error

    @property
    def lasting(self) -> bool:
        """See ``EventFollower.lasting``."""
        return self._follower.lasting

    @property
    def blocks(self) -> dict[str, int]:
        """See ``EventFollower.blocks``."""
        return _on(self._loop, lambda: self._follower.blocks)

    def match(self, hashes: Iterable[int | bytes]) -> Match:
        """See ``EventFollower.match``."""
        asked = list(hashes)
        return _on(self._loop, lambda: self._follower.match(asked))

    def media_of(self, block: int | bytes) -> frozenset[str]:
        """See ``EventFollower.media_of``."""
        return _on(self._loop, lambda: self._follower.media_of(block))

    def until_current(self, timeout: float = 30.0) -> None:
        """See ``EventFollower.until_current``."""
        check_seconds("timeout", max(timeout, 0.0), math.inf)
        self._loop.run(self._follower.until_current(timeout), max(timeout, 0.0) + _ASK_SECONDS)


class SyncPrefixIndex:
    """``PrefixIndex`` for plain code, from any thread: ``with SyncPrefixIndex(registry="127.0.0.1:8998") as index``."""

    def __init__(
        self,
        *,
        registry: str = "",
        sources: Sequence[str] = (),
        live: bool = False,
        security: ClientSecurity | None = None,
        saved: str = "",
    ) -> None:
        self._loop = LoopThread.shared()
        self._index = PrefixIndex(registry=registry, sources=sources, live=live, security=security, saved=saved)

    def __enter__(self) -> SyncPrefixIndex:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """See ``PrefixIndex.start``."""
        self._loop.run(self._index.start(), _ASK_SECONDS)

    def close(self) -> None:
        """See ``PrefixIndex.close``."""
        self._loop.run(self._index.close(), _ASK_SECONDS)

    def score(
        self,
        hashes: Sequence[int],
        engines: Collection[str] = (),
        most: int = 0,
        *,
        model: str = "",
        labels: Mapping[str, str] = ANY_LABELS,
    ) -> list[CacheScore]:
        """See ``PrefixIndex.score``."""
        return _on(self._loop, lambda: self._index.score(hashes, engines, most, model=model, labels=labels))

    def ask(self, question: Question, wanted: Wanted) -> list[CacheScore]:
        """See ``PrefixIndex.ask``."""
        return _on(self._loop, lambda: self._index.ask(question, wanted))

    def plan(
        self, questions: Sequence[PlanQuestion], wanted: Wanted = EVERY_CACHE, *, reserve: bool = False
    ) -> list[list[Placement]]:
        """See ``PrefixIndex.plan``."""
        return _on(self._loop, lambda: self._index.plan(questions, wanted, reserve=reserve))

    def not_followed(self) -> list[str]:
        """See ``PrefixIndex.not_followed``."""
        return _on(self._loop, self._index.not_followed)

    def sources(self) -> list[Source]:
        """See ``PrefixIndex.sources``."""
        return _on(self._loop, self._index.sources)

    def until_current(self, caches: int = 1, timeout: float = 30.0) -> None:
        """See ``PrefixIndex.until_current``."""
        check_seconds("timeout", max(timeout, 0.0), math.inf)
        self._loop.run(self._index.until_current(caches, timeout), max(timeout, 0.0) + _ASK_SECONDS)


def _on(loop: LoopThread, ask: Callable[[], T]) -> T:
    async def there() -> T:
        return ask()

    coroutine: Coroutine[Any, Any, T] = there()
    return loop.run(coroutine, _ASK_SECONDS)
