"""Two context parallel (CP) ranks at prefill, which have the same latents, and of which the first hands over.

SGLang's attention for CPUs divides no prompt among them: each computes all of it (no ``--enable-prefill-cp``).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgrpc.engines.sglang.limits import CONTEXT, UNTRIED
from tests.engines.engine import PAGE, Pair
from tests.engines.model import COMPILING_SECONDS, LatentReference

pytestmark = pytest.mark.timeout(600)
ON_CPU = {"SGLANG_ON_CPU_PLUGIN": "tests.engines.latent_on_cpu:register"}


def test_tokens_are_those_of_transformers_and_no_page_is_left_behind(tmp_path: Path) -> None:
    latent = LatentReference(tmp_path)
    prefill = {"tp_size": 2, "attn_cp_size": 2}
    pair = Pair(
        tmp_path, latent.path, environment=ON_CPU, prefill=prefill, prefill_environment={UNTRIED: CONTEXT}
    ).wait_ready()
    try:
        for length in (40, 1, PAGE, 100, 300):
            case = latent.case(length)
            halves = [half.result(COMPILING_SECONDS) for half in pair.submit_unseen(case.prompt, len(case.tokens))]
            assert halves == [case.tokens[:1], case.tokens], length
        cases = [latent.case(120) for _ in range(6)]
        requests = [pair.submit_unseen(case.prompt, len(case.tokens)) for case in cases]
        pair.prefill.abort(requests[1][0])
        for case, (first, second) in zip(cases, requests, strict=True):
            assert first.wait() and second.wait()
            assert second.error is not None or second.tokens == case.tokens
        assert sum(second.error is None for _, second in requests) >= len(cases) - 1
        assert pair.prefill.is_empty() and pair.decode.is_empty()
    finally:
        pair.close()
