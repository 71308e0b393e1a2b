"""What the two processes of a hand-off do in one turn. The same lines drive both protocols.

As in an engine, prefill waits until it knows the destination, then sends. Nobody looks at rooms more than it must: only
the oldest open one is polled, and a loop without news does what engines do between two looks (``Between``).
"""

from __future__ import annotations

import ctypes
import enum
import gc
import importlib
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import psutil

from benchmarks.harness.worker import Desk
from benchmarks.sides.base import (
    DecodeSide,
    Pages,
    Poll,
    PrefillSide,
    Receiver,
    Sender,
    Setting,
)
from benchmarks.sides.memory import Numbers
from benchmarks.sides.opening import open_decode, open_prefill

TURN_TIMEOUT = 120.0
PR_SET_TIMERSLACK = 29
MODULES = {
    "kvgrpc": "benchmarks.sides.ours",
    "seed": "benchmarks.sides.seed",
    "sglang": "benchmarks.sides.sglang",
    "bare": "benchmarks.sides.bare",
}
SIDE, SENDERS, RECEIVERS, GENERATION = "side", "senders", "receivers", "generation"
# So that what the one before woke sleeps again.
BETWEEN_RECEIVERS = 2e-3


class Between(enum.Enum):
    """What an engine does between two looks at its rooms.

    A running engine holds the interpreter (PYTHON) or gives it up at each of many small operations (TORCH); one that
    waits sleeps (NAP).
    """

    NAP = enum.auto()
    PYTHON = enum.auto()
    TORCH = enum.auto()


@dataclass(frozen=True, slots=True)
class Orders:
    """The rooms of one turn: numbers from ``first_room`` on, scattered pages (or ``adjacent`` ones), ``pause`` seconds
    between two looks.
    """

    first_room: int
    rooms: int
    pages_per_room: int
    pool_pages: int
    aux_items: int
    pause: float
    between: Between = Between.NAP
    adjacent: bool = False

    @property
    def numbers(self) -> range:
        return range(self.first_room, self.first_room + self.rooms)

    def source(self) -> Numbers:
        """Pages at prefill by (room, position); no two that follow each other are neighbours in a pool."""
        return self._scattered(1)

    def destination(self) -> Numbers:
        """Pages at decode by (room, position)."""
        return self._scattered(2)

    def aux_index(self, number: int) -> int:
        return number % self.aux_items

    def _scattered(self, seed: int) -> Numbers:
        every = np.arange(self.pool_pages)
        order = every if self.adjacent else np.random.default_rng(seed).permutation(every)
        return np.resize(order, (self.rooms, self.pages_per_room)).astype(np.int64)


def load(desk: Desk, setting: Setting) -> None:
    """Imports what ``start`` needs; both processes can do so at once."""
    importlib.import_module(MODULES[setting.protocol])


def start_prefill(desk: Desk, setting: Setting) -> str:
    """Opens the side and returns the bootstrap address."""
    side = open_prefill(setting)
    desk.items[SIDE] = side
    settle()
    return side.bootstrap


def start_decode(desk: Desk, setting: Setting, bootstrap: str) -> None:
    desk.items[SIDE] = open_decode(setting, bootstrap)
    settle()


def stop(desk: Desk) -> None:
    desk.items.pop(SENDERS, None)
    desk.items.pop(RECEIVERS, None)
    desk.items.pop(SIDE).close()


def prepare_prefill(desk: Desk, orders: Orders, generation: int | None) -> None:
    """Makes the senders, and new content when a generation is given."""
    side: PrefillSide = desk.items[SIDE]
    if generation is not None:
        side.memory.fill(generation, orders.source())
    desk.items[SENDERS] = [side.sender(room) for room in orders.numbers]


def prepare_decode(desk: Desk, orders: Orders, generation: int | None) -> None:
    """Spoils what the turn must overwrite."""
    side: DecodeSide = desk.items[SIDE]
    desk.items[GENERATION] = generation
    if generation is not None:
        side.memory.poison(orders.destination())


def make_receivers(desk: Desk, orders: Orders, bootstrap: str | None = None) -> None:
    """Returns once each could be given its pages, and nothing that making it began goes on. ``bootstrap``: of another
    prefill than the side was opened with.
    """
    side: DecodeSide = desk.items[SIDE]
    receivers = [side.receiver(room, bootstrap) for room in orders.numbers]
    for receiver in receivers:
        _wait(receiver, Poll.WAITING_FOR_INPUT, orders)
    clock = _Clock(orders)
    while not side.settled(receivers):
        clock.tick(False)
    desk.items[RECEIVERS] = receivers


