"""Keeps the state of a cache beside its journal, and shares cuts of it among the readers who want a snapshot.

The publisher hands over what it has published and folds it when it has nothing else to do, so that live events never
wait for it; past a bound it folds first, so that nothing is ever lost to the state.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvgrpc.errors import TooManyRequests
from kvgrpc.events.codec import BatchEncoder, Dialect, Encoding, decode_batch
from kvgrpc.events.log.digest import CHECKPOINT_BATCHES, StateDigest
from kvgrpc.events.log.journal import MAX_BATCH_BYTES, DroppedRange
from kvgrpc.events.log.snapshot import CachedBlock, CacheState, Cut, named_event, stored_event
from kvgrpc.events.model import BlockStored, KVEventBatch
from kvgrpc.observability import metrics

# What may wait to be folded: some milliseconds of work.
WAITING_BATCHES = 256
WAITING_BYTES = 1 * 2**20
# What a part is aimed at, by an estimate, and what it is not above once encoded, unless it is one run: that may be as
# large as a batch. A gRPC client that nobody configured takes 4 MiB, and would never heal beyond it.
PART_BYTES = 512 * 1024
MAX_PART_BYTES = 2**20
_RUN_BYTES = 160
_BLOCK_BYTES = 16
# Snapshots that readers still read; each holds its encoded parts, and the shards that the state has changed since.
# Where there are so many, one that nobody reads on, or that has been read for long, gives way to the next reader's.
MAX_SNAPSHOTS = 4
STALLED_SECONDS = 5.0
LONGEST_SECONDS = 60.0
# Blocks that are encoded before the interpreter is left to others, and for how long: an engine thread that waits for it
# would otherwise wait for its switch interval of 5 ms.
_SLICE_BLOCKS = 512
_PAUSE_SECONDS = 0.0001
_RETRY_SECONDS = 1.0

_Run = tuple[list[CachedBlock], BlockStored]


class Recorder:
    """The state of one stream. Thread-safe."""

    def __init__(self, dialect: Dialect, rank: int) -> None:
        self._dialect = dialect
        self._rank = rank
        self._lock = threading.Lock()
        self._state = CacheState()
        self._waiting: deque[bytes | DroppedRange] = deque()
        # The first is written by the publisher's thread alone, the second under the lock.
        self._added_bytes = self._folded_bytes = 0
        self._digest = self._checkpoint = self._state.digest()
        self._snapshots: weakref.WeakSet[SnapshotCut] = weakref.WeakSet()

    def digest(self, next_sequence: int) -> StateDigest:
        """One that a reader who has all before ``next_sequence`` can compare: the latest, if it has not passed it yet;
        else that of a checkpoint, which it has kept."""
        latest = self._digest
        return latest if latest.next_sequence >= next_sequence else self._checkpoint

    def add(self, entries: Sequence[bytes | DroppedRange]) -> None:
        """Takes what was published, in sequence. For the publisher's thread; an append."""
        self._waiting.extend(entries)
        self._added_bytes += sum(len(entry) for entry in entries if not isinstance(entry, DroppedRange))

    def catch_up(self) -> None:
        """Folds what waits, if it is too much. For the publisher's thread."""
        if len(self._waiting) > WAITING_BATCHES or self._added_bytes - self._folded_bytes > WAITING_BYTES:
            while self.fold():
                pass

    def fold(self) -> bool:
        """Folds one batch that waits; False: none did."""
        with self._lock:
            if not self._fold_one():
                return False
            if self._state.next_sequence % CHECKPOINT_BATCHES == 0:
                self._digest = self._checkpoint = self._state.digest()
            elif not self._waiting:
                self._digest = self._state.digest()
            return True

    def snapshot(self, oldest_useful: int, *, without_tokens: bool = False) -> SnapshotCut:
        """A snapshot at ``oldest_useful`` or later: the one that others read, or a new one. May take milliseconds.
        ``without_tokens``: it names blocks alone.

        Raises TooManyRequests when others read too many older ones just now.
        """
        while self.fold():
            pass
        with self._lock:
            for snapshot in list(self._snapshots):
                if snapshot.next_sequence >= oldest_useful and snapshot.without_tokens == without_tokens:
                    return snapshot
            if len(self._snapshots) >= MAX_SNAPSHOTS and not self._give_up_one():
                raise TooManyRequests(
                    f"readers still read {len(self._snapshots)} older snapshots",
                    metadata={"limit": MAX_SNAPSHOTS, "value": len(self._snapshots) + 1, "scope": "snapshots"},
                    retry_after=_RETRY_SECONDS,
                )
            encoder = BatchEncoder(self._dialect, Encoding.MAP, self._rank)
            snapshot = SnapshotCut(self._state.cut(), encoder, without_tokens=without_tokens)
            self._snapshots.add(snapshot)
            return snapshot

    def _give_up_one(self) -> bool:
        now = time.monotonic()
        stalled = min(self._snapshots, key=lambda snapshot: snapshot.read_at, default=None)
        oldest = min(self._snapshots, key=lambda snapshot: snapshot.cut_at, default=None)
        if stalled is not None and now - stalled.read_at >= STALLED_SECONDS:
            gone = stalled
        elif oldest is not None and now - oldest.cut_at >= LONGEST_SECONDS:
            gone = oldest
        else:
            return False
        self._snapshots.discard(gone)
        gone.give_up()
        return True

    def _fold_one(self) -> bool:
        try:
            entry = self._waiting.popleft()
        except IndexError:
            return False
        state = self._state
        if isinstance(entry, DroppedRange):
            state.next_sequence = entry.last + 1
            return True
        self._folded_bytes += len(entry)
        state.next_sequence += 1
        with contextlib.suppress(msgspec.DecodeError):
            metrics.EVENTS_UNKNOWN.inc(state.apply(decode_batch(entry).events))
        return True


