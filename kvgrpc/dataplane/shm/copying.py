"""Copies many pieces of memory within this process, as fast as memcpy allows and without starving other threads.

Three ways, because the GIL decides which is fastest (2 cores, 256 MiB, GB/s with an idle interpreter / with one thread
that computes in pure Python all the time):

- one ``memmove`` for each piece, GIL released around it: 6.8 / 0.2 at 1 MiB, 4.8 / 0.03 at 32 KiB, 2.8 / 0.01 at 4 KiB.
  After a piece the computing thread often has the GIL, and keeps it for its 5 ms.
- ``process_vm_writev`` to ourselves, up to 1,024 pieces in one system call: 5.3 / 1.3, 4.6 / 1.2, 3.1 / 0.6. An address
  that is not mapped is an error here, not the end of the process.
- ``memmove`` with the GIL held: for so little that asking for the GIL again would cost more than the copy.

One core does not fill the memory's bandwidth, so what is large is shared with a second thread (the same machine, idle
interpreter): 4.6 -> 8.1 at 1 MiB by ``memmove``, 3.5 -> 6.2 at 32 KiB and 2.2 -> 4.3 at 4 KiB by the system call, which
does not ask for the GIL between pieces; two threads that do, for small pieces, are slower than one.

``copy_whole`` is for threads that may wait: what follows each other on both sides is one piece there.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from kvgrpc.dataplane.base import U64Array
from kvgrpc.dataplane.ranges import split

PIECE_BYTES = 4 << 20
SLICE_BYTES = 8 << 20
_SLICE_NANOSECONDS = 2_000_000
_CALL_PIECES = 1024  # IOV_MAX
HOLD_BYTES = 128 << 10
_SMALL_PIECE = 16 << 10
_SMALL_SHARED_PIECE = 128 << 10
_SHARED_BYTES = 4 << 20
_CONTENDED_NANOSECONDS = 1_000_000
_FEW_PIECES = 4

_libc = ctypes.CDLL(None, use_errno=True)
_pointer = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value
_signature = (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove = ctypes.CFUNCTYPE(*_signature)(_pointer or 0)
_memmove_holding = ctypes.PYFUNCTYPE(*_signature)(_pointer or 0)


class Pieces:
    """The pieces of one submission: own addresses, own (mapped) addresses, bytes; uint64[n] each, range-checked."""

    __slots__ = ("count", "ends", "nbytes", "source", "target", "total")

    def __init__(self, source: U64Array, target: U64Array, nbytes: U64Array) -> None:
        source, target, nbytes = split(PIECE_BYTES, source, target, nbytes)
        self.nbytes = nbytes
        self.ends = np.cumsum(nbytes, dtype=np.uint64)
        self.source = _iovec(source, nbytes)
        self.target = _iovec(target, nbytes)
        self.count = len(nbytes)
        self.total = int(self.ends[-1]) if self.count else 0

    def done(self, first: int) -> int:
        """Bytes of the pieces before ``first``."""
        return int(self.ends[first - 1]) if first else 0


class Copier:
    """Copies slices of pieces, for one calling thread at a time. Where there are two cores it has a helper thread."""

    def __init__(self, *, helped: bool = True) -> None:
        """``helped``: False: it never has a helper thread."""
        self._vectored = _can_write_to_itself()
        self._contended = False
        helped = helped and len(os.sched_getaffinity(0)) > 1
        self._second = ThreadPoolExecutor(1, "kvgrpc-shm-copy") if helped else None

    def copy(self, pieces: Pieces, first: int) -> int:
        """Copies pieces from ``first`` on, about 8 MiB or 2 ms a thread. Returns the index of the next piece to copy.

        Raises OSError when memory is not there.
        """
        left = pieces.total - pieces.done(first)
        if pieces.total <= HOLD_BYTES:
            return self._hold(pieces, first)
        if self._second is not None and left > _SHARED_BYTES and (self._vectored or not _small(pieces, shared=True)):
            return self._share(self._second, pieces, first)
        return self._watched(self._way(_small(pieces)), pieces, first, _after(pieces, first, SLICE_BYTES))

    def copy_whole(self, source: U64Array, target: U64Array, nbytes: U64Array) -> None:
        """Copies all of it on the calling thread; for any number of threads at once. More than a few pieces are one
        system call, after which the GIL is asked for once. Raises OSError when memory is not there."""
        pieces = Pieces(*joined(source, target, nbytes))
        way = self._call if self._vectored and pieces.count > _FEW_PIECES else self._loop
        first = 0
        while first < pieces.count:
            first = way(pieces, first, pieces.count)

    def close(self) -> None:
        """Ends the second thread; nothing is copied any more."""
        if self._second is not None:
            self._second.shutdown(wait=False)

    def _share(self, second: ThreadPoolExecutor, pieces: Pieces, first: int) -> int:
        """Half of a slice here, half on the other thread. What comes after a gap counts as not copied."""
        slice_bytes = min(2 * SLICE_BYTES, pieces.total - pieces.done(first))
        middle, last = (_after(pieces, first, nbytes) for nbytes in (slice_bytes // 2, slice_bytes))
        way = self._way(_small(pieces, shared=True))
        try:
            there = second.submit(way, pieces, middle, last)
        except RuntimeError:  # the system has no thread left, or Python is ending: one does it from now on
            second.shutdown(wait=False, cancel_futures=True)  # it may have queued what another call would copy late
            self._second = None
            return self._watched(way, pieces, first, middle)
        try:
            here = self._watched(way, pieces, first, middle)
        finally:
            wait([there])
        return there.result() if here == middle else here

    def _way(self, small: bool) -> Callable[[Pieces, int, int], int]:
        return self._call if self._vectored and (small or self._contended) else self._loop

    def _watched(self, way: Callable[[Pieces, int, int], int], pieces: Pieces, first: int, last: int) -> int:
        """Notes whether another thread keeps the GIL from us."""
        began, worked = time.perf_counter_ns(), time.thread_time_ns()
        following = way(pieces, first, last)
        waited = (time.perf_counter_ns() - began) - (time.thread_time_ns() - worked)
        self._contended = waited > _CONTENDED_NANOSECONDS
        return following

    def _hold(self, pieces: Pieces, first: int) -> int:
        for source, target, nbytes in _rows(pieces, first, pieces.count):
            _memmove_holding(target, source, nbytes)
        return pieces.count

    def _loop(self, pieces: Pieces, first: int, last: int) -> int:
        limit = time.perf_counter_ns() + _SLICE_NANOSECONDS
        for number, (source, target, nbytes) in enumerate(_rows(pieces, first, last), first + 1):
            _memmove(target, source, nbytes)
            if time.perf_counter_ns() > limit:
                return number
        return last

    def _call(self, pieces: Pieces, first: int, last: int) -> int:
        last = min(last, first + _CALL_PIECES)
        expected = pieces.done(last) - pieces.done(first)
        count, offset = last - first, first * 16
        copied = _write(pieces.source.ctypes.data + offset, pieces.target.ctypes.data + offset, count)
        if copied == expected:
            return last
        done = np.uint64(pieces.done(first) + copied)
        following = int(np.searchsorted(pieces.ends, done, side="right"))
        if following == first:  # not even one piece: say why, by asking for that piece alone
            _write(pieces.source.ctypes.data + offset, pieces.target.ctypes.data + offset, 1)
            raise OSError(f"piece {first} was copied in part only")
        return following


def joined(source: U64Array, target: U64Array, nbytes: U64Array) -> tuple[U64Array, U64Array, U64Array]:
    """The same bytes in as few pieces as lie together on both sides."""
    if len(nbytes) < 2:
        return source, target, nbytes
    breaks = (source[1:] != source[:-1] + nbytes[:-1]) | (target[1:] != target[:-1] + nbytes[:-1])
    first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    return source[first], target[first], np.add.reduceat(nbytes, first)


def _after(pieces: Pieces, first: int, nbytes: int) -> int:
    """Number of the piece after those from ``first`` on that have ``nbytes`` together, but after one at least."""
    limit = np.uint64(pieces.done(first) + nbytes)
    return max(int(np.searchsorted(pieces.ends, limit, side="right")), first + 1)


def _small(pieces: Pieces, shared: bool = False) -> bool:
    """True if asking for the GIL after each piece costs too much; more when two threads do."""
    return pieces.total < (_SMALL_SHARED_PIECE if shared else _SMALL_PIECE) * pieces.count


def _iovec(addresses: U64Array, nbytes: U64Array) -> U64Array:
    return np.ascontiguousarray(np.stack((addresses, nbytes), axis=1))


def _rows(pieces: Pieces, first: int, last: int) -> zip[tuple[int, int, int]]:
    source, target = pieces.source[first:last, 0], pieces.target[first:last, 0]
    return zip(source.tolist(), target.tolist(), pieces.nbytes[first:last].tolist(), strict=True)


def _write(source: int, target: int, count: int) -> int:
    """Bytes copied from ``count`` iovecs at ``source`` to those at ``target``. Raises OSError when it is none."""
    arguments = ctypes.c_int(os.getpid()), ctypes.c_void_p(source), ctypes.c_ulong(count)
    copied = _libc.process_vm_writev(*arguments, ctypes.c_void_p(target), ctypes.c_ulong(count), ctypes.c_ulong(0))
    if copied < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(copied)


def _can_write_to_itself() -> bool:
    """Old container runtimes and sandboxes forbid the call, and not every libc has it."""
    if not hasattr(_libc, "process_vm_writev"):
        return False
    _libc.process_vm_writev.restype = ctypes.c_ssize_t
    data = np.arange(2, dtype=np.uint64)
    address, eight = np.array([data.ctypes.data], dtype=np.uint64), np.array([8], dtype=np.uint64)
    source, target = _iovec(address + eight, eight), _iovec(address, eight)
    try:
        return _write(source.ctypes.data, target.ctypes.data, 1) == 8 and int(data[0]) == 1
    except OSError:
        return False
