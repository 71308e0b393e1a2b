"""gRPC alone, as ranks use it at a registry: a question on a connection of its own, a stream that echoes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from benchmarks.baselines.stream import ANSWER
from kvgrpc.rpc.options import CHANNEL_OPTIONS, OWN_CONNECTION, SERVER_OPTIONS

SERVICE, QUESTION, STREAM = "benchmarks.Echo", "Question", "Stream"


class EchoServer:
    """On a loop in a thread of its own, until its process ends."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.address = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(60.0)

    async def _serve(self) -> str:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        handlers: dict[str, Any] = {
            QUESTION: grpc.unary_unary_rpc_method_handler(_answer),
            STREAM: grpc.stream_stream_rpc_method_handler(_echo),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"


def questions_and_streams(address: str) -> tuple[grpc.aio.Channel, Callable[[bytes], Any], Callable[[], Any]]:
    """A connection of its own, what asks on it, and what begins a stream."""
    channel = grpc.aio.insecure_channel(address, options=(*CHANNEL_OPTIONS, *OWN_CONNECTION))
    ask: Any = channel.unary_unary(f"/{SERVICE}/{QUESTION}")
    begin: Any = channel.stream_stream(f"/{SERVICE}/{STREAM}")
    return channel, ask, begin


async def _answer(question: bytes, context: Any) -> bytes:
    return ANSWER


async def _echo(frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for frame in frames:
        yield frame
