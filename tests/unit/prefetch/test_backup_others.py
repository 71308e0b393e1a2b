"""A backup beside those of other ranks: who waits for their pages, or writes them in their stead, holds up nobody; and
how long their last word is waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from kvgrpc.prefetch.model import OperationKind, OperationState, PageOutcome, Stop
from kvgrpc.prefetch.pools.pages import Pages
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.prefetch.protocol.votes import AloneAgreement, Decided, Stage, Vote
from tests.support.controller_rig import LIMITS, Rig, hashes
from tests.support.faults.storage import HANG, Fault
from tests.support.waiting import wait_until

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


def locked(rig: Rig, names: Sequence[str]) -> Pages:
    """Host pages, read-locked as a backup wants them."""
    pages: Pages = rig.on_host(names)
    rig.host.table.read(pages)
    return pages


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
    wait_until(lambda: len(calls(waits, "count")) >= 5)
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


class TestTheTimeOfTheOtherRanks:
    class Noted(AloneAgreement):
        """How long each step of an operation waits for the others."""

        def __init__(self) -> None:
            self.seconds: dict[Stage, float] = {}

        def vote(self, vote: Vote, timeout: float, decided: Decided) -> None:
            self.seconds[vote.stage] = timeout
            super().vote(vote, timeout, decided)

    @pytest.fixture
    def noted(self) -> Noted:
        return self.Noted()

    @pytest.fixture
    def rig(self, noted: Noted) -> Iterator[Rig]:
        rig = Rig(replace(PATIENT, agreement_timeout=5.0, doubt_timeout=60.0), agreement=noted)
        yield rig
        rig.close()

    @pytest.mark.parametrize(("timeout", "most"), [(3600.0, 35.0), (20.0, 25.0)])
    def test_they_may_write_until_the_operation_is_over_for_as_long_as_a_last_vote_counts(
        self, rig: Rig, noted: Noted, timeout: float, most: float
    ) -> None:
        order = Order(kind=OperationKind.BACKUP, hashes=tuple(OURS), timeout=timeout)
        assert (
            rig.ended(rig.controller.start_backup(order, locked(rig, OURS), agrees=True)).state is OperationState.DONE
        )
        assert noted.seconds[Stage.HITS] == 5.0
        assert 5.0 < noted.seconds[Stage.COMPLETED] <= most

    def test_they_have_the_time_of_a_vote_where_it_was_cut(self, rig: Rig, noted: Noted) -> None:
        gate = Gate(rig)
        order = Order(kind=OperationKind.BACKUP, hashes=tuple(OURS), timeout=20.0)
        backup = rig.controller.start_backup(order, locked(rig, OURS), agrees=True)
        assert gate.begun.wait(SECONDS)
        rig.controller.terminate(backup)
        gate.open.set()
        assert rig.ended(backup).stop is Stop.CANCELLED
        assert noted.seconds[Stage.COMPLETED] == 5.0

    def test_one_that_is_written_and_terminated_waits_for_a_rank_that_hangs_no_longer_than_for_a_vote(self) -> None:
        class Hangs(AloneAgreement):
            def vote(self, vote: Vote, timeout: float, decided: Decided) -> None:
                if vote.stage is not Stage.COMPLETED:
                    super().vote(vote, timeout, decided)

        rig = Rig(replace(PATIENT, agreement_timeout=0.1, doubt_timeout=3600.0), agreement=Hangs())
        order = Order(kind=OperationKind.BACKUP, hashes=tuple(OURS), timeout=3600.0)
        backup = rig.controller.start_backup(order, locked(rig, OURS), agrees=True)
        wait_until(lambda: backup.finishing)
        rig.controller.terminate(backup)
        assert (rig.ended(backup).state, backup.stop) == (OperationState.CANCELLED, Stop.CANCELLED)
        assert backup.completed == 0, "what the others have, nobody said"
        rig.close()


def test_what_fails_lets_go_of_no_page_that_storage_may_still_read() -> None:
    failed = threading.Event()

    def writes(page_hash: str) -> bool:
        if page_hash == OURS[BATCH]:
            failed.set()
            raise RuntimeError("injected")
        return True

    rig = Rig(writes=writes)
    rig.fault("write", {OURS[0]: HANG})
    operation = rig.controller.write_storage(OURS, rig.on_host(OURS))
    assert failed.wait(SECONDS)
    wait_until(lambda: operation.state is OperationState.ENDING or operation.ended)
    assert not operation.ended and rig.host.table.counts()["read"] == len(OURS)
    rig.storage.release()
    assert rig.ended(operation).state is OperationState.FAILED
    assert rig.host.table.counts()["read"] == 0
    rig.close()
