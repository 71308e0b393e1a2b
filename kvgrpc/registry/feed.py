"""The messages of WatchEngines: full states and changes, encoded once for all who follow the same engines."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvgrpc.registry import wire
from kvgrpc.registry.model import EngineChange, EngineFilter, ResolvedEngine
from kvgrpc.registry.table import EngineTable
from kvgrpc.rpc.turns import in_pieces
from kvgrpc.v1 import registry_service_pb2 as pb

MAX_MESSAGE_BYTES = 1 << 20
# Whoever is further behind than this starts with the full state again.
MAX_LOG_BYTES = 4 << 20
MAX_LOG_ENTRIES = 4_096
_BEGINS = pb.WatchEnginesResponse(state_begins=True).SerializeToString()
_COMPLETE = pb.WatchEnginesResponse(state_complete=True).SerializeToString()
_ENVELOPE_BYTES = 2_048
_GONE_AT_A_TIME = 4_096
# Of a row that is not encoded yet, guessed.
_ROW_BYTES = 256


class Feed:
    """The full state and the latest changes for all readers with one filter. Lives on one event loop.

    What is told is encoded when the first reader asks for it, in pieces: a registry that is full takes seconds.
    """

    def __init__(self, only: EngineFilter, table: Callable[[], EngineTable], pools: wire.PoolCache) -> None:
        self.readers = 0
        self._only = only
        self._table = table
        self._pools = pools if only.pools else None
        self._log: deque[_Told] = deque()
        self._log_bytes = 0
        self._first = 0
        self._state: list[bytes] = []
        self._state_at = -1
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._encoding = asyncio.Lock()

    def publish(self, changes: Iterable[EngineChange]) -> None:
        """Appends what of the changes its readers follow, and wakes them."""
        applied = [kept for change in changes if (kept := self._only.applied_to(change)) is not None]
        for each in map(_Told, applied):
            self._log.append(each)
            self._log_bytes += each.size
        self._drop_oldest()
        if applied:
            self.wake()

    def wake(self) -> None:
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    async def change(self, seconds: float) -> bool:
        """Waits for the next ``publish`` or ``wake``; False after so many seconds without one."""
        done, _ = await asyncio.wait([self._changed], timeout=seconds)
        return bool(done)

    def count_behind(self, position: int) -> int | None:
        """Changes that a reader at this position has before it; None: it gets a full state first."""
        return None if position < self._first else self._end - position

    async def behind(self, position: int) -> tuple[Sequence[bytes], int]:
        """Messages for a reader that has all up to ``position``, and the position that it has then.

        A reader that has nothing (-1), or is behind what is kept, gets a full state.
        """
        async with self._encoding:
            messages: list[bytes] = []
            while not messages and position < self._end:
                messages, position = await (self._whole() if position < self._first else self._behind(position))
            return messages, position

    async def _whole(self) -> tuple[list[bytes], int]:
        """The state that was encoded, and what changed since: only with that it is complete."""
        messages, position = list[bytes](), -1
        while position < self._end:
            if position < self._first:  # nothing yet, or what changed since was let go before it was told
                if self._state_at < self._first:
                    engines, at = self._engines(), self._end  # what is told from now on comes behind it
                    self._state, self._state_at = await self._state_of(engines), at
                messages, position = list(self._state), self._state_at
            else:
                more, position = await self._behind(position)
                messages += more
        messages[0] = _BEGINS + messages[0]
        messages[-1] += _COMPLETE
        return messages, position

    async def _behind(self, position: int) -> tuple[list[bytes], int]:
        """Returns what was told behind the position, at most 1 MiB of it, and where that ends."""
        told: list[_Told] = []
        left = MAX_MESSAGE_BYTES
        for each in list(itertools.islice(self._log, position - self._first, None)):
            if each.changes is None:
                guessed = each.size
                await in_pieces(each.encode(self._pools))
                self._log_bytes += each.size - guessed if position + len(told) >= self._first else 0
                self._drop_oldest()
            left -= each.size
            if left < 0 and told:
                break
            told.append(each)
        return list(_messages(change for each in told for change in each.changes or ())), position + len(told)

    async def _state_of(self, engines: Sequence[ResolvedEngine]) -> list[bytes]:
        told = [_Told(EngineChange(engine)) for engine in engines]
        await in_pieces(step for each in told for step in each.encode(self._pools))
        return list(_messages(change for each in told for change in each.changes or ())) or [b""]

    def _drop_oldest(self) -> None:
        while self._log_bytes > MAX_LOG_BYTES or len(self._log) > MAX_LOG_ENTRIES:
            self._log_bytes -= self._log.popleft().size
            self._first += 1

    @property
    def _end(self) -> int:
        return self._first + len(self._log)

    def _engines(self) -> Sequence[ResolvedEngine]:
        table, only = self._table(), self._only
        if not only.engine:
            return table.list_engines(only.role, "", table.engines, rows=True)
        engine = table.engine(only.engine)
        return [engine.view(engine.rows())] if engine is not None and only.takes(engine.name, engine.role) else []


class _Told:
    """A change of the log, and once somebody asked for it how it reads: in parts that each fit a message."""

    def __init__(self, change: EngineChange) -> None:
        self._change = change
        self.changes: list[bytes] | None = None
        # What nobody reads must count too: the rows of each change are kept until it is let go.
        self.size = _ROW_BYTES * (len(change.engine.rows) + len(change.gone))

    def encode(self, pools: wire.PoolCache | None) -> Iterator[None]:
        """A row at a time; the engine's head is in each part."""
        change = self._change
        head, parts = wire.engine_to_bytes(change.engine), list[bytes]()
        for first in range(0, len(change.gone), _GONE_AT_A_TIME):
            parts.append(wire.change_to_bytes(head, change.gone[first : first + _GONE_AT_A_TIME]))
            yield
        rows, left = list[bytes](), MAX_MESSAGE_BYTES - _ENVELOPE_BYTES
        for each in change.engine.rows:
            row = wire.joined(pb.Engine, "rows", [wire.row_to_bytes(each, pools)])
            if len(row) > left and rows:
                parts.append(wire.change_to_bytes(head + b"".join(rows)))
                rows, left = [], MAX_MESSAGE_BYTES - _ENVELOPE_BYTES
            rows.append(row)
            left -= len(row)
            yield
        if rows:
            parts.append(wire.change_to_bytes(head + b"".join(rows)))
        self.changes, self.size = parts, sum(map(len, parts))


def _messages(changes: Iterable[bytes]) -> Iterator[bytes]:
    """Messages of at most 1 MiB, as long as one row is not larger itself."""
    parts, left = list[bytes](), MAX_MESSAGE_BYTES
    for change in changes:
        part = wire.joined(pb.WatchEnginesResponse, "changes", [change])
        if len(part) > left and parts:
            yield b"".join(parts)
            parts, left = [], MAX_MESSAGE_BYTES
        parts.append(part)
        left -= len(part)
    if parts:
        yield b"".join(parts)
