"""The protocol of a data plane: one-sided writes from this process into the registered memory of a peer.

A TransferWorker calls ``submit``, ``poll`` and ``stop``, one thread at a time; nobody else does, except the plane's own
``close``. All other methods may be called from any thread. On the event loop ``address``, ``connections_from`` and
``in_flight`` are called, and of submissions that are ``quick_bytes`` at most also ``submit`` and ``poll``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = [
    "MAX_ADDRESS_BYTES",
    "Bounded",
    "DataPlane",
    "DialledByPeers",
    "EndedTransfer",
    "MemoryRange",
    "Outcome",
    "Peer",
    "Result",
    "Transfer",
    "U64Array",
]


U64Array = npt.NDArray[np.uint64]

# 4 MiB of ranges take 0.15 s to read, and are read again for each room, or in each tick.
MAX_ADDRESS_BYTES = 64 * 1024


class Outcome(enum.IntEnum):
    """The end of a submission, least certain first (docs/session.md rule 7, writes): of two ends the smaller counts.

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
    """Also implemented by a data plane that bounds what is on its way to one peer. Any thread may ask."""

    @property
    def limits_of_a_peer(self) -> tuple[int, int]:
        """The most writes, and the most bytes, that may be on their way to one peer at a time."""

    def in_flight(self) -> tuple[int, int]:
        """Writes and bytes that are on their way now, to all peers."""


@runtime_checkable
class DialledByPeers(Protocol):
    """Also implemented by a data plane that peers of other hosts dial. Any thread may ask."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Each "host:port" that a peer must reach."""


@runtime_checkable
class TellsClosed(Protocol):
    """A DataPlane that remembers its end: a rank on it that its owner closed first knows that no write is left."""

    @property
    def closed(self) -> bool:
        """True if ``close`` returned True."""


@runtime_checkable
class BatchedConnections(Protocol):
    """Also implemented by a data plane to which one look at its connections tells of many peers."""

    def connections_from_each(self, addresses: Sequence[bytes]) -> list[frozenset[str]]:
        """``DataPlane.connections_from`` of each of them."""


class Transfer(Protocol):
    """One submission on its way."""

    def poll(self) -> Result | None:
        """Moves the submission on without waiting for data. Returns its Result once it has ended, None before.

        Does at most about 2 ms of work (not counting waits for the GIL), so that many submissions are polled in turn.
        """

    def stop(self) -> None:
        """Starts no further write of this submission; the Result still comes from poll()."""


class EndedTransfer:
    """A submission that was over at once: refused, or done by the time it was made."""

    __slots__ = ("_result",)

    def __init__(self, result: Result) -> None:
        self._result = result

    def poll(self) -> Result | None:
        return self._result

    def stop(self) -> None: ...


class Peer(Protocol):
    """The memory of one incarnation of a peer, as its data-plane address said. Opaque."""


class DataPlane(Protocol):
    """See the module. Both sides of a session must use planes of the same ``name``.

    ``quick_bytes``: a submission of at most this many bytes ends with its first poll() and waits for nobody, which
    takes less time than waking another thread (some 50 us). 0: no submission is that quick.
    ``gathers_slices``: a descriptor costs this plane so much that slices which lie apart here and together at the peer
    are copied together before they are written (docs/topology.md).
    """

    name: str
    quick_bytes: int

    @property
    def gathers_slices(self) -> bool: ...

    @property
    def poll_interval(self) -> float:
        """The longest sleep, in seconds, between two rounds of polls that keeps the plane busy now; begin with a
        shorter one. 0 where poll() itself does the work (shm): then sleep only when nothing runs.
        """

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
        """Returns what a peer needs to write to what is registered now; opaque, at most MAX_ADDRESS_BYTES."""

    def attach(self, address: bytes) -> Peer:
        """Prepares writes to a peer without waiting for it; while the peer does not answer, submissions are REJECTED.

        Raises ValueError for an address that cannot be read or that this plane cannot reach (the message says what to
        do instead), and PeerUnreachable when the peer is gone.
        """

    def detach(self, peer: Peer) -> None:
        """Forgets a peer: refuses further submissions to it. Those that run end as they would have, and what they need
        of the peer stays until then.
        """

    def submit(self, peer: Peer, source: U64Array, destination: U64Array, nbytes: U64Array) -> Transfer:
        """Starts writing ``nbytes[i]`` bytes from ``source[i]`` (own address) to ``destination[i]`` (peer's address).

        The arrays are uint64[n]; ``nbytes[i]`` may be 0. Never raises: a refused submission is a Transfer that polls
        REJECTED. A submission with a descriptor outside the registered memory of either side is refused as a whole.
        """

    def connections_from(self, address: bytes) -> frozenset[str]:
        """Names of the connections over which a dead peer's bytes could still arrive here.

        docs/session.md rule 8, pages by evidence. ``address``: the dead peer's; empty: that of any peer. Ask about
        dead peers only: a living peer's own plane says FAILED_SRC_FREE when its bytes have left its host. The answer
        may name too many connections, never too few: of a peer on this host those that no living process uses, of a
        peer elsewhere all from its host. A later connection may have the name of one that is gone. Empty where the
        plane has no connections (shm, RDMA): only the settle time protects the pages then. Raises OSError where it
        cannot tell now, which is no evidence; it is asked again. Called on a thread that may wait.
        """

    def close(self, deadline: float) -> bool:
        """Stops all submissions, destroys the engine and frees what allocate() gave. ``deadline``: seconds to wait.

        True when no write is left, neither ours to peers nor theirs to us; on False the memory stays mapped. Calling it
        again is harmless. Submissions that had not ended poll REJECTED or FAILED_SRC_FREE.
        """
