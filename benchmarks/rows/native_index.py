"""index.native.*: the index in Rust beside the one in Python, over one made-up fleet, asked by a program in Rust."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from kvgrpc.client import SyncClient
from kvgrpc.v1 import index_service_pb2 as pb
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
BUILT = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / ".cache/rust")) / "release"
PROGRAMS = {"index": BUILT / "kvgrpc-index", "fleet": BUILT / "examples/fleet", "ask": BUILT / "examples/ask"}
SCORE, BATCH, MEMORY = "index.native.score", "index.native.batch16", "index.native.memory"
BASELINE = "kvgrpc serve index"
ENGINES, BATCHES_A_SECOND, TASKS, BEST = 64, 2_000, 4, 8
# The larger of two indexes whose sizes are compared: each cache that is followed costs the buffers of its stream
# besides (0.14 MB here), in an index of any size.
TIMES_AS_MANY = 4
# An index that takes less of what its fleet says has more time for questions, and its row no meaning.
TAKEN = 0.9 * BATCHES_A_SECOND
# What it takes once it has caught up with its fleet, looked at for so long.
SETTLED, SETTLED_SECONDS = 1.1 * BATCHES_A_SECOND, 1.0
LOAD_SECONDS = 300.0
# Half of what each is to answer in a second.
PACED = {SCORE: (2_500, 250), BATCH: (10_000, 500)}


def benchmarks(plan: Plan) -> list[Benchmark]:
    blocks, seconds = plan.native_index_blocks, plan.native_index_seconds
    sides = {"missing": missing(), "warm_ups": 0}
    return [
        Benchmark(
            metrics=(
                Metric(SCORE, "queries/s", "higher", BASELINE, Target(value=5_000)),
                Metric(f"{SCORE}.p99_paced", "us", "lower", BASELINE, Target(value=1_000)),
            ),
            ours=lambda: Asked(native, SCORE, 1, blocks, seconds, PACED[SCORE][0]),
            baseline=lambda: Asked(in_python, SCORE, 1, blocks, seconds, PACED[SCORE][1]),
            **sides,  # type: ignore[arg-type]
        ),
        Benchmark(
            metrics=(
                Metric(BATCH, "queries/s", "higher", BASELINE, Target(value=20_000)),
                Metric(f"{BATCH}.p99_paced", "us", "lower", BASELINE, Target(value=1_000)),
            ),
            ours=lambda: Asked(native, BATCH, 16, blocks, seconds, PACED[BATCH][0]),
            baseline=lambda: Asked(in_python, BATCH, 16, blocks, seconds, PACED[BATCH][1]),
            **sides,  # type: ignore[arg-type]
        ),
        Benchmark(
            metrics=(Metric(MEMORY, "B/block", "lower", BASELINE, Target(value=64)),),
            ours=lambda: Grown(native, blocks),
            baseline=lambda: Grown(in_python, blocks),
            **sides,  # type: ignore[arg-type]
        ),
    ]


def missing() -> str:
    return "" if all(path.exists() for path in PROGRAMS.values()) else "not built: make native"


class Program:
    """A process that says its address in its first line, last word."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().split()[-1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def rss(self) -> int:
        return int(psutil.Process(self._process.pid).memory_info().rss)

    def cpu(self) -> float:
        """Seconds that it ran."""
        return float(sum(psutil.Process(self._process.pid).cpu_times()[:2]))

    def end(self, seconds: float) -> None:
        """As an operator ends it."""
        self._process.terminate()
        self._process.wait(seconds)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


Start = Callable[..., Program]


def native(source: str, *more: str) -> Program:
    named = ["--source", source] if source else []
    return Program([str(PROGRAMS["index"]), "--listen", "127.0.0.1:0", *named, *more])


def in_python(source: str, *more: str) -> Program:
    command = [str(ROOT / ".venv/bin/python"), "-m", "kvgrpc", "serve", "index", "--listen", "127.0.0.1:0"]
    return Program([*command, "--source", source, *more])


