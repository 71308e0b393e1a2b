"""The caches that one index follows, and its two answers: who holds a prefix, and how each cache is known. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvgrpc.errors import InvalidRequest
from kvgrpc.events.following.contents import CacheContents
from kvgrpc.events.following.follower import FollowerCore
from kvgrpc.events.following.index import BlockIndex, Match
from kvgrpc.events.following.messages import FollowerCounts, FollowerState
from kvgrpc.events.following.saved import SavedCut
from kvgrpc.model import EngineLoad

# Names and values of what the registry says of a cache's rank.
LabelSet = frozenset[tuple[str, str]]
NO_LABELS: LabelSet = frozenset()


class Freshness(NamedTuple):
    """The freshness of one cache's contents; ``idle_time`` is seconds since the publisher was heard, None: never."""

    state: FollowerState
    log_id: str
    next_sequence: int
    lag: int
    idle_time: float | None
    whole: bool


class CacheScore(NamedTuple):
    """Leading blocks that one cache holds: on the device, on device or host, there or on its disk, anywhere.

    ``page_tokens``: tokens of one of its blocks, 0: not told yet. ``freshness``: None where nobody asked.
    """

    engine: str
    dp: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    blocks: int
    page_tokens: int
    freshness: Freshness | None


class Holding(NamedTuple):
    """The part of a request that one cache has: leading blocks by how far one has to reach for them, and those on the
    host itself, which it can lend. ``blocks``: of the request; ``load``: of its engine, None: not told."""

    engine: str
    dp: int
    match: Match
    lendable: int
    page_tokens: int
    blocks: int
    load: EngineLoad | None


class Question(NamedTuple):
    """The beginning of one request.

    ``chains``: its hashes by the tokens of a cache's block; under 0 for every cache that has no chain of its own. These
    are ``step`` tokens apart (0: a block): block i of a cache of k steps to a block is hash (i+1)k-1. ``model``: only
    caches of engines that run it; "": of any, if all that are asked run one. ``field``: its name in a refusal.
    ``labels``: only caches of ranks that have all of these, names and values.
    """

    chains: Mapping[int, Sequence[int]]
    model: str = ""
    step: int = 0
    field: str = "model"
    labels: LabelSet = NO_LABELS


class Wanted(NamedTuple):
    """Selects caches, and fields of each: only those of these engines (none named: of all), the ``most`` best (0:
    all), those that were exact at most ``max_staleness`` seconds ago (None: all)."""

    engines: Collection[str] = ()
    most: int = 0
    freshness: bool = True
    max_staleness: float | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """One cache that is followed."""

    engine: str
    dp: int
    address: str
    live: bool
    freshness: Freshness
    model: str
    blocks: dict[str, int]
    page_tokens: int
    counts: FollowerCounts
    last_error: str
    labels: LabelSet = NO_LABELS


@dataclass(slots=True)
class SourcesPage:
    """Some of the caches that are followed, by engine and dp, and how many of all are in which state. ``more``: there
    are others behind these."""

    sources: list[Source] = field(default_factory=list)
    counts: Counter[FollowerState] = field(default_factory=Counter)
    more: bool = False


@dataclass(frozen=True, slots=True)
class _Followed:
    core: FollowerCore
    address: str
    live: bool
    model: str
    labels: LabelSet


# Half a millisecond or less.
_SOURCES_OF_A_STEP = 64
_NOTHING = Match(0, 0, 0, 0)
_Key = tuple[str, int]
_Asked = tuple[_Key, _Followed, CacheContents]


class _Chain(NamedTuple):
    """Hashes, every how many is a block, and how many tokens lie between two (0: a block)."""

    hashes: Sequence[int]
    stride: int
    step: int


_NO_CHAIN = _Chain((), 1, 0)
_Class = tuple[_Chain, dict[_Key, _Asked] | None]


