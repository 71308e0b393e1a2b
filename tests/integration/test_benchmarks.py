"""`make bench` on tiny sizes: it runs, checks bytes, and says what it measured in the documented form."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from rich.console import Console

from benchmarks import missed, stages, steps
from benchmarks.__main__ import all_benchmarks, main
from benchmarks.baselines.disaggregation import contiguous_groups
from benchmarks.claims import CLAIMS, unsupported
from benchmarks.harness import quiet, threads
from benchmarks.harness.plan import FULL
from benchmarks.harness.rounds import Benchmark, Figures, run
from benchmarks.harness.table import Metric, Row, Target, plots
from benchmarks.harness.windows import Window, cpu_beside, kept
from benchmarks.harness.worker import Desk, Family, Worker, WorkerError
from benchmarks.missed import is_bare, limit_of
from benchmarks.rows import liveness, rooms
from benchmarks.sides.memory import Memory, Shape
from tests.support.waiting import wait_until

REPOSITORY = Path(__file__).parents[2]
FIELDS = {"name", "unit", "value", "baseline", "baseline_value", "ratio", "better", "runs", "spread"}
# One of each family that needs no Mooncake: both protocols' managers, a raw ceiling, both publishers.
ROWS = (
    "control.throughput",
    "control.throughput.cpu",
    "handoff.pairs.2.rooms",
    "dataplane.shm.32KiB",
    "events.replay.300B",
    "index.memory",
)


@pytest.mark.timeout(230)
def test_rows_run_beside_their_baselines_and_results_have_the_documented_fields(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks", "--quick", "--rounds", "1", "--only", ",".join(ROWS)]
    done = subprocess.run([*command, "--json", results], cwd=REPOSITORY, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(results.read_text())
    assert [row["name"] for row in rows] == list(ROWS)
    assert ">control.throughput<" in results.with_suffix(".svg").read_text()
    for row in rows:
        assert set(row) == FIELDS
        assert row["runs"] == 1
        better = row["value"] / row["baseline_value"]
        assert row["ratio"] == pytest.approx(better if row["better"] == "higher" else 1 / better)
        assert row["name"] in done.stdout


def test_rows_that_differ_by_a_size_are_drawn_for_a_page() -> None:
    sizes = {"pull.ttft": (2048, 128, 512), "index.memory": (1,)}  # one point is no line
    names = [(f"{family}.{size}", size) for family in sizes for size in sizes[family]]
    drawn = plots([Row(Metric(name, "ms", "lower", "again"), size / 8, size, 8.0, 5, 0.1) for name, size in names])
    assert drawn.splitlines() == [
        "```mermaid",
        "xychart-beta",
        '  title "pull.ttft: kvgrpc (first line) and again (second)"',
        "  x-axis [128, 512, 2048]",
        '  y-axis "ms"',
        "  line [16, 64, 256]",
        "  line [128, 512, 2048]",
        "```",
    ]


@pytest.mark.timeout(120)
def test_the_stages_of_a_room_are_told_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert stages.main(["handoff.control_latency", "--rooms", "3"]) == 0
    said = capsys.readouterr().out
    assert "3 rooms" in said
    reached = [line.split("│")[3].strip() for line in said.splitlines() if line.startswith("│")]
    at = [float(cell) for cell in reached if cell]
    assert at[0] == 0.0 and at == sorted(at)
    assert len(at) == len(stages.WARM), f"a stage that no room reached: was its function renamed?\n{said}"


def test_the_steps_of_a_room_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert steps.main(["--turns", "1"]) == 0
    rows = [[cell.strip() for cell in line.split("│")[1:4]] for line in capsys.readouterr().out.splitlines()]
    for process in ("prefill", "decode"):
        *found, whole = [float(row[2]) for row in rows if row and row[0] == process]
        assert min(found) > 0 and sum(found) == pytest.approx(whole, abs=0.1)


def test_an_unknown_row_is_an_error() -> None:
    assert main(["--only", "nonsense"]) == 2


def test_a_ratio_above_one_means_that_ours_is_better_either_way() -> None:
    faster = Metric("speed", "GB/s", "higher", "baseline", Target(ratio=2))
    shorter = Metric("delay", "ms", "lower", "baseline", Target(ratio=2, value=1.0))
    benchmark = Benchmark(
        (faster, shorter),
        ours=lambda: _Fixed({"speed": 4.0, "delay": 2.0}),
        baseline=lambda: _Fixed({"speed": 2.0, "delay": 4.0}),
    )
    speed, delay = run(benchmark, rounds=3)
    assert (speed.ratio, delay.ratio) == (2.0, 2.0)
    assert (speed.runs, speed.spread) == (3, 0.0)
    assert speed.met
    assert not delay.met, "the ratio is reached, the value is not"


def test_each_claim_is_said_where_it_is_looked_for_and_has_a_row() -> None:
    measured = {metric.name for benchmark in all_benchmarks(FULL) for metric in benchmark.metrics}
    for claim in CLAIMS:
        text = re.sub(r"\s+", " ", (REPOSITORY / claim.where).read_text())
        assert claim.says in text, f"{claim.where} says it no more: benchmarks/claims.py is to go with it"
        assert claim.row in measured


def test_a_run_supports_the_claims_that_its_rows_reach() -> None:
    def row(name: str, value: float, ratio: float) -> Row:
        return Row(Metric(name, "ms", "lower", "seed"), value, 1.0, ratio, 3, 0.1)

    busy, cost, other = "handoff.busy_engine", "control.init_cost.p99", "index.plan"
    missed = unsupported([row(busy, 0.9, 4.9), row(cost, 49.0, 1.0), row(other, 1.0, 0.1)])
    assert [claim.row for claim, _ in missed] == [busy]


def test_each_row_with_a_target_has_a_limit_or_stands_beside_the_bare_part() -> None:
    metrics = [metric for benchmark in all_benchmarks(FULL) for metric in benchmark.metrics]
    names = {metric.name for metric in metrics}
    # Of head slices one row tells, of all ways. The others are bounds on times, or beside another program; index.score
    # has index.score.direct, the same in process.
    without = (
        *("handoff.head_slice.", "registry.storm.fan_out", "liveness.", "hostile.", "events."),
        *("index.native.", "index.score"),
    )
    aimed = [metric for metric in metrics if metric.target != Target() and not metric.name.startswith(without)]
    assert [each.name for each in aimed if not limit_of(each.name, names) and not is_bare(each.baseline)] == []
    assert limit_of("events.publish_cost.p99", names) == "limit.publish_cost.p99"
    assert limit_of("handoff.few.10000", names) == "limit.throughput"
    assert limit_of("pull.latency.shm.100", names) == "limit.pull.copies.100"
    assert limit_of("pull.latency.mooncake.100", names) == "limit.pull.mooncake.100"
    assert limit_of("index.memory", names) is None
    assert not is_bare("a dict for each engine"), "our own table is quicker"


def test_a_run_ends_with_the_targets_it_misses_and_how_far_they_could_come(capsys: pytest.CaptureFixture[str]) -> None:
    ready, poll = (Metric(name, "us", "lower", "seeds", Target(value=40)) for name in ("engine.ready", "engine.poll"))
    limit = Metric("limit.engine.ready", "us", "lower", "seeds")
    rows = missed.beside_limits([Row(metric, 72.0, 32.0, 0.44, 3, 0.1) for metric in (ready, poll, limit)])
    missed.say(rows, Console(width=200))
    counted = (
        "Of 2 missed, the limit of 1 misses the target too; that of 0, or the bare part, reaches it, so the rest is"
        " ours; 1 have no limit."
    )
    reached = "limit.engine.ready has 72 us, 0.44 of seeds"
    assert capsys.readouterr().out.splitlines() == [
        "0 of 2 targets are met by this run.",
        f"missed engine.ready has 72 us, 0.44 of seeds; wanted <= 40 us; {reached}: out of reach",
        "missed engine.poll has 72 us, 0.44 of seeds; wanted <= 40 us; no row shows its limit: not known",
        counted,
    ]
    assert missed.markdown(rows).splitlines()[2:] == [
        "| `engine.ready` | 72 us, 0.44 | <= 40 us | 72 us, 0.44 | out of reach |",
        "| `engine.poll` | 72 us, 0.44 | <= 40 us | no row shows its limit | not known |",
        "",
        counted,
    ]


@pytest.mark.parametrize(
    ("target", "limit", "baseline", "so"),
    [
        (Target(ratio=0.9), (1.2, 0.8), "seeds", missed.SHORT),
        (Target(ratio=0.8), (1.2, 0.8), "seeds", missed.OURS),
        (Target(ratio=0.9), (1.2, 0.7), "seeds", missed.SHORT),
        (Target(ratio=0.9), (0.9, 0.7), "seeds", missed.OURS),  # of our own row's baseline: 1.1
        (Target(ratio=0.9), (1.2, 1.5), "pings alone", missed.SHORT),  # a ratio to something else
        (Target(value=1.0), (1.2, 0.9), "seeds", missed.SHORT),
        (Target(value=1.0), (0.9, 0.1), "pings alone", missed.OURS),
        (Target(ratio=0.7, of_limit=0.95), (1.6, 0.6), "seeds", missed.OURS),  # 0.57 is enough, which the limit has
    ],
)
def test_a_miss_that_is_ours_is_told_apart_from_one_that_nothing_reaches(
    target: Target, limit: tuple[float, float], baseline: str, so: str
) -> None:
    ours = Metric("handoff.tiny", "ms", "lower", "seeds", target)
    value, ratio = limit
    shows = Row(Metric("limit.tiny", "ms", "lower", baseline), value, 1.0, ratio, 3, 0.1)
    row, _ = missed.beside_limits([Row(ours, 2.0, 1.0, 0.5, 3, 0.1), shows])
    assert (row.met, missed.why(row)) == (False, so)


def test_a_share_of_the_limit_is_enough_where_a_target_says_so() -> None:
    ours = Metric("handoff.control_latency", "ms", "lower", "seeds", Target(ratio=0.7, of_limit=0.95))
    rows = [
        Row(ours, 1.7, 1.0, 0.59, 3, 0.1),
        Row(Metric("limit.control_latency", "ms", "lower", "seeds"), 1, 1, 0.6, 3, 0),
    ]
    assert rows[0].met is False, "nothing is known of its limit"
    assert missed.beside_limits(rows)[0].met is True
    assert ours.target.describe("ms", "lower") == ">= 0.7x or 0.95 of limit"


@pytest.mark.parametrize(("value", "met"), [(69.0, True), (68.9, False)])
def test_a_target_may_be_a_distance_to_the_baseline(value: float, met: bool) -> None:
    keeps = Metric("engine.decode_keeps", "%", "higher", "SGLang", Target(below=1))
    assert Row(keeps, value, 70.0, 0.98, 3, 0.1).met is met
    assert keeps.target.describe("%", "higher") == ">= baseline - 1 %"


def test_a_run_beside_another_baseline_says_nothing_of_claims_beside_the_first() -> None:
    row = Row(Metric("handoff.busy_engine", "ms", "lower", "SGLang"), 9.0, 1.0, 0.1, 3, 0.1)
    assert [claim.row for claim, _ in unsupported([row])] == ["handoff.busy_engine"]
    assert unsupported([row], against="sglang") == []


def test_liveness_prints_all_times_of_all_turns_together(capsys: pytest.CaptureFixture[str]) -> None:
    ours, baseline = liveness.Signalled(liveness.Ours), liveness.Signalled(liveness.Bare)
    for turns in (ours, baseline):
        assert turns.figures("liveness.detect", 1.0, [1.01, 1.03])["liveness.detect"] == pytest.approx(30.0)
        turns.figures("liveness.detect", 2.0, [2.05])
        turns.close()
    assert capsys.readouterr().out == "| `liveness.detect` | 30 | 46 | 50 | 3 |\n"


def test_a_wrong_byte_is_found() -> None:
    source, destination = (_memory() for _ in range(2))
    pages, places = np.array([0, 2]), np.array([1, 0])
    source.fill(7, pages)
    with pytest.raises(AssertionError, match="not the bytes of the peer's page"):
        destination.check(7, pages, places)


def test_the_baseline_groups_pages_as_the_seed_does() -> None:
    source, destination = np.array([4, 5, 6, 9, 10]), np.array([1, 2, 7, 8, 9])
    assert contiguous_groups(source, destination) == [(4, 1, 2), (6, 7, 1), (9, 8, 2)]


def test_an_error_in_a_worker_arrives_with_its_traceback() -> None:
    worker = Worker("failing")
    try:
        with pytest.raises(WorkerError, match="ZeroDivisionError"):
            worker.call(_divide, 0)
        assert worker.call(_divide, 2) == 0.5
    finally:
        worker.close()


def test_forked_workers_are_processes_of_their_own_and_go_with_their_family() -> None:
    family = Family("forked", "benchmarks.rows.rooms")  # what they are asked is there: this module takes long to load
    try:
        first, second = family.fork(), family.fork()
        assert first.call(rooms.cpu_used) > 0 and second.call(rooms.cpu_used) > 0
        with pytest.raises(WorkerError, match="KeyError: 'side'"):
            first.call(rooms.stop)
        assert len({first.pid, second.pid, os.getpid()}) == 3
    finally:
        family.close()
    assert not any(map(lives, (first.pid, second.pid)))


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\n"
        "from benchmarks.harness.worker import Worker\n"
        "if __name__ == '__main__':\n"
        "    print(Worker('orphan').pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 20
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, "the worker outlived its parent"
            time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="engines are followed by their session in /proc")
def test_engines_that_are_stopped_die_with_whoever_started_them(tmp_path: Path) -> None:
    """The engine's own processes too, whose parent is not ours."""
    (tmp_path / "idle_worker.py").write_text(
        "import asyncio, subprocess, sys\n"
        "from tests.engines.worker import Worker, main\n"
        "class Idle(Worker):\n"
        "    def _start(self, arguments):\n"
        "        subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "        return asyncio.new_event_loop()\n"
        "main(Idle)\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "from tests.engines.engine import Engine\n"
        "class Idle(Engine):\n"
        "    worker = 'idle_worker'\n"
        "    environment = staticmethod(lambda folder, arguments, more: dict(os.environ))\n"
        f"engine = Idle('prefill', Path({str(tmp_path)!r}), {{}}).wait_ready()\n"
        "engine.stop()\n"
        "print(*engine.pids(), flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{tmp_path}"}
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    engines = [int(pid) for pid in parent.stdout.readline().split()]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    try:
        assert len(engines) == 2
        wait_until(lambda: not any(map(lives, engines)))
    finally:
        for pid in filter(lives, engines):
            os.kill(pid, signal.SIGKILL)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("shares", "turns", "said"),
    [
        ([0.08], 1, []),
        ([0.09, 0.08], 2, ["others took 9% of the machine: measuring again"]),
        ([0.5, 0.5], 2, ["measuring again", "do not quote these figures"]),
    ],
)
def test_a_row_that_others_disturbed_is_measured_again_and_in_the_end_marked(
    monkeypatch: pytest.MonkeyPatch, shares: list[float], turns: int, said: list[str]
) -> None:
    heard: list[str] = []
    left, ours = list(shares), _Fixed({"speed": 1.0})
    monkeypatch.setattr(quiet, "ForeignWork", lambda: SimpleNamespace(share=lambda: left.pop(0)))
    rows = quiet.run_quietly(_speed(ours), 1, 2, heard.append)
    assert (len(rows), left, ours.turns) == (1, [], turns)
    assert len(heard) == len(said) and all(map(str.endswith, heard, said))


