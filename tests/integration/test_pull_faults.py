"""Pulls between processes of which one dies, hangs or comes back: no wrong byte, nothing lent for ever."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.server import RegistryServer
from tests.support.pull_rank import STALL_SECONDS
from tests.support.waiting import wait_until

PAGES = 1200
IDLE = {"lending": 0, "landing": 0, "read": 0}


class Process:
    """A rank of ``tests.support.pull_rank``."""

    def __init__(self, engine: str, registry: str, plane: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.pull_rank", engine, registry, plane],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": "."},
        )

    def tell(self, do: str, **order: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the rank ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **order: object) -> dict[str, Any]:
        self.tell(do, **order)
        return self.answer()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(20.0)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Fleet:
    """A registry, a holder that has a long prompt, and a taker that knows the holder."""

    def __init__(self, registry: str, plane: str) -> None:
        self._registry, self._plane = registry, plane
        self.processes: list[Process] = []
        self.holder, self.taker = self.open("holder"), self.open("taker")
        for process in self.processes:
            process.answer()
        self.holder.ask("fill", first=1, pages=PAGES)
        self.knows(1)

    def open(self, engine: str) -> Process:
        process = Process(engine, self._registry, self._plane)
        self.processes.append(process)
        return process

    def knows(self, holders: int) -> None:
        wait_until(lambda: self.taker.ask("knows")["holders"] == holders, 20.0)

    def in_the_middle(self) -> None:
        """A pull has begun, and pages are on their way."""
        self.taker.tell("pull", first=1, pages=PAGES)
        time.sleep(0.15)  # a while of the pull, at some moment of which the fault comes

    def close(self) -> None:
        for process in self.processes:
            process.end()


@pytest.fixture(params=["shm", "mooncake"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    registry = RegistryServer(["127.0.0.1:0"], lease_ttl=3.0).open()
    opened = Fleet(registry.address, request.param)
    yield opened
    opened.close()
    registry.close()


def test_a_long_prompt_arrives_whole_and_leaves_nothing_behind(fleet: Fleet) -> None:
    answer = fleet.taker.ask("pull", first=1, pages=PAGES)
    assert (answer["state"], answer["completed"]) == ("DONE", PAGES)
    for process in (fleet.holder, fleet.taker):
        wait_until(lambda process=process: process.ask("lent") == IDLE, 10.0)  # type: ignore[misc]


def test_a_holder_that_is_killed_ends_the_pull_and_its_successor_lends_again(fleet: Fleet) -> None:
    fleet.in_the_middle()
    fleet.holder.signal(signal.SIGKILL)
    answer = fleet.taker.answer()
    assert answer["state"] in ("DONE", "PARTIAL", "FAILED", "DECLINED") and answer["reserved"] == 0
    assert answer["took"] < STALL_SECONDS + 8.0
    successor = fleet.open("holder")
    successor.answer()
    successor.ask("fill", first=1, pages=PAGES)
    fleet.knows(1)
    wait_until(lambda: fleet.taker.ask("pull", first=1, pages=64)["completed"] == 64, 20.0)
    wait_until(lambda: fleet.taker.ask("lent")["landing"] == 0, 20.0)


def test_a_holder_that_hangs_is_given_up_and_lends_again_when_it_goes_on(fleet: Fleet) -> None:
    fleet.in_the_middle()
    fleet.holder.signal(signal.SIGSTOP)
    answer = fleet.taker.answer()
    assert answer["reserved"] == 0 and answer["took"] < STALL_SECONDS + 8.0
    fleet.holder.signal(signal.SIGCONT)
    wait_until(lambda: fleet.taker.ask("pull", first=1, pages=64)["completed"] == 64, 30.0)
    for process in (fleet.holder, fleet.taker):
        wait_until(lambda process=process: process.ask("lent") == IDLE, 30.0)  # type: ignore[misc]


def test_a_taker_that_is_killed_leaves_nothing_lent(fleet: Fleet) -> None:
    fleet.in_the_middle()
    fleet.taker.signal(signal.SIGKILL)
    wait_until(lambda: fleet.holder.ask("lent") == IDLE, 30.0)
