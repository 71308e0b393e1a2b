"""The whole controller (cache, copies, agreement, storage) while a part of it fails under load: no lost page, no hang,
no wrong byte. Each test prints its figures (``pytest -s``)."""

from __future__ import annotations

import os
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.prefetch.model import OperationKind, OperationRow, OperationState, PageOutcome, WritePolicy
from kvgrpc.prefetch.storage import open_backend
from tests.faults.storage import FaultyBackend
from tests.support.tiered_engine import SECONDS, Engine


def conversation(chance: random.Random, name: str) -> list[str]:
    """Hashes that cover what lies before them; conversations of one number begin alike."""
    text = f"{name} {chance.randint(0, 40)}-"
    words = [text + str(turn) for turn in range(chance.randint(1, 12))]
    return ["|".join(words[: end + 1]) for end in range(len(words))]


def converse(engine: Engine, chance: random.Random, name: str, requests: int) -> list[list[str]]:
    """Requests in any order, some of them prefetched, some after an eviction; each page used has its own bytes."""
    asked = []
    for _ in range(requests):
        hashes = conversation(chance, name)
        asked.append(hashes)
        if chance.random() < 0.4:
            engine.controller.prefetch(hashes)
        if chance.random() < 0.1:
            engine.cache.evict_device(chance.randint(1, 24))
        if chance.random() < 0.1:
            engine.cache.evict_host(chance.randint(1, 40))
        engine.request(hashes)
    return asked


def backups(engine: Engine) -> list[OperationRow]:
    """All that were begun, once they have ended."""
    assert engine.controller.book.wait_idle(SECONDS), "an operation hangs"
    book = engine.controller.book
    return [book.row(each) for each in book.all() if each.kind is OperationKind.BACKUP]


def written_pages(engine: Engine) -> list[str]:
    """Pages that storage said it has taken."""
    assert engine.controller.book.wait_idle(SECONDS), "an operation hangs"
    return [
        page_hash
        for each in engine.controller.book.all()
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
        assert (operation.state, operation.completed) == (OperationState.DONE, leading), operation.row()
        before = engine.loaded
        engine.request(list(hashes[:leading]))
        assert engine.loaded - before == leading
        back += leading
    return back


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB: some 120 pages of the tiered engine, each in a file of two blocks."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small tmpfs")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True, timeout=SECONDS)


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
        f"{back} came back with their bytes, lost 0, longest backup {longest:.3f} s"
    )
