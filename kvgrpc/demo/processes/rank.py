"""The common part of the prefill and the decode process: opening the rank, the loop, events, reports, the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvgrpc.dataplane import open_plane
from kvgrpc.dataplane.base import DataPlane
from kvgrpc.demo.engine.config import EngineConfig
from kvgrpc.demo.engine.engine import DemoEngine
from kvgrpc.demo.engine.tiers import Tiers, config_of
from kvgrpc.demo.processes.aux_rows import FreeAuxRows
from kvgrpc.demo.processes.child import Router, RouterGone
from kvgrpc.demo.processes.measured_plane import MeasuredPlane
from kvgrpc.demo.protocol import (
    ClearCache,
    Compute,
    Loaded,
    Offload,
    Open,
    Opened,
    Refused,
    Report,
    Reported,
    Resume,
    RoomFailed,
    ToProcess,
    ToRouter,
)
from kvgrpc.errors import Failure, KvGrpcError
from kvgrpc.events import KVEventBatch
from kvgrpc.model import Role
from kvgrpc.pull.model import PullConfig
from kvgrpc.server import Rank, RankConfig, open_rank

EVENTS = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0"}
CLOSE_SECONDS = 3.0
POLL_SECONDS = 0.001


class Channel(Protocol):
    """The source of an engine's requests, to which it says what became of them."""

    def receive(self, seconds: float | None = None) -> ToProcess | None:
        """The next message; None when none came within ``seconds``. Raises RouterGone."""

    def tell(self, message: ToRouter) -> None:
        """Sends a message. Raises RouterGone."""


@dataclass(frozen=True, slots=True)
class EngineRank:
    """An engine and its opened rank; all of it belongs to the thread that opened it."""

    router: Channel
    engine: DemoEngine
    rank: Rank[Any]
    aux: FreeAuxRows
    plane: MeasuredPlane
    tiers: Tiers | None

    def fail(self, room: int, failure: Failure | None) -> None:
        """Tells the router that a room failed."""
        reason, text = ("UNSPECIFIED", "no cause given") if failure is None else (failure.reason.name, failure.message)
        self.router.tell(RoomFailed(room, reason, text))

    def publish_events(self) -> None:
        """Publishes, as one batch, the events of the prefix cache since the call before."""
        events = self.engine.cache.take_events()
        if events:
            self.rank.events.publish(KVEventBatch(time.time(), list(events)))

    def report(self) -> Reported:
        return Reported(self.engine.cache.hashes(), self.plane.written_bytes, self.plane.writing_seconds)


class DemoScheduler(Protocol):
    """Takes an engine's requests through its steps."""

    @property
    def busy(self) -> bool:
        """True if any request has not ended."""

    def accept(self, request: Compute) -> None:
        """A request came."""

    def step(self) -> bool:
        """Moves everything on a little without waiting; False when there was nothing to compute."""


def serve(
    name: str, role: Role, config: EngineConfig, router: Router, scheduler: Callable[[EngineRank], DemoScheduler]
) -> None:
    """The process: opens the rank as the router says, serves it, and closes it when the router is gone."""
    opened = None
    try:
        router.tell(Loaded())
        while opened is None:
            message = router.receive()
            if isinstance(message, Open):
                opened = _open(name, role, config, router, message)
        work(opened, scheduler(opened))
    except RouterGone:
        pass
    finally:
        if opened is not None:
            close(opened)


def open_engine(config: EngineConfig, router: Channel, plane: DataPlane, wanted: Open, **rank: Any) -> EngineRank:
    """An engine in memory of ``plane``, and its rank with the settings ``rank``. Raises KvGrpcError."""
    measured = MeasuredPlane(plane)
    engine, aux = DemoEngine(config, measured), FreeAuxRows()
    own: dict[str, Any] = {
        "pools": (engine.memory.pool,),
        "aux": (aux.buffer,),
        "data_plane": measured,
        "check_pages": True,
        "registry": wanted.registry,
        "events": EVENTS,
        "prefetch": config_of(config, engine, wanted) if wanted.storage or wanted.pulls else None,
        "pull": PullConfig() if wanted.pulls else None,
    }
    opened = open_rank(RankConfig(**(own | rank)))
    tiers = None if opened.prefetch is None else Tiers(engine, opened.prefetch)
    return EngineRank(router, engine, opened, aux, measured, tiers)


def close(opened: EngineRank) -> None:
    """Ends the rank, then what its memory was lent from."""
    opened.rank.close(CLOSE_SECONDS)
    opened.plane.close(CLOSE_SECONDS)


def work(opened: EngineRank, scheduler: DemoScheduler) -> None:
    """Does what the router says and computes, until RouterGone."""
    computed = False
    while True:
        message = opened.router.receive(0 if computed else POLL_SECONDS if scheduler.busy else None)
        if isinstance(message, Compute):
            _accept(opened, scheduler, message)
        elif isinstance(message, ClearCache):
            opened.engine.cache.clear()
        elif isinstance(message, Report):
            opened.router.tell(opened.report())
        elif isinstance(message, Offload) and opened.tiers is not None:
            opened.router.tell(opened.tiers.offload(message))
        elif isinstance(message, Resume) and opened.tiers is not None:
            opened.router.tell(opened.tiers.resume(message))
        computed = scheduler.step()
        opened.publish_events()


def _accept(opened: EngineRank, scheduler: DemoScheduler, request: Compute) -> None:
    """A request that is refused at once, as one of a room that was there before, fails alone."""
    try:
        scheduler.accept(request)
    except KvGrpcError as error:
        opened.router.tell(RoomFailed(request.room, error.reason.name, error.message))


def _open(name: str, role: Role, config: EngineConfig, router: Router, wanted: Open) -> EngineRank | None:
    try:
        opened = open_engine(config, router, open_plane(wanted.data_plane), wanted, engine=name, role=role)
    except KvGrpcError as error:
        router.tell(Refused(error.reason.name, error.message))
        return None
    router.tell(Opened(opened.rank.address, opened.engine.memory.bytes_per_page))
    return opened