def send_rooms(desk: Desk, orders: Orders) -> None:
    """Sends each room once its destination is known; returns when all are done."""
    side: PrefillSide = desk.items[SIDE]
    pages = list(orders.source().astype(side.page_type))
    waiting: deque[tuple[int, Sender]] = deque(enumerate(desk.items.pop(SENDERS)))
    sent: deque[Sender] = deque()
    everything = slice(0, orders.pages_per_room)
    clock = _Clock(orders)
    while waiting or sent:
        news = False
        while waiting and _reached(waiting[0][1], Poll.WAITING_FOR_INPUT):
            number, sender = waiting.popleft()
            sender.init(orders.pages_per_room, orders.aux_index(number))
            sender.send(pages[number], everything, True)
            sent.append(sender)
            news = True
        while sent and _reached(sent[0], Poll.SUCCESS):
            sent.popleft().close()
            news = True
        clock.tick(news)


def receive_together(desk: Desk, orders: Orders) -> float:
    """Asks for all rooms at once; seconds from the first ``init`` to the last Success."""
    side: DecodeSide = desk.items[SIDE]
    pages = _pages(orders, side)
    running = deque(desk.items.pop(RECEIVERS))
    clock = _Clock(orders)
    begin = time.perf_counter()
    for number, receiver in enumerate(running):
        receiver.init(pages[number], orders.aux_index(number))
    while running:
        news = False
        while running and _reached(running[0], Poll.SUCCESS):
            running.popleft().close()
            news = True
        clock.tick(news)
    return time.perf_counter() - begin


def receive_one_by_one(desk: Desk, orders: Orders) -> list[float]:
    """Asks for one room after the other; seconds from ``init`` to Success of each. Checks each room's bytes."""
    side: DecodeSide = desk.items[SIDE]
    pages, source = _pages(orders, side), orders.source()
    generation: int | None = desk.items[GENERATION]
    took = []
    for number, receiver in enumerate(desk.items.pop(RECEIVERS)):
        begin = time.perf_counter()
        receiver.init(pages[number], orders.aux_index(number))
        _wait(receiver, Poll.SUCCESS, orders)
        took.append(time.perf_counter() - begin)
        receiver.close()
        if generation is not None:
            side.memory.check(generation, source[number], pages[number])
    return took


def receive_some_at_once(desk: Desk, orders: Orders, at_once: int) -> float:
    """Keeps so many rooms in flight until all were there; seconds from the first ``init`` to the last Success."""
    side: DecodeSide = desk.items[SIDE]
    pages = _pages(orders, side)
    waiting = deque(enumerate(desk.items.pop(RECEIVERS)))
    running: deque[Receiver] = deque()
    clock = _Clock(orders)
    begin = time.perf_counter()
    while waiting or running:
        news = False
        while running and _reached(running[0], Poll.SUCCESS):
            running.popleft().close()
            news = True
        while waiting and len(running) < at_once:
            number, receiver = waiting.popleft()
            receiver.init(pages[number], orders.aux_index(number))
            running.append(receiver)
        clock.tick(news)
    return time.perf_counter() - begin


def time_polls(desk: Desk, orders: Orders) -> list[float]:
    """Seconds of each ``poll`` of one open room after the other."""
    side: DecodeSide = desk.items[SIDE]
    pages = _pages(orders, side)
    took = []
    for number, receiver in enumerate(desk.items.pop(RECEIVERS)):
        receiver.init(pages[number], orders.aux_index(number))
        clock, poll, state = _Clock(orders), receiver.poll, 0
        while state != Poll.SUCCESS:
            clock.tick(False)
            begin = time.perf_counter()
            state = poll()
            took.append(time.perf_counter() - begin)
            if state == Poll.FAILED:
                raise RuntimeError(f"a room failed: {getattr(receiver, 'failure', None)}")
        receiver.close()
    return took


def time_making(desk: Desk, orders: Orders, bootstrap: str | None = None) -> list[float]:
    """Seconds from the making of a receiver, each some time after the one before, until its pages may be given."""
    side: DecodeSide = desk.items[SIDE]
    took, receivers = [], []
    for room in orders.numbers:
        time.sleep(BETWEEN_RECEIVERS)
        begin = time.perf_counter()
        receiver = side.receiver(room, bootstrap)
        _wait(receiver, Poll.WAITING_FOR_INPUT, orders)
        took.append(time.perf_counter() - begin)
        receivers.append(receiver)
    pages = _pages(orders, side)
    for number, receiver in enumerate(receivers):
        receiver.init(pages[number], orders.aux_index(number))
        _wait(receiver, Poll.SUCCESS, orders)
        receiver.close()
    return took


