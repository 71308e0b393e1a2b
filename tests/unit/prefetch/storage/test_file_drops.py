"""What a folder's pages leave behind when they go: it is told many at a time, and no bad page keeps the others."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvgrpc.prefetch.storage import listeners
from kvgrpc.prefetch.storage.base import OK, StorageDown
from kvgrpc.prefetch.storage.file.backend import FileBackend, FileConfig
from tests.conformance.storage.pages import Arena

SECONDS = 20.0
BLOCK = 4096
COUNT = 10
PAGE, LARGE = 2 * BLOCK, 9 * BLOCK  # of disk, with the header


class Rig:
    """A folder of ``COUNT`` pages, which is full, and what is told of it."""

    def __init__(self, folder: Path) -> None:
        self.backend = FileBackend(FileConfig(path=str(folder), max_bytes=COUNT * PAGE))
        self.keys = [f"model/{number}" for number in range(COUNT)]
        small = Arena(COUNT, BLOCK, 1)
        assert self.backend.write(self.keys, small.pages(), SECONDS) == [OK] * COUNT
        self.told: list[list[str]] = []
        self.backend.on_removed(self._tell)

    def _tell(self, keys: Sequence[str]) -> None:
        self.told.append(list(keys))

    def gone(self) -> list[str]:
        there = self.backend.contains(self.keys, SECONDS)
        return [key for key, found in zip(self.keys, there, strict=True) if not found]

    def told_keys(self) -> list[str]:
        return sorted(key for keys in self.told for key in keys)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_what_a_clear_drops_is_told_many_at_a_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "TOLD_AT_ONCE", 4)
    assert rig.backend.clear("model/") == COUNT
    assert [len(keys) for keys in rig.told] == [4, 4, 2]
    assert rig.told_keys() == rig.gone() == rig.keys
    assert rig.backend.close(SECONDS)


def test_what_a_clear_dropped_before_it_failed_is_told(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, left = rig.backend._folder.remove, [None] * 3

    def breaks(name: str) -> bool:
        if not left:
            raise OSError(errno.EIO, "injected")
        left.pop()
        return remove(name)

    monkeypatch.setattr(rig.backend._folder, "remove", breaks)
    with pytest.raises(StorageDown):
        rig.backend.clear("model/")
    assert len(rig.gone()) == 3 and rig.told_keys() == rig.gone() and len(rig.told) == 1
    assert rig.backend.close(SECONDS)


def test_all_pages_that_make_room_for_one_are_told_at_once(rig: Rig) -> None:
    large = Arena(1, LARGE - BLOCK, 1)
    assert rig.backend.write(["large"], large.pages(), SECONDS) == [OK]
    assert len(rig.gone()) == 5 and rig.told_keys() == rig.gone() and len(rig.told) == 1
    assert rig.backend.close(SECONDS)


class TestAPageWhoseHeaderTheDiskDoesNotRead:
    @pytest.fixture(autouse=True)
    def broken(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> str:
        name, pread = rig.backend._form.path(rig.keys[0]), os.pread
        assert name is not None
        path = rig.backend._folder.path(name)

        def breaks(descriptor: int, count: int, offset: int) -> bytes:
            if os.readlink(f"/proc/self/fd/{descriptor}") == path:
                raise OSError(errno.EIO, "injected")
            return pread(descriptor, count, offset)

        monkeypatch.setattr(os, "pread", breaks)
        return path

    def test_it_keeps_no_other_from_being_cleared(self, rig: Rig, broken: str) -> None:
        assert rig.backend.clear("model/", SECONDS) == COUNT - 1
        assert rig.told_keys() == rig.keys[1:] and os.path.exists(broken), "whose it is, nobody knows"
        assert rig.backend.clear("", SECONDS) == 1 and not os.path.exists(broken)
        assert rig.backend.close(SECONDS)

    def test_it_makes_room_as_any_other(self, rig: Rig, broken: str) -> None:
        large = Arena(1, COUNT * PAGE - BLOCK, 1)
        assert rig.backend.write(["large"], large.pages(), SECONDS) == [OK]
        assert rig.told_keys() == rig.keys[1:] and not os.path.exists(broken)
        assert rig.backend.close(SECONDS)
