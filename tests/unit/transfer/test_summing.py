"""Checksums are taken a few bytes a turn, so that nobody else waits for a peer that verifies."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from kvgrpc.dataplane.base import EndedTransfer, Outcome, Result
from kvgrpc.model import Pool, RankId, RankRef
from kvgrpc.transfer.protocol.destination import U32Array
from kvgrpc.transfer.protocol.prefill.core import PrefillPair, PrefillRoom, Submission
from kvgrpc.transfer.protocol.types import RoomKey
from kvgrpc.transfer.runtime.guarded import GuardedPlane
from kvgrpc.transfer.runtime.writing import queues as write_queues
from kvgrpc.transfer.runtime.writing.checksums import PageReader
from kvgrpc.transfer.runtime.writing.worker import PeerMemory, TransferWorker
from tests.support.waiting import wait_until

PAGES, PAGE_BYTES = 64, 1 << 20
CACHE = np.arange(PAGES * PAGE_BYTES // 4, dtype=np.uint32).view(np.uint8).reshape(PAGES, PAGE_BYTES)
POOL = Pool.from_arrays([CACHE], page_tokens=1)
ME = RankRef(RankId("P"), 1)


class Plane:
    """Its writes are over at once."""

    name, poll_interval, quick_bytes = "fake", 0.001, 0

    def attach(self, address: bytes) -> object:
        return object()

    def submit(self, peer: object, source: object, destination: object, nbytes: object) -> EndedTransfer:
        return EndedTransfer(Result(Outcome.DONE, "", 1))


class Bench:
    def __init__(self) -> None:
        self.ended: list[tuple[Submission, Result]] = []
        self.worker = TransferWorker(GuardedPlane(Plane()), [POOL], self.ended.extend)  # type: ignore[arg-type]
        self.verifying = self.pair(True)

    def pair(self, verify: bool) -> PrefillPair:
        return PrefillPair(RankRef(RankId("D"), 2), PeerMemory([POOL], b"there", verify=verify), 0)

    def submission(self, room: int, pair: PrefillPair, pages: int = PAGES) -> Submission:
        source = np.arange(pages, dtype=np.uint32)
        return Submission(PrefillRoom(RoomKey(room), ME, 0), pair, source, source[::-1].copy(), 0)

    def until(self, count: int) -> list[tuple[int, Outcome]]:
        wait_until(lambda: len(self.ended) >= count)
        return [(submission.record.key.room, result.outcome) for submission, result in self.ended]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    assert bench.worker.close(10.0)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Each call that sums pages takes 10 ms; the event is set with the first."""
    began, sums = threading.Event(), PageReader.sums

    def slowly(self: PageReader, pages: U32Array) -> U32Array:
        began.set()
        time.sleep(0.01)  # the slow part
        return sums(self, pages)

    monkeypatch.setattr(PageReader, "sums", slowly)
    return began


def test_the_checksums_are_those_of_the_pages(bench: Bench) -> None:
    submission = bench.submission(1, bench.verifying)
    bench.worker.submit([submission])
    assert bench.until(1) == [(1, Outcome.DONE)]
    assert submission.checksums is not None
    ((pages, sums),) = submission.checksums
    assert pages is submission.destination
    assert sums.dtype == np.uint32 and sums.tolist() == [zlib.crc32(page.data) for page in CACHE]


def test_one_long_chunk_takes_many_turns(bench: Bench) -> None:
    before = bench.worker.turns
    bench.worker.submit([bench.submission(1, bench.verifying)])
    bench.until(1)
    assert bench.worker.turns - before >= PAGES * PAGE_BYTES // write_queues.BYTES_OF_A_TURN


def test_a_peer_that_does_not_verify_waits_for_no_checksum_of_another(bench: Bench, slow: threading.Event) -> None:
    bench.worker.submit([bench.submission(room, bench.verifying) for room in range(1, 5)])
    assert slow.wait(10)
    bench.worker.submit([bench.submission(9, bench.pair(False))])
    assert bench.until(1) == [(9, Outcome.DONE)] and bench.worker.busy and bench.worker.depths[0] >= 3
    assert bench.until(5)[1:] == [(room, Outcome.DONE) for room in range(1, 5)]


def test_a_short_chunk_overtakes_the_long_one_of_another_peer(bench: Bench, slow: threading.Event) -> None:
    bench.worker.submit([bench.submission(1, bench.verifying)])
    assert slow.wait(10)
    bench.worker.submit([bench.submission(2, bench.pair(True), pages=1)])
    assert bench.until(2) == [(2, Outcome.DONE), (1, Outcome.DONE)]


def test_no_page_of_a_room_that_ended_is_read_any_more(bench: Bench, slow: threading.Event) -> None:
    long = bench.submission(1, bench.verifying)
    bench.worker.submit([long])
    assert slow.wait(10)
    long.record.ended = True
    assert bench.until(1) == [(1, Outcome.REJECTED)]
    assert long.checksums is None, "it took all of the checksums first"


def test_a_wait_is_called_once(bench: Bench) -> None:
    calls: list[int] = []
    submission = bench.submission(1, bench.verifying)
    submission.wait = lambda: calls.append(1)
    bench.worker.submit([submission])
    assert bench.until(1) == [(1, Outcome.DONE)] and calls == [1]


def test_pages_that_cannot_be_read_fail_their_room_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def sums(self: PageReader, pages: object) -> object:
        raise RuntimeError("no memory")

    monkeypatch.setattr(PageReader, "sums", sums)
    bench.worker.submit([bench.submission(1, bench.verifying), bench.submission(2, bench.pair(False))])
    assert sorted(bench.until(2)) == [(1, Outcome.REJECTED), (2, Outcome.DONE)]
