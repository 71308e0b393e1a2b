"""How single writes become one outcome: certain where it can be, and never more certain than it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrpc.dataplane.base import Outcome, Result
from kvgrpc.dataplane.mooncake.window import (
    FEWEST,
    PIECE_BYTES,
    STALL_SECONDS,
    Limits,
    PeerQueue,
    Submitter,
    WindowTransfer,
)

SMALL = Limits(4, 16, 1 << 30)


class FakeEngine:
    """``status(n)`` is the answer for the n-th write of all; ``refuse`` the numbers that get no handle."""

    def __init__(self, status: Callable[[int], int] = lambda n: 1, refuse: tuple[int, ...] = ()) -> None:
        self.status = status
        self.refuse = refuse
        self.calls = 0
        self.submitted: list[tuple[int, int, int]] = []
        self.open: set[int] = set()

    def transfer_submit_write(self, session: str, source: int, destination: int, nbytes: int, /) -> int:
        self.calls += 1
        if self.calls - 1 in self.refuse:
            return 0
        assert all(type(value) is int for value in (source, destination, nbytes))
        self.submitted.append((source, destination, nbytes))
        self.open.add(self.calls)
        return self.calls

    def transfer_check_status(self, handle: int, /) -> int:
        assert handle in self.open, "a handle was used after its end"
        status = self.status(handle - 1)
        if status in (1, -1):
            self.open.discard(handle)
        return status


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Setup:
    def __init__(self, engine: FakeEngine, limits: Limits = SMALL) -> None:
        self.engine = engine
        self.clock = Clock()
        self.submitter = Submitter(engine, self.clock)
        self.queue = PeerQueue("127.0.0.1:15000", limits)
        self.queue.ready = True

    def submit(self, *sizes: int) -> WindowTransfer:
        count = len(sizes)
        source = np.arange(count, dtype=np.uint64) * np.uint64(1 << 32)
        return self.submitter.submit(self.queue, (source, source + np.uint64(7), np.array(sizes, dtype=np.uint64)))


def run(transfer: WindowTransfer, polls: int = 1000) -> Result:
    for _ in range(polls):
        if (result := transfer.poll()) is not None:
            return result
    raise AssertionError("no result")


def test_all_writes_done_is_done() -> None:
    setup = Setup(FakeEngine())
    assert run(setup.submit(*[10] * 100)) == Result(Outcome.DONE, "", 1000)
    assert len(setup.engine.submitted) == 100
    assert not setup.engine.open
    assert setup.queue.in_flight == setup.queue.bytes_in_flight == setup.queue.active == 0
    assert not setup.submitter.running


def test_nothing_to_write_is_done_at_once() -> None:
    assert run(Setup(FakeEngine()).submit(), 1).outcome is Outcome.DONE
    assert run(Setup(FakeEngine()).submit(0, 0), 1).outcome is Outcome.DONE


def test_long_writes_are_cut_so_that_stopping_is_quick() -> None:
    setup = Setup(FakeEngine())
    assert run(setup.submit(3 * PIECE_BYTES + 1)).nbytes == 3 * PIECE_BYTES + 1
    assert [nbytes for _, _, nbytes in setup.engine.submitted] == [PIECE_BYTES] * 3 + [1]


def test_refused_with_nothing_in_flight_is_rejected() -> None:
    setup = Setup(FakeEngine(refuse=(0,)))
    result = run(setup.submit(10, 10))
    assert result.outcome is Outcome.REJECTED
    assert "127.0.0.1:15000" in result.detail


def test_refused_after_others_waits_for_them_and_is_still_certain() -> None:
    running = {0, 1}
    setup = Setup(FakeEngine(lambda n: 0 if n in running else 1, refuse=(2,)))
    transfer = setup.submit(10, 10, 10, 10)
    assert transfer.poll() is None
    assert transfer.poll() is None
    running.clear()
    assert run(transfer) == Result(Outcome.REJECTED, transfer.poll().detail, 20)  # type: ignore[union-attr]
    assert len(setup.engine.submitted) == 2


def test_a_failed_write_stops_the_rest_and_waits_for_what_runs() -> None:
    running = {1, 2, 3}
    setup = Setup(FakeEngine(lambda n: -1 if n == 0 else 0 if n in running else 1))
    transfer = setup.submit(*[10] * 50)
    assert transfer.poll() is None
    assert transfer.poll() is None, "three writes still run"
    assert len(setup.engine.submitted) == 4
    running.clear()
    result = run(transfer)
    assert result.outcome is Outcome.FAILED_SRC_FREE
    assert result.nbytes == 30
    assert len(setup.engine.submitted) == 4
    assert not setup.engine.open


def test_a_failure_is_reported_when_its_bytes_have_left_this_host() -> None:
    unsent = [True]
    setup = Setup(FakeEngine(lambda n: -1))
    setup.queue.unsent = lambda since: unsent[0]
    transfer = setup.submit(10)
    for _ in range(5):
        assert transfer.poll() is None
    unsent.clear()
    unsent.append(False)
    assert run(transfer).outcome is Outcome.FAILED_SRC_FREE
    refused = Setup(FakeEngine(refuse=(0,)))
    refused.queue.unsent = lambda since: True
    assert run(refused.submit(10), 1).outcome is Outcome.REJECTED, "other connections are not its business"


def test_the_worst_outcome_is_reported() -> None:
    setup = Setup(FakeEngine(lambda n: {0: 1, 1: -1, 2: -2, 3: -1}[n]))
    assert run(setup.submit(10, 10, 10, 10)).outcome is Outcome.FAILED_UNKNOWN


def test_a_write_that_never_ends_is_unknown_and_stays_watched() -> None:
    running = {0}
    setup = Setup(FakeEngine(lambda n: 0 if n in running else 1))
    transfer = setup.submit(10)
    for _ in range(int(STALL_SECONDS) + 1):
        assert transfer.poll() is None
        setup.clock.now += 1
    assert run(transfer).outcome is Outcome.FAILED_UNKNOWN
    assert not setup.submitter.drain(0.0)
    running.clear()
    assert setup.submitter.drain(0.0)


def test_our_own_sleep_makes_nothing_overdue() -> None:
    setup = Setup(FakeEngine(lambda n: 0))
    transfer = setup.submit(10)
    transfer.poll()
    setup.clock.now += 3600
    assert transfer.poll() is None


def test_waiting_for_a_turn_makes_nothing_overdue() -> None:
    setup = Setup(FakeEngine(lambda n: 1))
    setup.queue.ready = False
    setup.queue.await_answer(1e9, setup.clock.now)
    transfer = setup.submit(10)
    for _ in range(100):
        setup.clock.now += 1
        assert transfer.poll() is None
    setup.queue.ready = True
    assert run(transfer).outcome is Outcome.DONE


def test_stopped_before_it_began_sends_nothing() -> None:
    setup = Setup(FakeEngine())
    transfer = setup.submit(10)
    transfer.stop()
    assert run(transfer, 1) == Result(Outcome.REJECTED, "stopped")
    assert not setup.engine.submitted


def test_stopped_on_its_way_waits_for_what_runs() -> None:
    running = set(range(4))
    setup = Setup(FakeEngine(lambda n: 0 if n in running else 1))
    transfer = setup.submit(*[10] * 9)
    transfer.poll()
    transfer.stop()
    assert transfer.poll() is None
    running.clear()
    assert run(transfer) == Result(Outcome.REJECTED, "stopped", 40)


def test_stopped_when_all_was_sent_is_still_done() -> None:
    running = {0}
    setup = Setup(FakeEngine(lambda n: 0 if n in running else 1))
    transfer = setup.submit(10)
    transfer.poll()
    transfer.stop()
    running.clear()
    assert run(transfer).outcome is Outcome.DONE


def test_a_peer_that_does_not_answer_in_time_was_sent_nothing() -> None:
    setup = Setup(FakeEngine())
    setup.queue.ready = False
    setup.queue.await_answer(3, setup.clock.now)
    transfer = setup.submit(10)
    for _ in range(3):
        setup.clock.now += 1
        assert transfer.poll() is None
    setup.clock.now += 1
    assert run(transfer, 1) == Result(Outcome.REJECTED, "127.0.0.1:15000 did not answer")


def test_an_interpreter_that_was_held_during_first_contact_fails_no_write() -> None:
    """A real vLLM compiled for three seconds with its first request under way, and the answer lay there unread."""
    setup = Setup(FakeEngine())
    setup.queue.ready = False
    setup.queue.await_answer(3, setup.clock.now)
    transfer = setup.submit(10)
    assert transfer.poll() is None
    setup.clock.now += 10
    assert transfer.poll() is None
    setup.queue.ready = True
    assert run(transfer).outcome is Outcome.DONE


def test_a_contact_that_begins_while_the_last_one_is_looked_at_has_all_of_its_time() -> None:
    """Threads that submit begin one, and the thread that polls looks: what it had read of the old one stood for the new
    one, whose first write was rejected at once."""
    queue = PeerQueue("127.0.0.1:15000", SMALL)

    class Moment(float):
        def __sub__(self, earlier: float) -> float:
            queue.await_answer(3, 100.0)  # here the other thread had the interpreter
            return float(self) - earlier

    queue.await_answer(0, 50.0)
    queue.is_overdue(Moment(100.0))
    assert not queue.is_overdue(101.0)


def test_what_is_in_flight_to_one_peer_is_bounded_and_shared() -> None:
    setup = Setup(FakeEngine(lambda n: 0), Limits(8, 64, 1 << 30))
    first, second = setup.submit(*[10] * 50), setup.submit(*[10] * 50)
    for _ in range(3):
        first.poll()
        second.poll()
    assert setup.queue.in_flight == 8
    assert len(first._handles) == len(second._handles) == 4


def test_bytes_in_flight_are_bounded_too() -> None:
    setup = Setup(FakeEngine(lambda n: 0), Limits(64, 64, 3 * PIECE_BYTES))
    setup.submit(*[PIECE_BYTES] * 50).poll()
    assert setup.queue.in_flight == FEWEST
    small = Setup(FakeEngine(lambda n: 0), Limits(64, 64, 20 * 100))
    small.submit(*[100] * 50).poll()
    assert small.queue.bytes_in_flight == 20 * 100


def test_small_writes_begin_with_more_of_them() -> None:
    limits = Limits(4, 16, 1 << 30, first_bytes=100)
    for nbytes, expected in ((10, 10), (50, 4), (5, 16)):
        setup = Setup(FakeEngine(lambda n: 0), limits)
        setup.submit(*[nbytes] * 50).poll()
        assert setup.queue.in_flight == expected


def test_polling_late_makes_the_window_grow_and_pauses_make_it_small_again() -> None:
    setup = Setup(FakeEngine(), Limits(4, 16, 1 << 30))
    transfer = setup.submit(*[10] * 1000)
    transfer.poll()
    assert setup.queue.in_flight == 4
    for _ in range(5):
        transfer.poll()
    assert setup.queue.in_flight == 16
    run(transfer)
    for expected in (8, 4, 4):
        small = setup.submit(10)
        assert setup.queue.limit == expected
        run(small)


def test_after_a_failure_others_wait_and_then_try_one_write_at_a_time() -> None:
    running = {1, 2, 3, 4, 5}
    setup = Setup(FakeEngine(lambda n: 0 if n in running else -1 if n < 4 else 1))
    fails, waits = setup.submit(*[10] * 50), setup.submit(*[10] * 50)
    for _ in range(5):
        assert fails.poll() is None
        assert waits.poll() is None
    assert setup.engine.calls == 4
    running -= {1}
    assert run(fails).outcome is Outcome.FAILED_SRC_FREE
    assert waits.poll() is None
    assert setup.engine.calls == 4, "the others had two writes in flight already"
    running -= {2, 3}
    assert run(waits).outcome is Outcome.FAILED_SRC_FREE
    third = setup.submit(*[10] * 50)
    for _ in range(3):
        assert third.poll() is None
        assert setup.queue.in_flight == 1
    running.clear()
    assert run(third).outcome is Outcome.DONE
    assert setup.queue.limit >= 4


def test_a_hung_peer_does_not_make_the_window_grow() -> None:
    setup = Setup(FakeEngine(lambda n: 0 if n else 1))
    transfer = setup.submit(*[10] * 100)
    for _ in range(20):
        transfer.poll()
    assert setup.queue.limit == 4


@pytest.mark.parametrize("outcome", [Outcome.FAILED_SRC_FREE, Outcome.FAILED_UNKNOWN])
def test_when_the_engine_is_gone_only_what_was_sent_is_uncertain(outcome: Outcome) -> None:
    setup = Setup(FakeEngine(lambda n: 0))
    sent, waits = setup.submit(*[10] * 9), setup.submit(10)
    sent.poll()
    assert not setup.submitter.drain(setup.clock.now)
    setup.submitter.abandon(outcome, "closed")
    assert (sent.poll().outcome, waits.poll().outcome) == (outcome, Outcome.REJECTED)  # type: ignore[union-attr]
    assert setup.engine.calls == 2


@given(st.lists(st.sampled_from([1, 1, 1, 1, 0, 0, -1, -2]), max_size=60), st.integers(0, 60), st.integers(0, 60))
@settings(deadline=None)
def test_the_outcome_is_never_more_certain_than_the_writes(answers: list[int], stop_at: int, refuse: int) -> None:
    """Each write is 0 for a while, then its answer; whatever happens, the books balance."""
    seen: dict[int, int] = {}

    def status(n: int) -> int:
        seen[n] = seen.get(n, 0) + 1
        answer = answers[n % len(answers)] if answers else 1
        return 0 if seen[n] < 3 else answer or 1

    setup = Setup(FakeEngine(status, refuse=(refuse,)))
    transfer = setup.submit(*[10] * len(answers))
    result = None
    for number in range(2000):
        if number == stop_at:
            transfer.stop()
        if (result := transfer.poll()) is not None:
            break
    assert result is not None
    ended = [answers[n % len(answers)] or 1 for n in seen if seen[n] >= 3]
    worst = -2 if -2 in ended else -1 if -1 in ended else 1
    expected = {-2: {Outcome.FAILED_UNKNOWN}, -1: {Outcome.FAILED_SRC_FREE}, 1: {Outcome.DONE, Outcome.REJECTED}}
    assert result.outcome in expected[worst]
    assert (result.outcome is Outcome.DONE) == (result.nbytes == 10 * len(answers))
    assert setup.queue.in_flight == setup.queue.bytes_in_flight == setup.queue.active == 0
    assert set(setup.submitter.lingering) == setup.engine.open


def test_the_fewest_in_flight_are_those_of_the_peer_that_has_the_fewest() -> None:
    setup = Setup(FakeEngine(lambda n: 0))
    assert setup.submitter.fewest_in_flight() == 0
    other = PeerQueue("127.0.0.1:15001", SMALL)
    setup.submit(*[10] * 9).poll()
    assert setup.submitter.fewest_in_flight() == setup.queue.in_flight == SMALL.writes
    columns = (np.zeros(1, np.uint64), np.zeros(1, np.uint64), np.ones(1, np.uint64))
    setup.submitter.submit(other, columns)
    assert setup.submitter.fewest_in_flight() == 0


def test_what_is_submitted_after_the_end_is_refused_at_once() -> None:
    """A submission that had passed the plane's look at its own end was polled for ever."""
    setup = Setup(FakeEngine())
    setup.submitter.abandon(Outcome.FAILED_SRC_FREE, "the data plane was closed")
    assert run(setup.submit(10), 1).outcome is Outcome.REJECTED
    assert not setup.submitter.running and setup.queue.active == 0
