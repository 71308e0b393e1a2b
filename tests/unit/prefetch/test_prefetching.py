"""A prefetch beside storage that fails in every way: it brings the pages that are there, ends once, with its reason,
and leaves nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvgrpc.prefetch.model import OperationRow, OperationState, PageOutcome, Stop
from kvgrpc.prefetch.protocol.operation import Operation
from tests.support.controller_rig import SHAPE, Panic, Rig, hashes, rig
from tests.support.faults.storage import BROKEN, DOWN, FAILED, HANG
from tests.support.waiting import wait_until

__all__ = ["rig"]


class TestPrefetch:
    def test_every_page_of_every_batch_has_its_own_bytes(self, rig: Rig) -> None:
        names = rig.stored(hashes(23))
        operation = rig.ended(rig.controller.prefetch(names))
        assert (operation.state, operation.completed, operation.stop) == (OperationState.DONE, 23, Stop.NONE)
        assert operation.outcomes == [PageOutcome.OK] * 23 and operation.nbytes == 23 * SHAPE.page_bytes
        assert rig.take() == names
        rig.nothing_is_left()

    def test_host_pages_are_reserved_for_what_storage_has_and_not_before(self, rig: Rig) -> None:
        names = hashes(64)
        rig.stored(names[:9])
        assert rig.ended(rig.controller.prefetch([*names, *hashes(100, "z")])).completed == 9
        assert rig.take() == names[:9]
        assert rig.ended(rig.controller.prefetch(hashes(40, "q"))).stop is Stop.BELOW_THRESHOLD
        rig.nothing_is_left()

    def test_a_page_that_fails_once_is_tried_again(self, rig: Rig) -> None:
        names = rig.stored(hashes(10))
        rig.once("read", names[5], FAILED)
        operation = rig.ended(rig.controller.prefetch(names))
        assert (operation.state, operation.retries) == (OperationState.DONE, 1)
        assert rig.take() == names

    def test_a_page_that_is_lost_ends_the_prefix_there(self, rig: Rig) -> None:
        names = rig.stored(hashes(10))
        rig.fault("read", {names[5]: BROKEN})
        operation = rig.ended(rig.controller.prefetch(names))
        assert (operation.state, operation.stop, operation.completed) == (OperationState.PARTIAL, Stop.PAGE_LOST, 5)
        assert operation.outcomes[5] is PageOutcome.FAILED
        assert operation.failure is not None and "injected" in operation.failure.message
        assert rig.take() == names[:5]
        rig.nothing_is_left()

    @pytest.mark.parametrize("answer", [None, 7, [True] * 4, [None] * 4])
    def test_a_backend_that_answers_nonsense_ends_what_asked_it(self, rig: Rig, answer: object) -> None:
        names = rig.stored(hashes(4))
        rig.storage.read = lambda keys, pages, timeout: answer  # type: ignore[method-assign, assignment, return-value]
        operation = rig.ended(rig.controller.prefetch(names))
        assert (operation.state, operation.stop) == (OperationState.FAILED, Stop.PAGE_LOST)
        assert operation.failure is not None and "TypeError" in operation.failure.message
        rig.storage.write = lambda keys, pages, timeout: answer  # type: ignore[method-assign, assignment, return-value]
        pages = rig.on_host(names)
        written = rig.ended(rig.controller.write_storage(names, pages))
        assert (written.state, written.completed) == (OperationState.FAILED, 0)
        rig.host.table.release(pages)
        rig.nothing_is_left()

    def test_a_first_page_that_is_lost_leaves_nothing(self, rig: Rig) -> None:
        names = rig.stored(hashes(10))
        rig.fault("read", {names[0]: BROKEN})
        operation = rig.ended(rig.controller.prefetch(names))
        assert (operation.state, operation.completed) == (OperationState.FAILED, 0)
        assert rig.take() == []
        rig.nothing_is_left()

    def test_pages_that_the_backend_still_holds_are_nobodys_until_it_lets_go(self, rig: Rig) -> None:
        names = rig.stored(hashes(8))
        rig.fault("read", {names[2]: HANG})
        operation = rig.controller.prefetch(names)
        wait_until(lambda: operation.settled)
        assert not operation.wait(0.2), "it ended while the backend may still write into its pages"
        assert rig.host.table.counts()["reserved"] == 6, "all but what was handed over"
        rig.storage.release()
        rig.ended(operation)
        assert operation.outcomes[2] is PageOutcome.TIMEOUT and operation.completed == 2
        assert rig.take() == names[:2]
        rig.nothing_is_left()

    def test_storage_that_is_down_declines_and_the_next_one_goes_on(self, rig: Rig) -> None:
        names = rig.stored(hashes(6))
        rig.fault("count", {names[0]: DOWN})
        operation = rig.ended(rig.controller.prefetch(names))
        assert (operation.state, operation.stop) == (OperationState.DECLINED, Stop.BACKEND_DOWN)
        assert operation.failure is not None
        rig.fault("count", {})
        assert rig.ended(rig.controller.prefetch(names)).state is OperationState.DONE
        rig.take()

    @pytest.mark.parametrize("bug", [ZeroDivisionError, Panic])
    @pytest.mark.parametrize("call", ["count_leading", "read"])
    def test_a_backend_that_raises_ends_that_operation_and_no_thread(
        self, rig: Rig, call: str, bug: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = rig.stored(hashes(6))

        def broken(*arguments: Any) -> Any:
            raise bug("a bug of the backend")

        with monkeypatch.context() as patched:
            patched.setattr(rig.storage, call, broken)
            for _ in range(3):
                operation = rig.ended(rig.controller.prefetch(names))
                assert operation.state in (OperationState.DECLINED, OperationState.FAILED)
                assert operation.failure is not None and "a bug of the backend" in operation.failure.message
        rig.nothing_is_left()
        assert rig.controller.healthy
        assert rig.ended(rig.controller.prefetch(names)).state is OperationState.DONE
        rig.take()

    def test_what_is_told_of_an_operation_fits_together_at_every_moment(self, rig: Rig) -> None:
        names = rig.stored(hashes(32))
        rows: list[OperationRow] = []
        over = threading.Event()

        def look(operation: Operation) -> None:
            while not over.is_set():
                rows.append(rig.controller.book.row(operation))

        for _ in range(10):
            operation = rig.controller.prefetch(names)
            threads = [threading.Thread(target=look, args=(operation,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            rig.ended(operation)
            over.set()
            for thread in threads:
                thread.join(20)
            over.clear()
            rows.append(rig.controller.book.row(operation))
            assert rig.take() == names
        for row in rows:
            arrived = [outcome is PageOutcome.OK for outcome in row.outcomes]
            assert row.nbytes == sum(arrived) * SHAPE.page_bytes
            assert row.completed <= (arrived.index(False) if False in arrived else len(arrived))
            assert row.quiescent == row.state.ended
            assert row.state is not OperationState.DONE or row.completed == 32

    @pytest.mark.parametrize("short", [True, False])
    def test_a_backend_that_answers_another_number_of_written_pages_is_believed_nothing(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch, short: bool
    ) -> None:
        names = hashes(4)
        pages = rig.on_host(names)
        write = rig.storage.write

        def other(*arguments: Any) -> Any:
            results = write(*arguments)
            return results[:-1] if short else [*results, results[0]]

        monkeypatch.setattr(rig.storage, "write", other)
        operation = rig.ended(rig.controller.write_storage(names, pages))
        assert (operation.state, operation.completed) == (OperationState.FAILED, 0)
        assert f"{3 if short else 5} of 4 pages" in str(operation.failure)
        rig.host.table.release(pages)
        rig.nothing_is_left()

    def test_a_backend_that_answers_too_few_pages_is_believed_nothing(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = rig.stored(hashes(4))
        read = rig.storage.read
        monkeypatch.setattr(rig.storage, "read", lambda *arguments: read(*arguments)[:-1])
        operation = rig.ended(rig.controller.prefetch(names))
        assert operation.state is OperationState.FAILED and "3 of 4 pages" in str(operation.failure)
        rig.nothing_is_left()

    def test_a_keeper_that_raises_leaks_no_page(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        names = rig.stored(hashes(6))

        def broken(*arguments: Any) -> None:
            raise KeyError("a bug of the engine")

        monkeypatch.setattr(rig.queue, "keep", broken)
        assert rig.ended(rig.controller.prefetch(names)).state is OperationState.FAILED
        rig.nothing_is_left()
