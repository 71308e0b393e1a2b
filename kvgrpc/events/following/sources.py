"""The caches that one index follows, and its two answers: who holds a prefix, and how each cache is known. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvgrpc.events.following.follower import FollowerCore
from kvgrpc.events.following.index import BlockIndex
from kvgrpc.events.following.messages import FollowerCounts, FollowerState


class Freshness(NamedTuple):
    """How fresh the contents of one cache are; ``idle_time`` is seconds since the publisher was heard, None: never."""

    state: FollowerState
    log_id: str
    next_sequence: int
    lag: int
    idle_time: float | None
    whole: bool


class CacheScore(NamedTuple):
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
    page_tokens: int
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

    def score(self, hashes: Sequence[int], engines: Collection[str], now: float, most: int = 0) -> list[CacheScore]:
        """The caches (of these engines; none named: of all) that hold the first block, those with most blocks first.

        ``most``: at most so many; 0: all.
        """
        matches = self.index.score(hashes)
        found = []
        for (engine, dp), followed in self._followed.items():
            contents = followed.core.contents
            match = None if contents is None else matches.get(contents.blocks)
            if match is not None and (not engines or engine in engines):
                found.append((-match.storage, -match.device, engine, dp, match.host, followed.core))
        # No two are of one engine and dp, so cores are never compared.
        found.sort()
        return [
            CacheScore(engine, dp, -device, host, -blocks, freshness(core, now))
            for blocks, device, engine, dp, host, core in found[: most or None]
        ]

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
            0 if contents is None else contents.page_tokens,
            core.counts,
            "" if core.last_error is None else str(core.last_error),
        )


def freshness(core: FollowerCore, now: float) -> Freshness:
    """How fresh the contents of a follower are."""
    contents, known = core.contents, core.known_next
    idle_time = None if core.heard_at is None else max(0.0, now - core.heard_at)
    if contents is None:
        return Freshness(core.state, core.log_id, 0, known, idle_time, False)
    upcoming = contents.next_sequence
    whole = contents.whole and contents.doubtful_at is None
    return Freshness(core.state, core.log_id, upcoming, max(0, known - upcoming), idle_time, whole)
