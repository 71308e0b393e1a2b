"""A rank of the soak in a process of its own: a small engine that does what the router orders and checks every byte."""

from __future__ import annotations

import os
import random
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from kvgrpc.dataplane import open_plane
from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import KvGrpcError
from kvgrpc.model import Pool, PoolKind, Region, Role
from kvgrpc.server import AuxBuffer, Rank, RankConfig, RegistryServer, open_rank
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender
from kvgrpc.transfer.protocol.types import Timing
from tests.faults.dataplane import Fault, FaultyDataPlane
from tests.soak.orders import (
    LAYERS,
    PAGE_BYTES,
    PAGES,
    ROOM_SECONDS,
    Ended,
    Measure,
    Opened,
    OpenRank,
    Receive,
    Resources,
    Send,
    content,
    memory_at,
)

POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
STEP_SECONDS = 0.001
AUX_BYTES, AUX_ROWS = 64, 256


@dataclass
class Running:
    """A room that this rank takes part in."""

    order: Send | Receive
    handle: Any
    began: float
    pages: list[int] = field(default_factory=list)
    ended: bool = False


class SoakRank:
    """Subclasses say what to do with an order, and with a room that moved on."""

    def __init__(self, pipe: Connection, order: OpenRank) -> None:
        self.order = order
        self.running: list[Running] = []
        self._pipe = pipe
        self._said: list[object] = []
        self.rank, self.memory = _open(order)
        pipe.send([Opened(self.rank.address)])

    def run(self) -> None:
        while True:
            while self._pipe.poll(0):
                for order in self._pipe.recv():
                    self._take(order)
            self.running = [room for room in self.running if not self._goes_on(room)]
            if self._said:
                self._pipe.send(self._said)
                self._said = []
            time.sleep(STEP_SECONDS)

    def say(self, what: object) -> None:
        self._said.append(what)

    def start(self, order: Any) -> None:
        raise NotImplementedError

    def step(self, room: Running) -> bool:
        """True once the room needs this rank no more."""
        raise NotImplementedError

    def free_pages(self) -> int:
        return 0

    def _take(self, order: object) -> None:
        if isinstance(order, Measure):
            process = psutil.Process()
            held = self.rank.transfer.held_pages
            used = (process.memory_info().rss, process.num_threads(), process.num_fds())
            self.say(Resources(*used, held, self.free_pages()))
        else:
            self.start(order)

    def _goes_on(self, room: Running) -> bool:
        after = room.order.cancel_after
        if after is not None and time.monotonic() - room.began > after:
            room.handle.abort("the soak cancels it")
        return self.step(room)


class SoakPrefill(SoakRank):
    """Sends pages that never change."""

    def __init__(self, pipe: Connection, order: OpenRank) -> None:
        super().__init__(pipe, order)
        self.memory[:] = content(order.seed, range(PAGES))

    def start(self, order: Send) -> None:
        sender = KVSender(self.rank.transfer, "", order.room)
        room = Running(order, sender, time.monotonic())
        self.running.append(room)
        sender.init(len(order.pages), order.room % AUX_ROWS)
        for first in range(0, len(order.pages), order.chunk):
            sender.send(np.array(order.pages[first : first + order.chunk], np.int32))

    def step(self, room: Running) -> bool:
        poll = room.handle.poll()
        if poll not in (KVPoll.Success, KVPoll.Failed):
            return False
        room.handle.close()
        self.say(Ended(room.order.room, _reason(room.handle), time.monotonic() - room.began))
        return True


