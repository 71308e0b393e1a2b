"""All ranks of a registry, asked side by side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvgrpc.client.aio import Client
from kvgrpc.errors import EngineNotFound, KvGrpcError
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.v1 import registry_service_pb2

T = TypeVar("T")
ASKED_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class RankAnswer(Generic[T]):
    """The answer of one rank: ``value``, or the ``error`` that came in its place."""

    row: registry_service_pb2.RankRow
    value: T | None = None
    error: KvGrpcError | None = None


class Fleet:
    """The ranks that the registry at ``address`` knows. Belongs to one event loop.

    A rank that does not answer within ``timeout`` seconds, or refuses, is an answer with its error: it holds up no
    other one. At most ASKED_AT_ONCE are asked at a time, each over a connection of its own that is closed again.
    """

    def __init__(self, address: str, security: ClientSecurity | None = None, timeout: float = 5.0) -> None:
        self._address, self._security, self._timeout = address, security, timeout

    async def ask(self, call: Callable[[Client], Awaitable[T]]) -> list[RankAnswer[T]]:
        """The answers of all ranks, ordered as the registry has them. Raises what the registry itself raises."""
        places = asyncio.Semaphore(ASKED_AT_ONCE)

        async def one(row: registry_service_pb2.RankRow) -> RankAnswer[T]:
            async with places:
                try:
                    async with Client(row.endpoints.grpc, self._security, self._timeout) as client:
                        return RankAnswer(row, await call(client))
                except KvGrpcError as error:
                    return RankAnswer(row, error=error)

        return await asyncio.gather(*(one(row) for row in await self._rows() if row.endpoints.grpc))

    async def _rows(self) -> list[registry_service_pb2.RankRow]:
        async with Client(self._address, self._security, self._timeout) as registry:
            rows: list[registry_service_pb2.RankRow] = []
            for engine in await registry.list_engines():
                with contextlib.suppress(EngineNotFound):  # it went meanwhile
                    rows += (await registry.get_engine(engine.name)).rows
            return rows
