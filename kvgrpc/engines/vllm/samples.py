"""Parallel samples of one request (``n`` above 1), of which vLLM makes requests "0_ID", "1_ID", … with its parameters.

Their prompt is handed over once, for the first one. At decode the others wait until it is there, and find it in the
prefix cache; prefill hands over nothing for them. A client's own id may look like one: what counts is that the first
one with the rest of the id came before, which ends with random letters of vLLM's.
"""

from __future__ import annotations

import re

_SAMPLE = re.compile(r"(\d+)_(.+)", re.DOTALL)
# First ones that are remembered; the others come directly behind them.
_MOST = 1024


class Samples:
    """Those of requests that the scheduler knows."""

    def __init__(self) -> None:
        # Transfer ids, by the first sample.
        self._first: dict[str, str] = {}
        # Of other samples that are not over: the first one, and its transfer id.
        self._others: dict[str, tuple[str, str]] = {}
        # First ones whose prompt is not at decode yet.
        self._coming: set[str] = set()

    def add_first(self, number: str, transfer_id: str, coming: bool) -> None:
        """Takes any request with a hand-off. ``coming``: it is at decode, and the prompt at prefill."""
        if number.startswith("0_"):
            self._first[number] = transfer_id
            if len(self._first) > _MOST:
                del self._first[next(iter(self._first))]
            if coming:
                self._coming.add(number)

    def add_other(self, number: str) -> bool:
        """Returns whether it is one."""
        found = _SAMPLE.fullmatch(number)
        first = f"0_{found[2]}" if found else ""
        if number == first or first not in self._first:
            return False
        self._others[number] = first, self._first[first]
        return True

    def came(self, number: str) -> None:
        """The prompt of that request is at decode, or will not come."""
        self._coming.discard(number)

    def is_other(self, number: str) -> bool:
        return number in self._others

    def waits(self, number: str) -> bool:
        """True of one whose prompt is on its way for the first one."""
        return number in self._others and self._others[number][0] in self._coming

    def end(self, number: str) -> str | None:
        """Forgets it. Returns the transfer id of the first one, None for whatever is no other sample."""
        self.came(number)
        return self._others.pop(number, (None, None))[1]
