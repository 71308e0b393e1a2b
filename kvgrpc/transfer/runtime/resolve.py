"""From the address that a request names to the prefill rank that owes this decode rank its part."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from kvgrpc.errors import EngineNotFound, Failure, Internal, InvalidRequest, KvGrpcError
from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.transfer.layout import topology
from kvgrpc.transfer.protocol import failures
from kvgrpc.transfer.protocol.decode.core import DecodeCore, DecodeRoom
from kvgrpc.transfer.protocol.types import LONGEST_TRACEPARENT, Handle, Target, prefill_dp
from kvgrpc.transfer.runtime.boundary import RoomRequest
from kvgrpc.transfer.runtime.room_locator import Renewed, RoomLocator

logger = logging.getLogger(__name__)
KNOWN_ENGINES = 4096
KNOWN_DEAD = 65_536
# Of one engine, that a room is named to or looked for at: each is dialled, whoever said that it is there.
MOST_PREFILL_RANKS = 1_024
# A registry that names one for longer hears of it: a lease of a rank that died is over by then, or soon.
_DEATH_STANDS_SECONDS = 30.0
_JOIN_WITHIN_SECONDS = 0.25
_AWAIT_SECONDS = 600.0
_AWAIT_PAUSE_SECONDS = 1.0
Coordinates = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class PrefillEngine:
    """A registry's answer about a prefill engine: its layout, and its ranks that could owe this decode rank a part.

    ``engine_selects_dp``: its own balancer chooses the dp rank of a room that no router chose, and not room % dp.
    ``owing``: of each dp rank that was asked for, those of its ranks that owe us something.
    """

    name: str
    layout: Layout
    targets: Mapping[Coordinates, Target]
    engine_selects_dp: bool = False
    owing: dict[int, tuple[Target, ...]] = field(default_factory=dict, compare=False)


class Resolve(Protocol):
    """Asks the registry behind a ``bootstrap_addr``, waiting until the engine is READY; ``at_once``: for a second at
    most, and for whoever is there now. Raises KvGrpcError.
    """

    async def __call__(self, bootstrap_addr: str, decode: RankId, at_once: bool = False) -> PrefillEngine: ...


class Changes(Protocol):
    """Waits until the newest change at the registry behind a ``bootstrap_addr`` is later than ``since``, at most
    ``timeout`` seconds, and returns that change's number. Never raises KvGrpcError.
    """

    async def __call__(self, bootstrap_addr: str, since: int, timeout: float) -> int: ...


class ReceiverRoom(DecodeRoom, eq=False, kw_only=True):
    """A room with what says the way to its prefill. ``span``: where the rank traces, that of the hand-off."""

    request: RoomRequest
    span: Any = None

    @classmethod
    def of(cls, handle: Handle, request: RoomRequest) -> ReceiverRoom:
        """The room that the engine asked for."""
        traceparent = request.traceparent
        readable = isinstance(traceparent, str) and traceparent.isascii() and len(traceparent) <= LONGEST_TRACEPARENT
        return cls(request.key, handle, traceparent if readable else "", request=request)


class PrefillResolver:
    """Binds rooms to their prefill ranks. Used on the loop thread, except ``stands``.

    ``start`` runs a question to a registry as a task; ``pump`` is called after every answer.
    """

    def __init__(
        self,
        core: DecodeCore,
        shape: topology.Shape,
        resolve: Resolve,
        open_channel: Callable[[str], grpc.aio.Channel],
        start: Callable[[Coroutine[None, None, None], str], asyncio.Task[None]],
        pump: Callable[[], None],
        changes: Changes | None = None,
    ) -> None:
        """``changes`` None: a rank that was lost is dialled when a room needs it, and not before."""
        self._changes = changes
        self._core = core
        self._shape = shape
        self._resolve = resolve
        self._start = start
        self._pump = pump
        self._engines: dict[str, PrefillEngine] = {}
        # What is known of them is what was said before a rank was lost: for rooms on their way, never for new ones.
        self._doubtful: set[str] = set()
        # Incarnations whose address refused, and when.
        self._dead: dict[RankRef, float] = {}
        self._questions: dict[tuple[str, bool], tuple[float, list[ReceiverRoom]]] = {}
        self._awaited: dict[tuple[str, Coordinates], asyncio.Task[None]] = {}
        self._locator = RoomLocator(
            open_channel, start, self._on_found, self._on_no_answer, self._targets_now, self._fail, self._on_over
        )
        self._closed = False

    def find(self, room: ReceiverRoom) -> None:
        """Binds a new room at once where its session is up; else asks the registry first."""
        error = _route_error(room.request)
        if error is not None:
            self._fail(room, error)
            return
        engine = self._known(room.request.bootstrap_addr)
        if engine is None or not self._bind_to_known(room, engine):
            self._ask(room)

    def stands(self, request: RoomRequest) -> bool:
        """True if there are sessions to all ranks that owe the room. Any thread may call it: it only reads, and caches
        in ``owing`` what any thread would compute. An engine's thread waits for it, mostly with nothing of this in a
        processor's caches, so it calls little.
        """
        address, dp = request.bootstrap_addr, request.prefill_dp_rank
        if type(address) is not str or (dp is not None and type(dp) is not int) or address in self._doubtful:
            return False
        engine = self._engines.get(address)
        if engine is None or _must_be_found(request, engine):
            return False
        targets: Sequence[Target] | None = engine.owing.get(request.key.room % engine.layout.dp if dp is None else dp)
        try:
            targets = targets or self._targets(request, engine)
        except KvGrpcError:
            return False
        for target in targets:
            pair = self._core.pairs.get(target.ref)
            if pair is None or not pair.up:
                return False
        return True

    def find_anew(self, room: ReceiverRoom) -> None:
        """Asks the registry again: the rank that was known is gone, and another may be in its place."""
        if room.request.bootstrap_addr in self._engines:
            self._doubtful.add(room.request.bootstrap_addr)
        self._ask(room)

    def note_death(self, dead: RankRef) -> None:
        """Rooms that need it are not to wait for a successor that nobody has promised."""
        self._dead[dead] = asyncio.get_running_loop().time()
        if len(self._dead) > KNOWN_DEAD:
            del self._dead[next(iter(self._dead))]

    def await_restart(self, lost: RankRef) -> None:
        """The rank is gone, or hangs: asks the registry for its successor for some minutes, so that the successor has a
        session before a request needs one.
        """
        if self._changes is None:
            return
        for bootstrap_addr, engine in self._engines.items():
            for coordinates, target in engine.targets.items():
                place = (bootstrap_addr, coordinates)
                if target.ref == lost and place not in self._awaited and not self._closed:
                    self._awaited[place] = self._start(self._await_restart(*place, self._changes), f"await {lost.rank}")

    async def close(self) -> None:
        self._closed = True
        for task in self._awaited.values():
            task.cancel()
        await self._locator.close()

    async def _await_restart(self, bootstrap_addr: str, coordinates: Coordinates, changes: Changes) -> None:
        """Asks the registry once, and again when it says that something changed."""
        now = asyncio.get_running_loop().time
        give_up_at = now() + _AWAIT_SECONDS
        known, target = -1, None
        try:
            while now() < give_up_at:
                change = await changes(bootstrap_addr, known, _AWAIT_PAUSE_SECONDS)
                if change != known:
                    known, target = change, await self._target_at(bootstrap_addr, coordinates)
                if target is not None and self._stands(target):
                    break
        except Exception:
            logger.exception("asking %s for a rank that was lost failed", bootstrap_addr)
        finally:
            del self._awaited[bootstrap_addr, coordinates]

    async def _target_at(self, bootstrap_addr: str, coordinates: Coordinates) -> Target | None:
        """Returns who is registered there now; None: nobody yet."""
        try:
            engine = await self._resolve(bootstrap_addr, self._core.me.rank)
        except KvGrpcError:
            return None
        self._remember(bootstrap_addr, engine)
        return engine.targets.get(coordinates)

    def _stands(self, target: Target) -> bool:
        """True if there is a session to the rank; one is dialled where there is none."""
        self._core.predial(target)
        self._pump()
        return self._core.pairs[target.ref].up

    def _ask(self, room: ReceiverRoom) -> None:
        """One question for all rooms that wait for the same address, if they come soon after each other: a question has
        a time of its own, and whoever joined late would have less of it.
        """
        now = asyncio.get_running_loop().time()
        at_once = self._dead_target(room, self._engines.get(room.request.bootstrap_addr)) is not None
        question = room.request.bootstrap_addr, at_once
        asked_at, waiting = self._questions.get(question, (-_JOIN_WITHIN_SECONDS, []))
        if now - asked_at < _JOIN_WITHIN_SECONDS:
            waiting.append(room)
            return
        rooms = [room]
        self._questions[question] = now, rooms
        self._start(self._answer(question, rooms), f"resolve {room.request.bootstrap_addr}")

    async def _answer(self, question: tuple[str, bool], rooms: list[ReceiverRoom]) -> None:
        bootstrap_addr, at_once = question
        me, failure, engine = self._core.me, None, None
        before = self._engines.get(bootstrap_addr)
        try:
            if at_once:
                engine = await self._resolve(bootstrap_addr, me.rank, at_once=True)
            else:
                engine = await self._resolve(bootstrap_addr, me.rank)
            self._doubt_deaths(engine)
            if not at_once or before is None or not _misses_ranks(engine, before):
                self._remember(bootstrap_addr, engine)
        except KvGrpcError as error:
            failure = Failure.of(error, str(me))
        except Exception as error:
            request_id = uuid.uuid4().hex
            logger.exception("resolving %s failed, request id %s", bootstrap_addr, request_id)
            what = f"resolving {bootstrap_addr}: {type(error).__name__}"
            failure = Failure.of(Internal.of(what, request_id), str(me))
        if self._questions.get(question, (0.0, []))[1] is rooms:
            del self._questions[question]
        for room in rooms:
            dead = None
            if at_once:  # then a registry that has just started does not know those yet that have still to come back
                dead = self._dead_target(room, engine if engine and self._names_all(room, engine) else before)
            if dead is not None:
                self._fail(room, failures.no_successor(dead))
            elif engine is not None:
                self._bind(room, engine)
            elif failure is not None:
                self._core.fail(room, failure)
        self._pump()

    def _dead_target(self, room: ReceiverRoom, engine: PrefillEngine | None) -> RankRef | None:
        """One that the room needs and that is dead, as far as is known; of an engine whose ranks are to be asked which
        has the room, all must be."""
        if engine is None or not self._dead:
            return None
        try:
            if _must_be_found(room.request, engine):
                known = [target.ref for target in engine.targets.values()]
                return known[0] if known and all(ref in self._dead for ref in known) else None
            targets = self._targets(room.request, engine)
        except KvGrpcError:
            return None
        return next((target.ref for target in targets if target.ref in self._dead), None)

    def _names_all(self, room: ReceiverRoom, engine: PrefillEngine) -> bool:
        """True if the engine as it is known has the ranks that owe the room, or those to ask for them."""
        try:
            return _must_be_found(room.request, engine) or bool(self._targets(room.request, engine))
        except KvGrpcError:
            return False

    def _doubt_deaths(self, engine: PrefillEngine) -> None:
        """A rank that its registry names long after its address refused is dialled again: somebody renews its lease, so
        that something in front of it may have refused, as it does while a container starts."""
        now = asyncio.get_running_loop().time() if self._dead else 0.0
        for target in engine.targets.values() if self._dead else ():
            noted = self._dead.get(target.ref)
            if noted is not None and now - noted > _DEATH_STANDS_SECONDS:
                del self._dead[target.ref]

    def _remember(self, bootstrap_addr: str, engine: PrefillEngine) -> None:
        self._engines[bootstrap_addr] = engine
        self._doubtful.discard(bootstrap_addr)
        if len(self._engines) > KNOWN_ENGINES:
            oldest = next(iter(self._engines))
            del self._engines[oldest]
            self._doubtful.discard(oldest)

    def _known(self, bootstrap_addr: str) -> PrefillEngine | None:
        return None if bootstrap_addr in self._doubtful else self._engines.get(bootstrap_addr)

    def _bind(self, room: ReceiverRoom, engine: PrefillEngine) -> None:
        try:
            if _must_be_found(room.request, engine):
                self._look_for(room, engine)
            else:
                self._core.bind(room, self._targets(room.request, engine))
        except KvGrpcError as error:
            self._fail(room, error)

    def _bind_to_known(self, room: ReceiverRoom, engine: PrefillEngine) -> bool:
        """False where no session to the rank stands: what is known of it may be old."""
        try:
            if _must_be_found(room.request, engine):
                self._look_for(room, engine)
                return True
            targets = self._targets(room.request, engine)
        except KvGrpcError:
            return False
        for target in targets:
            pair = self._core.pairs.get(target.ref)
            if pair is None or pair.lost or pair.dead_at is not None:
                return False
        self._core.bind(room, targets)
        return True

    def _look_for(self, room: ReceiverRoom, engine: PrefillEngine) -> None:
        """Asks one rank of each dp rank which of them has the room's sender. Raises like ``_targets_of``."""
        _check_few(engine, engine.layout.dp)
        self._locator.add(room, [self._targets_of(dp, engine)[0] for dp in range(engine.layout.dp)])

    def _on_found(self, room: DecodeRoom, target: Target) -> None:
        """Bound to all that owe it a part, or not yet: one that misses some would be whole without their bytes."""
        assert isinstance(room, ReceiverRoom)
        engine = self._engines.get(room.request.bootstrap_addr)
        try:
            if engine is None:  # others were remembered in its place
                self._ask(room)
            else:
                self._core.bind(room, self._targets_of(target.ref.rank.dp, engine))
        except KvGrpcError as error:
            self._fail(room, error)
        self._pump()

    def _on_over(self, room: DecodeRoom, targets: Sequence[Target]) -> None:
        """It ended while it was looked for: wherever its senders are, they hear why."""
        assert isinstance(room, ReceiverRoom)
        engine = self._engines.get(room.request.bootstrap_addr)
        for target in targets:
            of_its_dp: Sequence[Target] = [target]
            if engine is not None:
                with contextlib.suppress(KvGrpcError):  # an engine that came back as another one
                    of_its_dp = self._targets_of(target.ref.rank.dp, engine)
            self._core.bind(room, of_its_dp)
        self._pump()

    async def _targets_now(self, room: DecodeRoom) -> Renewed:
        """All dp ranks of the room's engine as its registry knows them now; EngineNotFound: not all of them are there,
        though it waited for them."""
        if not isinstance(room, ReceiverRoom):
            return None
        try:
            engine = await self._resolve(room.request.bootstrap_addr, self._core.me.rank)
            targets = [self._targets_of(dp, engine)[0] for dp in range(engine.layout.dp)]
        except EngineNotFound as error:
            return error
        except KvGrpcError:
            return None
        self._remember(room.request.bootstrap_addr, engine)
        return targets

    def _on_no_answer(self, room: DecodeRoom) -> None:
        if isinstance(room, ReceiverRoom) and not room.ended:
            self.find_anew(room)

    def _targets(self, request: RoomRequest, engine: PrefillEngine) -> Sequence[Target]:
        dp = request.prefill_dp_rank
        return self._targets_of(prefill_dp(request.key.room, engine.layout.dp) if dp is None else dp, engine)

    def _targets_of(self, dp: int, engine: PrefillEngine) -> Sequence[Target]:
        """Every rank that owes us a part, or is to hear of our rooms; the one that sends aux is first.

        Raises ParallelLayoutMismatch, InvalidRequest or EngineNotFound.
        """
        known = engine.owing.get(dp)
        if known is not None:
            return known
        places = topology.prefill_ranks(self._core.me.rank, self._shape.layout, engine.layout, dp)
        _check_few(engine, len(places))
        missing = [place for place in places if place not in engine.targets]
        if missing:
            raise EngineNotFound(
                f"the registry knows no prefill rank {missing[0]} (dp, pp, cp, tp) of engine {engine.name!r}",
                metadata={"engine": engine.name, "role": "PREFILL", "missingRanks": missing[0]},
            )
        targets = [engine.targets[place] for place in places]
        if engine.layout.pp > self._shape.layout.pp:
            stages = {target.ref.rank.pp: target.layers for target in targets}
            topology.check_layers(self._shape.pools, [stages[pp] for pp in sorted(stages)])
        engine.owing[dp] = tuple(targets)
        return engine.owing[dp]

    def _fail(self, room: DecodeRoom, error: KvGrpcError) -> None:
        self._core.fail(room, Failure.of(error, str(self._core.me)))


