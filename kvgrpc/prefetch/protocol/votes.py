"""Agreement of ranks on one number for each step of an operation: the smallest that any of them said. Pure.

One rank of a replica leads; each rank says its own number under the operation's key, in whatever order its scheduler
comes to it, and hears the minimum once all have spoken, or that somebody was absent once the time is over. Nothing here
waits, and nothing depends on the order in which ranks or operations speak.

The leader alone decides. A rank that gives up before its last vote is safe: without that vote nobody gets a page.
After it the rank is in doubt, and waits for the leader's word for ``doubt`` seconds; so the leader counts a last vote
for half of that only. What it decides later is that somebody was absent, as the rank says by then.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvgrpc.model import RankId
from kvgrpc.prefetch.model import Stop


class Stage(enum.IntEnum):
    """The stages of an agreement. HITS: leading pages that every rank finds. RESERVED: for which each has room.
    COMPLETED: that arrived at each."""

    HITS = 1
    RESERVED = 2
    COMPLETED = 3


@dataclass(frozen=True, slots=True)
class Vote:
    """The word of one rank: ``pages`` leading pages of operation ``key``, and why they are so few.

    ``beat``: the leader's time, as it was last heard before this was said. So the leader knows how old a vote is at
    most, whoever slept meanwhile, and no two clocks are compared."""

    key: str
    stage: Stage
    pages: int
    stop: Stop = Stop.NONE
    beat: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """The number that holds for all ranks. ``stop``: why of the rank with the fewest, RANK_ABSENT with 0 pages where
    one is gone."""

    key: str
    stage: Stage
    pages: int
    stop: Stop = Stop.NONE


Decided = Callable[[Decision], None]


class Agreement(Protocol):
    """The way of a controller to the other ranks. Thread-safe; nothing here waits."""

    @property
    def live(self) -> frozenset[RankId] | None:
        """Ranks of the replica that take part now, this one included; None: all that there are."""

    def vote(self, vote: Vote, timeout: float, decided: Decided) -> None:
        """Says this rank's number. ``decided`` is called once, on any thread, within ``timeout`` and a little."""

    def forget(self, key: str) -> None:
        """The operation is over here."""


class AloneAgreement:
    """A replica of one rank: what it says holds."""

    @property
    def live(self) -> frozenset[RankId] | None:
        return None

    def vote(self, vote: Vote, timeout: float, decided: Decided) -> None:
        decided(Decision(vote.key, vote.stage, vote.pages, vote.stop))

    def forget(self, key: str) -> None:
        """Nothing was kept."""


@dataclass(slots=True)
class _Ballot:
    deadline: float
    votes: dict[Hashable, Vote] = field(default_factory=dict)


