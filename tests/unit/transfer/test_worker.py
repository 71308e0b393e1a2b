"""The transfer thread: each submission is reported once, and nothing that an engine or a plane raises ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvgrpc.dataplane.base import Outcome, Result
from kvgrpc.errors import Failure, Reason
from kvgrpc.model import Pool, PoolKind, RankId, RankRef, Region
from kvgrpc.transfer.protocol.prefill.core import PrefillPair, PrefillRoom, Submission
from kvgrpc.transfer.protocol.types import RoomKey, Timing
from kvgrpc.transfer.runtime.guarded import GuardedPlane
from kvgrpc.transfer.runtime.writing.worker import PeerMemory, TransferWorker
from tests.support.waiting import wait_until

POOL = Pool("kv", PoolKind.KV, 1, 8, "uint8", (Region(0, "kv", 4096, 16, 16),))
ME, DECODE = RankRef(RankId("P"), 1), RankRef(RankId("D"), 2)
DONE = Result(Outcome.DONE, "", 16)


class Write:
    """A submission that ends when it is told to."""

    def __init__(self, result: Result | Exception | None) -> None:
        self.result = result
        self.stopped = False

    def poll(self) -> Result | None:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def stop(self) -> None:
        self.stopped = True
        self.result = Result(Outcome.REJECTED, "stopped")


class Plane:
    """Remembers what it was asked; ``next_result`` decides how a write ends (None: not yet)."""

    name, poll_interval, quick_bytes = "fake", 0.001, 0

    def __init__(self) -> None:
        self.next_result: Result | Exception | None = DONE
        self.writes: list[tuple[list[int], list[int], list[int], Write]] = []
        self.attached: list[bytes] = []
        self.detached = 0
        self.thread: threading.Thread | None = None

    def attach(self, address: bytes) -> object:
        if address == b"bad":
            raise ValueError("no such peer")
        self.attached.append(address)
        return object()

    def detach(self, peer: object) -> None:
        self.detached += 1

    def submit(self, peer: object, source: Any, destination: Any, nbytes: Any) -> Write:
        write = Write(self.next_result)
        self.thread = threading.current_thread()
        self.writes.append((source.tolist(), destination.tolist(), nbytes.tolist(), write))
        return write


class Bench:
    def __init__(self, quick_bytes: int = 0) -> None:
        self.plane = Plane()
        self.plane.quick_bytes = quick_bytes
        self.ended: list[tuple[Submission, Result]] = []
        guarded = GuardedPlane(self.plane)  # type: ignore[arg-type]
        self.worker = TransferWorker(guarded, [POOL], self.ended.extend)
        self.pair = PrefillPair(DECODE, PeerMemory([POOL], b"there"), 0)

    def submission(self, room: int = 1, wait: Callable[[], None] | None = None) -> Submission:
        page = np.array([room], np.uint32)
        return Submission(PrefillRoom(RoomKey(room), ME, 0), self.pair, page, page + np.uint32(1), 0, wait)

    def hold(self) -> threading.Event:
        """Keeps the thread in the ``wait`` of a submission of room 1 until the event is set."""
        entered, leave = threading.Event(), threading.Event()

        def wait() -> None:
            entered.set()
            assert leave.wait(20)

        self.worker.submit([self.submission(1, wait)])
        assert entered.wait(20)
        return leave

    def until_ended(self, count: int) -> list[Outcome]:
        wait_until(lambda: len(self.ended) >= count)
        return [result.outcome for _, result in self.ended]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    assert bench.worker.close(10.0)


@pytest.fixture
def quick() -> Iterator[Bench]:
    """Its plane writes a page at once."""
    bench = Bench(quick_bytes=16)
    yield bench
    assert bench.worker.close(10.0)


def test_each_submission_is_written_where_it_belongs_and_reported_once(bench: Bench) -> None:
    submissions = [bench.submission(room) for room in range(1, 5)]
    bench.worker.submit(submissions)
    assert bench.until_ended(4) == [Outcome.DONE] * 4
    assert [submission for submission, _ in bench.ended] == submissions
    assert [write[0] for write in bench.plane.writes] == [[4096 + 16 * room] for room in range(1, 5)]
    assert [write[1] for write in bench.plane.writes] == [[4096 + 16 * (room + 1)] for room in range(1, 5)]
    assert bench.plane.attached == [b"there"] and bench.worker.bytes_written == 64


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyError(), ValueError("\ud800")])
def test_a_wait_that_raises_fails_its_room_alone(bench: Bench, error: Exception) -> None:
    def wait() -> None:
        raise error

    bench.worker.submit([bench.submission(1), bench.submission(2, wait), bench.submission(3)])
    bench.until_ended(3)
    outcomes = {submission.record.key.room: result.outcome for submission, result in bench.ended}
    assert outcomes == {1: Outcome.DONE, 2: Outcome.REJECTED, 3: Outcome.DONE}


def test_a_room_that_ended_while_it_waited_is_not_written(bench: Bench) -> None:
    submission = bench.submission()
    submission.record.ended = True
    bench.worker.submit([submission])
    assert bench.until_ended(1) == [Outcome.REJECTED] and not bench.plane.writes


def test_a_room_that_ended_during_its_own_wait_is_not_written_either(bench: Bench) -> None:
    """Its rank may have been closed meanwhile, and its memory be gone."""
    submission = bench.submission(1)

    def wait() -> None:
        submission.record.fail(Failure(Reason.ROOM_CANCELLED, "while it waited"))

    submission.wait = wait
    bench.worker.submit([submission])
    assert bench.until_ended(1) == [Outcome.REJECTED] and not bench.plane.writes


def test_a_plane_that_raises_leaves_unknown_and_the_thread_goes_on(bench: Bench) -> None:
    bench.plane.next_result = RuntimeError("driver")
    bench.worker.submit([bench.submission(1)])
    assert bench.until_ended(1) == [Outcome.FAILED_UNKNOWN]
    bench.plane.next_result = DONE
    bench.worker.submit([bench.submission(2)])
    assert bench.until_ended(2)[1] is Outcome.DONE and bench.worker.healthy


def test_a_plane_that_raises_wherever_it_is_asked_leaves_the_thread_alone(bench: Bench) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("driver")

    plane: Any = bench.plane
    plane.detach, plane.poll_interval, plane.next_result = raises, "soon", None
    submission = bench.submission(1)
    bench.worker.submit([submission])
    deadline = time.monotonic() + 10
    while not plane.writes:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    plane.writes[0][3].stop = raises
    bench.worker.stop(submission.record)
    bench.worker.forget(bench.pair)
    plane.writes[0][3].result = "all of it"
    assert bench.until_ended(1) == [Outcome.FAILED_UNKNOWN]
    plane.next_result = DONE
    bench.worker.submit([bench.submission(2)])
    assert bench.until_ended(2)[1] is Outcome.DONE and bench.worker.healthy


def test_an_address_that_is_none_rejects(bench: Bench) -> None:
    bench.pair = PrefillPair(DECODE, PeerMemory([POOL], b"bad"), 0)
    bench.worker.submit([bench.submission()])
    assert bench.until_ended(1) == [Outcome.REJECTED]
    assert "no such peer" in bench.ended[0][1].detail


def test_a_stop_reaches_what_runs_of_that_room_only(bench: Bench) -> None:
    bench.plane.next_result = None
    first, second = bench.submission(1), bench.submission(2)
    bench.worker.submit([first, second])
    deadline = time.monotonic() + 10
    while len(bench.plane.writes) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    bench.worker.stop(first.record)
    assert bench.until_ended(1) == [Outcome.REJECTED] and bench.ended[0][0] is first
    assert not bench.plane.writes[1][3].stopped
    bench.plane.writes[1][3].result = DONE
    assert bench.until_ended(2)[1] is Outcome.DONE


def test_a_peer_is_attached_early_only_while_its_session_stands(bench: Bench) -> None:
    """Mooncake's first contact with a process that is gone holds the whole engine."""
    gone, stands = (PrefillPair(DECODE, PeerMemory([POOL], address), 0) for address in (b"gone", b"stands"))
    for pair in (gone, stands):
        pair.welcome(object(), 1, 0)
    leave = bench.hold()
    bench.worker.attach(gone)
    bench.worker.attach(stands)
    gone.end_stream(1, Timing())  # while the thread is busy
    leave.set()
    bench.worker.submit([bench.submission(2)])
    bench.until_ended(2)
    assert bench.plane.attached == [b"there", b"stands"]


