"""What one Watch says, one value after the other; ``wire`` puts it into messages."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from kvgrpc.errors import ServerDraining, Violation
from kvgrpc.events.journal import Batches, Dropped
from kvgrpc.events.notifier import Bell
from kvgrpc.events.stream import StreamState
from kvgrpc.model import raise_if


class WatchMode(enum.IntEnum):
    """How a Watch reads; the numbers of the proto."""

    REPLAY = 1
    TAIL = 2
    HEARTBEAT = 3


@dataclass(frozen=True, slots=True)
class WatchOrder:
    """What a reader asks for: sequences inclusive, None where it leaves the choice to us."""

    mode: WatchMode
    log: str = ""
    first: int | None = None
    last: int | None = None


@dataclass(frozen=True, slots=True)
class Begin:
    """Where the stream stands, and where the reader begins."""

    state: StreamState
    first: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Nothing was said for a while; the next batch will get this sequence."""

    next_sequence: int


Part = Begin | Batches | Dropped | Heartbeat


class WatchableStream(Protocol):
    """What a Watch needs of a stream; ``kvgrpc.events.stream.EventStream`` is one."""

    @property
    def engine(self) -> str: ...
    @property
    def dp(self) -> int: ...
    @property
    def next_sequence(self) -> int: ...
    @property
    def ended(self) -> bool: ...
    def state(self) -> StreamState: ...
    def check_log(self, log: str) -> None: ...
    def check_cursor(self, first: int) -> None: ...
    def check_end(self, last: int) -> None: ...
    def read(self, first: int, last: int | None = None) -> Batches | Dropped | None: ...
    def listen(self, listener: Callable[[], None]) -> Callable[[], None]: ...


async def watch(
    stream: WatchableStream, order: WatchOrder, bell: Bell, heartbeat: float, draining: Callable[[], bool]
) -> AsyncIterator[Part]:
    """Says begin, then what the order asks for, with a heartbeat after each ``heartbeat`` seconds without a part.

    ``bell`` rings when there is more to read, or ``draining`` has changed. Raises what the Watch RPC documents.
    """
    begin, last = _begin(stream, order)
    cursor = begin.first
    yield begin
    clock = asyncio.get_running_loop().time
    idle_at = clock() + heartbeat
    while True:
        # Taken before the look, so that nothing can come unheard between look and wait.
        ring = bell.next_ring()
        if draining() and order.mode is not WatchMode.REPLAY:
            raise ServerDraining("the server drains: read on from the cursor at another time or place")
        if last is not None and cursor > last:
            return
        part: Part | None = None if order.mode is WatchMode.HEARTBEAT else stream.read(cursor, last)
        if part is None and stream.ended:
            raise ServerDraining("the publisher of this stream was shut down: look for its successor")
        if part is None and clock() >= idle_at:
            part = Heartbeat(stream.next_sequence)
        if part is None:
            await asyncio.wait((ring,), timeout=idle_at - clock())
            continue
        if isinstance(part, Batches | Dropped):
            cursor = part.last + 1
        yield part
        idle_at = clock() + heartbeat


def _begin(stream: WatchableStream, order: WatchOrder) -> tuple[Begin, int | None]:
    """Where to begin and, for a replay, where to end."""
    _check(order)
    if order.log:
        stream.check_log(order.log)
    state = stream.state()
    if order.mode is WatchMode.HEARTBEAT:
        return Begin(state, state.next_sequence), None
    if order.first is not None:
        stream.check_cursor(order.first)
    first = state.oldest_sequence if order.first is None else order.first
    if order.mode is WatchMode.TAIL:
        return Begin(state, first), None
    if order.last is None:
        return Begin(state, first), state.next_sequence - 1
    stream.check_end(order.last)
    return Begin(state, first), order.last


def _check(order: WatchOrder) -> None:
    violations = []
    if order.last is not None and order.mode is not WatchMode.REPLAY:
        violations.append(Violation("end_sequence", "absent but in WATCH_MODE_REPLAY", order.last))
    if order.first is not None and order.mode is WatchMode.HEARTBEAT:
        violations.append(
            Violation("from_sequence", "absent in WATCH_MODE_HEARTBEAT, which sends no batches", order.first)
        )
    if order.first is not None and order.last is not None and order.last < order.first:
        violations.append(Violation("end_sequence", f"at least from_sequence = {order.first}", order.last))
    raise_if(violations)
