"""A store that hangs, also past its own time-outs, holds a request for as long as its scheduler's policy says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvgrpc.prefetch.model import OperationState, Stop, StopPolicy
from kvgrpc.prefetch.storage.base import StorageBackend
from tests.support.faults.storage import Fault
from tests.support.waiting import wait_until
from tests.unit.prefetch.controller_rig import LIMITS, Rig, hashes

POLICY_SECONDS = 0.3
HANG_SECONDS = 20.0
"""Of a call that ignores its time-out, unless the test ends it."""


class Hung:
    """A rig whose storage answers no look-up until ``end``."""

    def __init__(self) -> None:
        self.rig = Rig(replace(LIMITS, timeout_base=POLICY_SECONDS, timeout_per_ki_tokens=0.0, storage_timeout=5.0))
        self.names = self.rig.stored(hashes(8))
        self._over = threading.Event()
        self.rig.storage.fault = self._hang
        self.storage: StorageBackend = self.rig.storage

    def end(self) -> None:
        self._over.set()

    def _hang(self, call: str, key: str) -> Fault | None:
        if call == "count":
            self._over.wait(HANG_SECONDS)
        return None


@pytest.fixture
def hung() -> Iterator[Hung]:
    made = Hung()
    yield made
    made.end()
    made.rig.close()


def test_every_request_is_held_for_the_time_of_its_policy_and_no_longer(hung: Hung) -> None:
    controller = hung.rig.controller
    begun = [controller.prefetch(hung.names) for _ in range(6)]
    began, took = time.monotonic(), []
    for operation in begun:
        wait_until(lambda operation=operation: controller.poll(operation, StopPolicy.TIMEOUT))  # type: ignore[misc]
        took.append(time.monotonic() - began)
        assert (operation.state, operation.stop) == (OperationState.EXPIRED, Stop.DEADLINE)
    assert took[0] >= POLICY_SECONDS
    assert took[-1] < 2.5, "half of what one call of storage may take"
    hung.rig.nothing_is_left()


def test_a_terminate_ends_it_although_every_thread_of_storage_hangs(hung: Hung) -> None:
    begun = [hung.rig.controller.prefetch(hung.names) for _ in range(LIMITS.readers + 1)]
    wait_until(lambda: [each.state for each in begun].count(OperationState.QUERYING) == LIMITS.readers)
    for operation in begun:
        hung.rig.controller.terminate(operation)
        assert hung.rig.ended(operation).state is OperationState.CANCELLED
    hung.end()
    hung.rig.storage.fault = lambda call, key: None
    assert hung.rig.ended(hung.rig.controller.prefetch(hung.names)).state is OperationState.DONE
    assert hung.rig.take() == hung.names


def test_a_prefetch_that_has_read_hands_over_although_every_look_up_hangs(hung: Hung) -> None:
    rig, reads = hung.rig, threading.Event()
    hung.rig.storage.fault = lambda call, key: Fault() if call == "read" and not reads.wait(HANG_SECONDS) else None
    first = rig.controller.prefetch(hung.names)
    wait_until(lambda: first.state is OperationState.TRANSFERRING)
    before = rig.storage.fault
    rig.storage.fault = lambda call, key: hung._hang(call, key) if call == "count" else before(call, key)
    stuck = [rig.controller.prefetch(hung.names) for _ in range(LIMITS.readers)]
    wait_until(lambda: all(each.state is OperationState.QUERYING for each in stuck))
    reads.set()
    assert rig.ended(first).state is OperationState.DONE
    assert all(each.state is OperationState.QUERYING for each in stuck)
    assert rig.take() == hung.names
