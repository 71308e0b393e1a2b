"""A publisher behind a real server that can go away and come back at its address, and what its cache truly holds."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import grpc

from kvgrpc.events import AllBlocksCleared, BlockRemoved, BlockStored, EventServicer, KVEventBatch, open_publisher
from kvgrpc.model import RankId, RankRef
from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.options import SERVER_OPTIONS
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.v1.event_service_pb2_grpc import add_EventServiceServicer_to_server
from tests.support.waiting import until


class Publishing:
    """One engine's events. Belongs to the event loop that it is used on."""

    def __init__(
        self, engine: str = "engine", dp: int = 0, *, security: ServerSecurity | None = None, **settings: Any
    ) -> None:
        self.engine, self.dp = engine, dp
        self.security = security or ServerSecurity()
        self.settings = {"publisher": "null", **settings}
        self.address = ""
        self.holds: dict[str, Counter[int]] = {}
        self.publisher: Any = None
        self.server: Any = None

    async def __aenter__(self) -> Publishing:
        await self.restart()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.hang_up()
        self.publisher.shutdown(1)

    async def restart(self) -> None:
        """A new engine at the same address: an empty cache, another log."""
        if self.publisher is not None:
            await self.hang_up()
            self.publisher.shutdown(1)
        self.holds = {}
        self.publisher = open_publisher(self.settings, RankRef(RankId(self.engine, dp=self.dp), time.time_ns() // 1000))
        await self.serve()

    async def hang_up(self) -> None:
        """Nobody answers any more."""
        server, self.server = self.server, None
        if server is not None:
            await server.stop(0)

    async def serve(self) -> None:
        """Answers again, at the same address."""
        servicer = EventServicer([self.publisher.stream], heartbeat_seconds=0.1)
        self.server = grpc.aio.server(interceptors=interceptors_of(self.security), options=SERVER_OPTIONS)
        add_EventServiceServicer_to_server(servicer, self.server)
        address, credentials = self.address or "127.0.0.1:0", self.security.credentials()
        if credentials is None:
            port = self.server.add_insecure_port(address)
        else:
            port = self.server.add_secure_port(address, credentials)
        self.address = f"127.0.0.1:{port}"
        await self.server.start()

    async def store(self, hashes: Sequence[int], medium: str | None = "GPU") -> None:
        self.holds.setdefault(medium or "GPU", Counter()).update(hashes)
        await self.publish(BlockStored(list(hashes), None, [7] * 16 * len(hashes), 16, medium=medium))

    async def remove(self, hashes: Sequence[int], medium: str | None = "GPU") -> None:
        self.holds.setdefault(medium or "GPU", Counter()).subtract(hashes)
        await self.publish(BlockRemoved(list(hashes), medium=medium))

    async def clear(self) -> None:
        self.holds = {}
        await self.publish(AllBlocksCleared())

    async def publish(self, *events: object) -> None:
        """Publishes one batch and waits until it is in the journal."""
        assert self.publisher.publish(KVEventBatch(time.time(), list(events)))  # type: ignore[arg-type]
        await until(lambda: self.publisher.counts.unsent == 0)

    @property
    def next_sequence(self) -> int:
        return int(self.publisher.stream.next_sequence)

    def media_of(self, block: int) -> set[str]:
        return {medium for medium, copies in self.holds.items() if copies[block] > 0}


def publish_when_told(pipe: Connection, engine: str, address: str, settings: dict[str, Any]) -> None:
    """One in a process of its own: says address and log, then does what it is told, and says so."""

    async def run() -> None:
        publishing = Publishing(engine, **settings)
        publishing.address = address
        await publishing.restart()
        pipe.send((publishing.address, publishing.publisher.stream.log_id))
        while True:
            word, *more = await asyncio.to_thread(pipe.recv)
            if word == "publish":
                batch = KVEventBatch(time.time(), more)
                await until(lambda batch=batch: publishing.publisher.publish(batch))  # type: ignore[misc]
            else:
                await (publishing.hang_up() if word == "hang_up" else publishing.serve())
            pipe.send("done")

    asyncio.run(run())
