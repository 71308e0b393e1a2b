"""Pulls between processes of which one dies, hangs or comes back: no wrong byte, nothing lent for ever."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from kvgrpc.server import RegistryServer, ServerSecurity
from tests.support.link import Link
from tests.support.pull_process import Process
from tests.support.pull_rank import STALL_SECONDS
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(180)  # 300 MB are made, moved and compared: a busy machine takes its time

PAGES = 1200
# Enough that staging pages come round, where no fault has to meet it on its way.
FEWER_PAGES = 400
IDLE = {"lending": 0, "landing": 0, "read": 0}


class Fleet:
    """A registry, a holder that has a long prompt, and a taker that knows the holder. ``link``: the holder is beyond
    it."""

    def __init__(self, registry: RegistryServer, plane: str, link: Link | None = None) -> None:
        self.registry, self._plane, self._link = registry, plane, link
        self.processes: list[Process] = []
        self.holder_ports = free_ports(2) if link is None else (f"{link.host}:0",) * 2
        self.holder, self.taker = self.open("holder"), self.open("taker")
        for process in self.processes:
            process.answer()
        self.holder.ask("fill", first=1, pages=PAGES)
        self.knows(1)

    def open(self, engine: str) -> Process:
        """Holders follow each other at the same ports."""
        here = "127.0.0.1" if self._link is None else self._link.own
        is_holder = engine == "holder"
        ports = self.holder_ports if is_holder else (f"{here}:0",) * 2
        namespace = self._link.name if is_holder and self._link is not None else ""
        process = Process(engine, self.registry.address, self._plane, ports, namespace)
        self.processes.append(process)
        return process

    def knows(self, holders: int) -> None:
        wait_until(lambda: self.taker.ask("knows")["holders"] == holders, 20.0)

    def in_the_middle(self) -> None:
        """A pull has begun, and pages are on their way."""
        self.taker.tell("pull", first=1, pages=PAGES)
        time.sleep(0.15)  # a while of the pull, at some moment of which the fault comes

    def given_up(self, answer: dict[str, Any]) -> None:
        """What came has the right bytes, the rest is computed, and nobody waited for long."""
        assert answer["state"] in ("DONE", "PARTIAL", "FAILED", "DECLINED") and answer["reserved"] == 0
        assert answer["took"] < STALL_SECONDS + 15.0, "storage would have had 20 s for each batch"
        print(f"{answer['completed']} of {PAGES} pages, {answer['took']:.2f} s")

    def lends_again(self) -> None:
        wait_until(lambda: self.taker.ask("pull", first=1, pages=64)["completed"] == 64, 30.0)

    def is_idle(self, *processes: Process) -> None:
        for process in processes:
            wait_until(lambda process=process: process.ask("lent") == IDLE, 30.0)  # type: ignore[misc]

    def close(self) -> None:
        for process in self.processes:
            process.end()


def free_ports(count: int) -> tuple[str, str]:
    """Below the ports that the system gives to connections, so that none takes them between two holders."""
    ports: list[str] = []
    while len(ports) < count:
        number = random.randrange(18_000, 30_000)  # Mooncake takes those below
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", number))
            ports.append(f"127.0.0.1:{number}")
    return ports[0], ports[1]


@pytest.fixture(params=["shm", "mooncake"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    registry = RegistryServer(["127.0.0.1:0"], lease_ttl=3.0).open()
    opened = Fleet(registry, request.param)
    yield opened
    opened.close()
    registry.close()


@pytest.fixture
def apart(link: Link) -> Iterator[Fleet]:
    """Over Mooncake where it is: on one host the bytes of shm need no network."""
    security = ServerSecurity(insecure=True)
    registry = RegistryServer([f"{link.own}:0"], lease_ttl=3.0, security=security).open()
    opened = Fleet(registry, "mooncake" if find_spec("mooncake") else "shm", link)
    yield opened
    opened.close()
    registry.close()


def test_a_long_prompt_arrives_whole_and_leaves_nothing_behind(fleet: Fleet) -> None:
    answer = fleet.taker.ask("pull", first=1, pages=FEWER_PAGES)
    assert (answer["state"], answer["completed"]) == ("DONE", FEWER_PAGES)
    for process in (fleet.holder, fleet.taker):
        wait_until(lambda process=process: process.ask("lent") == IDLE, 30.0)  # type: ignore[misc]


def test_a_holder_that_is_killed_ends_the_pull_and_its_successor_lends_again(fleet: Fleet) -> None:
    fleet.in_the_middle()
    fleet.holder.signal(signal.SIGKILL)
    fleet.given_up(fleet.taker.answer())
    assert fleet.taker.ask("awaited")["ranks"] == 0, "whoever needs a holder dials it; nobody else does"
    successor = fleet.open("holder")
    successor.answer()
    successor.ask("fill", first=1, pages=PAGES)
    fleet.knows(1)
    wait_until(lambda: fleet.taker.ask("pull", first=1, pages=64)["completed"] == 64, 20.0)
    wait_until(lambda: fleet.taker.ask("lent")["landing"] == 0, 20.0)


def test_a_holder_that_hangs_is_given_up_and_lends_again_when_it_goes_on(fleet: Fleet) -> None:
    fleet.in_the_middle()
    fleet.holder.signal(signal.SIGSTOP)
    fleet.given_up(fleet.taker.answer())
    fleet.holder.signal(signal.SIGCONT)
    fleet.lends_again()
    fleet.is_idle(fleet.holder, fleet.taker)


def test_a_taker_that_is_killed_leaves_nothing_lent(fleet: Fleet) -> None:
    fleet.in_the_middle()
    fleet.taker.signal(signal.SIGKILL)
    wait_until(lambda: fleet.holder.ask("lent") == IDLE, 30.0)


def test_a_holder_that_is_restarted_at_its_ports_is_another_one(fleet: Fleet) -> None:
    """The rooms of the first are nobody's, whatever its successor has at the same addresses."""
    fleet.in_the_middle()
    fleet.holder.signal(signal.SIGKILL)
    fleet.holder.process.wait(20.0)  # until its ports are free
    successor = fleet.open("holder")
    successor.answer()
    fleet.given_up(fleet.taker.answer())
    successor.ask("fill", first=1, pages=PAGES)
    fleet.lends_again()
    fleet.is_idle(successor, fleet.taker)


