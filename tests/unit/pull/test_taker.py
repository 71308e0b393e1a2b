"""What a pull waits for, driven without a thread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from kvgrpc.errors import TooManyRequests
from kvgrpc.prefetch.storage.base import PageResult
from kvgrpc.pull.book import PullBook
from kvgrpc.pull.model import Found, Holder, Lent
from kvgrpc.pull.staging import StagingPages
from kvgrpc.pull.taking.silent import SilentHolders
from kvgrpc.pull.taking.taker import Taker
from kvgrpc.pull.waits import ForAnswer, ForPages, ForTime

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
