"""HTTP/2 by hand: what no client library would send."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable
from types import TracebackType

from kvgrpc.net import split
from tests.support.waiting import wait_until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 3, 4


class Connection:
    """One plaintext connection. ``frames``: all that came, as (type, flags, stream, payload)."""

    def __init__(self, address: str, *, answer_pings: bool = True, source: str = "") -> None:
        """``source``: the address that it comes from, where it is not the one that the system takes."""
        host, port = split(address)
        self.socket = socket.create_connection((host, int(port)), 10, (source, 0) if source else None)
        self.frames: list[tuple[int, int, int, bytes]] = []
        self.closed = threading.Event()
        self.closed_at = 0.0
        self._answer_pings = answer_pings
        self._lock = threading.Lock()
        self._next = 1
        self._sent: Counter[int] = Counter()
        self.send(PREFACE + frame(SETTINGS, 0, 0, b""))
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.socket.close()

    def send(self, raw: bytes) -> None:
        with self._lock:
            self.socket.sendall(raw)

    def begin(self, path: str, more: Iterable[tuple[bytes, bytes]] = (), *, end: bool = False) -> int:
        """Headers of a call; its stream."""
        return self.begin_raw(path.encode(), more, end=end)

    def begin_raw(self, path: bytes, more: Iterable[tuple[bytes, bytes]] = (), *, end: bool = False) -> int:
        """The same for a path of any bytes."""
        stream, self._next = self._next, self._next + 2
        self.send(frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, headers_of(path, more)))
        return stream

    def message(self, stream: int, payload: bytes, *, compressed: bool = False, end: bool = True) -> None:
        """A whole message, in frames of 16 KiB, as the server's windows allow."""
        raw = struct.pack(">BI", compressed, len(payload)) + payload
        pieces = [raw[start : start + 16_384] for start in range(0, len(raw), 16_384)]
        for number, piece in enumerate(pieces):
            last = end and number == len(pieces) - 1
            wait_until(lambda piece=piece: self._room(stream) >= len(piece))  # type: ignore[misc]
            for window in (0, stream):
                self._sent[window] += len(piece)
            self.send(frame(DATA, END_STREAM if last else 0, stream, piece))

    def _room(self, stream: int) -> int:
        """Bytes that the server takes now, of this stream and of all."""
        initial = {0: 65_535, stream: self.settings().get(INITIAL_WINDOW_SIZE, 65_535)}
        return min(
            initial[window] + sum(int.from_bytes(raw, "big") for raw in self.of(WINDOW_UPDATE, window)) - sent
            for window, sent in ((0, self._sent[0]), (stream, self._sent[stream]))
        )

    def of(self, kind: int, stream: int | None = None) -> list[bytes]:
        """Payloads of one kind."""
        return [raw for what, flags, where, raw in list(self.frames) if what == kind and stream in (None, where)]

    def settings(self) -> dict[int, int]:
        """What the server announced."""
        found: dict[int, int] = {}
        for kind, flags, _, raw in list(self.frames):
            if kind == SETTINGS and not flags & ACK:
                found.update(struct.unpack(">HI", raw[at : at + 6]) for at in range(0, len(raw), 6))
        return found

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                head = self._exactly(9)
                length = int.from_bytes(head[:3], "big")
                kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF
                raw = self._exactly(length)
                self.frames.append((kind, flags, stream, raw))
                if kind == SETTINGS and not flags & ACK:
                    self.send(frame(SETTINGS, ACK, 0, b""))
                if kind == PING and not flags & ACK and self._answer_pings:
                    self.send(frame(PING, ACK, 0, raw))
        self.closed_at = time.monotonic()
        self.closed.set()

    def _exactly(self, size: int) -> bytes:
        raw = b""
        while len(raw) < size:
            piece = self.socket.recv(size - len(raw))
            if not piece:
                raise ConnectionResetError
            raw += piece
        return raw


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def headers_of(path: bytes, more: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """The head of a call, in HPACK; every field is a literal that no table keeps."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *more,
    ]
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)


def _text(raw: bytes) -> bytes:
    """A string of HPACK, as it is; 7 bits of length, more where it is longer."""
    if len(raw) < 127:
        return bytes((len(raw),)) + raw
    rest, more = len(raw) - 127, b""
    while rest >= 128:
        more += bytes((rest % 128 + 128,))
        rest //= 128
    return b"\x7f" + more + bytes((rest,)) + raw
