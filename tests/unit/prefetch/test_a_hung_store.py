"""A store that hangs, also past its own time-outs, holds a request for as long as its scheduler's policy says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvgrpc.prefetch.model import OperationState, PageOutcome, Stop, StopPolicy
from kvgrpc.prefetch.storage.base import StorageBackend
from tests.support.controller_rig import LIMITS, Rig, hashes
from tests.support.faults.storage import Fault
from tests.support.waiting import wait_until

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

    def hang_at(self, call: str, key: str, slow: str) -> Fault | None:
        """Ignores its time-out at that page."""
        if call == "read" and key == slow:
            self._over.wait(HANG_SECONDS)
        return None

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
    assert took[-1] < 4.0, "less than one call of storage may take"
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


def test_threads_that_stand_in_calls_past_their_time_out_are_counted() -> None:
    over, rig = threading.Event(), Rig(replace(LIMITS, storage_timeout=0.05))
    names = rig.stored(hashes(8))
    rig.storage.fault = lambda call, key: Fault() if call == "count" and not over.wait(HANG_SECONDS) else None
    assert rig.controller._threads is not None
    asking = rig.controller._threads.storage_threads
    assert asking() == [("look_up", LIMITS.readers, 0), ("read", LIMITS.readers, 0), ("write", LIMITS.writers, 0)]
    rig.controller.prefetch(names)
    wait_until(lambda: asking()[0] == ("look_up", LIMITS.readers, 1))
    assert rig.controller.healthy, "the other one looks up"
    rig.controller.prefetch(names)
    wait_until(lambda: asking()[0] == ("look_up", LIMITS.readers, 2))
    assert not rig.controller.healthy
    over.set()
    wait_until(lambda: asking()[0] == ("look_up", LIMITS.readers, 0))
    rig.close()


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


def test_a_read_that_hangs_holds_a_request_no_longer_than_its_policy_and_has_its_pages_to_itself(
    hung: Hung,
) -> None:
    """The first batch comes, a page of the second does not."""
    rig, slow = hung.rig, f"key-{hung.names[5]}"
    rig.storage.fault = lambda call, key: hung.hang_at(call, key, slow)
    first = rig.controller.prefetch(hung.names)
    wait_until(lambda: first.completed == 4)
    began = time.monotonic()
    wait_until(lambda: rig.controller.poll(first, StopPolicy.TIMEOUT))
    took = time.monotonic() - began
    row = rig.controller.poll(first, StopPolicy.TIMEOUT)
    assert POLICY_SECONDS <= took < 4.0, "less than one call of storage may take"
    assert row is not None and (row.state, row.completed, row.stop) == (OperationState.ENDING, 4, Stop.DEADLINE)
    assert rig.take() == hung.names[:4], "what arrived is the request's"
    assert rig.host.table.counts()["reserved"] == 4 and not first.ended
    hung.end()
    assert rig.ended(first).outcomes[5] is PageOutcome.TIMEOUT
    assert (first.state, first.completed) == (OperationState.EXPIRED, 4)
    assert rig.take() == [], "what came late is nobody's"
    rig.nothing_is_left()


@pytest.mark.parametrize("hangs", ["count", "read", "write"])
def test_health_says_so_while_all_threads_of_storage_hang_past_their_time_out(hangs: str) -> None:
    limits = replace(LIMITS, storage_timeout=0.1)
    rig, over = Rig(limits), threading.Event()
    names = [rig.stored(hashes(4, name)) for name in "abcdefgh"[: max(limits.readers, limits.writers)]]
    pages = [rig.on_host(each) for each in names] if hangs == "write" else []
    rig.storage.fault = lambda call, key: Fault() if call == hangs and not over.wait(HANG_SECONDS) else None
    try:
        if hangs == "write":
            begun = [rig.controller.write_storage(each, page) for each, page in zip(names, pages, strict=False)]
        else:
            begun = [rig.controller.prefetch(each) for each in names[:1]]
            time.sleep(4 * limits.storage_timeout)  # a while in which health must not fall: one thread hangs, not all
            assert rig.controller.healthy, "one thread of several"
            begun += [rig.controller.prefetch(each) for each in names[1:]]
        wait_until(lambda: not rig.controller.healthy)
        over.set()
        wait_until(lambda: rig.controller.healthy)
        for operation in begun:
            rig.ended(operation)
    finally:
        over.set()
        for page in pages:
            rig.host.table.release(page)
        rig.close()
