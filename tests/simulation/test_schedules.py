"""Random schedules of the real cores: nothing is written where it does not belong, nothing hangs, nothing leaks.

A failure prints its seed and how to replay it; the same schedules run by hand with ``python -m tests.simulation``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.simulation.schedules import Schedule
from tests.simulation.switches import cores


def broken(seeds: Iterable[int], off: tuple[int, ...] = ()) -> dict[str, tuple[int, str, object]]:
    """The first violation of each schedule that has one, by the command that replays it."""
    found = {}
    for seed in seeds:
        world = Schedule(seed, *cores(off)).run()
        if world.violations:
            found[f"python -m tests.simulation 1 --seed {seed} -v"] = world.violations[0]
    return found


@pytest.mark.parametrize("first", range(0, 150, 5))
def test_schedules_end_without_a_violation(first: int) -> None:
    assert broken(range(first, first + 5)) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_schedules_end_without_a_violation() -> None:
    command = [sys.executable, "-m", "tests.simulation", "10000", "--seed", "1000"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (2, "a room is back"),
        (3, "lost to a peer that is alive"),
        (4, "foreign write"),
        (8, "foreign write"),
        (13, "foreign write"),
    ],
)
def test_without_a_rule_many_schedules_break(rule: int, expected: str) -> None:
    found: list[str] = []
    for seed in range(60):
        found += [what for _, what, _ in broken([seed], (rule,)).values()]
        if len(found) >= 6 and any(expected in what for what in found):
            return
    raise AssertionError(f"not a tenth of them, or none says {expected!r}: {found}")


def test_a_seed_replays_the_same_schedule_in_any_process() -> None:
    """A room's key has another hash in each process: nothing may follow the order of a set of them."""
    code = "from tests.simulation.test_schedules import digest; print(digest(range(20)))"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=120)[0] for process in processes)
    assert first == second != ""


def digest(seeds: Iterable[int]) -> str:
    """One line that differs as soon as one line of the schedules' logs does."""
    logs = "".join(str(Schedule(seed).run().log) for seed in seeds)
    return hashlib.sha256(logs.encode()).hexdigest()
