"""The words of one Watch, one value after the other; ``wire`` puts it into messages."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from kvgrpc.errors import (
    EventsCompacted,
    EventsSequenceInFuture,
    FeatureDisabled,
    ServerDraining,
    StaleLog,
    Violation,
)
from kvgrpc.events.log.digest import StateDigest
from kvgrpc.events.log.journal import CHUNK_BYTES, Batches, DroppedRange, compacted
from kvgrpc.events.log.recorder import SnapshotCut, SnapshotGivenUp
from kvgrpc.events.log.stream import EventStream, StreamState
from kvgrpc.events.notifier import Notifier
from kvgrpc.model import EngineLoad, raise_if

# The journal may move on between two looks at it.
_TRIES_FOR_THE_OLDEST = 8
# A reader that is overtaken again and again, without ever being current, cannot be served.
MAX_SNAPSHOTS_IN_A_ROW = 3


class WatchMode(enum.IntEnum):
    """The ways in which a Watch reads; the numbers of the proto."""

    REPLAY = 1
    TAIL = 2
    HEARTBEAT = 3
    SNAPSHOT = 4


@dataclass(frozen=True, slots=True)
class WatchOrder:
    """The order of a reader: sequences inclusive, None where it leaves the choice to us.

    ``chunk_bytes``: how much may be read of the journal at once. ``without_tokens``: snapshots name blocks alone.
    """

    mode: WatchMode
    log_id: str = ""
    first: int | None = None
    last: int | None = None
    chunk_bytes: int = CHUNK_BYTES
    without_tokens: bool = False


@dataclass(frozen=True, slots=True)
class WatchBegins:
    """The sequence at which the stream stands, and the one at which the reader begins."""

    state: StreamState
    first: int


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """One part of ``snapshot``, as the payload of a batch."""

    snapshot: SnapshotCut
    index: int
    payload: bytes
    last: bool


@dataclass(frozen=True, slots=True)
class WatchHeartbeat:
    """The next batch will get this sequence; ``state`` is for who has read so far, or was told of a checkpoint."""

    next_sequence: int
    state: StateDigest | None = None
    load: EngineLoad | None = None


Part = WatchBegins | Batches | DroppedRange | SnapshotPart | WatchHeartbeat


class Watch:
    """One reader of a stream. It begins at ``cursor`` and goes on until ``last``, or without end."""

    def __init__(self, stream: EventStream, order: WatchOrder) -> None:
        """Raises InvalidRequest, FeatureDisabled, StaleLog, EventsCompacted, EventsSequenceInFuture."""
        check_order(stream, order)
        self.state = stream.state()
        self.cursor = self.state.next_sequence
        self.last = order.last
        self._stream = stream
        self._order = order
        self._snapshot: SnapshotCut | None = None
        self._next_part = 0
        self._snapshots_in_a_row = 0
        self._caught_up_at = 0
        self._first: Batches | DroppedRange | None = None
        if order.mode in (WatchMode.REPLAY, WatchMode.TAIL):
            self._begin_to_read()

    def heartbeat(self) -> WatchHeartbeat:
        """Tells where the stream is, with a digest that this reader can compare."""
        upcoming = self._stream.next_sequence
        read = self.cursor if self._order.mode is not WatchMode.HEARTBEAT else upcoming
        return WatchHeartbeat(upcoming, self._stream.digest(read))

    @property
    def complete(self) -> bool:
        """It has said everything up to its last sequence."""
        return self.last is not None and self.cursor > self.last

    async def next_part(self) -> Part | None:
        """Returns what comes next, None: nothing yet. Raises EventsCompacted when the log has overtaken it."""
        if self._order.mode is WatchMode.HEARTBEAT:
            return None
        if self._order.mode is WatchMode.SNAPSHOT and (self._snapshot is not None or self._snapshots_in_a_row == 0):
            return await self._part_of_snapshot()
        try:
            part, self._first = self._first or self._read(), None
        except EventsCompacted:
            if self._order.mode is not WatchMode.SNAPSHOT or self._snapshots_in_a_row >= MAX_SNAPSHOTS_IN_A_ROW:
                raise
            return await self._part_of_snapshot()
        if part is not None:
            self.cursor = part.last + 1
            if self.cursor >= self._caught_up_at:
                # If it is overtaken later, that is no live-lock.
                self._snapshots_in_a_row = 1
        return part

    def _begin_to_read(self) -> None:
        """Begins where the journal does if no cursor is named. Its first part is taken at once: a busy publisher drops
        the oldest batch before the reader has even heard where it begins."""
        for left in reversed(range(_TRIES_FOR_THE_OLDEST)):
            self.cursor = self.state.oldest_sequence if self._order.first is None else self._order.first
            if self._order.mode is WatchMode.REPLAY and self._order.last is None:
                self.last = self.state.next_sequence - 1
            if self._order.first is not None or self.complete:
                return
            try:
                self._first = self._read()
                return
            except EventsCompacted:
                if not left:
                    raise
            self.state = self._stream.state()

    def _read(self) -> Batches | DroppedRange | None:
        return self._stream.journal.read(self.cursor, self.last, self._order.chunk_bytes)

    async def _part_of_snapshot(self) -> SnapshotPart:
        recorder, journal = self._stream.recorder, self._stream.journal
        assert recorder is not None  # check_order asked
        while True:
            if self._snapshot is None:
                # Old enough to be shared, young enough to be read before the journal overtakes it.
                useful = (journal.oldest_sequence + journal.next_sequence) // 2
                self._snapshot = await asyncio.to_thread(
                    recorder.snapshot, useful, without_tokens=self._order.without_tokens
                )
                self._next_part = 0
                self._snapshots_in_a_row += 1
            snapshot, index = self._snapshot, self._next_part
            try:
                payload, last = await asyncio.to_thread(snapshot.part, index)
                break
            except SnapshotGivenUp:
                self._snapshot = None
                if self._snapshots_in_a_row >= MAX_SNAPSHOTS_IN_A_ROW:
                    stream = self._stream
                    oldest, upcoming = journal.oldest_sequence, stream.next_sequence
                    raise compacted(stream.log_id, snapshot.next_sequence, oldest, upcoming) from None
        self._next_part += 1
        if last:
            self._snapshot, self.cursor = None, snapshot.next_sequence
            self._caught_up_at = journal.next_sequence
        return SnapshotPart(snapshot, index, payload, last)


async def watch(
    stream: EventStream,
    order: WatchOrder,
    notifier: Notifier,
    heartbeat: float,
    draining: Callable[[], bool],
    load: Callable[[], EngineLoad | None] = lambda: None,
) -> AsyncIterator[Part]:
    """Says begin, then what the order asks for, with a heartbeat every ``heartbeat`` seconds; while it replays, or
    within a snapshot, only where nothing else is to be said.

    ``load`` tells what the engine has to do. ``notifier`` wakes when there is more to read, or ``draining`` has
    changed. Raises what the Watch RPC documents.
    """
    reader = Watch(stream, order)
    yield WatchBegins(reader.state, reader.cursor)
    clock = asyncio.get_running_loop().time
    heartbeat_at = clock() + heartbeat
    while not reader.complete:
        # Taken before the look, so that nothing can come unheard between look and wait.
        change = notifier.next_change()
        if draining() and order.mode is not WatchMode.REPLAY:
            raise ServerDraining("the server drains: read on from the cursor at another time or place")
        ended = stream.ended
        part = await reader.next_part()
        if part is None and ended:
            raise ServerDraining("the publisher of this stream was shut down or replaced: look for its successor")
        if part is not None:
            yield part
        due = clock() >= heartbeat_at
        if due and (part is None or (isinstance(part, Batches) and order.mode is not WatchMode.REPLAY)):
            yield replace(reader.heartbeat(), load=load())
            heartbeat_at = clock() + heartbeat
        elif part is None:
            await asyncio.wait((change,), timeout=heartbeat_at - clock())


def check_order(stream: EventStream, order: WatchOrder) -> None:
    """Raises what is wrong with an order for this stream as it stands."""
    raise_if(list(_violations(order)))
    if order.mode is WatchMode.SNAPSHOT and stream.recorder is None:
        raise FeatureDisabled(
            "events: no snapshot is kept here: remove snapshots=false from the publisher's configuration",
            metadata={"feature": "events.snapshots", "howToEnable": "events: snapshots: true"},
        )
    if order.log_id and order.log_id != stream.log_id:
        raise StaleLog(
            f"log {order.log_id!r} is not the current one, {stream.log_id}: rebuild from the current log",
            metadata={"requestLog": order.log_id, "currentLog": stream.log_id},
        )
    oldest = stream.journal.oldest_sequence
    upcoming = stream.next_sequence
    for sequence, limit in ((order.first, upcoming), (order.last, upcoming - 1)):
        if sequence is None:
            continue
        if sequence > limit:
            raise EventsSequenceInFuture(
                f"sequence {sequence} was not published yet, the next is {upcoming}: is the cursor of this log?",
                metadata={"log": stream.log_id, "requestedSequence": sequence, "nextSequence": upcoming},
            )
        if sequence < oldest:
            raise compacted(stream.log_id, sequence, oldest, upcoming)


def _violations(order: WatchOrder) -> list[Violation]:
    found = []
    if order.last is not None and order.mode is not WatchMode.REPLAY:
        found.append(Violation("end_sequence", "absent but in WATCH_MODE_REPLAY", order.last))
    if order.first is not None and order.mode not in (WatchMode.REPLAY, WatchMode.TAIL):
        rule = f"absent in WATCH_MODE_{order.mode.name}, which begins by itself"
        found.append(Violation("from_sequence", rule, order.first))
    if order.first is not None and order.last is not None and order.last < order.first:
        found.append(Violation("end_sequence", f"at least from_sequence = {order.first}", order.last))
    return found
