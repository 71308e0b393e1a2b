"""What an index saves is what it knows again, and nothing that was damaged."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.client.following.saved_index import SavedIndex
from kvgrpc.events.following.contents import CacheContents
from kvgrpc.events.following.index import BlockIndex
from kvgrpc.events.following.saved import SavedCache, SavedCut, pack, unpack
from kvgrpc.events.model import BlockRemoved, BlockStored

SECONDS = 10.0

blocks = st.lists(st.integers(0, 30) | st.integers(2**63, 2**63 + 9), min_size=1, max_size=8)
media = st.sampled_from(["GPU", "CPU", "DISK", "odd"])
stored = st.builds(
    lambda hashes, medium, group: BlockStored(
        block_hashes=hashes,
        block_size=16,
        medium=medium,
        group_idx=group,
        kv_cache_spec_kind="mamba" if group else None,
    ),
    blocks,
    media,
    st.sampled_from([None, 0, 1]),
)
removed = st.builds(lambda hashes, medium: BlockRemoved(block_hashes=hashes, medium=medium), blocks, media)
histories = st.lists(st.lists(stored | removed, max_size=12), min_size=1, max_size=4)


def cut_of(histories: list[list[object]]) -> tuple[SavedCut, list[CacheContents]]:
    index = BlockIndex()
    caches = [CacheContents(index, 7) for _ in histories]
    for contents, events in zip(caches, histories, strict=True):
        contents.apply(events)
    saved = [contents.saved("E", dp, "log") for dp, contents in enumerate(caches)]
    return SavedCut(saved, *index.cut()), caches


def restored(saved: SavedCache) -> CacheContents:
    contents = CacheContents(BlockIndex(), saved.digest.next_sequence)
    for _ in contents.restore(saved):
        continue
    return contents


@given(histories)
def test_every_cache_is_known_again(histories: list[list[object]]) -> None:
    cut, caches = cut_of(histories)
    found = unpack(b"".join(pack(cut)))
    assert list(found) == [("E", dp) for dp in range(len(histories))]
    for saved, contents in zip(found.values(), caches, strict=True):
        again = restored(saved)
        assert again.digest() == contents.digest() == saved.digest
        assert (again.blocks.counts(), again.page_tokens) == (contents.blocks.counts(), contents.page_tokens)
        for each in [*range(31), 2**63]:
            assert again.blocks.media_of(each) == contents.blocks.media_of(each)
        # Copies too: what is removed once is still there where there were two.
        for medium in ("GPU", "CPU", "DISK", "ODD"):
            events = [BlockRemoved(block_hashes=list(range(31)), medium=medium)]
            again.apply(events)
            contents.apply(events)
        assert again.digest() == contents.digest()


@pytest.mark.parametrize("damage", [0, 40, -1])
def test_a_file_with_one_wrong_byte_is_none(damage: int) -> None:
    data = bytearray(b"".join(pack(cut_of([[BlockStored(block_hashes=[1, 2], block_size=16)]])[0])))
    data[damage] ^= 1
    with pytest.raises(ValueError):
        unpack(bytes(data))


@pytest.mark.parametrize("data", [b"", b"\0\0\0\0", b"{}\n"])
def test_what_is_no_saved_index_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(data)


@pytest.mark.parametrize(
    "head",
    [
        b"[]",
        b"[" * 100_000,
        b'{"magic": "kvgrpc index 1", "caches": [{"places": [["GPU", 0, 0, []]]}]}',
        b'{"magic": "kvgrpc index 1", "caches": [{"places": [["GPU", 0, 0, {"1": 10000000000}]]}]}',
    ],
)
async def test_a_file_that_somebody_made_up_is_no_saved_index(
    head: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checksum is right; three of these raised before what the start of an index did not expect."""
    path = tmp_path / "index"
    path.write_bytes(head + b"\n" + zlib.crc32(head + b"\n").to_bytes(4, "little"))
    assert await SavedIndex(str(path)).read(SECONDS) == {}
    assert "is no saved index" in caplog.text


async def test_saves_that_meet_come_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A close saves while the thread of an earlier save goes on."""
    saved, cut = SavedIndex(str(tmp_path / "index")), cut_of([[BlockStored(block_hashes=[1, 2], block_size=16)]])[0]
    loop, second = asyncio.get_running_loop(), []

    def meet(file: int) -> None:
        monkeypatch.undo()
        second.append(asyncio.run_coroutine_threadsafe(saved.write(cut, SECONDS), loop))
        time.sleep(0.3)  # without a turn it is through by then

    monkeypatch.setattr(os, "fsync", meet)
    await saved.write(cut, SECONDS)
    await asyncio.wrap_future(second[0])
    assert caplog.text == ""
    assert list(await saved.read(SECONDS)) == [("E", 0)]
    assert os.listdir(tmp_path) == ["index"]
    assert (tmp_path / "index").stat().st_mode & 0o777 == 0o600


async def test_a_file_system_that_hangs_is_waited_for_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A start waited for ever, and so did the end of the process: for the thread."""
    path = tmp_path / "index"
    os.mkfifo(path)  # whoever reads it waits for a writer
    assert await SavedIndex(str(path)).read(0.1) == {}
    assert "is not read after 0.1 s" in caplog.text
    waiting = [thread for thread in threading.enumerate() if thread.name == "kvgrpc-saved-index"]
    assert waiting and all(thread.daemon for thread in waiting)
    path.write_bytes(b"")
    for thread in waiting:
        thread.join(10)
        assert not thread.is_alive()
