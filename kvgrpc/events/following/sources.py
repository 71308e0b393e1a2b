"""The caches that one index follows, and its two answers: who holds a prefix, and how each cache is known. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from typing import NamedTuple

from kvgrpc.errors import InvalidRequest
from kvgrpc.events.following.contents import CacheContents
from kvgrpc.events.following.follower import FollowerCore
from kvgrpc.events.following.index import BlockIndex, BlockSet, Match
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
# What orders it, and what is told of it.
_Found = tuple[int, int, _Key, Match, int, FollowerCore]


class SourceTable:
    """Followers by (engine, dp), over one index. Belongs to one thread; ``now`` is on the followers' clock."""

    def __init__(self) -> None:
        self.index = BlockIndex()
        self._followed: dict[tuple[str, int], _Followed] = {}
        # Caches that run each model; those of which none is known are left out.
        self._models = Counter[str]()
        # Whose blocks the index shows. What is wrong, or missing, is seen when it is asked for.
        self._owners: dict[BlockSet, _Asked] = {}

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
        self.remove(engine, dp)
        self._followed[engine, dp] = _Followed(core, address, live, model, labels)
        if model:
            self._models[model] += 1

    def remove(self, engine: str, dp: int) -> None:
        """The cache is not followed any more."""
        followed = self._followed.pop((engine, dp), None)
        if followed is None:
            return
        if followed.model:
            self._models -= Counter([followed.model])
        self._owners = {}  # the next question makes it anew; until then it would keep the blocks of what is gone

    def page_sizes(
        self, wanted: Wanted, model: str = "", field: str = "model", labels: LabelSet = NO_LABELS
    ) -> set[int]:
        """Tokens of a block of the caches that would be asked, where they told it."""
        question = Question({}, model, 0, field, labels)
        return {contents.page_tokens for _, _, contents in self._asked(wanted, question) if contents.page_tokens}

    def score(self, question: Question, wanted: Wanted, now: float) -> list[CacheScore]:
        """The caches that hold the first block, those with most tokens first. Raises InvalidRequest where no model is
        named and the caches are of several."""
        if list(question.chains) == [0] and not question.step:
            found = self._best(question.chains[0], question, wanted, now)
        else:
            found = self._of_sizes(question, wanted, now)
        # No two are of one engine and dp, so cores are never compared.
        found.sort()
        return [
            CacheScore(*key, *match, page_tokens, freshness(core, now) if wanted.freshness else None)
            for _, _, key, match, page_tokens, core in found[: wanted.most or None]
        ]

    def _best(self, hashes: Sequence[int], question: Question, wanted: Wanted, now: float) -> list[_Found]:
        """Of caches of any page size, whose blocks these hashes are: all, or at least the best that are wanted."""
        self._check_model(question, wanted)
        found: list[_Found] = []
        # Tokens of the best ones, the least first.
        best: list[int] = []
        is_fresh = False
        asks_all = not (wanted.engines or question.labels or question.model)
        for blocks, caches in self.index.leading(hashes):
            if best and len(best) == wanted.most and best[0] > blocks * self.index.largest_page:
                break
            for cache, match in caches:
                owner = self._owners.get(cache)
                if owner is None or not self._is_current(owner):
                    if not is_fresh:
                        self._owners = {known[2].blocks: known for known in self._known()}
                        is_fresh = True
                    owner = self._owners.get(cache)
                if owner is None or not (asks_all or _is_asked(owner[0], owner[1], question, wanted)):
                    continue
                one = _found(owner, owner[2].match(match, hashes, 0), wanted, now)
                if one is None:
                    continue
                found.append(one)
                if len(best) < wanted.most:
                    heappush(best, -one[0])
                elif wanted.most:
                    heappushpop(best, -one[0])
        return found

    def _of_sizes(self, question: Question, wanted: Wanted, now: float) -> list[_Found]:
        found: list[_Found] = []
        for (hashes, stride, step), asked in self._classes(question, wanted):
            strided = hashes if stride == 1 else hashes[stride - 1 :: stride]
            matches = self.index.score(strided, [contents.blocks for _, _, contents in asked.values()])
            for key, followed, contents in asked.values():
                match = matches.get(contents.blocks)
                if match is None:
                    continue
                one = _found((key, followed, contents), contents.match(match, hashes, step), wanted, now)
                if one is not None:
                    found.append(one)
        return found

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

    def _classes(self, question: Question, wanted: Wanted) -> Iterator[tuple[_Chain, dict[_Key, _Asked]]]:
        """Yields what fits caches of one page size, and these caches."""
        by_size: dict[int, dict[_Key, _Asked]] = {}
        for asked in self._asked(wanted, question):
            by_size.setdefault(asked[2].page_tokens, {})[asked[0]] = asked
        for size, caches in by_size.items():
            chain = _chain(question, size)
            if chain is not None:
                yield chain, caches

    def _known(self) -> Iterator[_Asked]:
        """Yields the caches of which something is known."""
        for key, followed in self._followed.items():
            if followed.core.contents is not None:
                yield key, followed, followed.core.contents

    def _is_current(self, owner: _Asked) -> bool:
        key, followed, contents = owner
        return followed.core.contents is contents and self._followed.get(key) is followed

    def _asked(self, wanted: Wanted, question: Question) -> Iterator[_Asked]:
        self._check_model(question, wanted)
        for known in self._known():
            if _is_asked(known[0], known[1], question, wanted):
                yield known

    def _check_model(self, question: Question, wanted: Wanted) -> None:
        """Raises InvalidRequest: hashes do not tell models apart."""
        if question.model or len(self._models) < 2:
            return
        asked = (each for key, each in self._followed.items() if _is_asked(key, each, question, wanted))
        models = {followed.model for followed in asked if followed.model}
        if len(models) > 1:
            named = " or ".join(sorted(models))
            raise InvalidRequest.of(question.field, "", f"the model's name: these caches are of {named}")

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


def _is_asked(key: _Key, followed: _Followed, question: Question, wanted: Wanted) -> bool:
    return (
        (not wanted.engines or key[0] in wanted.engines)
        and question.labels <= followed.labels
        and (not question.model or followed.model == question.model)
    )


def _found(known: _Asked, match: Match, wanted: Wanted, now: float) -> _Found | None:
    """Returns None where it has nothing, or is not known well enough."""
    key, followed, contents = known
    core, most, page_tokens = followed.core, wanted.max_staleness, contents.page_tokens
    device, _, _, storage = match
    if not storage or (most is not None and _is_stale(core, most, now)):
        return None
    return -storage * (page_tokens or 1), -device, key, match, page_tokens, core


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
