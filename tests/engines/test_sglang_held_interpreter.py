"""A real SGLang engine that holds its interpreter for 10 s, on either side: no request is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import Pair
from tests.engines.holds import HOLDABLE, hold_at_every_stage
from tests.engines.model import Reference

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[Pair]:
    pair = Pair(folder, reference.path, environment=HOLDABLE)
    pair.wait_ready()
    yield pair
    pair.close()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_side_whose_interpreter_is_held_loses_no_request_at_any_stage(
    pair: Pair, reference: Reference, role: str
) -> None:
    hold_at_every_stage(pair, reference, role)
