"""The messages between the engine's process and the one that talks to the Store: msgpack behind its length."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TypeVar

import msgspec

from kvgrpc.prefetch.storage.base import MISSING, PageResult, failed

_LENGTH = struct.Struct("<I")
_MOST_BYTES = 256 << 20


class Start(msgspec.Struct, frozen=True):
    """First message to the child: how to reach the Store."""

    host: str
    master: str
    protocol: str
    device: str
    segment_bytes: int
    local_buffer_bytes: int
    threads: int


class Area(msgspec.Struct, frozen=True, tag=True):
    """Shared memory that the child registers: descriptor ``file`` of process ``pid``, from ``offset`` on.
    ``inode``: its (device, inode), without which the descriptor is another file's by now."""

    number: int
    pid: int
    file: int
    offset: int
    nbytes: int
    inode: tuple[int, int]


class Gone(msgspec.Struct, frozen=True, tag=True):
    """An area that no call names any more, neither one on its way nor a later one: the child unmaps it."""

    number: int


class Call(msgspec.Struct, frozen=True, tag=True):
    """``what``: exist, get, put, remove or clear (then ``keys`` is one regular expression).

    ``buffers``: for each key the (area, offset, bytes) of its pieces. ``deadline``: monotonic seconds of this machine.
    """

    number: int
    what: str
    keys: list[str]
    buffers: list[list[tuple[int, int, int]]]
    deadline: float


class Reply(msgspec.Struct, frozen=True):
    """A code for each key; ``sizes``: bytes of the object where a code leaves that open, else 0.

    Number 0 is the answer to Start: an ``error`` says why there will be no other.
    """

    number: int
    codes: list[int] = []
    sizes: list[int] = []
    error: str = ""


M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


class Wire:
    """One end of the connection. One thread reads; writers take turns themselves."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file = end.makefile("rb")

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError when the other end is gone."""
        data = _encoder.encode(message)
        self._end.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
        """The next message; None when the other end is gone, or sent nonsense."""
        try:
            head = self._file.read(_LENGTH.size)
            if head is None or len(head) < _LENGTH.size or (length := _LENGTH.unpack(head)[0]) > _MOST_BYTES:
                return None
            data = self._file.read(length)
            return decoder.decode(data) if data is not None and len(data) == length else None
        except (OSError, ValueError, msgspec.MsgspecError):
            return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


EXISTS = 1
"""Ours: the object was there before the put, which the Store itself reports as a success."""
EXPIRED = -20_000
"""Ours: the process that talks to the Store came to it after its deadline, and did not begin."""
INVALID = -600
NOT_READY = -703
LEASE_ENDED = -707
TRANSFER_FAILED = -800
MASTER_DOWN = frozenset({-900, -901, -1010})

_MISSING = frozenset({-704, -710, -712})
_WORDS = {
    -1: ("internal error", False),
    -10: ("more buffer space is needed than the client has", True),
    -101: ("the segment is gone", True),
    -103: ("the master does not know this client any more", True),
    -200: ("no space: every segment is full, or its owner is gone, and leases keep old objects for some seconds", True),
    -400: ("invalid key", False),
    -500: ("write failed", True),
    INVALID: ("invalid parameters", False),
    -601: ("illegal client", True),
    -700: ("invalid write", True),
    -701: ("invalid read", True),
    -702: ("invalid replica", True),
    NOT_READY: ("another client is still writing it, or the store is so full that it was evicted at once", True),
    -705: ("another client is still writing it", True),
    -706: ("a reader has a lease on it", True),
    LEASE_ENDED: ("the lease ended before the transfer did", True),
    -714: ("a replica is busy", True),
    TRANSFER_FAILED: ("the transfer failed: the owner of its segment may be gone", True),
    -801: ("the checksum does not match", True),
    -900: ("the master does not answer", True),
    -901: ("the master does not answer", True),
    -1010: ("the master is not ready", True),
    -1012: ("not supported", False),
    EXPIRED: ("not begun in time", True),
}


def result_of(code: int) -> PageResult:
    """The result of a negative code."""
    if code in _MISSING:
        return MISSING
    words, retryable = _WORDS.get(code, ("unknown code", True))
    return failed(f"Mooncake Store {code}: {words}", retryable=retryable)


def is_lost(code: int) -> bool:
    """True if the Store may go on saying that the object exists although nobody can read it (until client_ttl)."""
    return code == TRANSFER_FAILED
