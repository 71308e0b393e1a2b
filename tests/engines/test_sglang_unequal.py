"""Prefill and decode with other tensor-parallel sizes: each decode rank gets its heads from whoever holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.engine import PAGE, Pair
from tests.engines.model import Reference

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)], ids=["2 to 1", "1 to 2"])
def test_each_decode_rank_gets_its_heads(folder: Path, reference: Reference, prefill: int, decode: int) -> None:
    pair = Pair(folder, reference.path, prefill={"tp_size": prefill}, decode={"tp_size": decode})
    try:
        pair.wait_ready()
        cases = [reference.case(length) for length in (3, PAGE + 1, 300)]
        for case in cases:
            ours, theirs = pair.submit_unseen(case.prompt, 8)
            assert theirs.result() == case.tokens
            assert ours.result() == case.tokens[:1]
        at_once = [pair.submit_unseen(case.prompt, 8) for case in cases]
        assert [decode.result() for _, decode in at_once] == [case.tokens for case in cases]
        for requests in at_once:
            requests[0].result()
        assert pair.prefill.is_empty() and pair.decode.is_empty()
    finally:
        pair.close()
