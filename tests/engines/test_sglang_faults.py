"""What the other side of a real engine sees of a kill, a stop and a restart: an end with our reason, in time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import Pair
from tests.engines.faults import kill_at_every_stage, stop_at_every_stage_and_go_on
from tests.engines.model import Reference

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[Pair]:
    pair = Pair(folder, reference.path)
    yield pair.wait_ready()
    pair.close()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_side_that_is_killed_ends_the_requests_of_the_other_at_every_stage_which_serves_on(
    pair: Pair, reference: Reference, role: str
) -> None:
    kill_at_every_stage(pair, reference, role)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_side_that_is_stopped_ends_what_waits_for_it_and_nothing_else_and_is_used_again_once_it_goes_on(
    pair: Pair, reference: Reference, role: str
) -> None:
    stop_at_every_stage_and_go_on(pair, reference, role)
