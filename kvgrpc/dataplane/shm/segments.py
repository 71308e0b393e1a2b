"""Memory that another process of the same host can map, and that vanishes with its last user.

A segment is a memfd, which a peer opens as ``/proc/<pid>/fd/<n>``. It has no name in ``/dev/shm`` that a killed process
would leave behind, and neither the size of ``/dev/shm`` (64 MB in a container) nor its permissions matter. The random
name of the memfd proves that the right one was opened, not one of a recycled pid. It is sealed against shrinking, so
that no owner can make a writer fault.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
from dataclasses import dataclass

import numpy as np

from kvgrpc.errors import PeerUnreachable

_PAGE = mmap.PAGESIZE
_TOUCH_BYTES = 8 << 20
_MADV_POPULATE_WRITE = 23
_madvise = ctypes.CDLL(None, use_errno=True).madvise


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory of this process that others can map: its address here, its size, and the memfd behind it."""

    address: int
    nbytes: int
    memory: mmap.mmap
    descriptor: int

    def free(self) -> None:
        """Unmaps it here. It lives on where peers have mapped it."""
        self.memory.close()
        os.close(self.descriptor)


class Mapping:
    """A peer's segment, mapped here: unmapped when nothing refers to this object any more."""

    __slots__ = ("_memory", "address", "nbytes")

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.address = _start(memory)
        self.nbytes = len(memory)

    def touch(self, offset: int) -> int:
        """Enters 8 MiB into the page table (about 3 ms, GIL released) and returns the next offset; only for speed."""
        nbytes = min(_TOUCH_BYTES, self.nbytes - offset)
        populate(self.address + offset, nbytes)
        return offset + nbytes


def create(name: str, nbytes: int) -> Segment:
    """A zeroed and touched segment with an unused page behind it. Raises MemoryError."""
    size = -(-nbytes // _PAGE) * _PAGE
    check_available(size)
    descriptor = os.memfd_create(_memfd_name(name), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size + _PAGE)
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(descriptor, size + _PAGE, flags=mmap.MAP_SHARED)
    except OSError as error:
        os.close(descriptor)
        raise MemoryError(f"no {nbytes} bytes of shared memory: {error}") from error
    if not populate(_start(memory), size):
        np.frombuffer(memory, dtype=np.uint8)[:size:_PAGE] = 0
    return Segment(_start(memory), nbytes, memory, descriptor)


def open_peer(pid: int, descriptor: int, name: str, nbytes: int) -> Mapping:
    """Maps the first ``nbytes`` of a segment of another process, which called it ``name``.

    Raises PeerUnreachable when it is gone, ValueError when it may not be opened or is not what the peer says.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError as error:
        raise ValueError(f"{path} may not be opened: run both processes as one user") from error
    except OSError as error:
        raise PeerUnreachable(f"the peer's memory is gone: {error}", metadata={"address": path}) from error
    try:
        if os.readlink(f"/proc/self/fd/{opened}").partition(" ")[0] != f"/memfd:{_memfd_name(name)}":
            raise PeerUnreachable(
                f"{path} is not the peer's memory any more: pid or descriptor were used again",
                metadata={"address": path},
            )
        if os.fstat(opened).st_size < nbytes or not fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError(f"{path} is shorter than {nbytes} bytes, or could become so")
        return Mapping(mmap.mmap(opened, nbytes, flags=mmap.MAP_SHARED))
    except OSError as error:
        raise PeerUnreachable(f"the peer's memory cannot be mapped: {error}", metadata={"address": path}) from error
    finally:
        os.close(opened)


def _memfd_name(name: str) -> str:
    return f"kvgrpc-{name}"


def check_available(nbytes: int) -> None:
    """Raises MemoryError. The kernel hands out pages until it must kill somebody: ask first."""
    with open("/proc/meminfo") as meminfo:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read(), re.MULTILINE)
    if found and nbytes > int(found[1]) * 1024:
        raise MemoryError(f"{nbytes} bytes of memory, but {int(found[1]) * 1024} are available")


def populate(address: int, nbytes: int) -> bool:
    """Touches memory for writing, GIL released; False on kernels before 5.14."""
    advice = ctypes.c_int(_MADV_POPULATE_WRITE)
    return bool(_madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice) == 0)


def _start(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
