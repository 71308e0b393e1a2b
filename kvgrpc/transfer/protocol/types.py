"""The words of a hand-off, shared by both cores: keys, states, handles, times and bounds. Pure: no I/O, no clock.

The rules behind them are numbered in docs/session.md; a number in a comment here or in the cores is one of those.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

from msgspec import Meta, Struct

from kvgrpc.errors import Failure, KvGrpcError
from kvgrpc.fields import Count, bounded
from kvgrpc.model import Layout, RankRef
from kvgrpc.transfer.protocol.destination import Destination as Destination
from kvgrpc.transfer.protocol.destination import U32Array as U32Array

MAX_ROOM = 2**63 - 1
# Below it are counters, times (nanoseconds too) and snowflakes of these years: who has one guesses the next. Of
# 63 random bits a quarter is: only how soon a misfit is said depends on it (docs/roles.md, between ranks).
HARDLY_GUESSED = 2**61


class RoomKey(Struct, frozen=True, order=True, gc=False):
    """One hand-off: the router's room (1 to 2^63-1) and its attempt (0 unless the router retries).

    ``place``: at a prefill rank that owes the room to several decode ranks, which of them; no other side knows it.
    """

    room: int
    attempt: int = 0
    place: int = 0

    def at(self, place: int) -> RoomKey:
        """The same room for another decode rank that it is owed to."""
        return RoomKey(self.room, self.attempt, place)


class KVPoll(enum.IntEnum):
    """The answers of ``poll()`` of a sender or receiver; the numbers are the engines'."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


class Want(enum.IntEnum):
    """Decode's wish for a room; it only rises. OPENED is never sent."""

    OPENED = 0
    ANNOUNCE = 1
    WRITE = 2
    STOP = 3
    FORGET = 4


class RoomState(enum.IntEnum):
    """The progress of a room, or of one part of it."""

    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4
    FAILED = 5


class Writes(enum.IntEnum):
    """Says if the writer may still write into the room's pages. The value only advances (rule 7, writes)."""

    OPEN = 1
    UNKNOWN = 2
    STOPPED = 3
    SETTLED = 4


# Members by name, for the hot paths: reading one off its class costs more than the comparison (CPython 3.11).
STATE_BOOTSTRAPPING: Final = RoomState.BOOTSTRAPPING
STATE_WAITING_FOR_INPUT: Final = RoomState.WAITING_FOR_INPUT
STATE_TRANSFERRING: Final = RoomState.TRANSFERRING
STATE_SUCCESS: Final = RoomState.SUCCESS
STATE_FAILED: Final = RoomState.FAILED
POLL_FAILED: Final = KVPoll.Failed
POLL_BOOTSTRAPPING: Final = KVPoll.Bootstrapping
POLL_WAITING_FOR_INPUT: Final = KVPoll.WaitingForInput
POLL_TRANSFERRING: Final = KVPoll.Transferring
POLL_SUCCESS: Final = KVPoll.Success
WRITES_OPEN: Final = Writes.OPEN
WRITES_UNKNOWN: Final = Writes.UNKNOWN
WRITES_STOPPED: Final = Writes.STOPPED
WRITES_SETTLED: Final = Writes.SETTLED
WANT_OPENED: Final = Want.OPENED
WANT_ANNOUNCE: Final = Want.ANNOUNCE
WANT_WRITE: Final = Want.WRITE
WANT_STOP: Final = Want.STOP
WANT_FORGET: Final = Want.FORGET


class Align(enum.Enum):
    """Pages match in one of two ways when prefill sends more than decode wants: which end counts from the same page."""

    HEAD = "head"
    TAIL = "tail"


ALIGN_HEAD: Final = Align.HEAD
ALIGN_TAIL: Final = Align.TAIL


