"""Carries out what a plan says: one call has pages pulled to the engine that is to run a request."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass

from kvgrpc.client.aio import Client
from kvgrpc.errors import EngineNotFound, Failure, KvGrpcError, PeerUnreachable
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.rpc.within import check_seconds, within
from kvgrpc.v1 import index_service_pb2, prefetch_service_pb2

WAIT_SECONDS = 5.0
_MARGIN_SECONDS = 5.0
_MOST_RANKS = 1024
# Of the time that is left: an engine that uses its own up says so before ours is over.
_ENGINES_PART = 0.9


@dataclass(slots=True)
class Pulled:
    """The end of a pull. ``pages``: leading pages of the prompt that lie at the engine, as far as it told.

    ``operation``: as the engine told it last; None: none was begun. ``failure``: why nothing more is known; None where
    the pull has ended, or there was none to do. Whatever it says, the request may be sent: what did not come is
    computed.
    """

    pages: int = 0
    operation: prefetch_service_pb2.CacheOperation | None = None
    failure: Failure | None = None


class Pulls:
    """``async with Pulls("10.0.0.9:8998") as pulls: came = await pulls.pull(placement, pages)``, the address a
    registry's. Keeps a connection to each rank that it has told to pull, and of those that do not pull 1,024 at most.
    Belongs to one event loop.
    """

    def __init__(self, registry: str, security: ClientSecurity | None = None, wait_seconds: float = WAIT_SECONDS):
        check_seconds("wait_seconds", wait_seconds)
        self._registry, self._security, self._wait_seconds = Client(registry, security), security, wait_seconds
        # Where the leading rank of a cache is, by engine and dp; and connections, by address.
        self._addresses: dict[tuple[str, int], str] = {}
        self._ranks: OrderedDict[str, Client] = OrderedDict()
        self._users = Counter[str]()

    async def __aenter__(self) -> Pulls:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def pull(
        self,
        placement: index_service_pb2.Placement,
        pages: prefetch_service_pb2.PromptPages,
        wait_seconds: float | None = None,
    ) -> Pulled:
        """Has the placement's engine take ``pages`` from the engine that the plan names, and returns once that has
        ended, after ``wait_seconds`` at the latest; at once where nothing is to be pulled.

        Raises InvalidRequest for ``wait_seconds`` alone: all else that goes wrong is ``failure`` of what is returned.
        """
        seconds = self._wait_seconds if wait_seconds is None else wait_seconds
        check_seconds("wait_seconds", seconds)
        came = Pulled()
        if not placement.HasField("pull"):
            return came
        try:
            await within(seconds, self._pull(placement, pages, time.monotonic() + seconds, came))
        except asyncio.TimeoutError:
            text = f"{placement.engine} has not ended its pull in {seconds:g} s"
            came.failure = Failure.of(PeerUnreachable(text, metadata={"address": ""}))
        except KvGrpcError as error:
            came.failure = Failure.of(error)
        if came.failure is not None and came.operation is None:  # it may have come back elsewhere
            self._addresses.pop((placement.engine, placement.dp), None)
        return came

    async def close(self) -> None:
        """Closes the connections. What still pulls is cancelled."""
        for client in (self._registry, *self._ranks.values()):
            await client.close()

    async def _pull(
        self,
        placement: index_service_pb2.Placement,
        pages: prefetch_service_pb2.PromptPages,
        end: float,
        came: Pulled,
    ) -> None:
        address = await self._leading(placement.engine, placement.dp)
        rank = await self._connected(address)
        self._users[address] += 1
        try:
            left = max(0.001, (end - time.monotonic()) * _ENGINES_PART)
            _take(came, await rank.start_prefetch(pages, timeout=left, engines=[placement.pull.engine]))
            assert came.operation is not None
            async for message in rank.watch_operations([came.operation.operation_id]):
                for operation in message.operations:
                    _take(came, operation)
        finally:
            self._users[address] -= 1

    async def _leading(self, engine: str, dp: int) -> str:
        """The address of the rank that leads this cache of an engine."""
        address = self._addresses.get((engine, dp))
        if address is None:
            rows = (await self._registry.get_engine(engine)).rows
            found = (row for row in rows if (row.rank.rank.dp, row.rank.rank.pp, row.rank.rank.tp) == (dp, 0, 0))
            row = next(found, None)
            if row is None:
                metadata = {"engine": engine, "role": "", "missingRanks": f"dp{dp}"}
                raise EngineNotFound(f"the registry has no rank that leads cache {dp} of {engine}", metadata=metadata)
            address = self._addresses[engine, dp] = row.endpoints.grpc
        return address

    async def _connected(self, address: str) -> Client:
        client = self._ranks.pop(address, None) or Client(address, self._security)
        self._ranks[address] = client
        if len(self._ranks) > _MOST_RANKS:
            others = (each for each in self._ranks if each != address and not self._users[each])
            if (longest_unused := next(others, None)) is not None:
                del self._users[longest_unused]
                await self._ranks.pop(longest_unused).close()
        return client


def _take(came: Pulled, operation: prefetch_service_pb2.CacheOperation) -> None:
    came.operation = operation
    came.pages = max(operation.completed_pages, operation.covered_pages)


class SyncPulls:
    """``Pulls`` for plain code and any thread but the loop's own."""

    def __init__(self, registry: str, security: ClientSecurity | None = None, wait_seconds: float = WAIT_SECONDS):
        self._loop = LoopThread.shared()
        self._pulls = Pulls(registry, security, wait_seconds)
        self._seconds = wait_seconds + _MARGIN_SECONDS

    def __enter__(self) -> SyncPulls:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def pull(
        self,
        placement: index_service_pb2.Placement,
        pages: prefetch_service_pb2.PromptPages,
        wait_seconds: float | None = None,
    ) -> Pulled:
        """See ``Pulls.pull``."""
        return self._loop.run(self._pulls.pull(placement, pages, wait_seconds), self._seconds + (wait_seconds or 0.0))

    def close(self) -> None:
        """See ``Pulls.close``."""
        self._loop.run(self._pulls.close(), self._seconds)
