"""From the address that a request names to the prefill rank that owes this decode rank its part."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Protocol

import grpc

from kvgrpc.errors import EngineNotFound, Failure, InvalidRequest, KvGrpcError, Reason
from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.transfer.layout import topology
from kvgrpc.transfer.protocol.decode_core import DecodeCore, DecodeRoom
from kvgrpc.transfer.protocol.types import LONGEST_TRACEPARENT, Handle, RoomKey, Target, prefill_dp
from kvgrpc.transfer.runtime.search import RoomSearch

logger = logging.getLogger(__name__)
_KNOWN_ENGINES = 4096
_AWAIT_SECONDS = 600.0
_AWAIT_PAUSE_SECONDS = 1.0
Coordinates = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class PrefillEngine:
    """What a registry said of a prefill engine: its layout, and the ranks that could owe this decode rank a part.

    ``engine_selects_dp``: its own balancer chooses the dp rank of a room that no router chose, and not room % dp.
    """

    name: str
    layout: Layout
    targets: Mapping[Coordinates, Target]
    engine_selects_dp: bool = False


class Resolve(Protocol):
    """Asks the registry behind a ``bootstrap_addr``, waiting until the engine is READY. Raises KvGrpcError."""

    async def __call__(self, bootstrap_addr: str, decode: RankId) -> PrefillEngine: ...


class ReceiverRoom(DecodeRoom):
    """A room with the way to its prefill: the registry's address, and the dp rank if the router chose one."""

    __slots__ = ("bootstrap_addr", "prefill_dp_rank")

    def __init__(
        self, key: RoomKey, handle: Handle, bootstrap_addr: str, prefill_dp_rank: int | None, traceparent: str
    ) -> None:
        readable = isinstance(traceparent, str) and traceparent.isascii() and len(traceparent) <= LONGEST_TRACEPARENT
        super().__init__(key, handle, traceparent if readable else "")
        self.bootstrap_addr = bootstrap_addr
        self.prefill_dp_rank = prefill_dp_rank


