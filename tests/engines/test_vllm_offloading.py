"""vLLM's offloading, its secondary tier over our storage: real scheduler, tiers and files; copies as on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.model import Case, Reference
from tests.engines.vllm_engine import BLOCK, VllmEngine, vllm_arguments

pytestmark = pytest.mark.timeout(600)
CACHE_BYTES = 1 << 20  # of host memory; a chunk of the tiny model has 64 KiB


@contextmanager
def engine(folder: Path, model: Path, storage: dict[str, Any]) -> Iterator[VllmEngine]:
    tier = {"type": "KvGrpcTier", "module_path": "kvgrpc.engines.vllm.tier", **storage}
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOnCpu",
            "spec_module_path": "tests.engines.vllm_offloading_on_cpu",
            "cpu_bytes_to_use": CACHE_BYTES,
            "secondary_tiers": [tier],
        },
    }
    opened = VllmEngine("offloading", folder, {**vllm_arguments(model, 1), "kv_transfer_config": offloading})
    try:
        yield opened
    finally:
        opened.close()


def check(opened: VllmEngine, case: Case) -> int:
    """How many tokens of the prompt were not computed."""
    request = opened.generate(case.prompt, len(case.tokens))
    assert request.result() == case.tokens
    return request.cached


def stored(path: Path) -> int:
    return sum(1 for each in path.rglob("*") if each.is_file() and each.stat().st_size >= 64 << 10)


def test_a_second_engine_loads_what_the_first_one_stored(folder: Path, reference: Reference) -> None:
    path = folder / "tier"
    storage = {"storage": "file", "storage_config": {"path": str(path), "max_bytes": "64MB"}}
    cases = [reference.case(6 * BLOCK + 3) for _ in range(3)]
    with engine(folder, reference.path, storage) as first:
        first.wait_ready()
        assert [check(first, case) for case in cases] == [0, 0, 0]
        assert first.is_empty()
        # Device and host memory hold nothing that the tier needs: what was evicted from them comes from there.
        for _ in range(4):
            check(first, reference.case(6 * BLOCK))
        assert check(first, cases[0]) == 6 * BLOCK
    assert stored(path) >= 3 * 6
    with engine(folder, reference.path, storage) as second:
        second.wait_ready()
        assert [check(second, case) for case in cases] == [6 * BLOCK] * 3
        assert second.is_empty()


def test_a_wrong_setting_ends_the_start_with_its_name(folder: Path, reference: Reference) -> None:
    with engine(folder, reference.path, {"storage": "file", "no_such_key": 1}) as opened:
        with pytest.raises(AssertionError, match="did not start"):
            opened.wait_ready()
        assert "no_such_key" in opened.log()
