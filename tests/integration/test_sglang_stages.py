"""Pipeline stages of SGLang's prefill, byte by byte: ranks over made-up memory, described as SGLang does."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvgrpc.engines.sglang.rank import SchedulerProcess, pools
from kvgrpc.engines.sglang.stages.prefill import Stages
from kvgrpc.model import Layout, Role
from kvgrpc.server import Rank, RankConfig, RegistryServer
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender
from tests.support.pipeline_stages import opened
from tests.support.waiting import wait_until

SECONDS = 20.0
PAGES, PAGE_BYTES, ROOM = 12, 192, 7
HERE = "127.0.0.1"
# First layer and number of layers of each stage, as SGLang divides five.
TWO, ONE = ((0, 2), (2, 3)), ((0, 5),)


class Stage:
    """The memory of one scheduler process: K of its layers, then V."""

    def __init__(self, first: int, layers: int) -> None:
        self.first, self.layers = first, layers
        self.kv = [np.zeros((PAGES, PAGE_BYTES), np.uint8) for _ in range(2 * layers)]
        self.args = SimpleNamespace(
            page_size=16,
            kv_cache_dtype_str="bfloat16",
            gpu_id=0,
            kv_data_ptrs=[array.ctypes.data for array in self.kv],
            kv_data_lens=[array.nbytes for array in self.kv],
            kv_item_lens=[PAGE_BYTES] * len(self.kv),
        )

    def config(self, role: Role, pp: int, stages: int, registry: str) -> RankConfig:
        layout = Layout(pp=stages)
        place = SchedulerProcess(
            role, layout, 0, 0, HERE, HERE, 1, "", "cpu", kv_heads=8, pp=pp, first_layer=self.first
        )
        own = registry if role is Role.PREFILL else ""
        given = pools(self.args, place)
        return RankConfig(engine=role.name, role=role, layout=layout, pp=pp, pools=given, registry=own)


class Relay(dict[str, int]):
    """A stage's store, whose entries are at the first stage at once."""

    def __init__(self, all_stages: list[Relay]) -> None:
        all_stages.append(self)
        self._all = all_stages

    def pop(self, key: str, default: Any = None) -> Any:
        return super().pop(key, default)

    def collect(self, key: str) -> list[int | None]:
        return [store.get(key) for store in self._all]


@pytest.fixture
def registry() -> Iterator[str]:
    server = RegistryServer([f"{HERE}:0"]).open()
    yield server.address
    server.close()


def filled(layers: tuple[tuple[int, int], ...]) -> list[Stage]:
    draw = np.random.default_rng(0)
    stages = [Stage(*held) for held in layers]
    for array in (array for stage in stages for array in stage.kv):
        array[:] = draw.integers(1, 256, array.shape, np.uint8)
    return stages


def whole(stages: list[Stage]) -> dict[tuple[str, int], Any]:
    """K and V of each layer of the model, wherever it is."""
    return {
        (part, stage.first + layer): stage.kv[layer + (part == "v") * stage.layers]
        for stage in stages
        for part in "kv"
        for layer in range(stage.layers)
    }


@pytest.mark.parametrize(
    ("prefill", "decode"), [(TWO, ONE), (TWO, TWO), (ONE, TWO)], ids=["2 to 1", "2 to 2", "1 to 2"]
)
def test_each_layer_arrives_in_the_stage_that_has_it_and_no_byte_beside_it(
    registry: str, prefill: tuple[tuple[int, int], ...], decode: tuple[tuple[int, int], ...]
) -> None:
    ours, theirs = filled(prefill), [Stage(*held) for held in decode]
    with opened(Role.PREFILL, ours, registry) as sources, opened(Role.DECODE, theirs, registry) as targets:
        senders = [KVSender(rank.transfer, "", ROOM) for rank in sources]
        receivers = [KVReceiver(rank.transfer, registry, ROOM) for rank in targets]
        for receiver in receivers:
            receiver.init(np.array([4, 8, 6], np.int32))
        for sender in senders:
            sender.init(3)
            sender.send(np.array([1, 2, 3], np.int32))
        for end in (*receivers, *senders):
            assert end.wait(SECONDS) is KVPoll.Success, end.failure
    sent, arrived = whole(ours), whole(theirs)
    assert sent.keys() == arrived.keys()
    for layer, array in arrived.items():
        expected = np.zeros_like(array)
        expected[[4, 8, 6]] = sent[layer][[1, 2, 3]]
        assert np.array_equal(array, expected), layer


@pytest.fixture
def prefill(registry: str) -> Iterator[list[Rank[Any]]]:
    with opened(Role.PREFILL, filled(TWO), registry) as ranks:
        yield ranks


@pytest.fixture
def decode(registry: str) -> Iterator[Rank[Any]]:
    with opened(Role.DECODE, [Stage(*ONE[0])], registry) as ranks:
        yield ranks[0]


@pytest.fixture
def stages(prefill: list[Rank[Any]]) -> list[Stages]:
    stores: list[Relay] = []
    return [Stages(Relay(stores), pp == 0, rank.transfer.fileno()) for pp, rank in enumerate(prefill)]


def made(prefill: list[Rank[Any]], stages: list[Stages], pp: int) -> KVSender:
    sender = KVSender(prefill[pp].transfer, "", ROOM)
    stages[pp].add(sender)
    return sender


def test_the_first_stage_takes_a_request_up_when_decode_has_met_all_stages(
    registry: str, prefill: list[Rank[Any]], decode: Rank[Any], stages: list[Stages]
) -> None:
    receiver = KVReceiver(decode.transfer, registry, ROOM)
    receiver.init(np.array([4], np.int32))
    first = made(prefill, stages, 0)
    assert first.wait(SECONDS, KVPoll.WaitingForInput) is KVPoll.WaitingForInput
    assert stages[0].agreed(first) is KVPoll.Bootstrapping
    second = made(prefill, stages, 1)
    wait_until(lambda: stages[0].agreed(first) is KVPoll.WaitingForInput)
    for sender in (first, second):
        sender.init(1)
        sender.send(np.array([2], np.int32))
    assert receiver.wait(SECONDS) is KVPoll.Success
    wait_until(lambda: stages[0].agreed(first) is KVPoll.Success)
    for pp, sender in enumerate((first, second)):
        stages[pp].drop(sender)
        sender.close()


def test_a_request_that_failed_in_a_later_stage_fails_in_the_first(
    prefill: list[Rank[Any]], stages: list[Stages]
) -> None:
    first, second = (made(prefill, stages, pp) for pp in range(2))
    assert stages[0].agreed(first) is KVPoll.Bootstrapping
    second.abort("its stage gave up")
    wait_until(lambda: stages[0].agreed(first) is KVPoll.Failed)
    first.close()
    assert stages[0].agreed(first) is KVPoll.Failed


def test_what_a_stage_said_of_a_room_goes_with_the_room(prefill: list[Rank[Any]], registry: str) -> None:
    stores: list[Relay] = []
    stages = [Stages(Relay(stores), pp == 0, rank.transfer.fileno()) for pp, rank in enumerate(prefill)]
    sender = made(prefill, stages, 1)
    later = KVSender(prefill[1].transfer, "", ROOM)  # of a room that is taken
    stages[1].add(later)
    later.close()
    stages[1].drop(later)
    assert stores[1] == {f"{ROOM}/0": KVPoll.Bootstrapping}
    sender.abort()
    stages[1].drop(sender)
    assert not stores[1]
