"""Hand-offs over a network that is cut and mended (two namespaces and a link), and with peers asleep or dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from kvgrpc.server import ClientSecurity, ServerSecurity
from tests.support.link import Link
from tests.support.rank_host import RankProcess

FAILED, TRANSFERRING, SUCCESS = 0, 3, 4
ROOMS = range(1, 9)
# Pings of gRPC find out within 3 s, and the next connection has 1 s; a busy machine may add to it.
SOONEST, LATEST = 3.4, 4.5 + 3.0
# Far below the time in which a peer is lost, and far above what an append and a wake take on a busy machine.
A_CALL = 2.0
Start = Callable[..., RankProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[RankProcess] = []

    def open_one(engine: str, role: str, **settings: Any) -> RankProcess:
        processes.append(RankProcess(engine, role, **settings))
        return processes[-1].opened()

    yield open_one
    for process in processes:
        process.end()


@pytest.fixture(params=["shm", pytest.param("mooncake", marks=pytest.mark.slow)])
def apart(link: Link, start: Start, request: pytest.FixtureRequest) -> tuple[RankProcess, RankProcess]:
    """A prefill beyond the link, and a decode here."""
    if request.param == "mooncake" and not find_spec("mooncake"):
        pytest.skip("install kvgrpc[mooncake-cpu] for it")
    security = {"server_security": ServerSecurity(insecure=True), "client_security": ClientSecurity(insecure=True)}
    settings = {"data_plane": request.param, "own_memory": request.param == "mooncake", **security}
    beyond = {"listen": f"{link.host}:0", "namespace": link.name, "registry": "embedded"}
    prefill = start("P", "PREFILL", **settings, **beyond)
    decode = start("D", "DECODE", **settings, listen=f"{link.own}:0", bootstrap_allow=(link.host,))
    prefill.call("fill", 1)
    return prefill, decode


def half_way(prefill: RankProcess, decode: RankProcess) -> None:
    """One page of two is written in each room, and the other one is not computed yet."""
    for room in ROOMS:
        decode.call("receive", room, prefill.address, [2 * room, 2 * room + 1])
        prefill.call("send", room, [room], last=False)
    prefill.call("wait", "senders", ROOMS, [TRANSFERRING])
    decode.call("wait", "receivers", ROOMS, [TRANSFERRING])
    deadline = time.monotonic() + 20.0
    while prefill.call("open_writes"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def complete(prefill: RankProcess, decode: RankProcess) -> None:
    """The second pages come, and every room is whole."""
    for room in ROOMS:
        prefill.call("send_rest", room, 100 + room)
    decode.call("wait", "receivers", ROOMS, [SUCCESS])
    prefill.call("wait", "senders", ROOMS, [SUCCESS])
    for room in ROOMS:
        assert decode.call("page_sums", [2 * room, 2 * room + 1]) == prefill.call("page_sums", [room, 100 + room])


def serve_on(prefill: RankProcess, decode: RankProcess) -> None:
    decode.call("receive", 99, prefill.address, [50])
    prefill.call("send", 99, [60])
    decode.call("wait", "receivers", [99], [SUCCESS])
    assert decode.call("page_sums", [50]) == prefill.call("page_sums", [60])


@pytest.mark.slow
def test_a_cut_that_is_mended_in_time_fails_no_room(link: Link, apart: tuple[RankProcess, RankProcess]) -> None:
    half_way(*apart)
    link.cut()
    time.sleep(2.0)  # the outage is the subject
    link.mend()
    complete(*apart)


def test_of_a_cut_hand_off_both_sides_hear_in_time_and_pages_come_back_when_it_is_mended(
    link: Link, apart: tuple[RankProcess, RankProcess]
) -> None:
    prefill, decode = apart
    half_way(prefill, decode)
    link.cut()
    cut = time.monotonic()
    decode.ask("wait", "receivers", ROOMS, [FAILED])
    lost = {"prefill": prefill.call("wait", "senders", ROOMS, [FAILED]), "decode": decode.answer()}
    for side, rooms in lost.items():
        assert {reason for _, reason, _ in rooms.values()} == {"PEER_LOST"}, side
        took = max(moment for _, _, moment in rooms.values()) - cut
        print(f"cut, known at {side} after {took:.2f} s")
        assert SOONEST < took < LATEST, side
    assert not any(decode.call("state", "receivers", room)[2] for room in ROOMS), "silence is no evidence"
    link.mend()
    decode.call("wait_release", ROOMS)
    serve_on(prefill, decode)


def test_rooms_of_two_processes_that_slept_for_long_go_on(start: Start) -> None:
    """A machine that is suspended: nobody may take the time for the other's silence."""
    prefill = start("P", "PREFILL", registry="embedded")
    decode = start("D", "DECODE")
    prefill.call("fill", 1)
    half_way(prefill, decode)
    decode.stop()
    prefill.stop()
    time.sleep(5.0)  # asleep for longer than it takes to lose a peer is the subject
    prefill.go_on()
    decode.go_on()
    complete(prefill, decode)
    serve_on(prefill, decode)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("end", ["stop", pytest.param("kill", marks=pytest.mark.slow)])
def test_an_engine_thread_is_not_held_up_by_a_peer_that_is_stopped_or_dead(start: Start, victim: str, end: str) -> None:
    """Whatever it asks for then comes back at once: new rooms, chunks, looks and aborts."""
    prefill = start("P", "PREFILL", registry="embedded")
    decode = start("D", "DECODE")
    half_way(prefill, decode)
    calls: dict[str, list[Any]]
    dead, living = (prefill, decode) if victim == "prefill" else (decode, prefill)
    getattr(dead, end)()
    new = range(100, 150)
    if living is decode:
        side = "receivers"
        calls = {"receive": [(room, prefill.address, [room]) for room in new]}
    else:
        side = "senders"
        calls = {"send_rest": [(room, 100) for room in ROOMS], "send": [(room, [room]) for room in new]}
    rooms = [(side, room) for room in (*ROOMS, *new)]
    for method, arguments in {**calls, "state": rooms, "abort": rooms}.items():
        assert living.call("longest_of", method, arguments) < A_CALL, method
    ends = living.call("wait", side, [room for _, room in rooms], [SUCCESS, FAILED])
    assert {reason for _, reason, _ in ends.values()} <= {"", "ROOM_CANCELLED", "PEER_LOST", "TRANSFER_FAILED"}
