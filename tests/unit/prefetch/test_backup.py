"""A backup beside storage that fails: each page is written, or said not to be, and one that every rank holds is written
by one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.prefetch.model import OperationState, PageOutcome
from kvgrpc.prefetch.protocol.backup import Backup, writer_of
from tests.support.controller_rig import LIMITS, Panic, Rig, hashes, rig
from tests.support.faults.storage import BROKEN, DOWN, FAILED, HANG, FaultyBackend, memory_backend
from tests.support.waiting import wait_until

__all__ = ["rig"]


class TestBackup:
    def test_a_batch_that_fails_ends_its_own_pages_only(self, rig: Rig) -> None:
        names = hashes(20)
        pages = rig.on_host(names)
        rig.fault("write", {names[5]: BROKEN, names[6]: FAILED})
        operation = rig.ended(rig.controller.write_storage(names, pages))
        assert (operation.state, operation.completed) == (OperationState.PARTIAL, 18)
        lost = {5, 6}
        expected = [PageOutcome.FAILED if i in lost else PageOutcome.OK for i in range(20)]
        assert operation.outcomes == expected and operation.retries == 1
        assert [rig.controller.count_in_storage([name], 1.0) for name in names] == [
            int(i not in lost) for i in range(20)
        ]
        rig.host.table.release(pages)
        rig.nothing_is_left()

    def test_a_page_that_fails_once_is_written_at_the_next_try(self, rig: Rig) -> None:
        names = hashes(8)
        pages = rig.on_host(names)
        rig.once("write", names[3], FAILED)
        operation = rig.ended(rig.controller.write_storage(names, pages))
        assert (operation.state, operation.retries) == (OperationState.DONE, 1)
        rig.host.table.release(pages)

    @pytest.mark.parametrize("bug", [ZeroDivisionError, Panic])
    def test_a_backend_that_raises_ends_that_backup_and_no_thread(
        self, rig: Rig, bug: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = hashes(6)
        pages = rig.on_host(names)

        def broken(*arguments: Any) -> Any:
            raise bug("a bug of the backend")

        with monkeypatch.context() as patched:
            patched.setattr(rig.storage, "write", broken)
            for _ in range(3):
                operation = rig.ended(rig.controller.write_storage(names, pages))
                assert operation.state is OperationState.FAILED and "a bug of the backend" in str(operation.failure)
        assert rig.controller.healthy
        assert rig.ended(rig.controller.write_storage(names, pages)).state is OperationState.DONE
        rig.host.table.release(pages)
        rig.nothing_is_left()

    def test_pages_are_not_freed_while_they_are_written(self, rig: Rig) -> None:
        names = hashes(4)
        pages = rig.on_host(names)
        rig.fault("write", {names[1]: HANG})
        operation = rig.controller.write_storage(names, pages)
        wait_until(lambda: operation.cut)
        assert len(rig.host.table.unread(pages)) == 0 and not operation.ended
        rig.storage.release()
        assert rig.ended(operation).outcomes[1] is PageOutcome.TIMEOUT
        rig.host.table.release(pages)
        rig.nothing_is_left()

    def test_replicated_pages_are_spread_over_the_ranks_and_taken_over(self) -> None:
        names = hashes(600)
        before = {name: writer_of(name, range(4)) for name in names}
        counts = [list(before.values()).count(rank) for rank in range(4)]
        assert min(counts) > 100
        after = {name: writer_of(name, (0, 1, 3)) for name in names}
        assert all(after[name] == before[name] for name in names if before[name] != 2)
        assert len({after[name] for name in names if before[name] == 2}) == 3

    def test_pages_of_another_writer_are_skipped_once_storage_has_them(self) -> None:
        names = hashes(12)
        mine = [writer_of(name, range(2)) == 0 for name in names]
        one, two = self.pair()
        first = one.controller.write_storage(names, one.on_host(names))
        assert isinstance(first, Backup)
        wait_until(lambda: first.others)
        assert not first.ended, "nobody has written them yet"
        second = two.ended(two.controller.write_storage(names, two.on_host(names)))
        assert one.ended(first).outcomes == [PageOutcome.OK if own else PageOutcome.SKIPPED for own in mine]
        assert second.outcomes == [PageOutcome.SKIPPED if own else PageOutcome.OK for own in mine]
        assert (first.state, first.completed, second.state) == (OperationState.DONE, 12, OperationState.DONE)
        assert one.controller.count_in_storage(names, 1.0) == 12
        one.close()
        two.close()

    def test_pages_of_a_writer_that_goes_before_it_wrote_are_written_by_those_that_live(self) -> None:
        names = hashes(12)
        live = {0, 1}
        rig = Rig(writes=lambda page_hash: writer_of(page_hash, live) == 0)
        operation = rig.controller.write_storage(names, rig.on_host(names))
        assert isinstance(operation, Backup)
        wait_until(lambda: operation.others)
        live.discard(1)
        assert rig.ended(operation).outcomes == [PageOutcome.OK] * 12
        rig.close()

    def test_pages_that_their_writer_never_writes_are_written_after_the_time_of_an_agreement(self) -> None:
        names = hashes(12)
        rig = Rig(replace(LIMITS, agreement_timeout=0.2), writes=lambda page_hash: writer_of(page_hash, range(2)) == 0)
        operation = rig.ended(rig.controller.write_storage(names, rig.on_host(names)))
        assert operation.outcomes == [PageOutcome.OK] * 12
        assert operation.ended_at - operation.began >= 0.2
        rig.close()

    @pytest.mark.parametrize("end", ["cancel", "deadline", "storage"])
    def test_who_waits_for_another_writer_ends_early_and_says_which_pages_are_not_there(self, end: str) -> None:
        names = hashes(12)
        limits = replace(LIMITS, agreement_timeout=0.2 if end == "storage" else 60.0)
        rig = Rig(limits, writes=lambda page_hash: page_hash != names[5])
        pages = rig.on_host(names)
        if end == "storage":
            rig.storage.fault = lambda call, key: DOWN if call == "count" else None
        operation = rig.controller.write_storage(names, pages, timeout=0.2 if end == "deadline" else 20.0)
        assert isinstance(operation, Backup)
        wait_until(lambda: operation.others or operation.ended)
        if end == "cancel":
            rig.controller.terminate(operation)
        assert rig.ended(operation).outcomes[5] is PageOutcome.PENDING
        expected = {"cancel": "CANCELLED", "deadline": "EXPIRED", "storage": "PARTIAL"}
        assert (operation.state.name, operation.completed) == (expected[end], 11)
        rig.host.table.release(pages)
        rig.nothing_is_left()
        rig.close()

    @staticmethod
    def pair() -> tuple[Rig, Rig]:
        """Two ranks with the same pages, over one storage."""
        store = memory_backend()
        rigs = [
            Rig(
                replace(LIMITS, agreement_timeout=60.0),
                writes=lambda page_hash, rank=rank: writer_of(page_hash, range(2)) == rank,  # type: ignore[misc]
                storage=FaultyBackend(store),
            )
            for rank in range(2)
        ]
        return rigs[0], rigs[1]
