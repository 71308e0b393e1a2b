"""Real vLLM engines, their model compiled, on a machine with fifty busy processes for five minutes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.load import serve_under_load
from tests.engines.model import Reference
from tests.engines.vllm_engine import VllmPair

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[VllmPair]:
    pair = VllmPair(folder, reference.path)
    pair.wait_ready()
    yield pair
    pair.close()


def test_a_loaded_machine_loses_no_request(pair: VllmPair, reference: Reference) -> None:
    serve_under_load(pair, reference)
