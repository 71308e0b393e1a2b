"""limit.*: what the parts of a hand-off need by themselves, beside the seeds' whole hand-off.

Not a claim about kvgrpc: the ratio is the most that the row of that name could reach if all of our own work were free.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from benchmarks.baselines.contact import BareDecode, BarePrefill
from benchmarks.baselines.engines import mooncake_is_here
from benchmarks.baselines.raw import BareMooncake, Descriptors
from benchmarks.baselines.stream import StreamEnd
from benchmarks.baselines.wake import WokenLoop
from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Contender, Figures
from benchmarks.harness.table import Metric
from benchmarks.harness.worker import Desk, Family, Worker
from benchmarks.rows.control import BURST, PAUSE, InitCost, Throughput, many_rooms, percentile
from benchmarks.rows.handoff import CONTROL_PAUSE, ENGINE_STEP, PAGE_PAUSE, SEED, FirstContact, Latency
from benchmarks.rows.many_pairs import ManyPairs, lone_rooms_of_each, shape_of_many
from benchmarks.rows.rooms import WORK, Between, cpu_used, settle
from benchmarks.sides.base import Setting
from benchmarks.sides.memory import Shape
from kvgrpc.rpc.options import (
    CHANNEL_OPTIONS,
    LARGEST_REQUEST_BYTES,
    SESSION,
    Options,
    Pings,
    server_options,
    with_pings,
)
from kvgrpc.transfer.protocol.types import Timing

ROOMS, CONTROL, PAGE = "limit.throughput", "limit.control_latency", "limit.latency"
WAKE = "limit.init_cost"
CONTACT, BUSY, TORCH = "limit.first_contact", "limit.busy_engine", "limit.torch_engine"
IDLE, PAIRS = "limit.idle.pairs", "limit.pairs"
END, ENDS, ENGINE, MEMORY, ANSWERED = "end", "ends", "engine", "memory", "answered"
# As sessions without rooms do, both ways (docs/session/opening.md).
QUIET_SECONDS = 0.9


def benchmarks(plan: Plan) -> list[Benchmark]:
    pages = min(plan.sequential_rooms, 64)
    shape = Shape(plan.regions, pages, plan.page_bytes, aux_items=pages)
    still, moving = Setting("seed", "null", shape), Setting("seed", "mooncake", shape)
    of_many = Setting("seed", "null", shape_of_many(plan))
    missing = "" if mooncake_is_here() else "mooncake.engine cannot be imported"

    def row(name: str, part: Callable[[], Contender], whole: Callable[[], Contender], missing: str = "") -> Benchmark:
        return Benchmark((Metric(name, "ms", "lower", SEED),), part, whole, missing)

    def stream(name: str, number: int, pause: float, between: Between) -> Benchmark:
        return row(
            name,
            lambda: BareStream(name, number, pause, between),
            lambda: Latency(still, number, name, pause, tail=False, between=between),
        )

    rooms = plan.sequential_rooms
    many = many_rooms(plan)
    bare, seed = (dataclasses.replace(many, protocol=protocol) for protocol in ("bare", "seed"))
    return [
        Benchmark(
            (
                Metric(ROOMS, "rooms/s", "higher", "seed managers"),
                Metric(f"{ROOMS}.cpu", "us/room", "lower", "seed managers"),
            ),
            lambda: Throughput(bare, plan, ROOMS),
            lambda: Throughput(seed, plan, ROOMS),
        ),
        Benchmark(
            (Metric(WAKE, "us", "lower", "seed ZMQ send"), Metric(f"{WAKE}.p99", "us", "lower", "seed ZMQ send")),
            lambda: BareWake(plan.timed_inits),
            lambda: InitCost(seed, plan.timed_inits, WAKE, BURST),
        ),
        *(
            Benchmark(
                (Metric(f"{IDLE}.{pairs}", "ms/s", "lower", "the same streams, pings alone"),),
                partial(IdleStreams, plan, pairs, QUIET_SECONDS),
                partial(IdleStreams, plan, pairs, 0.0),
            )
            for pairs in plan.pairs
        ),
        *(
            row(f"{PAIRS}.{pairs}", partial(LoneFrames, plan, pairs), partial(LoneRooms, of_many, plan, pairs))
            for pairs in plan.pairs
        ),
        stream(CONTROL, plan.control_rooms, CONTROL_PAUSE, Between.NAP),
        stream(BUSY, plan.busy_rooms, ENGINE_STEP, Between.PYTHON),
        stream(TORCH, plan.busy_rooms, ENGINE_STEP, Between.TORCH),
        row(
            PAGE,
            lambda: BarePages(plan, rooms),
            lambda: Latency(moving, rooms, PAGE, PAGE_PAUSE, tail=False),
            missing,
        ),
        row(
            CONTACT,
            lambda: BareContact(plan),
            lambda: FirstContact(moving, plan.contacts, CONTACT, ready=False),
            missing,
        ),
    ]


class BareWake:
    """An append and a wake of a loop that sleeps, in the bursts of ``control.init_cost``."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._worker = Worker("wake")
        self._worker.call(_start_loop)

    def turn(self) -> Figures:
        took = self._worker.call(_time_wakes, self._number)
        return {WAKE: percentile(took, 50) * 1e6, f"{WAKE}.p99": percentile(took, 99) * 1e6}

    def peak_rss(self) -> int:
        return self._worker.peak_rss()

    def close(self) -> None:
        self._worker.close()


