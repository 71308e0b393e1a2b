"""A TCP line between a driver and a server that can be cut, stalled and moved. One thread carries all of them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_SECONDS = 10.0
_PIECE = 4096


class Line:
    """Listens at a port of its own for whoever dials, and carries bytes to ``target``."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._port = 0
        self.mend()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def cut(self) -> None:
        """Connections end, and nobody answers at the address."""
        self._run(self._cut())

    def mend(self) -> None:
        self._run(self._listen())

    def stall(self) -> None:
        """Nothing is carried, and nothing ends: buffers fill."""
        self._loop.call_soon_threadsafe(self._flows.clear)

    def flow(self) -> None:
        self._loop.call_soon_threadsafe(self._flows.set)

    def move(self, target: int) -> None:
        """Connections from now on go to another server; those that stand stay as they are."""
        self._loop.call_soon_threadsafe(setattr, self, "_target", target)

    def close(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._carry_both, "127.0.0.1", self._port, limit=_PIECE)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _carry_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target, limit=_PIECE)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE):
                await self._flows.wait()
                writer.write(piece)
                await writer.drain()
        # One end gone is both gone: nothing half open.
        writer.transport.abort()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_SECONDS)