class Handle(Struct, eq=False):
    """The state of an engine's sender or receiver: written by the core's thread, read by any thread without a lock.

    ``poll`` is terminal once Success or Failed; ``failure`` is set before ``poll`` turns Failed. ``release_safe``: no
    write can reach the room's pages any more. ``prefix_pages``: pages that decode already holds, None until it has
    named its own (senders only). ``pages_done``: pages in place, a prefix of them. ``prefill_ready``: every sender
    that owes the room is there (receivers only). ``aborted`` is the one field that the engine's thread writes.
    ``began``: when it was made (s). ``on_change`` is called after ``poll`` or ``release_safe`` changed.
    """

    aborted: Failure | None = None
    began: float = 0.0
    poll: KVPoll = KVPoll.Bootstrapping
    failure: Failure | None = None
    release_safe: bool = False
    prefix_pages: int | None = None
    pages_done: int = 0
    prefill_ready: bool = False
    on_change: Callable[[], None] | None = None

    def turn(self, poll: KVPoll) -> None:
        self.poll = poll
        if self.on_change is not None:
            self.say_change()

    def release(self) -> None:
        self.release_safe = True
        if self.on_change is not None:
            self.say_change()

    def note_prefix(self, pages: int) -> None:
        self.prefix_pages = pages

    def note_done(self, pages: int) -> None:
        self.pages_done = pages

    def note_prefill_ready(self) -> None:
        self.prefill_ready = True
        if self.on_change is not None:
            self.say_change()

    def fail(self, failure: Failure) -> None:
        self.failure = failure
        self.turn(POLL_FAILED)

    def say_change(self) -> None:
        """Calls ``on_change`` where it is set, which is rare."""
        on_change = self.on_change
        if on_change is not None:
            if self.release_safe and (self.poll is POLL_SUCCESS or self.poll is POLL_FAILED):
                self.on_change = None  # the last change: whoever listens is not kept alive by what it listens to
            on_change()


@dataclass(frozen=True, slots=True)
class Target:
    """A prefill rank that owes decode a part of a room: where it listens ("host:port"), the layout of its engine, and
    the layers that it has, in order; None: the same as ours.
    """

    ref: RankRef
    address: str
    layout: Layout | None = None
    layers: tuple[int, ...] | None = None


class LostPair(NamedTuple):
    """A pair that was given up, why, and how many rooms it had."""

    ref: RankRef
    how: str
    rooms: int


class DecodeEntry(Struct, frozen=True, gc=False):
    """The latest state of one room at decode, as it travels. ``error``: what was wrong with it (15, hostile frames)."""

    key: RoomKey
    want: Want
    destination: Destination | None = None
    time_left_ms: int = 0
    failure: Failure | None = None
    traceparent: str = ""
    error: KvGrpcError | None = None


class PrefillEntry(Struct, frozen=True, gc=False):
    """The latest state of one part at prefill, as it travels."""

    key: RoomKey
    state: RoomState
    writes: Writes
    pages_done: int = 0
    aux: bytes = b""
    failure: Failure | None = None
    checksums: bytes = b""


class SessionState(enum.IntEnum):
    """The state of a pair's session."""

    CONNECTING = 1
    OPEN = 2
    BROKEN = 3
    LOST = 4
    DEAD = 5
    SILENT = 6


Ticks = Annotated[int, Meta(ge=1, extra={"unit": "ticks"})]


