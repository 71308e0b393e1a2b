"""A process that is prefill, then decode, then prefill again: each is another incarnation, and nothing stays behind."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

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
NEEDS_MOONCAKE = pytest.mark.skipif(not find_spec("mooncake"), reason="install kvgrpc[mooncake-cpu] for it")


@contextmanager
def opened(
    engine: str, role: Role, data_plane: str, registry: str = ""
) -> Iterator[tuple[Rank[Any], npt.NDArray[np.uint8]]]:
    plane = kvgrpc.dataplane.open_plane(data_plane)
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


class Used(NamedTuple):
    """Of this process: threads (Mooncake's own too), descriptors, bytes, and mappings: what is registered is mapped."""

    threads: int
    descriptors: int
    resident: int
    mappings: int


def used() -> Used:
    gc.collect()
    process = psutil.Process()
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    return Used(process.num_threads(), process.num_fds(), process.memory_info().rss, mappings)


@pytest.mark.parametrize(
    ("data_plane", "switches"),
    [
        ("shm", 12),
        pytest.param("shm", 100, marks=pytest.mark.slow),
        pytest.param("mooncake", 100, marks=[pytest.mark.slow, NEEDS_MOONCAKE]),
    ],
)
@pytest.mark.timeout(900)
def test_roles_switch_and_threads_descriptors_registrations_and_memory_stay_flat(
    data_plane: str, switches: int
) -> None:
    """Both ranks live here, and each takes the other's role in every turn."""
    before = used()
    for number in range(switches):
        if number == WARM_UP:
            before = used()
        roles = (Role.PREFILL, Role.DECODE) if number % 2 else (Role.DECODE, Role.PREFILL)
        with (
            opened("A", roles[0], data_plane, "embedded" if roles[0] is Role.PREFILL else "") as one,
            opened("B", roles[1], data_plane, "embedded" if roles[1] is Role.PREFILL else "") as other,
        ):
            (prefill, source), (decode, target) = (one, other) if roles[0] is Role.PREFILL else (other, one)
            source[7] = number % 251
            hand_off(prefill, decode, number + 1, 7)
            assert (target[7] == number % 251).all()
            del source, target
    after = used()
    print(f"{switches} switches over {data_plane}: {before} -> {after}")
    assert after.threads <= before.threads + 4, f"{before} -> {after}: {threading.enumerate()}"
    assert after.descriptors <= before.descriptors + 4, f"{before} -> {after}"
    assert after.resident <= before.resident + 24 * 2**20, f"{before} -> {after}"
    assert after.mappings <= before.mappings + 20, f"{before} -> {after}"
