"""events.trace: a cache that serves real requests, from its publisher to an exact follower in another process.

The requests are the conversation trace (``TEST_TRACE``, else the committed sample), published as fast as that goes; the
baseline folds the same events in one process, without anything in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric
from benchmarks.harness.worker import Desk, Worker
from benchmarks.sides.streams import KvgrpcPublisher
from kvgrpc.events.following.contents import CacheContents
from kvgrpc.events.following.index import BlockIndex
from kvgrpc.events.model import AllBlocksCleared, KVEventBatch
from tests.support.prefix_cache import PrefixCache, requests

NAME, EXACT = "events.trace", "events.trace.exact"
BASELINE = "the same events, folded in one process"
DEVICE_BLOCKS, HOST_BLOCKS = 2_000, 8_000
KEPT_BATCHES = 100_000
TIMEOUT = 120.0
SIDE, FOLLOWER, BATCHES, HELD = "publisher", "follower", "batches", "held"


def benchmarks(plan: Plan) -> list[Benchmark]:
    return [
        Benchmark(
            metrics=(Metric(NAME, "batches/s", "higher", BASELINE), Metric(EXACT, "ms", "lower", BASELINE)),
            ours=lambda: Followed(plan.trace_requests),
            baseline=lambda: Folded(plan.trace_requests),
        )
    ]


class Followed:
    """A publishing rank, and a process with a follower of it."""

    def __init__(self, served: int | None) -> None:
        self._publisher, self._follower = Worker("trace-publisher"), Worker("trace-follower")
        self._follower.call(_follow, self._publisher.call(_open, served))

    def turn(self) -> Figures:
        began, ended, upcoming, held = self._publisher.call(_publish)
        exact = self._follower.call(_until_exact, upcoming, held)
        return {NAME: self._publisher.call(_batches) / (exact - began), EXACT: (exact - ended) * 1e3}

    def peak_rss(self) -> int:
        return self._publisher.peak_rss() + self._follower.peak_rss()

    def close(self) -> None:
        self._follower.close()
        self._publisher.close()


class Folded:
    """The events in the process that has them. ``exact``: what the last batch takes."""

    def __init__(self, served: int | None) -> None:
        self._worker = Worker("trace-folded")
        self._worker.call(_serve, served)

    def turn(self) -> Figures:
        batches, seconds, last = self._worker.call(_fold)
        return {NAME: batches / seconds, EXACT: last * 1e3}

    def peak_rss(self) -> int:
        return self._worker.peak_rss()

    def close(self) -> None:
        self._worker.close()


def _serve(desk: Desk, served: int | None) -> None:
    """What the cache says, from empty, and what it holds at the end."""
    cache = PrefixCache(DEVICE_BLOCKS, HOST_BLOCKS)
    happened = [events for blocks in requests(served) if (events := cache.request(blocks))]
    desk.items[BATCHES] = [KVEventBatch(0.0, [AllBlocksCleared()]), *(KVEventBatch(0.0, events) for events in happened)]
    desk.items[HELD] = {medium: len(hashes) for medium, hashes in cache.content.items()}


def _batches(desk: Desk) -> int:
    return len(desk.items[BATCHES])


def _open(desk: Desk, served: int | None) -> str:
    _serve(desk, served)
    desk.items[SIDE] = side = KvgrpcPublisher(KEPT_BATCHES)
    return side.replay


def _publish(desk: Desk) -> tuple[float, float, int, dict[str, int]]:
    """When the first and the last were published, what number comes next, and what the cache holds."""
    side: KvgrpcPublisher = desk.items[SIDE]
    began = time.monotonic()
    for batch in desk.items[BATCHES]:
        if not side.publish(batch):
            raise AssertionError("the publisher's queue was full")
    return began, time.monotonic(), side.next_sequence, desk.items[HELD]


def _follow(desk: Desk, address: str) -> None:
    from kvgrpc.client import SyncEventFollower

    desk.items[FOLLOWER] = follower = SyncEventFollower(address)
    follower.start()
    follower.until_current(TIMEOUT)


def _until_exact(desk: Desk, upcoming: int, held: dict[str, int]) -> float:
    """When the follower had all, on the clock of all processes; then it must agree with the publisher's digest."""
    follower = desk.items[FOLLOWER]
    _until(lambda: follower.freshness.next_sequence == upcoming)
    exact = time.monotonic()
    compared = follower.counts.digests_equal
    _until(lambda: follower.counts.digests_equal > compared)
    if follower.counts.digests_different or follower.blocks != held:
        raise AssertionError(f"the follower holds {follower.blocks}, the cache {held}; {follower.counts}")
    return exact


def _fold(desk: Desk) -> tuple[int, float, float]:
    contents, batches = CacheContents(BlockIndex()), desk.items[BATCHES]
    began = last = time.monotonic()
    for sequence, batch in enumerate(batches):
        last = time.monotonic()
        contents.apply(batch.events)
        contents.advance(sequence + 1)
    ended = time.monotonic()
    if {tier.medium: tier.blocks for tier in contents.digest().tiers} != desk.items[HELD]:
        raise AssertionError("the fold is not what the cache holds")
    return len(batches), ended - began, ended - last


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {TIMEOUT:g} s")
        time.sleep(0.0005)
