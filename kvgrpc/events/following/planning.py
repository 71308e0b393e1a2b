"""Plans where to run a request, and from whom to pull which part of its prompt, from what ranks say. Pure."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from kvgrpc.events.following.index import Match
from kvgrpc.events.following.sources import Holding, Question, Wanted
from kvgrpc.model import EngineLoad

# Of a pair that never exchanged pages, where nobody else did either.
ASSUMED_BYTES_PER_SECOND = 1e9
# A question, a room and two copies of few pages: assumed, not measured.
PULL_OVERHEAD_SECONDS = 0.02
# A pull that costs nearly the time that it saves is not worth its risk.
LEAST_GAIN = 0.05
# What was planned counts until the engine has said what it has to do then: ranks say it each second.
RESERVED_SECONDS = 1.5
# Of all that hold a prompt, in pages that a place can take, only the longest are looked at; of one engine fewer: its
# own ranks pull from others alone.
_SOURCES_LOOKED_AT, _OF_ONE_ENGINE = 9, 4
# Each is tens of microseconds of estimates, and a fleet has thousands.
_PLACES_OF_A_STEP = 16
_Cache = tuple[str, int]


class PlanQuestion(NamedTuple):
    """One request. ``tokens``: of all of it, 0: of its blocks. ``engines`` could run it, ``sources`` may lend; none
    named: all of its model that are followed. ``other_kinds``: the same beginning as engines of other kinds hash it."""

    question: Question
    tokens: int = 0
    engines: Collection[str] = ()
    sources: Collection[str] = ()
    other_kinds: Sequence[Question] = ()


class PullChoice(NamedTuple):
    """From whom to pull how much, in blocks of the taker's, and what that is estimated to take."""

    engine: str
    dp: int
    host_blocks: int
    blocks: int
    nbytes: int
    bytes_per_second: float
    measured: bool
    in_flight: int
    seconds: float


class Placement(NamedTuple):
    """One cache where the request may run. Times are seconds, None where nobody said how quickly engines compute."""

    engine: str
    dp: int
    match: Match
    page_tokens: int
    pull: PullChoice | None
    compute_tokens: int
    queue: float | None
    compute: float | None
    first_token: float | None
    first_token_without_pull: float | None
    speed_assumed: bool
    load: EngineLoad | None


class Holdings(Protocol):
    """The knowledge of caches that a plan asks; ``SourceTable`` is one."""

    def holdings(self, question: Question, wanted: Wanted, now: float) -> Sequence[Holding]: ...


