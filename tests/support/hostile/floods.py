"""Floods of HTTP/2 frames from one connection, as no client library would send them.

``python -m tests.support.hostile.floods NAME ADDRESS...`` sends one to all the addresses until its input ends; says
"floods" once it does.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

from kvgrpc.net import split
from tests.support.hostile.http2 import (
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    headers_of,
)

PRIORITY, RST_STREAM, PUSH_PROMISE, CONTINUATION, UNKNOWN = 2, 3, 5, 9, 99
INITIAL_WINDOW, HEADER_TABLE = 4, 1
LIST_ROOMS = headers_of(b"/kvgrpc.v1.TransferService/ListRooms")
Flood = Iterator[bytes]


def setting(name: int, value: int) -> bytes:
    return struct.pack(">HI", name, value)


def streams(first: int = 1) -> Iterator[int]:
    return iter(range(first, 2**31, 2))


def pings() -> Flood:
    """5 MB at once, which is enough, then nothing."""
    yield frame(PING, 0, 0, b"12345678") * 300_000


def ping_answers() -> Flood:
    while True:
        yield frame(PING, 1, 0, b"12345678") * 4_096


def settings() -> Flood:
    while True:
        yield b"".join(frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW, size)) for size in range(1_000, 1_512))


def long_settings() -> Flood:
    while True:
        yield frame(SETTINGS, 0, 0, b"".join(setting(HEADER_TABLE, size % 4_096) for size in range(2_730)))


def rapid_resets() -> Flood:
    ids = streams()
    while True:
        yield b"".join(
            frame(HEADERS, END_HEADERS, one, LIST_ROOMS) + frame(RST_STREAM, 0, one, bytes(4))
            for one, _ in zip(ids, range(512), strict=False)
        )


def resets_of_nothing() -> Flood:
    yield frame(HEADERS, END_HEADERS, 1, LIST_ROOMS)
    while True:
        yield frame(RST_STREAM, 0, 1, bytes(4)) * 4_096


def continuations() -> Flood:
    """Headers that never end: nothing of them may be kept beyond the bound of a head."""
    yield frame(HEADERS, 0, 1, LIST_ROOMS)
    while True:
        yield frame(CONTINUATION, 0, 1, b"\x00\x01a\x7f\x80\x7e" + b"v" * 16_255) * 16


def empty_continuations() -> Flood:
    yield frame(HEADERS, 0, 1, LIST_ROOMS)
    while True:
        yield frame(CONTINUATION, 0, 1, b"") * 4_096


def header_bombs() -> Flood:
    """One field of 4,000 bytes in HPACK's table, then 16,000 references of one byte to it: 64 MB a head."""
    ids = streams()
    field = b"\x40\x01a\x7f" + bytes((0xA1, 0x1E)) + b"v" * 4_000
    yield frame(HEADERS, END_HEADERS, next(ids), LIST_ROOMS + field)
    for one in ids:
        yield frame(HEADERS, END_HEADERS, one, LIST_ROOMS + b"\xbe" * 16_000)


def window_updates() -> Flood:
    while True:
        yield frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)) * 4_096


def closed_windows() -> Flood:
    """Calls whose answers may never be sent."""
    yield frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW, 0))
    for one in streams():
        yield frame(HEADERS, END_HEADERS, one, LIST_ROOMS) + frame(DATA, 1, one, bytes(5))


def slow_bodies() -> Flood:
    """2,000 calls that say a large message comes, and send a byte of it now and then."""
    ids = list(range(1, 4_001, 2))
    yield b"".join(frame(HEADERS, END_HEADERS, one, LIST_ROOMS) + frame(DATA, 0, one, b"\0\0\0\xff\xff") for one in ids)
    while True:
        for one in ids:
            yield frame(DATA, 0, one, b"x")
        time.sleep(0.1)  # a slow part


def empty_data() -> Flood:
    yield frame(HEADERS, END_HEADERS, 1, LIST_ROOMS)
    while True:
        yield frame(DATA, 0, 1, b"") * 4_096


def priorities() -> Flood:
    while True:
        yield frame(PRIORITY, 0, 1, bytes(5)) * 4_096


def unknown_frames() -> Flood:
    while True:
        yield frame(UNKNOWN, 255, 7, bytes(100)) * 1_024


FLOODS = (
    pings,
    ping_answers,
    settings,
    long_settings,
    rapid_resets,
    resets_of_nothing,
    continuations,
    empty_continuations,
    window_updates,
    closed_windows,
    slow_bodies,
    empty_data,
    priorities,
    unknown_frames,
    header_bombs,  # the last: what the library keeps of them goes on to grow while the next one is measured
)


@contextlib.contextmanager
def flooding(address: str, flood: Callable[[], Flood]) -> Iterator[threading.Event]:
    """Sends it until the end, on a new connection where the server hangs up; the event: it has begun."""
    host, port = split(address)
    over, begun = threading.Event(), threading.Event()

    def read(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while connection.recv(65_536):
                continue

    def send() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 10) as connection:
                connections.append(connection)
                threading.Thread(target=read, args=(connection,), daemon=True).start()
                connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
                begun.set()
                for piece in flood():
                    connection.sendall(piece)
                over.wait(60)
            over.wait(0.05)

    connections: list[socket.socket] = []
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        yield begun
    finally:
        over.set()
        while thread.is_alive():  # a write that the server does not take ends with its connection
            with contextlib.suppress(OSError):
                connections[-1].shutdown(socket.SHUT_RDWR)
            thread.join(0.1)


def main(name: str, *addresses: str) -> None:
    flood = next(flood for flood in FLOODS if flood.__name__ == name)
    with contextlib.ExitStack() as stack:
        for begun in [stack.enter_context(flooding(address, flood)) for address in addresses]:
            begun.wait()
        print("floods", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
