"""Who lends: the ranks that a registry knows, and how much of a prompt each of them has."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from kvgrpc.client.engine_mirror import EngineMirror
from kvgrpc.errors import EngineNotFound, InvalidRequest, KvGrpcError, ServerDraining
from kvgrpc.model import Layout, ModelIdentity, RankRef, check_rank
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.prefetch.storage.keys import PageIdentity
from kvgrpc.pull import wire
from kvgrpc.pull.model import Holder, Lent, PullConfig
from kvgrpc.registry.calls import domain_errors, pause_before, unreachable
from kvgrpc.registry.model import ResolvedEngine
from kvgrpc.registry.wire import MAX_ENGINE_RANKS, PoolCache, engine_from_pb
from kvgrpc.rpc.channels import ChannelPool
from kvgrpc.rpc.within import within
from kvgrpc.transfer.protocol.types import Target
from kvgrpc.transfer.runtime.resolve import PrefillEngine
from kvgrpc.v1 import pull_service_pb2 as pb
from kvgrpc.v1 import registry_service_pb2
from kvgrpc.v1.pull_service_pb2_grpc import PullServiceStub
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from kvgrpc.wire import rank_ref_to_pb

# A registry says something each 5 s.
_IDLE_SECONDS = 15.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
_REMEMBERED = 4096

_log = logging.getLogger(__name__)


class Holders:
    """The ranks of other engines that lend the part of the cache which this rank holds. Belongs to one event loop.

    Holders are followed at the registry (WatchEngines); one that does not answer in time is passed over, so a wrong or
    old row costs one answer.
    """

    def __init__(
        self,
        ref: RankRef,
        model: ModelIdentity,
        identity: PageIdentity,
        config: PullConfig,
        open_channel: Callable[[str], grpc.aio.Channel],
    ) -> None:
        self._ref = ref
        self._model = model
        self._identity = wire.identity_to_pb(identity)
        self._config = config
        self._channels = ChannelPool(open_channel)
        # Calls under way, by address; and the registry that is read.
        self._in_use: Counter[str] = Counter()
        self._closed = False
        self._mirror = EngineMirror()
        self._engines: dict[str, ResolvedEngine] = {}
        self._pools = PoolCache()
        self._known: dict[str, PrefillEngine] = {}
        self._lines = RateLimited(_log)

    def candidates(self) -> list[Holder]:
        """Whom one prompt is asked for, in random order: whoever is first has no more to do than the others."""
        found = [holder for engine in self._engines.values() for holder in self._of(engine)]
        random.shuffle(found)
        return found[: self._config.holders]

    async def best(self, hashes: Sequence[str], timeout: float) -> tuple[Holder | None, int]:
        """The candidate with most leading pages, and how many; none where nobody has one, or nobody answers."""
        holders = self.candidates()
        request = pb.CountPagesRequest(identity=self._identity, page_hashes=wire.hashes_to_pb(hashes))
        seconds = min(timeout, self._config.answer_timeout)
        counts = await asyncio.gather(*(self._count(each, request, seconds) for each in holders))
        pages, holder = max(zip(counts, holders, strict=True), key=lambda each: each[0], default=(0, None))
        return (holder, min(pages, len(hashes))) if pages else (None, 0)

    async def lend(self, holder: Holder, hashes: Sequence[str], first: int, room: int, timeout: float) -> Lent:
        """Asks for ``hashes[first:]`` in a room. Raises KvGrpcError."""
        request = pb.LendPagesRequest(
            identity=self._identity,
            page_hashes=wire.hashes_to_pb(hashes),
            first_page=first,
            room=room,
            taker=rank_ref_to_pb(self._ref),
        )
        seconds = max(0.001, min(timeout, self._config.answer_timeout))
        answer = await self._call(holder, lambda stub: stub.LendPages(request, timeout=seconds))
        lent = wire.lent_from_pb(answer, len(hashes) - first)
        self._check(holder, lent)
        self._remember(holder, lent.holder, lent.layout)
        return lent

    async def engine_at(self, address: str) -> PrefillEngine:
        """Whose sessions the rooms of a holder need, as it said when it lent."""
        engine = self._known.get(address)
        if engine is None:
            raise EngineNotFound(
                f"{address} has lent nothing to {self._ref.rank}",
                metadata={"engine": "", "role": "", "missingRanks": address},
            )
        return engine

    async def follow(self, registry: str) -> None:
        """Reads the registry's engines until it is cancelled; what it said last holds while it is away."""
        addresses, attempt = registry.split(","), 0
        while True:
            address = addresses[attempt % len(addresses)]
            try:
                with domain_errors(address):
                    await self._read(address)
            except KvGrpcError as error:
                self._lines.warning("registry", f"holders of pages are not heard of: {one_line(str(error))}")
                await self._channels.hang_up(address)
                await asyncio.sleep(pause_before(attempt, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, error))
                attempt += 1

    async def close(self) -> None:
        """Threads that still take pages are told; they would open channels that nobody closes."""
        self._closed = True
        await self._channels.close()

    async def _read(self, address: str) -> None:
        request = registry_service_pb2.WatchEnginesRequest(without_pools=True)
        call = RegistryServiceStub(self._channels.get(address)).WatchEngines(request)
        self._in_use[address] += 1
        try:
            while True:
                message = await within(_IDLE_SECONDS, call.read())
                if not isinstance(message, registry_service_pb2.WatchEnginesResponse):
                    raise unreachable(address, "it ended the stream")
                for name in self._mirror.apply(message):
                    engine = self._mirror.engine(name)
                    if engine is None:
                        self._engines.pop(name, None)
                    else:
                        self._engines[name] = engine_from_pb(engine, self._pools)
        finally:
            self._in_use[address] -= 1
            call.cancel()

    def _of(self, engine: ResolvedEngine) -> Iterator[Holder]:
        own, wanted = self._ref.rank, self._config.engines
        if engine.name == own.engine or (wanted and engine.name not in wanted):
            return
        if self._model.differences(engine.model):
            return
        for row in engine.rows:
            rank = row.ref.rank
            if row.endpoints.grpc and row.endpoints.cache and (rank.pp, rank.cp, rank.tp) == (own.pp, own.cp, own.tp):
                yield Holder(engine.name, row.endpoints.grpc, row.endpoints.cache)

    async def _count(self, holder: Holder, request: pb.CountPagesRequest, seconds: float) -> int:
        try:
            answer = await self._call(holder, lambda stub: stub.CountPages(request, timeout=seconds))
        except KvGrpcError as error:
            text = f"{holder.engine} at {holder.address} does not say what it has: {one_line(str(error))}"
            self._lines.warning(f"holder {holder.address}", text)
            return 0
        return int(answer.host_pages)

    async def _call(self, holder: Holder, call: Callable[[Any], Any]) -> Any:
        if self._closed:
            raise ServerDraining(f"{self._ref} takes nothing more")
        address = holder.address
        self._in_use[address] += 1
        try:
            with domain_errors(address):
                return await call(PullServiceStub(self._channels.get(address)))
        finally:
            self._in_use[address] -= 1
            await self._channels.trim(+self._in_use)

    def _check(self, holder: Holder, lent: Lent) -> None:
        """A holder speaks for its own engine, and for the part of it that was asked: what it says is believed next, and
        sizes that it makes up would be counted out. Raises InvalidRequest."""
        check_rank(lent.holder, lent.layout, "holder")
        rank, own = lent.holder.rank, self._ref.rank
        if (rank.engine, rank.pp, rank.cp, rank.tp) != (holder.engine, own.pp, own.cp, own.tp):
            raise InvalidRequest.of("holder", rank, f"a rank of {holder.engine} with pp, cp and tp of {own}")
        if lent.layout.ranks > MAX_ENGINE_RANKS:
            raise InvalidRequest.of("layout", lent.layout, f"at most {MAX_ENGINE_RANKS} ranks")

    def _remember(self, holder: Holder, ref: RankRef, layout: Layout) -> None:
        target = Target(ref, holder.sessions, layout)
        self._known.pop(holder.sessions, None)
        self._known[holder.sessions] = PrefillEngine(ref.rank.engine, layout, {ref.rank[1:]: target})
        if len(self._known) > _REMEMBERED:
            self._known.pop(next(iter(self._known)))
