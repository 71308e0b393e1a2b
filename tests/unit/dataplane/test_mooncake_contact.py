"""First contact with peers that hang: each holds a thread, and there are only so many."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from kvgrpc.dataplane.base import MemoryRange, Outcome, Peer, Result
from kvgrpc.dataplane.mooncake import plane as mooncake
from kvgrpc.dataplane.mooncake.start import StartedEngine
from tests.support.faults.dataplane import wait

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


def test_past_the_bound_a_write_is_refused_at_once_and_tried_when_others_have_answered(
    plane: mooncake.MooncakeDataPlane, engine: Hanging
) -> None:
    """A decode that comes again and again with addresses that hang had a thread of prefill for each, for a minute."""
    _first, _second, third = (peer(plane, number) for number in (1, 2, 3))
    refused = write(plane, third)
    assert refused.outcome is Outcome.REJECTED and "being contacted" in refused.detail
    engine.answers.set()
    deadline = time.monotonic() + 20
    while (result := write(plane, third)).outcome is not Outcome.DONE:
        assert "being contacted" in result.detail and time.monotonic() < deadline
        time.sleep(0.01)
    assert sorted(engine.probed) == [f"10.0.0.{number}:15000" for number in (1, 2, 3)]
