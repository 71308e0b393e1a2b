"""Hand-offs between real processes: the right bytes, every refusal by name, every fault within its bound."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgrpc.model import Layout
from tests.support.rank_host import PAGES, RankProcess
from tests.support.waiting import wait_until

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = 0, 1, 2, 3, 4
# A death is known within 1 s at decode and 2 s at prefill: tests/simulation holds them to that, in ticks. Here a busy
# machine may add to it, but not so much that it would be an unanswered ping that found out, after 3 s.
BELOW_A_PING = 2.7
Start = Callable[..., RankProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[RankProcess] = []

    def open_one(engine: str, role: str, **settings: Any) -> RankProcess:
        process = RankProcess(engine, role, **settings)
        processes.append(process)
        return process

    yield open_one
    for process in processes:
        process.end()


NEEDS_MOONCAKE = pytest.mark.skipif(not find_spec("mooncake"), reason="install kvgrpc[mooncake-cpu] for it")


# For more rooms at a time than there are pages, which all get the same bytes into them.
SHARE_PAGES = {"check_pages": False}


@pytest.fixture(params=["shm", pytest.param("mooncake", marks=[pytest.mark.slow, NEEDS_MOONCAKE])])
def data_plane(request: pytest.FixtureRequest) -> str:
    """Shared memory; in the long run Mooncake too."""
    return str(request.param)


@pytest.fixture
def pair(start: Start, data_plane: str) -> tuple[RankProcess, RankProcess]:
    return opened_pair(start, data_plane)


def opened_pair(start: Start, data_plane: str, **settings: Any) -> tuple[RankProcess, RankProcess]:
    """A prefill with an embedded registry, and a decode."""
    prefill = start("P", "PREFILL", registry="embedded", data_plane=data_plane, **settings)
    decode = start("D", "DECODE", data_plane=data_plane, **settings)
    prefill.opened(), decode.opened()
    prefill.call("fill", 1)
    return prefill, decode


def random_pages(seed: int, count: int) -> list[int]:
    return [int(page) for page in np.random.default_rng(seed).permutation(PAGES)[:count]]


BOTH_PLANES = pytest.mark.parametrize("data_plane", ["shm", pytest.param("mooncake", marks=NEEDS_MOONCAKE)])


@BOTH_PLANES
def test_bytes_and_aux_arrive_whole_in_any_chunks(start: Start, data_plane: str) -> None:
    prefill = start("P", "PREFILL", registry="embedded", data_plane=data_plane)
    decode = start("D", "DECODE", data_plane=data_plane)
    prefill.opened(), decode.opened()
    prefill.call("fill", 7)
    for room, (count, chunk) in enumerate([(1, 0), (8, 3), (100, 0), (256, 64), (0, 0)], 1):
        source, destination = random_pages(room, count), random_pages(room + 100, count)
        decode.call("receive", room, prefill.address, destination, aux_row=room, wait_first=True)
        prefill.call("send", room, source, aux_row=room + 10, chunk=chunk)
        decode.call("wait", "receivers", [room], [SUCCESS])
        prefill.call("wait", "senders", [room], [SUCCESS])
        assert decode.call("page_sums", destination) == prefill.call("page_sums", source)
        assert decode.call("aux_row", room) == prefill.call("aux_row", room + 10)
        assert decode.call("state", "receivers", room)[2]


def test_either_side_may_come_first(pair: tuple[RankProcess, RankProcess]) -> None:
    prefill, decode = pair
    prefill.call("send", 1, [1, 2, 3])
    prefill.call("wait", "senders", [1], [WAITING])
    decode.call("receive", 1, prefill.address, [4, 5, 6])
    decode.call("wait", "receivers", [1], [SUCCESS])


def test_1000_rooms_in_flight_end_right_and_leave_nothing(start: Start, data_plane: str) -> None:
    prefill, decode = opened_pair(start, data_plane, **SHARE_PAGES)
    rooms = list(range(1, 1001))
    decode.call("receive_many", rooms, prefill.address, 2)
    prefill.call("send_many", rooms, 2)
    decode.call("wait", "receivers", rooms, [SUCCESS], 20.0)
    prefill.call("wait", "senders", rooms, [SUCCESS])
    everything = list(range(PAGES - 2))
    assert decode.call("page_sums", everything) == prefill.call("page_sums", everything)
    wait_until(lambda: decode.call("rooms_open") == 0 and prefill.call("rooms_open") == 0)


def test_a_page_that_another_room_has_is_given_to_no_second_one(start: Start) -> None:
    prefill, decode = opened_pair(start, "shm")
    decode.call("receive", 1, prefill.address, [3, 4])
    decode.call("receive", 2, prefill.address, [5, 4])
    decode.call("wait", "receivers", [2], [FAILED])
    reason, message, metadata = decode.call("failure_of", "receivers", 2)
    assert reason == "PAGES_IN_USE" and metadata["page"] == "4" and metadata["owner"] == "room 1 attempt 0"
    assert "page 4 of pool 'kv', given to room 2" in message and "release_safe" in message
    prefill.call("send", 2, [8, 9])
    assert prefill.call("wait", "senders", [2], [FAILED])[2][1] == "PAGES_IN_USE"
    prefill.call("send", 1, [8, 9])
    decode.call("wait", "receivers", [1], [SUCCESS])
    assert decode.call("page_sums", [3, 4]) == prefill.call("page_sums", [8, 9])
    decode.call("receive", 3, prefill.address, [4])
    prefill.call("send", 3, [8])
    decode.call("wait", "receivers", [3], [SUCCESS])


def sleep(process: RankProcess, decode: RankProcess) -> None:
    ref = process.call("reopen")
    assert ref != process.ref
    if process is not decode:  # decode meets it by itself
        wait_until(lambda: decode.call("peers").get(ref) == "OPEN")


@NEEDS_MOONCAKE
@pytest.mark.parametrize("sleeper", ["prefill", "decode"])
def test_a_side_that_slept_and_came_back_on_its_own_memory_is_used_again(start: Start, sleeper: str) -> None:
    """Suspend is close, resume is open_rank: another incarnation of the same rank, and the other side goes on."""
    prefill = start("P", "PREFILL", registry="embedded", data_plane="mooncake", own_memory=True)
    decode = start("D", "DECODE", data_plane="mooncake", own_memory=True)
    prefill.opened(), decode.opened()
    prefill.call("fill", 3)
    for room in (1, 2):
        decode.call("receive", room, prefill.address, [room])
        prefill.call("send", room, [room + 5])
        decode.call("wait", "receivers", [room], [SUCCESS])
        prefill.call("wait", "senders", [room], [SUCCESS])
        assert decode.call("page_sums", [room]) == prefill.call("page_sums", [room + 5])
        if room == 1:
            sleep(prefill if sleeper == "prefill" else decode, decode)


# An engine whose own balancer chooses the dp rank.


def balanced(start: Start) -> tuple[RankProcess, RankProcess, RankProcess]:
    """Two dp ranks of one prefill engine that do not go by room % 2, and a decode."""
    both = {"layout": Layout(dp=2), "engine_selects_dp": True, **SHARE_PAGES}
    first = start("P", "PREFILL", registry="embedded", **both).opened()
    second = start("P", "PREFILL", registry=first.address, dp=1, **both).opened()
    return first, second, start("D", "DECODE", **SHARE_PAGES).opened()


def test_decode_finds_the_dp_rank_that_an_engines_own_balancer_chose(start: Start) -> None:
    first, second, decode = balanced(start)
    first.call("fill", 1), second.call("fill", 2)
    for room, prefill in [(1, first), (2, second), (3, second), (4, first)]:
        decode.call("receive", room, first.address, None)
        assert decode.call("state", "receivers", room)[0] == BOOTSTRAPPING
        prefill.call("send", room, [room + 10])
        decode.call("wait", "receivers", [room], [WAITING])
        decode.call("give_pages", room, [room])
        decode.call("wait", "receivers", [room], [SUCCESS])
        assert decode.call("page_sums", [room]) == prefill.call("page_sums", [room + 10])
    # A sender that was there first is found at once, and the router's own choice is not asked about.
    second.call("send", 5, [5])
    decode.call("receive", 5, first.address, [5])
    first.call("send", 6, [6])
    decode.call("receive", 6, first.address, [6], prefill_dp_rank=0)
    decode.call("wait", "receivers", [5, 6], [SUCCESS])
    rooms = list(range(100, 1100))
    decode.call("receive_many", rooms, first.address, 1)
    first.call("send_many", rooms[:300], 1), second.call("send_many", rooms[300:], 1)
    decode.call("wait", "receivers", rooms, [SUCCESS])


def test_a_room_that_no_rank_has_yet_waits_until_the_killed_rank_is_back_and_has_it(start: Start) -> None:
    first, second, decode = balanced(start)
    decode.call("receive", 1, first.address, [1])
    second.kill()
    third = start("P", "PREFILL", registry=first.address, dp=1, layout=Layout(dp=2), engine_selects_dp=True).opened()
    third.call("send", 1, [7])
    decode.call("wait", "receivers", [1], [SUCCESS])
    assert decode.call("page_sums", [1]) == third.call("page_sums", [7])


def test_a_room_whose_dp_rank_stays_dead_fails_once_the_registry_says_that_it_is_gone(start: Start) -> None:
    both = {"layout": Layout(dp=2), "engine_selects_dp": True, "lease_ttl": 1.0}
    first = start("P", "PREFILL", registry="embedded", **both).opened()
    second = start("P", "PREFILL", registry=first.address, dp=1, **both).opened()
    decode = start("D", "DECODE", resolve_timeout=1.0).opened()
    decode.call("receive", 1, first.address, [1])
    second.kill()
    assert decode.call("wait", "receivers", [1], [FAILED])[1][1] == "ENGINE_NOT_FOUND"


def test_a_room_that_was_given_up_while_it_was_looked_for_is_told_to_its_sender(start: Start) -> None:
    first, second, decode = balanced(start)
    decode.call("receive", 1, first.address, None)
    decode.call("abort", "receivers", 1)
    second.call("send", 1, [1])
    assert second.call("wait", "senders", [1], [FAILED])[1][1] == "ROOM_CANCELLED"


# Refusals.


def test_a_wrong_layout_is_refused_with_the_differing_fields(start: Start) -> None:
    prefill = start("P", "PREFILL", registry="embedded", pool={"page_tokens": 32, "dtype": "bfloat16"})
    decode = start("D", "DECODE")
    prefill.opened(), decode.opened()
    room = 2**61 + 1  # as routers draw them: a small number that anybody guesses is not failed by a stranger
    prefill.call("send", room, [1])
    decode.call("receive", room, prefill.address, [1])
    decode.call("wait", "receivers", [room], [FAILED])
    reason, text, metadata = decode.call("failure_of", "receivers", room)
    assert reason == "PARALLEL_LAYOUT_MISMATCH"
    assert metadata["mismatchedFields"] == "pools[0].page_tokens,pools[0].dtype"
    assert metadata["pools[0].page_tokens"] == "32 != 16" and "bfloat16" in text
    assert decode.call("state", "receivers", room)[2]
    prefill.call("wait", "senders", [room], [FAILED])
    assert prefill.call("failure_of", "senders", room)[2]["mismatchedFields"] == metadata["mismatchedFields"]


def test_a_page_outside_the_pool_fails_that_room_alone(pair: tuple[RankProcess, RankProcess]) -> None:
    prefill, decode = pair
    decode.call("receive", 1, prefill.address, [1, PAGES])
    decode.call("receive", 2, prefill.address, [1, 2])
    prefill.call("send", 2, [3, 4])
    prefill.call("send", 3, [PAGES + 7])
    decode.call("wait", "receivers", [1, 2], [FAILED, SUCCESS])
    assert decode.call("state", "receivers", 1)[:2] == (FAILED, "KV_INDEX_OUT_OF_RANGE")
    assert decode.call("failure_of", "receivers", 1)[2] == {
        "pool": "kv",
        "page": str(PAGES),
        "pages": str(PAGES),
        "position": "1",
    }
    assert decode.call("state", "receivers", 2)[0] == SUCCESS
    prefill.call("wait", "senders", [3], [FAILED])
    assert prefill.call("state", "senders", 3)[1] == "KV_INDEX_OUT_OF_RANGE"


def test_a_duplicate_room_fails_only_the_newcomer(pair: tuple[RankProcess, RankProcess], start: Start) -> None:
    prefill, decode = pair
    other = start("D2", "DECODE", data_plane=prefill.call("data_plane")).opened()
    decode.call("receive", 1, prefill.address, [1])
    prefill_sees(prefill, 1)
    other.call("receive", 1, prefill.address, [1])
    other.call("wait", "receivers", [1], [FAILED])
    assert other.call("state", "receivers", 1)[1] == "ROOM_CONFLICT"
    prefill.call("send", 1, [5])
    decode.call("wait", "receivers", [1], [SUCCESS])


def test_room_0_is_refused_with_a_reason(pair: tuple[RankProcess, RankProcess]) -> None:
    _, decode = pair
    decode.call("receive", 0, "127.0.0.1:1", [1])
    assert decode.call("state", "receivers", 0) == (FAILED, "INVALID_REQUEST", True)


def test_a_registry_that_may_not_be_dialled_names_the_setting(pair: tuple[RankProcess, RankProcess]) -> None:
    _, decode = pair
    decode.call("receive", 1, "10.1.2.3:8998", [1])
    decode.call("wait", "receivers", [1], [FAILED])
    assert decode.call("state", "receivers", 1)[1] == "ADDRESS_NOT_ALLOWED"
    assert decode.call("failure_of", "receivers", 1)[2]["configKey"] == "bootstrap_allow"


# Cancels.


@pytest.mark.parametrize("side", ["receivers", "senders"])
def test_a_cancel_at_any_state_ends_both_sides_and_gives_the_pages_back(start: Start, side: str) -> None:
    prefill = start("P", "PREFILL", registry="embedded", slow_seconds={0: 10.0})
    decode = start("D", "DECODE")
    prefill.opened(), decode.opened()
    canceller = decode if side == "receivers" else prefill

    def both_end(room: int, poll: int) -> None:
        decode.call("wait", "receivers", [room], [poll])
        prefill.call("wait", "senders", [room], [poll])
        decode.call("wait_release", [room])

    # Decode waits for pages to be given, prefill has computed.
    prefill.call("send", 1, [1, 2])
    decode.call("receive", 1, prefill.address, None, wait_first=True)
    canceller.call("abort", side, 1)
    if side == "senders":  # decode has not named the room yet: it is told once it does
        decode.call("give_pages", 1, [3, 4])
    both_end(1, FAILED)
    # Both wait: decode gave pages, prefill computes.
    prefill.call("send", 2, [], last=False)
    decode.call("receive", 2, prefill.address, [3, 4])
    prefill.call("wait", "senders", [2], [WAITING])
    canceller.call("abort", side, 2)
    both_end(2, FAILED)
    # Pages move: this is the first submission.
    prefill.call("send", 3, [1, 2])
    decode.call("receive", 3, prefill.address, [3, 4])
    decode.call("wait", "receivers", [3], [TRANSFERRING])
    canceller.call("abort", side, 3)
    both_end(3, FAILED)
    # All is over.
    prefill.call("send", 4, [1, 2])
    decode.call("receive", 4, prefill.address, [3, 4])
    both_end(4, SUCCESS)
    canceller.call("abort", side, 4)
    both_end(4, SUCCESS)
    # Only decode is there, then prefill comes late.
    if side == "receivers":
        decode.call("receive", 5, prefill.address, [3, 4])
        prefill_sees(prefill, 1)
        decode.call("abort", side, 5)
        decode.call("wait_release", [5])
        prefill.call("send", 5, [1, 2])
        prefill.call("wait", "senders", [5], [FAILED])
        assert prefill.call("state", "senders", 5)[1] == "ROOM_CANCELLED"
    wait_until(lambda: decode.call("rooms_open") == 0)


# Faults.


def test_prefill_killed_before_a_transfer_fails_decode_before_any_ping_could(
    pair: tuple[RankProcess, RankProcess],
) -> None:
    prefill, decode = pair
    decode.call("receive", 1, prefill.address, [1, 2])
    prefill_sees(prefill, 1)
    killed = prefill.kill()
    (state,) = decode.call("wait", "receivers", [1], [FAILED]).values()
    assert state[1] == "PEER_LOST" and state[2] - killed < BELOW_A_PING
    decode.call("wait_release", [1])


@BOTH_PLANES
def test_prefill_killed_during_a_transfer_holds_the_pages_until_they_are_safe(start: Start, data_plane: str) -> None:
    prefill = start("P", "PREFILL", registry="embedded", slow_seconds={0: 10.0}, data_plane=data_plane)
    decode = start("D", "DECODE", data_plane=data_plane)
    prefill.opened(), decode.opened()
    decode.call("receive", 1, prefill.address, [1, 2])
    prefill.call("send", 1, [1, 2])
    prefill.call("wait", "senders", [1], [3])
    decode.call("wait", "receivers", [1], [3])
    killed = prefill.kill()
    (state,) = decode.call("wait", "receivers", [1], [FAILED]).values()
    assert state[1] == "PEER_LOST" and state[2] - killed < BELOW_A_PING
    assert not decode.call("state", "receivers", 1)[2]
    assert decode.call("held_pages") == 2
    released = decode.call("wait_release", [1]) - killed
    assert released >= 2.0, "the settle time"
    assert decode.call("held_pages") == 0


@BOTH_PLANES
@pytest.mark.parametrize("dies", ["prefill", "decode"])
def test_a_rank_that_dies_and_leaves_a_forked_child_is_known_dead_as_soon(
    start: Start, monkeypatch: pytest.MonkeyPatch, data_plane: str, dies: str
) -> None:
    """The child had copies of its sockets: the port went on listening, and the connections of its writes stayed. Where
    gRPC's own handlers of a fork run, which they do as it happens, they close those of gRPC, or end the child."""
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")
    prefill = start("P", "PREFILL", registry="embedded", data_plane=data_plane)
    decode = start("D", "DECODE", data_plane=data_plane)
    prefill.opened(), decode.opened()
    prefill.call("fill", 1)
    bootstrap = f"{prefill.address}/P"
    decode.call("receive", 1, bootstrap, list(range(8)))
    prefill.call("send", 1, list(range(8)))
    assert decode.call("wait", "receivers", [1], [SUCCESS])[1][0] == SUCCESS  # the data connections stand
    decode.call("receive", 2, bootstrap, list(range(8)))
    prefill.call("send", 2, list(range(4)), last=False)
    wait_until(lambda: prefill.call("open_writes") == 0 and decode.call("state", "receivers", 2)[0] == TRANSFERRING)
    dead, other, side = (prefill, decode, "receivers") if dies == "prefill" else (decode, prefill, "senders")
    child = dead.call("fork")
    try:
        killed = time.monotonic()
        os.kill(dead.pid, signal.SIGKILL)  # nobody waits for its end: the child has the pipe that would tell
        poll, reason, moment = other.call("wait", side, [2], [FAILED])[2]
        assert (poll, reason) == (FAILED, "PEER_LOST") and moment - killed < BELOW_A_PING
        if dies == "prefill":
            assert decode.call("wait_release", [2], 15.0) - killed < 8.0
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_killed_peer_after_success_spares_the_room(pair: tuple[RankProcess, RankProcess]) -> None:
    prefill, decode = pair
    decode.call("receive", 1, prefill.address, [1])
    prefill.call("send", 1, [1])
    decode.call("wait", "receivers", [1], [SUCCESS])
    prefill.kill()
    wait_until(lambda: decode.call("rooms_open") == 0)
    assert decode.call("state", "receivers", 1) == (SUCCESS, "", True)