def test_what_others_used_is_the_machines_less_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(quiet, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    used, ours = iter([100.0, 115.0]), iter([40.0, 51.0])
    monkeypatch.setattr(quiet, "_used", lambda: next(used))
    monkeypatch.setattr(quiet, "_ours", lambda: next(ours))
    assert quiet.ForeignWork().share() == pytest.approx(4 / 20)


def test_that_a_batch_gets_slower_with_age_is_no_loss_to_what_arrives_beside_it() -> None:
    """4 ms a token at first, and 0.006 more with each, as SGLang's batch on a CPU; a window without and one with."""
    length, windows = 0, []
    for share in (1.0, 0.7) * 4 + (1.0,):
        began, left = length, 1000.0 * share
        while left > 0:
            left -= 4 + 0.006 * length
            length += 1
        windows.append(Window(length - began, cpu=0.02 + (0.05 if share < 1 else 0.0), seconds=1.0))
    alone, beside = windows[::2], windows[1::2]
    assert kept(alone, beside) == pytest.approx(0.7, abs=0.01)
    assert cpu_beside(alone, beside) == pytest.approx(4 * 0.05)


def test_of_a_generating_process_the_other_threads_are_counted_and_no_other_process() -> None:
    before = {(1, threads.WHOLE): 6.0, (1, 1): 5.0, (1, 2): 1.0, (2, threads.WHOLE): 0.0, (2, 2): 0.0}
    after = {(1, threads.WHOLE): 10.75, (1, 1): 9.0, (1, 2): 1.5, (2, threads.WHOLE): 3.0, (2, 2): 3.0}
    assert threads.beside_busiest(before, after) == 0.75


@pytest.mark.skipif(sys.platform != "linux", reason="others have no such clocks")
def test_a_thread_that_ended_is_counted_with_its_process() -> None:
    before = threads.used([os.getpid()])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(compute, 0.1).result()
    compute(0.3)
    assert threads.beside_busiest(before, threads.used([os.getpid()])) >= 0.09


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="others have no subreapers")
def test_what_a_killed_engines_children_used_stays_ours() -> None:
    burn = "import os, time\nwhile time.process_time() < 0.5: pass\nprint(os.getpid(), flush=True)\ntime.sleep(60)"
    start = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {burn!r}]).wait()"
    quiet.adopt_orphans()
    try:
        before = quiet._ours()
        with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE) as engine:
            assert engine.stdout is not None
            child = int(engine.stdout.readline())
            engine.kill()
        os.kill(child, signal.SIGKILL)
        assert quiet._ours() - before >= 0.5
        assert os.waitpid(child, 0) == (child, signal.SIGKILL)
    finally:
        quiet.adopt_orphans(False)


class _Fixed:
    turns = 0

    def __init__(self, figures: Figures) -> None:
        self._figures = figures

    def turn(self) -> Figures:
        self.turns += 1
        return self._figures

    def peak_rss(self) -> int:
        return 1

    def close(self) -> None: ...


def _speed(ours: _Fixed) -> Benchmark:
    metric = Metric("speed", "GB/s", "higher", "baseline")
    return Benchmark((metric,), lambda: ours, lambda: _Fixed({"speed": 1.0}), warm_ups=0)


def _divide(desk: Desk, number: int) -> float:
    return 1 / number


def _memory() -> Memory:
    blocks: list[np.ndarray] = []

    def allocate(nbytes: int) -> int:
        blocks.append(np.zeros(nbytes, dtype=np.uint8))
        return int(blocks[-1].ctypes.data)

    memory = Memory(Shape(regions=2, pages=4, page_bytes=64, aux_items=1), allocate)
    memory.blocks = blocks  # type: ignore[attr-defined]  # keeps them alive
    return memory
