"""Context parallel (CP) ranks that divide the heads of states and have all else whole, byte by byte over made-up pools.

Over the modules of the real SGLang, whose kernels for this are for GPUs; no engine is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.utils import DisaggregationMode

from kvgrpc.client import SyncClient
from kvgrpc.engines.sglang.receiver import KvGrpcReceiver
from kvgrpc.engines.sglang.sender import KvGrpcSender
from kvgrpc.server import KVPoll, RegistryServer
from tests.engines.scheduler_process import PAGE, PAGES, Process
from tests.support.waiting import wait_until

ROOM = 7
RANKS = 2
HEADS, HEAD_BYTES = 8, 4  # of a token, in each of K and V
LATENT_BYTES = 24  # of a token
STATE_BYTES = 160  # of a request, of all heads


class Sharing(Process):
    """One of CP ranks at prefill, or of as many tensor-parallel ranks at decode."""

    def __init__(self, rank: int, ranks: int, mode: DisaggregationMode, mla: bool, *arguments: Any) -> None:
        is_prefill = mode is DisaggregationMode.PREFILL
        self.parallel = {"enable_cp_tp_group_sharing": is_prefill}
        self.heads = HEADS if is_prefill else HEADS // ranks
        self.page_bytes = PAGE * (LATENT_BYTES if mla else self.heads * HEAD_BYTES)
        self.state_bytes = STATE_BYTES // ranks
        monkeypatch, port = arguments
        place = {"cp": rank, "cps": ranks} if is_prefill else {"tp": rank, "tps": ranks}
        super().__init__(monkeypatch, mode, port, mla=mla, has_states=True, **place)


Pair = tuple[list[Sharing], list[Sharing]]
Open = Callable[[bool, int], Pair]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, own_registry: RegistryServer) -> Iterator[Open]:
    """Opens prefill and so many ranks of decode, of a model with latents or without."""
    port = int(own_registry.address.rpartition(":")[2])
    found: list[Sharing] = []

    def opened(mla: bool, tps: int) -> Pair:
        for mode, ranks in ((DisaggregationMode.PREFILL, RANKS), (DisaggregationMode.DECODE, tps)):
            found.extend(Sharing(rank, ranks, mode, mla, monkeypatch, port) for rank in range(ranks))
        return found[:RANKS], found[RANKS:]

    yield opened
    for process in found:
        process.close()


def received(decode: list[Sharing], own_registry: RegistryServer) -> list[KvGrpcReceiver]:
    receivers = [KvGrpcReceiver(rank.manager, own_registry.address, ROOM) for rank in decode]
    for receiver in receivers:
        receiver.init(ROOM)
        receiver.send_metadata(np.array([4, 8, 6], np.int32), 2, [np.array([4], np.int32)], decode_prefix_len=PAGE)
    return receivers


@pytest.mark.parametrize("mla", [False, True], ids=["heads", "latents"])
def test_each_rank_hands_over_to_the_equal_rank_its_heads_of_states_and_those_of_keys_that_it_wants(
    opened: Open, own_registry: RegistryServer, mla: bool
) -> None:
    prefill, decode = opened(mla, RANKS)
    draw = np.random.default_rng(0)
    for rank in (*prefill, *decode):
        for array in (*rank.kv, *rank.states, rank.aux):
            array[:] = draw.integers(1, 256, array.shape, np.uint8)
    expected = [([array.copy() for array in rank.kv], rank.states[0].copy()) for rank in decode]
    senders = [KvGrpcSender(rank.manager, "", ROOM) for rank in prefill]
    receivers = received(decode, own_registry)
    wait_until(lambda: min(sender.poll() for sender in senders) is KVPoll.WaitingForInput)
    assert [sender.pop_decode_prefix_len() for sender in senders] == [PAGE] * RANKS
    for sender in senders:
        sender.init(3, 1)
        sender.send(np.array([1, 2], np.int32))
        sender.send(np.array([3], np.int32), [np.array([5], np.int32)])
    wait_until(lambda: {each.poll() for each in senders} | {each.poll() for each in receivers} == {KVPoll.Success})
    for number, (ours, theirs, (kv, state)) in enumerate(zip(prefill, decode, expected, strict=True)):
        wanted = slice(number * theirs.heads, (number + 1) * theirs.heads)
        for mine, its, held in zip(ours.kv, theirs.kv, kv, strict=True):
            tokens = mine[[1, 2, 3]].reshape(3, PAGE, 1 if mla else HEADS, -1)
            held[[4, 8, 6]] = (tokens if mla else tokens[:, :, wanted]).reshape(3, -1)
            assert its.shape[0] == PAGES and np.array_equal(its, held)
        state[4] = ours.states[0][5]
        assert np.array_equal(theirs.states[0], state)
        assert np.array_equal(theirs.aux[2], ours.aux[1])
        got = 3 * sum(array.shape[1] for array in theirs.kv) + theirs.states[0].shape[1]
        told = senders[number].get_transfer_metric().transfer_total_bytes
        assert told == got, "what SGLang's metrics say of a rank"


def test_they_are_tensor_parallel_ranks_of_which_sglang_counts_the_bytes_of_each(
    opened: Open, own_registry: RegistryServer
) -> None:
    prefill, _ = opened(True, RANKS)
    with SyncClient(own_registry.address) as client:
        (engine,) = client.list_engines(include_rows=True)
    assert (engine.layout.tp, engine.layout.cp) == (2, 1)
    assert [rank.manager.is_dummy_cp_rank for rank in prefill] == [False, False]


@pytest.mark.parametrize(
    ("mla", "differs"), [(False, r"pools\[0\].head_count"), (True, r"pools\[1\].regions\[0\].page_bytes")]
)
@pytest.mark.parametrize("tps", [1, 4])
def test_other_sizes_fail_by_name(
    opened: Open, own_registry: RegistryServer, mla: bool, differs: str, tps: int
) -> None:
    """A state is not cut."""
    _, decode = opened(mla, tps)
    receivers = received(decode, own_registry)
    wait_until(lambda: {receiver.poll() for receiver in receivers} == {KVPoll.Failed})
    with pytest.raises(KVTransferError, match=f"PARALLEL_LAYOUT_MISMATCH.*{differs}"):
        receivers[0].failure_exception()
