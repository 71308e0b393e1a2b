"""Rank agreement under a seeded world: ranks come to operations in any order, hang, die and come back; nobody waits
long."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kvgrpc.prefetch.model import Stop
from kvgrpc.prefetch.protocol.votes import AgreementCore, AloneAgreement, Decision, PendingVotes, Stage, Vote

RANKS, OPERATIONS, TIMEOUT, OTHERS_TIMEOUT = 4, 30, 2.0, 30.0
ABSENT = (0, Stop.RANK_ABSENT)


@dataclass
class Rank:
    """What one rank said and heard, and when."""

    number: int
    said: dict[tuple[str, Stage], tuple[float, Vote]] = field(default_factory=dict)
    heard: dict[tuple[str, Stage], tuple[float, Decision]] = field(default_factory=dict)
    alive: bool = True
    hung: bool = False
    born: int = 0


class World:
    """A leader's core, ranks that speak to it over links with delays, and a clock that only events move."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.core = AgreementCore(range(RANKS))
        self.ranks = [Rank(number) for number in range(RANKS)]
        self.decided: dict[tuple[str, Stage], Decision] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, call))

    def run(self) -> None:
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()
            self.tell(self.core.expire(self.now))
            deadline = self.core.next_deadline()
            if deadline is not None:
                self.at(max(0.0, deadline - self.now) + 1e-6, lambda: None)

    def say(self, rank: Rank, vote: Vote) -> None:
        if not rank.alive or rank.hung:
            return
        rank.said[vote.key, vote.stage] = (self.now, vote)
        born = rank.born

        def arrive() -> None:
            if rank.alive and rank.born == born:
                # As the leader's: its own votes have their time, those of the others wait for its scheduler.
                timeout = TIMEOUT if rank.number == 0 else OTHERS_TIMEOUT
                self.tell(self.core.vote(rank.number, vote, self.now, timeout))

        self.at(self.random.uniform(0, 0.2), arrive)

    def tell(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            key = (decision.key, decision.stage)
            assert self.decided.setdefault(key, decision) == decision, "two decisions of one step"
            for rank in self.ranks:
                self.at(self.random.uniform(0, 0.2), lambda rank=rank, decision=decision: self.hear(rank, decision))  # type: ignore[misc]

    def hear(self, rank: Rank, decision: Decision) -> None:
        key = (decision.key, decision.stage)
        if not rank.alive or key in rank.heard:
            return
        rank.heard[key] = (self.now, decision)
        if decision.pages and decision.stage is not Stage.COMPLETED and key in rank.said:
            pages = self.random.randint(1, decision.pages)
            self.say(rank, Vote(decision.key, Stage(decision.stage + 1), pages))

    def kill(self, rank: Rank) -> None:
        rank.alive = False
        self.at(self.random.uniform(0, 0.3), lambda: self.tell(self.core.lose(rank.number)))

    def revive(self, rank: Rank) -> None:
        rank.alive, rank.hung, rank.born = True, False, rank.born + 1
        rank.said.clear()
        rank.heard.clear()
        self.tell(self.core.lose(rank.number))
        self.core.join(rank.number)


def run(seed: int, faults: int) -> World:
    world = World(seed)
    for rank in world.ranks:
        order = list(range(OPERATIONS))
        world.random.shuffle(order)
        when = 0.0
        for operation in order:
            when += world.random.uniform(0, 0.02)
            pages = world.random.randint(0, 50)
            vote = Vote(f"op{operation}", Stage.HITS, pages, Stop.NONE if pages else Stop.BELOW_THRESHOLD)
            world.at(when, lambda rank=rank, vote=vote: world.say(rank, vote))  # type: ignore[misc]
    for _ in range(faults):
        rank = world.random.choice(world.ranks[1:])
        moment = world.random.uniform(0, 1.5)
        if world.random.random() < 0.5:
            world.at(moment, lambda rank=rank: setattr(rank, "hung", True))  # type: ignore[misc]
        else:
            world.at(moment, lambda rank=rank: world.kill(rank))  # type: ignore[misc]
        if world.random.random() < 0.5:
            world.at(moment + world.random.uniform(0.5, 3), lambda rank=rank: world.revive(rank))  # type: ignore[misc]
    world.run()
    return world


@pytest.mark.parametrize("seed", range(15))
def test_whatever_the_order_all_ranks_hear_the_smallest_number(seed: int) -> None:
    world = run(seed, faults=0)
    assert len([key for key in world.decided if key[1] is Stage.HITS]) == OPERATIONS
    for key, decision in world.decided.items():
        votes = [rank.said[key][1] for rank in world.ranks]
        assert decision.pages == min(vote.pages for vote in votes)
        assert all(rank.heard[key][1] == decision for rank in world.ranks)
    assert world.core.open_ballots == 0


@pytest.mark.parametrize("seed", range(60))
def test_whoever_hangs_or_dies_nobody_waits_longer_than_the_time_of_a_vote(seed: int) -> None:
    world = run(seed, faults=3)
    for rank in world.ranks:
        if not rank.alive:
            continue
        for key, (said, vote) in rank.said.items():
            heard, decision = rank.heard[key]
            assert heard - said <= TIMEOUT + 1.0
            assert decision.pages <= vote.pages
    for decision in world.decided.values():
        assert decision.pages or decision.stop is not Stop.NONE or decision.stage is not Stage.HITS
    assert world.core.open_ballots == 0


def test_the_table_is_bounded() -> None:
    core = AgreementCore(range(2), limit=10)
    decided = [each for number in range(50) for each in core.vote(0, Vote(f"op{number}", Stage.HITS, 5), 0.0, 1.0)]
    assert core.open_ballots == 10
    assert [(each.key, each.pages, each.stop) for each in decided] == [(f"op{n}", *ABSENT) for n in range(40)]


def test_one_who_comes_late_hears_what_was_decided_without_it() -> None:
    core = AgreementCore(range(2))
    core.vote(0, Vote("op", Stage.HITS, 5), 0.0, 1.0)
    (absent,) = core.expire(1.0)
    assert core.vote(1, Vote("op", Stage.HITS, 7), 5.0, 1.0) == [absent]


def test_whoever_has_the_least_time_says_how_long_the_others_are_waited_for() -> None:
    core = AgreementCore(range(3))
    core.vote(1, Vote("op", Stage.HITS, 5), 0.0, 30.0)
    core.vote(0, Vote("op", Stage.HITS, 5), 1.0, 2.0)
    assert core.next_deadline() == 3.0
    assert core.expire(2.9) == []
    assert [(each.pages, each.stop) for each in core.expire(3.0)] == [ABSENT]


def test_a_stranger_decides_nothing() -> None:
    core = AgreementCore(range(2))
    assert core.vote("nobody", Vote("op", Stage.HITS, 5), 0.0, 1.0) == []
    assert not core.join("nobody") and core.open_ballots == 0


DOUBT = 60.0


def last(pages: int, beat: float) -> Vote:
    return Vote("op", Stage.COMPLETED, pages, beat=beat)


class TestDoubt:
    """After its last vote a rank waits for the leader; the leader counts that vote for half of the time."""

    def test_a_last_vote_that_is_too_old_when_it_comes_decides_that_its_rank_was_absent(self) -> None:
        core = AgreementCore(range(2), doubt=DOUBT)
        assert core.vote(1, last(8, beat=0.0), DOUBT / 2 + 1, 30.0) == [Decision("op", Stage.COMPLETED, *ABSENT)]
        assert core.vote(0, last(8, beat=31.0), DOUBT / 2 + 1, 5.0) == [Decision("op", Stage.COMPLETED, *ABSENT)]

    def test_so_does_one_that_is_too_old_when_the_others_have_spoken(self) -> None:
        core = AgreementCore(range(2), doubt=DOUBT)
        assert core.vote(1, last(8, beat=0.0), 1.0, 100.0) == []
        assert core.vote(0, last(8, beat=31.0), DOUBT / 2 + 1, 5.0) == [Decision("op", Stage.COMPLETED, *ABSENT)]

    def test_one_in_time_counts(self) -> None:
        core = AgreementCore(range(2), doubt=DOUBT)
        core.vote(1, last(8, beat=0.0), 1.0, 100.0)
        assert core.vote(0, last(7, beat=29.0), 29.0, 5.0) == [Decision("op", Stage.COMPLETED, 7)]

    def test_a_new_leader_answers_at_once_what_its_former_self_was_asked(self) -> None:
        core = AgreementCore(range(2), doubt=DOUBT, born=100.0)
        assert core.vote(1, last(8, beat=99.0), 101.0, 30.0) == [Decision("op", Stage.COMPLETED, *ABSENT)]

    def test_what_was_decided_is_said_again_however_long_a_rank_slept(self) -> None:
        core = AgreementCore(range(2), doubt=DOUBT)
        core.vote(0, last(8, beat=0.0), 0.0, 5.0)
        (decision,) = core.vote(1, last(8, beat=0.0), 0.0, 30.0)
        for number in range(1_000):
            core.vote(0, Vote(f"other {number}", Stage.HITS, 5), 0.0, 0.0)
            core.expire(1.0)
        assert core.vote(1, last(8, beat=0.0), 10 * DOUBT, 30.0) == [decision]

    def test_a_rank_gives_up_once_it_was_awake_for_the_whole_doubt(self) -> None:
        said, now = PendingVotes(DOUBT), 0.0
        said.tick(now)
        said.say(last(8, 0.0), lambda decision: None)
        while not (given_up := said.tick(now)):
            now += said.step
        assert now == pytest.approx(DOUBT)
        assert given_up == [Decision("op", Stage.COMPLETED, *ABSENT)]

    def test_a_sleep_is_no_time_and_what_came_meanwhile_is_heard_first(self) -> None:
        said, now = PendingVotes(DOUBT), 0.0
        said.tick(now)
        said.say(last(8, 0.0), lambda decision: None)
        while now < DOUBT - 2 * said.step:
            now += said.step
            assert said.tick(now) == []
        assert said.tick(now + 1000.0) == []
        assert said.answered("op", Stage.COMPLETED) is not None
        assert said.answered("op", Stage.COMPLETED) is None, "once"

    def test_more_than_two_steps_at_once_are_a_sleep(self) -> None:
        said, now = PendingVotes(DOUBT), 0.0
        said.tick(now)
        said.say(last(8, 0.0), lambda decision: None)
        for _ in range(8):
            now += 2.5 * said.step
            assert said.tick(now) == []
        awake = 0.0
        while not said.tick(now):
            now, awake = now + said.step, awake + said.step
        assert awake == pytest.approx(DOUBT)

    def test_what_nobody_waits_for_is_neither_said_again_nor_given_up(self) -> None:
        said = PendingVotes(DOUBT)
        for stage in Stage:
            said.say(Vote("op", stage, 8), lambda decision: None)
        said.say(Vote("other", Stage.COMPLETED, 8), lambda decision: None)
        said.forget("op")
        assert [vote.key for vote in said.undecided()] == ["other"]
        assert said.answered("op", Stage.COMPLETED) is None

    def test_what_is_said_again_is_as_old_as_when_it_was_said_first(self) -> None:
        said = PendingVotes(DOUBT)
        said.heard_beat(3.0)
        said.say(last(8, 0.0), lambda decision: None)
        said.heard_beat(50.0)
        assert [vote.beat for vote in said.undecided()] == [3.0]


def test_a_replica_of_one_rank_decides_by_itself() -> None:
    told: list[Decision] = []
    AloneAgreement().vote(Vote("op", Stage.COMPLETED, 8), 5.0, told.append)
    assert told == [Decision("op", Stage.COMPLETED, 8)] and AloneAgreement().live is None
