"""A prefetch or backup that is cancelled at each of its states, by its own scheduler and by a remote client: it ends
once nothing moves, and every page is free or in place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.prefetch.model import OperationKind, OperationState
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.votes import AloneAgreement, Decided, Stage, Vote
from kvgrpc.prefetch.storage.base import timed_out
from tests.support.cache_serving import CacheRank, hashes_of, open_cache_rank, prompt
from tests.support.faults.storage import Fault, FaultyBackend, memory_backend
from tests.support.tiered_engine import SECONDS
from tests.support.waiting import wait_until

NOTHING_MOVES = (OperationState.QUEUED, OperationState.QUERYING, OperationState.AGREEING)


class Gate:
    """A backend's calls and an agreement's decisions, held until the test lets them go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def block(self) -> None:
        self.reached.set()
        assert self.opened.wait(SECONDS), "the test never opened it"

    def before(self, call: str, page: int, hashes: list[str]) -> Callable[[str, str], Fault | None]:
        """Blocks the backend's call that has this page."""

        def fault(which: str, key: str) -> Fault | None:
            if which == call and key.endswith(hashes[page]):
                self.block()
            return None

        return fault


class HeldAgreement(AloneAgreement):
    """Decides one stage only once the gate is open, as if another rank took its time."""

    def __init__(self) -> None:
        self.stage: Stage | None = None
        self.gate = Gate()
        self.threads: list[threading.Thread] = []

    def vote(self, vote: Vote, timeout: float, decided: Decided) -> None:
        decide = super().vote
        if vote.stage is not self.stage or self.gate.reached.is_set():
            decide(vote, timeout, decided)
            return

        def later() -> None:
            self.gate.block()
            decide(vote, timeout, decided)

        self.threads.append(threading.Thread(target=later))
        self.threads[-1].start()


class Cancels:
    """A rank whose operations are held at one state, cancelled there by its own scheduler or by a remote client."""

    def __init__(self, path: Path, by_client: bool) -> None:
        self.storage = FaultyBackend(memory_backend())
        self.agreement = HeldAgreement()
        self.rank: CacheRank = open_cache_rank(path, storage=self.storage, agreement=self.agreement)
        self.controller = self.rank.manager.controller
        self.by_client = by_client
        self.hashes = hashes_of(prompt(12))
        self.rank.store(self.hashes)
        self.gate = Gate()

    def hold(self, call: str, page_hash: str) -> threading.Event:
        """The page's call blocks at the gate, then times out; the backend uses the page until the event is set."""
        held = threading.Event()
        hanging = Fault(timed_out("injected: hangs", held))

        def fault(which: str, key: str) -> Fault | None:
            if which != call or not key.endswith(page_hash):
                return None
            self.gate.block()
            return hanging

        self.storage.fault = fault
        return held

    def let_go_of_pages(self, operation: Operation, held: threading.Event) -> None:
        self.gate.opened.set()
        wait_until(lambda: operation.lingering and operation.state is OperationState.ENDING)
        assert not operation.wait(0.2), "the backend may still write there"
        counts = self.rank.manager.host.table.counts()
        assert counts["reserved"] + counts["read"] > 0
        held.set()

    def cancel(self, operation: Operation, state: OperationState, let_go: Callable[[], None] | None = None) -> None:
        """Cancels it while it is in ``state``, then lets go what held it there."""
        let_go = let_go or self.let_go
        wait_until(lambda: operation.state is state)
        if state in NOTHING_MOVES:
            self.cancel_at_once(operation)
            let_go()
            return
        if not self.by_client:
            self.controller.terminate(operation)
            assert not operation.ended
            let_go()
            return
        with SyncClient(self.rank.address) as client:
            answers: list[bool] = []
            call = threading.Thread(
                target=lambda: answers.append(client.terminate_prefetch(operation.operation_id).quiescent)
            )
            call.start()
            wait_until(lambda: operation.cut)
            let_go()
            call.join(SECONDS)
            assert answers == [True], "the answer comes when nothing moves any more"

    def cancel_at_once(self, operation: Operation) -> None:
        """It ends while storage and the other ranks still keep silent: it waits for neither."""
        if self.by_client:
            with SyncClient(self.rank.address) as client:
                assert client.terminate_prefetch(operation.operation_id).quiescent
        else:
            self.controller.terminate(operation)
            assert operation.wait(SECONDS)

    def let_go(self) -> None:
        self.gate.opened.set()
        self.agreement.gate.opened.set()

    def check(self, operation: Operation) -> None:
        """It ended once, what it kept is right, and everything else is back; then the whole prefix comes."""
        assert operation.wait(SECONDS)
        row = self.controller.book.row(operation)
        assert (row.state.name, row.stop.name) == ("CANCELLED", "CANCELLED")
        assert self.controller.wait_idle(SECONDS)
        counts = self.rank.manager.host.table.counts()
        assert (counts["reserved"], counts["read"], self.controller.occupied) == (0, 0, 0)
        self.storage.fault = lambda call, key: None
        if row.kind is OperationKind.PREFETCH:
            assert counts["present"] == row.completed
            self.rank.assert_bytes(self.hashes[: row.completed])
        whole = self.controller.prefetch(self.hashes)
        assert whole.wait(SECONDS) and whole.state in (OperationState.DONE, OperationState.DECLINED)
        self.rank.assert_bytes(self.hashes)
        assert self.controller.healthy
        print(f"\ncancelled: {row.kind.name} with {row.completed} of {row.asked} pages in place")

    def close(self) -> None:
        self.let_go()
        for thread in self.agreement.threads:
            thread.join(SECONDS)
        self.rank.close()
        assert self.rank.manager.controller.book.open() == []


