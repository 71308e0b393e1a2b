"""Pipeline stages of a model whose layers are of two kinds: each stage hands over what it has of each, and of one kind
it has no layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from tests.engines.model import WindowReference
from tests.engines.pipeline import LENGTHS, check, check_at_once
from tests.engines.stages import rank_addresses
from tests.engines.vllm_engine import VllmPair, stages

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> WindowReference:
    """Of which vLLM's first stage has windows alone, and its last one none."""
    return WindowReference(tmp_path_factory.mktemp("groups"), halves=True).for_vllm()


@pytest.fixture(scope="module")
def pair(folder: Path, model: WindowReference) -> Iterator[VllmPair]:
    pair = VllmPair(folder, model.path, prefill=stages(2), decode=stages(2))
    pair.wait_ready()
    yield pair
    pair.close()


def test_each_stage_says_which_layers_of_each_pool_it_has(pair: VllmPair) -> None:
    for engine in (pair.prefill, pair.decode):
        found = []
        for address in rank_addresses(engine):
            with SyncClient(address) as client:
                pools = client.get_rank().pools
            found.append({pool.name: [region.layer for region in pool.regions] for pool in pools})
        assert sorted(found, key=str) == [{"kv": [2, 3], "swa-1": []}, {"kv": [], "swa-1": [0, 1]}]


@pytest.mark.parametrize("length", LENGTHS, ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: VllmPair, model: WindowReference, length: int) -> None:
    check(pair, model.case(length, new_tokens=12))


def test_requests_at_once_and_cancelled_ones_leave_no_page_behind(pair: VllmPair, model: WindowReference) -> None:
    check_at_once(pair, model)
