"""A model whose layers with a sliding window have a pool of their own: its pages are handed over with the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from tests.engines.engine import PAGE, Pair
from tests.engines.model import COMPILING_SECONDS, WINDOW, WindowReference
from tests.engines.stages import check_continued, check_unseen, rank_address

pytestmark = pytest.mark.timeout(600)
ON_CPU = {"SGLANG_ON_CPU_PLUGIN": "tests.engines.window_on_cpu:register"}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> WindowReference:
    return WindowReference(tmp_path_factory.mktemp("windowed")).for_sglang()


@pytest.fixture(scope="module")
def pair(folder: Path, windowed: WindowReference) -> Iterator[Pair]:
    pair = Pair(folder, windowed.path, environment=ON_CPU, decode={"disaggregation_decode_enable_radix_cache": True})
    pair.wait_ready()
    try:
        case = windowed.case(40)
        # With the first request torch compiles the model's norms, on either side.
        assert [half.result(COMPILING_SECONDS) for half in pair.submit(case.prompt, len(case.tokens))][1] == case.tokens
        yield pair
    finally:
        pair.close()


@pytest.mark.parametrize("length", [3, WINDOW - 1, WINDOW, WINDOW + 1, 100, 300], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: Pair, windowed: WindowReference, length: int) -> None:
    case = windowed.case(length, new_tokens=12)
    assert check_unseen(pair, case) == (0, math.ceil(length / PAGE))


def test_both_ranks_say_that_they_have_a_pool_of_windows(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        with SyncClient(rank_address(engine)) as client:
            kv, windows = client.get_rank().pools
        assert (kv.name, windows.name) == ("kv", "swa")
        assert len(kv.regions) == len(windows.regions) == 4  # keys and values of two layers each


def test_a_prompt_that_continues_another_has_the_right_tokens(pair: Pair, windowed: WindowReference) -> None:
    """Whatever SGLang's caches of both pools keep of the first one: the rest is handed over."""
    first = windowed.case(12 * PAGE)
    assert check_unseen(pair, first) == (0, 12)
    assert pair.prefill.is_empty()  # so that all that is cached from here on is cached at decode
    held, pages = check_continued(pair, windowed, first, 15 * PAGE + 3)
    assert pages == 16 - held // PAGE
    assert pair.prefill.is_empty()
