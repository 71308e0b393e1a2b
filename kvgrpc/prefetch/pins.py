"""Pins of callers: how many pages of a cache they may keep from eviction together, and each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvgrpc.rpc.callers import caller
from kvgrpc.rpc.shares import Shares, TakenShare


@dataclass(frozen=True, slots=True)
class _Pin:
    share: TakenShare
    end: asyncio.TimerHandle


class CallersPins:
    """Each caller leaves as many of ``pages`` to the others as it takes, until its pins end. A page that lies in two
    pinned prefixes counts in both. Belongs to one event loop.
    """

    def __init__(self, pages: int) -> None:
        self._shares = Shares(max(1, pages), "pinned pages", "limits.occupancy", connections=False)
        # By the last page hash that was asked for, and the caller.
        self._pins: dict[str, dict[str, _Pin]] = {}

    @property
    def pages(self) -> int:
        """All that callers pin."""
        return self._shares.count

    async def pin(
        self,
        hashes: Sequence[str],
        seconds: float,
        count_near: Callable[[], Awaitable[int]],
        pin: Callable[[Sequence[str]], Awaitable[int]],
    ) -> int:
        """Pins what is here of a prompt, by ``pin``, for ``seconds``; how many pages. A repeat takes the place of the
        caller's pin of the same pages. ``count_near``: leading pages that are on device or host.

        Raises TooManyRequests where these are more than the caller may pin, and what the two calls raise.
        """
        # Who pins none asks all the same: a cache that has no pins says so.
        wanted = max(1, await count_near())
        before = self._pins.get(hashes[-1], {}).get(caller().name)
        self._shares.check(wanted, () if before is None else (before.share,))
        self._forget(hashes[-1], caller().name)
        share = self._shares.take(wanted)
        pinned = wanted  # of a caller who went away meanwhile, too
        try:
            pinned = await pin(hashes[:wanted])
        except Exception:
            pinned = 0
            raise
        finally:
            self._shares.give_back(share, share.places - pinned)
            if pinned:
                self._note(hashes[-1], TakenShare(share.accounts, pinned), seconds)
        return pinned

    def ended(self, hashes: Sequence[str]) -> None:
        """Nobody pins these any more: an end of a pin is for all who pinned the same pages."""
        for name in list(self._pins.get(hashes[-1], ())):
            self._forget(hashes[-1], name)

    def close(self) -> None:
        for pins in self._pins.values():
            for each in pins.values():
                each.end.cancel()
        self._pins.clear()

    def _note(self, last: str, share: TakenShare, seconds: float) -> None:
        name = caller().name
        self._forget(last, name)  # another call of this caller came first
        end = asyncio.get_running_loop().call_later(seconds, self._forget, last, name)
        self._pins.setdefault(last, {})[name] = _Pin(share, end)

    def _forget(self, last: str, name: str) -> None:
        pins = self._pins.get(last, {})
        pin = pins.pop(name, None)
        if pin is not None:
            pin.end.cancel()
            self._shares.give_back(pin.share)
        if last in self._pins and not pins:
            del self._pins[last]
