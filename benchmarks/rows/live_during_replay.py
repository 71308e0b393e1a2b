"""events.live_during_replay: whether whoever reads the past holds up what happens now."""

from __future__ import annotations

import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import zmq

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Worker
from benchmarks.rows.control import percentile
from benchmarks.sides.streams import ProtocolName, PublisherSide, open_publisher, read

NAME = "events.live_during_replay"
CLIENTS = 4
# About 2 KB: 9 bytes for the hash of a block, 16 tokens of 5 bytes.
HASHES, TOKENS = list(range(2**48, 2**48 + 22)), list(range(2**17, 2**17 + 22 * 16))
INTERVAL, TIMEOUT = 0.001, 60.0
# Nothing is evicted while it is read, on either side: the seed would leave it out, and we would end the reader.
KEPT_BATCHES = 100_000
SIDE, DELAYS = "publisher", "delays"
# Of a payload, [time, ...] with the time as float64.
_TIME = struct.Struct(">xxd")


def benchmarks(plan: Plan) -> list[Benchmark]:
    return [
        Benchmark(
            metrics=(
                Metric(f"{NAME}.p99", "ms", "lower", "seed publisher", Target(ratio=10)),
                Metric(NAME, "ms", "lower", "seed publisher"),
            ),
            ours=lambda: LiveDuringReplay("kvgrpc", plan),
            baseline=lambda: LiveDuringReplay("seed", plan),
        )
    ]


class LiveDuringReplay:
    """A publisher, a process that subscribes, and one that replays with several clients."""

    def __init__(self, protocol: ProtocolName, plan: Plan) -> None:
        self._protocol = protocol
        self._number, self._replayed, self._published = plan.publishes, plan.replay_batches, plan.replay_batches
        self._workers = [Worker(f"{protocol}-{role}") for role in ("publisher", "subscriber", "reader")]
        self._publisher, self._subscriber, self._reader = self._workers
        endpoint, self._replay = self._publisher.call(_open, protocol)
        self._subscriber.call(_subscribe, endpoint)
        self._publisher.call(_publish, plan.replay_batches, 0.0)
        end = time.monotonic() + TIMEOUT
        while not self._subscriber.call(_heard):
            if time.monotonic() > end:
                raise TimeoutError(f"the subscriber heard nothing within {TIMEOUT} s")
            self._publisher.call(_publish, 1, INTERVAL)
            self._published += 1

    def turn(self) -> Figures:
        oldest, seconds = self._published - self._replayed, self._number * INTERVAL
        replaying = self._reader.begin(_replay_for, self._protocol, self._replay, oldest, seconds)
        first, last = self._publisher.call(_publish, self._number, INTERVAL)
        self._published += self._number
        if min(replaying.result()) < self._replayed:
            raise AssertionError("a replay brought less than there was")
        took = self._subscriber.call(_delays_of, first, last)
        return {NAME: percentile(took, 50) * 1e3, f"{NAME}.p99": percentile(took, 99) * 1e3}

    def peak_rss(self) -> int:
        return self._publisher.peak_rss()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def _open(desk: Desk, protocol: ProtocolName) -> tuple[str, str]:
    side = desk.items[SIDE] = open_publisher(protocol, KEPT_BATCHES)
    return side.endpoint, side.replay


def _publish(desk: Desk, number: int, interval: float) -> tuple[float, float]:
    """The moments of the first and of the last of them; CLOCK_MONOTONIC, which all processes of a host share."""
    side: PublisherSide = desk.items[SIDE]
    first = last = 0.0
    for _ in range(number):
        hashes, tokens = [*HASHES], [*TOKENS]
        last = time.monotonic()
        first = first or last
        side.publish(side.batch(last, hashes, tokens))
        time.sleep(interval)
    side.wait_published(min(number, 10_000))
    return first, last


def _subscribe(desk: Desk, endpoint: str) -> None:
    """Notes for every live batch when it was published and how long it took, for the rest of the process."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.set_hwm(0)
    socket.subscribe(b"")
    socket.connect(endpoint)
    delays: list[tuple[float, float]] = []
    desk.items[DELAYS] = delays

    def take() -> None:
        while True:
            payload = socket.recv_multipart()[2]
            now = time.monotonic()
            (moment,) = _TIME.unpack_from(payload)
            delays.append((moment, now - moment))

    threading.Thread(target=take, name="subscriber", daemon=True).start()


def _heard(desk: Desk) -> bool:
    return bool(desk.items[DELAYS])


def _delays_of(desk: Desk, first: float, last: float) -> list[float]:
    """Of the batches that were published between these moments, once the last one is there."""
    delays: list[tuple[float, float]] = desk.items[DELAYS]
    end = time.monotonic() + TIMEOUT
    while not delays or delays[-1][0] < last:
        if time.monotonic() > end:
            raise TimeoutError(f"the last live batch did not come within {TIMEOUT} s")
        time.sleep(INTERVAL)
    return [delay for moment, delay in delays if first <= moment <= last]


def _replay_for(desk: Desk, protocol: ProtocolName, where: str, first: int, seconds: float) -> list[int]:
    """Several clients replay all from ``first`` on, again and again for so long; how many batches each replay was."""
    end = time.monotonic() + seconds

    def replay() -> list[int]:
        counts = [len(read(protocol, where, first)[1])]
        while time.monotonic() < end:
            counts.append(len(read(protocol, where, first)[1]))
        return counts

    with ThreadPoolExecutor(CLIENTS) as clients:
        replays = [clients.submit(replay) for _ in range(CLIENTS)]
        return [count for done in replays for count in done.result()]
