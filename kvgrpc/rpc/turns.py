"""Long work of an event loop: one piece at a time, those who wait in turn, and rest between for everything else."""

from __future__ import annotations

import asyncio
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

from kvgrpc.errors import TooManyRequests
from kvgrpc.rpc.callers import origin
from kvgrpc.rpc.shares import Account, Shares, accounts_of_this_call

# A request of more bytes is parsed in a turn, one of fewer at once: parsing 16 KiB takes 0.1 ms.
LARGE_BYTES = 16 * 1024
# How long a piece that can be divided may take.
PIECE_SECONDS = 0.002
# Calls that wait for their first turn, and those of them that look at a server or drain it: a flood of others takes
# none of their places.
MOST_WAITING, MOST_PROBES = 4_096, 256
# After a refused place no call is taken from the library for so long: a refusal takes 0.2 to 0.5 ms of the loop, in no
# turn. Those who are not taken yet wait in the library, in a few KB each.
REFUSAL_REST_SECONDS = 0.001
# For so long after a hand-off went on the next one is waited for.
HURRY_SECONDS = 1.0
# Meanwhile, where calls wait, no thread keeps the interpreter from the loop for longer: with Python's own 5 ms one room
# in a hundred took half as long again.
SWITCH_SECONDS = 0.0005
# How many times as long as a step waited for its processor calls rest then.
_RESTS = 3
# A process that was stopped for a while owes nobody thrice that.
LONGEST_REST_SECONDS = 0.15
_NEVER = 0.0, 0.0
# A step of a call that takes so long rests as long again, and one that takes n times as long n times as long.
SHORT_SECONDS = 0.0005
# A turn of the loop that takes less does nothing but look for news, and it looks in each fourth turn at least: after so
# many of them, one behind the other, nobody wants the loop.
_IDLE_SECONDS, _IDLE_TURNS = 30e-6, 8
# Callers that do not wait whose time is known.
_REMEMBERED = 256

T = TypeVar("T")
K = TypeVar("K")
_Accounts = tuple[Account, ...]
_Turn = tuple[_Accounts, "asyncio.Future[None]"]


