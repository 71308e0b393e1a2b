"""Pipeline stages of models with two kinds of layers, each kind in a pool of its own: sliding windows, or a state a
request, beside attention to all tokens. A stage has some layers of each kind, and other numbers of them than the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client import SyncClient
from tests.engines.engine import Engine, Pair
from tests.engines.model import COMPILING_SECONDS, MIXED, WINDOW, RecurrentReference, Reference, StagedWindowReference
from tests.engines.pipeline import check, check_at_once, check_empty
from tests.engines.stages import rank_addresses

pytestmark = pytest.mark.timeout(900)
SIZES = (2, 2), (2, 1), (1, 2)
WINDOWS, GATED, LATENT = "windows", "GDN_ATTN", "KDA"
MODELS = [*((model, sizes) for model in (WINDOWS, GATED) for sizes in SIZES), (LATENT, (2, 2))]
# SGLang's word for the pool of every other layer.
POOLS = {WINDOWS: "swa", GATED: "mamba", LATENT: "mamba"}
STATES_ON_CPU = {
    "SGLANG_ON_CPU_PLUGIN": "tests.engines.sglang_recurrent_on_cpu:register",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
}
WINDOWS_ON_CPU = {"SGLANG_ON_CPU_PLUGIN": "tests.engines.window_on_cpu:register"}
# Of both engines. Prefill keeps prefixes, but for KDA.
ARGUMENTS: dict[str, dict[str, Any]] = {
    WINDOWS: {},
    GATED: {"max_mamba_cache_size": 48},
    LATENT: {"max_mamba_cache_size": 48, "disable_radix_cache": True},
}
FULL, OTHERS = range(1, MIXED.layers, 2), range(0, MIXED.layers, 2)


@dataclass(frozen=True)
class Setting:
    """``sizes``: stages of prefill and of decode."""

    model: str
    sizes: tuple[int, int]
    reference: Reference
    pair: Pair


@pytest.fixture(scope="module", params=MODELS, ids=lambda param: f"{param[0]} {param[1][0]} to {param[1][1]}")
def setting(request: pytest.FixtureRequest, folder: Path) -> Iterator[Setting]:
    model, sizes = request.param
    place = folder / f"{model}-{sizes[0]}-{sizes[1]}"
    made = StagedWindowReference(place) if model == WINDOWS else RecurrentReference(place, model, MIXED).for_sglang()
    prefill, decode = ({**ARGUMENTS[model], "pp_size": size} for size in sizes)
    environment = WINDOWS_ON_CPU if model == WINDOWS else STATES_ON_CPU
    pair = Pair(folder, made.path, environment=environment, prefill=prefill, decode=decode)
    pair.wait_ready()
    try:
        case = made.case(40)
        # With the first request torch compiles the model's norms, in each stage.
        halves = pair.submit_unseen(case.prompt, len(case.tokens))
        assert [half.result(COMPILING_SECONDS) for half in halves][1] == case.tokens
        yield Setting(model, sizes, made, pair)
    finally:
        pair.close()


def layers_of_stages(engine: Engine) -> dict[str, list[list[int]]]:
    """By pool, in the order of the layers."""
    found: dict[str, list[list[int]]] = {}
    for address in rank_addresses(engine):
        with SyncClient(address) as client:
            for pool in client.get_rank().pools:
                found.setdefault(pool.name, []).append(sorted({region.layer for region in pool.regions}))
    return {name: sorted(of_stages) for name, of_stages in found.items()}


def test_each_stage_says_which_layers_of_each_kind_it_has(setting: Setting) -> None:
    for engine, stages in zip((setting.pair.prefill, setting.pair.decode), setting.sizes, strict=True):
        cut = MIXED.layers // stages
        held = [range(stage * cut, (stage + 1) * cut) for stage in range(stages)]
        expected = {
            name: [[layer for layer in of_stage if layer in kind] for of_stage in held]
            for name, kind in (("kv", FULL), (POOLS[setting.model], OTHERS))
        }
        assert layers_of_stages(engine) == expected


@pytest.mark.parametrize("length", [1, 3, WINDOW - 1, WINDOW + 1, 300], ids=lambda length: f"{length} tokens")
def test_tokens_are_those_of_transformers(setting: Setting, length: int) -> None:
    check(setting.pair, setting.reference.case(length, new_tokens=12))


def test_requests_at_once_and_cancelled_ones_leave_no_page_behind(setting: Setting) -> None:
    check_at_once(setting.pair, setting.reference)
    check_empty(setting.pair.decode, setting.sizes[1])