class SourceTable:
    """Followers by (engine, dp), over one index. Belongs to one thread; ``now`` is on the followers' clock."""

    def __init__(self) -> None:
        self.index = BlockIndex()
        self._followed: dict[tuple[str, int], _Followed] = {}

    def add(
        self,
        engine: str,
        dp: int,
        core: FollowerCore,
        address: str,
        *,
        live: bool,
        model: str = "",
        labels: LabelSet = NO_LABELS,
    ) -> None:
        """Follows one more cache; in the place of the same one's earlier follower, which was stopped."""
        self._followed[engine, dp] = _Followed(core, address, live, model, labels)

    def remove(self, engine: str, dp: int) -> None:
        """The cache is not followed any more."""
        self._followed.pop((engine, dp), None)

    def page_sizes(
        self, wanted: Wanted, model: str = "", field: str = "model", labels: LabelSet = NO_LABELS
    ) -> set[int]:
        """Tokens of a block of the caches that would be asked, where they told it."""
        question = Question({}, model, 0, field, labels)
        return {contents.page_tokens for _, _, contents in self._asked(wanted, question) if contents.page_tokens}

    def score(self, question: Question, wanted: Wanted, now: float) -> list[CacheScore]:
        """The caches that hold the first block, those with most tokens first. Raises InvalidRequest where no model is
        named and the caches are of several."""
        found = []
        for (hashes, stride, step), asked in self._classes(question, wanted):
            strided = hashes if stride == 1 else hashes[stride - 1 :: stride]
            matches = self.index.score(strided, None if asked is None else [each[2].blocks for each in asked.values()])
            for key, followed, contents in self._asked(wanted, question) if asked is None else asked.values():
                match = matches.get(contents.blocks)
                if match is None:
                    continue
                match = contents.match(match, hashes, step)
                if match.storage and not _is_stale(followed.core, wanted.max_staleness, now):
                    tokens = match.storage * (contents.page_tokens or 1)
                    found.append((-tokens, -match.device, key, match, contents.page_tokens, followed.core))
        # No two are of one engine and dp, so cores are never compared.
        found.sort()
        return [
            CacheScore(*key, *match, page_tokens, freshness(core, now) if wanted.freshness else None)
            for _, _, key, match, page_tokens, core in found[: wanted.most or None]
        ]

    def holdings(self, question: Question, wanted: Wanted, now: float) -> list[Holding]:
        """Returns what each of these caches that answer has of a request, those that have nothing too.

        Nobody is sent to, nor pulls from, one that does not answer. Raises as ``score``.
        """
        found = []
        for size, caches in self._by_size(question, wanted, now).items():
            hashes, stride, step = _chain(question, size) or _NO_CHAIN
            strided = hashes if stride == 1 else hashes[stride - 1 :: stride]
            sets = [contents.blocks for _, contents in caches.values()]
            matches, on_host = self.index.score(strided, sets), self.index.on_host(strided, sets)
            for key, (followed, contents) in caches.items():
                match = matches.get(contents.blocks, _NOTHING)
                if match.storage:
                    match = contents.match(match, hashes, step)
                lendable = min(on_host.get(contents.blocks, 0), match.host)
                found.append(Holding(*key, match, lendable, size, len(strided), followed.core.load))
        return found

    def _by_size(
        self, question: Question, wanted: Wanted, now: float
    ) -> dict[int, dict[_Key, tuple[_Followed, CacheContents]]]:
        """These caches by the tokens of their blocks; one that has told of no block yet has those of the others, where
        these agree."""
        by_size: dict[int, dict[_Key, tuple[_Followed, CacheContents]]] = {}
        for key, followed, contents in self._asked(wanted, question):
            is_away = followed.core.state is FollowerState.CONNECTING
            if not is_away and not _is_stale(followed.core, wanted.max_staleness, now):
                load = followed.core.load
                size = contents.page_tokens or (0 if load is None else load.page_tokens)
                by_size.setdefault(size, {})[key] = followed, contents
        if 0 in by_size and len(by_size) == 2:
            unknown = by_size.pop(0)
            (known,) = by_size.values()
            known |= unknown
        return by_size

    def _classes(self, question: Question, wanted: Wanted) -> Iterator[_Class]:
        """Yields what fits caches of one page size, and these caches; None: all."""
        if list(question.chains) == [0] and not question.step:
            yield _Chain(question.chains[0], 1, 0), None
            return
        by_size: dict[int, dict[_Key, _Asked]] = {}
        for asked in self._asked(wanted, question):
            by_size.setdefault(asked[2].page_tokens, {})[asked[0]] = asked
        for size, caches in by_size.items():
            chain = _chain(question, size)
            if chain is not None:
                yield chain, caches

    def _asked(self, wanted: Wanted, question: Question) -> Iterator[_Asked]:
        models, model = set(), question.model
        for key, followed in self._followed.items():
            if (wanted.engines and key[0] not in wanted.engines) or not question.labels <= followed.labels:
                continue
            if model:
                if followed.model != model:
                    continue
            elif followed.model:
                models.add(followed.model)
                if len(models) > 1:
                    named = " or ".join(sorted(models))
                    raise InvalidRequest.of(question.field, "", f"the model's name: these caches are of {named}")
            if followed.core.contents is not None:
                yield key, followed, followed.core.contents

    def sources(self, now: float) -> list[Source]:
        """All caches, by engine and dp."""
        return [self._source(*key, self._followed[key], now) for key in sorted(self._followed)]

    def page_in_steps(
        self,
        page: SourcesPage,
        clock: Callable[[], float],
        *,
        after: tuple[str, int] | None,
        states: Collection[FollowerState],
        most: int,
    ) -> Iterator[None]:
        """Fills ``page`` with at most so many of those behind ``after`` (None: from the first on) in one of these
        states (none: in any), and yields wherever others may go on before it is ready."""
        for number, key in enumerate(sorted(self._followed), 1):
            followed = self._followed.get(key)
            if followed is not None:
                state = followed.core.state
                page.counts[state] += 1
                if (after is None or key > after) and (not states or state in states):
                    page.more = len(page.sources) >= most
                    if not page.more:
                        page.sources.append(self._source(*key, followed, clock()))
            if not number % _SOURCES_OF_A_STEP:
                yield

    def cut(self) -> SavedCut:
        """All of it that may be known again later, as it is now."""
        numbers, holders = self.index.cut()
        saved = (followed.core.saved(*key) for key, followed in self._followed.items())
        return SavedCut([cache for cache in saved if cache is not None], numbers, holders)

    def _source(self, engine: str, dp: int, followed: _Followed, now: float) -> Source:
        core, contents = followed.core, followed.core.contents
        return Source(
            engine,
            dp,
            followed.address,
            followed.live,
            freshness(core, now),
            followed.model,
            {} if contents is None else contents.blocks.counts(),
            0 if contents is None else contents.page_tokens,
            core.counts,
            "" if core.last_error is None else str(core.last_error),
            followed.labels,
        )


def _chain(question: Question, size: int) -> _Chain | None:
    """Returns what fits caches of blocks of so many tokens (0: not told yet); None: nothing does."""
    if size and size in question.chains:
        return _Chain(question.chains[size], 1, 0)
    step = question.step or size or 1
    if 0 not in question.chains or size % step:
        return None
    return _Chain(question.chains[0], max(1, size // step), question.step)


def _is_stale(core: FollowerCore, most: float | None, now: float) -> bool:
    return most is not None and (core.exact_at is None or now - core.exact_at > most)


def freshness(core: FollowerCore, now: float) -> Freshness:
    """Returns how fresh the contents of a follower are."""
    contents, known = core.contents, core.known_next
    idle_time = None if core.heard_at is None else max(0.0, now - core.heard_at)
    if contents is None:
        return Freshness(core.state, core.log_id, 0, known, idle_time, False)
    upcoming = contents.next_sequence
    whole = contents.whole and contents.doubtful_at is None
    return Freshness(core.state, core.log_id, upcoming, max(0, known - upcoming), idle_time, whole)
