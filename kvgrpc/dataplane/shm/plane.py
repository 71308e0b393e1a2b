"""Moves bytes between processes of one host, or within one process, by copying into memory that both have mapped.

What the memory is and why it leaves nothing behind: segments.py. How it is copied: copying.py.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Sequence

import msgspec
import numpy as np

from kvgrpc.dataplane.base import MemoryRange, Outcome, Peer, Result, Transfer, U64Array
from kvgrpc.dataplane.ranges import RangeTable, arrays, first_outside
from kvgrpc.dataplane.shm.copying import HOLD_BYTES, Copier, Pieces
from kvgrpc.dataplane.shm.process import ProcessIdentity, own_identity
from kvgrpc.dataplane.shm.segments import Mapping, Segment, create, open_peer
from kvgrpc.errors import FeatureDisabled, PeerUnreachable

MAX_SEGMENTS = 256


class ShmDataPlane:
    """See DataPlane. Both processes run on one host, in one pid namespace, as one user (or the writer as root)."""

    name = "shm"
    poll_interval = 0.0
    quick_bytes = HOLD_BYTES
    gathers_slices = False  # a slice costs what its copy costs

    def __init__(self) -> None:
        """Raises FeatureDisabled where there is no memfd (not Linux)."""
        if not hasattr(os, "memfd_create"):
            raise FeatureDisabled(
                "data plane 'shm' needs Linux (memfd_create); use 'mooncake'",
                metadata={"feature": "dataplane.shm", "howToEnable": "run on Linux, or use 'mooncake'"},
            )
        self._token = secrets.token_hex(16)
        self._allocating = threading.Lock()
        self._lock = threading.Lock()  # held while a slice is copied
        self._segments: tuple[Segment, ...] = ()
        self._own = RangeTable(())
        self._copier = Copier()
        self._running: set[_Copy] = set()
        self._closed = False

    def allocate(self, nbytes: int, location: str = "cpu:0") -> int:
        """See DataPlane. ``location``: "cpu:…" only; at most 256 blocks."""
        _check_location(location)
        if nbytes < 1:
            raise ValueError(f"nbytes is {nbytes}: at least 1")
        with self._allocating:
            if self._closed:
                raise ValueError("the data plane is closed")
            if len(self._segments) == MAX_SEGMENTS:
                raise ValueError(f"{MAX_SEGMENTS} blocks are the most: allocate few large ones and divide them")
            segment = create(f"{self._token}-{len(self._segments)}", nbytes)
            segments = (*self._segments, segment)
            self._own = RangeTable((each.address, each.nbytes) for each in segments)
            self._segments = segments
        return segment.address

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        """See DataPlane. Only checks that the memory came from allocate(), which has made it ready."""
        for memory in ranges:
            _check_location(memory.location)
            if not self._own.contains(memory.address, memory.nbytes):
                what = f"{memory.address:#x}+{memory.nbytes}"
                raise ValueError(f"data plane 'shm' cannot move {what}: allocate it with plane.allocate()")

    def address(self) -> bytes:
        """See DataPlane: JSON, about 50 bytes for each block."""
        segments = tuple((each.address, each.nbytes, each.descriptor) for each in self._segments)
        return msgspec.json.encode(_Address(own_identity(), self._token, segments))

    def attach(self, address: bytes) -> Peer:
        """See DataPlane: maps the peer's segments here; they stay usable when the peer dies."""
        peer = _Peer(_decode(address))
        with contextlib.suppress(RuntimeError):  # no thread to be had: then the first copies take longer
            threading.Thread(target=peer.touch, name="kvgrpc-shm-touch", daemon=True).start()
        return peer

    def detach(self, peer: Peer) -> None:
        """See DataPlane. The peer's memory is unmapped when the last transfer that uses it is gone."""
        if isinstance(peer, _Peer):
            peer.detached = True

    def submit(self, peer: Peer, source: U64Array, destination: U64Array, nbytes: U64Array) -> Transfer:
        """See DataPlane: checks and translates; poll() copies."""
        with self._lock:
            transfer = _Copy(self, peer)
            try:
                transfer.pieces = self._pieces(peer, *arrays(source, destination, nbytes))
                self._running.add(transfer)
            except (ValueError, TypeError, OverflowError) as error:
                transfer.end(Outcome.REJECTED, str(error))
        return transfer

    def connections_from(self, address: bytes) -> frozenset[str]:
        """See DataPlane: a killed process writes nothing more, there is nothing to wait for."""
        return frozenset()

    @property
    def closed(self) -> bool:
        """See TellsClosed."""
        return self._closed

    def close(self, deadline: float) -> bool:
        """See DataPlane. At once, always True: no copy outlives this call, and peers write into their own mapping."""
        with self._allocating, self._lock:
            self._closed = True
            for transfer in self._running:
                transfer.end(Outcome.REJECTED, "the data plane was closed")
            self._running.clear()
            segments, self._segments = self._segments, ()
            self._own = RangeTable(())
        self._copier.close()
        for segment in segments:
            segment.free()
        return True

    def _pieces(self, peer: Peer, source: U64Array, destination: U64Array, nbytes: U64Array) -> Pieces:
        if self._closed or not isinstance(peer, _Peer) or peer.detached:
            raise ValueError("the data plane is closed" if self._closed else "not an attached peer of this data plane")
        if outside := first_outside(self._own.find(source, nbytes), source, nbytes):
            raise ValueError(f"source of {outside} is outside the memory of plane.allocate()")
        found = peer.table.find(destination, nbytes)
        if outside := first_outside(found, destination, nbytes):
            raise ValueError(f"destination of {outside} is outside the peer's memory")
        return Pieces(source, destination + peer.shift[found], nbytes)


