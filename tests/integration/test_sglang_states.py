"""States that SGLang keeps beside the KV cache, byte by byte: two ranks over made-up memory, described as SGLang does.

For kinds of states that no machine without a GPU computes; tests/engines has real engines.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvgrpc.engines.sglang.rank import SchedulerProcess, pages_of_pools, pools, state_names
from kvgrpc.errors import Reason
from kvgrpc.model import Layout, Pool, Role
from kvgrpc.server import RankConfig, open_decode, open_prefill
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender

SECONDS = 20.0
PAGES, PAGE_BYTES, LAYERS = 12, 192, 2
# Each with the bytes of an item of its entries, and what prefill and decode say of a request's.
Given = tuple[str, tuple[int, ...], Any, Any]
PAGES_OF_TOKENS = np.array([1, 2, 3], np.int32), np.array([4, 8, 6], np.int32)
WINDOW = np.array([2, 3], np.int32), np.array([6, 7], np.int32)
SLOT, RING = ([np.array(5)], [np.array(9)]), (np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32) + 5)
ROW = np.array([3], np.int32), np.array([0], np.int32)
# Every kind that SGLang has but windows, which are pages of heads: what both sides say of a request.
KINDS: dict[str, tuple[Any, Any]] = {
    "mamba": SLOT,
    "qsa_pending": RING,
    "qsa_compressed": PAGES_OF_TOKENS,
    "dsa": PAGES_OF_TOKENS,
    "dsa_tail": ROW,
    "minimax_index_k": PAGES_OF_TOKENS,
    "minimax_dense_kv": PAGES_OF_TOKENS,
    "swa_ring": RING,
    "c128_state": ROW,
    "request_row": ROW,
    "block_scale": PAGES_OF_TOKENS,
    "block_scale_swa": WINDOW,
}
STATES: dict[str, tuple[Given, ...]] = {
    **{kind: ((kind, (96, 33), *given),) for kind, given in KINDS.items()},
    "mamba and an index": (
        ("mamba", (96, 256), [np.array([5])], [np.array([9])]),
        ("dsa", (33, 33), np.array([1, 2, 3]), np.array([4, 8, 6])),
        ("dsa_tail", (40,), np.array([7]), np.array([2])),
    ),
    "a draft with a state of the same kind": (
        ("dsa", (33,), np.array([1]), np.array([4])),
        ("dsa", (48,), np.array([1, 2]), np.array([8, 6])),
    ),
    "a ring and rows of it": (
        ("swa_ring", (24,), np.arange(4), np.arange(4) + 5),
        ("request_row", (8,), np.array([3]), np.array([0])),
        ("block_scale", (6, 6), None, None),
    ),
}


class Side:
    """The memory of one scheduler process: an array for each entry of the KV cache, and of each state."""

    def __init__(self, states: tuple[Given, ...], scale: int = 1) -> None:
        self.kv = [np.zeros((PAGES, PAGE_BYTES), np.uint8) for _ in range(2 * LAYERS)]
        self.states = [[np.zeros((PAGES, scale * size), np.uint8) for size in sizes] for _, sizes, *_ in states]
        self.args = SimpleNamespace(
            page_size=16,
            kv_cache_dtype_str="bfloat16",
            gpu_id=0,
            state_types=[kind for kind, *_ in states],
            **{f"kv_{what}": own for what, own in described(self.kv).items()},
            **{f"state_{what}": [described(each)[what] for each in self.states] for what in described([])},
        )

    def pools(self, role: Role) -> tuple[Pool, ...]:
        here = "127.0.0.1"
        return pools(self.args, SchedulerProcess(role, Layout(), 0, 0, here, here, 1, "", "cpu", kv_heads=8))


def described(arrays: list[np.ndarray[Any, Any]]) -> dict[str, list[int]]:
    return {
        "data_ptrs": [array.ctypes.data for array in arrays],
        "data_lens": [array.nbytes for array in arrays],
        "item_lens": [array.shape[1] for array in arrays],
    }


def handed_over(ours: Side, theirs: Side, states: tuple[Given, ...]) -> Any:
    """Two chunks, the states with the last one; returns why it failed, None where it did not."""
    names = state_names(ours.args)
    prefill_config = RankConfig(engine="p", role=Role.PREFILL, pools=ours.pools(Role.PREFILL), registry="embedded")
    decode_config = RankConfig(engine="d", role=Role.DECODE, pools=theirs.pools(Role.DECODE))
    with open_prefill(prefill_config) as prefill, open_decode(decode_config) as decode:
        sender = KVSender(prefill.transfer, "", 7)
        sender.init(3)
        sender.send(pages_of_pools(names, np.array([1, 2], np.int32), None))
        receiver = KVReceiver(decode.transfer, prefill.address, 7)
        receiver.init(pages_of_pools(names, np.array([4, 8, 6], np.int32), [given[3] for given in states]))
        sender.send(pages_of_pools(names, np.array([3], np.int32), [given[2] for given in states]))
        if receiver.wait(SECONDS) is KVPoll.Success:
            assert sender.wait(SECONDS) is KVPoll.Success
        return receiver.failure


def numbers(pages: Any) -> list[int]:
    return [] if pages is None else [int(page) for page in np.asarray(pages).reshape(-1)]


@pytest.mark.parametrize("states", STATES.values(), ids=STATES)
def test_states_and_pages_arrive_and_no_byte_beside_them(states: tuple[Given, ...]) -> None:
    ours, theirs = Side(states), Side(states)
    draw = np.random.default_rng(0)
    for array in (*ours.kv, *(array for arrays in ours.states for array in arrays)):
        array[:] = draw.integers(1, 256, array.shape, np.uint8)
    assert handed_over(ours, theirs, states) is None
    moved = [(ours.kv, theirs.kv, [1, 2, 3], [4, 8, 6])]
    for (_, _, source, target), mine, its in zip(states, ours.states, theirs.states, strict=True):
        moved.append((mine, its, numbers(source), numbers(target)))
    for mine, its, source, target in moved:
        for one, other in zip(mine, its, strict=True):
            expected = np.zeros_like(other)
            expected[target] = one[source]
            assert expected[target].all() and len(source) == len(target)
            assert np.array_equal(other, expected)


def test_states_of_another_size_are_not_handed_over() -> None:
    """As those of other tensor-parallel sizes are."""
    states = STATES["mamba"]
    failure = handed_over(Side(states, 2), Side(states), states)
    assert failure.reason is Reason.PARALLEL_LAYOUT_MISMATCH and "pools[1]" in failure.message
