"""Engines that pull from each other for a while, in trouble of all kinds, then quiet until all is over: one seed.

``python -m tests.simulation.pull_world RUNS [--seed N] [-v]`` runs some by hand.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvgrpc.model import RankId
from kvgrpc.pull.lending.lender import UNOPENED_SECONDS, Loan
from kvgrpc.transfer.protocol.types import Target
from tests.simulation.fleet import Singles
from tests.simulation.hostile import LyingCore
from tests.simulation.plane import Write
from tests.simulation.processes import DecodeProcess, PrefillProcess
from tests.simulation.pull_engines import (
    ANSWER,
    PULL_SECONDS,
    STALL,
    TICKS_A_SECOND,
    Engine,
    Question,
)
from tests.simulation.pull_memory import STAGING_PAGES
from tests.simulation.pull_processes import HolderProcess, TakerProcess
from tests.simulation.pull_rules import RULES, Rules
from tests.simulation.world import World

ENGINES, PROMPTS, PROMPT_PAGES, THREADS = 4, 6, 10, 3
# Each engine looks once a tick, and what it hears was up to 2 ticks on its way.
LATE = 8
FAULTS = (
    *["break"] * 3,
    *["kill"] * 3,
    "kill behind a cut",
    *["stop"] * 3,
    *["hold"] * 2,
    *["cut"] * 3,
    *["terminate"] * 4,
    *["destroy plane"] * 2,
    *["cancel"] * 3,
)


class Engines(Singles):
    """Each is a prefill and a decode of one name."""

    @property
    def prefills(self) -> tuple[RankId, ...]:
        return tuple(RankId(f"E{number}") for number in range(ENGINES))

    @property
    def decodes(self) -> tuple[RankId, ...]:
        return self.prefills


@dataclass(frozen=True)
class LentRoom:
    """What was lent in a room, and to whom."""

    holder: Engine
    taker: RankId
    pages: Sequence[int]
    names: Sequence[str]


class PullWorld(World):
    """Half of the prompts are asked for at two engines, as if they were ranks of one that have half of each page each.

    Of five seeds one has a ``liar``, a holder that says and answers what it likes; two have a ``thief``, which opens
    rooms of others, and a taker that opens none of its own.
    """

    def __init__(self, seed: int, rules: Rules = RULES) -> None:
        self.rules = rules
        liars = [ENGINES - 1] if seed % 5 == 4 else []
        super().__init__(seed, through_wire=seed % 4 == 0, fleet=Engines(), liars=liars)
        self.thief = 1 if seed % 5 in (1, 2) else None
        self.threads_wait = True
        self.network.slow_share = 0.2
        self.questions: list[Question] = []
        self.spoilt: set[str] = set()
        self.rooms: dict[int, LentRoom] = {}
        self.prompts = [_prompt(number) for number in range(PROMPTS)]
        self._left: dict[Write, bytes] = {}
        self.engines = [self._engine(number) for number in range(ENGINES)]
        for engine in self.engines:
            self._compute(engine, self.random.choice(self.prompts))

    def run(self, faulty: int = 220, most: int = 900) -> PullWorld:
        for _ in range(faulty):
            self._traffic()
            if self.random.random() < 0.06:
                self._fault()
            self.step()
        self._calm_down()
        for _ in range(most):
            self.step()
            if self.over:
                break
        else:
            self._say_what_is_left()
        for engine in self.engines:
            self._count_ends(engine)
        return self

    def _count_ends(self, engine: Engine) -> None:
        """What became of its pulls, by direction and reason."""
        for row in engine.book.rows():
            reason = "OK" if row.failure is None else row.failure.reason.name
            if reason == "ROOM_CONFLICT" and not self.suspects:
                self.violate("somebody else has the room of a pull", row.room)
            self.outcomes[f"{row.direction.name} {reason}"] += 1

    def step(self) -> None:
        super().step()
        for question in list(self.questions):
            question.step()
            if question.done:
                self.questions.remove(question)
        for engine in self.engines:
            if not engine.dead:
                self._look(engine)

    @property
    def over(self) -> bool:
        return not self.questions and not self._todo and not any(map(_is_busy, self.engines))

    # What engines ask of the world.

    def ask(
        self, asker: Engine, number: int, seconds: float, do: Callable[[Engine], Any], then: Callable[[Any], Any]
    ) -> Question:
        question = Question(asker, number, seconds, do, then)
        self.questions.append(question)
        return question

    def number_at(self, address: str) -> int:
        return int(address[1:])

    def target_at(self, address: str) -> Target:
        return self.registry[self.number_at(address)]

    def lent(self, holder: Engine, loan: Loan, room: int, names: Sequence[str]) -> None:
        at_once = {name for each in holder.loans if each is not loan for name in self.rooms[each.sender.room].names}
        self.rooms[room] = LentRoom(holder, loan.entry.peer.rank, loan.pages, names)
        self.outcomes["rooms lent"] += 1
        self.outcomes["pages lent to two"] += len(at_once.intersection(names))
        self.outcomes["pages lent on"] += len(holder.pulled.intersection(names))
        if self.thief is not None and loan.entry.peer.rank.engine != f"E{self.thief}" and self.random.random() < 0.5:
            self.at(self.random.randrange(4), partial(self._steal, holder.address, room))

    # What reaches memory.

    def land(self, writer: PrefillProcess, write: Write) -> None:
        target = write.target
        content = self._left.pop(write, None)
        if target.state == "dead" or not isinstance(target, TakerProcess) or not isinstance(writer, HolderProcess):
            return
        content = content or writer.engine.staging.content(write.position)
        lent, engine = self.rooms[write.key.room], target.engine
        name = lent.names[list(lent.pages).index(write.position)]
        if engine.name != lent.taker.engine:
            self.violate("a lent page went to another engine", write.key)
        if content != bytes.fromhex(name) and name not in self.spoilt:
            self.violate("a write reads a page that is another one now", write.key)
        place = engine.staging if write.page < STAGING_PAGES else engine.halves
        if engine.receiving.owner.get(write.page) != write.key.room or place.is_free(write.page):
            self.violate(f"foreign write on landing page {write.page}", write.key)
        place.land(write.page, content)

    def leave(self, write: Write, writer: PrefillProcess, killed: bool = False) -> None:
        assert isinstance(writer, HolderProcess)
        self._left[write] = writer.engine.staging.content(write.position)
        super().leave(write, writer, killed)

    # What must hold.

    def _look(self, engine: Engine) -> None:
        lent: Counter[str] = Counter()
        for loan in engine.loans:
            lent[loan.entry.peer.rank.engine] += len(loan.pages)
        if lent and max(lent.values()) > STAGING_PAGES // 2 // 2:
            self.violate("an engine has more than its share", engine.holder.ref)
        if +engine.cache.pins:
            self.violate("a loan holds the cache", engine.holder.ref)
        if max(engine.unopened.values(), default=0) > UNOPENED_SECONDS * TICKS_A_SECOND + LATE:
            self.violate("pages wait for a taker, and nobody opens the room", engine.holder.ref)
        for job in engine.jobs:
            if job.ticks > PULL_SECONDS * TICKS_A_SECOND + LATE:
                self.violate("a pull does not end", engine.taker.ref)
            if job.stalled > STALL * TICKS_A_SECOND + LATE:
                self.violate("a holder that sends nothing is not given up", engine.taker.ref)
            # It is asked for as long as it may stall; then a last time, for which a page was waited for.
            if job.busy > (2 * STALL + ANSWER) * TICKS_A_SECOND + LATE:
                self.violate("a busy holder is asked for too long", engine.taker.ref)

        for pair in engine.taker.core.pairs.values():
            if any(pair.ref == each.holder.ref and pair.address != each.address for each in self.engines):
                self.violate("a session of one engine is looked for at another's address", pair.ref)

    def _say_what_is_left(self) -> None:
        for engine in self.engines:
            if not engine.dead and any(engine.left):
                lent, taken, pulls = engine.left
                text = f"at the end {lent} lent and {taken} landing pages and {pulls} pulls are left"
                self.violate(text, engine.holder.ref)

    # What happens.

    def _traffic(self) -> None:
        rnd = self.random
        engine, prompt = rnd.choice(self.engines), rnd.choice(self.prompts)
        if rnd.random() < 0.15:
            engine.cache.evict(rnd.randrange(1, 8))
        if not engine.running or engine.draining or rnd.random() > 0.3:
            return
        if rnd.random() < 0.15:
            self._compute(engine, prompt)
        elif engine.number == self.thief and rnd.random() < 0.2:
            self._hoard(engine, prompt)
        elif len(engine.jobs) < THREADS:
            engine.pull(prompt)

    def _hoard(self, engine: Engine, prompt: Sequence[str]) -> None:
        """Has its share at every other one, and opens none of it; then it wants more."""
        for number in [each.number for each in self.engines if each is not engine] * 2:
            engine.hoard(number, prompt)
        self.at(5, lambda: engine.pull(prompt) if engine.running and not engine.draining else None)

    def _compute(self, engine: Engine, prompt: Sequence[str]) -> None:
        for name in prompt:
            engine.cache.compute(name)

    def _steal(self, address: str, room: int) -> None:
        if self.thief is not None and self.engines[self.thief].running:
            self.engines[self.thief].steal(address, room)

    def _fault(self) -> None:
        rnd = self.random
        kind, engine, other = rnd.choice(FAULTS), *rnd.sample(self.engines, 2)
        if engine.dead:
            return
        self.note(engine.holder.ref, kind)
        if kind == "break":
            standing = [link for link in self.network.links if link.standing]
            if standing:
                self.break_stream(rnd.choice(standing))
        elif kind == "kill":
            self.kill(engine)
        elif kind == "kill behind a cut":
            self.cut(other.taker, engine.holder, rnd.randrange(40, 150))
            self.kill(engine)
        elif kind in ("stop", "hold"):
            touch, ticks = self.stop if kind == "stop" else self.hold, rnd.choice([5, 15, 25, 50, 120])
            touch(engine.holder, ticks)
            touch(engine.taker, ticks)
        elif kind == "cut":
            self.cut(other.taker, engine.holder, rnd.choice([5, 15, 50, 150]))
        elif kind == "terminate":
            self.terminate(engine)
        elif kind == "cancel":
            engine.cancel()
        else:
            engine.holder.plane.destroy()

    def kill(self, engine: Engine, goodbye: bool = False) -> None:
        """And started again at the same address, as a new incarnation with an empty cache."""
        if engine.dead:
            return
        holder, taker = engine.holder, engine.taker
        if not goodbye:
            self.promises.after_death_of_decode(taker)
        self._disturb(taker)
        taker.state = "dead"
        self.network.process_died(taker)
        self._count_ends(engine)
        engine.close()
        if goodbye:
            self._disturb(holder)
            self._retire(holder, goodbye=True)
        else:
            self.kill_prefill(holder)
        lag = self.random.choice([0, 5, 20])
        self.at(self.random.choice([1, 10, 40]), lambda: self._start_again(engine.number, holder.address, lag))

    def terminate(self, engine: Engine) -> None:
        """As an engine that is told to: it lends no more, copies no more, waits for writes, frees its memory, ends."""
        if not engine.draining:
            engine.draining = True
            engine.holder.core.drain()
            self.at(10, lambda: self._close(engine))

    def _close(self, engine: Engine) -> None:
        if engine.dead:
            return
        if not engine.running:
            self.at(3, lambda: self._close(engine))
            return
        engine.staging.close(0.0)
        engine.halves.close(0.0)
        plane = engine.holder.plane
        if plane.late:
            plane.destroy()
        if plane.idle and not engine.holder.core.open_writes:
            engine.staging.freed = engine.halves.freed = True
            self.at(10, lambda: self.kill(engine, goodbye=True))
        else:
            self.at(3, lambda: self._close(engine))

    def _calm_down(self) -> None:
        """What lies is replaced, cuts heal, what was stopped goes on, writes have no unknown end any more."""
        self.calm = True
        liars, self.liars, self.thief = self.liars, frozenset(), None
        for engine in self.engines:
            if engine.number in liars:
                self.kill(engine)
        self.network.cuts.clear()
        self.network.slow_share = 0.0
        for process in (*self.decodes, *self.prefills):
            self.go_on(process)
        for prefill in self.prefills:
            prefill.plane.destroy()

    # Processes.

    def _engine(self, number: int) -> Engine:
        holder, taker = self.current[number], self.decodes[number]
        assert isinstance(holder, HolderProcess) and isinstance(taker, TakerProcess)
        return Engine(self, holder, taker)

    def _start_again(self, number: int, address: str, lag: int) -> None:
        self.decodes[number] = self._start_decode(number)
        self.restart(number, address, lag)
        self.engines[number] = self._engine(number)
        self._compute(self.engines[number], self.random.choice(self.prompts))

    def _start_prefill(self, number: int, address: str) -> PrefillProcess:
        self._epoch += 1
        core = LyingCore if number in self.liars else self._cores[1]
        prefill = HolderProcess(self, number, self._epoch, address, core)
        if isinstance(prefill.core, LyingCore):
            prefill.core.liar = self.random
        self.prefills.append(prefill)
        self.listening[address] = prefill
        self.note(prefill.ref, "listens at", address)
        return prefill

    def _start_decode(self, number: int) -> DecodeProcess:
        self._epoch += 1
        return TakerProcess(self, number, self._epoch)

    def _register(self, prefill: PrefillProcess) -> None:
        """Whoever follows the registry hears of another incarnation: what its former self did is forgotten."""
        super()._register(prefill)
        for engine in self.engines:
            engine.silent.forget(prefill.address)


def _is_busy(engine: Engine) -> bool:
    return engine.dead or any(engine.left)


def _prompt(number: int) -> list[str]:
    """Page hashes: each prompt begins as others do, and goes on alone."""
    shared = number % 3 + 2
    names, before = [], b""
    for page in range(PROMPT_PAGES):
        before = hashlib.sha256(before + bytes([page if page < shared else number + 10])).digest()
        names.append(before.hex())
    return names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.pull_world", description=__doc__)
    parser.add_argument("runs", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the first world")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the log of the first world")
    arguments = parser.parse_args()
    outcomes: Counter[str] = Counter()
    broken = []
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        world = PullWorld(seed).run()
        outcomes.update(world.outcomes)
        broken += [(seed, *world.violations[0])] if world.violations else []
        if arguments.verbose and seed == arguments.seed:
            for line in world.log:
                print(*line)
    print(dict(sorted(outcomes.items())))
    for seed, tick, what, key in broken[:10]:
        print(f"python -m tests.simulation.pull_world 1 --seed {seed} -v   # tick {tick}: {what} ({key})")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
