"""A storage backend in memory, and one that misbehaves on purpose. For tests only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvgrpc.prefetch.storage.base import (
    MemoryRange,
    PageBuffers,
    PageResult,
    Removed,
    StorageBackend,
    StorageDown,
    StorageStats,
    check_batch,
    failed,
    timed_out,
)
from kvgrpc.prefetch.storage.flat import FlatBackend


class MemoryStore:
    """Pages in a dictionary."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}

    def size(self, key: str) -> int | None:
        data = self.pages.get(key)
        return None if data is None else len(data)

    def get(self, key: str) -> bytes | None:
        return self.pages.get(key)

    def put(self, key: str, data: bytes) -> None:
        self.pages[key] = data

    def delete(self, key: str) -> bool:
        return self.pages.pop(key, None) is not None

    def clear(self, prefix: str) -> list[str]:
        gone = [key for key in self.pages if key.startswith(prefix)]
        for key in gone:
            del self.pages[key]
        return gone


def memory_backend(store: MemoryStore | None = None) -> FlatBackend:
    return FlatBackend("memory", store or MemoryStore())


def from_config(config: Mapping[str, object]) -> FlatBackend:
    """As an entry point of the group ``kvgrpc.storage`` offers it."""
    return FlatBackend("dictionary", MemoryStore(), threads=int(str(config.get("threads", 4))))


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one page of a call, or (``down``, ``delay``) to the whole call.

    ``result``: answered instead of doing anything. ``hang``: TIMEOUT after the call's time-out, the buffers in use
    until ``FaultyBackend.release()``. ``delay``: seconds before the call. ``down``: StorageDown, where that may be.
    """

    result: PageResult | None = None
    hang: bool = False
    delay: float = 0.0
    down: bool = False

    @property
    def only_delays(self) -> bool:
        return self.result is None and not self.hang and not self.down


FAILED = Fault(failed("injected", retryable=True))
BROKEN = Fault(failed("injected"))
HANG = Fault(hang=True)
DOWN = Fault(down=True)


class FaultyBackend:
    """Wraps a backend; ``fault(call, key)`` decides what happens, with call one of count, read, write, delete.

    Every call is noted in ``calls`` as (call, keys). Attributes may be set from any thread.
    """

    def __init__(
        self, inner: StorageBackend, fault: Callable[[str, str], Fault | None] = lambda call, key: None
    ) -> None:
        self.inner = inner
        self.fault = fault
        self.name = inner.name
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self._hanging: list[threading.Event] = []

    def release(self) -> None:
        """Buffers of everything that hangs are released."""
        while self._hanging:
            self._hanging.pop().set()

    def register(self, memory: Sequence[MemoryRange]) -> None:
        self.inner.register(memory)

    def count_leading(self, keys: Sequence[str], timeout: float) -> int:
        self._before("count", keys, timeout)
        return self.inner.count_leading(keys, timeout)

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        self._before("count", keys, timeout)
        return self.inner.contains(keys, timeout)

    def read(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        return self._pages("read", keys, pages, timeout)

    def write(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        return self._pages("write", keys, pages, timeout)

    def delete(self, keys: Sequence[str], timeout: float) -> int:
        self._before("delete", keys, timeout)
        return self.inner.delete(keys, timeout)

    def clear(self, prefix: str = "", timeout: float = 60.0) -> int:
        return self.inner.clear(prefix, timeout)

    def count(self, prefix: str, timeout: float) -> int | None:
        return self.inner.count(prefix, timeout)

    def on_removed(self, removed: Removed) -> Callable[[], None] | None:
        return self.inner.on_removed(removed)

    def stats(self) -> StorageStats:
        return self.inner.stats()

    def close(self, timeout: float) -> bool:
        return self.inner.close(timeout) and not self._hanging

    def _before(self, call: str, keys: Sequence[str], timeout: float) -> dict[int, Fault]:
        """Faults by position, after the delays; raises StorageDown."""
        self.calls.append((call, tuple(keys)))
        faults = {number: fault for number, key in enumerate(keys) if (fault := self.fault(call, key)) is not None}
        longest = max((fault.delay for fault in faults.values()), default=0.0)
        time.sleep(min(timeout, longest))  # the slow storage itself
        if call in ("count", "delete") and any(fault.down or fault.hang for fault in faults.values()):
            raise StorageDown("injected", self.name)
        return faults

    def _pages(self, call: str, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        check_batch(keys, pages)
        faults = self._before(call, keys, timeout)
        if any(fault.down for fault in faults.values()):
            return [failed("injected: down", retryable=True)] * len(keys)
        left = [number for number in range(len(keys)) if number not in faults or faults[number].only_delays]
        inner = self.inner.read if call == "read" else self.inner.write
        results = inner([keys[number] for number in left], [pages[number] for number in left], timeout)
        done = dict(zip(left, results, strict=True))
        if any(fault.hang for fault in faults.values()):
            time.sleep(timeout)  # the storage that hangs until its caller has given up
        return [done[number] if number in done else self._result(faults[number]) for number in range(len(keys))]

    def _result(self, fault: Fault) -> PageResult:
        if fault.result is not None:
            return fault.result
        released = threading.Event()
        self._hanging.append(released)
        return timed_out("injected: hangs", released)
