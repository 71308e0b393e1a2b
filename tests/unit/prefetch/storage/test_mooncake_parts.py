"""What the Store's codes become, which pages count as lost, and how calls end."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from kvgrpc.prefetch.model import NotEnoughPages
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.shape import HostLayout, PageShape
from kvgrpc.prefetch.storage.base import MemoryRange, PageStatus, leading_pages
from kvgrpc.prefetch.storage.mooncake import backend as backend_module
from kvgrpc.prefetch.storage.mooncake.child import Child
from kvgrpc.prefetch.storage.mooncake.link import Link, NotShared, Pending
from kvgrpc.prefetch.storage.mooncake.messages import Area, Call, Gone, Reply, Start, Wire, is_lost, result_of
from kvgrpc.prefetch.storage.mooncake.windows import SharedFile, StoreStaging, Windows, shared_file

SECONDS = 20.0
Connected = tuple[Link, Callable[[type[Any]], Any]]


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
    monkeypatch.setattr("kvgrpc.prefetch.storage.mooncake.backend.time.monotonic", lambda: now[0])
    pages = backend_module.RecentlyUnreadable(5.0)
    pages.add("a")
    assert "a" in pages and "b" not in pages
    now[0] = 105.1
    assert "a" not in pages
    monkeypatch.setattr(backend_module, "_MOST", 3)
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
    staging = StoreStaging(1 << 16, lanes=2)
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
        assert not isinstance(taken, NotEnoughPages) and taken.tolist() == [0]
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
            assert link.areas == 1, "of the one before nothing is left"
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

    def test_a_range_that_was_taken_out_is_copied_and_unmapped(self) -> None:
        link = RecordedLink()
        windows = Windows(link)  # type: ignore[arg-type]
        hosts = [HostPool(PageShape.mha(3, 4, 2, 8, "float16"), 8) for _ in range(2)]
        for host in hosts:
            windows.add(host.ranges)
            windows.add([MemoryRange(host.address + 4096, 64)])  # lies within
        assert link.areas == 2
        windows.remove(hosts[0].ranges)
        windows.remove(hosts[0].ranges)
        assert windows.find(hosts[0].page_buffers(0)) is None and link.areas == 1
        assert windows.find(hosts[1].page_buffers(0)) is not None
        windows.remove([MemoryRange(hosts[1].address + hosts[1].nbytes - 1, 1)])
        assert windows.find(hosts[1].page_buffers(0)) is None, "a part of it is gone, so it is no range any more"
        assert link.areas == 0
        windows.add(hosts[0].ranges)
        assert windows.find(hosts[0].page_buffers(0)) is not None and link.areas == 1
        link.close()
        assert all(host.close() for host in hosts)

    def test_the_other_process_unmaps_what_it_is_told_is_gone(self) -> None:
        registered: set[int] = set()

        def register(address: int, nbytes: int) -> int:
            registered.add(address)
            return 0

        def unregister(address: int) -> int:
            registered.remove(address)
            return 0

        store = SimpleNamespace(register_buffer=register, unregister_buffer=unregister)
        child = Child(Wire(socket.socketpair()[0]), store, threads=0)
        descriptor = os.memfd_create("unmapped-when-gone")
        os.ftruncate(descriptor, 1 << 16)
        status = os.fstat(descriptor)
        child._map(Area(1, os.getpid(), descriptor, 0, 1 << 16, (status.st_dev, status.st_ino)))
        assert mappings("unmapped-when-gone") == len(registered) == 1
        child._unmap(1)
        child._unmap(1)
        assert mappings("unmapped-when-gone") == len(registered) == 0
        child._map(Area(2, os.getpid(), descriptor, 0, 1 << 16, (status.st_dev, status.st_ino)))
        store.unregister_buffer = lambda address: -1
        child._unmap(2)
        assert mappings("unmapped-when-gone") == 1, "the library may still move bytes there"
        os.close(descriptor)


class TestSharing:
    """What the other process is told of, and when it hears that it is over."""

    def test_an_area_in_use_goes_when_the_last_call_that_names_it_has_ended(self, connected: Connected) -> None:
        link, heard = connected
        first, second = (link.share(SharedFile(5, 0, (0, 1)), 1 << 16) for _ in range(2))
        assert [heard(Area).number for _ in range(2)] == [first, second]
        deadline = time.monotonic() + SECONDS
        for area in (first, first, second):
            link.call("get", ["k"], deadline, [[(area, 0, 8)]])
        numbers = [heard(Call).number for _ in range(3)]
        link.unshare(first)
        with pytest.raises(NotShared):
            link.call("get", ["k"], deadline, [[(second, 0, 8), (first, 0, 8)]])
        link._end(Reply(numbers[0], [8], [0]))
        link._end(Reply(numbers[2], [8], [0]))
        link.call("exist", ["k"], deadline)
        assert heard(Call).what == "exist", "and nothing before it: a call is still in the area"
        link._end(Reply(numbers[1], [8], [0]))
        assert heard(Gone).number == first
        link.unshare(second)
        assert heard(Gone).number == second
        assert link.share(SharedFile(5, 0, (0, 1)), 1 << 16) not in (first, second), "no number comes twice"

    def test_a_process_that_died_is_told_nothing_and_the_next_one_hears_only_of_what_is_left(
        self, connected: Connected
    ) -> None:
        link, _ = connected
        gone, left = (link.share(SharedFile(5, 0, (0, 1)), 1 << 16) for _ in range(2))
        pending = link.call("get", ["k"], time.monotonic() + SECONDS, [[(gone, 0, 8)]])
        link.unshare(gone)
        link._wire = None
        pending.end(None)
        ours, theirs = socket.socketpair()
        link._set_ready(Wire(ours))
        decoder = msgspec.msgpack.Decoder(Area | Call | Gone)
        ours.shutdown(socket.SHUT_WR)
        new = Wire(theirs)
        assert [new.receive(decoder), new.receive(decoder)] == [link._areas[left], None]
        new.close()


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connected]:
    """A link whose other process is this test: what it is told next."""
    monkeypatch.setattr(Link, "_keep_alive", lambda link: None)
    link = Link(Start("127.0.0.1", "127.0.0.1:1", "tcp", "", 0, 0, 1))
    ours, theirs = socket.socketpair()
    wire, decoder = Wire(theirs), msgspec.msgpack.Decoder(Area | Call | Gone)
    theirs.settimeout(SECONDS)
    link._set_ready(Wire(ours))

    def heard(kind: type[Any]) -> Any:
        message = wire.receive(decoder)
        assert isinstance(message, kind)
        return message

    yield link, heard
    assert link.close(SECONDS)
    wire.close()
    ours.close()


def mappings(name: str) -> int:
    """Of a memfd of this process, in it."""
    with open("/proc/self/maps") as maps:
        return sum(f"/memfd:{name} " in line for line in maps)


class RecordedLink:
    """Maps what it is told of, as the other process does."""

    def __init__(self) -> None:
        self._areas: dict[int, mmap.mmap] = {}
        self._number = 0

    @property
    def areas(self) -> int:
        return len(self._areas)

    def share(self, file: SharedFile, nbytes: int) -> int:
        descriptor = os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDWR)
        self._number += 1
        self._areas[self._number] = mmap.mmap(descriptor, nbytes, offset=file.offset)
        os.close(descriptor)
        return self._number

    def unshare(self, number: int) -> None:
        self._areas.pop(number).close()

    def bytes_at(self, pieces: list[tuple[int, int, int]]) -> bytes:
        return b"".join(self._areas[area][offset : offset + nbytes] for area, offset, nbytes in pieces)

    def close(self) -> None:
        for area in self._areas.values():
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
