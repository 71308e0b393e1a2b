"""Hand-offs whose ranks or registry are killed, stopped and started again: what the other side is told, and when."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from kvgrpc.server.rank.calls import REFUSED_SECONDS
from tests.support.pairs import (
    BOTH_PLANES,
    FAILED,
    SHARE_PAGES,
    SUCCESS,
    TRANSFERRING,
    WAITING,
    Start,
    no_open_writes,
    prefill_sees,
)
from tests.support.ports import free_port
from tests.support.rank_host import RankProcess
from tests.support.waiting import wait_until

# A death is known within 1 s at decode and 2 s at prefill: tests/simulation holds them to that, in ticks. Here a busy
# machine may add to it, but not so much that it would be an unanswered ping that found out, after 3 s.
BELOW_A_PING = 2.7


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


def test_a_room_for_a_prefill_that_died_while_no_room_needed_it_fails_at_once(start: Start) -> None:
    """Its registry died with it; the room waited 30 s for that."""
    prefill = start("P", "PREFILL", registry="embedded").opened()
    decode = start("D", "DECODE").opened()
    decode.call("receive", 1, prefill.address, [1])
    prefill.call("send", 1, [1])
    decode.call("wait", "receivers", [1], [SUCCESS])
    wait_until(lambda: decode.call("rooms_open") == 0)
    prefill.kill()
    wait_until(lambda: not decode.call("peers"))
    asked = time.monotonic()
    decode.call("receive", 2, prefill.address, [2])
    (state,) = decode.call("wait", "receivers", [2], [FAILED]).values()
    assert state[1] == "PEER_LOST" and state[2] - asked < BELOW_A_PING


def test_a_room_for_a_prefill_that_decode_never_met_and_that_is_dead_fails_in_seconds(start: Start) -> None:
    """Nobody listens at its own registry. One that a request names an engine of may be on its way back."""
    decode = start("D", "DECODE").opened()
    registry, asked = f"127.0.0.1:{free_port()}", time.monotonic()
    decode.call("receive", 1, f"{registry}/P", [1])
    decode.call("receive", 2, registry, [2])
    (state,) = decode.call("wait", "receivers", [2], [FAILED]).values()
    assert state[1] == "PEER_UNREACHABLE" and REFUSED_SECONDS <= state[2] - asked < REFUSED_SECONDS + BELOW_A_PING
    prefill = start("P", "PREFILL", registry="embedded", listen=registry).opened()
    prefill.call("send", 1, [1])
    decode.call("wait", "receivers", [1], [SUCCESS])


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
