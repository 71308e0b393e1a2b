"""Supervised threads with a fair, bounded queue: what one item does wrong ends that item, never the thread."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from kvgrpc.errors import TooManyRequests
from kvgrpc.observability import metrics

_log = logging.getLogger(__name__)
T = TypeVar("T")


class FairQueue(Generic[T]):
    """Of callers: the most urgent first, and among equals one caller after the other. Not thread-safe.

    Items by priority (a smaller number is more urgent), round robin over tenants, in order within a tenant.
    """

    def __init__(self) -> None:
        self._by_priority: dict[int, OrderedDict[str, deque[T]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for priority in sorted(self._by_priority):
            for waiting in self._by_priority[priority].values():
                yield from waiting

    def put(self, item: T, priority: int = 0, tenant: str = "") -> None:
        self._by_priority.setdefault(priority, OrderedDict()).setdefault(tenant, deque()).append(item)
        self._count += 1

    def pop(self) -> T:
        """The next item. Raises IndexError when there is none."""
        if not self._count:
            raise IndexError("the queue is empty")
        priority = min(self._by_priority)
        tenants = self._by_priority[priority]
        tenant, waiting = next(iter(tenants.items()))
        item = waiting.popleft()
        if waiting:
            tenants.move_to_end(tenant)
        else:
            del tenants[tenant]
            if not tenants:
                del self._by_priority[priority]
        self._count -= 1
        return item

    def clear(self) -> list[T]:
        """Empties it; what was there, in order."""
        items = list(self)
        self._by_priority.clear()
        self._count = 0
        return items


class QueueThreads(Generic[T]):
    """``threads`` daemon threads that hand items to ``handle``, up to ``most`` at once where that many wait.

    ``handle`` that raises has its items given to ``failed`` with the error. All methods are thread-safe; ``put`` only
    appends and wakes.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[list[T]], None],
        failed: Callable[[list[T], Exception], None],
        *,
        threads: int = 1,
        most: int = 1,
        limit: int = 65_536,
    ) -> None:
        self.name = name
        self._handle = handle
        self._failed = failed
        self._most = most
        self._limit = limit
        self._queue: FairQueue[T] = FairQueue()
        self._wake = threading.Condition()
        self._stopped = False
        self._threads: list[threading.Thread] = []
        with contextlib.ExitStack() as started:
            started.callback(self.stop, 1.0)
            for number in range(threads):
                thread = threading.Thread(target=self._run, name=f"kvgrpc-{name}-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
            started.pop_all()

    @property
    def healthy(self) -> bool:
        """True if all threads live; True for one that was stopped in order."""
        return self._stopped or all(thread.is_alive() for thread in self._threads)

    @property
    def threads(self) -> int:
        return len(self._threads)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def put(self, item: T, priority: int = 0, tenant: str = "", *, again: bool = False) -> None:
        """Raises TooManyRequests past the limit, and after ``stop``. ``again``: what ``handle`` has is put back, which
        no limit hinders."""
        with self._wake:
            if self._stopped or (len(self._queue) >= self._limit and not again):
                raise TooManyRequests(
                    f"{self.name}: " + ("it was closed" if self._stopped else f"{self._limit} items wait already"),
                    metadata={"limit": self._limit, "value": len(self._queue) + 1, "scope": self.name},
                    retry_after=None if self._stopped else 1.0,
                )
            self._queue.put(item, priority, tenant)
            self._wake.notify()

    def clear(self) -> list[T]:
        """Takes back what waits."""
        with self._wake:
            return self._queue.clear()

    def stop(self, timeout: float) -> bool:
        """Takes and gives nothing more, ends the threads after what they do now; False when one was left behind. What
        waits then is what ``clear`` gives."""
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        end = time.monotonic() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (items := self._take()) is not None:
            try:
                self._handle(items)
            except Exception as error:
                self._record(items, error)
            except BaseException as error:  # a panic of a library in Rust is none, and the thread is needed yet
                self._record(items, RuntimeError(f"{type(error).__name__}: {error}"))

    def _take(self) -> list[T] | None:
        with self._wake:
            while not self._queue and not self._stopped:
                self._wake.wait()
            if self._stopped:
                return None
            return [self._queue.pop() for _ in range(min(self._most, len(self._queue)))]

    def _record(self, items: list[T], error: Exception) -> None:
        _log.error("%s: %s", self.name, error, exc_info=error)
        metrics.TASK_FAILURES.labels(f"kvgrpc-{self.name}").inc()
        try:
            self._failed(items, error)
        except Exception as second:
            _log.error("%s: what failed could not be told: %s", self.name, second, exc_info=second)
