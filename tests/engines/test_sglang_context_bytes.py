"""Our managers of context parallel (CP) and of decode context parallel (DCP) ranks, byte by byte over made-up pools.

Over the modules of the real SGLang, whose kernels for this are for GPUs; no engine is started.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs

from kvgrpc.client import SyncClient
from kvgrpc.engines import compatibility
from kvgrpc.engines.sglang.receiver import KvGrpcReceiver
from kvgrpc.engines.sglang.sender import KvGrpcSender
from kvgrpc.server import KVPoll, RegistryServer
from tests.engines.scheduler_process import PAGE, PAGE_BYTES, PAGES, REQUESTS, STATE_BYTES, Process
from tests.support.waiting import wait_until

ROOM = 7
EQUAL = (2, 2), (2, 2)


@pytest.fixture
def processes(
    monkeypatch: pytest.MonkeyPatch, own_registry: RegistryServer, request: pytest.FixtureRequest
) -> Iterator[list[Process]]:
    """CP ranks 0 and 1 of prefill, and decode; of whether SGLang shall let all CP ranks hand over."""
    port = int(own_registry.address.rpartition(":")[2])
    with envs.SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER.override(getattr(request, "param", False)):
        ranks = [Process(monkeypatch, DisaggregationMode.PREFILL, port, cp=cp, cps=2) for cp in range(2)]
        ranks.append(Process(monkeypatch, DisaggregationMode.DECODE, port))
        yield ranks
    for rank in ranks:
        rank.close()


@pytest.fixture
def senders(processes: list[Process]) -> list[KvGrpcSender]:
    return [KvGrpcSender(each.manager, "", ROOM) for each in processes[:2]]


def received(processes: list[Process], own_registry: RegistryServer, prefix: int = 0) -> KvGrpcReceiver:
    receiver = KvGrpcReceiver(processes[2].manager, own_registry.address, ROOM)
    receiver.init(ROOM)
    receiver.send_metadata(np.array([4, 8, 6], np.int32), 2, decode_prefix_len=prefix)
    return receiver


def agreed(senders: list[KvGrpcSender]) -> KVPoll:
    """As SGLang's CP ranks agree on it."""
    return min(sender.poll() for sender in senders)


@pytest.mark.parametrize(
    ("processes", "first"),
    [(False, 0), (False, 1), (True, 0)],
    ids=["first", "last", "all hand over"],
    indirect=["processes"],
)
def test_one_rank_sends_what_both_have_and_both_succeed(
    processes: list[Process], senders: list[KvGrpcSender], own_registry: RegistryServer, first: int
) -> None:
    """``first``: which of them sends before the other."""
    ours, copy, theirs = processes
    draw = np.random.default_rng(0)
    for array, other in zip((*ours.kv, ours.aux), (*copy.kv, copy.aux), strict=True):
        array[:] = draw.integers(1, 128, array.shape, np.uint8)
        other[:] = array + 128  # to be told apart; SGLang's are the same
    assert agreed(senders) is KVPoll.Bootstrapping
    receiver = received(processes, own_registry, prefix=PAGE)
    wait_until(lambda: agreed(senders) is KVPoll.WaitingForInput)
    assert [sender.pop_decode_prefix_len() for sender in senders] == [PAGE, PAGE]
    for sender in (senders[first], senders[1 - first]):
        sender.init(3, 1)
        sender.send(np.array([1, 2], np.int32))
        assert sender.poll() < KVPoll.Success
        sender.send(np.array([3], np.int32))
        # So that what rank 1 sent, if it did, would lie over what rank 0 has sent before.
        wait_until(lambda: first == 1 or senders[0].poll() is KVPoll.Success)
    wait_until(lambda: agreed(senders) is KVPoll.Success and receiver.poll() is KVPoll.Success)
    for mine, its in zip(ours.kv, theirs.kv, strict=True):
        expected = np.zeros_like(its)
        expected[[4, 8, 6]] = mine[[1, 2, 3]]
        assert np.array_equal(its, expected)
    assert np.array_equal(theirs.aux[2], ours.aux[1])
    assert senders[0].get_transfer_metric().transfer_total_bytes == 2 * 3 * PAGE_BYTES
    for sender in senders:
        sender.clear()
    assert agreed(senders) is KVPoll.Success


