"""A rank of the soak in a process of its own: a small engine that does what the router orders and checks every byte."""

from __future__ import annotations

import math
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from kvgrpc.dataplane import open_plane
from kvgrpc.dataplane.base import Outcome, Transfer
from kvgrpc.model import Layout, Pool, PoolKind, Region, Role
from kvgrpc.server import AuxBuffer, Rank, RankConfig, RegistryServer, open_rank
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender
from kvgrpc.transfer.protocol.types import Timing
from tests.soak.orders import (
    AXES,
    DIM,
    FAULTS,
    HEADS,
    LAYERS,
    NO_REASON,
    PAGES,
    ROOM_SECONDS,
    SOUND_PAGES,
    TOKENS,
    Disturbed,
    Ended,
    LateWrite,
    Measure,
    Opened,
    OpenRank,
    Receive,
    Resources,
    Send,
    Words,
    content,
    memory_at,
    pages_of,
)
from tests.support.faults.dataplane import Fault, FaultyDataPlane, Submission

POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
STEP_SECONDS = 0.002
LONGEST_STEP = Timing().tick_seconds
AUX_BYTES, AUX_ROWS = 64, 256
LATEST_SECONDS = 2.0  # until what was reported as unknown is written all the same


@dataclass
class Running:
    """A room that this rank takes part in. ``met``, ``disturbed``: when, by the rank's clock; None: not so far."""

    order: Send | Receive
    handle: Any
    began: float
    pages: list[int] = field(default_factory=list)
    ended: bool = False
    met: float | None = None
    disturbed: float = 0.0

    def ends(self, clock: float, wrong: str = "") -> Ended:
        since = None if self.met is None else clock - max(self.met, self.disturbed)
        return Ended(self.order.room, _reason(self.handle), clock - self.began, wrong, since)


class SoakRank:
    """Subclasses say what to do with an order, and with a room that moved on."""

    def __init__(self, pipe: Connection, order: OpenRank) -> None:
        self.order = order
        self.running: list[Running] = []
        self.clock = 0.0  # seconds that it ran: as the product's own deadlines, it does not age while it gets no turn
        self._pipe = pipe
        self._said: list[object] = []
        self.rank, self.plane, self.memory = _open(order)
        pipe.send([Opened(self.rank.address)])

    def run(self) -> None:
        before = time.monotonic()
        while True:
            now = time.monotonic()
            self.clock, before = self.clock + min(now - before, LONGEST_STEP), now
            while self._pipe.poll(0):
                for order in self._pipe.recv():
                    self._take(order)
            self.running = [room for room in self.running if not self._goes_on(room)]
            self.tend()
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

    def meets(self, handle: Any) -> bool:
        """Whether all ranks of the other side that have a part in the room are known to be there."""
        raise NotImplementedError

    def tend(self) -> None:
        """What is to be done beside the rooms."""

    def free_pages(self) -> Sequence[int]:
        return ()

    def open_writes(self) -> int:
        return 0

    def _take(self, order: object) -> None:
        if isinstance(order, Measure):
            process = psutil.Process()
            used = (process.memory_info().rss, process.num_threads(), process.num_fds())
            is_open = (self.rank.transfer.open_rooms(), self.open_writes(), self.rank.transfer.held_pages)
            free = list(self.free_pages())
            spoiled = int((self.memory[:, free] != POISON).any(axis=(0, 2, 3, 4)).sum())
            self.say(Resources(*used, *is_open, len(free), spoiled))
        elif isinstance(order, Disturbed):
            for room in self.running:
                if room.order.room in order.rooms:
                    room.disturbed = self.clock
        else:
            self.start(order)

    def _goes_on(self, room: Running) -> bool:
        after = room.order.cancel_after
        if after is not None and self.clock - room.began > after:
            room.handle.abort("the soak cancels it")
        if room.met is None and self.meets(room.handle):
            room.met = self.clock
        return self.step(room)


