"""The whole controller (cache, copies, agreement, storage) while a part of it fails under load: no lost page, no hang,
no wrong byte. Each test prints its figures (``pytest -s``)."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from kvgrpc.errors import FeatureDisabled
from kvgrpc.prefetch.model import (
    OperationKind,
    OperationRow,
    OperationState,
    PageOutcome,
    PrefetchLimits,
    Stop,
    WritePolicy,
)
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.storage import open_backend
from kvgrpc.prefetch.storage.mooncake.local import LocalStore, master_command
from tests.support.faults.storage import FaultyBackend
from tests.support.tiered_engine import SECONDS, Engine
from tests.support.waiting import wait_until

LONGEST_REQUEST = 3.0


def conversation(chance: random.Random, name: str) -> list[str]:
    """Hashes that cover what lies before them; conversations of one number begin alike."""
    text = f"{name} {chance.randint(0, 40)}-"
    words = [text + str(turn) for turn in range(chance.randint(1, 12))]
    return ["|".join(words[: end + 1]) for end in range(len(words))]


def converse(engine: Engine, chance: random.Random, name: str, requests: int) -> list[list[str]]:
    """Requests in any order, some of them prefetched, some after an eviction; each page used has its own bytes.

    No request takes as long as storage may: the engine waits for none of it."""
    asked = []
    for _ in range(requests):
        began = time.monotonic()
        hashes = conversation(chance, name)
        asked.append(hashes)
        if chance.random() < 0.4:
            engine.controller.prefetch(hashes)
        if chance.random() < 0.1:
            engine.cache.evict_device(chance.randint(1, 24))
        if chance.random() < 0.1:
            engine.cache.evict_host(chance.randint(1, 40))
        engine.request(hashes)
        assert time.monotonic() - began < LONGEST_REQUEST
    return asked


def ended(engine: Engine) -> list[Operation]:
    """All operations, once none runs, in the order of their ends."""
    assert engine.controller.wait_idle(SECONDS), "an operation hangs"
    return engine.controller.book.all()


def backups(engine: Engine) -> list[OperationRow]:
    return [engine.controller.book.row(each) for each in ended(engine) if each.kind is OperationKind.BACKUP]


def written_pages(engine: Engine) -> list[str]:
    """Pages that storage said it has taken."""
    return [
        page_hash
        for each in ended(engine)
        if each.kind is OperationKind.BACKUP
        for page_hash, outcome in zip(each.hashes, each.outcomes, strict=True)
        if outcome is PageOutcome.OK
    ]


def come_back(engine: Engine, asked: list[list[str]], there: set[str]) -> int:
    """Every leading page that is in storage comes back from there alone, and has its own bytes; how many."""
    back = 0
    for hashes in {tuple(each) for each in asked}:
        leading = next((n for n, each in enumerate(hashes) if each not in there), len(hashes))
        if not leading:
            continue
        engine.cache.evict_device(engine.device_pages)
        engine.cache.evict_host(engine.host_pages)
        operation = engine.controller.prefetch(hashes[:leading])
        assert operation.wait(SECONDS)
        assert (operation.state, operation.completed) == (OperationState.DONE, leading), operation
        before = engine.loaded
        engine.request(list(hashes[:leading]))
        assert engine.loaded - before == leading
        back += leading
    return back


def test_a_full_disk_fails_backups_with_the_remedy_and_nothing_else(small_disk: Path) -> None:
    storage = open_backend("file", {"path": str(small_disk)})
    engine = Engine(WritePolicy.WRITE_THROUGH, storage=FaultyBackend(storage))
    chance = random.Random(12)
    asked = converse(engine, chance, "full", 150)

    rows = backups(engine)
    failed = [row for row in rows if row.state is not OperationState.DONE]
    assert failed, "the disk was not full"
    for row in failed:
        assert row.state in (OperationState.PARTIAL, OperationState.FAILED)
        assert row.failure is not None and "No space left" in row.failure.message
        assert "set max_bytes below what the disk can hold" in row.failure.message
    outcomes = Counter(outcome for row in rows for outcome in row.outcomes)
    assert set(outcomes) == {PageOutcome.OK, PageOutcome.FAILED}, "every page of every batch was tried"
    assert engine.controller.healthy

    kept = written_pages(engine)
    back = come_back(engine, asked, set(kept))

    # Room is made: backups go on without anybody's help.
    gone = set(kept[::2])
    assert storage.delete(sorted(gone), SECONDS) == len(gone)
    before = len(backups(engine))
    more = ["later"] + [f"later {number}" for number in range(7)]
    engine.request(more)
    after = backups(engine)[before:]
    assert [row.state for row in after] == [OperationState.DONE]
    assert come_back(engine, [more], set(more)) == len(more)
    engine.close()
    assert storage.close(SECONDS)
    longest = max(row.took_seconds for row in rows)
    print(
        f"\ndisk full: {len(rows)} backups, {len(failed)} of them failed or partial, pages {dict(outcomes)}, "
        f"{back} came back with their bytes, longest backup {longest:.3f} s"
    )


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("part", ["master", "owner"])
def test_a_store_whose_part_is_killed_under_load_ends_every_operation_and_is_used_again(part: str) -> None:
    try:
        master_command()
    except FeatureDisabled as error:
        pytest.skip(error.message)
    limits = PrefetchLimits(threshold_tokens=4, batch_pages=4, storage_timeout=2.0, operation_timeout=10.0)
    chance = random.Random(7)
    with LocalStore(owners=1, client_ttl=3) as store:
        storage = open_backend("mooncake", {"master": store.address, "lost_seconds": 5})
        engine = Engine(WritePolicy.WRITE_THROUGH, storage=FaultyBackend(storage), limits=limits)
        asked = converse(engine, chance, "before", 40)
        assert {row.state for row in backups(engine)} == {OperationState.DONE}
        back = come_back(engine, asked[:5], set(written_pages(engine)))

        before = len(engine.controller.book.all())
        began = time.monotonic()
        engine.cache.evict_device(engine.device_pages)
        engine.cache.evict_host(engine.host_pages)
        for hashes in asked:
            engine.controller.prefetch(hashes)
        if part == "master":
            store.kill_master()
        else:
            store.owners[0].kill()
        for name in ("before", "during"):
            converse(engine, chance, name, 45)
        requests = time.monotonic() - began
        during = [engine.controller.book.row(each) for each in ended(engine)[before:]]
        idle = time.monotonic() - began
        for row in during:
            assert row.took_seconds < limits.operation_timeout + 2 * limits.storage_timeout + 5.0, row
            if row.kind is OperationKind.BACKUP and row.state is not OperationState.DONE:
                assert row.failure is not None or row.stop is Stop.DEADLINE, row
            if row.state is OperationState.FAILED:
                assert row.failure is not None and "mooncake" in row.failure.message.lower(), row
        assert any(row.state in (OperationState.FAILED, OperationState.EXPIRED) for row in during), "nothing failed"
        assert engine.controller.healthy

        if part == "master":
            store.start_master()
        else:
            store.add_owner()
        began, number = time.monotonic(), 0

        def used_again() -> bool:
            nonlocal number
            number += 1
            names = [f"after {number} {page}" for page in range(6)]
            seen = len(backups(engine))
            engine.request(names)
            if [row.state for row in backups(engine)[seen:]] != [OperationState.DONE]:
                return False
            return come_back(engine, [names], set(names)) == len(names)

        wait_until(used_again, 90.0)
        healed = time.monotonic() - began
        engine.close()
        assert storage.close(SECONDS)
    ends = Counter((row.kind.name, row.state.name, row.stop.name) for row in during)
    print(
        f"\n{part} killed: {back} pages came back before; 90 requests in {requests:.2f} s, all operations ended after "
        f"{idle:.2f} s, the longest after {max(row.took_seconds for row in during):.2f} s; {dict(ends)}; "
        f"used again {healed:.2f} s after its restart"
    )


def open_and_close(folder: Path, cycle: int) -> None:
    """Everything that an engine opens, used and closed again; every third one with work on its way."""
    storage = open_backend("file", {"path": str(folder)})
    engine = Engine(WritePolicy.WRITE_THROUGH, storage=FaultyBackend(storage))
    names = [f"conversation {cycle % 50} {number}" for number in range(6)]
    engine.request(names)
    if cycle % 3:
        assert engine.controller.wait_idle(SECONDS)
        engine.cache.evict_device(engine.device_pages)
        engine.cache.evict_host(engine.host_pages)
    engine.controller.prefetch(names, timeout=3600.0)
    if cycle % 2:
        assert engine.controller.reset(SECONDS)
    engine.request(names)
    host = engine.copies.host
    engine.close()
    assert host.close() and storage.close(SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_thousand_cycles_leave_threads_descriptors_and_memory_flat(tmp_path: Path) -> None:
    me, figures = psutil.Process(), []
    for cycle in range(1000):
        open_and_close(tmp_path / "pages", cycle)
        if cycle in (199, 599, 999):
            gc.collect()
            figures.append((threading.active_count(), me.num_fds(), me.memory_info().rss >> 10))
    print(f"\n(threads, descriptors, KiB) after 200, 600 and 1,000 cycles: {figures}")
    first, last = figures[0], figures[-1]
    assert last[0] <= first[0] and last[1] <= first[1]
    assert last[2] - first[2] < 8 << 10, "800 cycles leave less than 10 KiB each"
