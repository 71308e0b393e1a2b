"""Operations that end early, by a cancel, their time, a reset or a close: once, with what is in place, and nothing of
them is left."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.errors import FeatureDisabled
from kvgrpc.observability import metrics
from kvgrpc.prefetch.model import OperationState, Stop, StopPolicy
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.storage.base import MemoryRange, StorageBackend
from tests.support.controller_rig import LIMITS, Rig, hashes, rig
from tests.support.faults.storage import HANG, Fault, FaultyBackend, memory_backend
from tests.support.waiting import wait_until

__all__ = ["rig"]


class Mapping(FaultyBackend):
    """Shows registered memory to somebody else."""

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self.unregistered: list[MemoryRange] = []

    def unregister(self, memory: Sequence[MemoryRange]) -> None:
        self.unregistered += memory


class TestEndingEarly:
    def test_a_cancel_keeps_what_is_in_place_once_nothing_moves(self, rig: Rig) -> None:
        names = rig.stored(hashes(32))
        gate = threading.Event()
        read, begun = rig.storage.read, threading.Semaphore(0)

        def slow(keys: Any, pages: Any, timeout: float) -> Any:
            begun.release()
            if keys[0] != f"key-{names[0]}":
                gate.wait(20)
            return read(keys, pages, timeout)

        rig.storage.read = slow  # type: ignore[method-assign]
        operation = rig.controller.prefetch(names)
        for _ in range(3):
            assert begun.acquire(timeout=20)
        rig.controller.terminate(operation)
        assert operation.state is OperationState.ENDING and not operation.ended
        gate.set()
        rig.ended(operation)
        assert (operation.state, operation.stop) == (OperationState.CANCELLED, Stop.CANCELLED)
        assert 4 <= operation.completed <= 16
        assert rig.take() == names[: operation.completed]
        rig.nothing_is_left()

    def test_a_cancel_before_the_first_read_reads_nothing(self, rig: Rig) -> None:
        names = rig.stored(hashes(8))
        rig.storage.fault = lambda call, key: Fault(delay=0.1) if call == "count" else None
        rig.storage.calls.clear()
        operation = rig.controller.prefetch(names)
        rig.controller.terminate(operation)
        assert rig.ended(operation).state is OperationState.CANCELLED
        assert not [call for call, _ in rig.storage.calls if call == "read"]
        rig.nothing_is_left()

    def test_time_that_is_over_ends_it_with_what_it_has(self, rig: Rig) -> None:
        names = rig.stored(hashes(60))
        over = threading.Event()
        first = {f"key-{name}" for name in names[:4]}
        # All but the first batch is slower than the operation's time.
        rig.storage.fault = lambda call, key: Fault() if call == "read" and key not in first and over.wait(20) else None
        operation = rig.controller.prefetch(names, timeout=2.0)
        wait_until(lambda: operation.completed == 4)
        wait_until(lambda: operation.cut)
        over.set()
        rig.ended(operation)
        assert (operation.state, operation.stop) == (OperationState.EXPIRED, Stop.DEADLINE)
        assert 4 <= operation.completed < 60
        assert rig.take() == names[: operation.completed]
        rig.nothing_is_left()

    def test_a_read_that_has_no_more_time_than_its_operation_lost_no_page(self, rig: Rig) -> None:
        names = rig.stored(hashes(4))
        rig.fault("read", {names[2]: HANG})
        operation = rig.controller.prefetch(names, timeout=0.25)  # less than a call of storage may take
        wait_until(lambda: operation.finishing or operation.ended)
        rig.storage.release()
        assert rig.ended(operation).state in (OperationState.EXPIRED, OperationState.DECLINED)
        assert operation.stop is Stop.DEADLINE
        rig.take()
        rig.nothing_is_left()

    def test_a_scheduler_waits_as_its_policy_says(self, rig: Rig) -> None:
        names = rig.stored(hashes(8))
        rig.storage.fault = lambda call, key: Fault(delay=0.05) if call == "read" else None
        waited = rig.controller.prefetch(names)
        wait_until(lambda: rig.controller.poll(waited, StopPolicy.WAIT_COMPLETE))
        assert waited.completed == 8
        best = rig.controller.prefetch(names)
        assert rig.controller.poll(best, StopPolicy.BEST_EFFORT) is None
        assert rig.ended(best).state is OperationState.CANCELLED
        rig.take()

    def test_the_time_of_the_policy_follows_the_engines_formula(self) -> None:
        rig = Rig(replace(LIMITS, timeout_base=0.05, timeout_per_ki_tokens=0.5))
        assert rig.controller.time_allowed(512) == pytest.approx(0.05 + 512 * 4 / 1024 * 0.5)
        names = rig.stored(hashes(40))
        rig.storage.fault = lambda call, key: Fault(delay=0.1) if call == "read" else None
        operation = rig.controller.prefetch(names)
        began = time.monotonic()
        wait_until(lambda: rig.controller.poll(operation, StopPolicy.TIMEOUT))
        assert operation.state is OperationState.EXPIRED
        assert time.monotonic() - began >= rig.controller.time_allowed(40)
        rig.take()
        rig.close()


class TestClosing:
    def test_many_resets_leave_no_thread_page_or_operation(self) -> None:
        rig = Rig(replace(LIMITS, storage_timeout=5.0))
        names = rig.stored(hashes(16))
        threads = threading.active_count()
        for cycle in range(100):
            for _ in range(3):
                rig.controller.prefetch(names, request_id=f"r{cycle}")
            assert rig.controller.reset(20)
            rig.take()
            rig.nothing_is_left()
        assert threading.active_count() == threads
        assert not rig.controller.book.all()
        rig.close()

    def test_what_waits_at_a_reset_is_dropped_and_asks_storage_nothing(self, rig: Rig) -> None:
        names = rig.stored(hashes(8))
        gate = threading.Event()
        rig.storage.fault = lambda call, key: Fault() if not gate.wait(20.0) else None
        rig.storage.calls.clear()
        first = rig.controller.prefetch(names)
        wait_until(lambda: rig.storage.calls)
        waiting = [rig.controller.prefetch(names) for _ in range(20)]
        wait_until(lambda: len(rig.storage.calls) == LIMITS.readers)
        resetting = threading.Thread(target=rig.controller.reset, args=(20,))
        resetting.start()
        wait_until(lambda: all(operation.cut for operation in (first, *waiting)))
        gate.set()
        resetting.join(20)
        assert [call for call, _ in rig.storage.calls] == ["count"] * LIMITS.readers, "those that were under way"
        assert all(operation.ended and operation.stop is Stop.SHUT_DOWN for operation in (first, *waiting))
        rig.nothing_is_left()

    def test_what_the_backend_has_let_go_of_ends_while_storage_has_every_thread(self, rig: Rig) -> None:
        names, gate = rig.stored(hashes(4)), threading.Event()
        rig.fault("read", {names[2]: HANG})
        held = rig.controller.prefetch(names)
        wait_until(lambda: held.finishing)
        rig.storage.fault = lambda call, key: Fault() if not gate.wait(20) else None
        others = [rig.controller.prefetch(names) for _ in range(LIMITS.readers + 1)]
        wait_until(lambda: [each.state for each in others].count(OperationState.QUERYING) == LIMITS.readers)
        rig.storage.release()
        assert rig.ended(held).completed == 2, "its hand-over waits for no call of storage"
        assert not gate.is_set()
        gate.set()
        for each in others:
            rig.ended(each)
        rig.take()
        rig.nothing_is_left()

    @pytest.mark.parametrize("kind", ["prefetch", "backup"])
    def test_what_is_begun_while_it_closes_ends_and_leaves_nothing(self, kind: str) -> None:
        """Begun between the end of all operations and that of the threads: as whoever was just past the check."""
        rig = Rig()
        names = rig.stored(hashes(4))
        call = "count" if kind == "prefetch" else "write"
        busy, may_end = threading.Event(), threading.Event()

        def slow(which: str, key: str) -> None:
            if which == call:
                busy.set()
                assert may_end.wait(20)

        begun: list[Operation] = []
        forget = rig.controller.book.forget_ended

        def meanwhile() -> None:
            forget()
            rig.controller._closed = False
            # One more than there are threads: the last waits.
            for number in range(1 + (LIMITS.readers if kind == "prefetch" else LIMITS.writers)):
                if kind == "prefetch":
                    begun.append(rig.controller.prefetch(names))
                else:
                    begun.append(rig.controller.write_storage(pages := hashes(4, f"{number}"), rig.on_host(pages)))
                assert busy.wait(20)
            rig.controller._closed = True
            threading.Timer(0.1, may_end.set).start()

        rig.storage.fault = slow
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(rig.controller.book, "forget_ended", meanwhile)
            assert rig.controller.close(20)
        assert all(operation.wait(20) for operation in begun)
        assert (begun[-1].state, begun[-1].stop) == (OperationState.CANCELLED, Stop.SHUT_DOWN)
        counts = rig.host.table.counts()
        assert (counts["reserved"], counts["read"], rig.controller.occupied) == (0, 0, 0)

    def test_ids_of_operations_are_of_no_counter(self) -> None:
        names = hashes(4)
        rigs = [Rig(), Rig()]
        ids = [[each.controller.prefetch(names).operation_id for _ in range(20)] for each in rigs]
        assert len({*ids[0], *ids[1]}) == 40
        for each in rigs:
            each.close()

    def test_operations_are_counted_by_how_they_ended(self, rig: Rig) -> None:
        names = rig.stored(hashes(8))

        def counted(*labels: str) -> float:
            return float(metrics.CACHE_OPERATIONS.labels(*labels)._value.get())

        ends = [("PREFETCH", "DONE", "NONE"), ("PREFETCH", "DECLINED", "BELOW_THRESHOLD")]
        before = [counted(*labels) for labels in ends]
        rig.ended(rig.controller.prefetch(names))
        rig.ended(rig.controller.prefetch(hashes(8, "q")))
        assert [counted(*labels) for labels in ends] == [each + 1 for each in before]
        rig.take()

    def test_what_ended_is_not_kept_until_its_deadline(self, rig: Rig) -> None:
        rig.stored(hashes(8))
        operations = [rig.ended(rig.controller.prefetch(hashes(8), timeout=3600.0)) for _ in range(100)]
        kept = [weakref.ref(operation) for operation in operations]
        assert rig.controller.reset()
        operations.clear()
        gc.collect()
        # Each thread still has what it did last.
        assert sum(each() is not None for each in kept) <= 8

    def test_what_was_forgotten_stays_so_when_its_last_change_is_told(self, rig: Rig) -> None:
        operation = rig.ended(rig.controller.prefetch(hashes(8)))
        assert rig.controller.reset()
        rig.controller.book.tell(operation)
        assert rig.controller.book.changed_since(0) == []

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_a_thousand_openings_leave_nothing(self) -> None:
        backend = FaultyBackend(memory_backend())
        before = set(threading.enumerate())
        for cycle in range(1000):
            rig = Rig(storage=backend)
            if cycle == 0:
                rig.stored(hashes(8))
            operation = rig.controller.prefetch(hashes(8))
            if cycle % 2:
                rig.ended(operation)
            assert rig.controller.close(20)
            rig.take()
            rig.nothing_is_left()
            assert rig.host.close()
        # Those of other tests may end meanwhile, and that of the log come for a count that it owes.
        assert {thread.name for thread in set(threading.enumerate()) - before} <= {"kvgrpc-log"}

    def test_a_closed_controller_takes_its_pool_out_of_the_backend_once_nothing_moves_there(self) -> None:
        storage = Mapping(memory_backend())
        rig = Rig(storage=storage)
        names = rig.stored(hashes(4))
        rig.fault("read", {names[0]: HANG})
        rig.controller.prefetch(names)
        wait_until(lambda: any(call == "read" for call, _ in storage.calls))
        assert not rig.controller.close(0.5) and not storage.unregistered
        for _ in range(2):
            rig.close()
            assert storage.unregistered == list(rig.host.ranges), "once: the next pool may lie there"
        assert rig.host.close()

    def test_a_backend_whose_unregister_raises_stops_no_close(self, caplog: pytest.LogCaptureFixture) -> None:
        """It may be an entry point's, from before there was such a method, and mean something else."""
        storage = Mapping(memory_backend())
        storage.unregister = lambda: None  # type: ignore[assignment, method-assign, misc]
        rig = Rig(storage=storage)
        assert rig.controller.close(20) and rig.controller.close(20)
        assert rig.host.close()
        assert [record.levelname for record in caplog.records if "unregister" in record.message] == ["ERROR"]

    def test_a_close_during_a_hang_is_bounded_and_says_that_something_is_left(self, rig: Rig) -> None:
        names = rig.stored(hashes(4))
        rig.fault("read", {names[0]: HANG})
        rig.controller.prefetch(names)
        wait_until(lambda: any(call == "read" for call, _ in rig.storage.calls))
        began = time.monotonic()
        assert not rig.controller.close(1.0)
        assert time.monotonic() - began < 10
        assert not rig.host.close(), "the backend may still write there"
        with pytest.raises(FeatureDisabled):
            rig.controller.prefetch(names)
