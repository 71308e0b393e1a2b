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
from benchmarks.rows.control import BURST, PAUSE, InitCost, RoomMemory, Throughput, many_rooms, percentile
from benchmarks.rows.dataplane import RawMooncake
from benchmarks.rows.engine_calls import Made, Polls, setting_of_calls
from benchmarks.rows.events import PUBLISH_INTERVAL, PublishCost
from benchmarks.rows.handoff import (
    CONTROL_PAUSE,
    ENGINE_STEP,
    PAGE_PAUSE,
    SEED,
    Concurrent,
    FirstContact,
    Latency,
    setting_of_concurrent,
)
from benchmarks.rows.many_pairs import ManyPairs, lone_rooms_of_each, shape_of_many
from benchmarks.rows.room_sizes import (
    FewRooms,
    PagesOfARoom,
    SizedRooms,
    setting_of_few,
    setting_of_tiny,
    sizes_of_pages,
)
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
FEW, PAGES, TINY, CONCURRENT = "limit.few", "limit.pages", "limit.tiny", "limit.concurrent"
POLL, MADE = "limit.engine.poll", "limit.engine.ready"
ROOM_MEMORY, PUBLISH = "limit.room_memory", "limit.publish_cost"
# Of more rooms at once limit.throughput tells.
MOST_OF_FEW = 1_000
END, ENDS, ENGINE, MEMORY, ANSWERED, BEFORE = "end", "ends", "engine", "memory", "answered", "before"
# As sessions without rooms do, both ways (docs/session/opening.md).
QUIET_SECONDS = 0.9


def benchmarks(plan: Plan) -> list[Benchmark]:
    pages = min(plan.sequential_rooms, 64)
    shape = Shape(plan.regions, pages, plan.page_bytes, aux_items=pages)
    still, moving = Setting("seed", "null", shape), Setting("seed", "mooncake", shape)
    of_many = Setting("seed", "null", shape_of_many(plan))
    tiny, concurrent = setting_of_tiny(), setting_of_concurrent(plan)
    missing = "" if mooncake_is_here() else "mooncake.engine cannot be imported"

    def row(name: str, part: Callable[[], Contender], whole: Callable[[], Contender], missing: str = "") -> Benchmark:
        return Benchmark((Metric(name, "ms", "lower", SEED),), part, whole, missing)

    def with_tail(
        name: str, unit: str, part: Callable[[], Contender], whole: Callable[[], Contender], missing: str = ""
    ) -> Benchmark:
        metrics = Metric(name, unit, "lower", SEED), Metric(f"{name}.p99", unit, "lower", SEED)
        return Benchmark(metrics, part, whole, missing)

    def stream(name: str, number: int, pause: float, between: Between) -> Benchmark:
        return with_tail(
            name,
            "ms",
            lambda: BareStream(name, number, pause, between),
            lambda: Latency(still, number, name, pause, between=between),
        )

    rooms = plan.sequential_rooms
    many = many_rooms(plan)
    bare, seed = both(many)
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
            lambda: BareWake(WAKE, plan.timed_inits, BURST, PAUSE),
            lambda: InitCost(seed, plan.timed_inits, WAKE, BURST),
        ),
        with_tail(
            PUBLISH,
            "us",
            lambda: BareWake(PUBLISH, plan.publishes, 1, PUBLISH_INTERVAL),
            lambda: PublishCost("seed", plan.publishes, PUBLISH),
        ),
        Benchmark(
            (Metric(ROOM_MEMORY, "B/room", "lower", "seed managers"),),
            lambda: RoomMemory(bare, plan, ROOM_MEMORY),
            lambda: RoomMemory(seed, plan, ROOM_MEMORY),
            warm_ups=0,
        ),
        *_calls(plan),
        *(_few(plan, count) for count in plan.few_rooms if count <= MOST_OF_FEW),
        *(_pages(sized) for sized in sizes_of_pages(plan)),
        *(
            Benchmark(
                (
                    Metric(f"{IDLE}.{pairs}", "ms/s", "lower", "the same streams, pings alone"),
                    Metric(f"{IDLE}.{pairs}.prefill", "ms/s", "lower", "the same streams, pings alone"),
                ),
                partial(IdleStreams, plan, pairs, QUIET_SECONDS),
                partial(IdleStreams, plan, pairs, 0.0),
            )
            for pairs in plan.pairs
        ),
        *(
            row(f"{PAIRS}.{pairs}", partial(LoneFrames, plan, pairs), partial(LoneRooms, of_many, plan, pairs))
            for pairs in plan.pairs
        ),
        *(_rooms_of_all(of_many, plan, pairs) for pairs in plan.pairs),
        stream(CONTROL, plan.control_rooms, CONTROL_PAUSE, Between.NAP),
        stream(BUSY, plan.busy_rooms, ENGINE_STEP, Between.PYTHON),
        stream(TORCH, plan.busy_rooms, ENGINE_STEP, Between.TORCH),
        row(
            PAGE,
            lambda: BarePages(plan, rooms),
            lambda: Latency(moving, rooms, PAGE, PAGE_PAUSE, tail=False),
            missing,
        ),
        Benchmark(
            (Metric(CONTACT, "ms", "lower", SEED), Metric(f"{CONTACT}.ready", "ms", "lower", SEED)),
            lambda: BareContact(plan),
            lambda: FirstContact(moving, plan.contacts, CONTACT),
            missing,
        ),
        with_tail(
            TINY,
            "ms",
            lambda: BareTiny(tiny.shape, plan.sequential_rooms),
            lambda: Latency(of_seeds(tiny), plan.sequential_rooms, TINY, PAGE_PAUSE),
            missing,
        ),
        Benchmark(
            (Metric(CONCURRENT, "GB/s", "higher", SEED),),
            lambda: RawMooncake(CONCURRENT, in_one_region(concurrent.shape), 1),
            lambda: Concurrent(of_seeds(concurrent), plan, CONCURRENT),
            missing,
        ),
    ]


