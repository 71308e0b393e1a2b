"""The storage backend ``mooncake`` over a real Store whose parts are killed, stopped and filled."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial

import psutil
import pytest

from kvgrpc.errors import FeatureDisabled
from kvgrpc.prefetch.storage import open_backend
from kvgrpc.prefetch.storage.base import OK, PageResult, PageStatus, StorageBackend, StorageDown, Unregisters
from kvgrpc.prefetch.storage.mooncake.local import LocalStore, master_command
from kvgrpc.prefetch.storage.mooncake.windows import Windows
from tests.support import waiting
from tests.support.storage_pages import Arena

pytestmark = pytest.mark.timeout(150)
wait_until = partial(waiting.wait_until, seconds=60.0)  # processes start
SECONDS = 30.0
PAGES = 16
KEYS = [f"page-{number}" for number in range(PAGES)]


@pytest.fixture(autouse=True)
def mooncake() -> None:
    try:
        master_command()
    except FeatureDisabled as error:
        pytest.skip(error.message)


@pytest.fixture
def store() -> Iterator[LocalStore]:
    with LocalStore(owners=1, client_ttl=3) as store:
        yield store


@pytest.fixture
def backend(store: LocalStore) -> Iterator[StorageBackend]:
    backend = opened(store)
    yield backend
    assert backend.close(SECONDS)


@pytest.fixture
def arena(backend: StorageBackend) -> Arena:
    arena = Arena(PAGES, shared=True)
    backend.register([arena.range])
    return arena


def opened(store: LocalStore, **settings: object) -> StorageBackend:
    return open_backend("mooncake", {"master": store.address, "lost_seconds": 5, **settings})


def child() -> psutil.Process:
    """The process that talks to the Store for us: the youngest, fixtures of other modules may have theirs."""
    children = psutil.Process().children()
    return max(
        (each for each in children if "kvgrpc.prefetch.storage.mooncake.child" in each.cmdline()),
        key=psutil.Process.create_time,
    )


def statuses(results: list[PageResult]) -> set[PageStatus]:
    return {result.status for result in results}


def stored(backend: StorageBackend, arena: Arena) -> list[bytes]:
    written = arena.fill_all()
    assert backend.write(KEYS, arena.pages(), SECONDS) == [OK] * PAGES
    return written


def works_again(backend: StorageBackend, arena: Arena) -> bool:
    arena.fill_all()
    return backend.write(KEYS, arena.pages(), SECONDS) == backend.read(KEYS, arena.pages(), SECONDS) == [OK] * PAGES


@pytest.mark.slow
def test_without_a_master_it_opens_and_connects_when_there_is_one() -> None:
    store = LocalStore(owners=0)
    began = time.monotonic()
    backend, arena = opened(store, start_timeout=0.5), Arena(1)
    assert time.monotonic() - began < 10, "not the minute and a half that the client's setup takes"
    try:
        assert not backend.stats().healthy and "no master there" in backend.stats().detail
        began = time.monotonic()
        with pytest.raises(StorageDown, match="no master there"):
            backend.count_leading(KEYS, SECONDS)
        (result,) = backend.read(KEYS[:1], arena.pages(), SECONDS)
        assert result.status is PageStatus.FAILED and result.retryable and result.quiescent
        assert time.monotonic() - began < 5, "answered at once"
        with store:
            store.add_owner()
            wait_until(lambda: backend.stats().healthy)
            assert backend.write(KEYS[:1], arena.pages(), SECONDS) == [OK]
    finally:
        assert backend.close(SECONDS)


def test_a_killed_master_costs_no_call_more_than_its_time_out(
    store: LocalStore, backend: StorageBackend, arena: Arena
) -> None:
    stored(backend, arena)
    store.kill_master()
    for _ in range(10):
        began = time.monotonic()
        results = backend.read(KEYS, arena.pages(), 1.0)
        with pytest.raises(StorageDown):
            backend.count_leading(KEYS, 1.0)
        assert time.monotonic() - began < 4.0, "the client alone would block for 4.2 s a call"
        assert PageStatus.OK not in statuses(results) and PageStatus.MISSING not in statuses(results)
    wait_until(lambda: all(result.quiescent for result in results))
    assert not backend.stats().healthy


@pytest.mark.slow
def test_a_master_that_is_started_again_has_lost_its_pages_and_takes_new_ones(
    store: LocalStore, backend: StorageBackend, arena: Arena
) -> None:
    stored(backend, arena)
    store.kill_master()
    backend.read(KEYS, arena.pages(), 1.0)
    store.start_master()
    wait_until(lambda: backend.stats().healthy)
    assert backend.count_leading(KEYS, SECONDS) == 0
    wait_until(lambda: works_again(backend, arena))


@pytest.mark.slow
def test_of_two_owners_one_is_killed_and_the_others_pages_stay(
    store: LocalStore, backend: StorageBackend, arena: Arena
) -> None:
    # With one owner all pages are on it; those written after a second one came are on either.
    written = stored(backend, arena)
    store.add_owner(256 << 20)
    more = [f"more-{number}" for number in range(PAGES)]
    assert backend.write(more, arena.pages(), SECONDS) == [OK] * PAGES
    store.owners[0].kill()
    arena.clear()
    first = backend.read(KEYS, arena.pages(), 20.0)
    assert PageStatus.OK not in statuses(first), "their owner is gone"
    assert backend.contains(KEYS, SECONDS) == [False] * PAGES, "although the Store goes on to say that it has them"
    arena.clear()
    second = backend.read(more, arena.pages(), 20.0)
    assert PageStatus.OK in statuses(second)
    assert all(arena.bytes(number) == written[number] for number, result in enumerate(second) if result.ok)
    wait_until(lambda: works_again(backend, arena))


@pytest.mark.slow
def test_a_full_store_fails_pages_one_by_one_and_takes_others_later(store: LocalStore, backend: StorageBackend) -> None:
    arena = Arena(96, nbytes=512 << 10, shared=True)  # 96 MiB into 64 MiB
    backend.register([arena.range])
    written = arena.fill_all()
    names = [f"large-{number}" for number in range(96)]
    results = backend.write(names, arena.pages(), SECONDS)
    full = [result for result in results if not result.ok]
    assert 0 < len(full) < 96
    assert all(result.status is PageStatus.FAILED and result.retryable for result in full)
    assert all("no space" in result.detail or "evicted" in result.detail for result in full)
    arena.clear()
    there = backend.read(names, arena.pages(), SECONDS)
    assert statuses(there) <= {PageStatus.OK, PageStatus.MISSING}
    assert all(arena.bytes(number) == written[number] for number, result in enumerate(there) if result.ok)
    wait_until(lambda: backend.write(["later"], [arena.page(0)], SECONDS) == [OK])


@pytest.mark.slow
def test_a_process_that_hangs_gives_the_pages_back_when_it_is_killed(backend: StorageBackend, arena: Arena) -> None:
    stored(backend, arena)
    hung = child()
    hung.send_signal(signal.SIGSTOP)
    results = backend.read(KEYS, arena.pages(), 0.3)
    assert statuses(results) == {PageStatus.TIMEOUT}
    assert not any(result.quiescent for result in results), "it may go on at any time"
    assert backend.stats().in_use == PAGES
    wait_until(lambda: all(result.quiescent for result in results))
    assert not hung.is_running()
    wait_until(lambda: backend.stats().healthy)
    assert works_again(backend, arena)


def test_a_pool_that_was_closed_is_mapped_nowhere_and_one_in_use_until_nobody_uses_it(
    backend: StorageBackend,
) -> None:
    assert isinstance(backend, Unregisters)
    arena, other = (Arena(PAGES, shared=True) for _ in range(2))
    for _ in range(3):
        backend.register([arena.range, other.range])
        assert shown_to_the_child(backend, arena) == 2
        backend.unregister([arena.range])
        assert shown_to_the_child(backend, other) == 1
        assert works_again(backend, arena), "with a copy"
        arena.clear()
    backend.register([arena.range])
    assert shown_to_the_child(backend, arena) == 2
    child().send_signal(signal.SIGSTOP)
    results = backend.read(KEYS, arena.pages(), 0.3)
    assert statuses(results) == {PageStatus.TIMEOUT} and not any(result.quiescent for result in results)
    backend.unregister([arena.range, other.range])
    assert mapped_by(child()) == 2
    child().send_signal(signal.SIGCONT)
    wait_until(lambda: mapped_by(child()) == 0)
    assert all(result.quiescent for result in results)
    assert works_again(backend, other)


def test_a_call_that_comes_to_a_range_after_its_end_copies(
    backend: StorageBackend, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked the range up just before."""
    windows: Windows = backend._windows  # type: ignore[attr-defined]
    found = {page: windows.find(page) for page in arena.pages()}
    assert None not in found.values() and isinstance(backend, Unregisters)
    backend.unregister([arena.range])
    monkeypatch.setattr(windows, "find", found.get)
    written = stored(backend, arena)
    arena.clear()
    assert backend.read(KEYS, arena.pages(), SECONDS) == [OK] * PAGES
    assert [arena.bytes(number) for number in range(PAGES)] == written


