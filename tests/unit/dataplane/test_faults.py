"""The planes that tests use to misbehave do so exactly as told."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from kvgrpc.dataplane.base import DataPlane, Outcome, Transfer, U64Array
from kvgrpc.dataplane.shm.plane import ShmDataPlane
from tests.support.faults.dataplane import Fault, FaultyDataPlane, NullDataPlane, wait


class Setup:
    def __init__(self, fault: Callable[[int], Fault | None]) -> None:
        self.plane = FaultyDataPlane(ShmDataPlane(), lambda number, _: fault(number))
        self.source, self.target = self.plane.allocate(16), self.plane.allocate(16)
        ctypes.memset(self.source, 7, 16)
        self.peer = self.plane.attach(self.plane.address())

    def write(self) -> Transfer:
        return self.plane.submit(self.peer, *self._columns())

    def direct(self) -> Transfer:
        """Past all faults."""
        return self.plane.inner.submit(self.peer, *self._columns())

    def _columns(self) -> tuple[U64Array, U64Array, U64Array]:
        source, target, nbytes = (np.array([value], dtype=np.uint64) for value in (self.source, self.target, 16))
        return source, target, nbytes

    @property
    def arrived(self) -> bool:
        return ctypes.string_at(self.target, 16) == b"\x07" * 16


@pytest.mark.parametrize("outcome", list(Outcome)[:3])
def test_the_nth_submission_fails_as_told_and_the_others_do_not(outcome: Outcome) -> None:
    setup = Setup(lambda number: Fault(outcome, detail="cable") if number == 0 else None)
    assert (wait(setup.write()).outcome, setup.arrived) == (outcome, False)
    assert (wait(setup.write()).outcome, setup.arrived) == (Outcome.DONE, True)
    assert len(setup.plane.submissions) == 2


def test_bytes_arrive_late_after_a_reported_failure() -> None:
    setup = Setup(lambda number: Fault(Outcome.FAILED_UNKNOWN, late=True))
    assert wait(setup.write()).outcome is Outcome.FAILED_UNKNOWN
    assert not setup.arrived
    assert setup.plane.write_late() == 1
    assert setup.arrived
    assert setup.plane.write_late() == 0


def test_a_peer_that_was_given_up_is_still_written_late_and_detached_then() -> None:
    """The rank detaches a peer that is lost; what was on its way to it lands all the same."""
    setup = Setup(lambda number: Fault(Outcome.FAILED_UNKNOWN, late=True))
    assert wait(setup.write()).outcome is Outcome.FAILED_UNKNOWN
    setup.plane.detach(setup.peer)
    assert setup.plane.write_late() == 1
    assert setup.arrived
    assert wait(setup.direct()).outcome is Outcome.REJECTED


def test_a_write_that_is_held_up_keeps_its_peer_attached_until_it_ends() -> None:
    setup = Setup(lambda number: Fault(hang=True) if number == 0 else None)
    hanging = setup.write()
    setup.plane.detach(setup.peer)
    assert wait(setup.direct()).outcome is Outcome.DONE
    setup.plane.release()
    assert wait(hanging).outcome is Outcome.DONE
    assert wait(setup.direct()).outcome is Outcome.REJECTED


def test_a_peer_without_a_fault_is_detached_at_once() -> None:
    setup = Setup(lambda number: None)
    assert wait(setup.write()).outcome is Outcome.DONE
    setup.plane.detach(setup.peer)
    assert wait(setup.direct()).outcome is Outcome.REJECTED


def test_a_hang_lasts_until_it_is_released_or_stopped() -> None:
    setup = Setup(lambda number: Fault(hang=True))
    stopped, released = setup.write(), setup.write()
    assert stopped.poll() is None and released.poll() is None
    stopped.stop()
    assert wait(stopped).outcome is Outcome.FAILED_UNKNOWN
    assert released.poll() is None
    setup.plane.release()
    assert wait(released).outcome is Outcome.DONE


def test_a_delay_can_be_stopped_before_anything_is_sent() -> None:
    setup = Setup(lambda number: Fault(delay=60.0))
    transfer = setup.write()
    assert transfer.poll() is None
    transfer.stop()
    assert wait(transfer).outcome is Outcome.REJECTED
    assert not setup.arrived


def test_the_null_plane_is_done_at_once() -> None:
    plane: DataPlane = NullDataPlane()
    address = plane.allocate(16)
    peer = plane.attach(plane.address())
    columns = (np.array([value], dtype=np.uint64) for value in (address, address, 16))
    assert plane.submit(peer, *columns).poll().nbytes == 16  # type: ignore[union-attr]
    assert plane.close(1.0)
