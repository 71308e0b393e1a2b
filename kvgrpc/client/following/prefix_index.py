"""An index of who holds a request's beginning, over the caches of many engines: followers for each, and one index."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvgrpc.client.aio import Client
from kvgrpc.client.engine_mirror import EngineMirror
from kvgrpc.client.following.follower import EventFollower
from kvgrpc.client.following.lacking import WHOLE, Lacking
from kvgrpc.client.following.saved_index import SavedIndex
from kvgrpc.errors import KvGrpcError
from kvgrpc.events.following.contents import CacheContents
from kvgrpc.events.following.follower import FollowerCore
from kvgrpc.events.following.messages import FollowerState
from kvgrpc.events.following.planning import Placement, Planner, PlanQuestion
from kvgrpc.events.following.prompts import sglang_hashes, sglang_lora_id, vllm_hashes
from kvgrpc.events.following.saved import SavedCache
from kvgrpc.events.following.sources import (
    NO_LABELS,
    CacheScore,
    LabelSet,
    Question,
    Source,
    SourcesPage,
    SourceTable,
    Wanted,
)
from kvgrpc.net import check_target
from kvgrpc.observability import metrics
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.rpc.turns import in_pieces
from kvgrpc.rpc.within import check_seconds
from kvgrpc.v1 import registry_service_pb2

__all__ = ["PlanQuestion", "PrefixIndex", "Question", "Wanted", "sglang_hashes", "sglang_lora_id", "vllm_hashes"]

# Sources that were named are asked who they are so often, and engines that went are looked at.
LOOK_SECONDS = 2.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
LOG_SECONDS = 60.0
# A save copies what is known, in a step of a tenth of a second for six million blocks, and packs it on a thread.
SAVE_SECONDS, SAVE_AT_END_SECONDS = 300.0, 5.0
# An index without what it knew is better than none: a file of six million blocks is read in half a second.
READ_SECONDS = 30.0
# What was saved of engines that do not come back.
SAVED_KEPT_SECONDS = 120.0
_ANSWER_SECONDS = 5.0
# Routers are sent to an index that knows so much of what it follows, or began so long ago.
KNOWN_PART, KNOWN_WITHIN_SECONDS = 0.9, 60.0
# Beginning to follow takes a channel and a call: so many in one turn of the loop.
_BEGIN_AT_ONCE = 16
_Cache = tuple[str, int]
EVERY_CACHE = Wanted()
ANY_LABELS: Mapping[str, str] = MappingProxyType({})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Place:
    address: str
    model: str
    labels: LabelSet = NO_LABELS


class PrefixIndex:
    """``async with PrefixIndex(registry="127.0.0.1:8998") as index: index.score(hashes)``.

    Follows the caches of every engine whose events the registry says are served, as they come and go (WatchEngines; of
    several replicas, with commas between them, the next is asked when one does not answer), and those of the ranks that
    ``sources`` names by the addresses of their gRPC. An engine that the registry does not list any more is followed as
    long as it answers: a registry's silence proves nothing. What cannot be followed, ``not_followed`` says. ``saved``
    names a file: what is known is written there each five minutes and at the end, and a start goes on from there, for
    each cache whose log goes on. All methods belong to one event loop. Raises InvalidRequest for what is no address: it
    would look for it for ever.
    """

    def __init__(
        self,
        *,
        registry: str = "",
        sources: Sequence[str] = (),
        live: bool = False,
        security: ClientSecurity | None = None,
        saved: str = "",
    ) -> None:
        self._registries = deque(check_target(address, "registry") for address in registry.split(",") if registry)
        for index, source in enumerate(sources):
            check_target(source, f"sources[{index}]")
        self._table = SourceTable()
        self._planner = Planner(self._table)
        self._named = tuple(dict.fromkeys(sources))
        self._live = live
        self._security = security
        self._mirror = EngineMirror()
        self._followers: dict[_Cache, tuple[EventFollower, _Place]] = {}
        # Of each engine at the registry, and of the sources that were named: where its caches are.
        self._listed: dict[str, dict[_Cache, _Place]] = {}
        self._found: dict[_Cache, _Place] = {}
        self._gone: set[_Cache] = set()
        self._lacking = Lacking()
        self._file = SavedIndex(saved) if saved else None
        # Of caches that were not found again yet.
        self._saved: dict[_Cache, SavedCache] = {}
        self._forget_saved_at = 0.0
        # Where it has not looked to the end since it began; whether it knew most of what it found.
        self._searching = {"sources", "registries"} if registry else {"sources"}
        self._began, self._ready = 0.0, False
        self._turn = asyncio.Lock()
        # Both tasks that look begin followers, and one may take a while to begin: none is begun twice.
        self._beginning = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._lines = RateLimited(_log, lines=1, seconds=LOG_SECONDS)

    async def __aenter__(self) -> PrefixIndex:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def healthy(self) -> bool:
        """True if it still looks for caches."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    def standing(self) -> tuple[int, int]:
        """The number of caches that are current, and of those that are followed; on any thread."""
        states = [follower.state for follower, _ in list(self._followers.values())]
        return states.count(FollowerState.CURRENT), len(states)

    def health(self) -> bool | str:
        """True if it looks for caches, and once knew nine of ten; else why not. After a minute it is well with less:
        some engine of a large fleet is always away, and who knows a part is of more use than nobody."""
        if not self._ready and self._tasks:
            current, followed = self.standing()
            is_known = not self._searching and current >= KNOWN_PART * followed
            self._ready = is_known or time.monotonic() - self._began > KNOWN_WITHIN_SECONDS
            if not self._ready:
                return f"{current} of {followed} caches are current since the start"
        return self.healthy

    async def start(self) -> None:
        """Begins to look for caches and to follow them, once it has read what it knew."""
        self._began = time.monotonic()
        if self._file is None:
            self._look()
        else:
            self._tasks.append(background(self._go_on_from(self._file), "prefix-index-saved"))

    def _look(self) -> None:
        self._tasks.append(background(self._look_for_ever(), "prefix-index"))
        if self._registries:
            self._tasks.append(background(self._watch_for_ever(), "prefix-index-engines"))

    async def close(self) -> None:
        """Ends all followers."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._file is not None and self._is_worth_saving():
            await self._file.write(self._table.cut(), SAVE_AT_END_SECONDS)
        await asyncio.gather(*(self._unfollow(cache) for cache in list(self._followers)))

    async def _go_on_from(self, file: SavedIndex) -> None:
        self._saved = await file.read(READ_SECONDS)
        self._forget_saved_at = time.monotonic() + SAVED_KEPT_SECONDS
        self._look()
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            if self._is_worth_saving():
                await file.write(self._table.cut(), SAVE_SECONDS)

    def _is_worth_saving(self) -> bool:
        """False while what was saved is not all known again: the older file is of more use then."""
        return bool(self._followers) and not self._saved

    async def _restore(self, core: FollowerCore, saved: SavedCache) -> None:
        contents = CacheContents(self._table.index, saved.digest.next_sequence)
        try:
            async with self._turn:
                for _ in contents.restore(saved):
                    await asyncio.sleep(0)
            whole = contents.digest() == saved.digest
        except Exception as error:  # whoever wrote the file: the index goes on without
            _log.debug("what was saved of dp%d of %s: %r", saved.dp, saved.engine, error)
            whole = False
        if whole:
            core.restore(saved.log_id, contents)
        else:
            contents.blocks.drop()
            _log.warning("dp%d of %s was not saved whole: its snapshot is taken anew", saved.dp, saved.engine)

    def score(
        self,
        hashes: Sequence[int],
        engines: Collection[str] = (),
        most: int = 0,
        *,
        model: str = "",
        labels: Mapping[str, str] = ANY_LABELS,
    ) -> list[CacheScore]:
        """The caches (of these engines; none named: of all) that hold the first block, those with most blocks first.

        At most ``most``; 0: all. Hashes are unsigned 64-bit: those of a prompt by ``sglang_hashes`` or ``vllm_hashes``,
        ``kvgrpc.events.log.digest.hash_key`` of what events say. ``model``: only of engines that run it;
        ``labels``: only of ranks that have all of these at the registry. Raises InvalidRequest where no model is named
        and the caches are of several: hashes do not tell them apart.
        """
        return self.ask(Question({0: hashes}, model, labels=frozenset(labels.items())), Wanted(engines, most))

    def ask(self, question: Question, wanted: Wanted) -> list[CacheScore]:
        """Answers questions: ``score`` with all that can be asked."""
        return self._table.score(question, wanted, time.monotonic())

    def plan(
        self, questions: Sequence[PlanQuestion], wanted: Wanted = EVERY_CACHE, *, reserve: bool = False
    ) -> list[list[Placement]]:
        """Says where to run each request, best first, and from whom to pull which part of its prompt (docs/pull.md).

        ``reserve``: whoever asks does as the first placement says, and it counts for other plans until the engine has
        told what it has to do then. ``wanted``: the staleness of caches that plans may rest on. Raises InvalidRequest
        as ``score``."""
        return self._planner.plan(questions, time.monotonic(), wanted=wanted, reserve=reserve)

    def plan_in_steps(
        self, questions: Sequence[PlanQuestion], wanted: Wanted = EVERY_CACHE, *, reserve: bool = False
    ) -> Generator[list[Placement] | None, None, None]:
        """Plans one request after the other; None wherever others may go on before the next is ready.

        Close it where it is not gone through: what it reserved is taken back then."""
        return self._planner.in_steps(questions, time.monotonic(), wanted=wanted, reserve=reserve)

    def page_sizes(
        self, wanted: Wanted, model: str = "", field: str = "model", labels: LabelSet = NO_LABELS
    ) -> set[int]:
        """Tokens of a block of the caches that would be asked, where they told it."""
        return self._table.page_sizes(wanted, model, field, labels)

    def sources(self) -> list[Source]:
        """All caches that are followed, by engine and dp."""
        return self._table.sources(time.monotonic())

    def page_in_steps(
        self,
        page: SourcesPage,
        *,
        after: tuple[str, int] | None = None,
        states: Collection[FollowerState] = (),
        most: int = 1_000,
    ) -> Iterator[None]:
        """Fills ``page`` with at most so many of those behind ``after`` (None: from the first on) in one of these
        states (none: in any), and yields wherever others may go on before it is ready."""
        return self._table.page_in_steps(page, time.monotonic, after=after, states=states, most=most)

    def not_followed(self) -> list[str]:
        """Returns what cannot be followed now, each with its reason: "ENGINE: why", "ADDRESS: why"."""
        return self._lacking.lines()

    async def until_current(self, caches: int = 1, timeout: float = 30.0) -> None:
        """Waits until that many are current. Raises TimeoutError after ``timeout`` seconds (``math.inf``: never)."""
        check_seconds("timeout", max(timeout, 0.0), math.inf)
        end = time.monotonic() + timeout
        while sum(source.freshness.state is FollowerState.CURRENT for source in self.sources()) < caches:
            if time.monotonic() >= end:
                raise TimeoutError(f"not {caches} caches are current after {timeout:g} s")
            await asyncio.sleep(0.02)

    # What the registry says.

    async def _watch_for_ever(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            address, began = self._registries[0], time.monotonic()
            try:
                await self._watch(address)
                why = "it ended the stream"
            except KvGrpcError as error:
                why = str(error)
                text = one_line(f"looking for caches at {address}: {error}")
                self._lines.warning(f"{address}: {error.reason.name}", text)
            self._lacking.note(address, why)
            self._registries.rotate(-1)
            pause = FIRST_PAUSE_SECONDS if time.monotonic() - began > LONGEST_PAUSE_SECONDS else pause
            await asyncio.sleep(pause * (0.5 + random.random() / 2))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _watch(self, address: str) -> None:
        async with Client(address, self._security, _ANSWER_SECONDS) as client:
            async for message in client.watch_engines(without_pools=True):
                self._lacking.forget(address)
                for name in await self._mirror.apply_in_pieces(message):
                    await self._engine_changed(name)
                if self._mirror.complete:
                    self._searching.discard("registries")

    async def _engine_changed(self, name: str) -> None:
        """Its caches go where they are now: several turns for the rows of a large one."""
        known, now, lacks = self._mirror.parts(name), dict[_Cache, _Place](), dict[int, str]()
        if known is not None:
            await in_pieces(_published(name, *known, now, lacks))
            lacks |= _lacks_events(known[0], now)
        before = self._listed.pop(name, {})
        if known is not None:
            self._listed[name] = now
        for dp in self._lacking.replace(name, lacks):
            if dp != WHOLE:
                self._say_lacking("caches without an address", f"{name} dp{dp}", lacks[dp])
            else:
                self._say_lacking("engines that lack events" if now else "engines without events", name, lacks[dp])
        self._gone |= before.keys() - now.keys()
        self._gone -= now.keys()
        await self._follow_places(now)

    # Those that were named.

    async def _look_for_ever(self) -> None:
        while True:
            known = {place.address for _, place in self._followers.values()}
            asked = [address for address in self._named if address not in known]
            answers = await asyncio.gather(*map(self._ask_source, asked), return_exceptions=True)
            for address, answer in zip(asked, answers, strict=True):
                if isinstance(answer, KvGrpcError):
                    text = one_line(f"looking for caches at {address}: {answer}")
                    self._lines.warning(f"{address}: {answer.reason.name}", text)
                    self._lacking.note(address, str(answer))
                elif isinstance(answer, BaseException):
                    raise answer
                elif answer:
                    self._lacking.forget(address)
                    self._found |= answer
                    await self._follow_places(answer)
                elif self._lacking.note(address, why := "it serves no stream of events"):
                    self._say_lacking("addresses without events", address, why)
            self._searching.discard("sources")
            await self._let_go()
            self._set_gauges()
            await asyncio.sleep(LOOK_SECONDS)

    async def _ask_source(self, address: str) -> dict[_Cache, _Place]:
        async with Client(address, self._security, _ANSWER_SECONDS) as client:
            return {(stream.engine, stream.dp): _Place(address, "") for stream in await client.list_streams()}

    # Followers.

    async def _follow_places(self, places: dict[_Cache, _Place]) -> None:
        async with self._beginning:
            await self._follow_each(places)

    async def _follow_each(self, places: dict[_Cache, _Place]) -> None:
        for begun, cache in enumerate(filter(None, await in_pieces(self._moved(places))), 1):
            engine, dp = cache
            await self._unfollow(cache)
            try:
                await self._begin(cache, places[cache])
                self._lacking.forget(engine, dp)
            except KvGrpcError as error:
                # An address that may not be dialled, a certificate that is being replaced: no affair of the others.
                text = one_line(f"following dp{dp} of {engine}: {error}")
                self._lines.warning(f"following: {error.reason.name}", text)
                self._lacking.note(engine, str(error), dp)
            if not begun % _BEGIN_AT_ONCE:
                await asyncio.sleep(0)

    def _moved(self, places: Mapping[_Cache, _Place]) -> Iterator[_Cache | None]:
        """Those that are not followed where they are now; None for each of the others."""
        for cache, place in places.items():
            follower = self._followers.get(cache)
            yield cache if follower is None or follower[1] != place else None

    async def _let_go(self) -> None:
        """Of what a registry lists no more, what does not answer either; and what could not be begun is tried again."""
        if self._saved and time.monotonic() > self._forget_saved_at:
            self._saved = {}
        if not self._mirror.warming_up:
            for cache in list(self._gone):
                follower = self._followers.get(cache)
                if follower is None or follower[1].address in self._named:
                    self._gone.discard(cache)
                elif follower[0].state is FollowerState.CONNECTING:
                    self._gone.discard(cache)
                    await self._unfollow(cache)
        for places in list(self._listed.values()):
            missing = {cache: place for cache, place in places.items() if cache not in self._followers}
            if missing:
                await self._follow_places(missing)

    def _set_gauges(self) -> None:
        """For whoever looks at this process's metrics; each look's time is its own."""
        states: dict[FollowerState, int] = dict.fromkeys(FollowerState, 0)
        lag = 0
        for follower, _ in self._followers.values():
            states[follower.core.state] += 1
            lag += follower.core.lag
        for state, count in states.items():
            metrics.INDEX_SOURCES.labels(state.name).set(count)
        metrics.INDEX_LAG.set(lag)
        metrics.INDEX_BLOCKS.set(self._table.index.blocks)
        metrics.INDEX_LACKING.set(len(self._lacking))

    async def _begin(self, cache: _Cache, place: _Place) -> None:
        engine, dp = cache
        follower = EventFollower(
            place.address,
            engine=engine,
            dp=dp,
            live=self._live,
            security=self._security,
            index=self._table.index,
            turn=self._turn,
        )
        saved = self._saved.get(cache)
        if saved is not None:
            await self._restore(follower.core, saved)
        try:
            await follower.start()
        except KvGrpcError:
            await follower.close()  # else what was restored is in the index for ever
            raise
        self._saved.pop(cache, None)
        self._followers[cache] = follower, place
        self._table.add(
            engine, dp, follower.core, place.address, live=self._live, model=place.model, labels=place.labels
        )

    async def _unfollow(self, cache: _Cache) -> None:
        follower = self._followers.pop(cache, None)
        if follower is not None:
            self._table.remove(*cache)
            await follower[0].close()

    def _say_lacking(self, kind: str, what: str, why: str) -> None:
        self._lines.warning(kind, one_line(f"{what} is not followed: {why}"))


def _published(
    name: str,
    head: registry_service_pb2.Engine,
    rows: Iterable[registry_service_pb2.RankRow],
    places: dict[_Cache, _Place],
    lacks: dict[int, str],
) -> Iterator[None]:
    """Fills in where the caches of an engine are, at the publishing rank of each, and which cannot be followed; yields
    behind each row."""
    for row in rows:
        if _publishes(row):
            dp = row.rank.rank.dp
            if row.endpoints.grpc:
                places[name, dp] = _Place(row.endpoints.grpc, head.model.name, frozenset(row.labels.items()))
            else:
                lacks[dp] = "it serves events, and its row names no gRPC address"
        yield


def _lacks_events(head: registry_service_pb2.Engine, places: Collection[_Cache]) -> dict[int, str]:
    if not places:
        return {WHOLE: f"none of its {head.registered_ranks} registered ranks serves events"}
    if head.dp_lacking_events:
        return {WHOLE: f"dp ranks {_numbers(head.dp_lacking_events)} serve no events, others of it do"}
    return {}


def _publishes(row: registry_service_pb2.RankRow) -> bool:
    """The rank with pp = cp = tp = 0 publishes its dp."""
    rank = row.rank.rank
    return row.serves_events and not (rank.pp or rank.cp or rank.tp)


def _numbers(dp_ranks: Sequence[int]) -> str:
    return ", ".join(map(str, dp_ranks[:8])) + (", ..." if len(dp_ranks) > 8 else "")
