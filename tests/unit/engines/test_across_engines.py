"""Hand-offs between engines that do not fit, in the words of docs/engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvgrpc.errors import ParallelLayoutMismatch
from kvgrpc.model import Attention, Layout, ModelIdentity, Pool, PoolKind, RankId, Region
from kvgrpc.transfer.layout.topology import Shape, owed_part, parts_of_pages

HEADS, DIM_BYTES = 8, 256
# SGLang's metadata row: MetadataBuffers.get_buf_infos of an engine without speculation, in its order.
SGLANG_AUX = (64, 64, 64, 64, 512, 512, 64, 128, 64, 64)


def shape(name: str, page_tokens: int, axes: str, aux: tuple[int, ...] = ()) -> Shape:
    """One layer: K and V apart as in SGLang's pool, or together as in vLLM's."""
    together = "kv" in axes.split(",")
    nbytes = page_tokens * HEADS * DIM_BYTES * (2 if together else 1)
    regions = tuple(
        Region(0, part, 0x1000 * (number + 1), nbytes, nbytes)
        for number, part in enumerate(["kv"] if together else ["k", "v"])
    )
    pool = Pool(
        name="kv", kind=PoolKind.KV, page_tokens=page_tokens, pages=4, dtype="bfloat16", regions=regions, axes=axes,
        heads_total=HEADS, head_start=0, head_count=HEADS, location="cpu:0",
    )  # fmt: skip
    return Shape(RankId(name), Layout(), (pool,), aux, "mooncake", ModelIdentity(attention=Attention.MHA))


def sglang(page_tokens: int) -> Shape:
    return shape("sglang", page_tokens, "token,head,dim", SGLANG_AUX)


def vllm(page_tokens: int) -> Shape:
    return shape("vllm", page_tokens, "head,token,kv,dim")


def test_from_sglang_to_vllm_with_equal_pages_is_served_and_its_metadata_row_is_left_out() -> None:
    assert not owed_part(sglang(16), vllm(16)).aux


def test_from_vllm_to_sglang_the_metadata_row_is_missing_and_named() -> None:
    assert sum(SGLANG_AUX) == 1600
    with pytest.raises(ParallelLayoutMismatch) as refusal:
        owed_part(vllm(16), sglang(16))
    assert "aux_item_bytes: prefill [], decode [64, 64, 64, 64, 512, 512, 64, 128, 64, 64]" in str(refusal.value)


@pytest.mark.parametrize("engine", [sglang, vllm])
def test_pages_of_decode_that_are_a_multiple_are_served(engine: Callable[[int], Shape]) -> None:
    """Also between two vLLMs."""
    prefill, decode = engine(16), vllm(32)
    assert not owed_part(prefill, decode).empty
    assert parts_of_pages(prefill.pools, decode.pools) == 2


@pytest.mark.parametrize("engine", [sglang, vllm])
@pytest.mark.parametrize(("prefill", "decode"), [(32, 16), (32, 48)])
def test_other_page_sizes_are_refused_with_both(engine: Callable[[int], Shape], prefill: int, decode: int) -> None:
    with pytest.raises(ParallelLayoutMismatch) as refusal:
        owed_part(engine(prefill), vllm(decode))
    assert f"pools[0].page_tokens: prefill {prefill}, decode {decode}" in str(refusal.value)


@pytest.mark.parametrize("axes", ["", "head,kv,vec", "head,token,dim"], ids=["latents", "CPUs", "FlashInfer"])
def test_a_multiple_is_refused_where_only_the_engine_knows_where_a_token_is(axes: str) -> None:
    """SGLang and vLLM say nothing of latents; some attention of vLLM keeps K and V of a token where it likes."""
    prefill, decode = (shape("vllm", tokens, "head,token,kv,dim") for tokens in (16, 32))
    changed = [replace(each, pools=(replace(each.pools[0], axes=axes),)) for each in (prefill, decode)]
    with pytest.raises(ParallelLayoutMismatch) as refusal:
        owed_part(changed[0], changed[1])
    assert "pools[0].page_tokens: prefill 16, decode 32" in str(refusal.value)


def test_pages_in_an_order_without_heads_are_not_cut_for_other_tensor_parallel_sizes() -> None:
    """SGLang's name of it is compared; equal sizes are served."""
    whole = shape("rocm", 16, "vectorized_5d", SGLANG_AUX)
    assert owed_part(whole, whole).aux
    (pool,) = whole.pools
    halves = tuple(
        region._replace(page_bytes=region.page_bytes // 2, page_stride_bytes=region.page_stride_bytes // 2)
        for region in pool.regions
    )
    half = replace(whole, layout=Layout(tp=2), pools=(replace(pool, head_count=HEADS // 2, regions=halves),))
    with pytest.raises(ParallelLayoutMismatch) as refusal:
        owed_part(whole, half)
    assert "pools[0].axes: prefill vectorized_5d, decode vectorized_5d: must say where heads are" in str(refusal.value)