class _Address(msgspec.Struct, frozen=True, tag="shm", tag_field="plane"):
    """``segments``: (address in the owner's space, bytes, file descriptor of the owner)."""

    process: ProcessIdentity
    token: str
    segments: tuple[tuple[int, int, int], ...]


class _Peer:
    """``shift[i]``: what to add, modulo 2^64, to an address in range i of the table to get ours."""

    def __init__(self, address: _Address) -> None:
        pid, token = address.process.pid, address.token
        mapped = [
            (base, open_peer(pid, descriptor, f"{token}-{number}", nbytes))
            for number, (base, nbytes, descriptor) in enumerate(address.segments)
        ]
        mapped.sort(key=lambda pair: pair[0])
        self.table = RangeTable((base, mapping.nbytes) for base, mapping in mapped)
        self.shift = np.array([(mapping.address - base) % 2**64 for base, mapping in mapped], dtype=np.uint64)
        self.mappings: tuple[Mapping, ...] = tuple(mapping for _, mapping in mapped)
        self.detached = False

    def touch(self) -> None:
        """Spares the first transfers the page faults: 1.3 us for each 4 KiB that is copied in 1 us."""
        for mapping in self.mappings:
            offset = 0
            while offset < mapping.nbytes and not self.detached:
                offset = mapping.touch(offset)


class _Copy:
    """A submission; each poll() copies one slice of it."""

    __slots__ = ("_next", "_peer", "_plane", "_result", "_stopped", "pieces")

    def __init__(self, plane: ShmDataPlane, peer: Peer) -> None:
        self._plane = plane
        self._peer = peer  # keeps the mapping
        self.pieces: Pieces | None = None
        self._next = 0
        self._stopped = False
        self._result: Result | None = None

    def poll(self) -> Result | None:
        if self._result is None:
            with self._plane._lock:
                self._move()
        return self._result

    def stop(self) -> None:
        self._stopped = True

    def end(self, outcome: Outcome, detail: str = "") -> None:
        """Terminal from here on; the caller holds the plane's lock."""
        self._result = Result(outcome, detail, self.pieces.done(self._next) if self.pieces else 0)

    def _move(self) -> None:
        pieces = self.pieces
        if self._result is not None or pieces is None:
            return
        if self._next < pieces.count:
            if self._stopped:
                self.end(Outcome.REJECTED, "stopped")
            else:
                try:
                    self._next = self._plane._copier.copy(pieces, self._next)
                except OSError as error:
                    self.end(Outcome.REJECTED, f"copy failed: {error}")
        if self._next == pieces.count:
            self.end(Outcome.DONE)
        if self._result is not None:
            self._plane._running.discard(self)


def _check_location(location: str) -> None:
    if not location.startswith("cpu"):
        raise ValueError(f"data plane 'shm' cannot move memory of {location!r}, only of 'cpu:…'; use 'mooncake'")


def _decode(address: bytes) -> _Address:
    """Raises ValueError for nonsense and for another host, PeerUnreachable for a process that is gone."""
    try:
        decoded = msgspec.json.decode(address, type=_Address)
        RangeTable((base, nbytes) for base, nbytes, _ in decoded.segments)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"not an address of data plane 'shm': {error}") from error
    if decoded.process.boot != own_identity().boot:
        raise ValueError("the peer runs on another host, and 'shm' moves bytes within one: use 'mooncake'")
    if not decoded.process.visible:
        raise ValueError("the peer runs in another pid namespace: share it (--pid=host), or use 'mooncake'")
    if not decoded.process.alive:
        pid = decoded.process.pid
        raise PeerUnreachable(f"process {pid} of the peer is gone", metadata={"address": f"pid {pid}"})
    return decoded