@pytest.fixture(params=[False, True], ids=["terminate", "TerminatePrefetch"])
def cancels(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cancels]:
    cancels = Cancels(tmp_path, request.param)
    yield cancels
    cancels.close()


class TestCancelAtEveryState:
    def test_a_prefetch_that_is_queued(self, cancels: Cancels) -> None:
        other = hashes_of(prompt(4, first=7))
        cancels.storage.fault = cancels.gate.before("count", 0, other)
        before = [cancels.controller.prefetch(other) for _ in range(cancels.controller.limits.readers)]
        assert cancels.gate.reached.wait(SECONDS)
        wait_until(lambda: all(each.state is OperationState.QUERYING for each in before))
        operation = cancels.controller.prefetch(cancels.hashes)
        cancels.cancel(operation, OperationState.QUEUED)
        assert all(each.wait(SECONDS) for each in before)
        cancels.check(operation)
        assert operation.completed == 0

    def test_a_prefetch_that_asks_storage(self, cancels: Cancels) -> None:
        cancels.storage.fault = cancels.gate.before("count", 5, cancels.hashes)
        operation = cancels.controller.prefetch(cancels.hashes)
        assert cancels.gate.reached.wait(SECONDS)
        cancels.cancel(operation, OperationState.QUERYING)
        cancels.check(operation)
        assert operation.completed == 0

    @pytest.mark.parametrize("stage", [Stage.HITS, Stage.RESERVED])
    def test_a_prefetch_that_agrees(self, cancels: Cancels, stage: Stage) -> None:
        cancels.agreement.stage = stage
        operation = cancels.controller.prefetch(cancels.hashes)
        assert cancels.agreement.gate.reached.wait(SECONDS)
        if stage is Stage.RESERVED:
            assert cancels.rank.manager.host.table.counts()["reserved"] == 12
        cancels.cancel(operation, OperationState.AGREEING)
        cancels.check(operation)
        assert operation.completed == 0

    def test_a_prefetch_that_reads(self, cancels: Cancels) -> None:
        cancels.storage.fault = cancels.gate.before("read", 5, cancels.hashes)
        operation = cancels.controller.prefetch(cancels.hashes)
        assert cancels.gate.reached.wait(SECONDS)
        wait_until(lambda: operation.completed == 4)
        cancels.cancel(operation, OperationState.TRANSFERRING)
        cancels.check(operation)
        assert operation.completed >= 8, "the batch that was on its way is kept"

    def test_a_prefetch_that_hands_over(self, cancels: Cancels) -> None:
        cancels.agreement.stage = Stage.COMPLETED
        operation = cancels.controller.prefetch(cancels.hashes)
        assert cancels.agreement.gate.reached.wait(SECONDS)
        cancels.cancel(operation, OperationState.ENDING)
        cancels.check(operation)
        assert operation.completed == 12, "all of it was there"

    def test_a_prefetch_whose_pages_the_backend_still_holds(self, cancels: Cancels) -> None:
        held = cancels.hold("read", cancels.hashes[6])
        operation = cancels.controller.prefetch(cancels.hashes)
        assert cancels.gate.reached.wait(SECONDS)
        wait_until(lambda: operation.completed == 4)
        cancels.cancel(operation, OperationState.TRANSFERRING, lambda: cancels.let_go_of_pages(operation, held))
        cancels.check(operation)
        assert operation.completed == 6, "what comes behind a page that did not is of no use"

    def test_a_backup_that_is_queued(self, cancels: Cancels) -> None:
        first, second = hashes_of(prompt(4, first=8)), hashes_of(prompt(8, first=9))
        cancels.rank.fill(first)
        cancels.rank.fill(second)
        cancels.storage.fault = cancels.gate.before("write", 0, first)
        before = cancels.rank.start(OperationKind.BACKUP, first)
        assert cancels.gate.reached.wait(SECONDS)
        operation = cancels.rank.start(OperationKind.BACKUP, second)
        cancels.cancel(operation, OperationState.QUEUED)
        assert before.wait(SECONDS) and before.state is OperationState.DONE
        cancels.check(operation)
        assert cancels.controller.count_in_storage(second, SECONDS) == 0

    def test_a_backup_that_writes(self, cancels: Cancels) -> None:
        names = hashes_of(prompt(12, first=9))
        cancels.rank.fill(names)
        cancels.storage.fault = cancels.gate.before("write", 5, names)
        operation = cancels.rank.start(OperationKind.BACKUP, names)
        assert cancels.gate.reached.wait(SECONDS)
        cancels.cancel(operation, OperationState.TRANSFERRING)
        cancels.check(operation)
        assert operation.completed == 8
        cancels.rank.evict()
        back = cancels.controller.prefetch(names)
        assert back.wait(SECONDS) and back.completed == 8
        cancels.rank.assert_bytes(names[:8])

    def test_a_backup_whose_pages_the_backend_still_holds(self, cancels: Cancels) -> None:
        names = hashes_of(prompt(4, first=9))
        cancels.rank.fill(names)
        held = cancels.hold("write", names[2])
        operation = cancels.rank.start(OperationKind.BACKUP, names)
        assert cancels.gate.reached.wait(SECONDS)
        cancels.cancel(operation, OperationState.TRANSFERRING, lambda: cancels.let_go_of_pages(operation, held))
        cancels.check(operation)
        assert operation.completed == 3
