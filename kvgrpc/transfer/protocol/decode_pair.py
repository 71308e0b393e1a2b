"""Decode's view of one incarnation of one prefill rank: when to dial it, and when to give it up. Pure.

Numbers in comments are the rules of docs/session.md; all times are ticks of our own loop (rule 3, break and loss).
"""

from __future__ import annotations

from kvgrpc.errors import Failure
from kvgrpc.transfer.protocol.types import RoomKey, SessionState, Target, Timing


class Stream:
    """One dialled stream of a pair. A pair has at most one that counts (rule 2, one stream)."""

    __slots__ = ("number", "pair")

    def __init__(self, pair: DecodePair, number: int) -> None:
        self.pair = pair
        self.number = number


class DecodePair:
    """What decode knows of one incarnation of one prefill rank.

    ``up``: it welcomed us on the current stream. ``welcomed``: it did so at least once. ``lost``: it was given up.
    ``dead_at``: the tick at which it was proven dead (4, proof of death).

    ``connections``: over which its bytes could still arrive when it was proven dead; None: nobody could tell yet (8,
    pages by evidence). ``open_connections``: what was told last, ``next_ask_at``: when it is asked again.
    ``layout``: of its engine, ``layers``: its own; None: as ours. ``rooms``: what is not over yet; ``pending_rooms``:
    what is to be told. ``verify``: it sends checksums. ``refusals``: rooms that were refused here, of which the peer is
    told why until it answers.
    """

    __slots__ = (
        "address",
        "ask_pause",
        "backoff",
        "broken_at",
        "connections",
        "dead_at",
        "dialled_at",
        "heard_at",
        "idle_timeout",
        "layers",
        "layout",
        "lost",
        "next_ask_at",
        "next_dial_at",
        "open_connections",
        "pending_rooms",
        "ref",
        "refusals",
        "rooms",
        "stream",
        "up",
        "up_since",
        "verify",
        "waiting_since",
        "welcomed",
    )

    def __init__(self, target: Target, now: int) -> None:
        self.ref = target.ref
        self.address = target.address
        self.layout, self.layers = target.layout, target.layers
        self.stream: Stream | None = None
        self.up = self.welcomed = self.lost = self.verify = False
        self.heard_at = self.dialled_at = self.next_dial_at = self.up_since = now
        self.broken_at: int | None = None
        self.waiting_since: int | None = now
        self.dead_at: int | None = None
        self.backoff = 0
        self.idle_timeout = 0
        self.connections: frozenset[str] | None = frozenset()
        self.open_connections: frozenset[str] | None = frozenset()
        self.next_ask_at = self.ask_pause = 0
        self.pending_rooms: dict[RoomKey, None] = {}
        self.rooms: set[RoomKey] = set()
        self.refusals: dict[RoomKey, Failure] = {}

    @property
    def state(self) -> SessionState:
        """As tables show it."""
        if self.dead_at is not None:
            return SessionState.DEAD
        if self.up:
            return SessionState.OPEN
        if self.lost:
            return SessionState.LOST
        return SessionState.BROKEN if self.welcomed else SessionState.CONNECTING

    def dial(self, number: int, now: int, timing: Timing) -> Stream:
        """A new stream, the only one that counts from now on."""
        self.up = False
        self.stream = Stream(self, number)
        self.dialled_at = now
        longest = timing.longest_backoff if self.lost else timing.welcome_within // 2
        self.backoff = min(longest, self.backoff * 2 or timing.first_backoff)
        self.next_dial_at = now + self.backoff
        return self.stream

    def welcome(self, now: int, idle_timeout: int) -> None:
        """``idle_timeout``: after how many ticks without a word the peer is given up, as it said itself."""
        self.up = self.welcomed = True
        self.idle_timeout = idle_timeout
        self.lost = False
        self.broken_at = self.waiting_since = None
        self.heard_at = self.up_since = now

    def broke(self, now: int, timing: Timing) -> None:
        """The stream ended; the next dial is due at once, unless streams break as soon as they are welcomed."""
        if self.up and now - self.up_since > timing.idle_timeout:
            self.backoff = 0
            self.next_dial_at = now
        self.end_stream()
        if self.broken_at is None:
            self.broken_at = now

    def wait(self, now: int) -> None:
        """A room needs this pair, which is not up: it is given up unless welcomed in the time of a first dial."""
        if not self.up and self.waiting_since is None:
            self.waiting_since = now
            if self.lost:
                self.next_dial_at = now

    def end_stream(self) -> Stream | None:
        """Nothing of the stream counts any more; the stream that is to be closed, if there is one."""
        stream, self.stream = self.stream, None
        self.up = False
        return stream

    def is_dialling(self, now: int, timing: Timing) -> bool:
        """A dial is under way that may still be answered."""
        return self.stream is not None and now - self.dialled_at <= timing.abandon_dial

    def dial_is_due(self, now: int, timing: Timing) -> bool:
        """For a pair that is not up."""
        if self.stream is None:
            return now >= self.next_dial_at
        return now - self.dialled_at > max(timing.abandon_dial, self.backoff if self.lost else 0)

    def given_up(self, now: int, timing: Timing) -> str:
        """How the pair was lost by now; empty: it was not (rule 3, break and loss)."""
        if self.up:
            limit, what, over = self.idle_timeout, "idle for {} ms", now - self.heard_at > self.idle_timeout
        elif self.waiting_since is not None and now - self.waiting_since > timing.idle_timeout:
            limit, what, over = timing.idle_timeout, "no welcome within {} ms", True
        elif self.broken_at is not None and self.welcomed and not self.lost:
            limit, what = timing.welcome_within, "no welcome within {} ms of a break"
            over = now - self.broken_at > timing.welcome_within
        else:
            return ""
        return what.format(timing.milliseconds(limit)) if over else ""
