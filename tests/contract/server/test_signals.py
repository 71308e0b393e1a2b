"""What a signal handler may do: close its rank, wherever the signal came in between."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvgrpc.dataplane
from kvgrpc.events import KVEventBatch
from kvgrpc.observability.log_queue import LogQueue
from kvgrpc.server import Closed, Rank, open_rank
from kvgrpc.transfer import KVSender
from tests.support.small_rank import small_rank

OURS = str(Path(kvgrpc.__file__).parent)


@pytest.fixture
def plane() -> Iterator[Any]:
    plane = kvgrpc.dataplane.open_plane("shm")
    yield plane
    plane.close(1.0)


@pytest.fixture
def rank(plane: Any) -> Iterator[Rank[Any]]:
    opened = open_rank(small_rank(plane))
    yield opened
    opened.close(2.0)


class OnSignal:
    """Closes the rank in a handler of SIGUSR1; ``closed``: what came of it, and ``seconds``: how long it took."""

    def __init__(self, rank: Rank[Any]) -> None:
        self.rank = rank
        self.closed: list[Closed] = []
        self.seconds = 0.0

    def __call__(self, *_: object) -> None:
        began = time.monotonic()
        self.closed.append(self.rank.close(2.0))
        self.seconds = time.monotonic() - began


@pytest.fixture
def on_signal(rank: Rank[Any]) -> Iterator[OnSignal]:
    handler = OnSignal(rank)
    before = signal.signal(signal.SIGUSR1, handler)
    yield handler
    signal.signal(signal.SIGUSR1, before)


def lines_of(call: Callable[[], object], at: int = -1) -> int:
    """How many lines of kvgrpc ``call`` runs; before the one numbered ``at`` a signal comes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            if count == at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
            count += 1
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


def test_a_handler_may_close_the_rank_wherever_an_abort_was_interrupted(rank: Rank[Any]) -> None:
    """At each line of it. What the loop needs, to end the rank, the interrupted thread must not have."""
    lines = lines_of(KVSender(rank.transfer, "", 1).abort)
    assert lines > 20
    numbers = iter(range(2, 1000))
    for at in range(lines):
        sender = KVSender(rank.transfer, "", next(numbers))
        ended: list[float] = []

        def handler(*_: object, ended: list[float] = ended, sender: KVSender = sender) -> None:
            began = time.monotonic()
            rank._loop.run(_cancel(rank, sender), 5.0)  # what a close does to each room, and the loop's turn itself
            ended.append(time.monotonic() - began)

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            lines_of(sender.abort, at)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert ended and sender.ended, f"line {at} of {lines}"


async def _cancel(rank: Rank[Any], sender: KVSender) -> None:
    rank.transfer._fail_all(rank.transfer.core.rooms)


def test_a_handler_closes_the_rank_while_the_main_thread_logs(rank: Rank[Any], on_signal: OnSignal) -> None:
    """The thread has the lock of the program's handler, for which the loop would wait."""

    class Interrupted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == "engine":
                signal.raise_signal(signal.SIGUSR1)

    program, lines = Interrupted(), LogQueue()
    logging.getLogger().addHandler(program)
    lines.start()
    try:
        logging.getLogger("engine").warning("a line of the engine's own")
        assert len(on_signal.closed) == 1 and on_signal.seconds < 5.0
    finally:
        assert lines.stop(10.0)
        logging.getLogger().removeHandler(program)


def test_a_handler_closes_the_rank_in_the_middle_of_a_publish(on_signal: OnSignal, plane: Any) -> None:
    with open_rank(small_rank(plane, events={"endpoint": "tcp://127.0.0.1:0"})) as rank:
        on_signal.rank = rank
        batches = rank.events._queue  # type: ignore[attr-defined]
        lines_of(lambda: rank.events.publish(KVEventBatch(0.0, [])), at=6)
        assert len(on_signal.closed) == 1 and on_signal.seconds < 5.0 and batches.closed


def test_a_handler_that_closes_during_a_close_gets_its_end(
    rank: Rank[Any], on_signal: OnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, drain, drains = time.monotonic(), rank._end.drain, []

    def counted(*seconds: float) -> Any:
        drains.append(seconds)
        return drain(*seconds)

    monkeypatch.setattr(rank._end, "drain", counted)
    before = signal.signal(signal.SIGALRM, on_signal)
    try:
        sender = KVSender(rank.transfer, "", 1)  # an open room: the close waits for it
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        closed = rank.close(2.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert on_signal.closed == [closed] and len(drains) == 1 and time.monotonic() - started < 6.0
    assert sender.ended
