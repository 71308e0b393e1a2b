"""Rooms of an honest pair that must not notice what strangers do beside it."""

from __future__ import annotations

import ctypes
import itertools
import os
import time

from kvgrpc.transfer import KVPoll
from kvgrpc.transfer.protocol.types import Timing
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import (
    receiver_of,
)
from tests.support.waiting import wait_until

# Idle timeout 2 s, a break 0.5 s, ended records 1 s.
TIMING = Timing(
    tick_seconds=0.05, heartbeat=4, welcome_within=10, idle_timeout=40, settle=4, abandon_dial=10, ended_record=20
)


ROOMS = itertools.count(1_000_000)


def hand_over(prefill: RankHost, decode: RankHost) -> float:
    """One honest room; how long it took. The room must not fail."""
    began = time.monotonic()
    room = next(ROOMS)
    receiver = receiver_of(decode, f"{prefill.rank.address}/P", room)
    receiver.init([1, 2, 3], 1)
    prefill.send(room, [4, 5, 6], aux_row=2)
    wait_until(lambda: receiver.poll() >= KVPoll.Success or receiver.failure is not None)
    assert receiver.failure is None
    return time.monotonic() - began


def held() -> int:
    """Resident memory without what was freed: the C library keeps 50 MB and more of that, in pieces between what is
    used, where many threads had a part in it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
    return resident()


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
