"""The part that storage backends share which read, write and drop one page at a time, on a few threads of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvgrpc.errors import TooManyRequests
from kvgrpc.observability import metrics
from kvgrpc.observability.storage import forget_storage, watch_storage
from kvgrpc.prefetch.model import Released
from kvgrpc.prefetch.storage.base import (
    MemoryRange,
    PageBuffers,
    PageResult,
    PageStatus,
    Removed,
    StorageDown,
    StorageStats,
    check_batch,
    check_keys,
    failed,
    leading_pages,
    timed_out,
)
from kvgrpc.prefetch.threads.queue_threads import QueueThreads

T = TypeVar("T")
# How long one item may take before another thread joins in, when that is looked at first, and how seldom at last.
# A page of 1 MiB in the page cache takes 0.2 ms; two threads took as long for two, and twice the CPU.
_LONG_SECONDS, _LOOK_SECONDS, _LONGEST_PAUSE_SECONDS = 400e-6, 500e-6, 20e-3


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An item without a result. ``released``: None: it was never begun. Otherwise set when its call ended."""

    released: threading.Event | None = None
    error: BaseException | None = None


_NOT_BEGUN, _RUNS = Unfinished(), Unfinished()


class _Batch(Generic[T]):
    __slots__ = ("begun", "count", "ended", "function", "left", "name", "results", "stopped")

    def __init__(self, function: Callable[[int], T], count: int, name: str) -> None:
        self.function, self.count, self.name = function, count, name
        self.begun = self.ended = 0
        self.results: list[T | Unfinished] = [_NOT_BEGUN] * count
        self.left: dict[int, threading.Event] = {}
        self.stopped = False


