"""Frames of ZMQ that say to be giant: whoever reads or publishes events hangs up, and makes no room for them.

ZMQ's own default is to believe any size. Written by hand (ZMTP 3.0), because no library sends such a frame.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from kvgrpc.events.endpoints import LARGEST_QUESTION
from kvgrpc.events.live.pub import ZmqEventPublisher
from kvgrpc.events.model import LARGEST_MESSAGE
from kvgrpc.net import split
from kvgrpc.server import EventRelay
from tests.support.waiting import wait_until

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
LONG, COMMAND = 2, 4


def ready(kind: bytes) -> bytes:
    body = b"\x05READY" + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    return bytes((COMMAND, len(body))) + body


def hangs_up_on(connection: socket.socket, kind: bytes, size: int) -> bool:
    """Whether the other side closes once it has read that a frame of ``size`` bytes follows; none of them does."""
    connection.settimeout(20)
    connection.sendall(GREETING + ready(kind))
    heard = b""
    while b"READY" not in heard:
        heard += connection.recv(4096)
    connection.sendall(bytes((LONG,)) + size.to_bytes(8, "big"))
    connection.settimeout(3)
    try:
        while connection.recv(4096):
            continue
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.fixture
def publisher() -> Iterator[ZmqEventPublisher]:
    made = ZmqEventPublisher(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    try:
        yield made
    finally:
        made.shutdown()


@pytest.mark.parametrize(("what", "kind"), [("pub_endpoint", b"SUB"), ("replay_endpoint", b"DEALER")])
def test_a_stranger_who_announces_a_giant_question_is_hung_up_on(
    publisher: ZmqEventPublisher, what: str, kind: bytes
) -> None:
    host, port = split(getattr(publisher.stream, what).removeprefix("tcp://"))
    for size, over in ((LARGEST_QUESTION + 1, True), (LARGEST_QUESTION, False)):
        with socket.create_connection((host, int(port)), 10) as connection:
            assert hangs_up_on(connection, kind, size) is over


@pytest.mark.parametrize(("at", "kind"), [("endpoint", b"PUB"), ("replay", b"ROUTER")])
def test_a_relay_hangs_up_on_a_publisher_that_announces_a_giant_batch(at: str, kind: bytes) -> None:
    hung_up = threading.Event()
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.settimeout(20)
        nobody = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def publish() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listening.accept()
                with connection:
                    if hangs_up_on(connection, kind, LARGEST_MESSAGE + 1):
                        hung_up.set()

        serving = threading.Thread(target=publish)
        serving.start()
        stack.callback(serving.join, 30)
        endpoints = {name: f"tcp://127.0.0.1:{one.getsockname()[1]}" for name, one in ((at, listening),)}
        endpoints.setdefault("endpoint", f"tcp://127.0.0.1:{nobody.getsockname()[1]}")
        relay = EventRelay("127.0.0.1:0", endpoints["endpoint"], "E", replay=endpoints.get("replay", "")).open()
        stack.callback(relay.close)
        wait_until(hung_up.is_set)
