"""Cancels over Mooncake while a peer is stopped or killed: every room ends, and pages come back by evidence alone."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.support.rank_host import PAGES, RankProcess

FAILED, SUCCESS = 0, 4
ROOMS, PAGES_EACH = 10, 48
TURNS = 20
Start = Callable[[str, str], RankProcess]

pytestmark = pytest.mark.skipif(not find_spec("mooncake"), reason="install kvgrpc[mooncake-cpu] for it")


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[RankProcess] = []

    def open_one(engine: str, role: str) -> RankProcess:
        settings: dict[str, Any] = {"data_plane": "mooncake"}
        if role == "PREFILL":  # writes are under way when somebody cancels, or a signal comes
            delays = random.Random(len(processes))
            settings |= {"registry": "embedded", "slow_seconds": {n: delays.uniform(0, 0.4) for n in range(1000)}}
        processes.append(RankProcess(engine, role, **settings))
        return processes[-1].opened()

    yield open_one
    for process in processes:
        process.end()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cancels_at_any_moment_around_a_stop_or_a_kill_of_either_side_20_times(start: Start) -> None:
    chance, ended = random.Random(1), Counter[str]()
    prefill, decode = start("P", "PREFILL"), start("D", "DECODE")
    prefill.call("fill", 1)
    sums = prefill.call("page_sums", range(PAGES))
    for turn in range(TURNS):
        rooms = [turn * ROOMS + number + 1 for number in range(ROOMS)]
        for number, room in enumerate(rooms):
            pages = range(number * PAGES_EACH, (number + 1) * PAGES_EACH)
            decode.call("receive", room, prefill.address, pages)
            prefill.call("send", room, pages, chunk=16)
        # A victim in turn, a signal in turn, at any moment of the transfers.
        victim, survivor = (prefill, decode) if turn % 2 else (decode, prefill)
        cancel(survivor, "senders" if turn % 2 == 0 else "receivers", chance.sample(rooms, 2))
        time.sleep(chance.uniform(0, 0.5))  # any moment of the transfers is the subject
        killed = turn % 4 >= 2
        victim.kill() if killed else victim.stop()
        cancel(survivor, "senders" if survivor is prefill else "receivers", chance.sample(rooms, 2))
        if survivor is decode:
            ended.update(ends_of(decode, "receivers", rooms))
            if not killed:
                silence_is_no_evidence(decode, rooms)
                victim.go_on()
            decode.call("wait_release", rooms)
            nobody_writes_any_more(prefill, decode, killed, turn)
        else:
            ended.update(ends_of(prefill, "senders", rooms))
            if not killed:
                victim.go_on()
                ended.update(ends_of(decode, "receivers", rooms))
                decode.call("wait_release", rooms)
        if killed and victim is decode:
            decode = start("D", "DECODE")
        elif killed:
            prefill = start("P", "PREFILL")
            prefill.call("fill", 1)
        serves_on(prefill, decode, 10_000 + turn, sums)
    print(dict(ended))
    assert ended["SUCCESS"] and ended["ROOM_CANCELLED"] and ended["PEER_LOST"], ended


def cancel(rank: RankProcess, side: str, rooms: list[int]) -> None:
    for room in rooms:
        rank.call("abort", side, room)


def ends_of(rank: RankProcess, side: str, rooms: list[int]) -> list[str]:
    """Every room ends, whatever happened to the other side."""
    ends = rank.call("wait", side, rooms, [SUCCESS, FAILED], 30.0)
    return [reason or "SUCCESS" for _, reason, _ in ends.values()]


def silence_is_no_evidence(decode: RankProcess, rooms: list[int]) -> None:
    """Of a stopped prefill nothing more comes back, however long."""
    held = [room for room in rooms if not decode.call("state", "receivers", room)[2]]
    time.sleep(2.5)  # the settle time, in which no page may come back
    assert [room for room in rooms if not decode.call("state", "receivers", room)[2]] == held


def nobody_writes_any_more(prefill: RankProcess, decode: RankProcess, killed: bool, seed: int) -> None:
    """The pages are free: what the engine puts there stays."""
    decode.call("fill", 100 + seed)
    mine = decode.call("page_sums", range(PAGES))
    if not killed:
        deadline = time.monotonic() + 20.0
        while prefill.call("open_writes"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    time.sleep(0.3)  # in this while nothing may be written
    assert decode.call("page_sums", range(PAGES)) == mine


def serves_on(prefill: RankProcess, decode: RankProcess, room: int, sums: list[bytes]) -> None:
    """One hand-off that nobody disturbs, with the right bytes."""
    decode.call("receive", room, prefill.address, range(8))
    prefill.call("send", room, range(100, 108))
    decode.call("wait", "receivers", [room], [SUCCESS], 30.0)
    prefill.call("wait", "senders", [room], [SUCCESS], 30.0)
    assert decode.call("page_sums", range(8)) == sums[100:108]
