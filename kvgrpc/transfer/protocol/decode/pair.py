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
    """One incarnation of one prefill rank, as decode knows it.

    ``up``: it welcomed us on the current stream. ``welcomed``: it did so at least once. ``lost``: it was given up.
    ``dead_at``: the tick at which it was proven dead (4, proof of death). ``connected_at``: the tick since which the
    connection of the current stream stands, before it is welcomed; ``reached_at``: until when an earlier one of the
    present wait stood. ``silent``: it was told that nothing is heard. ``drained``: it said that it leaves.

    ``connections``: over which its bytes could still arrive when it was proven dead; None: nobody could tell yet (8,
    pages by evidence). ``open_connections``: what was told last, ``next_ask_at``: when it is asked again.
    ``layout``: of its engine, ``layers``: its own; None: as ours. ``rooms``: what is not over yet; ``pending_rooms``:
    what is to be told. ``verify``: it sends checksums. ``refusals``: rooms that were refused here, of which the peer is
    told why until it answers.
    """

    __slots__ = (
        "address",
        "backoff",
        "broken_at",
        "connected_at",
        "connections",
        "dead_at",
        "dialled_at",
        "drained",
        "heard_at",
        "idle_timeout",
        "layers",
        "layout",
        "lost",
        "next_ask_at",
        "next_dial_at",
        "open_connections",
        "pending_rooms",
        "reached_at",
        "ref",
        "refusals",
        "rooms",
        "silent",
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
        self.up = self.welcomed = self.lost = self.verify = self.silent = self.drained = False
        self.heard_at = self.dialled_at = self.next_dial_at = self.up_since = now
        self.broken_at: int | None = None
        self.connected_at: int | None = None
        self.reached_at = 0
        self.waiting_since: int | None = now
        self.dead_at: int | None = None
        self.backoff = 0
        self.idle_timeout = 0
        self.connections: frozenset[str] | None = frozenset()
        self.open_connections: frozenset[str] | None = frozenset()
        self.next_ask_at = 0
        self.pending_rooms: dict[RoomKey, None] = {}
        self.rooms: dict[RoomKey, None] = {}
        self.refusals: dict[RoomKey, Failure] = {}

    @property
    def state(self) -> SessionState:
        """The state that tables show."""
        if self.dead_at is not None:
            return SessionState.DEAD
        if self.silent:
            return SessionState.SILENT
        if self.up:
            return SessionState.OPEN
        if self.lost:
            return SessionState.LOST
        return SessionState.BROKEN if self.welcomed else SessionState.CONNECTING

    def dial(self, number: int, now: int, timing: Timing) -> Stream:
        """A new stream, the only one that counts from now on."""
        self.end_stream()
        self.stream = Stream(self, number)
        self.dialled_at = now
        longest = timing.longest_backoff if self.lost else timing.welcome_within // 2
        self.backoff = min(longest, self.backoff * 2 or timing.first_backoff)
        self.next_dial_at = now + self.backoff
        return self.stream

    def connect(self, now: int) -> None:
        """The peer's host and process answer on the current stream's connection; its interpreter did not yet."""
        if not self.up and self.connected_at is None:
            self.connected_at = now

    @property
    def heard_or_reached_at(self) -> int | None:
        """Since when a peer whose connection stands is silent; None: no connection stands."""
        return self.heard_at if self.up else self.connected_at

    def welcome(self, now: int, idle_timeout: int) -> None:
        """``idle_timeout``: after how many ticks without a word the peer is given up, as it said itself."""
        self.up = self.welcomed = True
        self.idle_timeout = idle_timeout
        self.lost = False
        self.broken_at = self.waiting_since = self.connected_at = None
        self.heard_at = self.up_since = now

    def broke(self, now: int, timing: Timing) -> None:
        """The stream ended; the next dial is due at once, unless streams break as soon as they are welcomed."""
        if self.up and now - self.up_since > timing.connect_within:
            self.backoff = 0
            self.next_dial_at = now
        # A front that takes every connection and ends it at once is no sign of the peer.
        if self.connected_at is not None and now - self.connected_at > timing.welcome_within:
            self.reached_at = now
        self.end_stream()
        if self.broken_at is None:
            self.broken_at = timing.break_counts_from(now, self.heard_at)

    def wait(self, now: int) -> None:
        """A room is to join this pair. One that is not up is given up unless welcomed in the time of a first dial, and
        one that broke while it had no room unless welcomed as soon as after a break now."""
        if not self.rooms and not self.lost and self.broken_at is not None:
            self.broken_at = max(self.broken_at, now)
        if not self.up and self.waiting_since is None:
            self.waiting_since = now
            if self.lost:
                self.next_dial_at = now

    @property
    def owes_redial(self) -> bool:
        """It broke and was not dialled since: whether the peer is dead is known before the next room needs it. One that
        said it leaves is not asked."""
        return self.welcomed and not self.up and not self.lost and not self.drained and self.dialled_at <= self.up_since

    def end_stream(self) -> Stream | None:
        """Nothing of the stream counts any more; the stream that is to be closed, if there is one."""
        stream, self.stream = self.stream, None
        self.up = False
        self.connected_at = None
        return stream

    def is_dialling(self, now: int, timing: Timing) -> bool:
        """A dial is under way that may still be answered."""
        return self.stream is not None and self._is_dialling_within(timing.abandon_dial, now, timing)

    def dial_is_due(self, now: int, timing: Timing) -> bool:
        """For a pair that is not up."""
        if self.stream is None:
            return now >= self.next_dial_at
        within = max(timing.abandon_dial, self.backoff if self.lost else 0)
        return not self._is_dialling_within(within, now, timing)

    def _is_dialling_within(self, ticks: int, now: int, timing: Timing) -> bool:
        if self.connected_at is not None:  # another dial would get no further
            return now - self.connected_at <= timing.silence
        return now - self.dialled_at <= ticks

    def is_well(self, now: int, silent_after: int) -> bool:
        """True while it was heard of so lately that a tick has nothing to do for it: there may be many such pairs."""
        quiet = now - self.heard_at
        return self.up and not self.silent and quiet <= silent_after and quiet <= self.idle_timeout

    def given_up(self, now: int, timing: Timing) -> str:
        """Returns how the pair was lost by now; empty: it was not (rule 3, break and loss)."""
        if self.up:
            silent = now - self.heard_at > self.idle_timeout
            return _SILENT.format(timing.milliseconds(self.idle_timeout)) if silent else ""
        how = ""
        if self.waiting_since is not None:
            how = self._unreached(self.waiting_since, timing.connect_within, "", now, timing)
        if not how and self.broken_at is not None and self.welcomed and not self.lost:
            how = self._unreached(self.broken_at, timing.welcome_within, " of a break", now, timing)
        return how

    def _unreached(self, since: int, limit: int, of_what: str, now: int, timing: Timing) -> str:
        if now - since > timing.silence:
            return _SILENT.format(timing.milliseconds(timing.silence))
        over = self.connected_at is None and now - max(since, self.reached_at) > limit
        return f"not reached within {timing.milliseconds(limit)} ms{of_what}" if over else ""


_SILENT = "not a word for {} ms, though its connection stood"