def _calls(plan: Plan) -> list[Benchmark]:
    bare, seed = both(setting_of_calls(plan))
    return [
        Benchmark(
            tuple(Metric(POLL + which, "us", "lower", SEED) for which in ("", ".p99", ".max")),
            lambda: Polls(bare, plan.control_rooms, POLL),
            lambda: Polls(seed, plan.control_rooms, POLL),
        ),
        Benchmark(
            (Metric(MADE, "us", "lower", SEED),),
            lambda: Made(bare, plan.busy_rooms, MADE),
            lambda: Made(seed, plan.busy_rooms, MADE),
        ),
    ]


def _few(plan: Plan, at_once: int) -> Benchmark:
    setting, in_all = setting_of_few(plan, at_once)
    name, (bare, seed) = f"{FEW}.{at_once}", both(setting)
    return Benchmark(
        (Metric(name, "rooms/s", "higher", SEED),),
        lambda: FewRooms(bare, name, in_all, at_once),
        lambda: FewRooms(seed, name, in_all, at_once),
    )


def _pages(sized: SizedRooms) -> Benchmark:
    name, (bare, seed) = f"{PAGES}.{sized.name}", both(sized.setting)
    return Benchmark(
        (Metric(name, "ms", "lower", SEED),),
        lambda: PagesOfARoom(bare, name, sized),
        lambda: PagesOfARoom(seed, name, sized),
    )


def _rooms_of_all(setting: Setting, plan: Plan, pairs: int) -> Benchmark:
    bare, seed = both(setting)
    return Benchmark(
        (Metric(f"{PAIRS}.{pairs}.rooms", "rooms/s", "higher", SEED),),
        lambda: RoomsOfAll(bare, plan, pairs),
        lambda: RoomsOfAll(seed, plan, pairs),
    )


def both(setting: Setting) -> tuple[Setting, Setting]:
    """With handles, plans, protobuf and a bare stream and nothing else; and with the seeds' protocol."""
    return dataclasses.replace(setting, protocol="bare"), of_seeds(setting)


def of_seeds(setting: Setting) -> Setting:
    return dataclasses.replace(setting, protocol="seed")


