"""Our managers of two context parallel (CP) ranks of prefill, and of one decode, byte by byte over made-up pools.

Over the modules of the real SGLang, whose kernels for this are for GPUs; no engine is started.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.utils import DisaggregationMode

from kvgrpc.client import SyncClient
from kvgrpc.engines import compatibility
from kvgrpc.engines.sglang import limits, manager
from kvgrpc.engines.sglang.manager import KvGrpcManager
from kvgrpc.engines.sglang.receiver import KvGrpcReceiver
from kvgrpc.engines.sglang.sender import KvGrpcSender
from kvgrpc.server import KVPoll, RegistryServer
from tests.support.waiting import wait_until

LOCAL, ROOM = "127.0.0.1", 7
PAGES, PAGE_BYTES, PAGE = 12, 192, 16


class Process:
    """A scheduler process of SGLang with its own memory, K and V of a layer, and our manager in it."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, mode: DisaggregationMode, port: int, cp: int, cps: int, mla: bool = False
    ) -> None:
        self.kv = [np.zeros((PAGES, PAGE_BYTES), np.uint8) for _ in range(2)]
        self.aux = np.zeros((4, 64), np.uint8)
        parallel = {
            **dict.fromkeys(("pp_size", "attn_tp_size", "attn_dp_size", "dp_size", "attn_dcp_size"), 1),
            **dict.fromkeys(("pp_rank", "attn_tp_rank", "attn_dp_rank", "dp_rank"), 0),
            **{"attn_cp_size": cps, "attn_cp_rank": cp, "dist_init_addr": None},
            "load_balance_method": "follow_bootstrap_room",
        }
        disagg = {
            "disaggregation_mode": mode.value,
            "disaggregation_bootstrap_port": port,
            "disaggregation_transfer_backend": "kvgrpc",
        }
        model = SimpleNamespace(
            model_path="a/model",
            revision=None,
            dtype="bfloat16",
            num_hidden_layers=1,
            get_total_num_kv_heads=lambda: 8,
        )
        settings = {
            "get_parallel": parallel,
            "get_disagg": disagg,
            "get_serving": {"host": LOCAL, "port": 1, "tokenizer_worker_num": 1},
            "get_device": {"device": "cpu"},
            "get_memory": {},
            "get_spec": {},
            "get_exec": {"features": SimpleNamespace(enable_memory_saver=False)},
        }
        with monkeypatch.context() as patch:
            for name, values in settings.items():
                for module in (limits, manager):
                    if hasattr(module, name):
                        patch.setattr(module, name, lambda values=values: SimpleNamespace(**values))
            patch.setattr(manager, "process_model_config", lambda: model)
            patch.setenv(limits.UNTRIED, limits.CONTEXT)
            self.manager: Any = KvGrpcManager(self._args(), mode, None, mla)

    def _args(self) -> Any:
        return SimpleNamespace(
            page_size=PAGE,
            kv_cache_dtype_str="bfloat16",
            gpu_id=0,
            state_types=[],
            kv_data_ptrs=[array.ctypes.data for array in self.kv],
            kv_data_lens=[array.nbytes for array in self.kv],
            kv_item_lens=[PAGE_BYTES] * len(self.kv),
            aux_data_ptrs=[self.aux.ctypes.data],
            aux_data_lens=[self.aux.nbytes],
            aux_item_lens=[self.aux.shape[1]],
        )

    def close(self) -> None:
        self.manager.rank.close()


@pytest.fixture
def registry() -> Iterator[RegistryServer]:
    server = RegistryServer([f"{LOCAL}:0"]).open()
    yield server
    server.close()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, registry: RegistryServer) -> Iterator[list[Process]]:
    """CP ranks 0 and 1 of prefill, and decode."""
    port = int(registry.address.rpartition(":")[2])
    ranks = [Process(monkeypatch, DisaggregationMode.PREFILL, port, cp, 2) for cp in range(2)]
    ranks.append(Process(monkeypatch, DisaggregationMode.DECODE, port, 0, 1))
    yield ranks
    for rank in ranks:
        rank.close()


