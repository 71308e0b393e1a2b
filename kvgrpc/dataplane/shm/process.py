"""Names a process and its host: lets a peer on the same host be told from one elsewhere, and from a recycled pid."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import msgspec

_PROC = Path("/proc")


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identifies one process for ever. ``start``: clock ticks from boot to its start, so that a reused pid differs.

    ``pids`` and ``network`` name the namespaces in which its pid and its addresses mean something.
    """

    boot: str
    pids: str
    network: str
    pid: int
    start: int

    @property
    def visible(self) -> bool:
        """True if the pid means the same here: same boot, same pid namespace."""
        here = own_identity()
        return (self.boot, self.pids) == (here.boot, here.pids)

    @property
    def alive(self) -> bool:
        """True if it still runs (a zombie does not). Only for a visible one."""
        return start_of(self.pid) == self.start


def own_identity() -> ProcessIdentity:
    """This process, also in a forked child."""
    return _identity_of(os.getpid())


def start_of(pid: int) -> int | None:
    """Clock ticks between boot and the start of a process; None when there is none, or only a zombie."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def socket_inodes(pid: int) -> frozenset[int] | None:
    """Inodes of the sockets that a process holds; None when they may not be read. Empty when there is no process."""
    inodes = set()
    try:
        with os.scandir(_PROC / str(pid) / "fd") as entries:
            for entry in entries:
                try:
                    target = os.readlink(entry.path)
                except FileNotFoundError:
                    continue
                if target.startswith("socket:["):
                    inodes.add(int(target[8:-1]))
    except (FileNotFoundError, ProcessLookupError):
        return frozenset()
    except OSError:
        return None
    return frozenset(inodes)


@cache
def _identity_of(pid: int) -> ProcessIdentity:
    start = start_of(pid)
    if start is None:
        raise RuntimeError("/proc says nothing of this process: mount it")
    return ProcessIdentity(
        boot=(_PROC / "sys/kernel/random/boot_id").read_text().strip(),
        pids=os.readlink(_PROC / "self/ns/pid"),
        network=os.readlink(_PROC / "self/ns/net"),
        pid=pid,
        start=start,
    )
