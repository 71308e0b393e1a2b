"""Servers and channels of ours bear each other's keepalive pings, idle and with a quiet stream.

Three minutes of pings take six seconds here: both intervals are divided by the same number, all else is as shipped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from kvgrpc.rpc.options import CHANNEL_OPTIONS, PING_MILLISECONDS, SERVER_OPTIONS, Options
from kvgrpc.rpc.server import add_methods, new_server
from tests.support.waiting import until

METHOD = "/test.Quiet/Stream"
PREFACE_BYTES = 24
PING, GOAWAY = 6, 7
ACK = 1
# The library pings once a second at most, whatever it is told.
TIMES = 30
INTERVALS = ("grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms")
WITHIN_SECONDS = 30.0


async def test_our_channels_ping_as_often_as_our_servers_bear() -> None:
    """Six pings: a third that comes too early ends the connection (``max_ping_strikes``)."""

    async def bears(stream: bool) -> None:
        async with serving(quicker(SERVER_OPTIONS)) as (address, wire), channel_to(address, CHANNEL_OPTIONS, stream):
            await until(lambda: wire.pings >= 6 or bool(wire.goaways))
            assert wire.goaways == [] and wire.connections == 1

    await asyncio.gather(bears(stream=False), bears(stream=True))


async def test_a_channel_that_pings_more_often_than_its_server_bears_is_sent_away() -> None:
    """So that the test above can fail."""

    async def is_sent_away(stream: bool) -> None:
        async with serving(SERVER_OPTIONS) as (address, wire), channel_to(address, CHANNEL_OPTIONS, stream):
            await until(lambda: bool(wire.goaways))
            assert b"too_many_pings" in wire.goaways[0]

    await asyncio.gather(is_sent_away(stream=False), is_sent_away(stream=True))


def quicker(options: Options) -> Options:
    return tuple((name, int(value) // TIMES if name in INTERVALS else value) for name, value in options)


class Wire:
    """What was seen between a channel and its server. ``goaways``: their payloads."""

    def __init__(self) -> None:
        self.connections = 0
        self.goaways: list[bytes] = []
        self._kinds: Counter[int] = Counter()

    @property
    def pings(self) -> int:
        return self._kinds[PING]

    def from_channel(self, kind: int, flags: int, payload: bytes) -> None:
        if not (kind == PING and flags & ACK):
            self._kinds[kind] += 1

    def from_server(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == GOAWAY:
            self.goaways.append(payload)


@contextlib.asynccontextmanager
async def serving(options: Options) -> AsyncIterator[tuple[str, Wire]]:
    """A server behind a relay that looks at every HTTP/2 frame."""

    async def quiet(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        yield b"begun"
        async for _ in requests:
            pass

    server, wire = new_server((), options), Wire()
    add_methods(server, "test.Quiet", {"Stream": grpc.stream_stream_rpc_method_handler(quiet)})
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire.connections += 1
        there, back = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            back.write(await reader.readexactly(PREFACE_BYTES))
            await asyncio.gather(copy(reader, back, wire.from_channel), copy(there, writer, wire.from_server))
        back.close()
        writer.close()

    front = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{front.sockets[0].getsockname()[1]}", wire
    finally:
        front.close()
        await server.stop(0)


async def copy(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, seen: Callable[[int, int, bytes], None]
) -> None:
    try:
        while True:
            head = await source.readexactly(9)
            payload = await source.readexactly(int.from_bytes(head[:3], "big"))
            seen(head[3], head[4], payload)
            sink.write(head + payload)
            await sink.drain()
    finally:
        sink.close()


@contextlib.asynccontextmanager
async def channel_to(address: str, options: Options, stream: bool) -> AsyncIterator[None]:
    """Pings every ``PING_MILLISECONDS / TIMES``; connected, with a stream that says nothing more, or with no call."""
    assert dict(options)["grpc.keepalive_time_ms"] == PING_MILLISECONDS
    async with grpc.aio.insecure_channel(address, options=quicker(options)) as channel:
        call: Any = channel.stream_stream(METHOD)()
        assert await asyncio.wait_for(call.read(), WITHIN_SECONDS) == b"begun"
        if not stream:
            await call.done_writing()
            assert await asyncio.wait_for(call.read(), WITHIN_SECONDS) is grpc.aio.EOF
        yield
