"""The way of a backup: host pages go to storage in batches, each page with its own end.

A batch that fails ends its own pages only. The pages are read-locked until nothing reads them any more. Of pages that
all ranks hold each has its writer; the others look whether storage has them, and write what does not come.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterable

from kvgrpc.errors import Failure, KvGrpcError, StorageFailed
from kvgrpc.prefetch.model import OperationKind, OperationState, PageOutcome, PrefetchLimits, Stop
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.protocol.book import OperationBook
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.votes import Agreement, Decision, Stage, Vote
from kvgrpc.prefetch.storage.base import PageResult, PageStatus, StorageBackend
from kvgrpc.prefetch.threads.timers import Alarms
from kvgrpc.prefetch.threads.worker import Worker

Writes = Callable[[str], bool]

_OUTCOMES = {
    PageStatus.OK: PageOutcome.OK,
    PageStatus.MISSING: PageOutcome.FAILED,
    PageStatus.FAILED: PageOutcome.FAILED,
    PageStatus.TIMEOUT: PageOutcome.TIMEOUT,
}
_THERE = (PageOutcome.OK, PageOutcome.SKIPPED)
_LOOK_AGAIN_SECONDS = 0.05


def writer_of(page_hash: str, ranks: Iterable[int]) -> int:
    """Which of the live ranks writes a page that all of them hold: spread evenly, and when one goes only its pages
    move.

    Rendezvous hashing; every rank that knows the same ranks names the same one. Raises ValueError without any rank.
    """
    return max(ranks, key=lambda rank: hashlib.blake2b(f"{rank}:{page_hash}".encode(), digest_size=8).digest())


def every_page(page_hash: str) -> bool:
    """A rank whose pages nobody else holds writes all of them."""
    return True


class Backup:
    """Writes host pages to storage. ``start`` only appends."""

    def __init__(
        self,
        book: OperationBook,
        host: HostPool,
        storage: StorageBackend,
        key_of: Callable[[str, str], str],
        writes: Writes,
        agreement: Agreement,
        limits: PrefetchLimits,
        alarms: Alarms,
    ) -> None:
        self._book = book
        self._host = host
        self._storage = storage
        self._key_of = key_of
        self._writes = writes
        self._agreement = agreement
        self._limits = limits
        self._alarms = alarms
        self._worker: Worker[Operation] = Worker("cache-backup", self._step, self._failed, threads=limits.writers)

    @property
    def healthy(self) -> bool:
        return self._worker.healthy

    @property
    def waiting(self) -> int:
        return self._worker.waiting

    def start(self, operation: Operation) -> None:
        """``operation.pages`` are PRESENT and read-locked by the caller; the lock is this operation's from now on."""
        operation.hit = len(operation.pages)
        with self._book.lock:
            agrees = operation.agrees and not operation.cut
            if agrees:
                operation.state = OperationState.AGREEING
        if not agrees:
            self._begin(operation, operation.hit, Stop.NOT_PRESENT)
            return
        self._book.changed(operation)
        self._vote(operation, Stage.HITS, operation.hit, Stop.NOT_PRESENT, self._agreed)

    def terminate(self, operation: Operation, stop: Stop = Stop.CANCELLED) -> None:
        """No further batch is begun; one that is written waits for the others' last word no longer than for a vote."""
        with self._book.lock:
            if operation.state.ended:
                return
            agreeing = operation.state is OperationState.AGREEING
            finishing = operation.finishing
            operation.cut = True
            operation.stop = operation.stop or stop
            operation.state = OperationState.ENDING
        if agreeing:
            self._vote(operation, Stage.COMPLETED, 0, operation.stop)
            self._end(operation, _end_of(operation, 0, False))
        elif finishing:
            self._alarms.after(self._limits.agreement_timeout, lambda: self.give_up(operation))

    def give_up(self, operation: Operation) -> None:
        """Ends one that waits for the other ranks' word on its last step, without it: this rank is closed or reset."""
        if operation.finishing:
            self._settle(operation, Decision(operation.operation_id, Stage.COMPLETED, 0, Stop.RANK_ABSENT))

    def stop(self, timeout: float) -> bool:
        """As that of a prefetcher."""
        stopped = self._worker.stop(timeout)
        for operation in self._worker.clear():
            with self._book.lock:
                operation.cut = True
            stopped = stopped and not operation.lingers
            if not operation.lingers:
                self._end(operation, OperationState.CANCELLED, Stop.SHUT_DOWN)
        return stopped

    def _put(self, operation: Operation) -> None:
        try:
            self._worker.put(operation, operation.priority, operation.tenant)
        except KvGrpcError as error:
            self._failed([operation], error)

    def _step(self, operations: list[Operation]) -> None:
        for operation in operations:
            if self._write_batch(operation):
                # To the back of its tenant's queue: a large backup holds up nobody.
                self._put(operation)
            else:
                self._finish(operation)

    def _write_batch(self, operation: Operation) -> bool:
        """One batch; whether there is more."""
        with self._book.lock:
            if time.monotonic() >= operation.deadline and not operation.cut:
                operation.cut, operation.stop = True, Stop.DEADLINE
            if operation.cut or operation.state.ended:
                return False
            operation.state = OperationState.TRANSFERRING
            first = operation.next_page
            batch = operation.pages[first : first + self._limits.batch_pages]
            operation.next_page += len(batch)
        hashes = operation.hashes[first : first + len(batch)]
        self._write(operation, [first + index for index, each in enumerate(hashes) if self._writes(each)])
        with self._book.lock:
            ours = range(first, first + len(batch))
            operation.others += [index for index in ours if operation.outcomes[index] is PageOutcome.PENDING]
        self._count(operation)
        return operation.next_page < len(operation.pages)

    def _write(self, operation: Operation, wanted: list[int]) -> None:
        """Writes these pages, each until it succeeds or has had its tries."""
        for attempt in range(self._limits.attempts):
            if not wanted or (attempt and operation.cut):
                break
            results = self._call(operation, wanted)
            again = []
            for index, result in zip(wanted, results, strict=True):
                self._note(operation, index, result)
                if not result.ok and result.retryable and result.quiescent:
                    again.append(index)
            wanted = again
            if attempt + 1 < self._limits.attempts:
                operation.retries += len(again)

    def _look_for_others(self, operation: Operation) -> bool:
        """Looks whether one batch of the pages of other writers is in storage now; False when none of it came.

        One whose writer is gone, or that did not come within ``agreement_timeout``, is written here: a page that is
        stored twice is stored once."""
        now = time.monotonic()
        with self._book.lock:
            if now >= operation.deadline and not operation.cut:
                operation.cut, operation.stop = True, Stop.DEADLINE
            if operation.cut:
                operation.others = []
                return True
            operation.others_since = operation.others_since or now
            late = now - operation.others_since >= self._limits.agreement_timeout
            batch = operation.others[: self._limits.batch_pages]
        try:
            keys = [self._key_of(operation.hashes[index], operation.extra_key) for index in batch]
            there = dict(zip(batch, self._storage.contains(keys, self._limits.storage_timeout), strict=True))
        except Exception as error:
            self._note_failure(operation, f"{type(error).__name__}: {error}", "FAILED")
            with self._book.lock:
                operation.cut = operation.cut or late
            return late
        with self._book.lock:
            for index, found in there.items():
                if found:
                    operation.outcomes[index] = PageOutcome.SKIPPED
        missing = [index for index, found in there.items() if not found]
        self._write(operation, [index for index in missing if late or self._writes(operation.hashes[index])])
        with self._book.lock:
            left = [index for index in batch if operation.outcomes[index] is PageOutcome.PENDING]
            operation.others[: len(batch)] = left
        self._count(operation)
        return len(left) < len(batch)

    def _count(self, operation: Operation) -> None:
        with self._book.lock:
            operation.completed = sum(outcome in _THERE for outcome in operation.outcomes)
        self._book.changed(operation)

    def _call(self, operation: Operation, wanted: list[int]) -> list[PageResult]:
        keys = [self._key_of(operation.hashes[index], operation.extra_key) for index in wanted]
        buffers = [self._host.page_buffers(int(operation.pages[index])) for index in wanted]
        try:
            results = self._storage.write(keys, buffers, self._limits.storage_timeout)
        except Exception as error:
            return [PageResult(PageStatus.FAILED, f"{type(error).__name__}: {error}", True)] * len(wanted)
        if len(results) != len(wanted):
            text = f"{self._storage.name} answered {len(results)} of {len(wanted)} pages"
            return [PageResult(PageStatus.FAILED, text)] * len(wanted)
        return results

    def _note(self, operation: Operation, index: int, result: PageResult) -> None:
        with self._book.lock:
            operation.outcomes[index] = _OUTCOMES[result.status]
            if result.ok:
                operation.nbytes += self._host.shape.page_bytes
            else:
                self._note_failure(
                    operation, f"page {index}: {result.detail or result.status.value}", result.status.name
                )
            if result.released is not None and not result.quiescent:
                operation.lingering.setdefault(int(operation.pages[index]), []).append(result.released)

    def _note_failure(self, operation: Operation, text: str, status: str) -> None:
        with self._book.lock:
            operation.failure = operation.failure or Failure.of(
                StorageFailed(
                    f"{self._storage.name}: {text}", metadata={"backend": self._storage.name, "status": status}
                )
            )

    def _finish(self, operation: Operation) -> None:
        """Its end, once every page is where it belongs and no backend reads any of them."""
        if operation.ended:
            return
        if operation.others:
            came = self._look_for_others(operation)
            if operation.others and came:
                self._put(operation)
                return
            if operation.others:
                self._alarms.after(_LOOK_AGAIN_SECONDS, lambda: self._put(operation))
                return
        if operation.lingers:
            with self._book.lock:
                operation.state = OperationState.ENDING
                operation.cut = True
            self._alarms.after(_LOOK_AGAIN_SECONDS, lambda: self._put(operation))
            return
        self._let_go(operation)
        prefix = _prefix(operation)
        if operation.agrees:
            with self._book.lock:
                operation.finishing = True
                operation.state = OperationState.ENDING
            self._book.changed(operation)
            lost = Stop.NONE if prefix == len(operation.outcomes) else Stop.PAGE_LOST
            self._vote(operation, Stage.COMPLETED, prefix, operation.stop or lost, self._settle)
        else:
            whole = operation.completed == len(operation.outcomes)
            self._end(operation, _end_of(operation, operation.completed, whole))

    # What all ranks of the replica do together.

    def _agreed(self, operation: Operation, decision: Decision) -> None:
        self._begin(operation, decision.pages, decision.stop)

    def _begin(self, operation: Operation, pages: int, stop: Stop) -> None:
        """The leading pages that every rank has are written."""
        with self._book.lock:
            if operation.state.ended:
                return
            count = min(pages, len(operation.pages))
            rest, operation.pages = operation.pages[count:], operation.pages[:count]
            operation.agreed = count
            operation.outcomes = [PageOutcome.PENDING] * count
            if not operation.cut:
                operation.state = OperationState.QUEUED
        if len(rest):
            self._host.table.end_read(rest)
        if count:
            self._put(operation)
        else:
            self._end(operation, OperationState.DECLINED, stop)

    def _settle(self, operation: Operation, decision: Decision) -> None:
        """What is in storage for every rank is completed."""
        with self._book.lock:
            if operation.state.ended:
                return
            operation.completed = min(decision.pages, _prefix(operation))
            whole = decision.pages >= len(operation.outcomes) and not operation.cut
            operation.stop = operation.stop or (Stop.NONE if whole else decision.stop)
        self._end(operation, _end_of(operation, operation.completed, whole))

    def _vote(
        self,
        operation: Operation,
        stage: Stage,
        pages: int,
        stop: Stop,
        then: Callable[[Operation, Decision], None] = lambda operation, decision: None,
    ) -> None:
        vote = Vote(operation.operation_id, stage, pages, stop)
        seconds = self._limits.agreement_timeout
        if stage is Stage.COMPLETED and not operation.cut:
            # Others say theirs when they have written, or when their time is over: it ends everywhere at once.
            left = operation.deadline - time.monotonic()
            seconds += max(0.0, min(left, self._limits.doubt_timeout / 2))
        self._agreement.vote(vote, seconds, lambda decision: then(operation, decision))

    def _let_go(self, operation: Operation) -> None:
        """Its pages may be evicted again."""
        with self._book.lock:
            pages, operation.pages = operation.pages, operation.pages[:0]
        if len(pages):
            self._host.table.end_read(pages)

    def _end(self, operation: Operation, state: OperationState, stop: Stop = Stop.NONE) -> None:
        self._let_go(operation)
        self._book.end(operation, state, stop or operation.stop)
        if operation.agrees:
            self._agreement.forget(operation.operation_id)

    def _failed(self, operations: list[Operation], error: Exception) -> None:
        for operation in operations:
            self._note_failure(operation, f"{type(error).__name__}: {error}", "FAILED")
            if operation.lingers:
                with self._book.lock:
                    operation.state = OperationState.ENDING
                    operation.cut = True
                again = functools.partial(self._failed, [operation], error)
                self._alarms.after(_LOOK_AGAIN_SECONDS, again)
                continue
            if operation.agrees:
                self._vote(operation, Stage.COMPLETED, 0, Stop.PAGE_LOST)
            self._end(operation, OperationState.FAILED)


def _prefix(operation: Operation) -> int:
    """Leading pages that are in storage."""
    outcomes = operation.outcomes
    return next((index for index, outcome in enumerate(outcomes) if outcome not in _THERE), len(outcomes))


def _end_of(operation: Operation, done: int, whole: bool) -> OperationState:
    assert operation.kind is OperationKind.BACKUP
    if whole:
        return OperationState.DONE
    if operation.stop in (Stop.CANCELLED, Stop.SHUT_DOWN):
        return OperationState.CANCELLED
    if operation.stop is Stop.DEADLINE:
        return OperationState.EXPIRED
    return OperationState.PARTIAL if done else OperationState.FAILED
