"""One wake-up from a publisher's thread for all coroutines that wait on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Notifier:
    """Notifies from any thread; everything else belongs to the loop on which it was made.

    Any number of notifications before the loop gets to them is one.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.create_future()
        self._scheduled = False
        self._waiting = 0

    def notify(self) -> None:
        """Wakes everybody who waits. Thread-safe, does not block; harmless after the loop was closed."""
        if self._scheduled:
            return
        self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            self._scheduled = False

    @contextmanager
    def attached(self, listen: Callable[[Callable[[], None]], Callable[[], None]]) -> Iterator[Notifier]:
        """Has ``listen`` call ``notify`` while at least one caller is inside."""
        if self._waiting == 0:
            self._detach = listen(self.notify)
        self._waiting += 1
        try:
            yield self
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                self._detach()

    def next_change(self) -> asyncio.Future[None]:
        """Done at the next notification: take it, look for news, then wait for it. Shared, so never cancel it."""
        return self._next

    def _wake(self) -> None:
        # First of all: what changes from now on needs a notification of its own.
        self._scheduled = False
        done, self._next = self._next, self._loop.create_future()
        done.set_result(None)
