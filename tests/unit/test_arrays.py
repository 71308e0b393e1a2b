"""Pools and aux buffers of an engine's own arrays."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import MAX_REGIONS, Pool, Region, check_pools
from kvgrpc.transfer.aux_rows import AuxBuffer


def test_an_array_for_each_layer_is_a_region_for_each_layer() -> None:
    layers = [np.zeros((8, 16, 2, 4), np.float16) for _ in range(3)]
    pool = Pool.from_arrays(layers, page_tokens=16, axes="token,head,dim", heads_total=4, head_count=2)
    assert (pool.name, pool.pages, pool.page_tokens, pool.dtype) == ("kv", 8, 16, "float16")
    assert tuple(pool.regions) == tuple(
        Region(number, "kv", int(layer.ctypes.data), 256, 256) for number, layer in enumerate(layers)
    )
    check_pools([pool])


def test_keys_and_values_of_one_array_are_regions_of_their_own_with_a_stride() -> None:
    both = np.zeros((8, 2, 16, 4), np.float32)
    pool = Pool.from_arrays({(5, "k"): both[:, 0], (5, "v"): both[:, 1]}, page_tokens=16)
    start = int(both.ctypes.data)
    assert tuple(pool.regions) == (Region(5, "k", start, 512, 256), Region(5, "v", start + 256, 512, 256))


def test_two_rows_that_are_apart_have_their_stride() -> None:
    both = np.zeros((2, 2, 16, 4), np.float32)
    pool = Pool.from_arrays({(0, "k"): both[:, 0]}, page_tokens=16)
    assert tuple(pool.regions) == (Region(0, "k", int(both.ctypes.data), 512, 256),)


class Tensor:
    """What is asked of a torch tensor; tests/integration/test_arrays_torch.py asks a real one."""

    shape, dtype, device = (4, 2, 8), "torch.bfloat16", "cuda:3"

    def data_ptr(self) -> int:
        return 4096

    def element_size(self) -> int:
        return 2

    def stride(self) -> tuple[int, ...]:
        return (32, 8, 1)


def test_a_tensor_says_where_it_is() -> None:
    pool = Pool.from_arrays([Tensor()], page_tokens=2)
    assert (pool.dtype, pool.location, *pool.regions) == ("bfloat16", "cuda:3", Region(0, "kv", 4096, 64, 32))


def read_only() -> Any:
    array = np.zeros((4, 4))
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "arrays",
    [
        [],
        ["text"],
        [np.zeros(())],
        [np.zeros((0, 4))],
        [np.zeros((4, 8))[:, ::2]],
        [np.zeros((4, 8)).T],
        [read_only()],
        [np.zeros((4, 8)), np.zeros((5, 8))],
        [np.zeros((4, 8)), np.zeros((4, 8), np.float32)],
        [np.broadcast_to(np.zeros(8), (4, 8))],
    ],
)
def test_arrays_that_cannot_be_pages_are_refused_by_name(arrays: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Pool.from_arrays(arrays, page_tokens=1)
    assert refused.value.metadata["field"].startswith("arrays")


def test_aux_buffers_are_dense_rows() -> None:
    rows = np.zeros((16, 8), np.int64)
    assert AuxBuffer.from_arrays([rows, rows[:, 0].copy()])[0] == AuxBuffer(int(rows.ctypes.data), 64, 16)
    with pytest.raises(InvalidRequest):
        AuxBuffer.from_arrays([rows[::2]])
    with pytest.raises(InvalidRequest):
        AuxBuffer.from_arrays([Tensor()])


@pytest.mark.parametrize(
    ("field", "region"),
    [
        ("pools[0].regions[0].layer", Region(-1, "kv", 4096, 8, 8)),
        ("pools[0].regions[0].component", Region(0, "", 4096, 8, 8)),
        ("pools[0].regions[0].component", Region(0, "x" * 65, 4096, 8, 8)),
    ],
)
def test_regions_that_cannot_be_are_named_with_and_without_a_registry(field: str, region: Region) -> None:
    pool = Pool.from_arrays([np.zeros((4, 8))], page_tokens=1)
    with pytest.raises(InvalidRequest) as refused:
        check_pools([Pool(pool.name, pool.kind, 1, 4, "x", (region,))])
    assert refused.value.metadata["field"] == field


def test_a_region_twice_is_refused() -> None:
    region = Region(0, "kv", 4096, 8, 8)
    pool = Pool.from_arrays([np.zeros((4, 8))], page_tokens=1)
    with pytest.raises(InvalidRequest, match=r"regions\[1\]"):
        check_pools([Pool("kv", pool.kind, 1, 4, "x", (region, region))])


def pool_of(*regions: Region, pages: int = 4) -> Pool:
    return Pool("kv", Pool.from_arrays([np.zeros((4, 8))], page_tokens=1).kind, 1, pages, "x", regions)


@pytest.mark.parametrize(
    "regions",
    [
        (Region(0, "kv", 4096, 8, 8), Region(1, "kv", 4096, 8, 8)),
        (Region(0, "kv", 4096, 8, 8), Region(1, "kv", 4096 + 31, 8, 8)),
        (Region(1, "kv", 4096 + 31, 8, 8), Region(0, "kv", 4096, 8, 8)),
        (Region(0, "k", 4096, 16, 8), Region(0, "v", 4096 + 7, 16, 8)),
        (Region(0, "k", 4096, 16, 8), Region(0, "v", 4096 + 9, 16, 8)),
        (Region(0, "k", 4096, 16, 8), Region(0, "v", 4096 + 40 - 1, 16, 2)),
        (Region(0, "k", 4096, 16, 8), Region(0, "v", 4096 + 8, 32, 8)),
        (Region(0, "a", 4096, 24, 8), Region(0, "b", 4104, 24, 8), Region(0, "c", 4104, 24, 8)),
    ],
)
def test_regions_that_share_bytes_are_refused_by_name(regions: tuple[Region, ...]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_pools([pool_of(*regions)])
    assert refused.value.metadata["field"].startswith("pools[0].regions[")
    assert refused.value.metadata["rule"].startswith("memory of its own")
    assert refused.value.metadata["value"] in {str(region.address) for region in regions}


def test_regions_in_each_others_gaps_share_none() -> None:
    both = np.zeros((2, 6, 4, 3, 8))
    check_pools([pool_of(Region(0, "k", 4096, 16, 8), Region(0, "v", 4104, 16, 8), Region(1, "k", 4160, 16, 8))])
    check_pools([pool_of(*(Region(layer, "kv", 4096 + 32 * layer, 8, 8) for layer in range(50)))])
    check_pools(
        [
            Pool.from_arrays({(0, "k"): both[0], (0, "v"): both[1]}, page_tokens=4),
            Pool.from_arrays({(0, "k"): both[0], (0, "v"): both[1]}, page_tokens=4, name="the same memory, otherwise"),
        ]
    )


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12), st.integers(1, 12)), min_size=2, max_size=4),
    st.integers(1, 5),
)
def test_no_page_of_regions_that_pass_shares_a_byte(drawn: list[tuple[int, int, int]], pages: int) -> None:
    regions = tuple(
        Region(number, "kv", 4096 + at, max(stride, size), size) for number, (at, stride, size) in enumerate(drawn)
    )
    bytes_of = [
        {
            region.address + page * region.page_stride_bytes + at
            for page in range(pages)
            for at in range(region.page_bytes)
        }
        for region in regions
    ]
    shared = sum(map(len, bytes_of)) > len(set().union(*bytes_of))
    try:
        check_pools([pool_of(*regions, pages=pages)])
    except InvalidRequest:
        return
    assert not shared


def test_as_many_regions_as_a_hello_may_have_are_looked_at_at_once() -> None:
    """Hostile ones too: all in one place."""
    began = time.monotonic()
    with pytest.raises(InvalidRequest):
        check_pools([pool_of(*(Region(layer, "kv", 4096, 8, 8) for layer in range(MAX_REGIONS)), pages=2**24)])
    assert time.monotonic() - began < 5


def test_more_regions_than_a_rank_may_have_are_counted_and_not_looked_at() -> None:
    half = tuple(Region(layer, "kv", 4096 + layer, 8, 8) for layer in range(MAX_REGIONS // 2 + 1))
    with pytest.raises(InvalidRequest) as refused:
        check_pools([pool_of(*half), replace(pool_of(*half), name="other")])
    assert refused.value.metadata == {
        "field": "pools",
        "value": str(MAX_REGIONS + 2),
        "rule": f"at most {MAX_REGIONS} regions together",
    }