def shown_to_the_child(backend: StorageBackend, arena: Arena) -> int:
    """Mappings, once a call has gone the way of those that were made or ended before it."""
    assert works_again(backend, arena)
    return mapped_by(child())


def mapped_by(process: psutil.Process) -> int:
    """How many times the memory of an arena is mapped there."""
    with open(f"/proc/{process.pid}/maps") as maps:
        return sum("/memfd:pages " in line for line in maps)


@pytest.mark.slow
def test_pages_that_are_copied_are_free_at_once(backend: StorageBackend, arena: Arena) -> None:
    stored(backend, arena)
    private = Arena(PAGES)
    child().send_signal(signal.SIGSTOP)
    results = backend.read(KEYS, private.pages(), 0.3)
    assert statuses(results) == {PageStatus.TIMEOUT} and all(result.quiescent for result in results)
    wait_until(lambda: backend.stats().healthy and works_again(backend, private))


@pytest.mark.slow
def test_a_killed_process_is_replaced(backend: StorageBackend, arena: Arena) -> None:
    written = stored(backend, arena)
    for _ in range(3):
        child().kill()
        wait_until(lambda: not backend.stats().healthy)
        wait_until(lambda: backend.stats().healthy)
        arena.clear()
        assert backend.read(KEYS, arena.pages(), SECONDS) == [OK] * PAGES, "the Store still has them"
        assert [arena.bytes(number) for number in range(PAGES)] == written


