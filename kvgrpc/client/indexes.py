"""Several indexes of one fleet: who routes asks one of them, and waits for none."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvgrpc.client.aio import Client
from kvgrpc.errors import InvalidRequest, KvGrpcError
from kvgrpc.rpc.dialing.retry import may_repeat
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.rpc.within import check_seconds
from kvgrpc.v1 import index_service_pb2 as pb

T = TypeVar("T")
# Of a router: in the path of every request.
WAIT_SECONDS = 0.02
_MARGIN_SECONDS = 5.0


class Indexes:
    """``async with Indexes(["10.0.0.1:8997", "10.0.0.2:8997"]) as indexes: answer = await indexes.score(request)``.

    A question goes to the one that failed longest ago, and where that refuses at once to the next; after
    ``wait_seconds`` there is no answer (None), and the next question goes elsewhere. ``unanswered`` counts those. An
    index that is gone costs what was asked of it in that time. Raises InvalidRequest and what else no other index would
    answer. Belongs to one event loop.
    """

    def __init__(
        self, addresses: Sequence[str], security: ClientSecurity | None = None, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        if not addresses:
            raise InvalidRequest.of("addresses", addresses, "at least one address of an index")
        check_seconds("wait_seconds", wait_seconds)
        self._clients = [Client(address, security) for address in addresses]
        # When it last did not answer.
        self._failed_at = dict.fromkeys(self._clients, 0.0)
        self._wait_seconds = wait_seconds
        self.unanswered = 0

    async def __aenter__(self) -> Indexes:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def score(self, request: pb.ScoreRequest, wait_seconds: float | None = None) -> pb.ScoreResponse | None:
        """Returns who holds the beginnings of requests; None: nobody answered in time.

        ``wait_seconds``: for this question, as before the first request: connecting takes longer than one may wait.
        """
        return await self._first(lambda index, seconds: index.score(request, once_within=seconds), wait_seconds)

    async def plan(self, request: pb.PlanRequest, wait_seconds: float | None = None) -> pb.PlanResponse | None:
        """Returns where to run requests, and from whom to pull which part of their prompts; None as of ``score``."""
        return await self._first(lambda index, seconds: index.plan(request, once_within=seconds), wait_seconds)

    async def close(self) -> None:
        """Closes the connections."""
        for client in self._clients:
            await client.close()

    async def _first(self, ask: Callable[[Client, float], Awaitable[T]], wait_seconds: float | None) -> T | None:
        end = time.monotonic() + (self._wait_seconds if wait_seconds is None else wait_seconds)
        first, *others = sorted(self._clients, key=self._failed_at.__getitem__)
        for other in others:
            await other.connect()  # nobody has time for that when the first one dies
        for client in (first, *others):
            left = end - time.monotonic()
            if left <= 0:
                break
            try:
                return await ask(client, left)
            except KvGrpcError as error:
                if not may_repeat(error):
                    raise
                self._failed_at[client] = time.monotonic()
        self.unanswered += 1
        return None


class SyncIndexes:
    """``Indexes`` for plain code and any thread but the loop's own."""

    def __init__(
        self, addresses: Sequence[str], security: ClientSecurity | None = None, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        self._loop = LoopThread.shared()
        self._indexes = Indexes(addresses, security, wait_seconds)
        self._seconds = wait_seconds + _MARGIN_SECONDS

    def __enter__(self) -> SyncIndexes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def unanswered(self) -> int:
        """Counts as ``Indexes`` does."""
        return self._indexes.unanswered

    def score(self, request: pb.ScoreRequest, wait_seconds: float | None = None) -> pb.ScoreResponse | None:
        """See ``Indexes.score``."""
        return self._loop.run(self._indexes.score(request, wait_seconds), self._seconds + (wait_seconds or 0.0))

    def plan(self, request: pb.PlanRequest, wait_seconds: float | None = None) -> pb.PlanResponse | None:
        """See ``Indexes.plan``."""
        return self._loop.run(self._indexes.plan(request, wait_seconds), self._seconds + (wait_seconds or 0.0))

    def close(self) -> None:
        """See ``Indexes.close``."""
        self._loop.run(self._indexes.close(), self._seconds)
