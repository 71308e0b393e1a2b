"""Moves bytes between memory and the one file, by the kernel or by 3FS's own client."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Protocol

from kvgrpc.prefetch.storage.file.io import move_all

_MODULE = "hf3fs_fuse.io"


class Hf3fsClient(Protocol):
    """Of one open file. Called by several threads at once, each with places and memory of its own. Raises OSError."""

    def read(self, offset: int, pieces: Sequence[memoryview]) -> int:
        """Fills the pieces from there on; bytes read, fewer at the file's end."""

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        """All of the pieces, one behind the other."""

    def sync(self) -> None:
        """Returns once what was written is where others see it, and stays there."""

    def close(self) -> None:
        """Once, when no call is on its way. The descriptor stays open."""


class LocalClient:
    """The kernel's own calls: for a local file, and for a mounted 3FS without its client."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, offset: int, pieces: Sequence[memoryview]) -> int:
        return move_all(os.preadv, self._descriptor, pieces, offset)

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        move_all(os.pwritev, self._descriptor, pieces, offset)

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Nothing is held."""


class UsrbioClient:
    """3FS's user-space client, ``hf3fs_fuse.io``, after its interface of 2025: nobody had a cluster to run it on.

    It moves bytes between the file and shared memory that 3FS has mapped, so each page is copied once; a ring and such
    memory for each direction, which calls take in turn.
    """

    def __init__(self, path: str, descriptor: int, most_bytes: int) -> None:
        """``most_bytes``: of one call. Raises ImportError without the package, and what the package raises."""
        self._api: Any = importlib.import_module(_MODULE)
        self._descriptor = descriptor
        mount = self._api.extract_mount_point(path)
        self._api.register_fd(descriptor)
        self._ways = {reads: _Ring(self._api, mount, reads, most_bytes) for reads in (True, False)}

    def read(self, offset: int, pieces: Sequence[memoryview]) -> int:
        with self._ways[True] as ring:
            done = ring.move(self._descriptor, offset, sum(map(len, pieces)))
            start = 0
            for piece in pieces:
                part = ring.memory[start : min(done, start + len(piece))]
                piece[: len(part)] = part
                start += len(piece)
            return done

    def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        with self._ways[False] as ring:
            start = 0
            for piece in pieces:
                ring.memory[start : start + len(piece)] = piece
                start += len(piece)
            if (done := ring.move(self._descriptor, offset, start)) != start:
                raise OSError(f"3FS wrote {done} of {start} bytes")

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        self._api.deregister_fd(self._descriptor)
        for ring in self._ways.values():
            ring.close()


class _Ring:
    """One direction's ring and memory; use it as a context, so that one call has it."""

    def __init__(self, api: Any, mount: str, reads: bool, nbytes: int) -> None:
        self._reads = reads
        self._lock = threading.Lock()
        self._shared = SharedMemory(create=True, size=nbytes)
        self._iov = api.make_iovec(self._shared, mount)
        self._shared.unlink()  # 3FS has it by now
        self._ring = api.make_ioring(mount, 1, self._reads)

    @property
    def memory(self) -> memoryview:
        assert self._shared.buf is not None
        return self._shared.buf

    def __enter__(self) -> _Ring:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def move(self, descriptor: int, offset: int, nbytes: int) -> int:
        self._ring.prepare(self._iov[:nbytes], self._reads, descriptor, offset)
        result: int = self._ring.submit().wait(min_results=1)[0].result
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def close(self) -> None:
        self._ring = self._iov = None
        self._shared.close()
