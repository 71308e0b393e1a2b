"""Two real vLLM engines of unequal tensor-parallel sizes: what one has computed the other takes, with equal tokens.

Their chunks are alike with vLLM's ``canonical_layout``; without it an engine of another size is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.engines.vllm.tier import identity_of
from tests.engines.model import Reference
from tests.engines.vllm_engine import BLOCK, VllmEngine
from tests.engines.vllm_pulling import address, compute, has, opened, pulled
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
SIZES = {"one": 1, "two": 2}


@pytest.fixture(scope="module")
def engines(registry: str, folder: Path, reference: Reference) -> Iterator[dict[str, VllmEngine]]:
    started = {
        name: opened(name, folder, reference.path, registry, size, canonical_layout=True)
        for name, size in SIZES.items()
    }
    try:
        for engine in started.values():
            engine.wait_ready()
        yield started
    finally:
        for engine in started.values():
            engine.close()


@pytest.mark.parametrize(("here", "there"), [("two", "one"), ("one", "two")])
def test_what_an_engine_of_another_size_computed_is_not_computed_again(
    engines: dict[str, VllmEngine], registry: str, reference: Reference, here: str, there: str
) -> None:
    case = reference.case(6 * BLOCK + 3)
    with SyncClient(address(registry, there)) as client:
        assert compute(engines[here], case) == 0
        wait_until(partial(has, client, case, 6))
        before = pulled(client)
        assert compute(engines[there], case) == 6 * BLOCK
        assert pulled(client) - before == 6


def spec_of(tp: int, **changes: Any) -> Any:
    """Of an offloading of a head-sharded model: what vLLM says of it in both processes."""
    parallel = {"tp_size": tp, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "rank": 0, "world_size": tp}
    config = {
        "model": SimpleNamespace(name="m", dtype="float16"),
        "cache": SimpleNamespace(tokens_per_hash=16),
        "groups": [SimpleNamespace(tokens_per_block=16, layer_names=("0", "1"))],
        "parallel": SimpleNamespace(**parallel, is_parallelism_agnostic=True),
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": "LBHNC",
        **changes,
    }
    return SimpleNamespace(config=SimpleNamespace(**config), blocks_per_chunk=1)


def test_chunks_of_another_number_of_workers_are_other_chunks() -> None:
    """Worker after worker: of equal size, with the heads in other places."""
    one, two = (identity_of(spec_of(tp), 4096) for tp in (1, 2))
    assert one != two


def test_chunks_of_another_order_of_axes_are_other_chunks() -> None:
    assert identity_of(spec_of(1), 4096) != identity_of(spec_of(1, kv_cache_layout="LBNHC"), 4096)


def test_canonical_chunks_are_the_same_for_any_number_of_workers() -> None:
    one, two = (identity_of(spec_of(tp, canonical_layout=True), 4096) for tp in (1, 2))
    assert one == two