class Planner:
    """Plans over the caches of one table; belongs to its thread."""

    def __init__(self, table: Holdings) -> None:
        self._table = table
        self._reserved = _Given()
        self._reservations: deque[_Reservation] = deque()

    def plan(
        self, questions: Sequence[PlanQuestion], now: float, *, wanted: Wanted, reserve: bool = False
    ) -> list[list[Placement]]:
        """Placements of each request, the best first. What a plan gives to an engine counts for the next question; with
        ``reserve`` for the next call too. Raises InvalidRequest where no model is named and caches are of several."""
        steps = self.in_steps(questions, now, wanted=wanted, reserve=reserve)
        return [found for found in steps if found is not None]

    def in_steps(
        self, questions: Sequence[PlanQuestion], now: float, *, wanted: Wanted, reserve: bool = False
    ) -> Generator[list[Placement] | None, None, None]:
        """Plans one request after the other; None wherever others may go on before the next is ready.

        Close it where it is not gone through: what it reserved is taken back then, as where it raises."""
        self._forget(now)
        given = _Given(self._reserved)
        made: list[_Reservation] = []
        try:
            for asked in questions:
                held = yield from self._held(asked, wanted, now)
                found = yield from self._placements(asked, held, given)
                if found:
                    given.add(found[0])
                    if reserve:
                        made.append(self._reserve(found[0], now))
                yield found
        except BaseException:  # who asked is refused, or went away: nobody does as these say
            self._take_back(made)
            raise

    def _held(self, asked: PlanQuestion, wanted: Wanted, now: float) -> Generator[None, None, Sequence[Holding]]:
        """Holdings by those hashes of which each cache has most: of another kind's it has none."""
        found = self._table.holdings(asked.question, wanted, now)
        for question in asked.other_kinds:
            yield None
            others = {(each.engine, each.dp): each for each in self._table.holdings(question, wanted, now)}
            found = [max(each, others.get((each.engine, each.dp), each), key=_tokens_held) for each in found]
        return found

    def _placements(
        self, asked: PlanQuestion, held: Sequence[Holding], given: _Given
    ) -> Generator[None, None, list[Placement]]:
        speeds = [each.load.prefill_tokens_per_second for each in held if each.load is not None]
        known = [speed for speed in speeds if speed]
        typical = statistics.median(known) if known else 0.0
        rates = [rate for each in held if each.load is not None for _, rate in each.load.pull_rates if rate]
        usual = statistics.median(rates) if rates else ASSUMED_BYTES_PER_SECOND
        lends = [each for each in held if each.lendable and (not asked.sources or each.engine in asked.sources)]
        lends.sort(key=lambda each: -each.lendable * each.page_tokens)
        sources = _Sources(lends)
        may_run = [each for each in held if not asked.engines or each.engine in asked.engines]
        places = []
        for number, each in enumerate(may_run, 1):
            places.append(_place(asked, each, sources.of(each.load), given, typical, usual))
            if not number % _PLACES_OF_A_STEP:
                yield None
        return sorted(places, key=_worth)

    def _reserve(self, chosen: Placement, now: float) -> _Reservation:
        made = _Reservation(chosen, now)
        self._reserved.add(chosen)
        self._reservations.append(made)
        return made

    def _take_back(self, made: Collection[_Reservation]) -> None:
        gone = {each for each in made if not each.forgotten}
        for each in gone:
            self._reserved.take_back(each.placement)
        if gone:
            self._reservations = deque(each for each in self._reservations if each not in gone)

    def _forget(self, now: float) -> None:
        while self._reservations and now - self._reservations[0].at >= RESERVED_SECONDS:
            oldest = self._reservations.popleft()
            oldest.forgotten = True
            self._reserved.take_back(oldest.placement)


@dataclass(eq=False, slots=True)
class _Reservation:
    placement: Placement
    at: float
    forgotten: bool = False


class _Sources:
    """Of those that lend, the longest first, the few that are worth a look for a taker: only such as it can take of."""

    def __init__(self, lends: Sequence[Holding]) -> None:
        self._lends = lends
        self._found: dict[tuple[int, int, tuple[int, ...]], list[Holding]] = {}

    def of(self, taker: EngineLoad | None) -> Sequence[Holding]:
        if taker is None:
            return ()
        pages = taker.page_tokens, taker.page_bytes, taker.page_forms
        if pages not in self._found:
            self._found[pages] = list(islice(self._fit(taker), _SOURCES_LOOKED_AT))
        return self._found[pages]

    def _fit(self, taker: EngineLoad) -> Iterator[Holding]:
        of_engine: Counter[str] = Counter()
        for each in self._lends:
            if each.load is None or of_engine[each.engine] == _OF_ONE_ENGINE or not _exchange(taker, each.load):
                continue
            of_engine[each.engine] += 1
            yield each


class _Given:
    """Work that plans gave to caches and these have not told of yet: tokens to compute, and pulls to lend for."""

    def __init__(self, before: _Given | None = None) -> None:
        self.tokens: Counter[_Cache] = Counter() if before is None else before.tokens.copy()
        self.pulls: Counter[_Cache] = Counter() if before is None else before.pulls.copy()

    def add(self, chosen: Placement) -> None:
        self.tokens[chosen.engine, chosen.dp] += chosen.compute_tokens
        if chosen.pull is not None:
            self.pulls[chosen.pull.engine, chosen.pull.dp] += 1

    def take_back(self, chosen: Placement) -> None:
        _subtract(self.tokens, (chosen.engine, chosen.dp), chosen.compute_tokens)
        if chosen.pull is not None:
            _subtract(self.pulls, (chosen.pull.engine, chosen.pull.dp), 1)


