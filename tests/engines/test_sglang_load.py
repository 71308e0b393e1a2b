"""Real SGLang engines on a machine with fifty busy processes for five minutes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import Pair
from tests.engines.load import serve_under_load
from tests.engines.model import Reference

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[Pair]:
    pair = Pair(folder, reference.path)
    yield pair.wait_ready()
    pair.close()


def test_a_loaded_machine_loses_no_request(pair: Pair, reference: Reference) -> None:
    serve_under_load(pair, reference)