class BareStream:
    """A frame each way over a bare gRPC stream, between the engine threads of two processes."""

    def __init__(self, name: str, number: int, pause: float, between: Between) -> None:
        self._name = name
        self._work = (number, pause, between)
        self._near, self._far = Worker("stream-near"), Worker("stream-far")
        self._near.call(_connect, self._far.call(_serve))

    def turn(self) -> Figures:
        answering = self._far.begin(_answer, *self._work)
        took = self._near.call(_ask, *self._work)
        answering.result()
        return {self._name: percentile(took, 50) * 1e3}

    def peak_rss(self) -> int:
        return self._near.peak_rss() + self._far.peak_rss()

    def close(self) -> None:
        self._near.close()
        self._far.close()


class ManyStreams:
    """Bare streams of one process to many, with the pings and heartbeats that idle sessions have."""

    def __init__(self, pairs: int, each: float = QUIET_SECONDS) -> None:
        """``each``: a frame each way each so many seconds; 0: none."""
        self._family = Family("streams-far", "benchmarks.baselines.stream")
        self._near = Worker("streams-near")
        try:
            self._far = [self._family.fork() for _ in range(pairs)]
            serving = [far.begin(_serve, session_options()[1]) for far in self._far]
            self._near.call(_connect_all, [port.result() for port in serving], each)
            for far in self._far:
                far.call(_begin_beats, each)
        except BaseException:
            self.close()
            raise

    def peak_rss(self) -> int:
        return self._near.peak_rss() + sum(far.peak_rss() for far in self._far)

    def close(self) -> None:
        self._near.close()
        self._family.close()


class IdleStreams(ManyStreams):
    """CPU of the process that dialled them, where nothing is said but heartbeats, or nothing at all."""

    def __init__(self, plan: Plan, pairs: int, each: float) -> None:
        self._name, self._seconds = f"{IDLE}.{pairs}", plan.idle_seconds
        super().__init__(pairs, each)

    def turn(self) -> Figures:
        before = self._near.call(cpu_used)
        time.sleep(self._seconds)
        return {self._name: (self._near.call(cpu_used) - before) / self._seconds * 1e3}


class LoneFrames(ManyStreams):
    """A frame each way over one stream after the other, some times each, between the engine threads of its ends."""

    def __init__(self, plan: Plan, pairs: int) -> None:
        self._name, self._of_each = f"{PAIRS}.{pairs}", lone_rooms_of_each(pairs)
        super().__init__(pairs)

    def turn(self) -> Figures:
        took, work = [], (self._of_each, CONTROL_PAUSE, Between.NAP)
        for index, far in enumerate(self._far):
            answering = far.begin(_answer, *work)
            took += self._near.call(_ask, *work, index)
            answering.result()
        return {self._name: percentile(took, 50) * 1e3}


class LoneRooms(ManyPairs):
    """The lone rooms of ``handoff.pairs`` alone."""

    def turn(self) -> Figures:
        return {f"{PAIRS}.{self.pairs}": percentile(self.lone_rooms(), 50) * 1e3}


class BarePages:
    """One page of all regions after the other by the bare engine, which nobody asks for them."""

    def __init__(self, plan: Plan, number: int) -> None:
        self._plan = plan
        self._number = number
        self._source, self._target = Worker("page-source"), Worker("page-target")
        self._peer = self._target.call(_start_mooncake, plan)
        self._source.call(_start_mooncake, plan)

    def turn(self) -> Figures:
        return {PAGE: percentile(self._source.call(_write_pages, self._plan, self._peer, self._number), 50) * 1e3}

    def peak_rss(self) -> int:
        return self._source.peak_rss() + self._target.peak_rss()

    def close(self) -> None:
        self._source.close()
        self._target.close()