def _subtract(counter: Counter[_Cache], cache: _Cache, count: int) -> None:
    counter[cache] -= count
    if not counter[cache]:
        del counter[cache]


def _place(
    asked: PlanQuestion, at: Holding, sources: Sequence[Holding], given: _Given, typical: float, usual: float
) -> Placement:
    load, cache = at.load or EngineLoad(), (at.engine, at.dp)
    rates = dict(load.pull_rates)
    speed = load.prefill_tokens_per_second or typical
    # The prompt may be hashed by other pages than this cache has: its hashes are no measure of it then.
    tokens = asked.tokens or at.blocks * at.page_tokens
    without = max(0, tokens - at.match.storage * at.page_tokens)
    best: PullChoice | None = None
    if not speed:
        return Placement(*cache, at.match, at.page_tokens, None, without, None, None, None, None, False, at.load)
    queue = (load.waiting_tokens + given.tokens[cache]) / speed
    computed_alone = queue + without / speed
    first_token, compute_tokens = computed_alone, without
    for source in sources:
        pull = _pull(at, load, rates, source, given, usual)
        if pull is None:
            continue
        left = max(0, tokens - pull.host_blocks * at.page_tokens)
        # It waits for its turn anyway; pages come meanwhile.
        seconds = max(queue, pull.seconds) + left / speed
        saved = pull.blocks * at.page_tokens / speed
        if seconds < min(first_token, computed_alone - LEAST_GAIN * saved):
            best, first_token, compute_tokens = pull, seconds, left
    return Placement(
        *cache,
        at.match,
        at.page_tokens,
        best,
        compute_tokens,
        queue,
        compute_tokens / speed,
        first_token,
        computed_alone,
        not load.prefill_tokens_per_second,
        at.load,
    )


def _pull(
    at: Holding, load: EngineLoad, rates: Mapping[str, float], source: Holding, given: _Given, usual: float
) -> PullChoice | None:
    """None where the source has nothing more, or blocks do not fill its pages."""
    lends, page, block = source.load, load.page_tokens, at.page_tokens
    if lends is None or source.engine == at.engine or not block or page % block:
        return None
    lent = source.lendable * source.page_tokens // page * page
    lacking = lent - _tokens_held(at)
    if lacking <= 0:
        return None
    measured = rates.get(source.engine, 0.0)
    rate, nbytes = measured or usual, -(-lacking // page) * load.page_bytes
    in_flight = lends.lent_pulls + given.pulls[source.engine, source.dp]
    seconds = PULL_OVERHEAD_SECONDS + nbytes * (1 + in_flight) / rate
    blocks = lent // block, lacking // block
    return PullChoice(source.engine, source.dp, *blocks, nbytes, rate, bool(measured), in_flight, seconds)


def _exchange(taker: EngineLoad, holder: EngineLoad) -> bool:
    """True if pages of one are of use to the other."""
    if not taker.page_bytes or not taker.page_tokens or taker.page_tokens != holder.page_tokens:
        return False
    if taker.page_forms and holder.page_forms:
        return not set(taker.page_forms).isdisjoint(holder.page_forms)
    return taker.page_bytes == holder.page_bytes


def _tokens_held(held: Holding) -> int:
    return held.match.storage * held.page_tokens


def _worth(place: Placement) -> tuple[float, int, int, str, int]:
    """Soonest first; of those of which nothing is known those with most of the prompt, then with least to do."""
    soonest = float("inf") if place.first_token is None else place.first_token
    waiting = 0 if place.load is None else place.load.waiting_tokens
    return soonest, -place.match.storage * place.page_tokens, waiting, place.engine, place.dp
