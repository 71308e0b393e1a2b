"""Peers that hold their interpreter, that are stopped, and that are gone: three findings, each with its own time.

Real processes (docs/session.md, break and loss). Cuts are in test_handoff_network.py, kills in test_handoff_faults.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client import ClientSecurity
from kvgrpc.rpc.security import ServerSecurity
from tests.support.certificates import OPENSSL, Authority
from tests.support.ports import free_port
from tests.support.rank_host import RankProcess
from tests.support.waiting import wait_until

FAILED, WAITING, TRANSFERRING, SUCCESS = 0, 2, 3, 4
HELD_SECONDS = 10.0
# 3 s from the last word for the pings, and 1 s for another connection; a busy machine may add to it.
BUSY_SECONDS = 3.0
SOONEST, LATEST = 3.4, 4.5 + BUSY_SECONDS
Start = Callable[..., RankProcess]
# gRPC answers pings in threads of its own with either of its ways to poll.
EVENT_ENGINES = pytest.mark.parametrize("event_engine", [True, pytest.param(False, marks=pytest.mark.slow)])


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[RankProcess] = []

    def open_one(engine: str, role: str, **settings: Any) -> RankProcess:
        processes.append(RankProcess(engine, role, **settings))
        return processes[-1].opened()

    yield open_one
    for process in processes:
        process.end()


def at_each_stage(prefill: RankProcess, decode: RankProcess, bootstrap: str) -> None:
    """Room 1 is announced, 2 has pages and no sender, 3 a sender and no pages, of 4 one page of two is written."""
    decode.call("receive", 1, bootstrap, None)
    decode.call("receive", 2, bootstrap, [2, 3])
    prefill.call("send", 3, [4, 5])
    decode.call("receive", 4, bootstrap, [6, 7])
    prefill.call("send", 4, [4], last=False)
    decode.call("wait", "receivers", [4], [TRANSFERRING])
    wait_until(lambda: not prefill.call("open_writes"))


def finish(prefill: RankProcess, decode: RankProcess, bootstrap: str) -> None:
    decode.call("give_pages", 1, [0, 1])
    decode.call("receive", 3, bootstrap, [4, 5])
    for room in (1, 2):
        prefill.call("send", room, [2 * room, 2 * room + 1])
    prefill.call("send_rest", 4, 5)
    decode.call("wait", "receivers", [1, 2, 3, 4], [SUCCESS])
    prefill.call("wait", "senders", [1, 2, 3, 4], [SUCCESS])


@EVENT_ENGINES
@pytest.mark.parametrize("held", ["prefill", "decode"])
def test_an_interpreter_that_is_held_loses_no_room_at_any_stage(
    start: Start, held: str, event_engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not event_engine:
        monkeypatch.setenv("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
    registry = start("R", "PREFILL", registry="embedded").address
    prefill, decode = start("P", "PREFILL", registry=registry), start("D", "DECODE")
    prefill.call("fill", 1)
    bootstrap = f"{registry}/P"
    at_each_stage(prefill, decode, bootstrap)
    silent, awake = (prefill, decode) if held == "prefill" else (decode, prefill)
    silent.ask("hold", HELD_SECONDS)
    if held == "prefill":  # others meet it for the first time meanwhile
        other = start("D2", "DECODE")
        other.call("receive", 9, bootstrap, [9])
    wait_until(lambda: awake.call("session_states") == ["SILENT"])
    silent.answer()
    finish(prefill, decode, bootstrap)
    if held == "prefill":
        prefill.call("send", 9, [9])
        other.call("wait", "receivers", [9], [SUCCESS])
    wait_until(lambda: set(awake.call("session_states")) == {"OPEN"})


@pytest.mark.parametrize("held", ["prefill", "decode"])
def test_with_a_lower_bound_on_silence_a_held_interpreter_fails_its_rooms_in_that_time(start: Start, held: str) -> None:
    prefill = start("P", "PREFILL", registry="embedded", silent_timeout=5.0)
    decode = start("D", "DECODE", silent_timeout=5.0)
    at_each_stage(prefill, decode, prefill.address)
    silent, awake, side = (prefill, decode, "receivers") if held == "prefill" else (decode, prefill, "senders")
    moment = time.monotonic()
    silent.ask("hold", HELD_SECONDS)
    (state,) = awake.call("wait", side, [4], [FAILED]).values()
    # Its last word is a heartbeat older than the hold, more on a busy machine; after the hold it would speak again.
    assert state[1] == "PEER_LOST" and 3.0 < state[2] - moment < HELD_SECONDS
    silent.answer()
    decode.call("wait_release", [4])
    decode.call("receive", 20, prefill.address, [8])
    prefill.call("send", 20, [8])
    decode.call("wait", "receivers", [20], [SUCCESS])


@pytest.mark.skipif(OPENSSL is None, reason="makes its certificates with openssl")
def test_over_tls_too_a_decode_may_meet_a_prefill_whose_interpreter_is_held(start: Start, tmp_path: Path) -> None:
    """Its certificate is asked of the interpreter, so that no handshake ends before that goes on."""
    authority = Authority(tmp_path)
    certificate = authority.sign("ranks", "IP:127.0.0.1")
    secure = {
        "server_security": ServerSecurity(certificate.cert_file, certificate.key_file),
        "client_security": ClientSecurity(authority.ca_file),
    }
    registry = start("R", "PREFILL", registry="embedded", **secure).address
    prefill, decode = (
        start("P", "PREFILL", registry=registry, **secure),
        start("D", "DECODE", bootstrap_allow=("127.0.0.1",), **secure),
    )
    prefill.call("fill", 1)
    prefill.ask("hold", HELD_SECONDS)
    decode.call("receive", 1, f"{registry}/P", [1])
    wait_until(lambda: decode.call("session_states") == ["SILENT"])
    prefill.answer()
    prefill.call("send", 1, [1])
    decode.call("wait", "receivers", [1], [SUCCESS])


@pytest.mark.parametrize("stopped", ["prefill", "decode"])
def test_a_stop_of_three_seconds_loses_no_room(start: Start, stopped: str) -> None:
    prefill = start("P", "PREFILL", registry="embedded")
    decode = start("D", "DECODE")
    at_each_stage(prefill, decode, prefill.address)
    process = prefill if stopped == "prefill" else decode
    process.stop()
    time.sleep(3.0)  # the outage is the subject
    process.go_on()
    finish(prefill, decode, prefill.address)


@pytest.mark.parametrize("stopped", ["prefill", "decode"])
def test_a_stop_of_six_seconds_fails_its_rooms_in_time_and_others_follow(start: Start, stopped: str) -> None:
    prefill = start("P", "PREFILL", registry="embedded")
    decode = start("D", "DECODE")
    at_each_stage(prefill, decode, prefill.address)
    process, alive, side = (prefill, decode, "receivers") if stopped == "prefill" else (decode, prefill, "senders")
    moment = process.stop()
    (state,) = alive.call("wait", side, [4], [FAILED]).values()
    assert state[1] == "PEER_LOST" and SOONEST < state[2] - moment < LATEST
    print(f"{stopped} stopped, known after {state[2] - moment:.2f} s")
    time.sleep(max(0.0, moment + 6.0 - time.monotonic()))  # the outage is the subject
    process.go_on()
    decode.call("wait", "receivers", [4], [FAILED])
    decode.call("wait_release", [4])
    decode.call("receive", 20, prefill.address, [8])
    prefill.call("send", 20, [8])
    decode.call("wait", "receivers", [20], [SUCCESS])


@pytest.mark.parametrize("own_registry", [True, False])
def test_rooms_that_come_after_a_kill_of_prefill_fail_at_once_until_its_successor_is_there(
    start: Start, own_registry: bool
) -> None:
    registry = "embedded" if own_registry else start("R", "PREFILL", registry="embedded").address
    port = free_port()
    settings = {"registry": registry, "listen": f"127.0.0.1:{port}"}
    prefill, decode = start("P", "PREFILL", **settings), start("D", "DECODE")
    bootstrap = prefill.address if own_registry else f"{registry}/P"
    decode.call("receive", 1, bootstrap, [1])
    prefill.call("send", 1, [1])
    decode.call("wait", "receivers", [1], [SUCCESS])
    prefill.kill()
    wait_until(lambda: "OPEN" not in decode.call("session_states"))
    for room in range(2, 6):
        asked = time.monotonic()
        decode.call("receive", room, bootstrap, [room])
        (state,) = decode.call("wait", "receivers", [room], [FAILED]).values()
        assert state[1] == "PEER_LOST" and state[2] - asked < 3.0, "it asks for a second at most"
    again = start("P", "PREFILL", **settings)
    decode.call("receive", 9, bootstrap, [9])
    again.call("send", 9, [9])
    decode.call("wait", "receivers", [9], [SUCCESS])