class Turns:
    """Gives turns: work that takes milliseconds of an event loop asks for one before each piece of it.

    Between two pieces the loop is everybody else's for as long as the first took, or until it has nothing to do: long
    work of all callers together has half of the time at most of a loop that others want too. Callers that wait get one
    piece after the other, and so do the connections of each, however much they ask and however many they are. Belongs
    to one event loop.

    While hand-offs go on here (``hurry``) every step of a call is such a piece (``in_turns``), and its rest is longer
    where this thread had to wait for a processor or for the interpreter: a loop that always has a step to do wants a
    whole core, gets a part of one where others are busy, and is not there when a room goes on. So all calls together
    have half of the time that passes on a core of their own, and a quarter where others want it too. Pieces of what is
    no call, a session's frame, wait for no such rest, and for one step at most beside each other.
    """

    def __init__(self) -> None:
        # Steps of calls, and pieces of what is no call.
        self._waiting, self._pieces = _Waiting(), _Waiting()
        # Of calls whose caller nobody asked for yet: by host and connection.
        self._places = Shares(MOST_WAITING, "calls that wait for their first turn")
        self._probes = Shares(MOST_PROBES, "probes that wait for their first turn")
        self._refused_until = 0.0
        # The rest that calls owe, while it lasts.
        self._resting: asyncio.TimerHandle | None = None
        self._busy = False
        # Of the piece that runs: when it began, when its step ended, by the wall and by this thread's clock.
        self._began = self._ended = _NEVER
        # The rest that steps owe, and when that was.
        self._owed, self._owed_at = 0.0, 0.0
        # Among whom the one waited whose piece it is, and its accounts.
        self._who: tuple[_Waiting, _Accounts] = self._waiting, ()
        self._hurries_until = 0.0
        # True while a timer of this loop is to put the process's interval of changes between threads back.
        self._puts_back = False
        # True while a step runs that has a turn: it takes no other.
        self._in_a_step = False
        # True once the step of ``in_turns`` that runs now was the last to need a turn.
        self._lets_go = False

    @classmethod
    def of_this_loop(cls) -> Turns:
        loop = asyncio.get_running_loop()
        known = _OF_LOOPS.get(loop)
        if known is None:
            known = _OF_LOOPS[loop] = cls()
        return known

    def hurry(self) -> None:
        """A hand-off of this process went on."""
        self._hurries_until = time.monotonic() + HURRY_SECONDS

    @property
    def hurries(self) -> bool:
        return time.monotonic() < self._hurries_until

    async def room(self) -> None:
        """Returns when the next call may be taken from the library."""
        if (left := self._refused_until - time.monotonic()) > 0:
            await asyncio.sleep(left)

    def place(self, *, probe: bool) -> Callable[[], None]:
        """Takes a place among the calls that wait for their first turn; call what it gives back once that has come.

        Raises TooManyRequests past the share of the host, or of the connection, that the call of now comes from.
        """
        if not (self._busy and self.hurries):
            return lambda: None  # it does not wait
        places = self._probes if probe else self._places
        try:
            return partial(places.give_back, places.take_for(_unnamed()))
        except TooManyRequests:
            self._refused_until = max(self._refused_until, time.monotonic()) + REFUSAL_REST_SECONDS
            raise

    async def take(self) -> None:
        """Returns when the caller of the call that runs now may do one piece, until it awaits again."""
        if self._in_a_step:
            return
        accounts = accounts_of_this_call()
        if self._resting is not None:
            self._resting.cancel()
            self._begin(self._pieces, accounts)
        elif self._busy:
            await self._pieces.add(accounts)
        else:
            self._begin(self._pieces, accounts)

    async def take_as_a_call(self) -> None:
        """``take`` for a call: while hand-offs go on it waits among the steps of calls and rests as they do."""
        if self._in_a_step or not self.hurries:
            await self.take()
        elif self._busy:
            await self._waiting.add(accounts_of_this_call() or _unnamed())
        else:
            self._begin(self._waiting, accounts_of_this_call() or _unnamed())

    def let_go(self) -> None:
        """The call that runs now is a session with a rank that fits: its further steps wait for no turn."""
        self._lets_go = True

    @types.coroutine
    def in_turns(
        self, coroutine: Coroutine[Any, Any, T], leave: Callable[[], None] | None = None
    ) -> Generator[Any, Any, T]:
        """Returns or raises what the coroutine, a call, does; while hand-offs go on each of its steps waits for its
        turn, but for one that hears that it was cancelled. ``leave``: its place among those that wait for their first
        one.
        """
        raised: BaseException | None = None
        goes_free = False
        while True:
            has_turn = False
            # What was cancelled gives its places back: nobody gains by a wait.
            if self.hurries and not goes_free and not isinstance(raised, asyncio.CancelledError):
                accounts = accounts_of_this_call() or _unnamed()
                if self._busy:
                    self._switch_sooner()
                    turn = self._waiting.add(accounts)
                    try:
                        yield from turn
                    except BaseException as error:
                        raised = error
                    has_turn = turn.done() and not turn.cancelled()
                else:
                    self._begin(self._waiting, accounts)
                    has_turn = True
            if leave is not None:
                leave()
                leave = None
            thrown, raised = raised, None
            self._in_a_step, self._lets_go = has_turn, False
            try:
                awaited = coroutine.send(None) if thrown is None else coroutine.throw(thrown)
            except StopIteration as end:
                return cast(T, end.value)
            finally:
                thrown = None
                self._in_a_step = False
                goes_free = goes_free or self._lets_go
                if has_turn:
                    self._ended = time.monotonic(), time.thread_time()
            try:
                yield awaited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:
                raised = error

    def _switch_sooner(self) -> None:
        """Until no hand-off goes on any more; an interval that is as short already is left alone."""
        global _usual_switch
        usual = sys.getswitchinterval()
        if usual > SWITCH_SECONDS:
            _usual_switch = usual
            sys.setswitchinterval(SWITCH_SECONDS)
        if not self._puts_back and _usual_switch is not None:
            self._puts_back = True
            self._switch_as_usual()

    def _switch_as_usual(self) -> None:
        global _usual_switch
        if self.hurries:
            asyncio.get_running_loop().call_later(HURRY_SECONDS, self._switch_as_usual)
            return
        self._puts_back, usual, _usual_switch = False, _usual_switch, None
        # Whoever set another one meanwhile means that.
        if usual is not None and sys.getswitchinterval() == SWITCH_SECONDS:
            sys.setswitchinterval(usual)

    def _begin(self, among: _Waiting, accounts: tuple[Account, ...]) -> None:
        self._busy, self._resting, self._ended = True, None, _NEVER
        self._who = among, accounts
        self._began = time.monotonic(), time.thread_time()
        # Behind the piece: it runs now, or is what its future wakes first.
        asyncio.get_running_loop().call_soon(self._rest)

    def _rest(self) -> None:
        loop, (among, accounts) = asyncio.get_running_loop(), self._who
        ended = (time.monotonic(), time.thread_time()) if self._ended is _NEVER else self._ended
        wall, own = ended[0] - self._began[0], ended[1] - self._began[1]
        among.charge(accounts, own)
        if not self.hurries:
            self._rest_until_idle(loop, loop.time() + own, 0, ended[1])
            return
        if among is self._pieces:
            # What a session brings is not to wait longer, however many bring much.
            loop.call_later(own, self._next)
            return
        rest = own * max(1.0, own / SHORT_SECONDS) + max(0.0, wall - own) * _RESTS
        owed = max(0.0, self._owed - (self._began[0] - self._owed_at)) + rest
        self._owed, self._owed_at = min(owed, LONGEST_REST_SECONDS), ended[0]
        if self._pieces or self._owed < PIECE_SECONDS:  # a timer is for milliseconds
            self._next(self._pieces)
        else:
            self._resting = loop.call_later(self._owed, self._next)

    def _rest_until_idle(self, loop: asyncio.AbstractEventLoop, end: float, idle: int, before: float) -> None:
        """``idle``: turns of the loop without anything to do, one after the other; ``before``: this thread's clock."""
        now = time.thread_time()
        idle = idle + 1 if now - before < _IDLE_SECONDS else 0
        if idle > _IDLE_TURNS or loop.time() >= end:
            self._next()
        else:
            loop.call_soon(self._rest_until_idle, loop, end, idle, now)

    def _next(self, first: _Waiting | None = None) -> None:
        """``first``: whose turn it is, if any wait there; else that of steps."""
        self._busy, self._resting = False, None
        while not self._busy and (self._waiting or self._pieces):
            waiting = first or self._waiting or self._pieces
            accounts, turn = waiting.pop()
            if not turn.done():  # else its call is over
                turn.set_result(None)
                self._begin(waiting, accounts)


