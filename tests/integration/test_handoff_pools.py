"""Rooms of models whose pools have pages of their own: a KV pool, and a few pages of recurrent state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from kvgrpc.dataplane import open_plane
from kvgrpc.errors import Reason
from kvgrpc.model import Layout, Pool, PoolKind, Region, Role
from kvgrpc.observability.hand_offs import ROLES, STAGES
from kvgrpc.observability.metrics import REGISTRY
from kvgrpc.server import RankConfig, RegistryServer, open_rank
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender

KV_PAGES, STATE_PAGES, WINDOW_PAGES = 32, 4, 8
PAGES = {"kv": KV_PAGES, "state": STATE_PAGES, "window": WINDOW_PAGES}
BYTES = {"kv": 64, "state": 256, "window": 32}
KINDS = {"kv": PoolKind.KV, "state": PoolKind.STATE, "window": PoolKind.KV}
LAYERS = {"kv": (0, 1), "state": (0, 1), "window": (0, 1)}
# Of a model of five layers, in two pipeline stages of which one has no layer of the first pool.
FIVE = {"kv": (3, 4), "state": (0, 2), "window": (1,)}
STAGED = (
    {"kv": (), "state": (0,), "window": (1,)},
    {"kv": (3, 4), "state": (2,), "window": ()},
)


class HybridRank:
    """One rank and its memory: two layers of each pool, or of each those that are named."""

    def __init__(
        self, engine: str, role: Role, seed: int, layers: Mapping[str, Sequence[int]] = LAYERS, **settings: Any
    ) -> None:
        plane = open_plane("shm")
        self.memory: dict[str, Any] = {}
        pools = []
        for name, pages in PAGES.items():
            held = layers[name]
            size = len(held) * pages * BYTES[name]
            address = plane.allocate(size) if held else 0
            memory = (np.ctypeslib.as_array(_bytes_at(address, size))).reshape(len(held), pages, BYTES[name])
            memory[:] = np.random.default_rng(seed + pages).integers(0, 256, memory.shape, dtype=np.uint8)
            self.memory[name] = memory
            regions = tuple(
                Region(layer, "kv", address + place * pages * BYTES[name], BYTES[name], BYTES[name])
                for place, layer in enumerate(held)
            )
            axes = "token,dim" if held else ""
            pools.append(Pool(name, KINDS[name], 16, pages, "uint8" if held else "", regions, axes))
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
Stages = Sequence[Mapping[str, Sequence[int]]]


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


class Engines:
    """Of pipeline stages, at one registry."""

    def __init__(self) -> None:
        self._registry = RegistryServer(["127.0.0.1:0"]).open()
        self._ranks: list[HybridRank] = []
        self.prefill = f"{self._registry.address}/PREFILL"

    def open(
        self, role: Role, *stages: Mapping[str, Sequence[int]], verify: bool = False
    ) -> tuple[Sequence[HybridRank], Any]:
        """One whose stages have these layers; and their memory by pools, the layers in the order of the stages."""
        registry, layout = self._registry.address if role is Role.PREFILL else "", Layout(pp=len(stages))
        ranks = [
            HybridRank(role.name, role, 1 + pp, held, pp=pp, layout=layout, registry=registry, verify=verify)
            for pp, held in enumerate(stages)
        ]
        self._ranks += ranks
        return ranks, lambda: {name: np.concatenate([rank.memory[name] for rank in ranks]) for name in PAGES}

    def close(self) -> None:
        for rank in reversed(self._ranks):
            rank.close()
        self._registry.close()


@pytest.fixture
def engines() -> Iterator[Engines]:
    found = Engines()
    yield found
    found.close()


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(("at_prefill", "at_decode"), [(STAGED, STAGED), (STAGED, [FIVE]), ([FIVE], STAGED)])
def test_a_stage_hands_over_the_layers_that_it_has_of_each_pool(
    engines: Engines, at_prefill: Stages, at_decode: Stages, verify: bool
) -> None:
    """Each is given the same lists of pages, also of pools of which it has no layer."""
    prefill, sent = engines.open(Role.PREFILL, *at_prefill, verify=verify)
    decode, received = engines.open(Role.DECODE, *at_decode, verify=verify)
    receivers = [KVReceiver(stage.rank.transfer, engines.prefill, 1) for stage in decode]
    senders = [KVSender(stage.rank.transfer, "", 1) for stage in prefill]
    expected = received()
    for receiver in receivers:
        receiver.init({"kv": [20, 5], "state": [3], "window": [7, 0]})
    for sender in senders:
        sender.init(2)
        sender.send({"kv": [1, 30], "state": [0], "window": [5, 6]})
    for end in (*receivers, *senders):
        assert end.wait(10.0) is KVPoll.Success, end.failure
    for name, (source, destination) in {
        "kv": ([1, 30], [20, 5]),
        "state": ([0], [3]),
        "window": ([5, 6], [7, 0]),
    }.items():
        assert len(expected[name]) == len(FIVE[name])
        expected[name][:, destination] = sent()[name][:, source]
        assert (received()[name] == expected[name]).all(), name


def test_stages_with_the_same_layers_of_other_pools_do_not_fit(engines: Engines) -> None:
    """All five are there, but of one that keeps a window at decode prefill has all tokens."""
    engines.open(Role.PREFILL, {"kv": (1,), "state": (0,), "window": ()}, STAGED[1])
    (decode,), _ = engines.open(Role.DECODE, FIVE)
    receiver = KVReceiver(decode.rank.transfer, engines.prefill, 1)
    receiver.init({"kv": [20, 5], "state": [3], "window": [7, 0]})
    assert receiver.wait(10.0) is KVPoll.Failed and receiver.failure is not None
    assert receiver.failure.reason is Reason.PARALLEL_LAYOUT_MISMATCH
    assert receiver.failure.metadata["mismatchedFields"] == "pools[0].layers,pools[2].layers"


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
