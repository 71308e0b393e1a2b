"""How often a look at an open room lends the interpreter, and for how long, by what the engine was seen to do between
two looks. The clock is the test's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvgrpc.rpc.waking import Lending
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender
from kvgrpc.transfer.runtime import manager as module
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import receiver_of, sender_of
from tests.support.waiting import wait_until

ROOMS = iter(range(80_000_000, 90_000_000))
SLEEP, EVERY, WATCHED, FEW_ROOMS = 50e-6, 200e-6, 100e-6, 1024


class Engine:
    """Its thread looks at a room; ``slept``: when a look gave way, by a clock that only looks move. ``naps``: it lets
    other threads in between two looks.
    """

    def __init__(self, host: RankHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.transfer = host.rank.transfer
        self.now = time.monotonic()
        self.work_waits = True
        self.naps = False
        self.turns = 0
        self.slept: list[float] = []
        # Of the rank's own module alone: the rest of the process keeps its time.
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))
        monkeypatch.setattr(self.transfer, "_work_waits", lambda: self.work_waits)
        monkeypatch.setattr(self.transfer, "_progress", lambda: self.turns)

    def look(self, end: KVSender | KVReceiver, times: int = 1, step: float = 7e-6) -> int:
        """How many of the looks gave way; ``step`` seconds go by with each."""
        before = len(self.slept)
        for _ in range(times):
            end.poll()
            self.now += step
            self.turns += self.naps
        return len(self.slept) - before

    def run_what_was_posted(self) -> None:
        wait_until(lambda: not self.transfer._waking and not self.transfer._commands)

    def _sleep(self, seconds: float) -> None:
        assert seconds == SLEEP
        self.slept.append(self.now)


@pytest.fixture
def sender(prefill: RankHost) -> Iterator[KVSender]:
    sender = sender_of(prefill, next(ROOMS))
    yield sender
    sender.abort()


@pytest.fixture
def engine(prefill: RankHost, sender: KVSender, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(prefill.rank.transfer, "_lending", Lending(True))  # nothing is known of this engine yet
    engine = Engine(prefill, monkeypatch)
    engine.run_what_was_posted()
    return engine


def test_a_thousand_looks_of_an_engine_that_lets_nobody_in_give_way_once_in_200_us(
    engine: Engine, sender: KVSender
) -> None:
    given = engine.look(sender, 1000)
    assert 30 <= given <= 35, "7 ms of looks: the first one after each 200 us; before it is known as such it is watched"
    assert all(later - earlier >= EVERY for earlier, later in zip(engine.slept, engine.slept[1:], strict=False))


def test_looks_of_an_engine_that_lets_others_in_give_no_way(engine: Engine, sender: KVSender) -> None:
    engine.naps = True
    assert engine.look(sender, 1000) == 0


def test_an_engine_is_known_by_what_it_did_last(engine: Engine, sender: KVSender) -> None:
    engine.look(sender, 1000)
    engine.naps = True
    engine.look(sender, 20_000)
    assert engine.look(sender, 1000) == 0
    engine.naps = False
    assert engine.look(sender, 1000) >= 30


def test_one_that_was_not_seen_to_let_others_in_is_watched_for_100_us(engine: Engine, sender: KVSender) -> None:
    began = engine.now
    engine.look(sender, 30)
    assert WATCHED <= engine.slept[0] - began < 2 * WATCHED


def test_the_first_look_after_a_call_gives_way_at_once_where_the_engine_lets_nobody_in(
    engine: Engine, sender: KVSender
) -> None:
    engine.look(sender, 1000)
    assert engine.look(sender, 20) <= 1
    sender.send([1])
    assert engine.look(sender) == 1
    engine.run_what_was_posted()
    assert engine.look(sender, 20) == 0


def test_nothing_gives_way_where_no_thread_of_ours_waits(engine: Engine, sender: KVSender) -> None:
    engine.work_waits = False
    assert engine.look(sender, 1000) == 0


def test_nothing_gives_way_where_the_setting_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    host = RankHost("G", "PREFILL", {"poll_gives_way": False})
    try:
        engine, sender = Engine(host, monkeypatch), sender_of(host, next(ROOMS))
        assert engine.look(sender, 1000) == 0
        engine.run_what_was_posted()
        sender.send([1])
        assert engine.look(sender, 1000) == 0
        sender.abort()
    finally:
        host.close(1.0)


def test_nothing_gives_way_beside_more_than_1024_open_rooms(
    prefill: RankHost, engine: Engine, sender: KVSender
) -> None:
    others = [sender_of(prefill, next(ROOMS)) for _ in range(FEW_ROOMS)]
    try:
        wait_until(lambda: prefill.rank.transfer.open_rooms() == FEW_ROOMS + 1)
        assert engine.look(sender, 1000) == 0
        others.pop().abort()
        wait_until(lambda: prefill.rank.transfer.open_rooms() == FEW_ROOMS)
        assert engine.look(sender, 1000) > 0
    finally:
        for each in others:
            each.abort()


def test_a_look_at_a_room_that_is_over_gives_no_way(
    prefill: RankHost, decode: RankHost, engine: Engine, sender: KVSender
) -> None:
    receiver = receiver_of(decode, f"{prefill.rank.address}/P", sender.room)
    receiver.init([1], 0)
    sender.init(1, 0)
    sender.send([2])
    assert receiver.wait(20.0) is sender.wait(20.0) is KVPoll.Success
    given_up = sender_of(prefill, next(ROOMS))
    given_up.abort()
    assert [engine.look(end, 1000) for end in (sender, given_up)] == [0, 0]