class _Line(Generic[K]):
    """A queue: who had least of the loop is next. Who comes anew has had as much as whoever was next last, and at least
    an equal share of what was had since the queue is there: else callers that come, each anew, for one step would
    all be before those that stay, and none of them would ever be forgotten.
    """

    def __init__(self) -> None:
        self.waiting: dict[K, None] = {}
        self.had: dict[K, float] = {}
        self._least = 0.0

    def enter(self, who: K) -> None:
        if who not in self.waiting:
            self.waiting[who] = None
            self.had[who] = max(self.had.get(who, 0.0), self._least)

    def next(self) -> K:
        who = min(self.waiting, key=self.had.__getitem__)
        self._least = max(self._least, self.had[who])
        del self.waiting[who]
        return who

    def charge(self, who: K, seconds: float) -> None:
        self.had[who] = max(self.had.get(who, 0.0), self._least) + seconds
        self._least += seconds / (len(self.waiting) + 1)
        if len(self.had) > 2 * len(self.waiting) + _REMEMBERED:
            self.had = {each: had for each, had in self.had.items() if each in self.waiting or had > self._least}


class _Waiting:
    """Those who wait for a turn: the caller next that had least of the loop, and of its connections the one that had
    least. False where nobody waits."""

    def __init__(self) -> None:
        self._callers = _Line[_Accounts]()
        self._connections: dict[_Accounts, _Line[_Accounts]] = {}
        self._calls: dict[_Accounts, deque[_Turn]] = {}

    def __len__(self) -> int:
        """Callers."""
        return len(self._callers.waiting)

    def add(self, accounts: _Accounts) -> asyncio.Future[None]:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        caller, connection = accounts[:1], accounts[-1:]
        self._callers.enter(caller)
        self._connections.setdefault(caller, _Line()).enter(connection)
        self._calls.setdefault(connection, deque()).append((accounts, turn))
        return turn

    def pop(self) -> _Turn:
        caller = self._callers.next()
        connections = self._connections[caller]
        connection = connections.next()
        queue = self._calls[connection]
        found = queue.popleft()
        if queue:
            connections.enter(connection)
        else:
            del self._calls[connection]
        if connections.waiting:
            self._callers.enter(caller)
        return found

    def charge(self, accounts: _Accounts, seconds: float) -> None:
        """Somebody with these accounts had a turn that took so long."""
        self._callers.charge(accounts[:1], seconds)
        self._connections.setdefault(accounts[:1], _Line()).charge(accounts[-1:], seconds)
        if len(self._connections) > 2 * len(self._callers.had) + _REMEMBERED:
            self._connections = {
                each: line for each, line in self._connections.items() if line.waiting or each in self._callers.had
            }


def _unnamed() -> tuple[Account, ...]:
    """Of a call before anybody was asked who makes it: its host and its connection."""
    host, connection = origin()
    return (("", host), ("", host, connection))


async def next_turn() -> None:
    """Ends the piece that runs, and returns in the next turn of whoever makes this call."""
    await asyncio.sleep(0)
    await Turns.of_this_loop().take()


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


# The process's own interval of changes between threads, while SWITCH_SECONDS is in its place; of a loop that ended
# meanwhile the next one puts it back.
_usual_switch: float | None = None
_OF_LOOPS: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()