class AgreementCore:
    """The leader's table. ``members``: who must speak. Times are in seconds of any one clock, given by the caller.
    ``born``: when this leader began; it knows nothing of votes before that.

    Bounded: past ``limit`` open ballots the oldest is decided as absent; the last ``remembered`` decisions are kept, so
    that a rank that comes late hears what was decided without it.
    """

    def __init__(
        self,
        members: Iterable[Hashable],
        *,
        doubt: float = 60.0,
        born: float = 0.0,
        limit: int = 4096,
        remembered: int = 32_768,
    ) -> None:
        self._members = frozenset(members)
        self._doubt = doubt
        self._born = born
        self._limit = limit
        self._remembered = remembered
        self._ballots: OrderedDict[tuple[str, Stage], _Ballot] = OrderedDict()
        self._decided: OrderedDict[tuple[str, Stage], Decision] = OrderedDict()
        self._lost: set[Hashable] = set()
        self.epoch = 1

    @property
    def members(self) -> frozenset[Hashable]:
        return self._members

    @property
    def live(self) -> frozenset[Hashable]:
        """Members that are not known to be gone."""
        return self._members - self._lost

    @property
    def open_ballots(self) -> int:
        return len(self._ballots)

    def vote(self, member: Hashable, vote: Vote, now: float, timeout: float) -> list[Decision]:
        """One rank speaks; what that decides. A repeat is harmless, a late one hears what was decided.

        Of those who spoke, whoever has the least time says until when the others are waited for.
        """
        key = (vote.key, vote.stage)
        if member not in self._members:
            return []
        if key in self._decided:
            return [self._decided[key]]
        if self._lost:
            return [self._decide(key, _absent(key))]
        if not self._in_time(vote, now):
            return [self._decide(key, _absent(key))]
        ballot = self._ballots.setdefault(key, _Ballot(now + timeout))
        ballot.deadline = min(ballot.deadline, now + timeout)
        ballot.votes.setdefault(member, vote)
        decisions = []
        if ballot.votes.keys() == self._members:
            decisions.append(self._decide(key, self._lowest_of(key, ballot, now)))
        while len(self._ballots) > self._limit:
            oldest = next(iter(self._ballots))
            decisions.append(self._decide(oldest, _absent(oldest)))
        return decisions

    def expire(self, now: float) -> list[Decision]:
        """Decides what waits for too long: somebody is absent."""
        over = [key for key, ballot in self._ballots.items() if ballot.deadline <= now]
        return [self._decide(key, _absent(key)) for key in over]

    def next_deadline(self) -> float | None:
        return min((ballot.deadline for ballot in self._ballots.values()), default=None)

    def lose(self, member: Hashable) -> list[Decision]:
        """A rank is gone: what waits for it is decided at once, and what comes later too, until it is back.

        A new epoch begins: what its former self said counts for nothing.
        """
        if member not in self._members or member in self._lost:
            return []
        self._lost.add(member)
        self.epoch += 1
        return [self._decide(key, _absent(key)) for key in list(self._ballots)]

    def join(self, member: Hashable) -> bool:
        """A rank is there, for the first time or again; False for one that is no member."""
        if member not in self._members:
            return False
        if member in self._lost:
            self._lost.discard(member)
            self.epoch += 1
        return True

    def _lowest_of(self, key: tuple[str, Stage], ballot: _Ballot, now: float) -> Decision:
        if not all(self._in_time(vote, now) for vote in ballot.votes.values()):
            return _absent(key)
        lowest = min(ballot.votes.values(), key=lambda each: (each.pages, -each.stop))
        return Decision(*key, lowest.pages, lowest.stop)

    def _in_time(self, vote: Vote, now: float) -> bool:
        """True if whoever said so surely waits for the answer yet."""
        return vote.stage is not Stage.COMPLETED or max(self._born, now - self._doubt / 2) <= vote.beat <= now

    def _decide(self, key: tuple[str, Stage], decision: Decision) -> Decision:
        self._ballots.pop(key, None)
        self._decided[key] = decision
        while len(self._decided) > self._remembered:
            self._decided.popitem(last=False)
        return decision


def _absent(key: tuple[str, Stage]) -> Decision:
    return Decision(key[0], key[1], 0, Stop.RANK_ABSENT)


_STEPS = 20


@dataclass(slots=True)
class _Said:
    vote: Vote
    decided: Decided
    doubt_ends: float


class PendingVotes:
    """A rank's table. ``doubt``: seconds that it waits for the leader's word after its last vote of an operation.

    They are seconds that this process is awake: one that slept hears what was decided meanwhile before it gives up.
    ``tick`` counts them, at least every ``step`` seconds, from where the leader's messages are read.
    """

    def __init__(self, doubt: float) -> None:
        self.step = doubt / _STEPS
        self._doubt = doubt
        self._said: dict[tuple[str, Stage], _Said] = {}
        self._beat = 0.0
        self._awake = 0.0
        self._last_tick: float | None = None

    def say(self, vote: Vote, decided: Decided) -> Vote:
        """The vote as it is to be sent. It replaces what was said of the same step before."""
        vote = replace(vote, beat=self._beat)
        self._said[vote.key, vote.stage] = _Said(vote, decided, self._awake + self._doubt)
        return vote

    def heard_beat(self, beat: float) -> None:
        """The leader's time, which it said in a message that was just read."""
        self._beat = beat

    def answered(self, key: str, stage: Stage) -> Decided | None:
        """Whom to tell, once."""
        said = self._said.pop((key, stage), None)
        return None if said is None else said.decided

    def forget(self, key: str) -> None:
        """Nobody waits for an answer any more."""
        for stage in Stage:
            self._said.pop((key, stage), None)

    def undecided(self) -> list[Vote]:
        """Votes that have to be said again on a new stream, as they were said first."""
        return [said.vote for said in self._said.values()]

    def tick(self, now: float) -> list[Decision]:
        """Last votes that were in doubt for too long: what holds here is that the leader was absent."""
        passed = 0.0 if self._last_tick is None else now - self._last_tick
        self._last_tick = now
        if passed > 2 * self.step:
            # It slept: what lies in its sockets is read first.
            return []
        self._awake += passed
        return [
            Decision(key, stage, 0, Stop.RANK_ABSENT)
            for (key, stage), said in self._said.items()
            if stage is Stage.COMPLETED and said.doubt_ends <= self._awake
        ]
