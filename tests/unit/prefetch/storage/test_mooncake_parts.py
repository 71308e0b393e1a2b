"""What the Store's codes become, which pages count as lost, and how calls end."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvgrpc.prefetch.model import Short
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.shape import HostLayout, PageShape
from kvgrpc.prefetch.storage.base import MemoryRange, PageStatus, leading_pages
from kvgrpc.prefetch.storage.mooncake import lost
from kvgrpc.prefetch.storage.mooncake.child import Child
from kvgrpc.prefetch.storage.mooncake.codes import is_lost, result_of
from kvgrpc.prefetch.storage.mooncake.link import Link, Pending
from kvgrpc.prefetch.storage.mooncake.messages import Area, Call, Reply, Start, Wire
from kvgrpc.prefetch.storage.mooncake.staging import Staging
from kvgrpc.prefetch.storage.mooncake.windows import Windows
from kvgrpc.prefetch.storage.shared import SharedFile, shared_file


@pytest.mark.parametrize("code", [-704, -710, -712])
def test_what_is_not_there_is_missing(code: int) -> None:
    assert result_of(code).status is PageStatus.MISSING


@pytest.mark.parametrize(
    ("code", "retryable", "words"),
    [
        (-1, False, "internal"),
        (-200, True, "no space"),
        (-600, False, "invalid parameters"),
        (-703, True, "still writing"),
        (-707, True, "lease"),
        (-800, True, "transfer failed"),
        (-900, True, "master does not answer"),
        (-1012, False, "not supported"),
        (-12345, True, "unknown code"),
    ],
)
def test_every_other_code_is_a_failure_in_words(code: int, retryable: bool, words: str) -> None:
    result = result_of(code)
    assert (result.status, result.retryable) == (PageStatus.FAILED, retryable)
    assert words in result.detail and str(code) in result.detail


def test_only_a_failed_transfer_means_that_a_page_may_be_lost() -> None:
    assert [code for code in range(-1200, 1) if is_lost(code)] == [-800]


def test_lost_pages_are_remembered_for_a_while_and_not_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("kvgrpc.prefetch.storage.mooncake.lost.time.monotonic", lambda: now[0])
    pages = lost.Lost(5.0)
    pages.add("a")
    assert "a" in pages and "b" not in pages
    now[0] = 105.1
    assert "a" not in pages
    monkeypatch.setattr(lost, "_MOST", 3)
    for name in "abcd":
        pages.add(name)
    assert [name in pages for name in "abcd"] == [False, True, True, True]


def test_a_call_ends_once_and_tells_who_waits() -> None:
    ended: list[str] = []
    pending = Pending(deadline=0.0)
    pending.then(lambda: ended.append("before"))
    assert pending.wait() is None and not pending.ended.is_set()
    pending.end(None)
    pending.then(lambda: ended.append("after"))
    assert ended == ["before", "after"] and pending.ended.is_set()


def test_messages_cross_and_nonsense_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    wire, decoder = Wire(theirs), msgspec.msgpack.Decoder(Call)
    call = Call(7, "get", ["k"] * 3, [[(1, 2, 3), (1, 4, 5)]] * 3, 12.5)
    Wire(ours).send(call)
    assert wire.receive(decoder) == call
    ours.sendall(b"\xff\xff\xff\xff nonsense")
    assert wire.receive(decoder) is None
    assert Reply(1).codes == []
    ours.close()


def test_a_process_that_cannot_be_made_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptors, no memory, no threads: that passes, and until then the store is merely away."""
    tried: list[int] = []
    again = threading.Event()

    def no_process() -> None:
        tried.append(1)
        if len(tried) == 2:
            again.set()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("kvgrpc.prefetch.storage.mooncake.link._spawn", no_process)
    monkeypatch.setattr("kvgrpc.prefetch.storage.mooncake.link._RETRY_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as master:
        link = Link(Start("127.0.0.1", f"127.0.0.1:{master.getsockname()[1]}", "tcp", "", 0, 0, 1))
        try:
            assert again.wait(20) and "Too many open files" in link.down().message
        finally:
            assert link.close(20)


def test_staging_memory_is_unmapped_only_when_nobody_is_in_it() -> None:
    staging = Staging(1 << 16, lanes=2)
    lane = staging.acquire(0.0)
    assert lane is not None and not staging.free(0.0)
    threading.Timer(0.05, staging.release, [lane]).start()
    assert staging.free(30.0)


def test_only_shared_mappings_of_files_that_are_open_can_be_shared() -> None:
    descriptor = os.memfd_create("pages")
    os.ftruncate(descriptor, 1 << 16)
    mapped = mmap.mmap(descriptor, 1 << 16)
    private = mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address, other = (memory_address(each) for each in (mapped, private))
    found = shared_file(address + 8192, 4096)
    assert found is not None and found.offset == 8192
    assert os.fstat(found.descriptor).st_ino == os.fstat(descriptor).st_ino
    assert shared_file(address + 8192, 1 << 16) is None, "not all of it lies inside"
    assert shared_file(other, 4096) is None and shared_file(1, 1) is None
    os.close(descriptor)


class TestWindows:
    """What of our memory the Store's process reads and writes without a copy."""

    @pytest.mark.parametrize("layout", HostLayout)
    def test_every_piece_of_every_page_of_a_host_pool_is_seen(self, layout: HostLayout) -> None:
        host = HostPool(PageShape.mha(3, 4, 2, 8, "float16"), 8, layout)
        link = RecordedLink()
        windows = Windows(link)  # type: ignore[arg-type]
        windows.add(host.ranges)
        taken = host.table.take(1)
        assert not isinstance(taken, Short) and taken.tolist() == [0]
        host.set_flat(0, np.arange(host.shape.page_bytes).astype(np.uint8))
        for page in range(host.pages):
            pieces = windows.find(host.page_buffers(page))
            assert pieces is not None and sum(nbytes for _, _, nbytes in pieces) == host.shape.page_bytes
        assert link.bytes_at(windows.find(host.page_buffers(0)) or []) == host.flat(0).tobytes()
        link.close()
        host.table.release(taken)
        assert host.close()

    def test_memory_of_this_process_alone_is_not(self) -> None:
        private = mmap.mmap(-1, 1 << 16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        windows = Windows(RecordedLink())  # type: ignore[arg-type]
        windows.add([MemoryRange(memory_address(private), 1 << 16)])
        assert windows.find(((memory_address(private), 4096),)) is None

    def test_memory_that_comes_to_the_address_of_other_memory_is_seen_instead(self) -> None:
        """A pool is unmapped, and the next one of a backend that stays open comes to lie where it was."""
        size, link = 1 << 16, RecordedLink()
        windows = Windows(link)  # type: ignore[arg-type]
        place = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = memory_address(place)
        for content in (b"a", b"b"):
            descriptor = os.memfd_create("pages")
            os.write(descriptor, content * size)
            map_at(address, size, descriptor)
            windows.add([MemoryRange(address, size)])
            windows.add([MemoryRange(address + 4096, 4096)])
            assert link.bytes_at(windows.find(((address + 4096, 8),)) or []) == content * 8
            os.close(descriptor)
        map_at(address, size, -1)
        windows.add([MemoryRange(address, size)])
        assert windows.find(((address, 8),)) is None, "what nobody else sees is copied"
        link.close()

    def test_a_descriptor_that_is_another_files_by_now_is_not_mapped(self) -> None:
        """The other process was started anew, and the memory's own descriptor was closed and given away meanwhile."""
        registered: list[int] = []

        def register(address: int, nbytes: int) -> int:
            registered.append(nbytes)
            return 0

        store = SimpleNamespace(register_buffer=register)
        child = Child(Wire(socket.socketpair()[0]), store, threads=0)
        descriptor, other = os.memfd_create("pages"), os.memfd_create("other")
        for each in (descriptor, other):
            os.ftruncate(each, 1 << 16)
        status = os.fstat(descriptor)
        area = Area(1, os.getpid(), descriptor, 0, 1 << 16, (status.st_dev, status.st_ino))
        child._map(area)
        assert registered == [1 << 16]
        os.dup2(other, descriptor)
        child._map(area)
        assert registered == [1 << 16]
        for each in (descriptor, other):
            os.close(each)


class RecordedLink:
    """Maps what it is told of, as the other process does."""

    def __init__(self) -> None:
        self._areas: list[mmap.mmap] = []

    def share(self, file: SharedFile, nbytes: int) -> int:
        descriptor = os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDWR)
        self._areas.append(mmap.mmap(descriptor, nbytes, offset=file.offset))
        os.close(descriptor)
        return len(self._areas) - 1

    def bytes_at(self, pieces: list[tuple[int, int, int]]) -> bytes:
        return b"".join(self._areas[area][offset : offset + nbytes] for area, offset, nbytes in pieces)

    def close(self) -> None:
        for area in self._areas:
            area.close()


def memory_address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def map_at(address: int, nbytes: int, descriptor: int) -> None:
    """Puts a file, or with -1 memory of nobody else, where something else is mapped."""
    kind = mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fixed = 0x10
    assert call(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, kind | fixed, descriptor, 0) == address


@pytest.mark.parametrize("there", [0, 1, 63, 64, 65, 500])
def test_leading_pages_are_asked_for_in_growing_steps(there: int) -> None:
    asked = 0

    def contains(keys: list[str], timeout: float) -> list[bool]:
        nonlocal asked
        asked += len(keys)
        return [int(key) < there for key in keys]

    keys = [str(number) for number in range(500)]
    assert leading_pages(contains, keys, 1.0) == there  # type: ignore[arg-type]
    assert asked <= min(500, 64 + 3 * there)
