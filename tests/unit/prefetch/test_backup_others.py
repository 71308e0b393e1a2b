"""Pages of a backup that another rank writes: who waits for them, or writes them in its stead, holds up nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from kvgrpc.prefetch.model import OperationState, PageOutcome, Stop
from tests.faults.storage import Fault
from tests.unit.prefetch.test_controller import LIMITS, Rig, hashes, until

BATCH = LIMITS.batch_pages
SECONDS = 20.0
PATIENT = replace(LIMITS, storage_timeout=SECONDS)
THEIRS, OURS = hashes(5 * BATCH, "theirs"), hashes(2 * BATCH, "ours")


def keys(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"key-{name}" for name in names)


def made(agreement_timeout: float) -> Rig:
    """A rank with one thread that writes, for which another one writes ``THEIRS``."""
    limits = replace(PATIENT, agreement_timeout=agreement_timeout)
    return Rig(limits, writes=lambda page_hash: page_hash in OURS)


def calls(rig: Rig, which: str) -> list[tuple[str, ...]]:
    return [asked for call, asked in rig.storage.calls if call == which]


class Gate:
    """Holds up the first write of ``THEIRS``."""

    def __init__(self, rig: Rig) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        rig.storage.fault = self._hold

    def _hold(self, call: str, key: str) -> Fault | None:
        if call == "write":
            self.begun.set()
            assert self.open.wait(SECONDS)
        return None


@pytest.fixture
def waits() -> Iterator[Rig]:
    rig = made(agreement_timeout=60.0)
    yield rig
    rig.close()


@pytest.fixture
def writes() -> Iterator[Rig]:
    rig = made(agreement_timeout=0.1)
    yield rig
    rig.close()


def test_storage_is_asked_for_a_batch_at_a_time_until_that_is_there(waits: Rig) -> None:
    operation = waits.controller.write_storage(THEIRS, waits.on_host(THEIRS))
    until(lambda: len(calls(waits, "count")) >= 5)
    assert set(calls(waits, "count")) == {keys(THEIRS[:BATCH])}
    other = Rig(PATIENT, storage=waits.storage)
    other.ended(other.controller.write_storage(THEIRS, other.on_host(THEIRS)))
    assert waits.ended(operation).outcomes == [PageOutcome.SKIPPED] * len(THEIRS)
    assert operation.state is OperationState.DONE
    assert other.controller.close(SECONDS)


def test_a_backup_that_writes_for_another_rank_holds_up_no_other(writes: Rig) -> None:
    gate = Gate(writes)
    for_another = writes.controller.write_storage(THEIRS, writes.on_host(THEIRS))
    assert gate.begun.wait(SECONDS)
    own = writes.controller.write_storage(OURS, writes.on_host(OURS))
    gate.open.set()
    assert writes.ended(own).state is writes.ended(for_another).state is OperationState.DONE
    assert calls(writes, "write")[:3] == [keys(THEIRS[:BATCH]), keys(OURS[:BATCH]), keys(THEIRS[BATCH : 2 * BATCH])]


@pytest.mark.parametrize("end", [Stop.CANCELLED, Stop.DEADLINE])
def test_a_backup_that_writes_for_another_rank_begins_no_batch_after_its_end(writes: Rig, end: Stop) -> None:
    gate = Gate(writes)
    operation = writes.controller.write_storage(THEIRS, writes.on_host(THEIRS))
    assert gate.begun.wait(SECONDS)
    if end is Stop.CANCELLED:
        writes.controller.terminate(operation)
    else:
        operation.deadline = 0.0
    gate.open.set()
    assert writes.ended(operation).stop is end
    assert calls(writes, "write") == [keys(THEIRS[:BATCH])]
    assert operation.completed == BATCH and operation.outcomes[BATCH] is PageOutcome.PENDING
