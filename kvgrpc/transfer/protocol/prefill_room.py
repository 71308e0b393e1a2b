"""The record of one (room, attempt) at prefill: which chunks came, where they go, how their writes ended. Pure.

Numbers in comments are the rules of docs/session.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Failure, KvGrpcError
from kvgrpc.transfer.protocol import failures
from kvgrpc.transfer.protocol.coverage import Coverage
from kvgrpc.transfer.protocol.prefill_pair import PrefillPair
from kvgrpc.transfer.protocol.types import (
    STATE_BOOTSTRAPPING,
    WANT_OPENED,
    WRITES_OPEN,
    WRITES_SETTLED,
    WRITES_STOPPED,
    WRITES_UNKNOWN,
    Align,
    Destination,
    Handle,
    RoomKey,
    U32Array,
)

# By Outcome: FAILED_UNKNOWN, FAILED_SRC_FREE, REJECTED, DONE (7).
_WRITES_AFTER = (WRITES_UNKNOWN, WRITES_STOPPED, WRITES_SETTLED, WRITES_SETTLED)


@dataclass(slots=True, eq=False)
class Chunk:
    """Pages of one ``send``: uint32 pages of prefill's pool for the positions start, start + 1, … of the room.

    ``wait`` runs on the worker before the pages are read (an engine's "forward is done" event).
    """

    pages: U32Array
    start: int
    is_last: bool
    wait: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class Submission:
    """One write for the data plane: our page ``source[i]`` goes to the owner's ``destination[i]``, at start + i."""

    record: PrefillRoom
    pair: PrefillPair
    source: U32Array
    destination: U32Array
    start: int
    wait: Callable[[], None] | None = None


class PrefillRoom:
    """Made by whoever names the room first, a decode or a local sender (10).

    ``claimed``: a local sender came, ever. ``owner``: the decode it is owed to. ``unclaimed``: an owner waits for a
    sender. ``chunks`` wait for the destination; ``pending`` writes run; ``worst``: how the writes so far ended (7).
    """

    __slots__ = (
        "align",
        "aux",
        "chunks",
        "claimed",
        "coverage",
        "created_at",
        "destination",
        "done",
        "ended",
        "expected_pages",
        "failure",
        "forgotten",
        "handle",
        "key",
        "last_seen",
        "owner",
        "pending",
        "state",
        "traceparent",
        "unclaimed",
        "want",
        "worst",
        "writes",
    )

    def __init__(self, key: RoomKey, now: int) -> None:
        self.key = key
        self.created_at = now
        self.handle: Handle | None = None
        self.claimed = False
        self.owner: PrefillPair | None = None
        self.unclaimed = False
        self.want = WANT_OPENED
        self.destination: Destination | None = None
        self.state = STATE_BOOTSTRAPPING
        self.ended = False
        self.failure: Failure | None = None
        self.writes = WRITES_OPEN
        self.worst = WRITES_SETTLED
        self.pending = 0
        self.chunks: list[Chunk] = []
        self.expected_pages: int | None = None
        self.align = Align.HEAD
        self.coverage = Coverage()
        self.done = Coverage()
        self.last_seen = False
        self.aux = b""
        self.traceparent = ""
        self.forgotten = False

    @property
    def sender_live(self) -> bool:
        """An engine's sender waits for the end."""
        return self.claimed and not self.ended

    @property
    def pages_done(self) -> int:
        return self.done.prefix

    def take(self, chunk: Chunk, chunks_at_most: int) -> KvGrpcError | None:
        """A chunk of the engine, to be placed when the destination is known; or what is wrong with it (13)."""
        start, count = chunk.start, len(chunk.pages)
        if len(self.chunks) >= chunks_at_most:
            return failures.too_many("chunks of one room", chunks_at_most, len(self.chunks))
        if self.last_seen:
            return failures.bad_send(self.key, "pages were sent after the last chunk", "index_slice", start)
        if not self.coverage.add(start, count):
            text = f"positions {start} to {start + count - 1} were sent before"
            return failures.bad_send(self.key, text, "index_slice", start)
        stop = self.coverage.stop
        if self.expected_pages is not None and stop > self.expected_pages:
            text = f"positions end at {stop}, init said {self.expected_pages} pages"
            return failures.bad_send(self.key, text, "index_slice", stop)
        if chunk.is_last:
            self.last_seen = True
            if self.expected_pages is None:
                self.expected_pages = stop
        self.chunks.append(chunk)
        return None

    def place(self) -> list[Submission]:
        """The writes of all chunks that wait; positions that decode does not want are dropped (13)."""
        destination, owner = self.destination, self.owner
        if destination is None or owner is None or not self.chunks:
            return []
        shift = self._shift(destination)
        if shift is None:
            return []
        chunks, self.chunks = self.chunks, []
        placed = [_place(self, owner, chunk, destination.pages, shift) for chunk in chunks]
        submissions = [submission for submission in placed if submission is not None]
        self.pending += len(submissions)
        return submissions

    def missing(self) -> KvGrpcError | None:
        """What decode wants, but will not come: the last chunk was seen (13)."""
        destination = self.destination
        if destination is None or not self.last_seen:
            return None
        shift, wanted = self._shift(destination), len(destination.pages)
        if shift is None or (shift >= 0 and self.coverage.covers(shift, shift + wanted)):
            return None
        page = 0 if shift < 0 else self.coverage.first_gap(shift) - shift
        text = f"the last chunk was sent, but decode's page {page} of {wanted} was not"
        return failures.bad_send(self.key, text, "pages", page)

    @property
    def complete(self) -> bool:
        """The last chunk was seen, and every page is in place."""
        destination = self.destination
        if destination is None or not self.last_seen or self.pending or self.chunks:
            return False
        return self.done.prefix >= len(destination.pages)

    def outcome(self, submission: Submission, outcome: Outcome) -> None:
        """One write ended."""
        self.pending -= 1
        self.worst = min(self.worst, _WRITES_AFTER[outcome])
        if outcome is Outcome.DONE:
            self.done.add(submission.start, len(submission.destination))

    def _shift(self, destination: Destination) -> int | None:
        """Which of our positions decode's first page is; None: not known yet, the total is open.

        Whoever sends more than decode wants, and decode has a prefix, sends the whole prompt.
        """
        first, wanted, total = destination.first_page, len(destination.pages), self.expected_pages
        if self.align is Align.HEAD and not first:
            return 0
        if total is None:
            return None
        if self.align is Align.HEAD:
            return first if total > wanted else 0
        return total - wanted


def _place(record: PrefillRoom, owner: PrefillPair, chunk: Chunk, pages: U32Array, shift: int) -> Submission | None:
    start = chunk.start - shift
    first = max(start, 0)
    stop = min(start + len(chunk.pages), len(pages))
    if first >= stop:
        return None
    source = chunk.pages[first - start : stop - start]
    return Submission(record, owner, np.ascontiguousarray(source), pages[first:stop], first, chunk.wait)
