"""How other threads and the loop's thread meet without taking the interpreter from each other.

CPython runs one thread at a time. A thread that wants the interpreter waits until the one that has it gives it up, 5 ms
(``sys.setswitchinterval``) where that one computes. Waking the loop must therefore not cost the caller the interpreter,
and a caller that could spare it for a moment must be able to see that the loop's thread wants it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import selectors
import weakref
from collections.abc import Callable

# A call through PyDLL keeps the interpreter, which os.eventfd_write gives up: the woken thread would take it there.
_eventfd_write = getattr(ctypes.PyDLL(None), "eventfd_write", None) if hasattr(os, "eventfd") else None
if _eventfd_write is not None:
    _eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


_TURNS_BETWEEN_LOOKS = 3


class WatchedSelector(selectors.DefaultSelector):
    """A selector of an asyncio loop that other threads can ask whether the loop has something to do.

    Looking for news costs the interpreter, even where nothing is waited for. A loop that has callbacks to run, as it
    does between the turns that one frame takes, therefore looks each fourth time only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asleep = False
        self._turns = 0
        # Readable while the inner one has events that the loop's thread did not look at. An epoll object may be asked
        # by many threads, and never hands out what another one asked for: events stay until they are dealt with.
        self._outer = select.epoll(1) if hasattr(select, "epoll") else None
        if self._outer is not None:
            self._outer.register(self.fileno(), select.EPOLLIN)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._asleep = timeout is None or timeout > 0
        if not self._asleep and self._turns < _TURNS_BETWEEN_LOOKS:
            self._turns += 1
            return []
        self._turns = 0
        try:
            return super().select(timeout)
        finally:
            self._asleep = False

    @property
    def work_waits(self) -> bool:
        """True if the loop's thread would run now if it had the interpreter. Any thread, without a lock, about 1 us."""
        if not self._asleep or self._outer is None:
            return True
        try:
            return bool(self._outer.poll(0, 1))
        except ValueError:  # closed with its loop
            return False

    def close(self) -> None:
        if self._outer is not None:
            self._outer.close()
        super().close()


class Waker:
    """Runs ``callback`` on the loop soon, once for all wakes before it. ``wake``: any thread, about 1 us, and the
    caller keeps the interpreter. After ``close``, which belongs on the loop, a wake may go unheard.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._fd = -1
        if _eventfd_write is not None:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # Not at the end of the process: handlers of the engine's own that run later still end their rooms.
            weakref.finalize(self, os.close, self._fd).atexit = False
            loop.call_soon_threadsafe(loop.add_reader, self._fd, self._run)

    def wake(self) -> None:
        """Raises RuntimeError once the loop is closed."""
        if self._fd < 0 or _eventfd_write is None:
            self._loop.call_soon_threadsafe(self._callback)
        elif self._loop.is_closed():
            raise RuntimeError("the loop is closed")
        else:
            _eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Its file descriptor stays until the waker is collected: a late wake must not write to another file."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
        self._loop.call_soon(self._callback)

    def _run(self) -> None:
        os.eventfd_read(self._fd)
        self._callback()
