"""Our manager over SGLang's unified memory, byte by byte: each pool has pages of its own size in one stretch of memory,
and a page is a stretch of all its layers.

Over the modules of the real SGLang, whose attention for this is for GPUs; no engine is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.utils import DisaggregationMode, unified_memory_disagg_move_gate
from sglang.srt.managers import scheduler

from kvgrpc.engines.sglang import moves
from kvgrpc.engines.sglang.plugin import hooks
from kvgrpc.engines.sglang.receiver import KvGrpcReceiver
from kvgrpc.engines.sglang.sender import KvGrpcSender
from kvgrpc.server import KVPoll, RegistryServer
from tests.engines.scheduler_process import PAGE, Process
from tests.support.waiting import wait_until

ROOM = 7
WHOLE_BYTES, OTHER_BYTES = 384, 160  # of a page; the memory is no multiple of either
MEMORY_BYTES = 5_000


class UnifiedProcess(Process):
    """``memory_of_pools``: pages of the KV cache lie at its begin, those of windows, or states, at its end."""

    memory: Mapping[str, bool] = MappingProxyType({"enable_unified_memory": True})

    def __init__(self, kind: StateType, other_bytes: int, *arguments: Any, **more: Any) -> None:
        self.memory_of_pools = np.zeros(MEMORY_BYTES, np.uint8)
        self._kind, self._other_bytes = kind, other_bytes
        super().__init__(*arguments, **more)

    def page(self, number: int, nbytes: int) -> Any:
        return self.memory_of_pools[number * nbytes : (number + 1) * nbytes]

    def _args(self) -> Any:
        entry = [self.memory_of_pools.ctypes.data], [MEMORY_BYTES]
        return SimpleNamespace(
            **{
                **vars(super()._args()),
                **dict(zip(("kv_data_ptrs", "kv_data_lens", "kv_item_lens"), (*entry, [WHOLE_BYTES]), strict=True)),
                "state_types": [self._kind],
                "state_data_ptrs": [entry[0]],
                "state_data_lens": [entry[1]],
                "state_item_lens": [[self._other_bytes]],
                "swa_kv_cache_layout": "nhd" if self._kind is StateType.SWA else None,
            }
        )


Pair = tuple[UnifiedProcess, UnifiedProcess]
Open = Callable[..., Pair]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, own_registry: RegistryServer) -> Iterator[Open]:
    port = int(own_registry.address.rpartition(":")[2])
    found: list[UnifiedProcess] = []

    def opened(kind: StateType, other_bytes: int = OTHER_BYTES) -> Pair:
        for mode, nbytes in ((DisaggregationMode.PREFILL, OTHER_BYTES), (DisaggregationMode.DECODE, other_bytes)):
            found.append(UnifiedProcess(kind, nbytes, monkeypatch, mode, port))
        return found[0], found[1]

    yield opened
    for process in found:
        process.close()


def received(decode: UnifiedProcess, own_registry: RegistryServer, prefix: int = 0) -> KvGrpcReceiver:
    receiver = KvGrpcReceiver(decode.manager, own_registry.address, ROOM)
    receiver.init(ROOM)
    receiver.send_metadata(np.array([4, 1, 6], np.int32), 2, [np.array([28], np.int32)], decode_prefix_len=prefix)
    return receiver


@pytest.mark.parametrize("kind", [StateType.SWA, StateType.MAMBA])
def test_pages_of_either_size_arrive_and_no_byte_beside_them(
    opened: Open, own_registry: RegistryServer, kind: StateType
) -> None:
    prefill, decode = opened(kind)
    prefill.memory_of_pools[:] = np.random.default_rng(0).integers(1, 256, MEMORY_BYTES, np.uint8)
    sender = KvGrpcSender(prefill.manager, "", ROOM)
    receiver = received(decode, own_registry, prefix=PAGE)
    wait_until(lambda: sender.poll() is KVPoll.WaitingForInput)
    assert sender.pop_decode_prefix_len() == PAGE
    sender.init(3, 1)
    sender.send(np.array([0], np.int32))
    sender.send(np.array([5, 2], np.int32), [np.array([25], np.int32)])
    wait_until(lambda: sender.poll() is KVPoll.Success and receiver.poll() is KVPoll.Success)
    came = decode.memory_of_pools.copy()
    decode.memory_of_pools[:] = 0
    for ours, theirs in ((0, 4), (5, 1), (2, 6)):
        decode.page(theirs, WHOLE_BYTES)[:] = prefill.page(ours, WHOLE_BYTES)
    decode.page(28, OTHER_BYTES)[:] = prefill.page(25, OTHER_BYTES)
    assert np.array_equal(came, decode.memory_of_pools)


@pytest.mark.parametrize("kind", [StateType.SWA, StateType.MAMBA])
def test_pages_of_another_size_fail_by_name(opened: Open, own_registry: RegistryServer, kind: StateType) -> None:
    _, decode = opened(kind, OTHER_BYTES // 2)
    receiver = received(decode, own_registry)
    wait_until(lambda: receiver.poll() is KVPoll.Failed)
    with pytest.raises(KVTransferError, match=r"PARALLEL_LAYOUT_MISMATCH.*page_bytes: prefill 160, decode 80"):
        receiver.failure_exception()


class Scheduler:
    """What SGLang's gate of moves looks at, of decode."""

    disaggregation_mode = DisaggregationMode.DECODE
    decode_offload_manager = None

    def __init__(self) -> None:
        self.held: list[object] = []
        self.disagg_decode_prealloc_queue = SimpleNamespace(has_published_destinations=False)
        self.disagg_decode_transfer_queue = SimpleNamespace(
            queue=[], has_pending_deferred_releases=lambda: bool(self.held)
        )


@pytest.mark.parametrize("is_ours", [True, False])
def test_no_page_moves_while_those_of_failed_requests_are_held(is_ours: bool) -> None:
    """SGLang's own gate lets them move, and a late write of prefill would hit another request."""
    looked_at = Scheduler()
    may_move = moves.waiting_for_releases(lambda: is_ours)(unified_memory_disagg_move_gate, looked_at)
    assert may_move()
    looked_at.held.append(object())
    assert may_move() is not is_ours
    looked_at.held.clear()
    assert may_move()
    looked_at.disagg_decode_transfer_queue.queue.append(object())
    assert not may_move()


def test_sglang_asks_our_gate_where_it_is_installed() -> None:
    assert hooks("mooncake", {})[moves.GATE][1] == "AROUND"
    assert scheduler.unified_memory_disagg_move_gate is unified_memory_disagg_move_gate


def test_moves_of_prefill_are_sglangs_own() -> None:
    looked_at = SimpleNamespace(
        disaggregation_mode=DisaggregationMode.PREFILL,
        disagg_prefill_inflight_queue=[],
        disagg_prefill_pending_chunk_rids=set(),
    )
    may_move = moves.waiting_for_releases(lambda: True)(unified_memory_disagg_move_gate, looked_at)
    assert may_move()
    looked_at.disagg_prefill_inflight_queue.append(object())
    assert not may_move()
