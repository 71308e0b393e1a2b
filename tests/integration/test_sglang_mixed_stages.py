"""Pipeline stages of SGLang whose layers are of two kinds, byte by byte: ranks over made-up memory, described as SGLang
does. Every other layer has windows, or a state a request, in a pool with pages of other numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvgrpc.engines.sglang.rank import SchedulerProcess, pages_of_pools, pools, state_names
from kvgrpc.errors import Reason
from kvgrpc.model import Layout, Role
from kvgrpc.server import RankConfig, RegistryServer
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender
from tests.support.pipeline_stages import opened

SECONDS = 20.0
HERE, ROOM = "127.0.0.1", 7
PAGES = {"kv": 12, "swa": 9, "mamba": 5}
# Bytes of what each layer of a kind keeps of a page, or of a request.
KEPT = {"kv": {"k": 192, "v": 192}, "swa": {"k": 192, "v": 192}, "mamba": {"convolution": 48, "state": 160}}
# First layer and number of layers of each stage. Of the first three two are of the kind, of the next three one.
TWO, ONE, UNEVEN = ((0, 3), (3, 3)), ((0, 6),), ((0, 4), (4, 2))
Memory = dict[tuple[str, str, int], Any]  # by pool, what is kept, and the layer of the model


class Stage:
    """One scheduler process, and its memory: of a pool what is kept first of all its layers, then the next."""

    def __init__(self, kind: str, first: int, layers: int, keeping_nothing: Sequence[int] = ()) -> None:
        self.memory: Memory = {
            (pool, what, layer): np.zeros((PAGES[pool], nbytes), np.uint8)
            for pool, remainder in (("kv", 1), (kind, 0))
            for what, nbytes in KEPT[pool].items()
            for layer in range(first, first + layers)
            if layer % 2 == remainder and layer not in keeping_nothing
        }
        kv, states = self._entries("kv"), self._entries(kind)
        self.args = SimpleNamespace(
            page_size=16,
            kv_cache_dtype_str="bfloat16",
            gpu_id=0,
            swa_kv_cache_layout="nhd",
            state_types=[kind],
            **{f"kv_{what}": values for what, values in kv.items()},
            **{f"state_{what}": [values] for what, values in states.items()},
        )

    def _entries(self, pool: str) -> dict[str, list[int]]:
        held = {key: array for key, array in self.memory.items() if key[0] == pool}
        return {
            "data_ptrs": [array.ctypes.data for array in held.values()],
            "data_lens": [array.nbytes for array in held.values()],
            "item_lens": [array.shape[1] for array in held.values()],
            "layer_ids": [layer for _, _, layer in held],
        }

    def config(self, role: Role, pp: int, stages: int, registry: str) -> RankConfig:
        layout = Layout(pp=stages)
        place = SchedulerProcess(role, layout, 0, 0, HERE, HERE, 1, "", "cpu", kv_heads=8, pp=pp)
        own = registry if role is Role.PREFILL else ""
        given = pools(self.args, place)
        return RankConfig(engine=role.name, role=role, layout=layout, pp=pp, pools=given, registry=own)

    def pages(self, kv: list[int], others: list[int]) -> Any:
        return pages_of_pools(state_names(self.args), np.array(kv, np.int32), [np.array(others, np.int32)])


@pytest.fixture
def registry() -> Iterator[str]:
    server = RegistryServer([f"{HERE}:0"]).open()
    yield server.address
    server.close()


def filled(stages: list[Stage]) -> list[Stage]:
    draw = np.random.default_rng(0)
    for array in (array for stage in stages for array in stage.memory.values()):
        array[:] = draw.integers(1, 256, array.shape, np.uint8)
    return stages


@pytest.mark.parametrize("kind", ["swa", "mamba"])
@pytest.mark.parametrize(
    ("prefill", "decode", "keeping_nothing"),
    [
        (TWO, ONE, []),
        (TWO, TWO, []),
        (ONE, TWO, []),
        (UNEVEN, UNEVEN, []),
        (UNEVEN, ONE, []),
        # As MLPs of Nemotron-H: the last layer of a stage, and the first of one, or of the model.
        (TWO, ONE, [2]),
        (TWO, ONE, [0, 3]),
        (TWO, TWO, [2, 3]),
        (ONE, TWO, [2]),
        (ONE, TWO, [3]),
    ],
)
def test_each_layer_arrives_in_the_stage_that_has_it_and_no_byte_beside_it(
    registry: str,
    kind: str,
    prefill: tuple[tuple[int, int], ...],
    decode: tuple[tuple[int, int], ...],
    keeping_nothing: list[int],
) -> None:
    ours = filled([Stage(kind, *held, keeping_nothing) for held in prefill])
    theirs = [Stage(kind, *held, keeping_nothing) for held in decode]
    moved = {"kv": ([1, 2, 3], [4, 8, 6]), kind: ([2, 0], [3, 1]) if kind == "swa" else ([2], [3])}
    with opened(Role.PREFILL, ours, registry) as sources, opened(Role.DECODE, theirs, registry) as targets:
        senders = [KVSender(rank.transfer, "", ROOM) for rank in sources]
        receivers = [KVReceiver(rank.transfer, registry, ROOM) for rank in targets]
        for receiver, stage in zip(receivers, theirs, strict=True):
            receiver.init(stage.pages(moved["kv"][1], moved[kind][1]))
        for sender, stage in zip(senders, ours, strict=True):
            sender.init(3)
            sender.send(stage.pages(moved["kv"][0], moved[kind][0]))
        for end in (*receivers, *senders):
            assert end.wait(SECONDS) is KVPoll.Success, end.failure
    sent, arrived = ({key: each for stage in side for key, each in stage.memory.items()} for side in (ours, theirs))
    assert sent.keys() == arrived.keys()
    for (pool, what, layer), array in arrived.items():
        expected = np.zeros_like(array)
        expected[moved[pool][1]] = sent[pool, what, layer][moved[pool][0]]
        assert np.array_equal(array, expected), (pool, what, layer)


@pytest.mark.parametrize("kind", ["swa", "mamba"])
def test_stages_that_are_divided_otherwise_at_the_other_side_hand_nothing_over(registry: str, kind: str) -> None:
    ours, theirs = filled([Stage(kind, *held) for held in TWO]), [Stage(kind, *held) for held in UNEVEN]
    with opened(Role.PREFILL, ours, registry) as sources, opened(Role.DECODE, theirs, registry) as targets:
        senders = [KVSender(rank.transfer, "", ROOM) for rank in sources]
        for rank, stage in zip(targets, theirs, strict=True):
            receiver = KVReceiver(rank.transfer, registry, ROOM)
            receiver.init(stage.pages([4], [3]))
            assert receiver.wait(SECONDS) is KVPoll.Failed
            assert receiver.failure is not None and receiver.failure.reason is Reason.PARALLEL_LAYOUT_MISMATCH
        for sender in senders:
            sender.close()
    assert not any(array.any() for stage in theirs for array in stage.memory.values())
