"""docs/watch.md's fifteen questions, as they stand, to a fleet of six processes in which some things are wrong."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.model import Layout
from kvgrpc.v1 import index_service_pb2 as pb
from tests.support.pairs import SUCCESS, TRANSFERRING
from tests.support.rank_host import RankProcess
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/watch.md").read_text()
TABLE = PAGE.split("<!-- fifteen questions -->")[1].split("<!-- end of fifteen questions -->")[0]
LINES = re.findall(r"\| `(kvgrpc [^`]+)` \|", TABLE)
WELL, HALF, GIVEN_UP = 11, 22, 33
MAIN = (sys.executable, "-m", "kvgrpc")
# What each answer must name, in the order of the table.
ANSWERS = (
    ("READY", "H is not READY: H/dp0/pp0/cp0/tp1 did not register"),
    ("P/dp0/pp0/cp0/tp0", "D/dp0/pp0/cp0/tp0", "kv 512 x"),
    ("X 127.0.0.1:", "missing", "PEER_UNREACHABLE", "registered: 4 ranks"),
    ("SERVING", "no answer: PEER_UNREACHABLE", "rooms/min"),
    ("OPEN", "p99", "GB/s"),
    (str(WELL), "SUCCESS", "bootstrap", "transfer"),
    (str(GIVEN_UP), "ROOM_CANCELLED"),
    (str(GIVEN_UP), "ROOM_CANCELLED", "the test gave it up"),
    ("no answer: PEER_UNREACHABLE",),
    ("no answer: PEER_UNREACHABLE",),
    ("no answer: PEER_UNREACHABLE",),
    ("version", "runs on", "grpcio", "registered", "callers prove themselves by"),
    ("silent_timeout", "default", "engine"),
    ("P", "oldest", "dropped"),
    ("P", "current", "X", "connecting"),
)


@dataclass(frozen=True)
class Fleet:
    registry: str
    index: str
    rank: str


def knows(client: SyncClient, states: Mapping[str, pb.IndexSourceState.ValueType]) -> bool:
    return {each.engine: each.freshness.state for each in client.list_sources()} == states


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """A registry, an index, P and D between which one room went well, one is half done and one was given up; H, half of
    an engine of two ranks; X, which was killed and whose lease runs on."""
    servers: list[subprocess.Popen[str]] = []
    ranks: list[RankProcess] = []

    def serve(*words: str) -> str:
        command = [*MAIN, "serve", *words, "--listen", "127.0.0.1:0"]
        servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        assert servers[-1].stdout is not None
        return servers[-1].stdout.readline().split()[-1]

    try:
        registry = serve("registry", "--lease-ttl", "600")
        index = serve("index", "--registry", registry)
        publishes: dict[str, Any] = {"events": {"publisher": "null"}}
        ranks += [
            RankProcess("P", "PREFILL", registry=registry, **publishes),
            RankProcess("D", "DECODE", registry=registry),
            RankProcess("H", "PREFILL", registry=registry, layout=Layout(tp=2)),
            RankProcess("X", "PREFILL", registry=registry, **publishes),
        ]
        prefill, decode, _, killed = (rank.opened() for rank in ranks)
        for room, pages, first in ((WELL, 4, 0), (HALF, 3, 4)):
            decode.call("receive", room, f"{registry}/P", list(range(first, first + 4)))
            prefill.call("send", room, list(range(pages)), last=pages == 4)
        decode.call("wait", "receivers", [WELL], [SUCCESS])
        decode.call("wait", "receivers", [HALF], [TRANSFERRING])
        decode.call("receive", GIVEN_UP, f"{registry}/P", [9])
        with SyncClient(decode.address) as client:
            wait_until(lambda: client.get_room(GIVEN_UP) is not None)
            client.cancel_room(GIVEN_UP, cause="the test gave it up")
        killed.kill()
        with SyncClient(index) as client:
            wait_until(
                lambda: knows(client, {"P": pb.INDEX_SOURCE_STATE_CURRENT, "X": pb.INDEX_SOURCE_STATE_CONNECTING})
            )
        yield Fleet(registry, index, prefill.address)
    finally:
        for rank in ranks:
            rank.end()
        for server in servers:
            server.terminate()
            server.wait(10)


@pytest.mark.parametrize(("line", "named"), list(zip(LINES, ANSWERS, strict=True)), ids=LINES)
def test_the_line_answers_its_question(fleet: Fleet, line: str, named: tuple[str, ...]) -> None:
    places = {"REGISTRY": fleet.registry, "INDEX": fleet.index, "RANK": fleet.rank, "ROOM": str(GIVEN_UP)}
    words = [places.get(word, word) for word in shlex.split(line)[1:]]
    done = subprocess.run([*MAIN, *words], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert not done.stderr.startswith("Traceback"), done.stderr
    assert [word for word in named if word not in done.stdout] == [], done.stdout + done.stderr


def test_there_are_fifteen() -> None:
    assert len(LINES) == len(ANSWERS) == 15
