"""Simulated engines that pull from each other: the product's own taker, lender and sessions, with real bytes; threads,
the network between them and time are the world's."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from kvgrpc.errors import InvalidRequest, KvGrpcError, PeerUnreachable, ServerDraining
from kvgrpc.model import Layout, RankRef
from kvgrpc.prefetch.storage.base import PageResult
from kvgrpc.pull.book import PullBook
from kvgrpc.pull.lending.lender import Lender, Loan
from kvgrpc.pull.model import Found, Holder, Lent
from kvgrpc.pull.taking.landing import Landing
from kvgrpc.pull.taking.peers import PeersBackend
from kvgrpc.pull.taking.silent import SilentHolders
from kvgrpc.pull.taking.taker import Taker
from kvgrpc.pull.waits import ForAnswer, ForPages, ForRoom, Waiting
from kvgrpc.transfer import KVReceiver
from kvgrpc.transfer.protocol.types import Target, Writes
from tests.simulation.pull_memory import PAGE_BYTES, SHARES, HostPages, WatchedShares
from tests.simulation.pull_processes import HolderProcess, Receiving, TakerProcess

if TYPE_CHECKING:
    from tests.simulation.pull_world import PullWorld

ANSWER, STALL, PULL_SECONDS = 1.0, 2.0, 8.0
TICKS_A_SECOND = 10
# Of a room at most, so that one is on its way while another is copied.
PIECE_PAGES = 3
# Of prompts, how many are asked for at two engines as if each had half of every page.
HALVES_SHARE = 0.5


class WatchedSilent(SilentHolders):
    """Remembers when a holder fell silent, to compare with whom its owner asks."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(now)
        self._clock = now
        self.since: dict[str, float] = {}

    def failed(self, address: str) -> None:
        if not super().__contains__(address):  # those who asked together fail together
            self.since[address] = self._clock()
        super().failed(address)

    def forget(self, address: str) -> None:
        super().forget(address)
        self.since.pop(address, None)


class Question:
    """One call of another engine: it may be late, refused or lost, and is done there all the same."""

    def __init__(
        self, asker: Engine, number: int, seconds: float, do: Callable[[Engine], Any], then: Callable[[Any], Any]
    ) -> None:
        """``do``: what the engine there does; ``then``: what its answer is to the asker, which raises what is wrong."""
        self._world, self._asker, self._number = asker.world, asker, number
        self._seconds, self._do, self._then = seconds, do, then
        rnd = self._world.random
        self._deadline = self._world.now + max(1, round(seconds * TICKS_A_SECOND))
        self._arrives, self._way_back = self._world.now + rnd.choice([0, 0, 1, 2]), rnd.choice([0, 0, 1, 2])
        self._server: Engine | None = None
        self._said: Callable[[], Any] = lambda: None
        self.done = False
        self.answer: Any = None
        self.error: KvGrpcError | None = None

    def step(self) -> None:
        world, target = self._world, self._world.engines[self._number]
        cut = (self._asker.number, target.address) in world.network.cuts
        if self._server is None and world.now >= self._arrives and not cut:
            if target.dead:
                return self._unanswered("refused")
            if target.running:
                self._server, self._said = target, self._serve(target)
                self._arrives = world.now + self._way_back
        elif self._server is not None and self._server.dead:
            return self._unanswered("reset")
        elif self._server is not None and world.now >= self._arrives and not cut:
            return self._end(self._said)
        if world.now >= self._deadline:
            self._unanswered("deadline")

    def _serve(self, target: Engine) -> Callable[[], Any]:
        try:
            said = self._do(target)
        except KvGrpcError as error:
            return partial(_raise, error)
        return lambda: self._then(said)

    def _unanswered(self, how: str) -> None:
        address = self._world.engines[self._number].address
        self._asker.silent.unanswered(address, self._seconds, ANSWER, self._seconds)
        self._end(partial(_raise, PeerUnreachable(f"{address}: {how}", metadata={"address": address})))

    def _end(self, say: Callable[[], Any]) -> None:
        self.done = True
        try:
            self.answer = say()
        except KvGrpcError as error:
            self.error = error


def _raise(error: KvGrpcError) -> None:
    raise error


class Survey:
    """Several engines are asked how much of a prompt they have; the best answer counts."""

    error = None

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = questions

    @property
    def done(self) -> bool:
        return all(each.done for each in self._questions)

    @property
    def answer(self) -> Found | None:
        found: list[Found] = [each.answer for each in self._questions if each.error is None]
        return max((each for each in found if each.pages), key=lambda each: each.pages, default=None)


