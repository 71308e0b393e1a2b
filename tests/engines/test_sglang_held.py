"""Our manager and receivers under SGLang's own base classes, between two ranks: which pages may be used again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation.common.conn import KVTransferError

from kvgrpc.engines.sglang.held import RoomsAwaitingRelease
from kvgrpc.engines.sglang.manager import KvGrpcManager
from kvgrpc.engines.sglang.receiver import KvGrpcReceiver
from kvgrpc.errors import Failure, Reason
from kvgrpc.server import KVPoll, KVSender, Pool, RankConfig, Role, open_decode, open_prefill
from tests.support.faults.dataplane import Fault, FaultyDataPlane, NullDataPlane
from tests.support.waiting import wait_until

PAGES, PAGE_BYTES, ROOM = 64, 4096, 7


def config(role: Role, plane: Any, registry: str = "") -> RankConfig:
    pool = Pool.from_arrays([np.zeros((PAGES, PAGE_BYTES), np.uint8)], page_tokens=16)
    return RankConfig(engine=role.name.lower(), role=role, pools=(pool,), registry=registry, data_plane=plane)


def manager_over(decode: Any) -> Any:
    """As SGLang's scheduler holds it; only what describes SGLang's own memory is left out."""
    manager: Any = object.__new__(KvGrpcManager)
    manager.rank, manager.transfer, manager._held = decode, decode.transfer, RoomsAwaitingRelease()
    manager.external_registry, manager._state_names, manager.attempt = "", (), 0
    manager.kv_args, manager.page_tokens = SimpleNamespace(page_size=16), 16
    return manager


def test_pages_that_have_come_are_given_up_where_another_pipeline_stage_has_none() -> None:
    prefill = open_prefill(config(Role.PREFILL, NullDataPlane(), "embedded"))
    decode = open_decode(config(Role.DECODE, NullDataPlane()))
    manager = manager_over(decode)
    try:
        receiver, sender = KvGrpcReceiver(manager, prefill.address, ROOM), KVSender(prefill.transfer, room=ROOM)
        receiver.init(ROOM)
        sender.init(1)
        receiver.send_metadata(np.array([3], np.int32))
        sender.send(np.array([10], np.int32))
        wait_until(lambda: receiver.poll() == KVPoll.Success)
        receiver.give_up(Failure(Reason.PEER_LOST, "prefill died"))
        assert receiver.poll() == KVPoll.Failed
        with pytest.raises(KVTransferError, match="PEER_LOST: prefill died"):
            receiver.failure_exception()
        receiver.ensure_abort_notified(force_arm=True)
        assert manager.is_abort_release_safe(ROOM, 0)
    finally:
        prefill.close()
        decode.close()


def test_a_request_that_is_aborted_before_it_has_a_prefill_says_why_and_another_ranks_failure_is_not_its_own() -> None:
    decode = open_decode(config(Role.DECODE, NullDataPlane()))
    try:
        early, given_up, without = (KvGrpcReceiver(manager_over(decode), "127.0.0.1:1", ROOM + n) for n in range(3))
        early.abort("the client left")
        early.init(ROOM)
        assert early.poll() == KVPoll.Failed
        with pytest.raises(KVTransferError, match="ROOM_CANCELLED: the client left"):
            early.failure_exception()
        given_up.init(ROOM + 1)
        given_up.give_up(None)
        for receiver in (given_up, without):
            with pytest.raises(KVTransferError, match="another rank of this engine failed"):
                receiver.failure_exception()
            assert receiver.poll() == KVPoll.Failed
    finally:
        decode.close()


def test_a_second_request_of_a_room_gives_back_no_pages_that_are_still_written_for_the_first() -> None:
    plane = FaultyDataPlane(NullDataPlane(), lambda number, _: Fault(hang=True))
    prefill = open_prefill(config(Role.PREFILL, plane, "embedded"))
    decode = open_decode(config(Role.DECODE, NullDataPlane()))
    manager = manager_over(decode)

    def request() -> Any:
        receiver = KvGrpcReceiver(manager, prefill.address, ROOM)
        receiver.init(ROOM)
        return receiver

    try:
        first, sender = request(), KVSender(prefill.transfer, room=ROOM)
        sender.init(2)
        wait_until(lambda: first.poll() == KVPoll.WaitingForInput)
        first.send_metadata(np.array([3, 4], np.int32))
        sender.send(np.array([10, 20], np.int32))
        wait_until(lambda: plane.submissions and first.poll() == KVPoll.Transferring)
        first.abort()
        first.ensure_abort_notified(force_arm=True)
        assert first.abort_notified and not manager.is_abort_release_safe(ROOM, 0)

        second = request()
        second.send_metadata(np.array([5, 6], np.int32))
        wait_until(lambda: second.poll() == KVPoll.Failed)
        second.ensure_abort_notified(force_arm=True)
        assert second._receiver.release_safe
        assert not manager.is_abort_release_safe(ROOM, 0), "the first request's write still runs"
        manager.clear_deferred_abort_state(ROOM)
        assert not manager.is_abort_release_safe(ROOM, 0), "the second request was cleared, not the first"
    finally:
        prefill.close()
        decode.close()
