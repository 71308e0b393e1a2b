"""Pins of callers: none of them keeps all of a cache, and what each keeps ends with its time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from kvgrpc.errors import FeatureDisabled, TooManyRequests
from kvgrpc.prefetch.pins import CallersPins
from kvgrpc.rpc.callers import CALLER, Caller
from tests.support.callers import calls_of
from tests.support.waiting import until

PAGES, PROMPT = 32, 6


@pytest.fixture(autouse=True)
def nobody_afterwards() -> Iterator[None]:
    with calls_of(""):
        yield


class Cache:
    """Has the leading ``PROMPT`` pages of each prompt."""

    def __init__(self) -> None:
        self.pins = CallersPins(PAGES)
        self.pinned: list[int] = []

    async def pin(self, caller: str, prompt: str, seconds: float = 60.0) -> int:
        CALLER.set(Caller(caller))
        return await self.pins.pin([f"{prompt}{n}" for n in range(64)], seconds, self._count, self._pin)

    async def fill(self, caller: str, first: str = "") -> int:
        """How many prompts it may pin."""
        for number in range(PAGES):
            try:
                await self.pin(caller, f"{caller}-{first}{number}-")
            except TooManyRequests:
                return number
        return PAGES

    async def _count(self) -> int:
        return PROMPT

    async def _pin(self, hashes: Sequence[str]) -> int:
        self.pinned.append(len(hashes))
        return len(hashes)


def test_a_caller_pins_as_many_pages_as_it_leaves_to_others() -> None:
    async def run() -> None:
        cache = Cache()
        assert (await cache.fill("a"), await cache.fill("b")) == (3, 1)
        with pytest.raises(
            TooManyRequests, match=r"18 pinned pages .* 8 are free.* its limits\.occupancy is the bound"
        ) as no:
            await cache.pin("a", "another-")
        assert no.value.metadata == {"limit": "8", "value": "24", "scope": "pinned pages of one caller"}
        assert set(cache.pinned) == {PROMPT} and len(cache.pinned) == 4

    asyncio.run(run())


def test_a_repeat_takes_the_place_of_the_callers_own_pin_and_of_no_others() -> None:
    async def run() -> None:
        cache = Cache()
        assert await cache.fill("a") == 3
        for _ in range(20):
            assert await cache.pin("a", "a-0-") == PROMPT
        assert await cache.pin("b", "a-0-") == PROMPT
        assert cache.pins.pages == 4 * PROMPT

    asyncio.run(run())


def test_a_pin_counts_until_its_time_or_its_end() -> None:
    async def run() -> None:
        cache = Cache()
        await cache.pin("a", "one-", seconds=0.05)
        await cache.pin("a", "two-")
        await cache.pin("b", "two-")
        assert cache.pins.pages == 3 * PROMPT
        cache.pins.ended([f"two-{n}" for n in range(64)])
        assert cache.pins.pages == PROMPT
        await until(lambda: not cache.pins.pages)
        assert await cache.fill("a") == 3, "as if it had pinned nothing"

    asyncio.run(run())


def test_a_pin_whose_caller_went_away_counts_and_one_that_was_refused_does_not() -> None:
    """The call goes on in its thread, and nobody hears how many pages it pinned."""

    async def run() -> None:
        pins, begun = CallersPins(PAGES), asyncio.Event()

        async def count() -> int:
            return PROMPT

        async def never(hashes: Sequence[str]) -> int:
            begun.set()
            await asyncio.Event().wait()
            return 0

        async def refused(hashes: Sequence[str]) -> int:
            raise FeatureDisabled("no pins here", metadata={"feature": "pins", "howToEnable": "another cache"})

        CALLER.set(Caller("a"))
        call = asyncio.ensure_future(pins.pin(["00"], 60.0, count, never))
        await begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert pins.pages == PROMPT
        with pytest.raises(FeatureDisabled):
            await pins.pin(["01"], 60.0, count, refused)
        assert pins.pages == PROMPT
        pins.close()

    asyncio.run(run())