@pytest.fixture
def senders(processes: list[Process]) -> list[KvGrpcSender]:
    return [KvGrpcSender(each.manager, "", ROOM) for each in processes[:2]]


def received(processes: list[Process], registry: RegistryServer, prefix: int = 0) -> KvGrpcReceiver:
    receiver = KvGrpcReceiver(processes[2].manager, registry.address, ROOM)
    receiver.init(ROOM)
    receiver.send_metadata(np.array([4, 8, 6], np.int32), 2, decode_prefix_len=prefix)
    return receiver


def agreed(senders: list[KvGrpcSender]) -> KVPoll:
    """As SGLang's CP ranks agree on it."""
    return min(sender.poll() for sender in senders)


def test_one_rank_sends_what_both_have_and_both_succeed(
    processes: list[Process], senders: list[KvGrpcSender], registry: RegistryServer
) -> None:
    ours, copy, theirs = processes
    draw = np.random.default_rng(0)
    for array, other in zip((*ours.kv, ours.aux), (*copy.kv, copy.aux), strict=True):
        array[:] = draw.integers(1, 128, array.shape, np.uint8)
        other[:] = array + 128  # to be told apart; SGLang's are the same
    assert agreed(senders) is KVPoll.Bootstrapping
    receiver = received(processes, registry, prefix=PAGE)
    wait_until(lambda: agreed(senders) is KVPoll.WaitingForInput)
    assert [sender.pop_decode_prefix_len() for sender in senders] == [PAGE, PAGE]
    for sender in reversed(senders):
        sender.init(3, 1)
        sender.send(np.array([1, 2], np.int32))
        assert sender.poll() < KVPoll.Success
        sender.send(np.array([3], np.int32))
    wait_until(lambda: agreed(senders) is KVPoll.Success and receiver.poll() is KVPoll.Success)
    for mine, its in zip(ours.kv, theirs.kv, strict=True):
        expected = np.zeros_like(its)
        expected[[4, 8, 6]] = mine[[1, 2, 3]]
        assert np.array_equal(its, expected)
    assert np.array_equal(theirs.aux[2], ours.aux[1])
    for sender in senders:
        sender.clear()
    assert agreed(senders) is KVPoll.Success


def test_each_of_the_ranks_has_its_place_and_sglang_counts_the_bytes_of_the_first(
    processes: list[Process], registry: RegistryServer
) -> None:
    with SyncClient(registry.address) as client:
        (engine,) = client.list_engines(include_rows=True)
    assert sorted(row.rank.rank.cp for row in engine.rows) == [0, 1] and engine.layout.cp == 2
    assert [each.manager.is_dummy_cp_rank for each in processes] == [False, True, False]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_in_one_of_the_ranks_ends_the_request_in_all(
    senders: list[KvGrpcSender], processes: list[Process], registry: RegistryServer, rank: int
) -> None:
    """One that hands over nothing counts too: SGLang gives the request up in all of them."""
    receiver = received(processes, registry)
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
    senders: list[KvGrpcSender], processes: list[Process], registry: RegistryServer
) -> None:
    receiver = received(processes, registry)
    wait_until(lambda: agreed(senders) is KVPoll.WaitingForInput)
    processes[0].close()
    wait_until(lambda: receiver.poll() is KVPoll.Failed and senders[1].poll() is KVPoll.Failed)


def test_what_was_never_run_with_this_sglang_is_told_in_one_line_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compatibility, "version_of", lambda engine: "0.5.22")
    monkeypatch.setattr(compatibility, "_warned", set())
    Process(monkeypatch, DisaggregationMode.DECODE, 1, 0, 1, mla=True).close()
    (said,) = [message for message in caplog.messages if "never" in message]
    assert said.startswith("kvgrpc: latents (MLA): never run with SGLang 0.5.22, but with 0.5.23; ")
