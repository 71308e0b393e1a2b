"""``kvgrpc`` asked about a whole fleet: all ranks side by side, one of them dead but not yet forgotten."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from kvgrpc.cli.main import main
from kvgrpc.client import SyncClient
from kvgrpc.server import RegistryServer
from tests.support.looked_at_fleet import looked_at_fleet
from tests.support.rank_host import RankProcess

HALF, LONELY = 2**63 - 25, 77
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    with looked_at_fleet(HALF, LONELY, "the test gave it up") as address:
        yield address


@pytest.fixture
def kvgrpc(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        out, err = capsys.readouterr()
        return int(exit_.value.code or 0), out, err

    return run


@pytest.mark.parametrize(
    ("command", "seen"),
    [
        (("rooms", "--fleet"), (str(HALF), "TRANSFERRING", str(LONELY), "ROOM_CANCELLED")),
        (("sessions", "--fleet"), ("\nD ", "\nP ", "OPEN")),
        (("pulls", "--fleet"), ("X/dp0/pp0/cp0/tp0",)),
        (("caches",), ("X/dp0/pp0/cp0/tp0",)),
        (("top", "--once"), ("\nD ", "\nP ", "SERVING")),
    ],
)
def test_all_ranks_are_shown_and_a_dead_one_says_so(
    kvgrpc: Run, registry: str, command: tuple[str, ...], seen: tuple[str, ...]
) -> None:
    code, out, _ = kvgrpc(*command, "-s", registry, "--timeout", "2")
    assert code == 0
    assert [word for word in (*seen, "no answer: PEER_UNREACHABLE") if word not in out] == []


@pytest.mark.timeout(180)  # a process of its own, which a busy machine starts late
def test_a_watched_table_is_shown_anew_until_it_is_ended(registry: str) -> None:
    with SyncClient(registry) as client:
        (engine,) = [engine for engine in client.list_engines(include_rows=True) if engine.name == "D"]
    words = [sys.executable, "-m", "kvgrpc", "rooms", "--watch", "-s", engine.rows[0].endpoints.grpc]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        titles = (line for line in watching.stdout if line.startswith("Rooms of "))
        assert next(titles) == next(titles)
        watching.send_signal(signal.SIGINT)
        watching.stdout.read()
        assert watching.wait(20) == 130


def test_json_has_the_rank_of_each_line(kvgrpc: Run, registry: str) -> None:
    code, out, _ = kvgrpc("rooms", "--fleet", "--json", "-s", registry, "--timeout", "2")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {(line["rank"][0], line["room"]) for line in lines if "room" in line} >= {("D", str(HALF)), ("P", str(HALF))}
    assert [line["error"] for line in lines if "error" in line] == ["PEER_UNREACHABLE"]


def test_why_tells_the_story_of_a_room_from_both_sides(kvgrpc: Run, registry: str) -> None:
    code, out, _ = kvgrpc("why", str(HALF), "-s", registry, "--timeout", "2")
    assert code == 0
    assert [word for word in ("D/dp0", "P/dp0", "decode", "prefill", "TRANSFERRING", "7/8") if word not in out] == []


def test_why_names_the_cause_and_who_saw_it_first(kvgrpc: Run, registry: str) -> None:
    code, out, _ = kvgrpc("why", str(LONELY), "-s", registry, "--timeout", "2")
    assert code == 0
    assert [
        word
        for word in ("FAILED", "ROOM_CANCELLED", "the test gave it up", "D/dp0", "gave the request up")
        if word not in out
    ] == []


def test_why_of_a_room_that_nobody_knows_says_who_did_not_answer(kvgrpc: Run, registry: str) -> None:
    code, _, err = kvgrpc("why", "5", "-s", registry, "--timeout", "2")
    assert code == 64 + 5
    assert [
        word
        for word in ("ROOM_NOT_FOUND", "none of 3 ranks", "1 did not answer", "X/dp0", f"rooms --fleet -s {registry}")
        if word not in err
    ] == []


def test_why_where_no_rank_is_registered_speaks_of_no_ranks_rooms(kvgrpc: Run) -> None:
    empty = RegistryServer(["127.0.0.1:0"]).open()
    try:
        code, _, err = kvgrpc("why", "5", "-s", empty.address)
    finally:
        empty.close()
    assert code == 64 + 5
    assert f"no rank is registered at {empty.address}" in err and "KVGRPC_REGISTRY: is it this one" in err
    assert "settled" not in err


def test_why_for_programs(kvgrpc: Run, registry: str) -> None:
    _, out, _ = kvgrpc("why", str(HALF), "--json", "-s", registry, "--timeout", "2")
    lines = [json.loads(line) for line in out.splitlines()]
    assert {line["rank"][0] for line in lines if "room" in line} == {"D", "P"}


def test_a_fleet_whose_registry_does_not_answer_is_told_where_registries_come_from(kvgrpc: Run) -> None:
    for command in (("rooms", "--fleet"), ("caches",)):
        code, _, err = kvgrpc(*command, "-s", "127.0.0.1:1", "--timeout", "0.5")
        assert code == 64 + 14 and "`kvgrpc serve registry` starts a registry" in err, err
        assert "lists where ranks listen" not in err


def test_doctor_says_of_every_rank_whether_it_is_reached(kvgrpc: Run, registry: str) -> None:
    code, out, _ = kvgrpc("doctor", "--fleet", "--json", "-s", registry, "--timeout", "2")
    states = {line["what"].partition("/")[0]: line["state"] for line in map(json.loads, out.splitlines())}
    assert code == 1
    assert {name: state for name, state in states.items() if len(name) == 1} == {"P": "ok", "D": "ok", "X": "missing"}


def test_doctor_looks_at_one_thing(kvgrpc: Run) -> None:
    code, _, err = kvgrpc("doctor", "--fleet", "--engine", "vllm")
    assert code == 2 and "give one of them" in err


def test_top_in_a_terminal_filters_by_keys_and_ends_with_q(registry: str) -> None:
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "kvgrpc", "top", "-s", registry, "--every", "30", "--timeout", "2"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "180", "LINES": "40"}
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment) as top:
        os.close(end)
        try:
            seen = shown_until(terminal, b"ROOM_CANCELLED")
            assert b"3 of 3 ranks" in seen and b"SERVING" in seen
            os.write(terminal, b"/")
            os.write(terminal, b"X")
            shown_until(terminal, b"1 of 3 ranks")
            os.write(terminal, b"\r")
            os.write(terminal, b"\r")
            shown_until(terminal, b"sessions: 0")
            os.write(terminal, b"\x1b")
            shown_until(terminal, b"1 of 3 ranks")
            os.write(terminal, b"q")
            shown_until(terminal, b"\x1b[?1049l")  # the screen as it was
            assert top.wait(20) == 0
        finally:
            top.kill()
            os.close(terminal)


def test_top_opens_a_room_of_a_rank_and_both_sides_tell_it(registry: str) -> None:
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "kvgrpc", "top", "-s", registry, "--every", "30", "--timeout", "2"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment) as top:
        os.close(end)
        try:
            shown_until(terminal, b"3 of 3 ranks")
            for keys, seen in (
                (b"/D/\r", b"1 of 3 ranks"),
                (b"\r", b"choose a room"),
                (b"j\r", b"the test gave it up"),
                (b"\x1b", b"choose a room"),
                (b"\x1b", b"1 of 3 ranks"),
                (b"q", b"\x1b[?1049l"),
            ):
                for key in keys:
                    os.write(terminal, bytes([key]))
                shown_until(terminal, seen)
            assert top.wait(20) == 0
        finally:
            top.kill()
            os.close(terminal)


@pytest.mark.parametrize(
    "command",
    [
        *(("rooms", "--fleet"), ("rooms", "--fleet", "--slowest"), ("rooms", "--fleet", "--held"), ("caches",)),
        *(("sessions", "--fleet"), ("pulls", "--fleet"), ("streams", "--fleet"), ("callers", "--fleet"), ("engines",)),
        *(("ranks",), ("top",), ("why", str(LONELY)), ("doctor", "--fleet")),
    ],
    ids=" ".join,
)
def test_a_pipe_has_eighty_columns_and_wide_has_all(kvgrpc: Run, registry: str, command: tuple[str, ...]) -> None:
    _, out, _ = kvgrpc(*command, "-s", registry, "--timeout", "2")
    assert [line for line in out.splitlines() if len(line) > 80] == []
    if command == ("doctor", "--fleet"):
        return
    _, wide, _ = kvgrpc(*command, "--wide", "-s", registry, "--timeout", "2")
    assert "left out: " not in wide and (command == ("engines",) or "/dp0/pp0/cp0/tp0" in wide)
    told = [line for line in out.splitlines() if line.startswith("left out: ")]
    assert all(line.endswith("(--wide and --json have all)") for line in told)
    if command == ("rooms", "--fleet"):
        heads = [shown.splitlines()[1].split() for shown in (out, wide)]
        assert len(told) == 1 and "attempt" not in heads[0] and "attempt" in heads[1]


def test_a_room_without_end_is_told_in_order(kvgrpc: Run, registry: str) -> None:
    _, out, _ = kvgrpc("why", str(HALF), "-s", registry, "--timeout", "2")
    steps = out.partition("In order")[2]
    assert "decode knows of the room" in steps and "now: TRANSFERRING, 7 pages of 8" in steps


def test_top_for_programs(kvgrpc: Run, registry: str) -> None:
    _, out, _ = kvgrpc("top", "--json", "-s", registry, "--timeout", "2")
    lines = {line["rank"][0]: line for line in map(json.loads, out.splitlines())}
    assert (lines["D"]["health"], lines["X"]["health"]) == ("SERVING", "no answer: PEER_UNREACHABLE")
    assert lines["D"]["failed"] == 1 and lines["X"]["failed"] is None


def shown_until(terminal: int, wanted: bytes) -> bytes:
    """What came on the terminal until ``wanted`` was there."""
    seen, end = b"", time.monotonic() + 30.0
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        assert ready, seen[-2000:]
        seen += os.read(terminal, 65536)
    return seen


def test_a_row_whose_rank_is_gone_is_removed_and_one_that_is_not_there_is_wrong_usage(
    kvgrpc: Run, registry: str
) -> None:
    gone = RankProcess("Y", "PREFILL", registry=registry).opened()
    gone.kill()
    code, out, _ = kvgrpc("deregister", "Y/dp0/pp0/cp0/tp0", "--yes", "-s", registry)
    assert (code, "is removed" in out) == (0, True)
    assert "Y/dp0" not in kvgrpc("ranks", "-s", registry)[1]
    code, _, err = kvgrpc("deregister", "Y/dp0/pp0/cp0/tp0", "--yes", "-s", registry)
    assert code == 78 and "WARMING_UP" in err, "the registry has stood for less than a lease"
    code, _, err = kvgrpc("deregister", "P/dp0/pp0/cp0/tp7", "--yes", "-s", registry)
    assert code == 2 and "no rank P/dp0/pp0/cp0/tp7 is registered" in err


def test_who_removes_a_row_is_asked_first(kvgrpc: Run, registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, out, _ = kvgrpc("deregister", "P/dp0/pp0/cp0/tp0", "-s", registry)
    assert code == 130 and "remove P/dp0/pp0/cp0/tp0@" in out
    assert kvgrpc("ranks", "P", "-s", registry)[1].count("P/dp0/pp0/cp0/tp0") == 1
