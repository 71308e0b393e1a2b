"""First contact with peers that hang: each holds a thread, and there are only so many."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvgrpc.dataplane.base import MemoryRange, Outcome, Peer, Result
from kvgrpc.dataplane.mooncake import plane as mooncake
from kvgrpc.dataplane.mooncake.start import StartedEngine
from tests.support.faults.dataplane import wait
from tests.support.waiting import wait_until

ADDRESS, NBYTES = 1 << 20, 64


class Hanging:
    """An engine whose probe waits until ``answers`` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.probed: list[str] = []

    def batch_register_memory(self, addresses: list[int], sizes: list[int], location: str) -> int:
        return 0

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        return 0

    def send_probe(self, session: str) -> int:
        self.probed.append(session)
        assert self.answers.wait(20)
        return 0

    def transfer_submit_write(self, session: str, source: int, destination: int, nbytes: int) -> int:
        return 7

    def transfer_check_status(self, handle: int) -> int:
        return 1


@pytest.fixture
def engine() -> Iterator[Hanging]:
    made = Hanging()
    yield made
    made.answers.set()


@pytest.fixture
def plane(engine: Hanging, monkeypatch: pytest.MonkeyPatch) -> mooncake.MooncakeDataPlane:
    monkeypatch.setattr(mooncake, "MAX_CONTACTS", 2)
    made = mooncake.MooncakeDataPlane.__new__(mooncake.MooncakeDataPlane)
    made._use(StartedEngine(engine, "127.0.0.1:15999", "tcp", frozenset()), owned=False)
    made.register([MemoryRange(ADDRESS, NBYTES)])
    return made


def peer(plane: mooncake.MooncakeDataPlane, number: int) -> Peer:
    address = msgspec.json.decode(plane.address())
    changed = {**address, "session": f"10.0.0.{number}:15000", "incarnation": str(number)}
    return plane.attach(msgspec.json.encode(changed))


def write(plane: mooncake.MooncakeDataPlane, to: Peer) -> Result:
    one = np.array([ADDRESS], np.uint64)
    return wait(plane.submit(to, one, one, np.array([NBYTES], np.uint64)))


def test_past_the_bound_a_peer_waits_for_its_turn_and_its_write_is_refused_after_a_time(
    plane: mooncake.MooncakeDataPlane, engine: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode that comes again and again with addresses that hang had a thread of prefill for each, for a minute."""
    monkeypatch.setattr(mooncake, "ANSWER_SECONDS", 0.2)
    _first, _second, third = (peer(plane, number) for number in (1, 2, 3))
    refused = write(plane, third)
    assert refused.outcome is Outcome.REJECTED and "did not answer" in refused.detail
    assert len(engine.probed) <= 2
    monkeypatch.setattr(mooncake, "ANSWER_SECONDS", 20.0)
    engine.answers.set()
    wait_until(lambda: write(plane, third).outcome is Outcome.DONE)
    assert sorted(engine.probed) == [f"10.0.0.{number}:15000" for number in (1, 2, 3)]


def test_a_write_past_the_bound_goes_on_when_another_has_answered(
    plane: mooncake.MooncakeDataPlane, engine: Hanging
) -> None:
    """A healthy peer lost its rooms at once, because others were slow to answer."""
    _first, _second, third = (peer(plane, number) for number in (1, 2, 3))
    one = np.array([ADDRESS], np.uint64)
    transfer = plane.submit(third, one, one, np.array([NBYTES], np.uint64))
    assert transfer.poll() is None
    engine.answers.set()
    assert wait(transfer).outcome is Outcome.DONE


def test_nobody_contacts_a_peer_that_was_detached_before_its_turn(
    plane: mooncake.MooncakeDataPlane, engine: Hanging
) -> None:
    _first, _second, third, fourth = (peer(plane, number) for number in (1, 2, 3, 4))
    plane.detach(third)
    engine.answers.set()
    assert write(plane, fourth).outcome is Outcome.DONE
    assert "10.0.0.3:15000" not in engine.probed


def test_a_peer_for_whom_there_was_no_thread_is_contacted_again(
    plane: mooncake.MooncakeDataPlane, engine: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as one that is being contacted for good, and what was never sent ended as an unknown write."""
    engine.answers.set()
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", no_thread)
        first = peer(plane, 1)
        refused = write(plane, first)
    assert refused.outcome is Outcome.REJECTED and "can't start new thread" in refused.detail
    wait_until(lambda: write(plane, first).outcome is Outcome.DONE)


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