class Workers:
    """Shares out the items of batches to a few threads, an item of each batch in turn.

    Waiting batches are bounded by the callers: each waits for its own.
    """

    def __init__(self, name: str, threads: int) -> None:
        # An item takes it once; a condition's own methods are Python.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        # Calls that outlived their batch.
        self._left = 0
        self._threads = threads
        self._numbers = itertools.count()
        self._pool: QueueThreads[_Batch[Any]] = QueueThreads(name, self._work, self._nothing_more, threads=threads)

    def run(self, function: Callable[[int], T], count: int, timeout: float) -> list[T | Unfinished]:
        """``function(i)`` for i below ``count``, in no fixed order; what has no result after ``timeout`` is Unfinished.

        An item that was not begun by then never is; so is everything once the workers are closed.
        """
        if not count:
            return []
        batch = _Batch(function, count, str(next(self._numbers)))
        deadline = time.monotonic() + timeout
        if timeout > 0:
            self._take_turns(batch)
            self._join_in(batch, deadline)
        with self._changed:
            while self._goes_on(batch) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            batch.stopped = True
            for number in [number for number, result in enumerate(batch.results) if result is _RUNS]:
                batch.left[number] = threading.Event()
                batch.results[number] = Unfinished(batch.left[number])
            self._left += len(batch.left)
            return list(batch.results)

    @property
    def hung_threads(self) -> int:
        """Threads in calls that nobody waits for any more."""
        with self._changed:
            return self._left

    @property
    def hung(self) -> bool:
        """True if every thread is in such a call: nothing is begun until one ends."""
        return self.hung_threads >= self._threads

    def close(self, timeout: float) -> bool:
        """Begins nothing more; True when every thread has ended within ``timeout``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return self._pool.stop(timeout)

    def _join_in(self, batch: _Batch[Any], deadline: float) -> None:
        """One thread begins, and the others join it one after the other where the items take long, at once or later:
        threads that hand short ones to each other through the interpreter's lock take longer than one alone.
        """
        joined, ended, began, pause = 1, 0, time.monotonic(), _LOOK_SECONDS
        while joined < min(batch.count, self._threads):
            with self._changed:
                if self._goes_on(batch) and (left := deadline - time.monotonic()) > 0:
                    self._changed.wait(min(pause, left))
                if not self._goes_on(batch) or batch.begun == batch.count or time.monotonic() >= deadline:
                    return
                done, ended = batch.ended - ended, batch.ended
            now = time.monotonic()
            if now - began > done * _LONG_SECONDS:
                self._take_turns(batch)
                joined, pause = joined + 1, _LOOK_SECONDS
            else:
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            began = now

    def _goes_on(self, batch: _Batch[Any]) -> bool:
        return batch.ended < batch.count and not self._closed

    def _take_turns(self, batch: _Batch[Any]) -> None:
        with contextlib.suppress(TooManyRequests):  # it was closed: the batch has no result
            self._pool.put(batch, tenant=batch.name, again=True)

    def _work(self, batches: list[_Batch[Any]]) -> None:
        """Items of a batch, until another one waits for its turn."""
        for batch in batches:
            with self._lock:
                number = self._begin(batch)
            while number is not None:
                result: object
                try:
                    result = batch.function(number)
                except BaseException as error:  # a panic of a library in Rust is no Exception
                    result = Unfinished(error=error)
                others_wait = self._pool.waiting
                with self._lock:
                    if batch.stopped:
                        self._end_late(batch, number)
                    else:
                        batch.results[number] = result
                        batch.ended += 1
                        if batch.ended == batch.count:
                            self._changed.notify_all()
                    number = None if others_wait else self._begin(batch)
                if others_wait:
                    self._take_turns(batch)

    def _begin(self, batch: _Batch[Any]) -> int | None:
        """The next item, if there is one. The caller has the lock."""
        if self._closed or batch.stopped or batch.begun == batch.count:
            return None
        number = batch.begun
        batch.begun += 1
        batch.results[number] = _RUNS
        return number

    def _end_late(self, batch: _Batch[Any], number: int) -> None:
        """Nobody waits for its result any more, but perhaps for its end. The caller has the lock."""
        if number in batch.left:
            batch.left.pop(number).set()
            self._left -= 1

    @staticmethod
    def _nothing_more(batches: list[_Batch[Any]], error: Exception) -> None:
        """Does nothing: what an item raises is its result."""


class PageCalls:
    """Of one backend, called ``name`` and found at ``address``. Thread-safe."""

    def __init__(self, name: str, address: str, threads: int) -> None:
        self._name, self._address, self._threads = name, address, threads
        self._workers = Workers(name, threads)
        self.closed = False
        watch_storage(self)

    def move(self, function: Callable[[int], PageResult], count: int, timeout: float) -> list[PageResult]:
        """A result for each page: what ``function(i)`` said, or why it did not."""
        results = self._workers.run(function, count, timeout)
        return [self._result(each) if isinstance(each, Unfinished) else each for each in results]

    def ask(self, function: Callable[[int], T], count: int, timeout: float) -> list[T]:
        """Answers to all questions. Raises StorageDown: a missing answer must not look like a missing page."""
        answers: list[T] = []
        with asking():
            for answer in self._workers.run(function, count, timeout):
                if isinstance(answer, Unfinished):
                    raise self.down(self._result(answer).detail)
                answers.append(answer)
        return answers

    def down(self, why: str) -> StorageDown:
        return StorageDown(f"storage {self._name!r} does not answer: {why}", self._address)

    @property
    def trouble(self) -> str:
        """Why no call is answered now; empty when calls are."""
        if self.closed:
            return "closed"
        return "all of its threads hang in calls that outlived their time" if self._workers.hung else ""

    def close(self, timeout: float) -> bool:
        """True when every thread has ended."""
        self.closed = True
        ended = self._workers.close(timeout)
        if ended:
            forget_storage(self)
        return ended

    def storage_threads(self) -> Sequence[tuple[str, int, int]]:
        """For metrics."""
        return [("page", self._threads, self._workers.hung_threads)]

    def _result(self, unfinished: Unfinished) -> PageResult:
        if unfinished.error is not None:
            return failed(f"{type(unfinished.error).__name__}: {unfinished.error}", retryable=True)
        if unfinished.released is not None:
            return timed_out("begun, but it did not end in time", unfinished.released)
        return failed("the backend is closed") if self.closed else timed_out("not begun in time")


logger = logging.getLogger(__name__)

TOLD_AT_ONCE = 1024
"""Keys that are told together, where pages go one after the other."""
TOLD_WITHIN_SECONDS = 0.05
"""A key waits no longer for others: its page may be stored again meanwhile, which is told, too."""


class Listeners:
    """Thread-safe. One that raises is logged, and the others hear it all the same."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: tuple[Removed, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, removed: Removed) -> Callable[[], None]:
        """Returns what ends it."""
        with self._lock:
            self._all = (*self._all, removed)

        def end() -> None:
            with self._lock:
                self._all = tuple(each for each in self._all if each is not removed)

        return end

    def tell(self, keys: Sequence[str]) -> None:
        for removed in self._all if keys else ():
            try:
                removed(keys)
            except Exception as error:
                logger.error("what hears of dropped pages failed: %s", error, exc_info=error)

    @contextlib.contextmanager
    def telling(self) -> Iterator[Callable[[str | None], None]]:
        """Takes the keys of pages that go one after the other, and tells many at a time; the last ones at the end,
        however that comes. To be called for what stays too, with None: time goes by."""
        keys: list[str] = []
        first = 0.0

        def gone(key: str | None) -> None:
            nonlocal first
            if key:
                first = first if keys else time.monotonic()
                keys.append(key)
            if keys and (len(keys) == TOLD_AT_ONCE or time.monotonic() - first >= TOLD_WITHIN_SECONDS):
                self.tell(keys[:])
                keys.clear()

        try:
            yield gone
        finally:
            self.tell(keys)


