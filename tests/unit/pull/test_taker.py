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
    """Brings a page of what a holder lends each second and a half, those of the room first that was opened first."""

    def __init__(self) -> None:
        self.now = 100.0
        self.rooms: list[Receiver] = []

    def brought(self, room: Receiver) -> int:
        before = sum(each.pages for each in self.rooms[: self.rooms.index(room)])
        return max(0, min(room.pages, int((self.now - 100.0) / 1.5) - before))


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


@pytest.mark.parametrize("shares", [1, 2])
def test_a_piece_behind_a_slow_one_is_waited_for_from_when_that_has_come(
    shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is a second share: a holder that still sends what is before it is not silent."""
    link = Link()
    monkeypatch.setattr(Receiver, "link", link, raising=False)
    monkeypatch.setattr(taker_module, "KVReceiver", Receiver)
    slots, holder = StagingPages(range(64)), Holder("H", "h:1", "h:2")
    memory = SimpleNamespace(
        slots=slots, page_bytes=1, pages=lambda slots, share: slots, copy_out=lambda slots, buffers: True
    )
    landing, silent = SimpleNamespace(memory=memory, manager=None), SilentHolders(lambda: link.now)

    def lends(found: Any, prompt: Any, first: int, count: int, *_: Any) -> Lent:
        return Lent(count, RankRef(RankId("H"), 1), Layout())

    taker = Taker(lambda holder: cast(Any, landing), lends, PullBook(1), STALL_SECONDS, silent, lambda: link.now)
    taker.piece_bytes = 4
    found = Found(holder, 12, b"name", (Found(holder, 12, b"name"),) * (shares - 1))
    pull = taker.taking(found, ["p"] * 12, 0, [()] * 12, 600.0)
    answer: Any = None
    results: list[PageResult] = []
    while not results:
        try:
            wait = pull.send(answer)
        except StopIteration as over:
            results = over.value
            break
        answer = None
        if isinstance(wait, ForTime | ForRoom):
            link.now += wait.seconds
        else:
            answer = wait.block()
    assert all(each.ok for each in results) and len(link.rooms) == 3 * shares
    assert "h:1" not in silent and not slots.taken
