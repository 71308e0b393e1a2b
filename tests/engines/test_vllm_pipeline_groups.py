"""Pipeline stages of models whose layers are of two kinds: each stage hands over what it has of each, and of one kind
it may have no layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from tests.engines.model import RecurrentReference, Reference, WindowReference
from tests.engines.pipeline import LENGTHS, check, check_at_once, kill_last_stage
from tests.engines.stages import rank_addresses
from tests.engines.vllm_engine import IN_32_BITS, VllmPair, stages

pytestmark = pytest.mark.timeout(900)
Layers = list[dict[str, list[int]]]


@dataclass(frozen=True)
class Setting:
    """``prefill`` and ``decode``: which layers of each pool each stage has."""

    make: Callable[[Path], Reference]
    prefill: Layers
    decode: Layers
    environment: Mapping[str, str] = field(default_factory=dict)


def windows(folder: Path) -> Reference:
    """Of which vLLM's first stage has windows alone, and its last one none."""
    return WindowReference(folder, halves=True).for_vllm()


def states(folder: Path) -> Reference:
    """In turn: a stage without layers of attention would not start, for vLLM orders the memory of states otherwise."""
    return RecurrentReference(folder, "GDN_ATTN")


HALVES: Layers = [{"kv": [], "swa-1": [0, 1]}, {"kv": [2, 3], "swa-1": []}]
IN_TURN: Layers = [{"kv": [1], "state-1": [0]}, {"kv": [3], "state-1": [2]}]
SETTINGS = {
    "windows": Setting(windows, HALVES, HALVES),
    "to one stage": Setting(windows, HALVES, [{"kv": [2, 3], "swa-1": [0, 1]}]),
    "states": Setting(states, IN_TURN, IN_TURN, IN_32_BITS),
}


@pytest.fixture(scope="module", params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> Setting:
    return SETTINGS[request.param]


@pytest.fixture(scope="module")
def model(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return setting.make(tmp_path_factory.mktemp("groups"))


@pytest.fixture(scope="module")
def pair(folder: Path, model: Reference, setting: Setting) -> Iterator[VllmPair]:
    prefill, decode = (stages(len(layers)) for layers in (setting.prefill, setting.decode))
    pair = VllmPair(folder, model.path, environment=setting.environment, prefill=prefill, decode=decode)
    pair.wait_ready()
    yield pair
    pair.close()


def test_each_stage_says_which_layers_of_each_pool_it_has(pair: VllmPair, setting: Setting) -> None:
    for engine, expected in ((pair.prefill, setting.prefill), (pair.decode, setting.decode)):
        found = []
        for address in rank_addresses(engine):
            with SyncClient(address) as client:
                pools = client.get_rank().pools
            found.append({pool.name: [region.layer for region in pool.regions] for pool in pools})
        assert sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize("length", LENGTHS, ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(pair: VllmPair, model: Reference, length: int) -> None:
    check(pair, model.case(length, new_tokens=12))


def test_requests_at_once_and_cancelled_ones_leave_no_page_behind(pair: VllmPair, model: Reference) -> None:
    check_at_once(pair, model)


def test_a_stage_that_is_killed_fails_what_waits_for_it_and_its_engine_serves_again(
    pair: VllmPair, model: Reference
) -> None:
    kill_last_stage(pair, model, "prefill", shortens=True)
