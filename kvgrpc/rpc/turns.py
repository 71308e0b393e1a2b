"""Long work of an event loop: one piece at a time, those who wait in turn, and rest between for everything else."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import TypeVar
from weakref import WeakKeyDictionary

from kvgrpc.rpc.shares import Account, accounts_of_this_call

# A request of more bytes is parsed in a turn, one of fewer at once: parsing 16 KiB takes 0.1 ms.
LARGE_BYTES = 16 * 1024
# How long a piece that can be divided may take.
PIECE_SECONDS = 0.002


class Turns:
    """Who does what takes milliseconds of an event loop asks for a turn before each piece of it.

    Between two pieces the loop is everybody else's for as long as the first took, so that long work of all callers
    together has half of the loop's time at most. Callers that wait get one piece after the other, and so do the
    connections of each, however much they ask and however many they are. Belongs to one event loop.
    """

    def __init__(self) -> None:
        # By caller, then by connection.
        self._waiting: dict[tuple[Account, ...], dict[tuple[Account, ...], deque[asyncio.Future[None]]]] = {}
        self._busy = False
        self._began = 0.0

    @classmethod
    def of_this_loop(cls) -> Turns:
        loop = asyncio.get_running_loop()
        known = _OF_LOOPS.get(loop)
        if known is None:
            known = _OF_LOOPS[loop] = cls()
        return known

    async def take(self) -> None:
        """Returns when the caller of the call that runs now may do one piece, until it awaits again."""
        if self._busy:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            accounts = accounts_of_this_call()
            self._waiting.setdefault(accounts[:1], {}).setdefault(accounts[-1:], deque()).append(turn)
            await turn
        else:
            self._begin()

    def _begin(self) -> None:
        self._busy, self._began = True, time.thread_time()
        # Behind the piece: it runs now, or is what its future wakes first.
        asyncio.get_running_loop().call_soon(self._rest)

    def _rest(self) -> None:
        asyncio.get_running_loop().call_later(time.thread_time() - self._began, self._next)

    def _next(self) -> None:
        self._busy = False
        while self._waiting and not self._busy:
            caller = next(iter(self._waiting))
            connections = self._waiting.pop(caller)
            connection = next(iter(connections))
            queue = connections.pop(connection)
            turn = queue.popleft()
            if queue:
                connections[connection] = queue  # behind the others
            if connections:
                self._waiting[caller] = connections
            if not turn.done():  # else its call is over
                turn.set_result(None)
                self._begin()


async def next_turn() -> None:
    """Ends the piece that runs, and returns in the next turn of whoever makes this call."""
    await asyncio.sleep(0)
    await Turns.of_this_loop().take()


T = TypeVar("T")


async def in_pieces(items: Iterator[T]) -> list[T]:
    """All of them, as many in a turn as PIECE_SECONDS have time for."""
    found: list[T] = []
    turns = Turns.of_this_loop()
    while True:
        await turns.take()
        end = time.monotonic() + PIECE_SECONDS
        for item in items:
            found.append(item)
            if time.monotonic() > end:
                break
        else:
            return found
        await asyncio.sleep(0)  # so that the piece is over


_OF_LOOPS: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()