class HalvesSurvey(Survey):
    """Two engines are asked as if they were ranks of one with half of each page: those pages count that both have."""

    @property
    def answer(self) -> Found | None:
        found: list[Found] = [each.answer for each in self._questions if each.error is None and each.answer.pages]
        if len(found) < SHARES:
            return None
        first, second = found
        holder = replace(first.holder, others=(second.holder,))
        return Found(holder, min(first.pages, second.pages), b"", (second,))


class Job:
    """A thread of an engine that drives one pull: what it waits for, and since when its engine ran so long."""

    def __init__(self, engine: Engine, work: Waiting[Any], done: Callable[[Any, Job], None]) -> None:
        self.engine, self._work, self._done = engine, work, done
        self.wait: Any = None
        self.ticks = self.stalled = self.busy = 0
        self.asked: set[str] = set()
        self.over = self.halves = False
        self._until = 0
        self._question: Question | Survey | None = None
        self._moved: tuple[KVReceiver, int] | None = None

    def step(self) -> None:
        self.ticks += 1
        self._count_stall()
        if self.wait is None:
            self._go_on(None, None)
        for _ in range(20):
            if self.over or not self._look():
                return

    def close(self) -> None:
        """Its process is gone."""
        if not self.over:
            self.over = True
            self._work.close()

    def _look(self) -> bool:
        """Goes on where what it waits for is there."""
        wait, late = self.wait, self.engine.world.now >= self._until
        if isinstance(wait, ForPages):
            pages = self.engine.landing_pages(wait)
            return bool(pages or late) and self._go_on(pages, None)
        if isinstance(wait, ForAnswer):
            question = self._question
            assert question is not None
            return question.done and self._go_on(question.answer, question.error)
        if isinstance(wait, ForRoom):
            return (wait.receiver.ended or late) and self._go_on(None, None)
        return late and self._go_on(None, None)

    def _go_on(self, answer: Any, error: KvGrpcError | None) -> bool:
        try:
            if self.wait is None:
                self.wait = next(self._work)
            else:
                self.wait = self._work.send(answer) if error is None else self._work.throw(error)
        except StopIteration as over:
            self.over = True
            self._done(over.value, self)
            return False
        wait, now = self.wait, self.engine.world.now
        if isinstance(wait, ForAnswer):
            self._question = wait.ask(*wait.arguments)
            if wait.ask == self.engine.ask_to_lend:
                self.asked.add(wait.arguments[0].holder.address)
                self.halves = self.halves or bool(wait.arguments[0].others)
            else:
                self.busy = 0
        else:
            self._until = now + math.ceil(wait.seconds * TICKS_A_SECOND)
        return True

    def _count_stall(self) -> None:
        """For how long no page came of the room that it waits for; and since when a busy holder lends nothing."""
        if isinstance(self.wait, ForRoom):
            moved = self.wait.receiver, self.wait.receiver.pages_done
            self.stalled = self.stalled + 1 if moved == self._moved else 0
            self._moved = moved
            self.busy = 0
        else:
            self.stalled, self._moved = 0, None
            self.busy += 1