def in_one_region(shape: Shape) -> Shape:
    """A quarter as many pages of the same size: more of them say the same and take a minute."""
    return Shape(1, max(1, shape.regions * shape.pages // 4), shape.page_bytes, shape.aux_items)


class BareWake:
    """An append and a wake of a loop that sleeps, in bursts of so many, a pause after each."""

    def __init__(self, name: str, number: int, burst: int, pause: float) -> None:
        self._name, self._work = name, (number, burst, pause)
        self._worker = Worker("wake")
        self._worker.call(_start_loop)

    def turn(self) -> Figures:
        took = self._worker.call(_time_wakes, *self._work)
        return {self._name: percentile(took, 50) * 1e6, f"{self._name}.p99": percentile(took, 99) * 1e6}

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
        return {self._name: percentile(took, 50) * 1e3, f"{self._name}.p99": percentile(took, 99) * 1e3}

    def peak_rss(self) -> int:
        return self._near.peak_rss() + self._far.peak_rss()

    def close(self) -> None:
        self._near.close()
        self._far.close()


class BareTiny(BareStream):
    """A frame, a page by the bare engine, and a frame back."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__(TINY, number, PAGE_PAUSE, Between.NAP)
        nbytes, of_region = (
            shape.regions * shape.region_bytes,
            range(0, shape.regions * shape.region_bytes, shape.region_bytes),
        )
        peer = self._near.call(_start_mooncake, nbytes)
        _, source = self._far.call(_start_mooncake, nbytes)
        self._far.call(_write_before_each_answer, peer, source, of_region, shape.page_bytes)


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
        workers = {self._name: self._near, f"{self._name}.prefill": self._far[0]}
        before = {name: worker.call(cpu_used) for name, worker in workers.items()}
        time.sleep(self._seconds)
        used = {name: worker.call(cpu_used) - before[name] for name, worker in workers.items()}
        return {name: seconds / self._seconds * 1e3 for name, seconds in used.items()}


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


class RoomsOfAll(ManyPairs):
    """The rooms of all at once of ``handoff.pairs`` alone."""

    def turn(self) -> Figures:
        return {f"{PAIRS}.{self.pairs}.rooms": self.rooms_at_once()}


class BarePages:
    """One page of all regions after the other by the bare engine, which nobody asks for them."""

    def __init__(self, plan: Plan, number: int) -> None:
        self._plan = plan
        self._number = number
        self._source, self._target = Worker("page-source"), Worker("page-target")
        nbytes = plan.regions * plan.sequential_rooms * plan.page_bytes
        self._peer = self._target.call(_start_mooncake, nbytes)
        self._source.call(_start_mooncake, nbytes)

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
        ready, done = zip(*took, strict=True)
        return {CONTACT: percentile(done, 50) * 1e3, f"{CONTACT}.ready": percentile(ready, 50) * 1e3}

    def peak_rss(self) -> int:
        return self._prefill.peak_rss() + self._decode.peak_rss()

    def close(self) -> None:
        self._prefill.close()
        self._decode.close()


def _start_loop(desk: Desk) -> None:
    desk.items[END] = WokenLoop()
    settle()


def _time_wakes(desk: Desk, number: int, burst: int, pause: float) -> list[float]:
    end: WokenLoop = desk.items[END]
    took = []
    for start in range(0, number, burst):
        for item in range(start, min(start + burst, number)):
            begin = time.perf_counter()
            end.append(item)
            took.append(time.perf_counter() - begin)
        time.sleep(pause)
        end.wait(pause)
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
        if before := desk.items.get(BEFORE):
            before()
        end.write()
    desk.items[ANSWERED] = answered + number


def _write_before_each_answer(desk: Desk, peer: tuple[str, int], source: int, offsets: range, nbytes: int) -> None:
    """The same page each time, all of its writes at once."""
    engine: BareMooncake = desk.items[ENGINE]
    session, target = peer
    page = [source + at for at in offsets], [target + at for at in offsets], [nbytes] * len(offsets)
    desk.items[BEFORE] = lambda: engine.write_at_once(session, page)


def _open_prefill(desk: Desk, plan: Plan) -> int:
    end = desk.items[END] = BarePrefill(plan.regions, plan.page_bytes)
    settle()
    return end.port


def _open_decode(desk: Desk, plan: Plan) -> None:
    desk.items[END] = BareDecode(plan.regions, plan.page_bytes)
    settle()


def _make_contact(desk: Desk, port: int) -> tuple[float, float]:
    end: BareDecode = desk.items[END]
    return end.contact(port)


def _close_contact(desk: Desk) -> None:
    end: BarePrefill | BareDecode = desk.items.pop(END)
    end.close()


def _start_mooncake(desk: Desk, nbytes: int) -> tuple[str, int]:
    engine = desk.items[ENGINE] = BareMooncake()
    desk.items[MEMORY] = engine.allocate(nbytes)
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
