"""A pool of real torch tensors."""

from __future__ import annotations

import pytest

from kvgrpc.model import Pool
from kvgrpc.transfer.aux_rows import AuxBuffer

torch = pytest.importorskip("torch")


def test_a_pool_of_tensors_is_their_memory() -> None:
    cache = torch.zeros((2, 8, 16, 2, 4), dtype=torch.bfloat16)
    pool = Pool.from_arrays({(0, "k"): cache[0], (0, "v"): cache[1]}, page_tokens=16)
    assert (pool.pages, pool.dtype, pool.location) == (8, "bfloat16", "cpu:0")
    assert [region.address for region in pool.regions] == [cache[0].data_ptr(), cache[1].data_ptr()]
    assert {(region.page_bytes, region.page_stride_bytes) for region in pool.regions} == {(256, 256)}
    (aux,) = AuxBuffer.from_arrays([torch.zeros((4, 3), dtype=torch.int32)])
    assert (aux.item_bytes, aux.items) == (12, 4)
