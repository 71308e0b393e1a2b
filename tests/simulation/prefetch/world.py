"""A replica of several ranks from one seed: the real state machines of its operations, the real tables of votes, and
everything around them that fails. ``run_seed(seed).violations`` says what was done that must never be.

Ranks sleep, die and join late; streams break; storage is short, slow, wrong or hangs; operations are terminated, pages
evicted and ranks reset at any moment. The leader is not killed, and sleeps no longer than
docs/prefetch/ranks.md allows.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kvgrpc.prefetch.model import OperationKind, PrefetchLimits, Stop
from kvgrpc.prefetch.protocol.backup import Backup, writer_of
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.prefetch.protocol.votes import AgreementCore, Decided, Decision, PendingVotes, Stage, Vote
from tests.simulation.prefetch.parts import Store, is_shared
from tests.simulation.prefetch.shell import ALONE, HOST_PROMPT_PAGES, HOST_PROMPTS, Shell
from tests.simulation.prefetch.switches import classes

RANKS, OPERATIONS = 3, 14
PROMPT_PAGES = 12
TIMEOUT, OTHERS_TIMEOUT, DOUBT = 2.0, 30.0, 24.0
OPERATION_SECONDS = 8.0
LAST_BEGIN = 30.0
HORIZON = 400.0
LIMITS = PrefetchLimits(
    threshold_tokens=2,
    batch_pages=4,
    storage_timeout=1.0,
    agreement_timeout=TIMEOUT,
    doubt_timeout=DOUBT,
    operation_timeout=OPERATION_SECONDS,
    occupancy=0.5,
)


@dataclass(eq=False)
class Process:
    """A rank through all its lives. ``disturbed``: killed or reset, so that it need not end as the others do."""

    number: int
    world: World
    store: Store
    life: int = 0
    alive: bool = True
    awake_at: float = 0.0
    stream: int = 0
    disturbed: bool = False
    said: PendingVotes = field(default_factory=lambda: PendingVotes(DOUBT))
    unwritten: list[Decision] = field(default_factory=list)
    up_at: float = 0.0
    down_at: float = 0.0

    def __post_init__(self) -> None:
        self.shell = Shell(self.world, self)

    def vote(self, vote: Vote, seconds: float, decided: Decided) -> None:
        self.world.say(self, vote, seconds, decided)

    def forget(self, key: str) -> None:
        self.said.forget(key)
        if self.number == 0:
            for stage in Stage:
                self.world.waiting.pop((key, stage), None)


class World:
    """Rank 0 leads. ``off``: names of rules that do not hold (``switches.py``). ``quiet``: storage does not fail."""

    def __init__(self, seed: int, off: Collection[str] = (), quiet: bool = False) -> None:
        self.random = random.Random(seed)
        self.limits = LIMITS
        self.prefetch_class, self.backup_class = classes(off)
        self.violations: list[str] = []
        self.now = 0.0
        self.core = AgreementCore(range(RANKS), doubt=DOUBT)
        self.waiting: dict[tuple[str, Stage], Decided] = {}
        self._events: list[tuple[float, int, Process, int, Callable[[], Any]]] = []
        self._number = 0
        shared: set[str] = set()
        self.ranks = [Process(number, self, Store(self.random, quiet, shared)) for number in range(RANKS)]
        self.lead = self.ranks[0]
        self.orders = [self._order(number) for number in range(OPERATIONS)]
        self._fill_stores()
        for rank in self.ranks[1:]:
            self.at(rank, 0.0, lambda rank=rank: self._tick(rank))  # type: ignore[misc]
            self.at(self.lead, 0.0, lambda rank=rank: self._beat(rank))  # type: ignore[misc]

    def at(self, process: Process, seconds: float, call: Callable[[], Any], life: int = -1) -> None:
        """``life``: of the process, with which the call goes; -1: it is the world's own."""
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, process, life, call))

    def run(self) -> None:
        while self._events and self._events[0][0] < HORIZON:
            self.now, _, process, life, call = heapq.heappop(self._events)
            if life not in (-1, process.life) or (life >= 0 and not process.alive):
                continue
            if self.now < process.awake_at:
                self.at(process, process.awake_at - self.now + self.random.uniform(0, 0.01), call, life)
                continue
            call()
        self._check()

    # What happens.

    def schedule(self, faults: int) -> None:
        """Every rank comes to every operation in its own time, and ``faults`` things go wrong."""
        for number, order in enumerate(self.orders):
            first = LAST_BEGIN * number / OPERATIONS
            for rank in self.ranks:
                late = self.random.choice([0.0, 0.1, 1.0]) if self.random.random() < 0.95 else 5.0
                self.at(rank, first + late, partial(self._begin, rank, order))
            if self.random.random() < 0.35:
                self._terminate_some_time(order, first)
        for _ in range(faults):
            self._fault(self.random.uniform(0, LAST_BEGIN))

    def _terminate(self, rank: Process, operation_id: str, stop: Stop) -> None:
        if rank.alive:
            rank.shell.terminate(operation_id, stop)

    def _begin(self, rank: Process, order: Order) -> None:
        if rank.alive:
            rank.shell.begin(order)

    def _terminate_some_time(self, order: Order, first: float) -> None:
        when = first + self.random.choice([0.005, 0.02, 0.05, 0.2, 1.0, 3.0])
        everywhere = self.random.random() < 0.5
        stop = Stop.CANCELLED if everywhere else Stop.DEADLINE
        for rank in self.ranks if everywhere else [self.random.choice(self.ranks)]:
            moment = when + self.random.uniform(0, 0.1)
            self.at(rank, moment, partial(self._terminate, rank, order.operation_id, stop))

    def _fault(self, moment: float) -> None:
        rank = self.random.choice(self.ranks)
        member = rank if rank is not self.lead else self.ranks[1]
        kind = self.random.choice(["sleep", "sleep", "kill", "break", "evict", "evict", "reset"])
        if kind == "sleep":
            longest = [0.5, TIMEOUT + 1, DOUBT / 4]
            seconds = self.random.choice(longest if rank is self.lead else [*longest, DOUBT / 2 + 1, 2 * DOUBT])
            self.at(rank, moment, lambda: setattr(rank, "awake_at", self.now + seconds))
        elif kind == "kill":
            self.at(member, moment, lambda: self._kill(member))
        elif kind == "break":
            self.at(member, moment, lambda: self._break(member))
        elif kind == "evict":
            count = self.random.randint(1, 12)
            self.at(rank, moment, lambda: rank.shell.tree.evict(count))
        else:
            self.at(rank, moment, lambda: self._reset(rank))

    def _reset(self, rank: Process) -> None:
        if rank.alive:
            rank.disturbed = True
            rank.shell.reset()

    def _kill(self, rank: Process) -> None:
        """Its memory is gone, storage stays. The leader hears of it; a new life joins late."""
        if not rank.alive:
            return
        rank.alive, rank.disturbed, rank.life = False, True, rank.life + 1
        rank.stream += 1
        self.at(self.lead, self.random.uniform(0, 0.1), lambda: self.tell(self.core.lose(rank.number)))
        self.at(rank, self.random.uniform(0.5, 8.0), lambda: self._revive(rank))

    def _revive(self, rank: Process) -> None:
        rank.alive, rank.said, rank.unwritten = True, PendingVotes(DOUBT), []
        rank.shell = Shell(self, rank)
        self.at(rank, 0.0, lambda: self._tick(rank), life=rank.life)
        self.at(self.lead, 0.01, lambda: self._join(rank))

    # Votes, over streams that break.

    def say(self, rank: Process, vote: Vote, seconds: float, decided: Decided) -> None:
        if rank is self.lead:
            self.waiting[vote.key, vote.stage] = decided
            self.tell(self.core.vote(0, replace(vote, beat=self.now), self.now, seconds))
            self.at(rank, seconds, self._expire)
            return
        vote = rank.said.say(vote, decided)
        if vote.stage is not Stage.COMPLETED:
            absent = Decision(vote.key, vote.stage, 0, Stop.RANK_ABSENT)
            self.at(rank, seconds, lambda: self._answer(rank, absent), life=rank.life)
        self._send(rank, [vote])

    def tell(self, decisions: list[Decision]) -> None:
        for rank in self.ranks[1:] if decisions else ():
            rank.unwritten.extend(decisions)
            self.at(self.lead, self.random.uniform(0, 0.02), lambda rank=rank: self._write(rank))  # type: ignore[misc]
        for decision in decisions:
            decided = self.waiting.pop((decision.key, decision.stage), None)
            if decided is not None:
                decided(decision)

    def _send(self, rank: Process, votes: list[Vote]) -> None:
        stream = rank.stream

        def arrive() -> None:
            if rank.stream == stream:
                for vote in votes:
                    self.tell(self.core.vote(rank.number, vote, self.now, OTHERS_TIMEOUT))
                due = self.core.next_deadline()
                if due is not None:
                    self.at(self.lead, max(0.0, due - self.now), self._expire)

        rank.up_at = max(rank.up_at, self.now + self.random.uniform(0, 0.05))
        self.at(self.lead, rank.up_at - self.now, arrive)

    def _write(self, rank: Process) -> None:
        beat, decisions, stream = self.now, rank.unwritten, rank.stream
        rank.unwritten = []

        def arrive() -> None:
            if rank.stream == stream and rank.alive:
                rank.said.heard_beat(beat)
                for decision in decisions:
                    self._answer(rank, decision)

        rank.down_at = max(rank.down_at, self.now + self.random.uniform(0, 0.05))
        self.at(rank, rank.down_at - self.now, arrive)

    def _answer(self, rank: Process, decision: Decision) -> None:
        decided = rank.said.answered(decision.key, decision.stage)
        if decided is not None:
            decided(decision)

    def _expire(self) -> None:
        self.tell(self.core.expire(self.now))

    def _tick(self, rank: Process) -> None:
        if rank.alive:
            for decision in rank.said.tick(self.now):
                self._answer(rank, decision)
            self.at(rank, rank.said.step, lambda: self._tick(rank), life=rank.life)

    def _beat(self, rank: Process) -> None:
        self._write(rank)
        self.at(self.lead, DOUBT / 16, lambda: self._beat(rank))

    def _break(self, rank: Process) -> None:
        """What is on its way is lost. The leader hears of it, then the rank dials again."""
        rank.stream += 1
        rank.unwritten = []
        self.at(self.lead, 0.01, lambda: self.tell(self.core.lose(rank.number)))
        self.at(self.lead, self.random.uniform(0.1, 2.0), lambda: self._join(rank))

    def _join(self, rank: Process) -> None:
        if rank.alive:
            self.tell(self.core.lose(rank.number))
            self.core.join(rank.number)
            self.at(rank, 0.01, lambda: self._send(rank, rank.said.undecided()), life=rank.life)

    # What must hold.

    def check_stored(self, rank: Process, operation: Backup) -> None:
        lacking = [each for each in operation.hashes[: operation.agreed] if not rank.store.has(each)]
        if lacking:
            self.violations.append(
                f"{self.now:.3f} rank {rank.number}: {operation.operation_id} is DONE without {lacking}"
            )

    def is_writer(self, number: int, page_hash: str) -> bool:
        """All ranks hold the same pages of even prompts, which one of them writes; they share what they store."""
        live = [each for each in self.core.live if isinstance(each, int)]
        return not is_shared(page_hash) or writer_of(page_hash, {number, *live}) == number

    def _check(self) -> None:
        for rank in self.ranks:
            shell, name = rank.shell, f"rank {rank.number}"
            left = [(each.operation_id, each.state.name) for each in shell.book.open()]
            held = (shell.share.held, sorted(shell.pool.reserved), +shell.pool.readers)
            if left:
                self.violations.append(f"end, {name}: {left} did not end")
            elif rank.alive and (held[0] or held[1] or held[2]):
                self.violations.append(f"end, {name}: (share, reserved, read) is {held}")
            for operation in shell.book.all():
                waited = operation.ended_at - operation.began
                if operation.ended and waited > HORIZON / 2:
                    self.violations.append(f"end, {name}: {operation.operation_id} took {waited:.0f} s")
        for order in self.orders:
            if order.kind is OperationKind.PREFETCH:
                self._check_alike(order.operation_id)

    def _check_alike(self, operation_id: str) -> None:
        """Where one rank takes pages, every other has them too, by the same decision or from before."""
        ends = []
        for rank in self.ranks:
            found = [each for each in rank.shell.book.all() if each.operation_id == operation_id]
            if found and not rank.disturbed:
                ends.append((rank.shell.handed.get(operation_id, 0), found[0].covered))
        most = max((handed for handed, _ in ends), default=0)
        if any(handed not in (0, most) or (not handed and covered < most) for handed, covered in ends if most):
            self.violations.append(f"end: {operation_id} parted the ranks: (handed, covered) {ends}")

    def _order(self, number: int) -> Order:
        kind = OperationKind.BACKUP if number % 4 == 3 else OperationKind.PREFETCH
        prefetched = [*(f"p{prompt}" for prompt in range(5)), *HOST_PROMPTS]
        prompt = self.random.choice(prefetched if kind is OperationKind.PREFETCH else HOST_PROMPTS)
        pages = self.random.randint(2, PROMPT_PAGES if prompt[0] == "p" else HOST_PROMPT_PAGES)
        hashes = tuple(f"{prompt}:{page}" for page in range(pages))
        tenant = ALONE if number % 8 == 7 else ""
        return Order(kind=kind, hashes=hashes, operation_id=f"op{number}", tenant=tenant)

    def _fill_stores(self) -> None:
        for rank in self.ranks:
            for prompt in range(5):
                for page in range(self.random.randint(PROMPT_PAGES // 2, PROMPT_PAGES)):
                    rank.store.add(f"p{prompt}:{page}")


def run_seed(seed: int, *, off: Collection[str] = ()) -> World:
    """One world, and what became of it: from 0 to 5 faults; in each seventh storage does what it is asked."""
    world = World(seed, off, quiet=seed % 7 == 0)
    world.schedule(faults=seed % 6)
    world.run()
    return world
