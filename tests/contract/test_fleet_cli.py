"""``kvgrpc`` asked about a whole fleet: all ranks side by side, one of them dead but not yet forgotten."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from kvgrpc.cli.main import main
from kvgrpc.server import RegistryServer
from tests.support.rank_host import RankHost, RankProcess
from tests.support.waiting import wait_until

HALF, LONELY = 2**63 - 25, 77
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    """A prefill and a decode with a room on its way between them, a room that failed, and a prefill that is dead."""
    server = RegistryServer(["127.0.0.1:0"], lease_ttl=600.0).open()
    prefill = RankHost("P", "PREFILL", {"registry": server.address})
    decode = RankHost("D", "DECODE", {"registry": server.address})
    dead = RankProcess("X", "PREFILL", registry=server.address).opened()
    prefill.fill(1)
    decode.receive(HALF, f"{server.address}/P", range(8))
    prefill.send(HALF, range(8, 15), last=False)
    decode.wait("receivers", [HALF], [3])
    decode.receive(LONELY, f"{server.address}/P", range(8, 12))
    decode.receivers[LONELY, 0].abort("the test gave it up")
    wait_until(lambda: decode.receivers[LONELY, 0].ended)
    dead.kill()
    yield server.address
    decode.close(2.0)
    prefill.close(2.0)
    server.close()


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
        (("sessions", "--fleet"), ("D/dp0/pp0/cp0/tp0", "P/dp0/pp0/cp0/tp0", "OPEN")),
        (("pulls", "--fleet"), ("X/dp0/pp0/cp0/tp0",)),
        (("caches",), ("X/dp0/pp0/cp0/tp0",)),
        (("top", "--once"), ("D/dp0/pp0/cp0/tp0", "P/dp0/pp0/cp0/tp0", "SERVING")),
    ],
)
def test_all_ranks_are_shown_and_a_dead_one_says_so(
    kvgrpc: Run, registry: str, command: tuple[str, ...], seen: tuple[str, ...]
) -> None:
    code, out, _ = kvgrpc(*command, "-s", registry, "--timeout", "2")
    assert code == 0
    assert [word for word in (*seen, "no answer: PEER_UNREACHABLE") if word not in out] == []


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
        word for word in ("ROOM_NOT_FOUND", "none of 3 ranks", "1 did not answer", "X/dp0") if word not in err
    ] == []


def test_why_for_programs(kvgrpc: Run, registry: str) -> None:
    _, out, _ = kvgrpc("why", str(HALF), "--json", "-s", registry, "--timeout", "2")
    lines = [json.loads(line) for line in out.splitlines()]
    assert {line["rank"][0] for line in lines if "room" in line} == {"D", "P"}


def test_a_fleet_whose_registry_does_not_answer_is_told_where_registries_come_from(kvgrpc: Run) -> None:
    for command in (("rooms", "--fleet"), ("caches",)):
        code, _, err = kvgrpc(*command, "-s", "127.0.0.1:1", "--timeout", "0.5")
        assert code == 64 + 14 and "`kvgrpc serve registry` starts a registry" in err, err
        assert "lists where ranks listen" not in err
