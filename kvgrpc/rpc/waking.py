"""Lets other threads and the loop's thread meet without taking the interpreter from each other.

CPython runs one thread at a time. A thread that wants the interpreter waits until the one that has it gives it up, 5 ms
(``sys.setswitchinterval``) where that one computes. Waking the loop must therefore not cost the caller the interpreter,
and a caller that could spare it for a moment must be able to see that the loop's thread wants it.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import select
import selectors
import weakref
from collections.abc import Callable
from typing import Any

# Calls through PyDLL keep the interpreter. Those of ``os`` give it up: the loop's thread would take it from the engine
# that wakes it, and the engine from the loop's thread that reads the wake.
_libc: Any = ctypes.PyDLL(None) if hasattr(os, "eventfd") else None
_HAS_EVENTFD = hasattr(_libc, "eventfd_write") and hasattr(_libc, "eventfd_read")
if _HAS_EVENTFD:
    _libc.eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
    _libc.eventfd_read.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
_wakes = ctypes.c_uint64()  # where eventfd_read puts its count; never read

_TURNS_BETWEEN_LOOKS = 3
# How often, at most, a look lends; and how long an engine is watched before it counts as one that keeps the
# interpreter: longer than it takes to look at some dozens of rooms, shorter than a step of computing.
EVERY_SECONDS, WATCHED_SECONDS = 200e-6, 100e-6
# Of evidence that the engine keeps the interpreter: at how much a look lends at once, how much is kept, and after how
# many loans one is left out to see whether it is so still.
_BELIEVED, _MOST, _LOANS_BETWEEN_TRIALS = 2, 6, 32


class WatchedSelector(selectors.DefaultSelector):
    """A selector of an asyncio loop that other threads can ask whether the loop has something to do.

    Looking for news costs the interpreter, even where nothing is waited for. A loop that has callbacks to run, as it
    does between the turns that one frame takes, therefore looks each fourth time only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asleep = False
        self._turns_without_a_look = 0
        # Moves whenever the loop's thread has the interpreter: when it goes to look for news, and when it comes back.
        self.turns = 0
        # Readable while the inner one has events that the loop's thread did not look at. An epoll object may be asked
        # by many threads, and never hands out what another one asked for: events stay until they are dealt with.
        self._outer = select.epoll(1) if hasattr(select, "epoll") else None
        if self._outer is not None:
            self._outer.register(self.fileno(), select.EPOLLIN)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._asleep = timeout is None or timeout > 0
        self.turns += 1
        if not self._asleep and self._turns_without_a_look < _TURNS_BETWEEN_LOOKS:
            self._turns_without_a_look += 1
            return []
        self._turns_without_a_look = 0
        try:
            return super().select(timeout)
        finally:
            self._asleep = False
            self.turns += 1

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
        if _HAS_EVENTFD:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # Not at the end of the process: handlers of the engine's own that run later still end their rooms.
            weakref.finalize(self, os.close, self._fd).atexit = False
            loop.call_soon_threadsafe(loop.add_reader, self._fd, self._run)

    def wake(self) -> None:
        """Raises RuntimeError once the loop is closed."""
        if self._fd < 0:
            self._loop.call_soon_threadsafe(self._callback)
        elif self._loop.is_closed():
            raise RuntimeError("the loop is closed")
        else:
            _libc.eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Its file descriptor stays until the waker is collected: a late wake must not write to another file."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
        self._loop.call_soon(self._callback)

    def _run(self) -> None:
        _libc.eventfd_read(self._fd, _wakes)
        self._callback()


class Lending:
    """When a look of an engine's thread at a room should lend the interpreter to the threads that move rooms on.

    A thread that sleeps or calls into C between two looks lets others in by itself, and a loan would
    only keep it from its news; one that computes in Python keeps them out for 5 ms. So a look lends where the engine
    was seen to let nobody in from one look to the next, and at once where it mostly does not.

    ``next_at``: no look before that moment is to be told (s, monotonic).
    """

    __slots__ = ("_evidence", "_first_at", "_loans", "_turns", "_watching", "next_at")

    def __init__(self, is_on: bool) -> None:
        self._first_at = 0.0 if is_on else math.inf
        self.next_at = self._first_at
        self._evidence = self._loans = 0
        self._watching = False
        self._turns = -1

    def work_was_given(self) -> None:
        """By a call of the engine, whose wake keeps the interpreter: the next look counts, however soon it comes."""
        self.next_at = self._first_at

    def look(self, now: float, work_waits: bool, turns: int) -> bool:
        """True if this look lends. ``work_waits``: a thread of ours would run now if it had the interpreter. ``turns``:
        moves whenever they have it.
        """
        kept = work_waits and self._watching and turns == self._turns
        if kept:
            self._evidence = min(self._evidence + 1, _MOST)
        elif self._watching and turns != self._turns:
            self._evidence = max(self._evidence - 1, 0)
        lends = kept or (work_waits and self._is_believed())
        self._watching = work_waits and not lends
        self._turns = turns
        self.next_at = now + (WATCHED_SECONDS if self._watching else EVERY_SECONDS)
        return lends

    def _is_believed(self) -> bool:
        if self._evidence < _BELIEVED:
            return False
        self._loans += 1
        return self._loans % _LOANS_BETWEEN_TRIALS != 0
