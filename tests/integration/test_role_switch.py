"""A process that is prefill, then decode, then prefill again: each is another incarnation, and nothing stays behind."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pytest

import kvgrpc.dataplane
from kvgrpc.model import Pool, PoolKind, Region, Role
from kvgrpc.server import Rank, RankConfig, open_rank
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender

PAGES, PAGE_BYTES = 32, 4096
WARM_UP = 5


@contextmanager
def opened(engine: str, role: Role, registry: str = "") -> Iterator[tuple[Rank[Any], npt.NDArray[np.uint8]]]:
    plane = kvgrpc.dataplane.open_plane("shm")
    address = plane.allocate(PAGES * PAGE_BYTES)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * (PAGES * PAGE_BYTES)).from_address(address))
    pool = Pool("kv", PoolKind.KV, 16, PAGES, "float32", (Region(0, "kv", address, PAGE_BYTES, PAGE_BYTES),))
    rank = open_rank(RankConfig(engine=engine, role=role, pools=(pool,), data_plane=plane, registry=registry))
    try:
        yield rank, memory.reshape(PAGES, PAGE_BYTES)
    finally:
        closed = rank.close(10.0)
        assert closed.drained, closed
        assert plane.close(5.0)


def hand_off(prefill: Rank[Any], decode: Rank[Any], room: int, page: int) -> None:
    receiver = KVReceiver(decode.transfer, prefill.address, room)
    receiver.init([page])
    sender = KVSender(prefill.transfer, prefill.address, room)
    sender.init(1)
    sender.send([page])
    end = time.monotonic() + 10.0
    while receiver.poll() is not KVPoll.Success or sender.poll() is not KVPoll.Success:
        assert receiver.failure is None and sender.failure is None, (receiver.failure, sender.failure)
        assert time.monotonic() < end
        time.sleep(0.001)


def used() -> tuple[int, int, int]:
    """(threads, descriptors, resident bytes) of this process."""
    gc.collect()
    process = psutil.Process()
    return threading.active_count(), process.num_fds(), process.memory_info().rss


@pytest.mark.parametrize("switches", [12, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
def test_roles_switch_and_threads_descriptors_and_memory_stay_flat(switches: int) -> None:
    """Both ranks live here, and each takes the other's role in every turn."""
    before = used()
    for number in range(switches):
        if number == WARM_UP:
            before = used()
        roles = (Role.PREFILL, Role.DECODE) if number % 2 else (Role.DECODE, Role.PREFILL)
        with (
            opened("A", roles[0], "embedded" if roles[0] is Role.PREFILL else "") as one,
            opened("B", roles[1], "embedded" if roles[1] is Role.PREFILL else "") as other,
        ):
            (prefill, source), (decode, target) = (one, other) if roles[0] is Role.PREFILL else (other, one)
            source[7] = number % 251
            hand_off(prefill, decode, number + 1, 7)
            assert (target[7] == number % 251).all()
            del source, target
    after = used()
    assert after[0] <= before[0] + 1, f"threads {before[0]} -> {after[0]}: {threading.enumerate()}"
    assert after[1] <= before[1] + 4, f"descriptors {before[1]} -> {after[1]}"
    assert after[2] <= before[2] + 24 * 2**20, f"resident {before[2]} -> {after[2]} bytes"
