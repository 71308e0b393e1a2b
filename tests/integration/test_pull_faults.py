"""Pulls between processes of which one dies, hangs or comes back: no wrong byte, nothing lent for ever."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

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
# Of a pull, whose fault comes then: the first batch is in place, and many are still to come.
BEGUN_PAGES = 128
TRIES = 3
IDLE = {"lending": 0, "landing": 0, "read": 0}


class Fleet:
    """A registry, a holder that has a long prompt, and a taker that knows the holder. ``link``: the holder is beyond
    it."""

    def __init__(self, registry: RegistryServer, plane: str, link: Link | None = None) -> None:
        self.registry, self.plane, self._link = registry, plane, link
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
        process = Process(engine, self.registry.address, self.plane, ports, namespace)
        self.processes.append(process)
        return process

    def knows(self, holders: int) -> None:
        wait_until(lambda: self.taker.ask("knows")["holders"] == holders, 20.0)

    def in_the_middle(self, name: str, fault: Callable[[], object], mend: Callable[[], object] = lambda: None) -> None:
        """A pull in whose middle the fault comes: the pages that were there have the right bytes, the rest is computed,
        and nobody waited for long. Where it was over before the fault another one is begun, of another holder."""
        for _ in range(TRIES):
            told = time.monotonic()
            self.begin()
            before = time.monotonic() - told
            fault()
            answer = self.taker.answer()
            mend()
            after = answer["took"] - before
            print(f"| holder {name} | {self.plane} | {answer['completed']} of {PAGES} | {after:.2f} s |")
            assert answer["reserved"] == 0
            assert after < STALL_SECONDS + 15.0, "storage would have had 20 s for each batch"
            if answer["completed"] < PAGES:
                assert (answer["state"], answer["completed"] > 0) == ("PARTIAL", True)
                return
            self.succeed()
            self.lends_again()
        raise AssertionError(f"{TRIES} pulls were over before the holder was {name}")

    def begin(self) -> int:
        """Returns what the holder had given before, as soon as it has given some pages of a long pull."""
        gave = self.gave()
        self.taker.tell("pull", first=1, pages=PAGES)
        wait_until(lambda: self.gave() - gave >= BEGUN_PAGES)
        return gave

    def gave(self) -> int:
        return int(self.holder.ask("gave")["pages"])

    def succeed(self) -> None:
        """Another holder, at the ports of the one before, which ends."""
        self.holder.signal(signal.SIGKILL)
        self.holder.process.wait(20.0)  # until its ports are free
        self.holder = self.open("holder")
        self.holder.answer()
        self.holder.ask("fill", first=1, pages=PAGES)

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
    fleet.in_the_middle("killed", lambda: fleet.holder.signal(signal.SIGKILL))
    assert fleet.taker.ask("awaited")["ranks"] == 0, "whoever needs a holder dials it; nobody else does"
    fleet.succeed()
    fleet.lends_again()
    wait_until(lambda: fleet.taker.ask("lent")["landing"] == 0, 20.0)


def test_a_holder_that_hangs_is_given_up_and_lends_again_when_it_goes_on(fleet: Fleet) -> None:
    fleet.in_the_middle(
        "stopped", lambda: fleet.holder.signal(signal.SIGSTOP), lambda: fleet.holder.signal(signal.SIGCONT)
    )
    fleet.lends_again()
    fleet.is_idle(fleet.holder, fleet.taker)


def test_a_taker_that_is_killed_leaves_nothing_lent(fleet: Fleet) -> None:
    for _ in range(TRIES):
        gave, failed = fleet.begin(), fleet.holder.ask("gave")["failed"]
        wait_until(lambda: fleet.holder.ask("lent")["lending"])
        fleet.taker.signal(signal.SIGKILL)
        killed = time.monotonic()
        fleet.is_idle(fleet.holder)
        pages = fleet.gave() - gave
        print(f"| taker killed | {fleet.plane} | {pages} of {PAGES} | {time.monotonic() - killed:.2f} s |")
        if fleet.holder.ask("gave")["failed"] > failed:
            assert pages < PAGES
            return
        fleet.taker = fleet.open("taker")
        fleet.taker.answer()
        fleet.knows(1)
    raise AssertionError(f"{TRIES} takers were killed, and never while something was lent to them")


def test_a_holder_that_is_restarted_at_its_ports_is_another_one(fleet: Fleet) -> None:
    """The rooms of the first are nobody's, whatever its successor has at the same addresses."""
    fleet.in_the_middle("restarted", fleet.succeed)
    fleet.lends_again()
    fleet.is_idle(fleet.holder, fleet.taker)


def test_a_holder_that_drains_ends_the_pull(fleet: Fleet) -> None:
    fleet.in_the_middle("drained", lambda: fleet.holder.ask("drain"))
    fleet.knows(0)
    fleet.is_idle(fleet.holder, fleet.taker)


def test_a_holder_that_evicts_in_the_middle_has_lent_copies(fleet: Fleet) -> None:
    fleet.in_the_middle("emptied", lambda: fleet.holder.ask("evict"))
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
    assert (answer["completed"], answer["reserved"]) == (0, 0)
    assert answer["took"] < STALL_SECONDS + 15.0
    print(f"| staging of the {side} full | {fleet.plane} | 0 of {PAGES} | {answer['took']:.2f} s |")
    full.ask("free", direction=direction)
    fleet.lends_again()
    fleet.is_idle(fleet.holder, fleet.taker)


def test_a_holder_that_is_cut_off_is_given_up_and_lends_again_when_it_is_back(apart: Fleet, link: Link) -> None:
    apart.in_the_middle("cut off", link.cut, link.mend)
    apart.lends_again()
    apart.is_idle(apart.holder, apart.taker)
