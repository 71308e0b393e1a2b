"""What a pull waits for, driven without a thread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvgrpc.errors import Failure, RoomCancelled, TooManyRequests
from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.prefetch.storage.base import PageResult
from kvgrpc.pull.book import PullBook
from kvgrpc.pull.model import Found, Holder, Lent
from kvgrpc.pull.staging import StagingPages
from kvgrpc.pull.taking import taker as taker_module
from kvgrpc.pull.taking.silent import SilentHolders
from kvgrpc.pull.taking.taker import Taker
from kvgrpc.pull.waits import ForAnswer, ForPages, ForRoom, ForTime

STALL_SECONDS = 2.0
FOUND = Found(Holder("H", "h:1", "h:2"), 4, b"name")


def test_a_holder_that_is_always_busy_and_says_ask_at_once_is_asked_with_pauses_and_then_given_up() -> None:
    now, asked = 100.0, 0

    def busy(*_: Any) -> Lent:
        nonlocal asked
        asked += 1
        assert asked < 1_000, "it is asked without end"
        raise TooManyRequests("all is lent", metadata={"scope": "lent pages"}, retry_after=0.0)

    slots = StagingPages(range(4))
    landing = SimpleNamespace(memory=SimpleNamespace(slots=slots, page_bytes=1))
    taker = Taker(
        lambda holder: cast(Any, landing), busy, PullBook(1), STALL_SECONDS, SilentHolders(lambda: now), lambda: now
    )
    pull = taker.taking(FOUND, ["p"], 0, [()], 60.0)
    answer: Any = None
    results: list[PageResult] = []
    while not results:
        try:
            wait = pull.throw(answer) if isinstance(answer, Exception) else pull.send(answer)
        except StopIteration as over:
            results = over.value
            break
        answer = None
        if isinstance(wait, ForTime):
            now += wait.seconds
        elif isinstance(wait, ForPages):
            answer = wait.block()
        elif isinstance(wait, ForAnswer):
            try:
                wait.block()
            except TooManyRequests as error:
                answer = error
    assert [each.ok for each in results] == [False] and "all is lent" in results[0].detail
    assert 10 < asked <= 1 + STALL_SECONDS / 0.01 and not slots.taken


class Link:
    """Brings a page of what a holder lends each second and a half, those of the room first that was opened first; none
    while this process is ``stopped``."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stopped = 0.0
        self.rooms: list[Receiver] = []

    def brought(self, room: Receiver) -> int:
        before = sum(each.pages for each in self.rooms[: self.rooms.index(room)])
        return max(0, min(room.pages, int((self.now - self.stopped - 100.0) / 1.5) - before))

    def stop(self, seconds: float) -> None:
        self.now += seconds
        self.stopped += seconds


class Receiver:
    link: Link

    def __init__(self, *_: Any, **__: Any) -> None:
        self.pages, self.failure, self.release_safe = 0, None, True
        self.link.rooms.append(self)

    def init(self, pages: list[int]) -> None:
        self.pages = len(pages)

    @property
    def pages_done(self) -> int:
        return self.link.brought(self)

    @property
    def ended(self) -> bool:
        return self.failure is not None or self.pages_done == self.pages

    def abort(self, why: str) -> None:
        self.failure = self.failure if self.ended else Failure.of(RoomCancelled(why))  # type: ignore[assignment]

    def close(self) -> None:
        self.abort("closed")


class Pulling:
    """Pulls twelve pages over a link, four in a room; ``stops``: in the first wait of that kind the process stands
    still, for longer than a holder may be silent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lend: Any, stops: Any = ()) -> None:
        self.link = Link()
        monkeypatch.setattr(Receiver, "link", self.link, raising=False)
        monkeypatch.setattr(taker_module, "KVReceiver", Receiver)
        self.slots, self.silent, self._stops = StagingPages(range(64)), SilentHolders(lambda: self.link.now), stops
        memory = SimpleNamespace(
            slots=self.slots, page_bytes=1, pages=lambda slots, share: slots, copy_out=lambda slots, buffers: True
        )
        landing = SimpleNamespace(memory=memory, manager=None)
        self._taker = Taker(
            lambda holder: cast(Any, landing), lend, PullBook(1), STALL_SECONDS, self.silent, lambda: self.link.now
        )
        self._taker.piece_bytes = 4

    def pull(self, shares: int) -> list[PageResult]:
        found = Found(FOUND.holder, 12, b"name", (Found(FOUND.holder, 12, b"name"),) * (shares - 1))
        pull = self._taker.taking(found, ["p"] * 12, 0, [()] * 12, 600.0)
        answer: Any = None
        while True:
            try:
                wait = pull.throw(answer) if isinstance(answer, Exception) else pull.send(answer)
            except StopIteration as over:
                results: list[PageResult] = over.value
                return results
            answer = None
            if isinstance(wait, ForTime | ForRoom):
                self.link.now += wait.seconds
                if isinstance(wait, self._stops):
                    self.link.stop(3 * STALL_SECONDS)
                    self._stops = ()
            else:
                try:
                    answer = wait.block()
                except TooManyRequests as error:
                    answer = error


def lends(found: Any, prompt: Any, first: int, count: int, *_: Any) -> Lent:
    return Lent(count, RankRef(RankId("H"), 1), Layout())


@pytest.mark.parametrize("shares", [1, 2])
def test_a_piece_behind_a_slow_one_is_waited_for_from_when_that_has_come(
    shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is a second share: a holder that still sends what is before it is not silent."""
    pulling = Pulling(monkeypatch, lends)
    assert all(each.ok for each in pulling.pull(shares)) and len(pulling.link.rooms) == 3 * shares
    assert "h:1" not in pulling.silent and not pulling.slots.taken


@pytest.mark.parametrize("busy_at", [0, 1])
@pytest.mark.parametrize("stops", [ForTime, ForRoom])
def test_a_process_that_stood_still_takes_no_holder_for_silent(
    stops: type[ForTime | ForRoom], busy_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for one that is busy for long: ``busy_at`` is the question that it is at first too busy for."""
    asked = 0

    def busy(*arguments: Any) -> Lent:
        nonlocal asked
        asked += 1
        if busy_at < asked <= busy_at + 2:
            raise TooManyRequests("all is lent", metadata={"scope": "lent pages"}, retry_after=0.02)
        return lends(*arguments)

    pulling = Pulling(monkeypatch, busy, stops)
    assert all(each.ok for each in pulling.pull(2))
    assert "h:1" not in pulling.silent and not pulling.slots.taken
