"""Finds lenders: the ranks that a registry knows, and how much of a prompt each of them has."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import grpc

from kvgrpc.client.engine_mirror import EngineMirror
from kvgrpc.errors import EngineNotFound, InvalidRequest, KvGrpcError, PeerUnreachable, ServerDraining
from kvgrpc.model import Layout, ModelIdentity, RankId, RankRef, check_rank
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.prefetch.storage.keys import PageIdentity
from kvgrpc.pull import wire
from kvgrpc.pull.common import CommonPages, SameNames
from kvgrpc.pull.heads import Share
from kvgrpc.pull.model import Found, Holder, Lent, PullConfig, alone
from kvgrpc.pull.taking.indexed import IndexAnswer, IndexedHolders, event_hash_of
from kvgrpc.pull.taking.listed import ListedEngine, listed
from kvgrpc.pull.taking.named import say_unknown
from kvgrpc.pull.taking.silent import SilentHolders
from kvgrpc.registry.calls import domain_errors, pause_before, unreachable
from kvgrpc.registry.model import RankRow, ResolvedEngine
from kvgrpc.rpc.dialing.channels import ChannelPool
from kvgrpc.rpc.turns import in_pieces
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
_MOST_SIZES = 4
# Characters of a name that a registry gives, in a line of the log.
_LONGEST_NAME = 128

_log = logging.getLogger(__name__)


class Holders:
    """The ranks of other engines that lend the part of the cache which this rank holds. Belongs to one event loop.

    Holders are followed at the registry (WatchEngines); one that does not answer in time is passed over, so a wrong or
    old row costs one answer.
    """

    def __init__(
        self,
        ref: RankRef,
        layout: Layout,
        model: ModelIdentity,
        identity: PageIdentity,
        config: PullConfig,
        open_channel: Callable[[str], grpc.aio.Channel],
        model_name: str = "",
        shares: Callable[[int], Sequence[Share]] = lambda tp_size: (),
        common: tuple[CommonPages, PageIdentity] | None = None,
        event_hash: Callable[[bytes], int] = event_hash_of,
    ) -> None:
        """``model_name``: by which the registry, and so an index, knows our model; empty: by none. ``shares``: which
        ranks of an engine of another tensor-parallel size have our pages together. ``common``: our pages as engines of
        another kind have them; None: those are not asked. ``event_hash``: by which our own events name a page."""
        self._ref = ref
        self._model = model
        self._layout = layout
        self._own, self._find_shares = identity, shares
        # By tensor-parallel size, and whether the engine is of another kind.
        self._shares: dict[tuple[int, bool], dict[int, Share]] = {}
        self._common = common
        # Addresses of those that refused our own identity: another kind, which may know the common order.
        self._of_other_kind: set[str] = set()
        # Of those that answered to it: what an index says of our hashes is true of them.
        self._of_own_kind: set[str] = set()
        self._event_hash = event_hash
        self._config = config
        self._channels = ChannelPool(open_channel)
        # Calls under way, by address; and the registry that is read.
        self._in_use: Counter[str] = Counter()
        self._closed = False
        self._mirror = EngineMirror()
        self._engines: dict[str, ListedEngine] = {}
        self._known: dict[str, PrefillEngine] = {}
        self.silent = SilentHolders()
        self._index = (
            IndexedHolders(config.index, model_name, self._channels, config.answer_timeout) if config.index else None
        )
        self._lines = RateLimited(_log)

    def candidates(
        self,
        without: Collection[str] = (),
        only: Collection[str] | None = None,
        indexed: IndexAnswer | None = None,
    ) -> list[Holder]:
        """Whom one prompt is asked for: those that an index named, most pages first, and of those that it cannot know
        some in random order: whoever is first there has no more to do than the others."""
        engines = list(self._engines.values())  # a copy: who looks from another thread meets changes of the registry
        known = [holder for engine in engines for holder in self._of(engine)]
        if only is not None:
            unknown = say_unknown(only, known, self._ref.rank.engine)
            if unknown:
                self._lines.warning("named engines", unknown)
            known = [each for each in known if each.engine in only or each.address in only]
        found = [each for each in known if each.address not in without and not self._is_silent(each)]
        random.shuffle(found)
        if indexed is not None:
            found = indexed.best_first(found, self._has_other_names)
        return found[: self._config.holders]

    @property
    def _names_are_common(self) -> bool:
        return self._common is not None and isinstance(self._common[0].names, SameNames)

    def _has_other_names(self, holder: Holder) -> bool | None:
        """False of those whose names we have: our own, and the common ones where ours are others. An engine of another
        kind has names that only it can tell, where ours are the common ones. None: its kind is not known yet."""
        if not self._names_are_common:
            return False
        if holder.common:
            return True
        return False if holder.address in self._of_own_kind else None

    def _is_silent(self, holder: Holder) -> bool:
        return any(each.address in self.silent for each in (holder, *holder.others))

    async def best(
        self,
        hashes: Sequence[str],
        timeout: float,
        without: Collection[str] = (),
        only: Collection[str] | None = None,
    ) -> Found | None:
        """The candidate with most leading pages; None where nobody has one, or nobody answers.
        ``without``: addresses that are not asked; ``only``: names or addresses of those that are. Whoever names them
        knows already who has the prompt: no index is asked."""
        own = wire.hashes_to_pb(hashes)
        named = {False: own, True: own if self._names_are_common else await self._common_names(hashes)}
        indexed = (
            None if only is not None or self._index is None else await self._index.ask(self._events(named), timeout)
        )
        holders = self.candidates(without, only, indexed)
        seconds = min(timeout, self._config.answer_timeout)
        found = await asyncio.gather(*(self._count_at(each, named, seconds) for each in holders))
        best = max(found, key=lambda each: each.pages, default=None)
        return best if best is not None and best.pages else None

    def _events(self, named: Mapping[bool, Sequence[bytes]]) -> list[list[int]]:
        """The names of a prompt's pages, our own and the common ones, by which events tell of them."""
        own = [self._event_hash(each) for each in named[False]]
        common = [event_hash_of(each) for each in named[True]]
        return [own, common] if common and common != own[: len(common)] else [own]

    async def lend(
        self, found: Found, prompt: Sequence[str], first: int, count: int, room: int, timeout: float
    ) -> Lent:
        """Asks for ``count`` pages of a prompt, from ``first`` on, in a room. Raises KvGrpcError."""
        holder = found.holder
        seconds = max(0.001, min(timeout, self._config.answer_timeout))
        request = pb.LendPagesRequest(
            identity=self._identity_of(holder),
            first_page=first,
            room=room,
            taker=rank_ref_to_pb(self._ref),
            counted_prompt=found.name,
            pages=count,
        )
        answer = await self._call(holder, "LendPages", request, seconds)
        if answer.prompt_unknown:
            request.counted_prompt = b""
            wanted = prompt[: first + count]
            named = await self._common_names(wanted) if holder.common else wire.hashes_to_pb(wanted)
            request.page_hashes.extend(named)
            answer = await self._call(holder, "LendPages", request, seconds)
        lent = wire.lent_from_pb(answer, count)
        check_lent(lent, holder, self._ref.rank)
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
                self._channels.redial(address)
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
                for name in await self._mirror.apply_in_pieces(message):
                    await self._hear_of(name)
        finally:
            self._in_use[address] -= 1
            call.cancel()

    async def _hear_of(self, name: str) -> None:
        """One whose rows cannot be read, of a newer version perhaps, is not asked; of the others more is heard."""
        try:
            await self._take_news(name)
        except Exception as error:
            self._engines.pop(name, None)
            text = one_line(f"{type(error).__name__}: {error}")
            named = one_line(name, _LONGEST_NAME)
            self._lines.warning(
                "rows of engines", f"pages of {named} are not taken, its rows cannot be read: {text}", subject=named
            )

    async def _take_news(self, name: str) -> None:
        known, before = self._mirror.parts(name), self._engines.get(name)
        if known is None:
            if before is not None:
                del self._engines[name]
                await in_pieces(self._forget_kinds(before.addresses()))
            return
        own = self._ref.rank
        now = self._engines[name] = await listed(*known, (own.pp, own.cp), before)
        await in_pieces(self._forget_kinds((*now.left, *now.came)))
        await in_pieces(map(self.silent.forget, now.came))
        self._say_unlike(now)

    def _forget_kinds(self, addresses: Iterable[str]) -> Iterator[None]:
        for address in addresses:
            self._of_other_kind.discard(address)
            self._of_own_kind.discard(address)
            yield

    def _say_unlike(self, listed: ListedEngine) -> None:
        """One of our model that lends, and is never asked."""
        engine = listed.engine
        unlike = self._unlike(engine)
        if unlike is not None and not self._model.differences(engine.model) and listed.lends:
            named = one_line(engine.name, _LONGEST_NAME)
            text = f"pages of {named} are not taken: {one_line(str(unlike))}"
            self._lines.warning("sizes of engines", text, subject=named)

    def shares_of(self, tp_size: int, common: bool = False) -> Mapping[int, Share]:
        """By tp rank, those of an engine of this size that have our pages together; none where they cannot be had.
        ``common``: of an engine of another kind.

        Where all ranks hold the same bytes one of them does, and our ranks ask different ones.
        """
        if common and self._common is None:
            return {}
        if tp_size == self._layout.tp or self._own.replicated:
            tp = self._ref.rank.tp % tp_size
            return {tp: Share(tp, self._common[1] if common and self._common is not None else self._own)}
        found = self._shares.get((tp_size, common))
        if found is None:
            if len(self._shares) >= _MOST_SIZES:  # each has memory of its own
                return {}
            found = {each.tp: each for each in self._shares_found(tp_size, common)}
            if found:
                self._shares[tp_size, common] = found
        return found

    def _shares_found(self, tp_size: int, common: bool) -> Sequence[Share]:
        if common and self._common is not None:
            return self._common[0].shares(self._own, tp_size)
        return self._find_shares(tp_size)

    def _unlike(self, engine: ResolvedEngine) -> InvalidRequest | None:
        """The first of its parallel sizes for which its pages have other bytes than ours, and ours cannot be made of
        them."""
        for axis in ("tp", "pp", "cp"):
            theirs, ours = getattr(engine.layout, axis), getattr(self._layout, axis)
            if theirs != ours and not (axis == "tp" and (self.shares_of(theirs) or self.shares_of(theirs, True))):
                return InvalidRequest.of(f"identity.{axis}_size", theirs, f"{ours}, as this cache's pages have")
        return None

    def _of(self, listed: ListedEngine) -> Iterator[Holder]:
        engine, own, wanted = listed.engine, self._ref.rank, self._config.engines
        if engine.name == own.engine or (wanted and engine.name not in wanted):
            return
        if self._model.differences(engine.model) or self._unlike(engine) is not None:
            return
        own_kind = self.shares_of(engine.layout.tp)
        shares = own_kind or self.shares_of(engine.layout.tp, common=True)
        for rows in listed.lending.values():
            tps = self._who_has(shares, rows)
            if all(tp in rows for tp in tps):
                first, *others = (self._holder(engine, rows[tp], shares, not own_kind) for tp in tps)
                yield replace(first, others=tuple(others))

    def _holder(self, engine: ResolvedEngine, row: RankRow, shares: Mapping[int, Share], other_kind: bool) -> Holder:
        rank, ends, layout = row.ref.rank, row.endpoints, engine.layout
        divided = rank.tp in shares and bool(shares[rank.tp].parts)
        return Holder(
            engine.name,
            ends.grpc,
            ends.cache,
            rank.dp,
            row.serves_events,
            layout,
            rank.tp,
            layout.tp if divided else 0,
            other_kind or ends.grpc in self._of_other_kind,
        )

    def _who_has(self, shares: Mapping[int, Share], rows: Mapping[int, RankRow]) -> Sequence[int]:
        """The tp ranks that are asked. Of those that hold the same bytes some may not lend."""
        if self._own.replicated and not shares.keys() & rows.keys():
            return list(rows)[self._ref.rank.tp % len(rows) :][:1]
        return list(shares)

    async def _count_at(self, holder: Holder, hashes: Mapping[bool, Sequence[bytes]], seconds: float) -> Found:
        """Its leading pages; where others of its engine have the rest of each page, those that all of them have."""
        asked = (self._count_one(each, hashes, seconds) for each in (holder, *holder.others))
        found, *others = await asyncio.gather(*asked)
        pages = min(each.pages for each in (found, *others))
        if any(each.holder.common is not found.holder.common for each in others):
            pages = 0  # one of them was asked in a way that it will not be asked again
        return replace(found, pages=pages, others=tuple(others))

    async def _count_one(self, holder: Holder, hashes: Mapping[bool, Sequence[bytes]], seconds: float) -> Found:
        """``hashes``: our own, and the common ones."""
        named, name = hashes[holder.common], secrets.token_bytes(wire.NAME_BYTES)
        if not named:  # the common names of a prompt are not always known
            return Found(holder, 0, name)
        try:
            request = pb.CountPagesRequest(identity=self._identity_of(holder), page_hashes=named, prompt_name=name)
            answer = await self._call(holder, "CountPages", request, seconds)
        except Exception as error:  # whatever it is: other holders are asked, too
            if isinstance(error, KvGrpcError) and self._is_of_other_kind(holder, error):
                _note_kind(self._of_other_kind, holder)
                return await self._count_one(replace(holder, common=True), hashes, seconds)
            said = str(error) if isinstance(error, KvGrpcError) else f"{type(error).__name__}: {error}"
            who = one_line(f"{holder.engine} at {holder.address}", 2 * _LONGEST_NAME)
            text = f"{who} does not say what it has: {one_line(said)}"
            self._lines.warning("holders that do not answer", text, subject=holder.address)
            return Found(holder, 0, name)
        if not holder.common:
            _note_kind(self._of_own_kind, holder)
        return Found(holder, min(int(answer.host_pages), len(named)), name)

    def _is_of_other_kind(self, holder: Holder, refused: KvGrpcError) -> bool:
        """True if what it refused is our own identity, and it may be asked for pages in the common order."""
        if holder.common or not self.shares_of(holder.tp_size or self._layout.tp, common=True):
            return False
        return isinstance(refused, InvalidRequest) and str(refused.metadata.get("field")).startswith("identity.")

    async def _common_names(self, hashes: Sequence[str]) -> list[bytes]:
        """On a thread: prompts may have to be hashed first."""
        if self._common is None:
            return []
        return wire.hashes_to_pb(await asyncio.to_thread(self._common[0].names.common, hashes))

    def _identity_of(self, holder: Holder) -> pb.PageIdentity:
        """The identity that its pages must have."""
        if holder.tp_size:
            return wire.identity_to_pb(self.shares_of(holder.tp_size, holder.common)[holder.tp].identity)
        return wire.identity_to_pb(self._common[1] if holder.common and self._common is not None else self._own)

    async def _call(self, holder: Holder, method: str, request: Any, seconds: float) -> Any:
        if self._closed:
            raise ServerDraining(f"{self._ref} takes nothing more")
        address, began = holder.address, time.monotonic()
        self._in_use[address] += 1
        try:
            with domain_errors(address, holder.engine):
                return await getattr(PullServiceStub(self._channels.get(address)), method)(request, timeout=seconds)
        except PeerUnreachable:
            took = time.monotonic() - began
            self.silent.unanswered(address, seconds, self._config.answer_timeout, took)
            raise
        finally:
            self._in_use[address] -= 1
            self._in_use = +self._in_use  # else each address that ever was stays, with a count of 0
            self._channels.trim(self._in_use)

    def _remember(self, holder: Holder, ref: RankRef, layout: Layout) -> None:
        of_cache, caches = alone(ref, layout)
        target = Target(of_cache, holder.sessions, caches)
        self._known.pop(holder.sessions, None)
        self._known[holder.sessions] = PrefillEngine(ref.rank.engine, caches, {of_cache.rank[1:]: target})
        if len(self._known) > _REMEMBERED:
            self._known.pop(next(iter(self._known)))


def _note_kind(addresses: set[str], holder: Holder) -> None:
    """An answer may come when its engine is gone, which nobody tells a second time: so there is a bound."""
    if len(addresses) >= _REMEMBERED:
        addresses.pop()
    addresses.add(holder.address)


def check_lent(lent: Lent, holder: Holder, own: RankId) -> None:
    """A holder speaks for itself: what it says is believed next, and with other sizes it would be another rank of its
    engine to sessions. Raises InvalidRequest."""
    check_rank(lent.holder, lent.layout, "holder")
    expected = RankId(holder.engine, holder.dp, own.pp, own.cp, holder.tp)
    if lent.holder.rank != expected:
        raise InvalidRequest.of("holder", lent.holder.rank, f"{expected}, which was asked")
    if lent.layout != holder.layout:
        raise InvalidRequest.of("layout", lent.layout, f"{holder.layout}, as the registry has it")
