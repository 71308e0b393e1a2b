"""Every directed test ends with the checks of a random schedule."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.checks import check_end
from tests.simulation.processes import TIMING
from tests.simulation.stage import Stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.steps(2 * TIMING.room_deadline + TIMING.ended_record)
    check_end(stage)
    assert stage.violations == []