def receive_first(desk: Desk, orders: Orders) -> tuple[float, float]:
    """Seconds from the making of this process's first receiver until its pages may be given, and to its Success."""
    side: DecodeSide = desk.items[SIDE]
    pages = _pages(orders, side)
    begin = time.perf_counter()
    receiver = side.receiver(orders.first_room)
    _wait(receiver, Poll.WAITING_FOR_INPUT, orders)
    ready = time.perf_counter() - begin
    receiver.init(pages[0], orders.aux_index(0))
    _wait(receiver, Poll.SUCCESS, orders)
    took = time.perf_counter() - begin
    receiver.close()
    return ready, took


def time_inits(desk: Desk, orders: Orders, burst: int, apart: float) -> list[float]:
    """Seconds of each ``init`` on the calling thread, in bursts as a scheduler's step would make them, each ``apart``
    seconds after the rooms of the one before are done.
    """
    side: DecodeSide = desk.items[SIDE]
    pages = _pages(orders, side)
    receivers: list[Receiver] = desk.items.pop(RECEIVERS)
    took = []
    for start in range(0, orders.rooms, burst):
        step = range(start, min(start + burst, orders.rooms))
        if apart:
            time.sleep(apart)
        for number in step:
            page, aux_index, init = pages[number], orders.aux_index(number), receivers[number].init
            begin = time.perf_counter()
            init(page, aux_index)
            took.append(time.perf_counter() - begin)
        for number in step:
            _wait(receivers[number], Poll.SUCCESS, orders)
            receivers[number].close()
    return took


def hold_at_decode(desk: Desk, orders: Orders) -> float:
    """Makes rooms and leaves them in flight; by how many bytes the resident set grew."""
    side: DecodeSide = desk.items[SIDE]
    pages = _pages(orders, side)
    before = _resident()
    make_receivers(desk, orders)
    for number, receiver in enumerate(desk.items[RECEIVERS]):
        receiver.init(pages[number], orders.aux_index(number))
    return _resident() - before


def hold_at_prefill(desk: Desk, orders: Orders) -> float:
    """Waits until every destination is known here; by how many bytes the resident set grew."""
    before: float = desk.items[GENERATION]
    for sender in desk.items[SENDERS]:
        _wait(sender, Poll.WAITING_FOR_INPUT, orders)
    return _resident() - before


def note_resident(desk: Desk) -> None:
    """Remembers the resident set for ``hold_at_prefill``."""
    desk.items[GENERATION] = _resident()


def cpu_used(_: Desk) -> float:
    """Seconds of CPU of this process so far."""
    return time.process_time()


def check_pages(desk: Desk, orders: Orders) -> None:
    """Compares every page and aux item of the turn with what prefill had."""
    side: DecodeSide = desk.items[SIDE]
    generation: int = desk.items[GENERATION]
    side.memory.check(generation, orders.source().ravel(), orders.destination().ravel())
    side.memory.check_aux(generation, min(orders.rooms, orders.aux_items))


def settle() -> None:
    """What engines do before they serve: what is there now need not be looked at by every garbage collection.

    And naps shall be exact: without it one of 20 us takes 75, this thread's timer slack (in nanoseconds).
    """
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)


class _Clock:
    """Lets the engine do its own work when there was no news, and ends a turn that hangs."""

    def __init__(self, orders: Orders) -> None:
        self._pause = orders.pause
        self._work = WORK[orders.between]
        self._end = time.monotonic() + TURN_TIMEOUT

    def tick(self, news: bool) -> None:
        if news:
            return
        self._work(self._pause)
        if time.monotonic() > self._end:
            raise TimeoutError(f"rooms were still open after {TURN_TIMEOUT} s")


def _compute(seconds: float) -> None:
    """Pure Python, which keeps the interpreter until another thread asks for it and its switch interval is over."""
    end = time.perf_counter() + seconds
    number = 1
    while time.perf_counter() < end:
        number = (number * 6364136223846793005 + 1) % 2**64


def _compute_with_torch(seconds: float) -> None:
    """Small operations, each of which gives the interpreter up for a moment."""
    import torch  # only the rows that ask for it pay its import

    values = torch.ones(256)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        values = values.mul(1.0)


WORK: dict[Between, Callable[[float], None]] = {
    Between.NAP: time.sleep,
    Between.PYTHON: _compute,
    Between.TORCH: _compute_with_torch,
}


def _reached(handle: Sender | Receiver, wanted: Poll) -> bool:
    state = handle.poll()
    if state == Poll.FAILED:
        raise RuntimeError(f"a room failed: {getattr(handle, 'failure', None)}")
    return state >= wanted


def _wait(handle: Sender | Receiver, wanted: Poll, orders: Orders) -> None:
    clock = _Clock(orders)
    while not _reached(handle, wanted):
        clock.tick(False)


def _pages(orders: Orders, side: DecodeSide) -> list[Pages]:
    return list(orders.destination().astype(side.page_type))


def _resident() -> float:
    return float(psutil.Process().memory_info().rss)
