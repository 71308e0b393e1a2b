"""Two ranks on either side whose attention is data parallel (--enable-dp-attention): each has the KV caches of its own
requests, whole, and both compute the other layers together. The model is one with latents (MLA), as those that are
served so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine import PAGE, Pair
from tests.engines.model import COMPILING_SECONDS, LatentReference

pytestmark = pytest.mark.timeout(700)
ON_CPU = {"SGLANG_ON_CPU_PLUGIN": "tests.engines.attention_data_parallel_on_cpu:register"}
# Ranks of decode that have equally many requests would exchange logits by an operation that CPUs lack.
ATTENTION = {"dp_size": 2, "enable_dp_attention": True, "enable_tp_lm_head_all_to_all": False}


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> LatentReference:
    return LatentReference(tmp_path_factory.mktemp("latent"))


@pytest.fixture(scope="module")
def pair(folder: Path, latent: LatentReference) -> Iterator[Pair]:
    pair = Pair(folder, latent.path, tp=2, environment=ON_CPU, prefill=ATTENTION, decode=ATTENTION)
    pair.wait_ready()
    try:
        for room in (2, 3):  # each rank of prefill; with its first request torch compiles the model's norms
            case = latent.case(40)
            halves = pair.submit(case.prompt, len(case.tokens), room=room)
            assert [half.result(COMPILING_SECONDS) for half in halves][1] == case.tokens
        yield pair
    finally:
        pair.close()


@pytest.mark.parametrize("odd", [0, 1], ids=["first rank", "second rank"])
@pytest.mark.parametrize("length", [1, PAGE + 1, 300], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: Pair, latent: LatentReference, length: int, odd: int) -> None:
    """Of a prompt that the rank room % 2 of prefill computes; decode takes the next request at its other rank."""
    for _ in range(2):
        case = latent.case(length, new_tokens=12)
        prefill, decode = pair.submit_unseen(case.prompt, len(case.tokens), room=pair.room() & ~1 | odd)
        assert decode.result() == case.tokens
        assert prefill.result() == case.tokens[:1]


def test_requests_at_once_leave_no_page_behind(pair: Pair, latent: LatentReference) -> None:
    pair.check_at_once([latent.case(120) for _ in range(6)])