def test_decode_killed_fails_prefill_before_any_ping_could_and_it_serves_on(
    pair: tuple[RankProcess, RankProcess], start: Start
) -> None:
    prefill, decode = pair
    decode.call("receive", 1, prefill.address, [1])
    prefill.call("send", 1, [1], last=False)
    prefill.call("wait", "senders", [1], [3])
    wait_until(lambda: prefill.call("open_writes") == 0)  # else the write itself may fail first
    killed = decode.kill()
    (state,) = prefill.call("wait", "senders", [1], [FAILED]).values()
    assert state[1] == "PEER_LOST" and state[2] - killed < BELOW_A_PING
    again = start("D", "DECODE", data_plane=prefill.call("data_plane")).opened()
    again.call("receive", 2, prefill.address, [9])
    prefill.call("send", 2, [3])
    again.call("wait", "receivers", [2], [SUCCESS])


def test_the_memory_of_a_killed_decode_is_not_kept_by_prefill(start: Start) -> None:
    """Mapped, it would be nobody else's for the minute in which its rooms are remembered."""
    prefill = start("P", "PREFILL", registry="embedded").opened()
    decode = start("D", "DECODE").opened()
    alone = mapped_memory(prefill.pid)
    decode.call("receive", 1, prefill.address, [1])
    prefill.call("send", 1, [2])
    decode.call("wait", "receivers", [1], [SUCCESS])
    wait_until(lambda: prefill.call("rooms_open") == 0)
    decode.call("receive", 2, prefill.address, [3])
    wait_until(lambda: prefill.call("rooms_open") == 1)
    assert mapped_memory(prefill.pid) > alone
    decode.kill()
    wait_until(lambda: mapped_memory(prefill.pid) == alone)
    prefill.call("send", 2, [3])
    prefill.call("wait", "senders", [2], [FAILED])  # it is remembered still


