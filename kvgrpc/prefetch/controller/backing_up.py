"""The way of a backup: host pages go to storage in batches, each page with its own end.

A batch that fails ends its own pages only. The pages are read-locked from the start to the end.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable

from kvgrpc.errors import Failure, KvGrpcError, StorageFailed
from kvgrpc.prefetch.controller.operation import Operation
from kvgrpc.prefetch.controller.operations import OperationBook
from kvgrpc.prefetch.controller.timers import Alarms
from kvgrpc.prefetch.controller.worker import Worker
from kvgrpc.prefetch.model import OperationKind, OperationState, PageOutcome, PrefetchLimits, Stop
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages
from kvgrpc.prefetch.storage.base import PageResult, PageStatus, StorageBackend

Writes = Callable[[str], bool]

_OUTCOMES = {
    PageStatus.OK: PageOutcome.OK,
    PageStatus.MISSING: PageOutcome.FAILED,
    PageStatus.FAILED: PageOutcome.FAILED,
    PageStatus.TIMEOUT: PageOutcome.TIMEOUT,
}
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
        key_of: Callable[[str], str],
        writes: Writes,
        limits: PrefetchLimits,
        alarms: Alarms,
    ) -> None:
        self._book = book
        self._host = host
        self._storage = storage
        self._key_of = key_of
        self._writes = writes
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
        operation.agreed = operation.hit = len(operation.pages)
        operation.outcomes = [PageOutcome.PENDING] * len(operation.pages)
        self._put(operation)

    def terminate(self, operation: Operation, stop: Stop = Stop.CANCELLED) -> None:
        """No further batch is begun."""
        with self._book.lock:
            if not operation.state.ended:
                operation.cut = True
                operation.stop = operation.stop or stop
                operation.state = OperationState.ENDING

    def stop(self, timeout: float) -> bool:
        return self._worker.stop(timeout)

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
        self._write(operation, first, batch)
        with self._book.lock:
            operation.completed = sum(
                outcome in (PageOutcome.OK, PageOutcome.SKIPPED) for outcome in operation.outcomes
            )
        self._book.changed(operation)
        return operation.next_page < len(operation.pages)

    def _write(self, operation: Operation, first: int, batch: Pages) -> None:
        hashes = operation.hashes[first : first + len(batch)]
        wanted = []
        for index, page_hash in enumerate(hashes):
            if self._writes(page_hash):
                wanted.append(index)
            else:
                operation.outcomes[first + index] = PageOutcome.SKIPPED
        for attempt in range(self._limits.attempts):
            if not wanted or (attempt and operation.cut):
                break
            results = self._call(hashes, batch, wanted)
            again = []
            for index, result in zip(wanted, results, strict=True):
                self._note(operation, first + index, result)
                if not result.ok and result.retryable and result.quiescent:
                    again.append(index)
            wanted = again
            if attempt + 1 < self._limits.attempts:
                operation.retries += len(again)

    def _call(self, hashes: tuple[str, ...], batch: Pages, wanted: list[int]) -> list[PageResult]:
        keys = [self._key_of(hashes[index]) for index in wanted]
        buffers = [self._host.page_buffers(int(batch[index])) for index in wanted]
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
                text = f"{self._storage.name}: page {index}: {result.detail or result.status.value}"
                operation.failure = operation.failure or Failure.of(
                    StorageFailed(text, metadata={"backend": self._storage.name, "status": result.status.name})
                )
            if result.released is not None and not result.quiescent:
                operation.lingering.setdefault(int(operation.pages[index]), []).append(result.released)

    def _finish(self, operation: Operation) -> None:
        """Its end, once no backend reads its pages any more."""
        if any(not event.is_set() for events in operation.lingering.values() for event in events):
            with self._book.lock:
                operation.state = OperationState.ENDING
                operation.cut = True
            self._alarms.after(_LOOK_AGAIN_SECONDS, lambda: self._put(operation))
            return
        with self._book.lock:
            pages, operation.pages = operation.pages, operation.pages[:0]
            done = operation.completed
            whole = done == len(operation.outcomes)
        self._host.table.end_read(pages)
        self._book.end(operation, _end_of(operation, done, whole), operation.stop)

    def _failed(self, operations: list[Operation], error: Exception) -> None:
        for operation in operations:
            with self._book.lock:
                text = f"{self._storage.name}: {type(error).__name__}: {error}"
                failure = StorageFailed(text, metadata={"backend": self._storage.name, "status": "FAILED"})
                operation.failure = operation.failure or Failure.of(failure)
                pages, operation.pages = operation.pages, operation.pages[:0]
            if len(pages):
                self._host.table.end_read(pages)
            self._book.end(operation, OperationState.FAILED, operation.stop)


def _end_of(operation: Operation, done: int, whole: bool) -> OperationState:
    assert operation.kind is OperationKind.BACKUP
    if whole:
        return OperationState.DONE
    if operation.stop in (Stop.CANCELLED, Stop.SHUT_DOWN):
        return OperationState.CANCELLED
    if operation.stop is Stop.DEADLINE:
        return OperationState.EXPIRED
    return OperationState.PARTIAL if done else OperationState.FAILED