def test_each_of_the_ranks_has_its_place_and_sglang_counts_the_bytes_of_the_first(
    processes: list[Process], own_registry: RegistryServer
) -> None:
    with SyncClient(own_registry.address) as client:
        (engine,) = client.list_engines(include_rows=True)
    assert sorted(row.rank.rank.cp for row in engine.rows) == [0, 1] and engine.layout.cp == 2
    assert [each.manager.is_dummy_cp_rank for each in processes] == [False, True, False]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_one_of_the_ranks_ends_the_request_in_all(
    senders: list[KvGrpcSender], processes: list[Process], own_registry: RegistryServer, rank: int
) -> None:
    """One that hands over nothing counts too: SGLang gives the request up in all of them."""
    receiver = received(processes, own_registry)
    wait_until(lambda: agreed(senders) is KVPoll.WaitingForInput)
    for sender in senders:
        sender.init(3, 1)
    senders[rank].abort()
    wait_until(lambda: receiver.poll() is KVPoll.Failed)
    wait_until(lambda: [sender.poll() for sender in senders] == [KVPoll.Failed] * 2)
    with pytest.raises(KVTransferError, match="ROOM_CANCELLED"):
        receiver.failure_exception()
    for sender in senders:
        with pytest.raises(KVTransferError, match="ROOM_CANCELLED"):
            sender.failure_exception()


def test_a_lost_rank_ends_the_request(
    senders: list[KvGrpcSender], processes: list[Process], own_registry: RegistryServer
) -> None:
    receiver = received(processes, own_registry)
    wait_until(lambda: agreed(senders) is KVPoll.WaitingForInput)
    processes[0].close()
    wait_until(lambda: receiver.poll() is KVPoll.Failed and senders[1].poll() is KVPoll.Failed)


def test_what_was_never_run_with_this_sglang_is_told_in_one_line_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compatibility, "version_of", lambda engine: "0.5.21")
    monkeypatch.setattr(compatibility, "_warned", set())
    Process(monkeypatch, DisaggregationMode.DECODE, 1, mla=True).close()
    (said,) = [message for message in caplog.messages if "never" in message]
    assert said.startswith("kvgrpc: latents (MLA): never run with SGLang 0.5.21, but with 0.5.23; ")


class Divided(NamedTuple):
    """The tensor-parallel ranks of either side; ``registry`` is prefill's."""

    prefill: list[Process]
    decode: list[Process]
    registry: str

    def receivers(
        self, prefix: int = 0, pages: Sequence[int] = (4, 8, 6), state: Sequence[int] | None = None
    ) -> list[KvGrpcReceiver]:
        """One of each rank of decode, with pages behind ``prefix`` tokens; ``state``: the page of the request's."""
        found = [KvGrpcReceiver(rank.manager, self.registry, ROOM) for rank in self.decode]
        for receiver in found:
            receiver.init(ROOM)
            states = None if state is None else [np.array(state, np.int32)]
            receiver.send_metadata(np.array(pages, np.int32), 2, states, decode_prefix_len=prefix)
        return found


@pytest.fixture
def divided(
    monkeypatch: pytest.MonkeyPatch, own_registry: RegistryServer, request: pytest.FixtureRequest
) -> Iterator[Divided]:
    """Of a number of tensor-parallel ranks and the size of decode context parallelism: prefill's, decode's; and whether
    the model has states beside its latents."""
    *sizes, has_states = request.param if len(request.param) == 3 else (*request.param, False)
    port = int(own_registry.address.rpartition(":")[2])
    sides = [
        [
            Process(monkeypatch, mode, port, tp=tp, tps=tps, dcps=dcps, mla=True, has_states=has_states)
            for tp in range(tps)
        ]
        for mode, (tps, dcps) in zip((DisaggregationMode.PREFILL, DisaggregationMode.DECODE), sizes, strict=True)
    ]
    yield Divided(sides[0], sides[1], own_registry.address)
    for rank in (*sides[0], *sides[1]):
        rank.close()


@pytest.mark.parametrize("divided", [EQUAL], ids=["2 to 2"], indirect=True)
def test_each_decode_context_parallel_rank_gets_the_tokens_of_its_equal(divided: Divided) -> None:
    """A page number stands for a page of every rank, and so for twice as many tokens as each has in it."""
    draw = np.random.default_rng(0)
    for rank in divided.prefill:
        for array in (*rank.kv, rank.aux):
            array[:] = draw.integers(1, 256, array.shape, np.uint8)
    senders = [KvGrpcSender(rank.manager, "", ROOM) for rank in divided.prefill]
    receivers = divided.receivers(prefix=2 * PAGE)
    wait_until(lambda: agreed(senders) is KVPoll.WaitingForInput)
    assert [sender.pop_decode_prefix_len() for sender in senders] == [2 * PAGE] * 2
    for sender in senders:
        sender.init(3, 1)
        sender.send(np.array([1, 2, 3], np.int32))
    wait_until(lambda: {each.poll() for each in senders} | {each.poll() for each in receivers} == {KVPoll.Success})
    for ours, theirs in zip(divided.prefill, divided.decode, strict=True):
        for mine, its in zip(ours.kv, theirs.kv, strict=True):
            expected = np.zeros_like(its)
            expected[[4, 8, 6]] = mine[[1, 2, 3]]
            assert np.array_equal(its, expected)


