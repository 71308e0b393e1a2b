"""within: a result, a time limit, and cancellations that are never lost."""

from __future__ import annotations

import asyncio

import pytest

from kvgrpc.rpc.within import within

LONG = 20.0


def test_gives_the_result_or_the_error() -> None:
    async def fails() -> None:
        raise KeyError("x")

    async def main() -> None:
        assert await within(LONG, asyncio.sleep(0, "done")) == "done"  # a coroutine that gives something
        with pytest.raises(KeyError):
            await within(LONG, fails())

    asyncio.run(main())


def test_past_its_time_it_is_cancelled_and_has_ended() -> None:
    ended = []

    async def for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, for_ever())
        assert ended

    asyncio.run(main())


def test_what_ends_while_it_is_cancelled_for_its_time_gives_its_result() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "saved"
        return ""

    async def main() -> None:
        assert await within(0.01, stubborn()) == "saved"

    asyncio.run(main())


def test_several_that_are_past_their_time_are_one_time_out() -> None:
    """A gather that is cancelled does not say that it was: it raises CancelledError."""

    async def main() -> None:
        answers = [asyncio.get_running_loop().create_future() for _ in range(2)]
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, asyncio.gather(*map(asyncio.shield, answers)))
        assert not any(answer.done() for answer in answers)

    asyncio.run(main())


def test_a_cancellation_that_comes_together_with_the_result_is_not_lost() -> None:
    async def main() -> None:
        result: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(within(LONG, result))
        await asyncio.sleep(0)
        result.set_result(1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()

    asyncio.run(main())


def test_whoever_is_cancelled_cancels_what_it_waits_for() -> None:
    async def main() -> None:
        result: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(within(LONG, result))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() and result.cancelled()

    asyncio.run(main())
