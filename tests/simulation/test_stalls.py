"""A stream is silent for the time that its reader listened: a loop that does not run hears nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvgrpc.client.stall import LATE_SECONDS, LONGEST_SECONDS, StallDetector
from tests.simulation.virtual_loop import VirtualLoop, run

SECONDS = 5.0


class _Call:
    """Says something when it is told to."""

    def __init__(self) -> None:
        self._says: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read(self) -> str:
        self._says = asyncio.get_running_loop().create_future()
        return await self._says

    def say(self) -> None:
        if not self._says.done():
            self._says.set_result("something")

    def cancel(self) -> None:
        self._says.cancel()


def this_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


async def heard(call: _Call) -> tuple[Any, float]:
    """What the stream says, None: it is silent; and after how long that is known."""
    stream, began = StallDetector(call, SECONDS), this_loop().time()
    try:
        return await stream.next_message(), this_loop().time() - began
    except TimeoutError:
        return None, this_loop().time() - began
    finally:
        stream.close()


async def held_again_and_again(call: _Call, runs: float, is_held: float) -> tuple[Any, float]:
    def hold() -> None:
        this_loop().hold(is_held)
        timers.append(this_loop().call_later(runs, hold))

    timers = [this_loop().call_later(runs, hold)]
    try:
        return await heard(call)
    finally:
        timers[-1].cancel()


def test_who_says_nothing_is_silent_after_as_long() -> None:
    async def silent() -> tuple[Any, float]:
        return await heard(_Call())

    assert run(silent()) == (None, pytest.approx(SECONDS, abs=LATE_SECONDS))


@pytest.mark.parametrize("runs", [0.5, 2.0, 4.0, 4.9])
def test_what_came_while_the_reader_was_held_is_heard(runs: float) -> None:
    async def held_once() -> tuple[Any, float]:
        loop, call = this_loop(), _Call()

        def hold() -> None:
            loop.hold(20.0)
            # It lies in the socket, and is read when what lay there before it was.
            loop.call_later(LATE_SECONDS * 0.9, call.say)

        loop.call_later(runs, hold)
        return await heard(call)

    said, _ = run(held_once())
    assert said == "something"


@pytest.mark.parametrize(("runs", "is_held", "least", "most"), [(2.0, 20.0, 5.0, 60.0), (0.5, 8.0, 60.0, 70.0)])
def test_who_is_silent_beside_a_reader_that_is_late_is_found(
    runs: float, is_held: float, least: float, most: float
) -> None:
    async def silent() -> tuple[Any, float]:
        return await held_again_and_again(_Call(), runs, is_held)

    said, seconds = run(silent())
    assert said is None and least <= seconds <= max(most, LONGEST_SECONDS + is_held)


def test_a_message_begins_anew() -> None:
    async def twice() -> float:
        loop, call = this_loop(), _Call()
        stream = StallDetector(call, SECONDS)
        loop.call_later(4.0, call.say)
        assert await stream.next_message() == "something"
        began = loop.time()
        with pytest.raises(TimeoutError):
            await stream.next_message()
        stream.close()
        return loop.time() - began

    assert run(twice()) == pytest.approx(SECONDS, abs=LATE_SECONDS)
