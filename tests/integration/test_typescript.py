"""The TypeScript client against a real rank: it tails, and goes on when the rank was away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvgrpc.dataplane
from kvgrpc.events import BlockRemoved, BlockStored, KVEventBatch
from kvgrpc.model import Pool, PoolKind, Region, Role
from kvgrpc.server import Rank, RankConfig, open_rank

CLIENT = Path(__file__).parents[2] / "clients/typescript"
LARGE = 2**64 - 3
pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node here"),
    pytest.mark.skipif(not (CLIENT / "dist/examples/tail.js").exists(), reason=".ci/typescript was not run"),
    pytest.mark.timeout(120),
]


@pytest.fixture
def publishing() -> Iterator[Callable[[str], Rank[Any]]]:
    opened: list[Rank[Any]] = []

    def start(listen: str = "127.0.0.1:0") -> Rank[Any]:
        plane = kvgrpc.dataplane.open_plane("shm")
        address = plane.allocate(4096)
        pool = Pool("kv", PoolKind.KV, 16, 1, "float32", (Region(0, "kv", address, 4096, 4096),))
        events = {"publisher": "null"}
        config = RankConfig(
            engine="P", role=Role.PREFILL, pools=(pool,), data_plane=plane, listen=listen, events=events
        )
        opened.append(open_rank(config))
        return opened[-1]

    yield start
    for rank in opened:
        rank.close(5.0)


@pytest.fixture
def tail() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []

    def start(address: str) -> subprocess.Popen[str]:
        command = ["node", str(CLIENT / "dist/examples/tail.js"), address]
        direct = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=direct))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_it_tails_and_goes_on_with_the_next_incarnation(
    publishing: Callable[..., Rank[Any]], tail: Callable[[str], subprocess.Popen[str]]
) -> None:
    rank = publishing()
    rank.events.publish(KVEventBatch(1.0, [BlockStored([LARGE, -7], None, [1, 2, 3, 4], 2, medium="GPU")]))
    lines = tail(rank.address)
    assert read(lines)["fresh"] is True
    stored = first_with_events(lines)["batch"]["events"][0]
    assert (stored["type"], stored["blockHashes"], stored["medium"]) == ("BlockStored", [str(LARGE), "-7"], "GPU")

    rank.close(5.0)
    successor = publishing(rank.address)
    successor.events.publish(KVEventBatch(2.0, [BlockRemoved([5], "GPU")]))
    begin = read(lines)
    assert (begin["kind"], begin["fresh"]) == ("begin", True), "another log: what was known is void"
    assert first_with_events(lines)["batch"]["events"][0]["blockHashes"] == ["5"]


def read(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def first_with_events(process: subprocess.Popen[str]) -> Any:
    """Behind what a publisher says at the start of a log."""
    while (line := read(process))["batch"]["events"][0]["type"] == "AllBlocksCleared":
        pass
    return line