class SoakDecode(SoakRank):
    """Gives out pages, compares what came, and looks whether anybody wrote to pages that nobody had."""

    def __init__(self, pipe: Connection, order: OpenRank) -> None:
        super().__init__(pipe, order)
        self.memory[:] = POISON
        self._free = deque(range(PAGES))
        self._waiting: deque[Receive] = deque()

    def start(self, order: Receive) -> None:
        self._waiting.append(order)
        self._start_waiting()

    def free_pages(self) -> int:
        return len(self._free)

    def step(self, room: Running) -> bool:
        poll = room.handle.poll()
        if not room.ended and poll in (KVPoll.Success, KVPoll.Failed):
            room.ended = True
            wrong = self._compared(room) if poll == KVPoll.Success else ""
            self.say(Ended(room.order.room, _reason(room.handle), time.monotonic() - room.began, wrong))
        if not (room.ended and room.handle.release_safe):
            return False
        room.handle.close()
        self.memory[:, room.pages] = POISON
        self._free.extend(room.pages)
        self._start_waiting()
        return True

    def _start_waiting(self) -> None:
        while self._waiting and len(self._waiting[0].pages) <= len(self._free):
            order = self._waiting.popleft()
            pages = [self._free.popleft() for _ in order.pages]
            if not (self.memory[:, pages] == POISON).all():
                self.say(Ended(order.room, "FOREIGN_WRITE", 0.0, f"pages {pages} were written while nobody had them"))
                self.memory[:, pages] = POISON
            receiver = KVReceiver(self.rank.transfer, order.bootstrap, order.room)
            receiver.init(np.array(pages, np.int32), order.room % AUX_ROWS)
            self.running.append(Running(order, receiver, time.monotonic(), pages))

    def _compared(self, room: Running) -> str:
        order = room.order
        assert isinstance(order, Receive)
        arrived = self.memory[:, room.pages]
        if np.array_equal(arrived, content(order.seed, order.pages)):
            return ""
        different = np.argwhere((arrived != content(order.seed, order.pages)).any(axis=2))
        layer, position = different[0]
        return f"layer {layer}, position {position} (of {len(different)}) does not hold prefill's bytes"


def serve_rank(pipe: Connection, log: Path, order: OpenRank) -> None:
    """The child process of one rank."""
    _say_to(log)
    try:
        (SoakPrefill if order.role == "PREFILL" else SoakDecode)(pipe, order).run()
    except (EOFError, BrokenPipeError):
        os._exit(0)


def serve_registry(pipe: Connection, log: Path, listen: str) -> None:
    """The child process of the registry."""
    _say_to(log)
    server = RegistryServer([listen]).open()
    pipe.send([Opened(server.address)])
    try:
        pipe.recv()
    except EOFError:
        os._exit(0)


def _say_to(log: Path) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)


def _open(order: OpenRank) -> tuple[Rank[Any], Any]:
    draw = random.Random(order.seed)

    def fault(number: int, submission: object) -> Fault | None:
        if draw.random() >= order.fault_rate:
            return None
        return Fault(draw.choice([Outcome.FAILED_SRC_FREE, Outcome.REJECTED]), delay=draw.choice([0.0, 0.05]))

    inner = open_plane(order.data_plane)
    address = inner.allocate(LAYERS * PAGES * PAGE_BYTES)
    aux = inner.allocate(AUX_BYTES * AUX_ROWS)
    plane = FaultyDataPlane(inner, fault, remember=False)
    regions = tuple(
        Region(layer, "kv", address + layer * PAGES * PAGE_BYTES, PAGE_BYTES, PAGE_BYTES) for layer in range(LAYERS)
    )
    ticks = round(ROOM_SECONDS / Timing().tick_seconds)
    config = RankConfig(
        engine=order.name,
        role=Role[order.role],
        pools=(Pool("kv", PoolKind.KV, 16, PAGES, "float32", regions),),
        aux=(AuxBuffer(aux, AUX_BYTES, AUX_ROWS),),
        data_plane=plane,
        registry=order.registry if order.role == "PREFILL" else "",
        timing=Timing(room_deadline=ticks, unclaimed=ticks),
    )
    return open_rank(config), memory_at(address)


def _reason(handle: KVSender | KVReceiver) -> str:
    if handle.poll() == KVPoll.Success:
        return ""
    failure = handle.failure
    return KvGrpcError.__name__ if failure is None else failure.reason.name
