"""Pools and aux buffers of an engine's own arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import Pool, Region, check_pools
from kvgrpc.transfer.aux import AuxBuffer


def test_an_array_for_each_layer_is_a_region_for_each_layer() -> None:
    layers = [np.zeros((8, 16, 2, 4), np.float16) for _ in range(3)]
    pool = Pool.from_arrays(layers, page_tokens=16, axes="token,head,dim", heads_total=4, head_count=2)
    assert (pool.name, pool.pages, pool.page_tokens, pool.dtype) == ("kv", 8, 16, "float16")
    assert pool.regions == tuple(
        Region(number, "kv", int(layer.ctypes.data), 256, 256) for number, layer in enumerate(layers)
    )
    check_pools([pool])


def test_keys_and_values_of_one_array_are_regions_of_their_own_with_a_stride() -> None:
    both = np.zeros((8, 2, 16, 4), np.float32)
    pool = Pool.from_arrays({(5, "k"): both[:, 0], (5, "v"): both[:, 1]}, page_tokens=16)
    start = int(both.ctypes.data)
    assert pool.regions == (Region(5, "k", start, 512, 256), Region(5, "v", start + 256, 512, 256))


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
    assert (pool.dtype, pool.location, pool.regions) == ("bfloat16", "cuda:3", (Region(0, "kv", 4096, 64, 32),))


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
