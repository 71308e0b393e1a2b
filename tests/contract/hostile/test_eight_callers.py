"""Eight callers ask for everything, as much as they may, beside an honest pair: each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvgrpc.rpc.interceptors import ALLOWED
from kvgrpc.rpc.options import OWN_CONNECTION
from kvgrpc.v1 import event_service_pb2 as events_pb
from kvgrpc.v1 import registry_service_pb2 as registry_pb
from kvgrpc.v1.event_service_pb2_grpc import EventServiceStub
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from tests.support.hostile.attacked import CALLERS, Attacked, Honest
from tests.support.hostile.largest import HEALTH_CHECK, HEALTH_WATCH, NOT_CALLED, REFLECTION
from tests.support.secrets import bearer

pytestmark = pytest.mark.timeout(600)

LONGEST_TURN_SECONDS = 0.05
# A turn that is long by itself is so each time; one in which the hypervisor took the processor, or which paid for a
# collection of the whole process's garbage, is not.
TIMES = 3
ASKED_SECONDS = 15.0
ROOMS = 12_000
# How many times as long a pair's rooms may take beside callers of its own process as beside those of another. Other
# work of the machine may meet one round of both.
MOST_TIMES_AS_LONG, ROUNDS = 3.0, 3
Ended = dict[str, Counter[str]]


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[Attacked]:
    """The prefill of the pair."""
    with opened(tmp_path / "attacked") as made:
        yield made


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Attacked]:
    """One that hands over to nobody."""
    with opened(tmp_path / "another") as made:
        yield made


@contextlib.contextmanager
def opened(storage: Path) -> Iterator[Attacked]:
    storage.mkdir()
    made = Attacked("P", "PREFILL", storage=str(storage))
    try:
        made.opened()
        yield made
    finally:
        made.end()


class Pair:
    """An honest decode and the prefill that others ask."""

    def __init__(self, prefill: Attacked) -> None:
        self._decode = Honest("D", "DECODE")
        self._prefill = prefill
        self._next = 1
        self._decode.opened()
        prefill.call("send_many", range(1, ROOMS + 1), 3)

    def hand_over(self, seconds: float) -> list[float]:
        """Rooms one after the other, and how long each took, the longest last. None may fail."""
        rooms = range(self._next, ROOMS + 1)
        took, failed = self._decode.call("hand_over", rooms, f"{self._prefill.address}/P", seconds)
        assert took and failed == []
        self._next += len(took)
        return sorted(took)

    def close(self) -> None:
        self._decode.end()


@pytest.fixture
def pair(attacked: Attacked) -> Iterator[Pair]:
    made = Pair(attacked)
    made.hand_over(0.1)
    yield made
    made.close()


@contextlib.contextmanager
def eight_callers_of(target: Attacked) -> Iterator[Ended]:
    """``Ended`` has what became of their calls when they are gone."""
    arguments = [*target.call("addresses"), target.call("identity")]
    ended: Ended = defaultdict(Counter)
    module = [sys.executable, "-m", "tests.support.hostile.asking_everything"]
    with contextlib.ExitStack() as stack:
        callers = []
        for name in CALLERS:
            command = [*module, name, *arguments]
            caller = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(caller)
            stack.callback(caller.kill)
            callers.append(caller)
        for caller in callers:
            assert caller.stdout is not None and caller.stdout.readline() == "asks\n"
        yield ended
        for caller in callers:
            assert caller.stdin is not None and caller.stdout is not None
            caller.stdin.close()
            for path, codes in json.loads(caller.stdout.readline()).items():
                ended[path].update(codes)


# Slow, and it hangs on how busy the machine is: 25 ms was the longest of a kind of work on two busy cores, and single
# turns in which a collection of garbage fell were 50 to 91 ms.
@pytest.mark.slow
def test_no_turn_of_the_loop_is_long_and_no_room_is_lost(attacked: Attacked, pair: Pair) -> None:
    attacked.call("longest_turns")
    with eight_callers_of(attacked) as ended:
        pair.hand_over(ASKED_SECONDS)
        turns = attacked.call("longest_turns")
    assert set(ALLOWED) - NOT_CALLED | {HEALTH_CHECK, HEALTH_WATCH, REFLECTION} <= set(ended)
    long = Counter(what for seconds, what in turns if seconds > LONGEST_TURN_SECONDS)
    assert {what: times for what, times in long.items() if times >= TIMES} == {}


@pytest.mark.slow
def test_a_pair_is_three_times_as_slow_at_most_as_beside_callers_of_another_process(
    attacked: Attacked, another: Attacked, pair: Pair
) -> None:
    rounds = []
    for _ in range(ROUNDS):
        slowest = []
        for target in (another, attacked):
            with eight_callers_of(target):
                pair.hand_over(1.0)
                took = pair.hand_over(ASKED_SECONDS / 2)
            slowest.append(took[int(len(took) * 0.99)])
        rounds.append(slowest)
        if slowest[1] <= MOST_TIMES_AS_LONG * slowest[0]:
            return
    pytest.fail(f"seconds of the hundredth room beside callers of another process, and of its own: {rounds}")


# Slow as the others are; on two cores half full of other work nine of ten took 0.1 s.
@pytest.mark.slow
def test_probes_and_streams_of_others_are_served_within_a_second(attacked: Attacked, pair: Pair) -> None:
    took: dict[str, list[float]] = defaultdict(list)
    with eight_callers_of(attacked), ThreadPoolExecutor(1) as aside, Honestly(attacked) as honestly:
        rooms = aside.submit(pair.hand_over, ASKED_SECONDS)
        while not rooms.done():
            for ask in (honestly.probe, honestly.keep_alive, honestly.hear_of_an_event):
                began = time.monotonic()
                ask()
                took[ask.__name__].append(time.monotonic() - began)
            time.sleep(0.05)  # the pace at which they come
        rooms.result()
    late = {what: sorted(seconds)[len(seconds) * 9 // 10] for what, seconds in took.items()}
    assert min(map(len, took.values())) > 5 and max(late.values()) < 1.0, late


class Honestly:
    """What others want of the process that is asked for everything."""

    def __init__(self, attacked: Attacked) -> None:
        self._attacked, self._address = attacked, attacked.address
        self._channel = grpc.insecure_channel(self._address, OWN_CONNECTION)
        self._leases: queue.SimpleQueue[registry_pb.KeepAliveRequest | None] = queue.SimpleQueue()

    def __enter__(self) -> Honestly:
        keep_alive: Any = RegistryServiceStub(self._channel).KeepAlive
        self._kept = keep_alive(iter(self._leases.get, None), metadata=self._proof("pair"), timeout=100)
        tail = events_pb.WatchRequest(mode=events_pb.WATCH_MODE_TAIL)
        watch: Any = EventServiceStub(self._channel).Watch
        self._told = watch(tail, metadata=self._proof("index"), timeout=100)
        assert next(self._told).HasField("begin")
        return self

    def __exit__(self, *_: object) -> None:
        self._leases.put(None)
        self._channel.close()

    def probe(self) -> None:
        """By a connection of its own, as a kubelet does it."""
        with grpc.insecure_channel(self._address, OWN_CONNECTION) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(), metadata=self._proof("index"), timeout=20)

    def keep_alive(self) -> None:
        self._leases.put(registry_pb.KeepAliveRequest(lease_ids=[7]))
        next(self._kept)

    def hear_of_an_event(self) -> None:
        self._attacked.call("publish_one_batch")
        while not next(self._told).HasField("raw"):
            continue

    def _proof(self, name: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", bearer(name, self._address)),)