class BareContact:
    """A question, a stream and a page between an engine and a process that never met."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._prefill, self._decode = Worker("contact-prefill"), Worker("contact-decode")

    def turn(self) -> Figures:
        took = []
        for _ in range(self._plan.contacts):
            port = self._prefill.call(_open_prefill, self._plan)
            self._decode.call(_open_decode, self._plan)
            took.append(self._decode.call(_make_contact, port))
            for worker in (self._decode, self._prefill):
                worker.call(_close_contact)
        return {CONTACT: percentile(took, 50) * 1e3}

    def peak_rss(self) -> int:
        return self._prefill.peak_rss() + self._decode.peak_rss()

    def close(self) -> None:
        self._prefill.close()
        self._decode.close()


def _start_loop(desk: Desk) -> None:
    desk.items[END] = WokenLoop()
    settle()


def _time_wakes(desk: Desk, number: int) -> list[float]:
    end: WokenLoop = desk.items[END]
    took = []
    for start in range(0, number, BURST):
        for item in range(start, min(start + BURST, number)):
            begin = time.perf_counter()
            end.append(item)
            took.append(time.perf_counter() - begin)
        end.wait(PAUSE)
    return took


def session_options() -> tuple[Options, Options]:
    """Of the channels that sessions are dialled on, and of the servers that take them."""
    timing = Timing()
    pings = Pings(timing.milliseconds(timing.ping_interval), timing.milliseconds(timing.ping_timeout))
    return (*with_pings(CHANNEL_OPTIONS, pings), *SESSION), server_options(LARGEST_REQUEST_BYTES, pings)


def _serve(desk: Desk, options: Options = ()) -> int:
    end = StreamEnd(options=options)
    desk.items[ENDS] = [end]
    settle()
    return end.serve()


def _connect(desk: Desk, port: int) -> None:
    ends = desk.items[ENDS] = [StreamEnd()]
    settle()
    ends[0].connect(port)


def _connect_all(desk: Desk, ports: Sequence[int], each: float) -> None:
    """Streams that share one loop, as those of a rank do."""
    options = session_options()[0]
    ends = desk.items[ENDS] = [StreamEnd(options=options)]
    ends += [StreamEnd(loop=ends[0].loop, options=options) for _ in ports[1:]]
    settle()
    for end, port in zip(ends, ports, strict=True):
        end.connect(port)
        end.beat()  # so that the other end knows its call
    _begin_beats(desk, each)


def _begin_beats(desk: Desk, each: float) -> None:
    for end in desk.items[ENDS]:
        if each:
            end.beat_each(each)


def _ask(desk: Desk, number: int, pause: float, between: Between, index: int = 0) -> list[float]:
    end: StreamEnd = desk.items[ENDS][index]
    took = []
    for heard in range(end.heard + 1, end.heard + 1 + number):
        begin = time.perf_counter()
        end.write()
        end.wait(heard, pause, WORK[between])
        took.append(time.perf_counter() - begin)
    return took


def _answer(desk: Desk, number: int, pause: float, between: Between) -> None:
    end: StreamEnd = desk.items[ENDS][0]
    # Not what it heard until now: the first frame of the turn may be there already.
    answered: int = desk.items.get(ANSWERED, 0)
    for heard in range(answered + 1, answered + 1 + number):
        end.wait(heard, pause, WORK[between])
        end.write()
    desk.items[ANSWERED] = answered + number


def _open_prefill(desk: Desk, plan: Plan) -> int:
    end = desk.items[END] = BarePrefill(plan.regions, plan.page_bytes)
    settle()
    return end.port


def _open_decode(desk: Desk, plan: Plan) -> None:
    desk.items[END] = BareDecode(plan.regions, plan.page_bytes)
    settle()


def _make_contact(desk: Desk, port: int) -> float:
    end: BareDecode = desk.items[END]
    return end.contact(port)


def _close_contact(desk: Desk) -> None:
    end: BarePrefill | BareDecode = desk.items.pop(END)
    end.close()


def _start_mooncake(desk: Desk, plan: Plan) -> tuple[str, int]:
    engine = desk.items[ENGINE] = BareMooncake()
    desk.items[MEMORY] = engine.allocate(plan.regions * plan.sequential_rooms * plan.page_bytes)
    settle()
    return engine.session, desk.items[MEMORY]


def _write_pages(desk: Desk, plan: Plan, peer: tuple[str, int], number: int) -> list[float]:
    """Seconds of each page: all of its writes at once, which is the fastest way for so few."""
    engine: BareMooncake = desk.items[ENGINE]
    session, target = peer
    return [
        engine.write_at_once(session, _descriptors(plan, page, desk.items[MEMORY], target)) for page in range(number)
    ]


def _descriptors(plan: Plan, page: int, source: int, target: int) -> Descriptors:
    offsets = (np.arange(plan.regions) * plan.sequential_rooms + page) * plan.page_bytes
    return (offsets + source).tolist(), (offsets + target).tolist(), [plan.page_bytes] * plan.regions