class SnapshotGivenUp(Exception):
    """A snapshot was not read on for so long that others needed its place."""


class SnapshotCut:
    """A cut in parts, each encoded once for all readers, by the one that comes to it first. Thread-safe."""

    def __init__(self, cut: Cut, encoder: BatchEncoder, *, without_tokens: bool = False) -> None:
        self.next_sequence = cut.next_sequence
        self.copies = cut.copies
        self.digest = cut.digest
        self._encoder = encoder
        self._lock = threading.Lock()
        self._parts: list[bytes] = []
        self.without_tokens = without_tokens
        self._event = named_event if without_tokens else stored_event
        self._rest = _parts_of(cut, self._event)
        self._complete = False
        self._given_up = False
        self.cut_at = self.read_at = time.monotonic()
        """When it was cut, and when a part was last asked for."""

    def give_up(self) -> None:
        """Lets go of what it holds; ``part`` raises from now on."""
        with self._lock:
            self._given_up = True
            self._parts, self._rest = [], iter(())

    def part(self, index: int) -> tuple[bytes, bool]:
        """A part (0, 1, ...) as the payload of a batch of tagged maps, and whether it is the last.

        Takes milliseconds; call it on a thread that may wait. Raises SnapshotGivenUp where another one is to be begun.
        """
        self.read_at = time.monotonic()
        with self._lock:
            if self._given_up:
                raise SnapshotGivenUp
            # One more than asked for: only then is it known whether it is the last.
            while len(self._parts) <= index + 1 and not self._complete:
                self._encode_next()
            return self._parts[index], self._complete and index == len(self._parts) - 1

    def _encode_next(self) -> None:
        runs = next(self._rest, None)
        # There is always one part, so that an empty state is said too.
        self._complete = runs is None
        if runs is not None or not self._parts:
            self._encode(runs or [])

    def _encode(self, runs: list[_Run]) -> None:
        """Encodes one part, or several where it is too large: nobody knows before what else blocks have to say."""
        payload = self._payload_of(runs)
        if len(payload) <= MAX_PART_BYTES or (len(runs) == 1 and not self._is_halved(runs[0][0], len(payload))):
            self._parts.append(payload)
            return
        if len(runs) == 1:
            # The half of a run is a run.
            (blocks, _), middle = runs[0], len(runs[0][0]) // 2
            runs = [(half, self._event(half)) for half in (blocks[:middle], blocks[middle:])]
        middle = len(runs) // 2
        self._encode(runs[:middle])
        self._encode(runs[middle:])

    def _is_halved(self, blocks: list[CachedBlock], size: int) -> bool:
        """True if a run of this size is: each half says again what all blocks have in common, which may be most of it.
        So only what no client takes, and not where one block alone is as bad."""
        if size <= MAX_BATCH_BYTES or len(blocks) == 1:
            return False
        first = blocks[:1]
        return len(self._payload_of([(first, self._event(first))])) <= MAX_BATCH_BYTES

    def _payload_of(self, runs: list[_Run]) -> bytes:
        return self._encoder.encode(KVEventBatch(time.time(), [event for _, event in runs]))


def _parts_of(cut: Cut, event_of: Callable[[list[CachedBlock]], BlockStored]) -> Iterator[list[_Run]]:
    part: list[_Run] = []
    size = blocks = 0
    for run in cut.runs():
        part.append((run, event_of(run)))
        tokens = sum(len(block.tokens) for block in run) if event_of is stored_event else 0
        size += _RUN_BYTES + _BLOCK_BYTES * len(run) + tokens
        blocks += len(run)
        if blocks >= _SLICE_BLOCKS:
            time.sleep(_PAUSE_SECONDS)
            blocks = 0
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part