def mapped_memory(pid: int) -> int:
    """How many blocks of shared memory a process has mapped, its own and those of others."""
    return sum("memfd:" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize(("role", "seconds"), [("PREFILL", 1.0), ("DECODE", 2.0)])
def test_of_three_kills_the_median_is_known_within_a_second_at_decode_and_two_at_prefill(
    start: Start, role: str, seconds: float
) -> None:
    took = []
    for _ in range(3):
        prefill, decode = start("P", "PREFILL", registry="embedded").opened(), start("D", "DECODE").opened()
        decode.call("receive", 1, prefill.address, [1])
        prefill.call("send", 1, [1], last=False)
        prefill.call("wait", "senders", [1], [TRANSFERRING])
        wait_until(partial(no_open_writes, prefill))
        dies, lives, handles = (prefill, decode, "receivers") if role == "PREFILL" else (decode, prefill, "senders")
        killed = dies.kill()
        (state,) = lives.call("wait", handles, [1], [FAILED]).values()
        assert state[1] == "PEER_LOST"
        took.append(state[2] - killed)
        lives.end()
    print(f"{role} killed, known after {', '.join(f'{one:.2f}' for one in took)} s")
    assert statistics.median(took) < seconds


def test_a_stopped_prefill_is_known_in_time_and_its_pages_wait_for_its_word(
    pair: tuple[RankProcess, RankProcess],
) -> None:
    prefill, decode = pair
    decode.call("receive", 1, prefill.address, [1, 2])
    prefill_sees(prefill, 1)
    stopped = prefill.stop()
    (state,) = decode.call("wait", "receivers", [1], [FAILED]).values()
    assert state[1] == "PEER_LOST" and 3.4 < state[2] - stopped < 15.0
    time.sleep(2.5)  # in which no page may come back
    assert not decode.call("state", "receivers", 1)[2], "silence is no evidence, however long"
    prefill.go_on()
    decode.call("wait_release", [1])


def test_a_stopped_decode_is_known_in_time(pair: tuple[RankProcess, RankProcess]) -> None:
    prefill, decode = pair
    decode.call("receive", 1, prefill.address, [1])
    prefill.call("send", 1, [1], last=False)
    prefill.call("wait", "senders", [1], [3])
    wait_until(lambda: prefill.call("open_writes") == 0)
    stopped = decode.stop()
    (state,) = prefill.call("wait", "senders", [1], [FAILED]).values()
    assert state[1] == "PEER_LOST" and 3.4 < state[2] - stopped < 15.0
    decode.go_on()
    decode.call("wait", "receivers", [1], [FAILED])
    decode.call("receive", 2, prefill.address, [2])
    prefill.call("send", 2, [2])
    decode.call("wait", "receivers", [2], [SUCCESS])


@BOTH_PLANES
def test_a_restarted_prefill_on_the_same_port_serves_without_anyone_restarting(start: Start, data_plane: str) -> None:
    port = free_port()
    settings = {"registry": "embedded", "listen": f"127.0.0.1:{port}", "data_plane": data_plane}
    prefill = start("P", "PREFILL", **settings).opened()
    decode = start("D", "DECODE", data_plane=data_plane).opened()
    decode.call("receive", 3, prefill.address, [5])
    prefill.call("send", 3, [5])
    decode.call("wait", "receivers", [3], [SUCCESS])
    decode.call("receive", 1, prefill.address, [1])
    prefill_sees(prefill, 1)
    prefill.kill()
    again = start("P", "PREFILL", **settings).opened()
    decode.call("wait", "receivers", [1], [FAILED])
    decode.call("receive", 2, again.address, [2])
    again.call("send", 2, [2])
    decode.call("wait", "receivers", [2], [SUCCESS])
    decode.call("wait_release", [1])


def test_an_orderly_restart_of_prefill_fails_no_room_that_had_no_sender_there(start: Start) -> None:
    """Rooms that were announced before it, that came while nobody was there, and after it."""
    registry = start("R", "PREFILL", registry="embedded").opened().address
    prefill = start("P", "PREFILL", registry=registry).opened()
    decode = start("D", "DECODE").opened()
    bootstrap = f"{registry}/P"
    decode.call("receive", 1, bootstrap, [1])
    prefill.call("send", 1, [1])
    decode.call("wait", "receivers", [1], [SUCCESS])
    for room in range(10, 20):
        decode.call("receive", room, bootstrap, None)
    prefill_sees(prefill, 10)
    prefill.ask("reopen")
    rooms = list(range(10, 60))
    for room in rooms[10:]:
        decode.call("receive", room, bootstrap, None)
    prefill.answer()
    for room in rooms:
        prefill.call("send", room, [room])
    decode.call("wait", "receivers", rooms, [WAITING])
    for room in rooms:
        decode.call("give_pages", room, [room])
    decode.call("wait", "receivers", rooms, [SUCCESS])


def test_prefill_hears_of_the_death_of_a_decode_that_has_no_pages_yet(pair: tuple[RankProcess, RankProcess]) -> None:
    prefill, decode = pair
    decode.call("receive", 1, prefill.address, None)
    prefill_sees(prefill, 1)
    prefill.call("send", 1, [1])
    decode.kill()
    assert prefill.call("wait", "senders", [1], [FAILED])[1][1] == "PEER_LOST"


def test_decode_meets_the_successor_of_a_killed_prefill_before_a_request_needs_it(start: Start) -> None:
    settings = {"registry": "embedded", "listen": f"127.0.0.1:{free_port()}"}
    prefill = start("P", "PREFILL", **settings).opened()
    decode = start("D", "DECODE").opened()
    decode.call("receive", 1, prefill.address, [1])
    prefill.call("send", 1, [1])
    decode.call("wait", "receivers", [1], [SUCCESS])
    prefill.kill()
    successor = start("P", "PREFILL", **settings).opened()
    deadline = time.monotonic() + 10.0
    while decode.call("peers") != {successor.ref: "OPEN"}:
        assert time.monotonic() < deadline, decode.call("peers")
        time.sleep(0.05)
    assert decode.call("close")[0]


def test_a_killed_registry_fails_no_hand_off_and_everybody_comes_back(start: Start) -> None:
    port = free_port()
    registry = registry_process(port)
    try:
        prefill = start("P", "PREFILL", registry=f"127.0.0.1:{port}", **SHARE_PAGES)
        decode = start("D", "DECODE", **SHARE_PAGES)
        prefill.opened(), decode.opened()
        rooms = list(range(1, 41))
        decode.call("receive_many", rooms[:20], f"127.0.0.1:{port}", 4)
        prefill.call("send_many", rooms[:10], 4)
        decode.call("wait", "receivers", rooms[:10], [SUCCESS])
        registry.kill()
        registry.wait(20)
        prefill.call("send_many", rooms[:20], 4)
        decode.call("receive_many", rooms[20:40], f"127.0.0.1:{port}", 4)
        prefill.call("send_many", rooms[20:40], 4)
        decode.call("wait", "receivers", rooms, [SUCCESS])
        registry = registry_process(port)
        wait_until(lambda: prefill.call("registration") == "registered")
        stranger = start("D2", "DECODE").opened()
        stranger.call("receive", 99, f"127.0.0.1:{port}", [7])
        prefill.call("send", 99, [7])
        stranger.call("wait", "receivers", [99], [SUCCESS])
    finally:
        registry.kill()
        registry.wait(20)


def test_close_with_open_rooms_ends_them_and_reports(pair: tuple[RankProcess, RankProcess]) -> None:
    prefill, decode = pair
    decode.call("receive", 1, prefill.address, [1])
    prefill_sees(prefill, 1)
    drained, open_rooms, _ = prefill.call("close", 1.0)
    assert drained and open_rooms == 0
    decode.call("wait", "receivers", [1], [FAILED])
    assert decode.call("state", "receivers", 1)[1] in ("SERVER_DRAINING", "PEER_LOST")


# What the tests share.


def no_open_writes(prefill: RankProcess) -> bool:
    return bool(prefill.call("open_writes") == 0)


def prefill_sees(prefill: RankProcess, rooms: int) -> None:
    wait_until(lambda: prefill.call("rooms_open") >= rooms)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def registry_process(port: int) -> subprocess.Popen[str]:
    code = (
        "from kvgrpc.server import RegistryServer, serve\n"
        f"server = RegistryServer(['127.0.0.1:{port}'], lease_ttl=2.0)\n"
        "serve(server, lambda server: print(server.address, flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == f"127.0.0.1:{port}"
    return process