def _must_be_found(request: RoomRequest, engine: PrefillEngine) -> bool:
    return engine.engine_selects_dp and engine.layout.dp > 1 and request.prefill_dp_rank is None


def _check_few(engine: PrefillEngine, ranks: int) -> None:
    if ranks > MOST_PREFILL_RANKS:
        rule = f"at most {MOST_PREFILL_RANKS} ranks that a room is named to, or looked for at, not {ranks}"
        raise InvalidRequest.of("engine.layout", engine.layout, rule)


def _misses_ranks(engine: PrefillEngine, before: PrefillEngine) -> bool:
    """True if some of those before are not there yet; ranks of another layout came in the place of all of them."""
    return engine.layout == before.layout and not engine.targets.keys() >= before.targets.keys()


def _route_error(request: RoomRequest) -> InvalidRequest | None:
    """Why the engine's way to a prefill cannot be one: checked here, where many rooms ask one question together."""
    address, dp = request.bootstrap_addr, request.prefill_dp_rank
    if not isinstance(address, str) or not address.isascii():
        return InvalidRequest.of("bootstrap_addr", address, "host:port, optionally /engine")
    if dp is not None and (type(dp) is not int or dp < 0):
        return InvalidRequest.of("prefill_dp_rank", dp, "0 or more")
    return None