def fleet(blocks: int, batches_a_second: int, layout: str, engines: int = ENGINES, dp_ranks: int = 1) -> Program:
    """Of so many caches, as many of which as ``dp_ranks`` are an engine."""
    return Program([str(PROGRAMS["fleet"]), str(engines), str(blocks), str(batches_a_second), layout, str(dp_ranks)])


def standing(client: SyncClient) -> tuple[int, int]:
    """Of how many caches blocks are told, and how many are exact at some sequence that is not old."""
    found = client.list_sources()
    exact = (pb.INDEX_SOURCE_STATE_CURRENT, pb.INDEX_SOURCE_STATE_CATCHING_UP)
    return sum(bool(source.blocks) for source in found), sum(source.freshness.state in exact for source in found)


def batches_in(address: str) -> int:
    """How many of all caches an index has."""
    with SyncClient(address) as client:
        return sum(source.freshness.next_sequence for source in client.list_sources())


def until_current(address: str) -> None:
    with SyncClient(address) as client:
        wait_until(lambda: standing(client)[1] == ENGINES, LOAD_SECONDS)


def until_settled(address: str) -> None:
    """Until it knows all caches, and takes no more than the fleet says: not what that had to say while it loaded."""
    until_current(address)

    def settled() -> bool:
        began, before = time.monotonic(), batches_in(address)
        time.sleep(SETTLED_SECONDS)
        return (batches_in(address) - before) / (time.monotonic() - began) < SETTLED

    wait_until(settled, LOAD_SECONDS)


class Asked:
    """An index of a fleet that goes on, asked as fast as can be and then at even distances.

    Both are there for a turn: those of the other side would have their share of the processors meanwhile. ``ready``
    returns once whoever listens at an address knows the fleet.
    """

    def __init__(
        self,
        start: Start,
        name: str,
        batch: int,
        blocks: int,
        seconds: float,
        pace: int,
        ready: Callable[[str], None] = until_settled,
    ) -> None:
        self._start, self._name, self._batch, self._ready = start, name, batch, ready
        self._blocks, self._seconds, self._pace = blocks, seconds, pace
        self._highest = 0

    def turn(self) -> Figures:
        made = fleet(self._blocks, BATCHES_A_SECOND, "chains")
        index = self._start(made.address)
        try:
            self._ready(index.address)
            began, before = time.monotonic(), self._taken(index.address)
            fast, paced = self._ask(index.address, 0), self._ask(index.address, self._pace)
            rate = (self._taken(index.address) - before) / (time.monotonic() - began)
            if self._ready is until_settled and rate < TAKEN:
                raise AssertionError(f"it took {rate:.0f} of {BATCHES_A_SECOND} event batches a second")
            self._highest = max(self._highest, index.rss())
        finally:
            index.close()
            made.close()
        return {self._name: fast["questions"], f"{self._name}.p99_paced": paced["p99"]}

    def _taken(self, address: str) -> int:
        return batches_in(address) if self._ready is until_settled else 0

    def _ask(self, address: str, rate: int) -> dict[str, float]:
        words = (ENGINES, self._blocks, self._batch, BEST, self._seconds, TASKS, rate)
        command = [str(PROGRAMS["ask"]), address, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 2 * self._seconds)
        if done.returncode:
            raise AssertionError(done.stderr)
        return dict(json.loads(done.stdout))

    def peak_rss(self) -> int:
        return self._highest

    def close(self) -> None: ...


class Grown:
    """By how much an index of these blocks grows for each distinct one more, of which half of the engines have each."""

    def __init__(self, start: Start, blocks: int) -> None:
        self._start, self._blocks, self._highest = start, blocks, 0

    def turn(self) -> Figures:
        few, many = self._rss(self._blocks), self._rss(TIMES_AS_MANY * self._blocks)
        self._highest = max(self._highest, many)
        return {MEMORY: (many - few) / (2 * (TIMES_AS_MANY - 1) * self._blocks)}

    def _rss(self, blocks: int) -> int:
        made = fleet(blocks, 0, "half")
        index = self._start(made.address)
        try:
            until_current(index.address)
            return index.rss()
        finally:
            index.close()
            made.close()

    def peak_rss(self) -> int:
        return self._highest

    def close(self) -> None: ...