class SoakPrefill(SoakRank):
    """Sends pages that never change, and those of FAILED_UNKNOWN once more when nobody expects them."""

    def __init__(self, pipe: Connection, order: OpenRank) -> None:
        super().__init__(pipe, order)
        self.memory[:] = content(order.seed, order.heads, range(PAGES))
        self._draw = random.Random(order.seed)
        self._late_at = 0.0
        self._late: list[Transfer] = []

    def start(self, order: Send) -> None:
        sender = KVSender(self.rank.transfer, "", order.room)
        room = Running(order, sender, self.clock)
        self.running.append(room)
        sender.init(len(order.pages), order.room % AUX_ROWS)
        for first in range(0, len(order.pages), order.chunk):
            sender.send(np.array(order.pages[first : first + order.chunk], np.int32))

    def step(self, room: Running) -> bool:
        poll = room.handle.poll()
        if poll not in (KVPoll.Success, KVPoll.Failed):
            return False
        room.handle.close()
        self.say(room.ends(self.clock))
        return True

    def meets(self, handle: KVSender) -> bool:
        return handle.decode_prefix_pages is not None

    def open_writes(self) -> int:
        return int(self.rank.transfer.core.open_writes)

    def tend(self) -> None:
        now = time.monotonic()
        if now >= self._late_at:
            self._late_at = now + self._draw.uniform(0.2, LATEST_SECONDS)
            self._late += self.plane.start_late()
        running, self._late = self._late, []
        for transfer in running:
            result = transfer.poll()
            if result is None:
                self._late.append(transfer)
            else:
                self.say(LateWrite(result.outcome.name))


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

    def free_pages(self) -> Sequence[int]:
        return self._free

    def step(self, room: Running) -> bool:
        poll = room.handle.poll()
        if not room.ended and poll in (KVPoll.Success, KVPoll.Failed):
            room.ended = True
            wrong = self._compared(room) if poll == KVPoll.Success else ""
            self.say(room.ends(self.clock, wrong))
        if not (room.ended and room.handle.release_safe):
            return False
        room.handle.close()
        self.memory[:, room.pages] = POISON
        self._free.extend(room.pages)
        self._start_waiting()
        return True

    def meets(self, handle: KVReceiver) -> bool:
        return handle.prefill_ready or handle.pages_done > 0

    def _start_waiting(self) -> None:
        while self._waiting and len(self._waiting[0].pages) <= len(self._free):
            order = self._waiting.popleft()
            pages = [self._free.popleft() for _ in order.pages]
            if not (self.memory[:, pages] == POISON).all():
                self.say(Ended(order.room, "FOREIGN_WRITE", 0.0, f"pages {pages} were written while nobody had them"))
                self.memory[:, pages] = POISON
            receiver = KVReceiver(self.rank.transfer, order.bootstrap, order.room)
            receiver.init(np.array(pages, np.int32), order.room % AUX_ROWS)
            self.running.append(Running(order, receiver, self.clock, pages))

    def _compared(self, room: Running) -> str:
        order = room.order
        assert isinstance(order, Receive)
        sent = [content(order.seeds[head], [head], order.pages) for head in self.order.heads]
        differs = self.memory[:, room.pages] != np.concatenate(sent, axis=3)
        if not differs.any():
            return ""
        layer, position, token, head, _ = np.argwhere(differs)[0]
        where = f"layer {layer}, position {position}, token {token}, head {self.order.heads[head]}"
        return f"{where} does not hold prefill's bytes, nor do {differs.sum() - 1} more words"


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


def _open(order: OpenRank) -> tuple[Rank[Any], FaultyDataPlane, Any]:
    inner = open_plane(order.data_plane)
    page_bytes = TOKENS * len(order.heads) * DIM * 8
    address = inner.allocate(LAYERS * PAGES * page_bytes)
    aux = inner.allocate(AUX_BYTES * AUX_ROWS)
    plane = FaultyDataPlane(inner, Curse(order), remember=False)
    regions = tuple(
        Region(layer, "kv", address + layer * PAGES * page_bytes, page_bytes, page_bytes) for layer in range(LAYERS)
    )
    pool = Pool("kv", PoolKind.KV, TOKENS, PAGES, "float64", regions, AXES, HEADS, order.heads.start, len(order.heads))
    ticks = round(ROOM_SECONDS / Timing().tick_seconds)
    config = RankConfig(
        engine=order.engine,
        role=Role[order.role],
        layout=Layout(tp=order.tp_size),
        tp=order.tp,
        pools=(pool,),
        aux=(AuxBuffer(aux, AUX_BYTES, AUX_ROWS),),
        data_plane=plane,
        registry=order.registry if order.role == "PREFILL" else "",
        check_pages=order.role == "DECODE",  # prefill's pages never change: rooms read them at any place
        timing=Timing(room_deadline=ticks, unclaimed=ticks),
    )
    shape = LAYERS, PAGES, TOKENS, len(order.heads), DIM
    return open_rank(config), plane, memory_at(address, math.prod(shape)).reshape(shape)


class Curse:
    """Decides for each submission: what brings a cursed page of this rank fails, as the page says.

    It reads the page off the bytes themselves: slices that were gathered do not lie in the pool.
    """

    def __init__(self, order: OpenRank) -> None:
        self._tp = order.tp
        self._draw = random.Random(order.seed)

    def __call__(self, number: int, submission: Submission) -> Fault | None:
        for page in pages_read(submission).tolist():
            fault = FAULTS[page - SOUND_PAGES] if page >= SOUND_PAGES else None
            if fault is not None and fault.tp == self._tp:
                late = fault.outcome is Outcome.FAILED_UNKNOWN
                return Fault(fault.outcome, delay=self._draw.choice([0.0, 0.05]), late=late)
        return None


def pages_read(submission: Submission) -> Words:
    """The pages of prefill's pool whose bytes are written, each once; no write has less than a token of a head."""
    sources = zip(submission.source.tolist(), submission.nbytes.tolist(), strict=True)
    return np.unique(pages_of(np.concatenate([memory_at(source, nbytes // 8)[::DIM] for source, nbytes in sources])))


def _reason(handle: KVSender | KVReceiver) -> str:
    if handle.poll() == KVPoll.Success:
        return ""
    failure = handle.failure
    return NO_REASON if failure is None else failure.reason.name