_FIELDS = {
    PageStatus.MISSING: "misses",
    PageStatus.FAILED: "failed",
    PageStatus.TIMEOUT: "timeouts",
}


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """A call of a store that moves no pages, for metrics."""
    try:
        yield
    except StorageDown:
        metrics.STORAGE_CALLS.labels("ask", "down").inc()
        raise
    metrics.STORAGE_CALLS.labels("ask", "ok").inc()


def _end_of(results: Sequence[PageResult]) -> str:
    """By its worst page."""
    found = {result.status for result in results}
    if PageStatus.FAILED in found:
        return "failed"
    return "timeout" if PageStatus.TIMEOUT in found else "ok"


class Tally:
    """Thread-safe. ``written`` is counted by ``add``: a page that was there already is OK, but not written."""

    def __init__(self, *, of_a_store: bool = True) -> None:
        """``of_a_store``: metrics count its calls."""
        self._of_a_store = of_a_store
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._left: list[Released] = []

    def read(self, results: Sequence[PageResult]) -> list[PageResult]:
        """Counts the results of a read and returns them."""
        return self._count_results("read", results, "hits")

    def write(self, results: Sequence[PageResult]) -> list[PageResult]:
        """Counts the results of a write and returns them."""
        return self._count_results("write", results, "")

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def idle(self, timeout: float) -> bool:
        """Waits until all buffers are released; False if some still are not."""
        return all(event.wait(timeout) for event in self._unreleased())

    def stats(self, **present: object) -> StorageStats:
        """``present``: what the backend knows of now."""
        in_use = len(self._unreleased())
        with self._lock:
            return dataclasses.replace(StorageStats(in_use=in_use, **self._counts), **present)  # type: ignore[arg-type]

    def _count_results(self, call: str, results: Sequence[PageResult], ok: str) -> list[PageResult]:
        """``ok``: what pages that are OK count as; empty: nothing."""
        others = [result for result in results if result.status is not PageStatus.OK]
        if self._of_a_store:
            metrics.STORAGE_CALLS.labels(call, _end_of(others)).inc()
        with self._lock:
            if ok:
                self._counts[ok] += len(results) - len(others)
            for result in others:
                self._counts[_FIELDS[result.status]] += 1
                if result.released is not None:
                    self._left.append(result.released)
        return list(results)

    def _unreleased(self) -> list[Released]:
        with self._lock:
            self._left = [event for event in self._left if not event.is_set()]
            return list(self._left)


class PageByPage(ABC):
    """The greater part of a StorageBackend, from ``_size``, ``_read``, ``_write`` and ``_drop`` of one page.

    They run on several threads at once, may block, and may raise: that fails the page alone.
    """

    name: str

    def __init__(self, address: str, threads: int) -> None:
        """``address``: where people find the store, for errors."""
        self._calls = PageCalls(self.name, address, threads)
        self._tally = Tally()
        self._removed = Listeners()

    def register(self, memory: Sequence[MemoryRange]) -> None:  # noqa: B027
        """Nothing to prepare: a page is read into any memory."""

    def count_leading(self, keys: Sequence[str], timeout: float) -> int:
        return leading_pages(self.contains, keys, timeout)

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        check_keys(keys)
        return self._calls.ask(lambda number: self._size(keys[number]) is not None, len(keys), timeout)

    def read(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        check_batch(keys, pages)
        moved = self._calls.move(lambda number: self._read(keys[number], pages[number]), len(keys), timeout)
        return self._tally.read(moved)

    def write(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        check_batch(keys, pages)
        deadline = time.monotonic() + timeout
        moved = self._calls.move(lambda number: self._write(keys[number], pages[number], deadline), len(keys), timeout)
        return self._tally.write(moved)

    def delete(self, keys: Sequence[str], timeout: float) -> int:
        check_keys(keys)
        return sum(self._calls.ask(lambda number: self._drop(keys[number]), len(keys), timeout))

    def count(self, prefix: str, timeout: float) -> int | None:
        return None

    def on_removed(self, removed: Removed) -> Callable[[], None]:
        return self._removed.add(removed)

    @abstractmethod
    def _size(self, key: str) -> int | None:
        """Bytes of a complete page; None if it is not there."""

    @abstractmethod
    def _read(self, key: str, page: PageBuffers) -> PageResult: ...

    @abstractmethod
    def _write(self, key: str, page: PageBuffers, deadline: float) -> PageResult:
        """``deadline``: of ``time.monotonic``, past which nobody waits for it any more."""

    @abstractmethod
    def _drop(self, key: str) -> bool:
        """True if it was there."""