@dataclass(frozen=True, slots=True)
class Timing:
    """All times of a session. Ticks, of ``tick_seconds`` each, are counted by the owner's loop while it runs: a process
    that was stopped has not aged (rule 3, break and loss)."""

    tick_seconds: Annotated[float, bounded(least=0.001, most=10.0, unit="seconds")] = 0.1
    """Length of a tick, in seconds. All others are whole numbers of ticks."""
    heartbeat: Ticks = 3
    """Something is said at least this often while a room of the pair is open; a third as often while none is."""
    ping_interval: Ticks = 10
    """After so long without a byte gRPC pings a connection: its C++ threads do, on either side, also while the
    interpreter is held, and once a second at most."""
    ping_timeout: Ticks = 20
    """A ping that was not answered within this ends the connection."""
    connect_within: Ticks = 30
    """A first dial gets so long to connect."""
    welcome_within: Ticks = 10
    """After a break the pair is given up unless it is connected again within this."""
    idle_timeout: Ticks = 600
    """A peer whose connection stands is given up after so long without a word, of Welcome too."""
    settle: Ticks = 20
    """Bytes that were on their way when a writer stopped may land for this long; then its pages come back."""
    first_backoff: Ticks = 2
    """Pause before the second dial; it doubles from dial to dial."""
    longest_backoff: Ticks = 50
    """The longest pause between two dials of a pair that was given up."""
    abandon_dial: Ticks = 10
    """A dial that was not answered within this is replaced by another."""
    room_deadline: Ticks = 3000
    """A receiver may take this long until ``init``, and again from it; a sender to meet its decode."""
    unclaimed: Ticks = 3000
    """A room that decode named waits this long at most for its local sender."""
    unnamed_after_loss: Ticks = 3000
    """After a decode was lost a sender waits this long at most for any decode to name its room; for engines whose
    router asks both sides at once, which SGLang's do (prefill)."""
    ended_record: Ticks = 600
    """What ended is remembered this long for a decode that comes back, or a late sender."""
    probe: Ticks = 100
    """Of a decode to which too many writes had an unknown end one room is taken this often (prefill)."""

    @property
    def silence(self) -> int:
        """The longest time that a peer may be silent: never longer than a room may take."""
        return min(self.idle_timeout, self.room_deadline)

    @property
    def quiet_heartbeat(self) -> int:
        """Something is said at least this often where no room is open: before gRPC pings, and thrice, at least, before
        silence is shown or ends a pair."""
        return max(self.heartbeat, min(3 * self.heartbeat, self.ping_interval - 1, self.idle_timeout // 3))

    @property
    def silent_after(self) -> int:
        """A peer of which so many heartbeats are missing is shown as silent."""
        return 10 * self.heartbeat

    def break_counts_from(self, now: int, heard_at: int) -> int:
        """From when on a broken pair has its time to come back. gRPC pings at times of its own: where the peer had been
        silent, the break came 2 to 3 s after its last word, and counts as if it were 3."""
        unanswered = now - heard_at > self.ping_timeout // 2
        return max(now, heard_at + self.ping_interval + self.ping_timeout) if unanswered else now

    def ticks(self, milliseconds: int) -> int:
        return max(1, round(milliseconds / 1000 / self.tick_seconds))

    def milliseconds(self, ticks: int) -> int:
        return round(ticks * self.tick_seconds * 1000) if ticks > 0 else 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one rank; past one a room fails TOO_MANY_REQUESTS (or PAGES_HELD), nothing grows."""

    rooms: Count = 131_072
    """Rooms that are known at a time, ended ones that are remembered included."""
    unclaimed_per_session: Count = 4_096
    """Rooms that one decode rank named and no local sender claimed, until they are forgotten (prefill)."""
    unclaimed: Count = 65_536
    """Rooms that all decode ranks together named and no local sender claimed (prefill); also refused ones."""
    ended_records: Count = 65_536
    """Ended rooms that are remembered; past it the oldest is forgotten (prefill)."""
    known_streams: Count = 65_536
    """Decode incarnations whose largest stream number is remembered; the oldest goes first (prefill)."""
    held_pages: Count = 2**32
    """Pages that wait for the evidence of one peer that it writes no more (decode): past it rooms of this peer are
    refused. All rooms are when two peers are past it. A rank lowers it to a quarter of its first pool."""
    chunks_per_room: Count = 65_536
    """Sends of one room that wait for its destination (prefill)."""
    aux_bytes: Count = 65_536
    """Aux of one room, in bytes."""
    unknown_writes: Count = 16
    """Writes to one decode incarnation of which nobody knows whether they ended; past it its rooms are refused, but for
    one a ``Timing.probe`` (prefill)."""


PAST_FAILURES = 256  # rooms that people may still ask about
LONGEST_TRACEPARENT = 55  # characters; what W3C allows


def room_from_transfer_id(transfer_id: str) -> int:
    """A room number (1 to 2^63-1) from a string id such as vLLM's: the same on every host and in every version."""
    digest = hashlib.sha256(transfer_id.encode()).digest()
    return (int.from_bytes(digest[:8], "big") & MAX_ROOM) or 1


def prefill_dp(room: int, dp_size: int) -> int:
    """Returns which dp rank of prefill serves a room unless the router says otherwise: ``room % dp``."""
    return room % dp_size
