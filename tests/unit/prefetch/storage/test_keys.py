"""Keys: the formats of SGLang's objects, and what must never share one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.errors import InvalidRequest
from kvgrpc.prefetch.storage.keys import KeyMode, Keys, PageIdentity

H = "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f"
TP = PageIdentity(model="meta/Llama-3-8B", dtype="bfloat16", layout="page_first", page_size=64, tp_rank=1, tp_size=4)
MLA = dataclasses.replace(TP, model="deepseek/V3", replicated=True)


def sglang(identity: PageIdentity, pool: str = "kv", **changes: Any) -> str:
    return Keys("sglang", dataclasses.replace(identity, **changes)).of("H", pool)


def test_sglang_keys_are_those_of_its_file_backend() -> None:
    assert sglang(TP) == "H_meta-Llama-3-8B_1_4"
    assert sglang(TP, pp_rank=1, pp_size=2) == "H_meta-Llama-3-8B_1_4_2_1"
    assert sglang(TP, cp_rank=1, cp_size=2) == "H_meta-Llama-3-8B_1_4_cp1_2"
    assert sglang(TP, pool="indexer") == "H.indexer_meta-Llama-3-8B_1_4"
    assert sglang(MLA) == "H_deepseek-V3"
    assert sglang(MLA, pp_rank=0, pp_size=2) == "H_deepseek-V3_2_0"
    assert sglang(MLA, pool="mamba") == "H.mamba_deepseek-V3_1_4", "state is each rank's own"
    assert sglang(MLA, dcp_rank=1, dcp_size=2) == "H_deepseek-V3_tp4_dcp1_2_page64"


def test_whoever_says_no_sizes_is_the_only_rank() -> None:
    alone = PageIdentity(model="m", dtype="bfloat16", layout="page_first", page_size=64)
    assert alone == dataclasses.replace(
        alone, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, cp_rank=0, cp_size=1, dcp_rank=0, dcp_size=1
    )
    assert sglang(alone) == "H_m_0_1"


def test_seed_keys_have_the_rank_only() -> None:
    assert Keys(KeyMode.SGLANG_SEED, TP).of("H") == "H_1_4"
    assert Keys(KeyMode.SGLANG_SEED, MLA).of("H") == "H"
    assert Keys(KeyMode.SGLANG_SEED, dataclasses.replace(TP, tp_rank=0, tp_size=1)).of("H") == "H"


def test_own_keys_are_fixed_for_ever() -> None:
    """A change here loses every stored page: make a new mode instead."""
    assert Keys("kvgrpc", TP).of(H) == f"Llama-3-8B-fdf60e0f90dba3df/kv/{H}"
    assert Keys("kvgrpc", MLA).of(H, "indexer") == f"V3-b9b611db7440f6a5/indexer/{H}"
    long = dataclasses.replace(TP, model="m" * 100)
    assert Keys("kvgrpc", long).of(H).startswith("m" * 64 + "-")


def test_an_extra_key_is_a_prefix_of_its_own() -> None:
    keys = Keys("kvgrpc", TP)
    lora = keys.of(H, extra_key="lora-a")
    assert lora == f"Llama-3-8B-fdf60e0f90dba3df/extra-397ec4008bb6db3b/kv/{H}"
    prefixes = {extra_key: keys.prefix_of(extra_key) for extra_key in ("", "lora-a", "lora-b", "\ud800")}
    for extra_key in prefixes:
        key = keys.of(H, extra_key=extra_key)
        assert [each for each, prefix in prefixes.items() if prefix and key.startswith(prefix)] == [extra_key]
        assert keys.prefix is not None and key.startswith(keys.prefix) and keys.hash_of(key) == H
    for mode in (KeyMode.SGLANG, KeyMode.SGLANG_SEED):
        keys = Keys(mode, TP)
        assert keys.of(H, extra_key="lora-a") == keys.of(H) and keys.prefix_of("lora-a") is None


@pytest.mark.parametrize(
    "change",
    [
        {"model": "meta/Llama-3-8B-Instruct"},
        {"model": "other/Llama-3-8B"},
        {"revision": "main"},
        {"dtype": "float8_e4m3fn"},
        {"layout": "layer_first"},
        {"page_size": 32},
        {"tp_rank": 2},
        {"tp_size": 2},
        {"pp_size": 2},
        {"cp_size": 2},
        {"dcp_size": 2},
        {"replicated": True},
    ],
    ids=str,
)
def test_whatever_changes_the_bytes_changes_our_key(change: dict[str, object]) -> None:
    other = dataclasses.replace(TP, **change)  # type: ignore[arg-type]
    assert Keys("kvgrpc", other).of(H) != Keys("kvgrpc", TP).of(H)


@pytest.mark.parametrize("mode", KeyMode)
def test_ranks_share_the_pages_of_a_replicated_cache_and_no_others(mode: KeyMode) -> None:
    keys = {Keys(mode, dataclasses.replace(MLA, tp_rank=rank)).of(H) for rank in range(4)}
    assert len(keys) == 1
    assert len({Keys(mode, dataclasses.replace(TP, tp_rank=rank)).of(H) for rank in range(4)}) == 4


def test_pools_of_a_page_lie_apart() -> None:
    for mode in (KeyMode.KVGRPC, KeyMode.SGLANG):
        assert len({Keys(mode, TP).of(H, pool) for pool in ("kv", "indexer", "mamba", "swa")}) == 4
    with pytest.raises(InvalidRequest, match="sglang-seed has no others"):
        Keys("sglang-seed", TP).of(H, "indexer")


def test_what_a_mode_cannot_tell_apart_is_refused() -> None:
    changes: list[dict[str, Any]] = [{"pp_size": 2}, {"cp_size": 2}, {"dcp_size": 2}]
    for change in changes:
        with pytest.raises(InvalidRequest, match="another one"):
            Keys("sglang-seed", dataclasses.replace(TP, **change))
    with pytest.raises(InvalidRequest, match="one of kvgrpc, sglang, sglang-seed"):
        Keys("sqlang", TP)
    with pytest.raises(InvalidRequest, match="from 0 to 3"):
        dataclasses.replace(TP, tp_rank=4)


@given(st.text(max_size=300))
def test_any_model_name_gives_a_key_that_backends_take(model: str) -> None:
    key = Keys("kvgrpc", dataclasses.replace(TP, model=model)).of(H)
    assert len(key) < 200 and key.isascii() and key.isprintable() and " " not in key and ".." not in key.split("/")


@pytest.mark.parametrize("mode", KeyMode)
def test_a_rank_knows_its_own_keys_and_no_others(mode: KeyMode) -> None:
    ours, theirs = (
        Keys(mode, PageIdentity(model=model, dtype="bfloat16", layout="x", page_size=16, tp_rank=1, tp_size=2))
        for model in ("org/a-deadbeef", "org/a-deadbeef.5")
    )
    page_hash = "0123456789abcdef" * 4
    assert ours.hash_of(ours.of(page_hash)) == page_hash
    assert ours.hash_of("nothing of ours") is None
    if mode is not KeyMode.SGLANG_SEED:  # which has no model in it
        assert ours.hash_of(theirs.of(page_hash)) is None
    if mode is KeyMode.KVGRPC:
        assert ours.prefix is not None and ours.of(page_hash).startswith(ours.prefix)
        assert theirs.prefix is not None and not theirs.of(page_hash).startswith(ours.prefix)
    else:
        assert ours.prefix is None