def test_a_holder_that_drains_ends_the_pull(fleet: Fleet) -> None:
    fleet.in_the_middle()
    fleet.holder.ask("drain")
    fleet.given_up(fleet.taker.answer())
    fleet.knows(0)
    fleet.is_idle(fleet.holder, fleet.taker)


def test_a_holder_that_evicts_in_the_middle_has_lent_copies(fleet: Fleet) -> None:
    fleet.in_the_middle()
    fleet.holder.ask("evict")
    fleet.given_up(fleet.taker.answer())
    fleet.holder.ask("fill", first=1, pages=PAGES)
    fleet.lends_again()
    fleet.is_idle(fleet.holder, fleet.taker)


def test_a_registry_that_is_gone_leaves_the_holders_that_are_known(fleet: Fleet) -> None:
    fleet.registry.close()
    answer = fleet.taker.ask("pull", first=1, pages=FEWER_PAGES)
    assert (answer["state"], answer["completed"]) == ("DONE", FEWER_PAGES)


@pytest.mark.parametrize(("side", "direction"), [("holder", "lending"), ("taker", "landing")])
def test_staging_that_is_full_costs_a_computed_prompt_and_no_more(fleet: Fleet, side: str, direction: str) -> None:
    full = getattr(fleet, side)
    assert full.ask("occupy", direction=direction)["pages"]
    answer = fleet.taker.ask("pull", first=1, pages=PAGES)
    assert answer["completed"] == 0
    fleet.given_up(answer)
    full.ask("free", direction=direction)
    fleet.lends_again()
    fleet.is_idle(fleet.holder, fleet.taker)


def test_a_holder_that_is_cut_off_is_given_up_and_lends_again_when_it_is_back(apart: Fleet, link: Link) -> None:
    apart.in_the_middle()
    link.cut()
    apart.given_up(apart.taker.answer())
    link.mend()
    apart.lends_again()
    apart.is_idle(apart.holder, apart.taker)