class Routes:
    """Binds rooms to their prefill ranks. On the loop thread; ``start`` runs a question beside it, ``pump`` follows
    every answer.
    """

    def __init__(
        self,
        core: DecodeCore,
        layout: Layout,
        resolve: Resolve,
        open_channel: Callable[[str], grpc.aio.Channel],
        start: Callable[[Coroutine[None, None, None], str], asyncio.Task[None]],
        pump: Callable[[], None],
    ) -> None:
        self._core = core
        self._layout = layout
        self._resolve = resolve
        self._start = start
        self._pump = pump
        self._engines: dict[str, PrefillEngine] = {}
        self._questions: dict[str, list[ReceiverRoom]] = {}
        self._awaited: dict[tuple[str, Coordinates], asyncio.Task[None]] = {}
        self._search = RoomSearch(open_channel, start, self._on_found, self._on_silence, self._targets_now)
        self._closed = False

    def find(self, room: ReceiverRoom) -> None:
        """Binds a new room at once where its session stands; else the registry is asked first."""
        error = _route_error(room)
        if error is not None:
            self._fail(room, error)
            return
        engine = self._engines.get(room.bootstrap_addr)
        if engine is None or not self._bind_to_known(room, engine):
            self._ask(room)

    def find_anew(self, room: ReceiverRoom) -> None:
        """The rank that was known is gone: somebody else may be there now."""
        self._engines.pop(room.bootstrap_addr, None)
        self._ask(room)

    def await_restart(self, lost: RankRef) -> None:
        """The rank is gone, or hangs. Whoever is at its place next gets a session before a request needs one: for some
        minutes the registry is asked for it.
        """
        for bootstrap_addr, engine in self._engines.items():
            for coordinates, target in engine.targets.items():
                place = (bootstrap_addr, coordinates)
                if target.ref == lost and place not in self._awaited and not self._closed:
                    self._awaited[place] = self._start(self._meet_again(*place), f"await {lost.rank}")

    async def close(self) -> None:
        self._closed = True
        for task in self._awaited.values():
            task.cancel()
        await self._search.close()

    async def _meet_again(self, bootstrap_addr: str, coordinates: Coordinates) -> None:
        now = asyncio.get_running_loop().time
        give_up_at = now() + _AWAIT_SECONDS
        try:
            while now() < give_up_at:
                if await self._stands(bootstrap_addr, coordinates):
                    break
                await asyncio.sleep(_AWAIT_PAUSE_SECONDS)
        except Exception:
            logger.exception("asking %s for a rank that was lost failed", bootstrap_addr)
        finally:
            del self._awaited[bootstrap_addr, coordinates]

    async def _stands(self, bootstrap_addr: str, coordinates: Coordinates) -> bool:
        """Whether there is a session to the rank that is registered there now; one is dialled where there is none."""
        try:
            engine = await self._resolve(bootstrap_addr, self._core.me.rank)
        except KvGrpcError:
            return False  # not back yet
        self._remember(bootstrap_addr, engine)
        target = engine.targets.get(coordinates)
        if target is None:
            return False
        self._core.predial(target)
        self._pump()
        return self._core.pairs[target.ref].up

    def _ask(self, room: ReceiverRoom) -> None:
        """One question for all rooms that wait for the same address."""
        waiting = self._questions.get(room.bootstrap_addr)
        if waiting is not None:
            waiting.append(room)
            return
        self._questions[room.bootstrap_addr] = [room]
        self._start(self._answer(room.bootstrap_addr), f"resolve {room.bootstrap_addr}")

    async def _answer(self, bootstrap_addr: str) -> None:
        me, failure, engine = self._core.me, None, None
        try:
            engine = await self._resolve(bootstrap_addr, me.rank)
            self._remember(bootstrap_addr, engine)
        except KvGrpcError as error:
            failure = Failure.of(error, str(me))
        except Exception as error:
            logger.exception("resolving %s failed", bootstrap_addr)
            failure = Failure(Reason.INTERNAL, f"resolving {bootstrap_addr}: {type(error).__name__}", {}, str(me))
        for room in self._questions.pop(bootstrap_addr):
            if engine is not None:
                self._bind(room, engine)
            elif failure is not None:
                self._core.fail(room, failure)
        self._pump()

    def _remember(self, bootstrap_addr: str, engine: PrefillEngine) -> None:
        self._engines[bootstrap_addr] = engine
        if len(self._engines) > _KNOWN_ENGINES:
            del self._engines[next(iter(self._engines))]

    def _bind(self, room: ReceiverRoom, engine: PrefillEngine) -> None:
        try:
            if _must_be_found(room, engine):
                self._look_for(room, engine)
            else:
                self._core.bind(room, [self._target(room, engine)])
        except KvGrpcError as error:
            self._fail(room, error)

    def _bind_to_known(self, room: ReceiverRoom, engine: PrefillEngine) -> bool:
        """False where no session to the rank stands: what is known of it may be old."""
        try:
            if _must_be_found(room, engine):
                self._look_for(room, engine)
                return True
            target = self._target(room, engine)
        except KvGrpcError:
            return False
        pair = self._core.pairs.get(target.ref)
        if pair is None or pair.lost or pair.dead_at is not None:
            return False
        self._core.bind(room, [target])
        return True

    def _look_for(self, room: ReceiverRoom, engine: PrefillEngine) -> None:
        """Which dp rank has its sender, the ranks themselves say. Raises as ``_target_of``."""
        self._search.add(room, [self._target_of(dp, engine) for dp in range(engine.layout.dp)])

    def _on_found(self, room: DecodeRoom, target: Target) -> None:
        self._core.bind(room, [target])
        self._pump()

    async def _targets_now(self, room: DecodeRoom) -> list[Target] | None:
        """All dp ranks of the room's engine as its registry knows them now; None: it does not know all of them."""
        if not isinstance(room, ReceiverRoom):
            return None
        try:
            engine = await self._resolve(room.bootstrap_addr, self._core.me.rank)
            targets = [self._target_of(dp, engine) for dp in range(engine.layout.dp)]
        except KvGrpcError:
            return None
        self._remember(room.bootstrap_addr, engine)
        return targets

    def _on_silence(self, room: DecodeRoom) -> None:
        if isinstance(room, ReceiverRoom) and not room.ended:
            self.find_anew(room)

    def _target(self, room: ReceiverRoom, engine: PrefillEngine) -> Target:
        dp = prefill_dp(room.key.room, engine.layout.dp) if room.prefill_dp_rank is None else room.prefill_dp_rank
        return self._target_of(dp, engine)

    def _target_of(self, dp: int, engine: PrefillEngine) -> Target:
        """Raises LayoutMismatch, InvalidRequest or EngineNotFound."""
        coordinates = topology.prefill_coordinates(self._core.me.rank, engine.layout, self._layout, dp)
        target = engine.targets.get(coordinates)
        if target is None:
            raise EngineNotFound(
                f"the registry knows no prefill rank {coordinates} (dp, pp, cp, tp) of engine {engine.name!r}",
                metadata={"engine": engine.name, "role": "PREFILL", "missingRanks": coordinates},
            )
        return target

    def _fail(self, room: ReceiverRoom, error: KvGrpcError) -> None:
        self._core.fail(room, Failure.of(error, str(self._core.me)))


def _must_be_found(room: ReceiverRoom, engine: PrefillEngine) -> bool:
    return engine.engine_selects_dp and engine.layout.dp > 1 and room.prefill_dp_rank is None


def _route_error(room: ReceiverRoom) -> InvalidRequest | None:
    """Why the engine's way to a prefill cannot be one: checked here, where many rooms ask one question together."""
    address, dp = room.bootstrap_addr, room.prefill_dp_rank
    if not isinstance(address, str) or not address.isascii():
        return InvalidRequest.of("bootstrap_addr", address, "host:port, optionally /engine")
    if dp is not None and (not hasattr(dp, "__index__") or dp < 0):
        return InvalidRequest.of("prefill_dp_rank", dp, "0 or more")
    return None
