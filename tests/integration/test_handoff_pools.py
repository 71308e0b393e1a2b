"""Rooms of models whose pools have pages of their own: a KV pool, and a few pages of recurrent state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvgrpc.dataplane import open_plane
from kvgrpc.model import Pool, PoolKind, Region, Role
from kvgrpc.observability.hand_offs import ROLES, STAGES
from kvgrpc.observability.metrics import REGISTRY
from kvgrpc.server import RankConfig, open_rank
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender

KV_PAGES, STATE_PAGES, WINDOW_PAGES = 32, 4, 8
PAGES = {"kv": KV_PAGES, "state": STATE_PAGES, "window": WINDOW_PAGES}
BYTES = {"kv": 64, "state": 256, "window": 32}
KINDS = {"kv": PoolKind.KV, "state": PoolKind.STATE, "window": PoolKind.KV}


class HybridRank:
    """One rank and its memory: two layers of each pool."""

    def __init__(self, engine: str, role: Role, seed: int, **settings: Any) -> None:
        plane = open_plane("shm")
        self.memory: dict[str, Any] = {}
        pools = []
        for name, pages in PAGES.items():
            size = 2 * pages * BYTES[name]
            address = plane.allocate(size)
            memory = (np.ctypeslib.as_array(_bytes_at(address, size))).reshape(2, pages, BYTES[name])
            memory[:] = np.random.default_rng(seed + pages).integers(0, 256, memory.shape, dtype=np.uint8)
            self.memory[name] = memory
            regions = tuple(
                Region(layer, "kv", address + layer * pages * BYTES[name], BYTES[name], BYTES[name])
                for layer in range(2)
            )
            pools.append(Pool(name, KINDS[name], 16, pages, "uint8", regions))
        self.rank = open_rank(RankConfig(engine=engine, role=role, pools=tuple(pools), data_plane=plane, **settings))
        self.plane = plane

    def close(self) -> None:
        self.rank.close(2.0)
        self.plane.close(2.0)


def _bytes_at(address: int, size: int) -> Any:
    import ctypes

    return (ctypes.c_uint8 * size).from_address(address)


@pytest.fixture
def ranks() -> Iterator[tuple[HybridRank, HybridRank]]:
    prefill = HybridRank("P", Role.PREFILL, 1, registry="embedded")
    decode = HybridRank("D", Role.DECODE, 2)
    yield prefill, decode
    decode.close()
    prefill.close()


Ends = tuple[KVSender, KVReceiver]


@pytest.fixture
def ends(ranks: tuple[HybridRank, HybridRank]) -> Callable[[int], Ends]:
    prefill, decode = ranks
    return lambda room: (
        KVSender(prefill.rank.transfer, "", room),
        KVReceiver(decode.rank.transfer, prefill.rank.address, room),
    )


def test_each_pool_has_pages_of_its_own(ranks: tuple[HybridRank, HybridRank], ends: Callable[[int], Ends]) -> None:
    prefill, decode = ranks
    before = {name: memory.copy() for name, memory in decode.memory.items()}
    sender, receiver = ends(1)
    receiver.init({"kv": [20, 21, 22, 5, 9], "state": [3], "window": [7, 0]})
    sender.init(5)
    sender.send({"kv": [1, 2]})
    sender.send({"kv": [3, 4], "window": [5]})
    sender.send({"kv": [30], "state": [0], "window": [6]})
    assert receiver.wait(10.0) is sender.wait(10.0) is KVPoll.Success, receiver.failure or sender.failure
    went = {"kv": ([1, 2, 3, 4, 30], [20, 21, 22, 5, 9]), "state": ([0], [3]), "window": ([5, 6], [7, 0])}
    for name, (source, destination) in went.items():
        expected = before[name]
        expected[:, destination] = prefill.memory[name][:, source]
        assert (decode.memory[name] == expected).all(), name
    assert receiver.pages_done == 5


def test_a_full_prefix_hit_still_brings_the_state(
    ranks: tuple[HybridRank, HybridRank], ends: Callable[[int], Ends]
) -> None:
    prefill, decode = ranks
    sender, receiver = ends(1)
    receiver.init({"state": [1]}, first_page=4)
    sender.init(0)
    sender.send({"state": [2]}, is_last=True)
    assert receiver.wait(10.0) is KVPoll.Success, receiver.failure
    assert (decode.memory["state"][:, 1] == prefill.memory["state"][:, 2]).all()


def test_the_stages_of_a_room_are_measured_on_both_sides(ends: Callable[[int], Ends]) -> None:
    def counts() -> list[float]:
        return [
            REGISTRY.get_sample_value("kvgrpc_hand_off_stage_seconds_count", {"role": role, "stage": stage}) or 0.0
            for role in ROLES
            for stage in STAGES
        ]

    before = counts()
    sender, receiver = ends(1)
    receiver.init([2, 3])
    sender.init(2)
    sender.send([0, 1])
    assert receiver.wait(10.0) is sender.wait(10.0) is KVPoll.Success
    deadline = time.monotonic() + 10.0
    # At least: rooms of earlier tests may be counted meanwhile, with the next tick of their ranks.
    while any(now <= count for now, count in zip(counts(), before, strict=True)):
        assert time.monotonic() < deadline, counts()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("pages", "nbytes"),
    [({"kv": [20, 5], "state": [3]}, 2 * (2 * BYTES["kv"] + BYTES["state"])), ([2, 3], 2 * 2 * sum(BYTES.values()))],
)
def test_the_bytes_of_every_pool_are_counted(ends: Callable[[int], Ends], pages: Any, nbytes: int) -> None:
    def counted() -> list[float]:
        return [REGISTRY.get_sample_value("kvgrpc_hand_off_bytes_total", {"role": role}) or 0.0 for role in ROLES]

    before = counted()
    sender, receiver = ends(1)
    receiver.init(pages)
    sender.init(2)
    sender.send(pages)
    assert receiver.wait(10.0) is sender.wait(10.0) is KVPoll.Success, receiver.failure
    deadline = time.monotonic() + 10.0
    while [now - count for now, count in zip(counted(), before, strict=True)] != [nbytes, nbytes]:
        assert time.monotonic() < deadline, counted()
        time.sleep(0.01)


def test_the_pages_of_each_pool_are_compared() -> None:
    prefill = HybridRank("P", Role.PREFILL, 1, registry="embedded", verify=True)
    decode = HybridRank("D", Role.DECODE, 2, verify=True)
    sender = KVSender(prefill.rank.transfer, "", 1)
    receiver = KVReceiver(decode.rank.transfer, prefill.rank.address, 1)
    receiver.init({"kv": [20, 5], "state": [3], "window": [7, 0]})
    sender.init(2)
    sender.send({"kv": [1], "window": [5]})
    sender.send({"kv": [30], "state": [0], "window": [6]})
    assert receiver.wait(10.0) is KVPoll.Success, receiver.failure
    decode.close()
    prefill.close()


def test_one_list_is_every_pools(ranks: tuple[HybridRank, HybridRank], ends: Callable[[int], Ends]) -> None:
    prefill, decode = ranks
    sender, receiver = ends(1)
    receiver.init([2, 3])
    sender.init(2)
    sender.send([0, 1])
    assert receiver.wait(10.0) is KVPoll.Success, receiver.failure
    for name in PAGES:
        assert (decode.memory[name][:, [2, 3]] == prefill.memory[name][:, [0, 1]]).all(), name


@pytest.mark.parametrize(
    ("given", "sent", "field"),
    [
        ({"kv": [1], "state": [0]}, {"kv": [1]}, "pages"),
        ({"kv": [1]}, {"kv": [1], "state": [0]}, "pages"),
        ({"kv": [1], "state": [0]}, [1], "pages"),
        ([1], {"kv": [1]}, "pages"),
    ],
)
def test_pages_that_do_not_fit_fail_both_ends(ends: Callable[[int], Ends], given: Any, sent: Any, field: str) -> None:
    sender, receiver = ends(1)
    receiver.init(given)
    sender.init(1)
    sender.send(sent)
    for end in (sender, receiver):
        assert end.wait(10.0) is KVPoll.Failed
        assert end.failure is not None and end.failure.metadata["field"] == field
    assert receiver.release_safe


def test_a_page_outside_its_pool_is_named_with_it(ends: Callable[[int], Ends]) -> None:
    _, receiver = ends(1)
    receiver.init({"kv": [31], "state": [STATE_PAGES]})
    assert receiver.wait(10.0) is KVPoll.Failed and receiver.failure is not None
    assert receiver.failure.metadata["pool"] == "state"


def test_a_name_of_no_pool_is_refused(ends: Callable[[int], Ends]) -> None:
    _, receiver = ends(1)
    receiver.init({"kw": [1]})
    assert receiver.wait(10.0) is KVPoll.Failed and receiver.failure is not None
    assert "kv, state, window" in receiver.failure.message
