"""Pulls among engines that are killed, stopped and emptied: right bytes or none, and nothing is lent for ever."""

from __future__ import annotations

import contextlib
import queue
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvgrpc.server import RegistryServer
from tests.support.pull_process import Process
from tests.support.pull_rank import STALL_SECONDS

ENGINES = ("A", "B", "C")
PROMPTS, LONGEST = 6, 600
# Of a pull, at some moment of which somebody else is disturbed.
IN_THE_MIDDLE = 0.15
# A pull from two holders that both fall silent, and a busy machine; a stopped taker's clock goes on.
LONGEST_PULL = 2 * STALL_SECONDS + 8.0
LONGEST_STOP = 5.0
IDLE_WITHIN = 60.0
# On a machine that is slow to start a successor the soak goes on until something was pulled and disturbed.
PATIENCE = 120.0
LEAST_PAGES, LEAST_FAULTS = 100, 2
IDLE = {"lending": 0, "landing": 0, "read": 0}


@dataclass(frozen=True, slots=True)
class PullPlan:
    seconds: float
    data_plane: str = "shm"
    fault_every: float = 3.0
    seed: int = 1


@dataclass
class PullResult:
    plan: PullPlan
    pulls: int = 0
    pages: int = 0
    longest: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class PullSoak:
    """Each engine pulls, is filled and emptied in an order that the seed draws; what another one has comes at any time,
    so that a page may be lent on while it is new."""

    def __init__(self, plan: PullPlan, logs: Path) -> None:
        self._plan = plan
        self._log = (logs / f"pulls-{plan.data_plane}.log").open("ab")
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._pulling: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.result = PullResult(plan)

    def run(self) -> PullResult:
        registry = RegistryServer(["127.0.0.1:0"], lease_ttl=3.0).open()
        engines = [Engine(name, registry.address, self._plan.data_plane, self._log) for name in ENGINES]
        threads = [threading.Thread(target=self._drive, args=(engine,)) for engine in engines]
        try:
            for engine in engines:
                engine.begin()
            for thread in threads:
                thread.start()
            self._disturb(engines)
            for thread in threads:
                thread.join(LONGEST_PULL + IDLE_WITHIN)
            for engine in engines:
                self._look_at_rest(engine)
        finally:
            for engine in engines:
                engine.process.end()
            registry.close()
            self._log.close()
        return self._judged()

    def _drive(self, engine: Engine) -> None:
        draw = random.Random(f"{self._plan.seed} {engine.name}")
        try:
            while not self._over.is_set():
                first, pages = draw.randrange(1, PROMPTS + 1), draw.randrange(1, LONGEST)
                what = draw.choices(("pull", "fill", "evict"), (6, 3, 1))[0]
                order: dict[str, Any] = {} if what == "evict" else {"first": first, "pages": pages}
                if what == "pull":
                    self._pulling.put(engine.name)
                answer = engine.ask(what, **(order | ({"keep": True} if what == "pull" else {})))
                if answer is not None and what == "pull":
                    self._note(engine, answer)
        except Exception as error:
            self._complain(f"{engine.name}: {type(error).__name__}: {error}")

    def _disturb(self, engines: list[Engine]) -> None:
        draw, end = random.Random(self._plan.seed), time.monotonic() + self._plan.seconds
        while not self._over.wait(self._plan.fault_every):
            left = end - time.monotonic()
            enough = self.result.pages >= LEAST_PAGES and self.result.faults.total() >= LEAST_FAULTS
            if left < 0 and (enough or left < -PATIENCE):
                break
            engine = self._in_the_middle(draw, engines)
            if draw.random() < 0.5:
                engine.kill()
                self.result.faults["kill"] += 1
            else:
                engine.stop(draw.uniform(0.5, LONGEST_STOP))
                self.result.faults["stop"] += 1
        self._over.set()

    def _in_the_middle(self, draw: random.Random, engines: list[Engine]) -> Engine:
        """One of those that another one may be pulling from."""
        while not self._pulling.empty():
            self._pulling.get()
        with contextlib.suppress(queue.Empty):
            taker = self._pulling.get(timeout=LONGEST_PULL)
            engines = [engine for engine in engines if engine.name != taker]
        time.sleep(draw.uniform(0.0, IN_THE_MIDDLE))  # a while of the pull, at some moment of which the fault comes
        return draw.choice(engines)

    def _note(self, engine: Engine, answer: dict[str, Any]) -> None:
        with self._lock:
            self.result.pulls += 1
            self.result.pages += answer["came"]
            took = max(0.0, answer["took"] - engine.take_stopped())
            self.result.longest = max(self.result.longest, took)
        if took > LONGEST_PULL:
            self._complain(f"{engine.name}: a pull took {took:.1f} s")
        if answer["reserved"]:
            self._complain(f"{engine.name}: {answer['reserved']} pages are still reserved after a pull")

    def _look_at_rest(self, engine: Engine) -> None:
        end, lent = time.monotonic() + IDLE_WITHIN, None
        while time.monotonic() < end:
            try:
                lent = engine.ask("lent")
            except (AssertionError, OSError) as error:
                self._complain(f"{engine.name} at the end: {error}")
                return
            if lent == IDLE:
                return
            time.sleep(0.2)
        self._complain(f"{engine.name}: still lent {IDLE_WITHIN:g} s after the last pull: {lent}")

    def _complain(self, problem: str) -> None:
        with self._lock:
            self.result.problems.append(problem)

    def _judged(self) -> PullResult:
        if self.result.pages < LEAST_PAGES:
            self._complain(f"only {self.result.pages} pages were pulled in {self.result.pulls} pulls")
        return self.result


class Engine:
    """A process, and after a kill its successor. One thread orders, another one disturbs."""

    def __init__(self, name: str, registry: str, plane: str, log: Any) -> None:
        self.name = name
        self._arguments = name, registry, plane
        self._log = log
        self._stopped = 0.0
        # By neither while it starts.
        self._may_be_disturbed = threading.Event()
        self._killed = False
        self.process = self._opened()

    def begin(self) -> None:
        self.process.answer()
        self._may_be_disturbed.set()

    def ask(self, do: str, **order: object) -> dict[str, Any] | None:
        """None: it was killed meanwhile, and its successor is there. Raises AssertionError where it ended by itself."""
        try:
            return self.process.ask(do, **order)
        except (AssertionError, BrokenPipeError):
            if not self._killed:
                raise
            self.process.end()
            self.process, self._killed = self._opened(), False
            self.begin()
            return None

    def kill(self) -> None:
        if self._may_be_disturbed.is_set():
            self._may_be_disturbed.clear()
            self._killed = True
            self.process.signal(signal.SIGKILL)

    def stop(self, seconds: float) -> None:
        """Blocks until it goes on."""
        process = self.process
        process.signal(signal.SIGSTOP)
        time.sleep(seconds)  # for so long it is silent
        process.signal(signal.SIGCONT)
        self._stopped += seconds

    def take_stopped(self) -> float:
        """Seconds that it stood still since it was asked last."""
        stopped, self._stopped = self._stopped, 0.0
        return stopped

    def _opened(self) -> Process:
        return Process(*self._arguments, log=self._log)