@pytest.mark.parametrize(
    "divided", [((1, 1), (2, 2)), ((2, 1), (2, 2)), ((2, 1), (4, 2))], ids=["1 to 2", "2 to 2", "2 to 4"], indirect=True
)
@pytest.mark.parametrize("held", [0, 1], ids=["nothing held", "a page held"])
def test_at_decode_alone_each_of_its_ranks_gets_every_second_token(divided: Divided, held: int) -> None:
    """Of five pages of prefill, of which two are a page number of decode; the last one is half full."""
    draw = np.random.default_rng(0)
    copies = [draw.integers(1, 256, (PAGES, PAGE_BYTES), np.uint8) for _ in range(2)]
    for rank in divided.prefill:
        for array, copy in zip(rank.kv, copies, strict=True):
            array[:] = copy
    senders = [KvGrpcSender(rank.manager, "", ROOM) for rank in divided.prefill]
    theirs = [4, 8, 6][held:]
    receivers = divided.receivers(prefix=held * 2 * PAGE, pages=theirs)
    wait_until(lambda: agreed(senders) is KVPoll.WaitingForInput)
    assert {sender.pop_decode_prefix_len() for sender in senders} == {held * 2 * PAGE}
    ours = [1, 2, 3, 9, 10][held * 2 :]
    for sender in senders:
        sender.init(len(ours), 1)
        sender.send(np.array(ours[:1], np.int32))
        sender.send(np.array(ours[1:], np.int32))
    wait_until(lambda: {each.poll() for each in senders} | {each.poll() for each in receivers} == {KVPoll.Success})
    for number, rank in enumerate(divided.decode):
        for copy, its in zip(copies, rank.kv, strict=True):
            mine = copy[ours].reshape(len(ours) * PAGE, -1)[number % 2 :: 2]
            expected = np.zeros_like(its).reshape(PAGES, PAGE, -1)
            for at, token in enumerate(mine):
                expected[theirs[at // PAGE], at % PAGE] = token
            assert np.array_equal(its, expected.reshape(its.shape))


@pytest.mark.parametrize("divided", [((2, 1), (2, 2), True), (*EQUAL, True)], ids=["alone", "both"], indirect=True)
def test_a_state_a_request_goes_from_each_rank_to_its_equal(divided: Divided) -> None:
    """Of models with latents and states (Kimi Linear): of a state each tensor-parallel rank has its own heads."""
    for number, rank in enumerate(divided.prefill):
        rank.states[0][:] = np.arange(REQUESTS * STATE_BYTES, dtype=np.uint8).reshape(REQUESTS, -1) + 1 + number
    senders = [KvGrpcSender(rank.manager, "", ROOM) for rank in divided.prefill]
    receivers = divided.receivers(state=[4])
    wait_until(lambda: agreed(senders) is KVPoll.WaitingForInput)
    count = 3 * divided.decode[0].manager.page_tokens // divided.prefill[0].manager.page_tokens
    for sender in senders:
        sender.init(count, 1)
        sender.send(np.arange(count, dtype=np.int32), [np.array([5], np.int32)])
    wait_until(lambda: {each.poll() for each in senders} | {each.poll() for each in receivers} == {KVPoll.Success})
    for ours, theirs in zip(divided.prefill, divided.decode, strict=True):
        expected = np.zeros_like(theirs.states[0])
        expected[4] = ours.states[0][5]
        assert np.array_equal(theirs.states[0], expected)
    told = [sender.get_transfer_metric().transfer_total_bytes for sender in senders]
    assert told == [2 * count * PAGE_BYTES + STATE_BYTES] * len(senders), "what SGLang's metrics say"


@pytest.mark.parametrize("divided", [EQUAL], ids=["2 to 2"], indirect=True)
def test_a_prefix_of_a_part_of_their_pages_fails(divided: Divided) -> None:
    receivers = divided.receivers(prefix=PAGE)
    wait_until(lambda: all(receiver.poll() is KVPoll.Failed for receiver in receivers))
    with pytest.raises(KVTransferError, match=f"prefixes of whole pages and no {PAGE}"):
        receivers[0].failure_exception()


@pytest.mark.parametrize(
    ("divided", "differ"),
    [
        (((2, 2), (2, 1)), "axes: prefill tokens over 2, decode "),
        (((4, 2), (2, 2)), "head_start: prefill 0, decode 1"),
        (((1, 1), (3, 3)), "axes: prefill , decode tokens over 3"),
    ],
    ids=["not at decode", "over other sizes", "no whole rows in a page"],
    indirect=["divided"],
)
def test_other_sizes_fail_by_name(divided: Divided, differ: str) -> None:
    receiver = divided.receivers()[-1]
    wait_until(lambda: receiver.poll() is KVPoll.Failed)
    with pytest.raises(KVTransferError, match=f"PARALLEL_LAYOUT_MISMATCH.*{differ}"):
        receiver.failure_exception()
