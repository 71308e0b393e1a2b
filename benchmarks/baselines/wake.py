"""The least that a call costs which hands something to an asyncio loop in another thread: an append and a wake.

As ``kvgrpc`` wakes its loop: an eventfd, written without giving the interpreter up.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque

from kvgrpc.rpc.waking import Waker, WatchedSelector

DEADLINE = 60.0


class WokenLoop:
    """A loop in a thread of its own that takes what ``append`` left; driven by one engine thread."""

    def __init__(self) -> None:
        self._items: deque[object] = deque()
        self._waking = False
        self._loop = asyncio.SelectorEventLoop(WatchedSelector())
        self._waker = Waker(self._loop, self._take)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def append(self, item: object) -> None:
        """Wakes once for all that waits."""
        self._items.append(item)
        if not self._waking:
            self._waking = True
            self._waker.wake()

    def wait(self, pause: float) -> None:
        """Returns once all is taken."""
        end = time.monotonic() + DEADLINE
        while self._items:
            time.sleep(pause)
            if time.monotonic() > end:
                raise TimeoutError("the loop took nothing")

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _take(self) -> None:
        self._waking = False
        self._items.clear()
