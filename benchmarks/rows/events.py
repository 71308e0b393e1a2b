"""events.*: what publishing costs the engine's thread, and how fast a late reader gets what it missed."""

from __future__ import annotations

import statistics
import threading
import time
import zlib
from collections.abc import Sequence

import msgspec
import zmq

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Worker
from benchmarks.rows import event_payloads, event_trace, live_during_replay
from benchmarks.rows.control import percentile
from benchmarks.sides.streams import ProtocolName, PublisherSide, open_publisher, read

PUBLISH_COST = "events.publish_cost"
REPLAY = "events.replay"
BLOCK_TOKENS = 16
PUBLISHED_BLOCKS = 64
# Blocks that make a batch of about that size: 9 bytes for the hash, 16 tokens of 5 bytes.
REPLAYED = {"300B": (3, 5.0), "2KB": (22, 2.0), "20KB": (224, 1.0)}
PUBLISH_INTERVAL = 0.001
FIRST_HASH, FIRST_TOKEN = 2**48, 2**17
SIDE, KNOWN = "publisher", "known"


def benchmarks(plan: Plan) -> list[Benchmark]:
    return [
        Benchmark(
            metrics=(
                Metric(PUBLISH_COST, "us", "lower", "seed publisher", Target(ratio=1)),
                Metric(f"{PUBLISH_COST}.p99", "us", "lower", "seed publisher", Target(value=30)),
            ),
            ours=lambda: PublishCost("kvgrpc", plan.publishes),
            baseline=lambda: PublishCost("seed", plan.publishes),
        ),
        *(_replay(f"{REPLAY}.{size}", blocks, target, plan) for size, (blocks, target) in REPLAYED.items()),
        *live_during_replay.benchmarks(plan),
        *event_payloads.benchmarks(plan),
        *event_trace.benchmarks(plan),
    ]


def _replay(name: str, blocks: int, target: float, plan: Plan) -> Benchmark:
    return Benchmark(
        metrics=(Metric(name, "batches/s", "higher", "seed ROUTER", Target(ratio=target)),),
        ours=lambda: Replay(name, "kvgrpc", blocks, plan),
        baseline=lambda: Replay(name, "seed", blocks, plan),
    )


class _Stream:
    """A publisher, and a process that reads from it."""

    def __init__(self, protocol: ProtocolName) -> None:
        self.protocol = protocol
        self.publisher = Worker(f"{protocol}-publisher")
        self.reader = Worker(f"{protocol}-reader")
        self.endpoint, self.replay = self.publisher.call(_open, protocol)

    def peak_rss(self) -> int:
        return self.publisher.peak_rss() + self.reader.peak_rss()

    def close(self) -> None:
        self.reader.close()
        self.publisher.close()


class PublishCost(_Stream):
    """Time of ``publish`` on the caller's thread, with one live subscriber."""

    def __init__(self, protocol: ProtocolName, number: int, name: str = PUBLISH_COST) -> None:
        super().__init__(protocol)
        self._name, self._number = name, number
        self._published = 0
        self.reader.call(_subscribe, self.endpoint)

    def turn(self) -> Figures:
        took = self.publisher.call(_publish_timed, self._published, self._number)
        self._published += self._number
        return {self._name: percentile(took, 50) * 1e6, f"{self._name}.p99": percentile(took, 99) * 1e6}


class Replay(_Stream):
    """Everything that is kept, read again and again."""

    def __init__(self, name: str, protocol: ProtocolName, blocks: int, plan: Plan) -> None:
        super().__init__(protocol)
        self._name = name
        self._blocks = blocks
        self._batches = plan.replay_batches
        self._repeats = plan.bulk_repeats
        self.publisher.call(_publish_all, self._batches, blocks)

    def turn(self) -> Figures:
        took = [
            self.reader.call(_read, self.protocol, self.replay, self._batches, self._blocks)
            for _ in range(self._repeats)
        ]
        return {self._name: self._batches / statistics.median(took)}


def _open(desk: Desk, protocol: ProtocolName) -> tuple[str, str]:
    side = open_publisher(protocol)
    desk.items[SIDE] = side
    return side.endpoint, side.replay


def _publish_timed(desk: Desk, first: int, number: int) -> list[float]:
    side: PublisherSide = desk.items[SIDE]
    batches = [_batch(side, first + offset, PUBLISHED_BLOCKS) for offset in range(number)]
    publish = side.publish
    took = []
    for batch in batches:
        begin = time.perf_counter()
        publish(batch)
        took.append(time.perf_counter() - begin)
        time.sleep(PUBLISH_INTERVAL)
    side.wait_published(min(first + number, 10_000))
    return took


def _publish_all(desk: Desk, number: int, blocks: int) -> None:
    side: PublisherSide = desk.items[SIDE]
    for sequence in range(number):
        side.publish(_batch(side, sequence, blocks))
    side.wait_published(number)


def _subscribe(desk: Desk, endpoint: str) -> None:
    """Takes every live event for the rest of the process."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe(b"")
    socket.connect(endpoint)

    def take() -> None:
        while True:
            socket.recv_multipart()

    threading.Thread(target=take, name="subscriber", daemon=True).start()


def _read(desk: Desk, protocol: ProtocolName, where: str, number: int, blocks: int) -> float:
    """Seconds of one replay. The first is compared with what was published, later ones with the first."""
    seconds, payloads = read(protocol, where)
    checksum = 0
    for payload in payloads:
        checksum = zlib.crc32(payload, checksum)
    if desk.items.setdefault(KNOWN, checksum) != checksum:
        raise AssertionError("another replay brought other bytes")
    if "compared" not in desk.items:
        desk.items["compared"] = True
        _compare(payloads, number, blocks)
    return seconds


def _compare(payloads: Sequence[bytes], number: int, blocks: int) -> None:
    if len(payloads) != number:
        raise AssertionError(f"{len(payloads)} batches were replayed, {number} published")
    for sequence, payload in enumerate(payloads):
        ts, events, *_ = msgspec.msgpack.decode(payload)
        if ts != float(sequence) or events[0][:4] != ["BlockStored", _hashes(sequence, blocks), None, _tokens(blocks)]:
            raise AssertionError(f"batch {sequence} is not what was published")


def _batch(side: PublisherSide, sequence: int, blocks: int) -> object:
    return side.batch(float(sequence), _hashes(sequence, blocks), _tokens(blocks))


def _hashes(sequence: int, blocks: int) -> list[int]:
    return list(range(FIRST_HASH + sequence * blocks, FIRST_HASH + (sequence + 1) * blocks))


def _tokens(blocks: int) -> list[int]:
    return list(range(FIRST_TOKEN, FIRST_TOKEN + blocks * BLOCK_TOKENS))
