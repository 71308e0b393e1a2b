"""The positions of a room that are there: half-open intervals that never overlap. Pure."""

from __future__ import annotations

from bisect import bisect_right

import msgspec


class Coverage(msgspec.Struct, eq=False, gc=False):
    """``prefix`` positions from 0 on without a gap, and intervals beyond it: almost always none, because engines send
    from front to back."""

    prefix: int = 0
    _beyond: list[tuple[int, int]] | None = None

    @property
    def stop(self) -> int:
        """One past the last position that is there."""
        return self._beyond[-1][1] if self._beyond else self.prefix

    def add(self, start: int, count: int) -> bool:
        """Adds [start, start + count); False, and nothing added, when a part of it was there before."""
        if start == self.prefix and not self._beyond:
            self.prefix += count
            return True
        return count == 0 or self._add_beyond(start, start + count)

    def covers(self, start: int, stop: int) -> bool:
        """All of [start, stop) is there; an empty interval always is."""
        return stop <= self.prefix or start >= stop or self.first_gap(start) >= stop

    def first_gap(self, start: int) -> int:
        """The first position from ``start`` on that is not there."""
        gap = max(start, self.prefix)
        for first, last in self._beyond or ():
            if first <= gap < last:
                gap = last
        return gap

    def _add_beyond(self, start: int, stop: int) -> bool:
        beyond = self._beyond or []
        index = bisect_right(beyond, (start, start))
        touches_left = beyond[index - 1][1] > start if index else self.prefix > start
        if touches_left or (index < len(beyond) and beyond[index][0] < stop):
            return False
        beyond.insert(index, (start, stop))
        while beyond and beyond[0][0] == self.prefix:
            self.prefix = beyond.pop(0)[1]
        self._beyond = beyond or None
        return True
