"""The caches that one index follows, and its two answers: who holds a prefix, and how each cache is known. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvgrpc.events.follower import FollowerCore
from kvgrpc.events.following import FollowerCounts, FollowerState
from kvgrpc.events.index import BlockIndex


@dataclass(frozen=True, slots=True)
class Freshness:
    """How fresh the contents of one cache are; ``silence`` is seconds since the publisher was heard, None: never."""

    state: FollowerState
    log_id: str
    next_sequence: int
    lag: int
    silence: float | None
    whole: bool


@dataclass(frozen=True, slots=True)
class CacheScore:
    """How many leading blocks one cache holds: on the device, on device or host, anywhere."""

    engine: str
    dp: int
    device_blocks: int
    host_blocks: int
    blocks: int
    freshness: Freshness


@dataclass(frozen=True, slots=True)
class Source:
    """One cache that is followed."""

    engine: str
    dp: int
    address: str
    live: bool
    freshness: Freshness
    blocks: dict[str, int]
    page_size: int
    counts: FollowerCounts
    last_error: str


@dataclass(frozen=True, slots=True)
class _Followed:
    core: FollowerCore
    address: str
    live: bool


class SourceTable:
    """Followers by (engine, dp), over one index. Belongs to one thread; ``now`` is on the followers' clock."""

    def __init__(self) -> None:
        self.index = BlockIndex()
        self._followed: dict[tuple[str, int], _Followed] = {}

    def add(self, engine: str, dp: int, core: FollowerCore, address: str, *, live: bool) -> None:
        """Follows one more cache; in the place of the same one's earlier follower, which was stopped."""
        self._followed[engine, dp] = _Followed(core, address, live)

    def remove(self, engine: str, dp: int) -> None:
        """The cache is not followed any more."""
        self._followed.pop((engine, dp), None)

    def score(self, hashes: Sequence[int], engines: Collection[str], now: float) -> list[CacheScore]:
        """The caches (of these engines; none named: of all) that hold the first block, those with most blocks first."""
        matches = self.index.score(hashes)
        scores = []
        for (engine, dp), followed in self._followed.items():
            contents = followed.core.contents
            match = None if contents is None else matches.get(contents.blocks)
            if match is not None and (not engines or engine in engines):
                fresh = freshness(followed.core, now)
                scores.append(CacheScore(engine, dp, match.device, match.host, match.storage, fresh))
        scores.sort(key=lambda score: (-score.blocks, -score.device_blocks, score.engine, score.dp))
        return scores

    def sources(self, now: float) -> list[Source]:
        """All caches, by engine and dp."""
        return [self._source(*key, self._followed[key], now) for key in sorted(self._followed)]

    def _source(self, engine: str, dp: int, followed: _Followed, now: float) -> Source:
        core, contents = followed.core, followed.core.contents
        return Source(
            engine,
            dp,
            followed.address,
            followed.live,
            freshness(core, now),
            {} if contents is None else contents.blocks.counts(),
            0 if contents is None else contents.page_size,
            core.counts,
            "" if core.last_error is None else str(core.last_error),
        )


def freshness(core: FollowerCore, now: float) -> Freshness:
    """How fresh the contents of a follower are."""
    silence = None if core.heard_at is None else max(0.0, now - core.heard_at)
    whole = core.contents is not None and core.contents.whole
    return Freshness(core.state, core.log_id, core.next_sequence, core.lag, silence, whole)
