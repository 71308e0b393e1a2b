"""Counts what an event loop does in each of its turns: work that is divided has few of it in any."""

from __future__ import annotations

import asyncio


class CountedTurns:
    def __init__(self) -> None:
        self._ended: list[int] = []
        self._now = 0

    @property
    def turns(self) -> list[int]:
        """How much was counted in each turn that had any, the one of now included."""
        return [*self._ended, self._now] if self._now else self._ended

    def count(self, number: int = 1) -> None:
        """On the loop."""
        if not self._now:
            asyncio.get_running_loop().call_soon(self._end)
        self._now += number

    def _end(self) -> None:
        self._ended.append(self._now)
        self._now = 0
