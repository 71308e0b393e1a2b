"""The floor of control over gRPC: engine threads, a loop thread each, a bare bidirectional stream, and nothing else.

An engine thread wakes the loop, the loop writes, the other loop reads and sets a number, the other engine's thread
finds it at its next look, and back. No state, no plan, no data plane: no hand-off of one room can be faster than this.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

Options = tuple[tuple[str, int | str], ...]
METHOD, QUESTION = "/benchmarks.Floor/Stream", "/benchmarks.Floor/Question"
DEADLINE = 60.0
FRAME = bytes(100)
HEARTBEAT = b""
ANSWER = bytes(300)


class StreamEnd:
    """One end, driven by one engine thread. ``wait`` looks each ``pause`` seconds, as an engine does.

    ``take`` gets each frame, on the loop thread. ``loop`` runs already; None: one of its own. ``options``: of gRPC.
    """

    def __init__(
        self,
        take: Callable[[bytes], None] = lambda frame: None,
        loop: asyncio.AbstractEventLoop | None = None,
        options: Options = (),
    ) -> None:
        self._take = take
        self._options = options
        self.loop = self._loop = loop or asyncio.new_event_loop()
        self._call: Any = None
        self._server: Any = None
        self._channels: list[grpc.aio.Channel] = []
        self._heard = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        if loop is None:
            threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def serve(self, port: int = 0) -> int:
        """The port."""
        return asyncio.run_coroutine_threadsafe(self._serve(port), self._loop).result(DEADLINE)

    def connect(self, port: int) -> None:
        asyncio.run_coroutine_threadsafe(self._connect(port), self._loop).result(DEADLINE)

    def ask(self, port: int) -> None:
        """A question and its answer, over a channel of its own."""
        asyncio.run_coroutine_threadsafe(self._ask(port), self._loop).result(DEADLINE)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(DEADLINE)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def beat_each(self, seconds: float) -> None:
        """From now on a heartbeat each so many seconds, whatever comes."""

        async def beat() -> None:
            while True:
                await asyncio.sleep(seconds)
                await self.send(HEARTBEAT)

        self.on_loop(lambda: self.start(beat()))

    def write(self) -> None:
        self.on_loop(lambda: self.start(self.send(FRAME)))

    def beat(self) -> None:
        """As ``write``, and the other end does not count it."""
        self.on_loop(lambda: self.start(self.send(HEARTBEAT)))

    def on_loop(self, action: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(action)

    async def send(self, frame: bytes) -> None:
        """On the loop thread. gRPC takes one at a time, and the answer may come before a write has returned."""
        async with self._sending:
            await self._call.write(frame)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """On the loop thread."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def wait(self, heard: int, pause: float, work: Callable[[float], None] = time.sleep) -> None:
        """Returns once so many frames came; between two looks it does ``work`` for ``pause`` seconds."""
        end = time.monotonic() + DEADLINE
        while self._heard < heard:
            work(pause)
            if time.monotonic() > end:
                raise TimeoutError(f"{self._heard} of {heard} frames came")

    @property
    def heard(self) -> int:
        return self._heard

    async def _serve(self, port: int) -> int:
        self._server = grpc.aio.server(options=self._options)
        handler: Any = grpc.stream_stream_rpc_method_handler(self._read)
        answerer: Any = grpc.unary_unary_rpc_method_handler(_answer)
        service, method = METHOD[1:].split("/")
        handlers = {method: handler, QUESTION.rpartition("/")[2]: answerer}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return port

    async def _ask(self, port: int) -> None:
        question: Any = self._channel(port).unary_unary(QUESTION)
        await question(FRAME)

    async def _connect(self, port: int) -> None:
        self._call = self._channel(port).stream_stream(METHOD)()
        self.start(self._read(None, self._call))

    def _channel(self, port: int) -> grpc.aio.Channel:
        """On a connection of its own, as a session is."""
        options = (*self._options, ("grpc.use_local_subchannel_pool", 1))
        self._channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options))
        return self._channels[-1]

    async def _close(self) -> None:
        for channel in self._channels:
            await channel.close()
        if self._server is not None:
            await self._server.stop(0)

    async def _read(self, _: Any, call: Any) -> None:
        self._call = call
        while (frame := await call.read()) is not grpc.aio.EOF:
            if frame != HEARTBEAT:
                self._heard += 1
                self._take(frame)


async def _answer(question: bytes, context: Any) -> bytes:
    return ANSWER
