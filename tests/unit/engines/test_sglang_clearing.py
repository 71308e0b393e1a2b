"""A clear of a store that takes longer than SGLang's scheduler may be held."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.engines.sglang.clearing import Clearing
from kvgrpc.prefetch.storage.base import StorageBackend
from kvgrpc.prefetch.storage.file.backend import FileBackend
from tests.support.waiting import wait_until

PAGES = 40


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StorageBackend]:
    backend = FileBackend.of({"path": str(tmp_path / "kv")})
    page = np.zeros(64, np.uint8)
    names = [f"page-{number}" for number in range(PAGES)]
    assert all(result.ok for result in backend.write(names, [((page.ctypes.data, 64),)] * PAGES, 30))
    yield backend
    backend.close(5)


def test_a_store_that_is_soon_empty_is_cleared_at_once(store: StorageBackend) -> None:
    clearing = Clearing()
    assert clearing.clear(store) and not clearing.under_way
    assert store.count("", 30) == 0


def test_the_rest_goes_on_without_the_caller_until_all_is_gone(store: StorageBackend) -> None:
    """With no time a call of this store comes on by one page."""
    clearing = Clearing(seconds=0.0, pause=0.01)
    assert not clearing.clear(store) and clearing.under_way
    assert not clearing.clear(store), "one at a time"
    assert store.count("", 30), "the caller was not held for all of them"
    wait_until(lambda: not clearing.under_way)
    assert store.count("", 30) == 0 and clearing.stop()


def test_a_clear_that_never_ends_is_stopped(store: StorageBackend) -> None:
    store.close(5)
    clearing = Clearing(seconds=0.1, pause=0.01)
    assert not clearing.clear(store)
    began = time.monotonic()
    assert clearing.stop() and time.monotonic() - began < 5
    assert "kvgrpc-clear" not in [thread.name for thread in threading.enumerate()]
    assert clearing.under_way, "nobody may find the pages"


def test_a_machine_without_a_thread_left_is_asked_again(store: StorageBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    clearing = Clearing(seconds=0.0)
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert not clearing.clear(store) and clearing.under_way
    assert any(clearing.clear(store) for _ in range(2 * PAGES))
    assert not clearing.under_way and store.count("", 30) == 0


def test_a_clear_that_cannot_go_on_leaves_what_is_left_to_nobody(
    store: StorageBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def failing(timeout: float) -> None:
        raise MemoryError

    clearing = Clearing(seconds=0.0)
    monkeypatch.setattr(threading.Thread, "start", refused)
    assert not clearing.clear(store) and clearing.under_way
    monkeypatch.setattr(store, "clear", failing)
    with pytest.raises(MemoryError):
        clearing.clear(store)
    assert clearing.under_way, "half of the pages are those of before"
