"""What WatchEngines sends: full states and changes, encoded once for all who follow the same engines."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvgrpc.registry import wire
from kvgrpc.registry.model import EngineChange, EngineFilter, RankRow, ResolvedEngine
from kvgrpc.registry.table import EngineTable
from kvgrpc.v1 import registry_service_pb2 as pb

MAX_MESSAGE_BYTES = 1 << 20
# Whoever is further behind than this starts with the full state again.
MAX_LOG_BYTES = 4 << 20
MAX_LOG_ENTRIES = 4_096
_BEGINS = pb.WatchEnginesResponse(state_begins=True).SerializeToString()
_COMPLETE = pb.WatchEnginesResponse(state_complete=True).SerializeToString()
_ENVELOPE_BYTES = 2_048
_GONE_AT_A_TIME = 4_096


class Feed:
    """The full state and the latest changes for all readers with one filter. Lives on one event loop."""

    def __init__(self, only: EngineFilter, table: Callable[[], EngineTable], pools: wire.PoolCache) -> None:
        self.readers = 0
        self._only = only
        self._table = table
        self._pools = pools if only.pools else None
        self._log: deque[bytes] = deque()
        self._log_bytes = 0
        self._first = 0
        self._state: list[bytes] = []
        self._state_at = -1
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def publish(self, changes: Iterable[EngineChange]) -> None:
        """Appends what of the changes its readers follow, and wakes them."""
        applied = [kept for change in changes if (kept := self._only.applied_to(change)) is not None]
        for message in self._messages(applied):
            self._log.append(message)
            self._log_bytes += len(message)
        while self._log_bytes > MAX_LOG_BYTES or len(self._log) > MAX_LOG_ENTRIES:
            self._log_bytes -= len(self._log.popleft())
            self._first += 1
        if applied:
            self.wake()

    def wake(self) -> None:
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    async def change(self, seconds: float) -> bool:
        """Waits for the next ``publish`` or ``wake``; False after so many seconds without one."""
        done, _ = await asyncio.wait([self._changed], timeout=seconds)
        return bool(done)

    def behind(self, position: int) -> tuple[Sequence[bytes], int]:
        """Messages for a reader that has all up to ``position``, and the position that it has then.

        A reader that has nothing (-1), or is behind what is kept, gets a full state.
        """
        if position < self._first:
            if self._state_at < self._first:
                self._state, self._state_at = self._full_state(), self._end
            return self._state_now(), self._end
        joined, position = self._joined(position)
        return [joined] if joined else [], position

    def _state_now(self) -> list[bytes]:
        """The state that was encoded, and what changed since: only with that it is complete."""
        messages, position = list(self._state), self._state_at
        while position < self._end:
            joined, position = self._joined(position)
            messages.append(joined)
        messages[0] = _BEGINS + messages[0]
        messages[-1] += _COMPLETE
        return messages

    def _joined(self, position: int) -> tuple[bytes, int]:
        """What was published behind the position, at most 1 MiB of it, and where that ends.

        The joined bytes of messages are one message with the fields of all.
        """
        pieces: list[bytes] = []
        left = MAX_MESSAGE_BYTES
        for message in itertools.islice(self._log, position - self._first, None):
            left -= len(message)
            if left < 0 and pieces:
                break
            pieces.append(message)
        return b"".join(pieces), position + len(pieces)

    @property
    def _end(self) -> int:
        return self._first + len(self._log)

    def _full_state(self) -> list[bytes]:
        return list(self._messages(EngineChange(engine) for engine in self._engines())) or [b""]

    def _engines(self) -> Sequence[ResolvedEngine]:
        table, only = self._table(), self._only
        if not only.engine:
            return table.list_engines(only.role, "", table.engines, rows=True)
        engine = table.engine(only.engine)
        return [engine.view(engine.rows())] if engine is not None and only.takes(engine.name, engine.role) else []

    def _messages(self, changes: Iterable[EngineChange]) -> Iterator[bytes]:
        """Encoded messages of at most 1 MiB, as long as one row is not larger itself."""
        message, left = pb.WatchEnginesResponse(), MAX_MESSAGE_BYTES
        for piece in itertools.chain.from_iterable(map(self._pieces, changes)):
            size = piece.ByteSize() + 8
            if size > left and message.changes:
                yield message.SerializeToString()
                message, left = pb.WatchEnginesResponse(), MAX_MESSAGE_BYTES
            message.changes.append(piece)
            left -= size
        if message.changes:
            yield message.SerializeToString()

    def _pieces(self, change: EngineChange) -> Iterator[pb.EngineChange]:
        """The change in parts that each fit a message, the engine's head in each."""
        gone = [change.gone[first : first + _GONE_AT_A_TIME] for first in range(0, len(change.gone), _GONE_AT_A_TIME)]
        yield from (wire.change_to_pb(change.engine, (), refs) for refs in gone)
        rows = _Parts(change.engine.rows)
        while rows.left:
            yield wire.change_to_pb(change.engine, rows.take(MAX_MESSAGE_BYTES - _ENVELOPE_BYTES, self._pools), ())


class _Parts:
    """Rows that are encoded a message's worth at a time."""

    def __init__(self, rows: Sequence[RankRow]) -> None:
        self._rows = rows
        self._next = 0

    @property
    def left(self) -> bool:
        return self._next < len(self._rows)

    def take(self, budget: int, pools: wire.PoolCache | None) -> list[pb.RankRow]:
        taken: list[pb.RankRow] = []
        while self.left:
            message = wire.row_to_pb(self._rows[self._next], pools)
            budget -= message.ByteSize() + 8
            if budget < 0 and taken:
                break
            taken.append(message)
            self._next += 1
        return taken