@pytest.mark.slow
def test_a_hung_owner_ends_in_a_reason_and_not_in_a_hang(
    store: LocalStore, backend: StorageBackend, arena: Arena
) -> None:
    written = stored(backend, arena)
    os.kill(store.owners[0].pid, signal.SIGSTOP)
    began = time.monotonic()
    results = backend.read(KEYS, arena.pages(), 2.0)
    assert time.monotonic() - began < 6.0
    assert PageStatus.OK not in statuses(results)
    os.kill(store.owners[0].pid, signal.SIGCONT)
    wait_until(lambda: all(result.quiescent for result in results))

    def back() -> bool:
        arena.clear()
        there = backend.read(KEYS, arena.pages(), SECONDS)
        assert all(arena.bytes(number) == written[number] for number, result in enumerate(there) if result.ok)
        return there == [OK] * PAGES

    wait_until(lambda: back() or works_again(backend, arena))


@pytest.mark.slow
def test_namespaces_share_a_store_and_clear_only_themselves(store: LocalStore) -> None:
    ours, theirs, arena = opened(store, namespace="ours"), opened(store, namespace="ours-too"), Arena(2)
    arena.fill_all()
    assert ours.write(KEYS[:2], arena.pages(), SECONDS) == [OK] * 2
    assert theirs.count_leading(KEYS, SECONDS) == 0
    assert theirs.write(KEYS[:1], [arena.page(1)], SECONDS) == [OK]
    ours.clear()
    assert (ours.count_leading(KEYS, SECONDS), theirs.count_leading(KEYS, SECONDS)) == (0, 1)
    assert ours.close(SECONDS) and theirs.close(SECONDS)


@pytest.mark.slow
def test_nothing_is_left_of_a_closed_backend(store: LocalStore) -> None:
    before = set(psutil.Process().children(recursive=True))
    descriptors, threads = psutil.Process().num_fds(), psutil.Process().num_threads()
    for _ in range(3):
        backend, arena = opened(store), Arena(1)
        arena.fill_all()
        assert backend.write(["k"], arena.pages(), SECONDS) == [OK]
        assert backend.close(SECONDS)
    assert set(psutil.Process().children(recursive=True)) == before
    assert psutil.Process().num_fds() <= descriptors + 1 and psutil.Process().num_threads() <= threads


@pytest.mark.slow
def test_a_process_that_cannot_start_says_why_and_is_not_started_without_end(store: LocalStore) -> None:
    backend = opened(store, segment_bytes=1 << 50, start_timeout=1)
    try:
        given_up = ("setup returned", "process did not start")
        wait_until(lambda: any(words in backend.stats().detail for words in given_up))
        with pytest.raises(StorageDown, match=r"setup returned|did not start"):
            backend.count_leading(KEYS, 1.0)
    finally:
        assert backend.close(SECONDS)
