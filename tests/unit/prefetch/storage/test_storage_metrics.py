"""What /metrics says of a store: how its calls end, and how many threads stand in one that does not."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence

import pytest

from kvgrpc.observability import storage as observed
from kvgrpc.observability.metrics import REGISTRY
from kvgrpc.observability.storage import forget_storage, watch_storage
from kvgrpc.prefetch.storage.base import PageStatus, StorageDown
from kvgrpc.prefetch.storage.flat import FlatBackend
from tests.support.faults.storage import MemoryStore
from tests.support.waiting import wait_until

LONG, PAGE_BYTES = 30.0, 64


class Slow(MemoryStore):
    """Holds who asks for the page ``slow`` until ``over``; does not know the size of the page ``broken``."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def size(self, key: str) -> int | None:
        if key == "broken":
            raise OSError("the disk is gone")
        return super().size(key)

    def get(self, key: str) -> bytes | None:
        if key == "slow":
            self.over.wait(LONG)
        return super().get(key)


@pytest.fixture
def store() -> Iterator[Slow]:
    store = Slow()
    yield store
    store.over.set()


@pytest.fixture
def page() -> tuple[tuple[int, int], ...]:
    buffer = ctypes.create_string_buffer(PAGE_BYTES)
    return ((ctypes.addressof(buffer), len(buffer)),)


def calls(call: str, end: str) -> float:
    return REGISTRY.get_sample_value("kvgrpc_storage_calls_total", {"call": call, "end": end}) or 0.0


def threads(kind: str) -> tuple[float | None, float | None]:
    names = ("kvgrpc_storage_threads", "kvgrpc_storage_threads_hung")
    there, hung = (REGISTRY.get_sample_value(name, {"kind": kind}) for name in names)
    return there, hung


class Threads:
    def __init__(self, there: int, hung: int) -> None:
        self.numbers = there, hung

    def storage_threads(self) -> Sequence[tuple[str, int, int]]:
        return [("of this test", *self.numbers)]


def test_threads_of_a_process_are_one_sum_as_long_as_their_owners_are_open() -> None:
    first, second = Threads(4, 1), Threads(2, 2)
    watch_storage(first)
    watch_storage(second)
    assert threads("of this test") == (6, 3)
    forget_storage(first)
    forget_storage(first)
    assert threads("of this test") == (2, 2)
    del second
    wait_until(lambda: threads("of this test") == (None, None))


def test_a_call_that_hangs_holds_one_thread_until_it_returns(store: Slow, page: tuple[tuple[int, int], ...]) -> None:
    backend = FlatBackend("slow", store, threads=3)
    assert backend._calls in observed._WATCHED
    before = calls("read", "timeout")
    (result,) = backend.read(["slow"], [page], 0.05)
    assert result.status is PageStatus.TIMEOUT and calls("read", "timeout") > before
    assert backend._calls.storage_threads() == [("page", 3, 1)]
    assert not backend.close(0.0)
    assert backend._calls in observed._WATCHED, "one of its threads is still held"
    store.over.set()
    wait_until(lambda: backend._calls.storage_threads() == [("page", 3, 0)])
    assert backend.close(LONG)
    assert backend._calls not in observed._WATCHED


def test_calls_are_counted_by_their_end(store: Slow, page: tuple[tuple[int, int], ...]) -> None:
    """A page that is not there fails no call; a store that cannot say whether it is there does."""
    backend = FlatBackend("slow", store, threads=3)
    ends = [("write", "ok"), ("read", "ok"), ("write", "failed"), ("ask", "ok"), ("ask", "down")]
    before = [calls(call, end) for call, end in ends]
    backend.write(["a"], [page], LONG)
    backend.read(["a", "b"], [page, page], LONG)
    backend.write(["broken", "c"], [page, page], LONG)
    assert backend.count_leading(["a", "c", "d"], LONG) == 2
    with pytest.raises(StorageDown):
        backend.contains(["broken"], LONG)
    for (call, end), then in zip(ends, before, strict=True):
        assert calls(call, end) > then, (call, end)
    assert backend.close(LONG)
