"""Who holds the beginning of a request, over the caches of many engines: followers for each, and one index."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Collection, Sequence

from kvgrpc.client.aio import Client
from kvgrpc.client.follower import EventFollower
from kvgrpc.errors import KvGrpcError
from kvgrpc.events.following.messages import FollowerState
from kvgrpc.events.following.prompts import sglang_hashes, vllm_hashes
from kvgrpc.events.following.sources import CacheScore, Source, SourceTable
from kvgrpc.net import check_target
from kvgrpc.observability.logging import RateLimited
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.rpc.within import check_seconds
from kvgrpc.v1 import registry_service_pb2

__all__ = ["PrefixIndex", "sglang_hashes", "vllm_hashes"]

FIND_SECONDS = 2.0
LOG_SECONDS = 60.0
_ANSWER_SECONDS = 5.0
_Cache = tuple[str, int]

_log = logging.getLogger(__name__)


class PrefixIndex:
    """``async with PrefixIndex(registry="127.0.0.1:8998") as index: index.score(hashes)``.

    Follows the caches of every engine whose events the registry says are served (of several replicas, with commas
    between them, the next is asked when one does not answer), and those of the ranks that
    ``sources`` names by the addresses of their gRPC. An engine that the registry does not list any more is followed as
    long as it answers: a registry's silence proves nothing. All methods belong to one event loop. Raises InvalidRequest
    for what is no address: it would look for it for ever.
    """

    def __init__(
        self,
        *,
        registry: str = "",
        sources: Sequence[str] = (),
        live: bool = False,
        security: ClientSecurity | None = None,
    ) -> None:
        self._registries = deque(check_target(address, "registry") for address in registry.split(",") if registry)
        for index, source in enumerate(sources):
            check_target(source, f"sources[{index}]")
        self._table = SourceTable()
        self._named = tuple(dict.fromkeys(sources))
        self._live = live
        self._security = security
        self._followers: dict[_Cache, tuple[EventFollower, str]] = {}
        self._finding: asyncio.Task[None] | None = None
        self._lines = RateLimited(_log, lines=1, seconds=LOG_SECONDS)

    async def __aenter__(self) -> PrefixIndex:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def healthy(self) -> bool:
        """Whether it still looks for caches."""
        return self._finding is not None and not self._finding.done()

    async def start(self) -> None:
        """Begins to look for caches and to follow them."""
        self._finding = background(self._find_for_ever(), "prefix-index")

    async def close(self) -> None:
        """Ends all followers."""
        if self._finding is not None:
            self._finding.cancel()
            await asyncio.gather(self._finding, return_exceptions=True)
        for cache in list(self._followers):
            await self._unfollow(cache)

    def score(self, hashes: Sequence[int], engines: Collection[str] = (), most: int = 0) -> list[CacheScore]:
        """The caches (of these engines; none named: of all) that hold the first block, those with most blocks first.

        At most ``most``; 0: all. Hashes are unsigned 64-bit: those of a prompt by ``sglang_hashes`` or ``vllm_hashes``,
        ``kvgrpc.events.log.digest.hash_key`` of what events say.
        """
        return self._table.score(hashes, engines, time.monotonic(), most)

    def sources(self) -> list[Source]:
        """All caches that are followed, by engine and dp."""
        return self._table.sources(time.monotonic())

    async def until_current(self, caches: int = 1, timeout: float = 30.0) -> None:
        """Waits until that many are current. Raises TimeoutError after ``timeout`` seconds (``math.inf``: never)."""
        check_seconds("timeout", max(timeout, 0.0), math.inf)
        end = time.monotonic() + timeout
        while sum(source.freshness.state is FollowerState.CURRENT for source in self.sources()) < caches:
            if time.monotonic() >= end:
                raise TimeoutError(f"not {caches} caches are current after {timeout:g} s")
            await asyncio.sleep(0.02)

    async def _find_for_ever(self) -> None:
        while True:
            known = {address for _, address in self._followers.values()}
            looks = [(address, self._ask_source(address)) for address in self._named if address not in known]
            if self._registries:
                looks.append((self._registries[0], self._ask_registry()))
            found: dict[_Cache, str] = {}
            answers = await asyncio.gather(*(look for _, look in looks), return_exceptions=True)
            for (asked, _), answer in zip(looks, answers, strict=True):
                if isinstance(answer, KvGrpcError):
                    self._lines.warning(f"{asked}: {answer.reason.name}", f"looking for caches at {asked}: {answer}")
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    found |= answer
            await self._follow(found, all(isinstance(answer, dict) for answer in answers))
            await asyncio.sleep(FIND_SECONDS)

    async def _ask_registry(self) -> dict[_Cache, str]:
        """The publishing rank of each cache: the one with pp = cp = tp = 0."""
        async with Client(self._registries[0], self._security, _ANSWER_SECONDS) as client:
            try:
                rows = [row for engine in await client.list_engines(include_rows=True) for row in engine.rows]
            except KvGrpcError:
                self._registries.rotate(-1)
                raise
        return {_cache(row): row.endpoints.grpc for row in rows if _publishes(row) and row.endpoints.grpc}

    async def _ask_source(self, address: str) -> dict[_Cache, str]:
        async with Client(address, self._security, _ANSWER_SECONDS) as client:
            return {(stream.engine, stream.dp): address for stream in await client.list_streams()}

    async def _follow(self, found: dict[_Cache, str], complete: bool) -> None:
        for cache, address in found.items():
            if cache not in self._followers or self._followers[cache][1] != address:
                await self._unfollow(cache)
                try:
                    await self._begin(cache, address)
                except KvGrpcError as error:
                    # An address that may not be dialled, a certificate that is being replaced: no affair of the others.
                    text = f"following dp{cache[1]} of {cache[0]}: {error}"
                    self._lines.warning(f"following: {error.reason.name}", text)
        for cache, (follower, address) in list(self._followers.items()):
            gone = complete and cache not in found and address not in self._named
            if gone and follower.state is FollowerState.CONNECTING:
                await self._unfollow(cache)

    async def _begin(self, cache: _Cache, address: str) -> None:
        engine, dp = cache
        follower = EventFollower(
            address, engine=engine, dp=dp, live=self._live, security=self._security, index=self._table.index
        )
        await follower.start()
        self._followers[cache] = follower, address
        self._table.add(engine, dp, follower.core, address, live=self._live)

    async def _unfollow(self, cache: _Cache) -> None:
        follower = self._followers.pop(cache, None)
        if follower is not None:
            self._table.remove(*cache)
            await follower[0].close()


def _cache(row: registry_service_pb2.RankRow) -> _Cache:
    return row.rank.rank.engine, row.rank.rank.dp


def _publishes(row: registry_service_pb2.RankRow) -> bool:
    rank = row.rank.rank
    return row.serves_events and not (rank.pp or rank.cp or rank.tp)