class Engine:
    """One incarnation of an engine with a host cache: it lends and takes, in real bytes.

    ``draining``: it lends nothing more. ``thief``: it names rooms of others; ``liar``: it says what it likes.
    """

    def __init__(self, world: PullWorld, holder: HolderProcess, taker: TakerProcess) -> None:
        self.world, self.number, self.holder, self.taker = world, holder.number, holder, taker
        holder.engine = taker.engine = self
        rules = world.rules
        self.staging = rules.staging(self._complain, rules.lending, rules.landing)
        self.cache, self.book = HostPages(), PullBook(1)
        self.known: dict[str, Target] = {}
        self.silent = rules.silent(self.clock)
        self.sending, self.receiving = rules.sending(holder), Receiving(taker)
        self.lender: Lender = rules.lender(self.cache, self.staging, cast(Any, self.sending), self.book, self.clock)
        self.halves = WatchedShares(self._complain, rules.landing)
        whole, halves = (Landing(cast(Any, self.receiving), memory) for memory in (self.staging, self.halves))
        self.pulls: Taker = rules.taker(
            lambda holder: halves if holder.others else whole,
            cast(Any, self.ask_to_lend),
            self.book,
            STALL,
            self.silent,
            self.clock,
            lambda: world.random.randrange(2**62, 2**63),
        )
        if self.number % 2:
            self.pulls.piece_bytes = PIECE_PAGES * PAGE_BYTES
        self.peers = PeersBackend(None, now=self.clock)
        self.peers.connect(cast(Any, None), self.pulls, cast(Any, self.ask_who_has))
        self.loans: list[Loan] = []
        self.unopened: dict[Loan, int] = {}
        self._ended: list[Loan] = []
        self.jobs: list[Job] = []
        self.pulled: set[str] = set()
        self.draining = False

    def clock(self) -> float:
        return self.world.now / TICKS_A_SECOND

    @property
    def name(self) -> str:
        return self.holder.ref.rank.engine

    @property
    def address(self) -> str:
        return self.holder.address

    @property
    def running(self) -> bool:
        return self.holder.state == self.taker.state == "running"

    @property
    def dead(self) -> bool:
        return self.holder.state == "dead"

    @property
    def lies(self) -> bool:
        return self.number in self.world.liars

    @property
    def left(self) -> tuple[int, int, int]:
        """Staging pages lent and taken that are out, and pulls; but for pages of a write with an unknown end whose
        record went with its taker: nobody gets those back before the data plane is destroyed (7, writes)."""
        lent = self.staging.lending.taken
        for loan in self._ended:
            handle = loan.sender._handle
            record = handle.record
            if not handle.release_safe and record is not None and record.writes is Writes.UNKNOWN:
                lent -= len(loan.pages) if record.key not in self.holder.core.rooms else 0
        return lent, self.staging.landing.taken + self.halves.slots.taken, len(self.jobs) + len(self.loans)

    def close(self) -> None:
        """Its process is gone, and all that it had."""
        for job in self.jobs:
            job.close()
        for loan in self.loans:
            loan.sender.close()
        self.jobs, self.loans = [], []

    # Its threads.

    def run_threads(self) -> None:
        for job in list(self.jobs):
            job.step()
            if job.over:
                self.jobs.remove(job)

    def settle_loans(self) -> None:
        for loan in list(self.loans):
            opened = loan.sender.decode_prefix_pages is not None
            self.unopened[loan] = 0 if opened else self.unopened.get(loan, 0) + 1
            if self.lender.is_over(loan):
                self.lender.end(loan)
                self.loans.remove(loan)
                self._ended.append(loan)
                del self.unopened[loan]

    def landing_pages(self, wait: ForPages) -> list[int]:
        places = self.staging.landing, self.halves.slots
        before = [place.size - place.taken for place in places]
        pages = wait.take(0.0)
        if any(free > 1 and place.taken == place.size for place, free in zip(places, before, strict=True)):
            self._complain("one pull takes all landing pages")
        return pages

    def pull(self, prompt: Sequence[str]) -> None:
        """A prefetch of what the cache lacks of a prompt; what does not come is computed."""
        first = self.cache.count(prompt)
        pages = self.cache.reserve(len(prompt) - first)
        if not pages:
            return
        work = self.peers.pulling(prompt, first, [self.cache.buffers(page) for page in pages], PULL_SECONDS, None)
        done = partial(self._pulled, prompt[first : first + len(pages)], pages)
        self.jobs.append(Job(self, self._pulling(work, pages), done))

    def _pulling(self, work: Waiting[list[PageResult]], pages: Sequence[int]) -> Waiting[list[PageResult]]:
        """Pages of a prefetch that is cancelled were never exposed: others have them at once."""
        try:
            return (yield from work)
        except GeneratorExit:
            self.cache.give_back(pages)
            raise

    def cancel(self) -> None:
        """One of its pulls that wait is given up."""
        waiting = [job for job in self.jobs if job.wait is not None and not job.over]
        if waiting:
            self.world.random.choice(waiting).close()
            self.world.outcomes["pulls cancelled"] += 1

    def _pulled(self, names: Sequence[str], pages: Sequence[int], results: Sequence[PageResult], job: Job) -> None:
        good = next((n for n, result in enumerate(results) if not result.ok), len(pages))
        if len(results) != len(pages) or any(result.ok for result in results[good:]):
            self._complain("what came is no prefix")
        suspects = {self.world.engines[number].address for number in self.world.suspects}
        for name, page in zip(names[:good], pages, strict=False):
            if self.cache.content(page) != bytes.fromhex(name):
                if not job.asked & suspects and name not in self.world.spoilt:
                    self._complain("a wrong byte in the cache")
                self.world.spoilt.add(name)
            self.cache.commit(name, page)
        self.pulled.update(names[:good])
        self.cache.give_back(pages[good:])
        self.world.outcomes["pages pulled"] += good
        self.world.outcomes["pages put together"] += good * job.halves
        self.world.outcomes["from two holders"] += good > 0 and len(job.asked) > 1
        for name in names[good:]:
            self.cache.compute(name)

    def steal(self, address: str, room: int) -> None:
        """A room that is another engine's is opened by this one, which somehow learned its number."""
        pages = self.staging.landing.take(1)
        if pages:
            self.known.setdefault(address, self.world.target_at(address))
            self.jobs.append(Job(self, self._stealing(address, room, pages), lambda _, job: None))

    def _stealing(self, address: str, room: int, pages: list[int]) -> Waiting[None]:
        receiver = KVReceiver(cast(Any, self.receiving), address, room)
        try:
            receiver.init(pages)
            for _ in range(4):
                yield ForRoom(receiver, 0.5)
            self.world.outcomes[f"theft {receiver.poll().name}"] += 1
        finally:
            receiver.close()
            self.staging.landing.retire(pages, lambda: receiver.release_safe)

    def hoard(self, number: int, prompt: Sequence[str]) -> None:
        """Asks for pages, and never opens the room."""
        room = self.world.random.randrange(2**62, 2**63)
        self.world.ask(
            self, number, ANSWER, lambda target: target.lend(prompt, 0, room, self.taker.ref), lambda _: None
        )

    # What it asks of others.

    def ask_who_has(
        self, hashes: Sequence[str], timeout: float, without: Collection[str], only: Collection[str] | None = None
    ) -> Survey:
        seconds, holders = min(timeout, ANSWER), list[tuple[int, Holder]]()
        for number in range(len(self.world.engines)):
            address = self.world.registry[number].address
            if number == self.number or address in without or address in self.silent:
                continue
            if self.clock() - self.silent.since.get(address, -math.inf) < 0.95:
                self._complain("a silent holder is asked again at once")
            holders.append((number, Holder(f"E{number}", address, address)))
        halves = len(holders) > 1 and self.world.random.random() < HALVES_SHARE
        asked = self.world.random.sample(holders, 2) if halves else holders
        questions = [self._ask_for_count(number, holder, hashes, seconds) for number, holder in asked]
        return HalvesSurvey(questions) if halves else Survey(questions)

    def _ask_for_count(self, number: int, holder: Holder, hashes: Sequence[str], seconds: float) -> Question:
        def then(pages: int) -> Found:
            return Found(holder, min(pages, len(hashes)), b"")

        return self.world.ask(self, number, seconds, lambda target: target.count(hashes), then)

    def ask_to_lend(
        self, found: Found, prompt: Sequence[str], first: int, count: int, room: int, timeout: float
    ) -> Question:
        holder = found.holder

        def then(lent: Lent) -> Lent:
            if lent.pages > count:
                raise InvalidRequest.of("lent_pages", lent.pages, f"at most {count}, as asked for")
            self.world.rules.check_lent(lent, holder, self.taker.ref.rank)
            self.known[holder.sessions] = Target(lent.holder, holder.sessions)
            return lent

        seconds, number = max(0.001, min(timeout, ANSWER)), self.world.number_at(holder.address)
        asked = prompt[: first + count]
        return self.world.ask(
            self, number, seconds, lambda target: target.lend(asked, first, room, self.taker.ref), then
        )

    # What others ask of it.

    def count(self, hashes: Sequence[str]) -> int:
        self._check_open()
        return len(hashes) + 3 if self.lies else self.lender.count(hashes)

    def lend(self, hashes: Sequence[str], first: int, room: int, taker: RankRef) -> Lent:
        self._check_open()
        if self.lies:
            return self._lie(len(hashes) - first)
        loan = self.lender.lend(hashes, first, room, taker)
        if loan is None:
            return Lent(0, self.holder.ref, Layout())
        self.loans.append(loan)
        self.world.lent(self, loan, room, hashes[first : first + len(loan.pages)])
        return Lent(len(loan.pages), self.holder.ref, Layout())

    def _lie(self, most: int) -> Lent:
        rnd = self.world.random
        speaker = rnd.choice([self, self, rnd.choice(self.world.engines)])
        return Lent(rnd.choice([1, most, most + 5]), speaker.holder.ref, Layout())

    def _check_open(self) -> None:
        if self.draining:
            raise ServerDraining(f"{self.name} drains and lends nothing more", retry_after=1.0)

    def _complain(self, what: str) -> None:
        self.world.violate(what, self.holder.ref)