def test_a_peer_with_one_write_waits_two_turns_for_a_peer_with_ten_thousand(bench: Bench) -> None:
    """A turn starts at most 256; the first may be full before the other comes."""
    other = PrefillPair(RankRef(RankId("E"), 3), PeerMemory([POOL], b"elsewhere"), 0)
    leave = bench.hold()
    many = [bench.submission(1) for _ in range(10_000)]
    one = bench.submission(2)
    one.pair = other
    bench.worker.submit(many)
    bench.worker.submit([one])
    leave.set()
    bench.until_ended(10_002)
    order = [submission for submission, _ in bench.ended]
    assert order.index(one) <= 2 * 256
    assert [each for each in order if each.pair is bench.pair][1:] == many, "each peer's in their order"


def test_room_at_a_peer_is_for_the_write_that_waits_for_it_already(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = threading.Event()
    took: list[int] = []

    class Waiting(Write):
        """Ends once there is room for it."""

        def __init__(self, page: int) -> None:
            super().__init__(None)
            self.page = page

        def poll(self) -> Result | None:
            if self.result is None and room.is_set():
                room.clear()
                took.append(self.page)
                self.result = DONE
            return super().poll()

    def submit(peer: object, source: Any, destination: Any, nbytes: Any) -> Write:
        page = int(source[0] - 4096) // 16
        return Write(DONE) if page == 1 else Waiting(page)

    def report(ended: list[tuple[Submission, Result]]) -> None:
        if not bench.ended:  # between two turns
            bench.worker.submit([bench.submission(3)])
            room.set()
        bench.ended.extend(ended)

    monkeypatch.setattr(bench.plane, "submit", submit)
    monkeypatch.setattr(bench.worker, "_report", report)
    bench.worker.submit([bench.submission(2), bench.submission(1)])
    bench.until_ended(2)
    assert took == [2]
    room.set()
    bench.until_ended(3)


def test_a_peer_that_is_gone_is_detached_once(bench: Bench) -> None:
    bench.worker.submit([bench.submission()])
    bench.until_ended(1)
    for _ in range(2):
        bench.worker.forget(bench.pair)
    assert bench.worker.close(10.0) and bench.plane.detached == 1


def test_close_waits_for_what_runs_and_says_when_it_did_not_end(bench: Bench) -> None:
    bench.plane.next_result = None
    bench.worker.submit([bench.submission()])
    deadline = time.monotonic() + 10
    while not bench.plane.writes:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not bench.worker.close(0.1)
    ending = threading.Timer(0.1, lambda: setattr(bench.plane.writes[0][3], "result", DONE))
    ending.start()
    assert bench.worker.close(10.0) and bench.until_ended(1) == [Outcome.DONE]


def test_once_it_has_ended_the_next_rank_may_have_its_staging_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []
    monkeypatch.setattr(bench.worker._staging, "close", lambda: given.append(True))
    bench.plane.next_result = None
    bench.worker.submit([bench.submission()])
    wait_until(lambda: bench.plane.writes)
    assert not bench.worker.close(0.1) and not given, "a write reads it"
    bench.plane.writes[0][3].result = DONE
    assert bench.worker.close(10.0) and given == [True]


def attached(bench: Bench) -> None:
    bench.worker.submit([bench.submission(99)])
    bench.until_ended(1)
    bench.ended.clear()
    bench.plane.writes.clear()


def written_now(bench: Bench, submissions: list[Submission]) -> list[tuple[Submission, Result]]:
    """Once the thread has nothing to do: it looks twice a second whether it shall end."""
    deadline = time.monotonic() + 10
    while (ended := bench.worker.write_now(submissions)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return ended


def test_a_quick_write_ends_where_it_was_asked_for(quick: Bench) -> None:
    attached(quick)
    submissions = [quick.submission(room) for room in (1, 2)]
    assert written_now(quick, submissions) == [(each, DONE) for each in submissions]
    assert [write[0] for write in quick.plane.writes] == [[4096 + 16], [4096 + 32]]
    assert quick.plane.thread is threading.current_thread() and not quick.ended


def test_a_quick_write_that_goes_on_is_looked_after_by_the_thread(quick: Bench) -> None:
    attached(quick)
    quick.plane.next_result = None
    submission = quick.submission(1)
    assert written_now(quick, [submission]) == []
    quick.plane.writes[0][3].result = DONE
    assert quick.until_ended(1) == [Outcome.DONE] and quick.ended[0][0] is submission


def test_what_may_take_long_is_left_to_the_thread(quick: Bench) -> None:
    assert quick.worker.write_now([quick.submission(1)]) is None, "its peer is not attached yet"
    attached(quick)
    assert quick.worker.write_now([quick.submission(1, lambda: None)]) is None
    assert quick.worker.write_now([quick.submission(room) for room in range(1, 6)]) is None
    longer = quick.submission(1)
    longer.source = longer.destination = np.array([1, 2], np.uint32)
    assert quick.worker.write_now([longer]) is None
    assert not quick.plane.writes


def test_nobody_waits_for_a_thread_that_is_at_work(quick: Bench) -> None:
    attached(quick)
    leave = quick.hold()
    assert quick.worker.write_now([quick.submission(2)]) is None
    leave.set()
    assert quick.until_ended(1) == [Outcome.DONE]
    assert quick.worker.close(10.0)
    assert quick.worker.write_now([quick.submission(3)]) is None, "the thread is over"


def test_a_room_that_ended_is_not_written_at_once_either(quick: Bench) -> None:
    attached(quick)
    submission = quick.submission(1)
    submission.record.ended = True
    assert [result.outcome for _, result in written_now(quick, [submission])] == [Outcome.REJECTED]
    assert not quick.plane.writes
