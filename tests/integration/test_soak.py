"""Short soaks: every room ends with a reason, every Success has its bytes, and nothing is left."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.soak.router import Router
from tests.soak.verdict import Plan, Result

NEEDS_MOONCAKE = pytest.mark.skipif(not find_spec("mooncake"), reason="install kvgrpc[mooncake-cpu] for it")


def soak(plan: Plan, logs: Path) -> Result:
    return Router(plan, logs, lambda result, open_rooms: None).run()


@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    "data_plane", [pytest.param("shm", marks=pytest.mark.slow), pytest.param("mooncake", marks=NEEDS_MOONCAKE)]
)
def test_36_hand_offs_at_once_with_failing_writes_all_end_and_leave_nothing(data_plane: str, tmp_path: Path) -> None:
    """The shape of SGLang's own manual liveness test: all end within 120 s, idle within 30 s after."""
    result = soak(
        Plan(rooms=36, seconds=0.1, in_flight=36, kill_every=1e9, fault_rate=0.12, data_plane=data_plane), tmp_path
    )
    assert result.problems == []
    assert (result.rooms, sum(result.reasons.values())) == (36, 36)
    assert result.successes >= 15
    assert result.seconds < 150


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_ranks_killed_every_second_cost_only_their_own_rooms(tmp_path: Path) -> None:
    result = soak(Plan(rooms=600, seconds=20, kill_every=1.0), tmp_path)
    assert result.problems == []
    # A rank that a busy machine is slow to start puts off the next one.
    assert result.kills.total() + result.stops.total() >= 3
    assert result.successes >= 300
