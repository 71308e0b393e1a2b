"""The work of storage for operations: look-ups, reads and writes, on threads of their own that may all hang."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from kvgrpc.errors import Failure
from kvgrpc.observability.storage import forget_storage, watch_storage
from kvgrpc.prefetch.model import PageResult, PageStatus, PrefetchLimits, Stop
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.protocol.backup import Backup
from kvgrpc.prefetch.protocol.operation import (
    LookUp,
    Operation,
    PageBatch,
    ReadNext,
    WriteNext,
    failed_pages,
    failure_of,
)
from kvgrpc.prefetch.protocol.prefetch import Prefetch
from kvgrpc.prefetch.storage.base import PageSource, StorageBackend, source_behind
from kvgrpc.prefetch.threads.queue_threads import QueueThreads
from kvgrpc.prefetch.tree.keeper import Keeper

T = TypeVar("T")
StorageWork = LookUp | ReadNext | WriteNext
# A call of storage that has taken so many times its time-out hangs.
_HUNG_AFTER = 2.0
_KINDS: dict[type[Any], str] = {LookUp: "look_up", ReadNext: "read", WriteNext: "write"}


class Step(Protocol):
    """Tells an operation what happened; what it answers, None where it failed."""

    def __call__(self, operation: Operation, step: Callable[[], T], /) -> T | None: ...


class StorageThreads:
    """Thread-safe; ``put`` never waits. Each turn of an operation is one batch: whoever has many holds up nobody."""

    def __init__(
        self,
        host: HostPool,
        storage: StorageBackend,
        keeper: Keeper,
        key_of: Callable[[str, str], str],
        limits: PrefetchLimits,
        step: Step,
        failed: Callable[[list[Operation], Exception], None],
    ) -> None:
        self._host = host
        self._storage = storage
        self._keeper = keeper
        self._key_of = key_of
        self._limits = limits
        self._step = step
        readers, writers = limits.readers, limits.writers
        # When the call began in which a thread is, by the thread.
        self._calls: dict[type[Any], dict[int, float]] = {LookUp: {}, ReadNext: {}, WriteNext: {}}
        self._workers: dict[type[Any], QueueThreads[Operation]] = {}
        with contextlib.ExitStack() as opened:
            opened.callback(self.stop, 1.0)
            self._workers[LookUp] = QueueThreads("prefetch-query", self._look_up, failed, threads=readers)
            self._workers[ReadNext] = QueueThreads("prefetch-read", self._read, failed, threads=readers)
            self._workers[WriteNext] = QueueThreads("cache-backup", self._write, failed, threads=writers)
            opened.pop_all()
        watch_storage(self)

    @property
    def healthy(self) -> bool:
        """All of its threads live, and of each kind one at least does not stand in a call that ignores its time-out."""
        of_a_kind = [(threads, hung) for _, threads, hung in self.storage_threads()]
        return all(worker.healthy for worker in self._workers.values()) and all(hung < most for most, hung in of_a_kind)

    def storage_threads(self) -> Sequence[tuple[str, int, int]]:
        """By kind: how many there are, and how many stand in a call that ignores its time-out."""
        before = time.monotonic() - _HUNG_AFTER * self._limits.storage_timeout
        return [
            (_KINDS[kind], worker.threads, sum(began < before for began in list(self._calls[kind].values())))
            for kind, worker in self._workers.items()
        ]

    @contextlib.contextmanager
    def _calling(self, kind: type[Any]) -> Iterator[None]:
        thread = threading.get_ident()
        self._calls[kind][thread] = time.monotonic()
        try:
            yield
        finally:
            del self._calls[kind][thread]

    def put(self, operation: Operation, work: StorageWork) -> None:
        """Raises TooManyRequests."""
        self._workers[type(work)].put(operation, operation.order.priority, operation.order.tenant)

    def stop(self, timeout: float) -> bool:
        """Begins nothing more; False when a thread was left behind."""
        end = time.monotonic() + timeout
        ended = all([worker.stop(max(0.0, end - time.monotonic())) for worker in self._workers.values()])
        if ended:
            forget_storage(self)
        return ended

    def _look_up(self, operations: list[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Prefetch) and self._step(operation, operation.take_look_up):
                covered = self._keeper.leading(operation.hashes)
                self._step(operation, functools.partial(operation.on_covered, covered))
                found = self._count_hits(operation)
                self._step(operation, functools.partial(operation.on_found, *found))

    def _count_hits(self, operation: Prefetch) -> tuple[int, Stop, Failure | None]:
        """Leading pages in storage behind what is covered; one call for each batch, as long as all of it is there."""
        hashes, hit = operation.hashes, 0
        for first in range(operation.covered, len(hashes), self._limits.batch_pages):
            batch = [self._key(operation, each) for each in hashes[first : first + self._limits.batch_pages]]
            seconds = min(self._limits.storage_timeout, operation.deadline - time.monotonic())
            if seconds <= 0 or operation.cut:
                return hit, Stop.DEADLINE, None
            try:
                with self._calling(LookUp):
                    found = self._source(operation, first).count_leading(batch, seconds)
            except BaseException as error:  # a panic of a library in Rust is no Exception
                return hit, Stop.BACKEND_DOWN, failure_of(error, self._storage.name)
            hit += found
            if found < len(batch):
                break
        return hit, Stop.NONE, None

    def _read(self, operations: list[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Prefetch):
                batch = self._step(operation, functools.partial(operation.take_batch, time.monotonic()))
                while batch is not None:
                    seconds = min(self._limits.storage_timeout, operation.deadline - time.monotonic())
                    results = self._move(operation, batch, reading=True, seconds=max(0.001, seconds))
                    took = functools.partial(operation.on_read, batch, results, time.monotonic())
                    batch = self._step(operation, took)

    def _write(self, operations: list[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, Backup):
                batch = self._step(operation, functools.partial(operation.take_batch, time.monotonic()))
                looks = batch is not None and batch.look
                while batch is not None:
                    if looks:
                        batch, looks = self._look(operation, batch), False
                        continue
                    results = self._move(operation, batch, reading=False, seconds=self._limits.storage_timeout)
                    wrote = functools.partial(operation.on_written, batch, results, time.monotonic())
                    batch = self._step(operation, wrote)

    def _look(self, operation: Backup, batch: PageBatch) -> PageBatch | None:
        """Asks storage whether it has pages that others write; what is to be written here after all."""
        keys = [self._key(operation, operation.hashes[index]) for index in batch.indices]
        try:
            with self._calling(WriteNext):
                there = self._storage.contains(keys, self._limits.storage_timeout)
            if len(there) != len(keys):
                raise ValueError(f"{len(there)} answers for {len(keys)} pages")
        except BaseException as error:  # a panic of a library in Rust is no Exception
            text = f"{type(error).__name__}: {error}"
            self._step(operation, functools.partial(operation.on_look_failed, text, time.monotonic()))
            return None
        return self._step(operation, functools.partial(operation.on_there, batch, there, time.monotonic()))

    def _move(self, operation: Operation, batch: PageBatch, *, reading: bool, seconds: float) -> list[PageResult]:
        """One call of storage: a result for each page, whatever it does."""
        if not batch.indices:
            return []
        try:
            hashes, pages, first = operation.hashes, operation.pages, operation.covered
            source = self._source(operation, first + batch.indices[0])
            call = source.read if reading else self._storage.write
            keys = [self._key(operation, hashes[first + index]) for index in batch.indices]
            buffers = [self._host.page_buffers(int(pages[index])) for index in batch.indices]
            with self._calling(ReadNext if reading else WriteNext):
                results = list(call(keys, buffers, seconds))
            if not all(isinstance(each, PageResult) for each in results):
                raise TypeError(f"{self._storage.name} answered what is no PageResult")
        except BaseException as error:  # a panic of a library in Rust is no Exception
            return failed_pages(error, len(batch.indices))
        if len(results) != len(keys):
            text = f"{self._storage.name} answered {len(results)} of {len(keys)} pages"
            return [PageResult(PageStatus.FAILED, text)] * len(keys)
        return results

    def _source(self, operation: Operation, first: int) -> PageSource:
        """Returns the source of the pages behind the first so many of its prompt."""
        return source_behind(self._storage, operation.hashes, first, operation.order.engines or None)

    def _key(self, operation: Operation, page_hash: str) -> str:
        return self._key_of(page_hash, operation.order.extra_key)
