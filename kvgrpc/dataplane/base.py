"""What a data plane is: one-sided writes from this process into the registered memory of a peer.

A TransferWorker calls ``submit``, ``poll`` and ``stop``, one thread at a time; nobody else does, except the plane's own
``close``.
All other methods may be called from any thread. Only ``address`` and ``connections_from`` are called on the event loop.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = ["Bounded", "DataPlane", "MemoryRange", "Outcome", "Peer", "Result", "Transfer", "U64Array"]


U64Array = npt.NDArray[np.uint64]


class Outcome(enum.IntEnum):
    """How a submission ended, in the order of certainty (session.md 7): the smaller of two counts for both.

    FAILED_UNKNOWN: the source may still be read and the destination written. FAILED_SRC_FREE: nothing reads the source
    and no byte is left on this host, but the peer's host may still have some to deliver. REJECTED: refused or stopped;
    some bytes may be in place, none is on its way. DONE: all bytes are in place.
    """

    FAILED_UNKNOWN = 0
    FAILED_SRC_FREE = 1
    REJECTED = 2
    DONE = 3


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one submission; ``detail`` says in words what the engine reported (for the room's failure).

    ``nbytes``: bytes known to be in place, all of them for DONE.
    """

    outcome: Outcome
    detail: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Memory of this process that peers may write to, or that is read from. ``location``: "cpu:0", "cuda:3"."""

    address: int
    nbytes: int
    location: str = "cpu:0"


@runtime_checkable
class Bounded(Protocol):
    """What a data plane has besides that bounds what is on its way to one peer. Any thread may ask."""

    @property
    def limits_of_a_peer(self) -> tuple[int, int]:
        """Writes and bytes."""

    def in_flight(self) -> tuple[int, int]:
        """Writes and bytes that are on their way now, to all peers."""


class Transfer(Protocol):
    """One submission on its way."""

    def poll(self) -> Result | None:
        """Moves the submission on without blocking for data; its Result once it is terminal, and ever after.

        At most about 2 ms of work (a busy GIL not counted), so that many submissions can be polled in turn.
        """

    def stop(self) -> None:
        """Starts no further write of this submission; the Result still comes from poll()."""


class Peer(Protocol):
    """The memory of one incarnation of a peer, as its data-plane address said. Opaque."""


class DataPlane(Protocol):
    """See the module. ``name`` is what both sides of a session compare.

    ``poll_interval``: the longest sleep, in seconds, between two rounds of polls that keeps the plane busy; begin with
    a shorter one. 0 where poll() itself does the work (shm): then sleep only when nothing runs.
    ``quick_bytes``: a submission of no more than these takes less time than waking another thread does (some 50 us),
    and its first poll() ends it: nothing in ``submit`` or ``poll`` waits for anybody then. 0: that is never so.
    """

    name: str
    poll_interval: float
    quick_bytes: int

    def allocate(self, nbytes: int, location: str = "cpu:0") -> int:
        """Zeroed memory that this plane can move without a copy, page aligned; its address. Freed by close().

        Touched, so that no transfer meets a page fault, and never adjacent to another block, so that no descriptor
        merged over a border leaves its range. Raises ValueError, MemoryError.
        """

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        """Makes memory known to the engine; repeats are harmless. Raises ValueError for what it cannot move.

        Adjacent ranges of one call become one: register few and large, before the first ``address``.
        """

    def address(self) -> bytes:
        """What a peer needs to write to what is registered now; opaque, at most 64 KiB."""

    def attach(self, address: bytes) -> Peer:
        """Prepares writes to a peer without waiting for it: a peer that does not answer rejects submissions.

        Raises ValueError for nonsense and for what this plane cannot reach (the message says what to do instead), and
        PeerUnreachable when the peer is gone.
        """

    def detach(self, peer: Peer) -> None:
        """Forgets a peer; its submissions have ended."""

    def submit(self, peer: Peer, source: U64Array, destination: U64Array, nbytes: U64Array) -> Transfer:
        """Starts writing ``nbytes[i]`` bytes from ``source[i]`` (own address) to ``destination[i]`` (peer's address).

        uint64[n] each, ``nbytes[i]`` may be 0. Never raises: a refused submission is a Transfer that polls REJECTED,
        also when a descriptor leaves the registered memory of either side (nothing of it is sent then).
        """

    def connections_from(self, address: bytes) -> frozenset[str]:
        """Names of the connections over which a dead peer's bytes could still arrive here (session.md 8).

        ``address``: the peer's; empty: any peer's. Errs towards naming too many: on one host not those that a living
        process uses, but from another host all of that host. So not for a living peer, which needs it not: its plane
        says FAILED_SRC_FREE once its bytes have left its host. A later connection may have the name of one that is
        gone. Empty where the plane has none (shm, RDMA); the settle time then stands alone. Never raises.
        """

    def close(self, deadline: float) -> bool:
        """Stops all submissions, destroys the engine and frees what allocate() gave. ``deadline``: seconds to wait.

        True when no write is left anywhere, by us to others or by others to us; False leaves the memory mapped.
        Repeats are harmless. Submissions that had not ended poll REJECTED or FAILED_SRC_FREE.
        """
