"""Follows the log of one cache to its exact contents, whatever breaks: what to ask, and what each answer means.

Pure: no clock, thread or socket. ``FollowerCore`` is told what came and says which Watches to open and close; a shell
(``kvgrpc.client.following.follower``) makes the calls. docs/followers.md has the rules in prose, for clients in any
language.

What is shown is always a state that the cache really had. Where that is known to be over (another log is current, a
digest differs), nothing is shown until the new state is complete; where it is merely old (the reader fell behind), the
old one is shown until then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from kvgrpc.errors import (
    EventsCompacted,
    EventsSequenceInFuture,
    FeatureDisabled,
    InvalidRequest,
    KvGrpcError,
    StaleLog,
)
from kvgrpc.events.following.contents import CacheContents, portions
from kvgrpc.events.following.index import BlockIndex
from kvgrpc.events.following.messages import (
    LONGEST_PAUSE_SECONDS,
    CloseWatch,
    Command,
    FollowerCounts,
    FollowerState,
    LiveBuffer,
    Mode,
    OpenWatch,
    ResetLive,
    Retry,
)
from kvgrpc.events.following.saved import SavedCache
from kvgrpc.events.log.digest import StateDigest
from kvgrpc.model import EngineLoad

# An engine that nobody reaches must not attract requests for ever.
HIDE_AFTER_SECONDS = 30.0
# What connections that break are called; the second only once somebody answered, before it is what answers there.
_BREAKS = frozenset({"UNAVAILABLE", "CANCELLED", "ABORTED", "DEADLINE_EXCEEDED"})
_BREAKS_WITHIN = frozenset({"INTERNAL", "UNKNOWN"})
_MOVED_ON = (StaleLog, EventsSequenceInFuture, EventsCompacted)

Decode = Callable[[bytes], Iterable[object]]


@dataclass(slots=True)
class _Watch:
    number: int
    mode: Mode
    resumes: bool
    begun: bool = False


class FollowerCore:
    """One follower of one stream. ``live``: batches come over PUB, and Watches fill what PUB lost.

    ``decode`` gives the events of a payload and raises msgspec.DecodeError for what is no batch. ``now`` is seconds of
    any clock that does not go back. After each call ``take_commands`` says what to do, ``wake_at`` when to ``tick``.
    """

    def __init__(
        self, index: BlockIndex, decode: Decode, *, live: bool = False, jitter: Callable[[], float] = random.random
    ) -> None:
        self.log_id = ""
        self.contents: CacheContents | None = None
        self.known_next = 0
        self.heard_at: float | None = None
        self.last_error: Exception | None = None
        self.lasting = False
        self.counts = FollowerCounts()
        # What the publisher's engine has to do, as its last heartbeat said.
        self.load: EngineLoad | None = None
        self._index = index
        self._decode = decode
        self._live = live
        self._snapshots = True
        self._commands: list[Command] = []
        self._opened = 0
        self._main: _Watch | None = None
        self._fill: _Watch | None = None
        self._shadow: CacheContents | None = None
        self._shown = False
        self._expected: StateDigest | None = None
        self._buffer = LiveBuffer()
        self._promised = 0
        self._retry = Retry(jitter)
        self._hide_at: float | None = None
        self._moved_at = float("-inf")
        self._exact_at: float | None = None

    @property
    def state(self) -> FollowerState:
        """The relation of what is shown to the cache."""
        if self._shadow is not None:
            return FollowerState.REBUILDING
        if self._main is None or not self._main.begun or not self._shown:
            return FollowerState.CONNECTING
        if self.contents is not None and self.contents.doubtful_at is not None:
            return FollowerState.DOUBTFUL
        return FollowerState.CATCHING_UP if self.lag else FollowerState.CURRENT

    @property
    def next_sequence(self) -> int:
        """All batches of the log before it are in ``contents``."""
        return 0 if self.contents is None else self.contents.next_sequence

    @property
    def lag(self) -> int:
        """Batches that are known to be missing."""
        return max(0, self.known_next - self.next_sequence)

    @property
    def exact_at(self) -> float | None:
        """When the contents were last known to be those of the cache; None: never."""
        return self.heard_at if self.state is FollowerState.CURRENT else self._exact_at

    @property
    def wake_at(self) -> float | None:
        """When ``tick`` has something to do; None: not before something comes."""
        return min((at for at in (self._retry.at, self._hide_at) if at is not None), default=None)

    def take_commands(self) -> list[Command]:
        """Returns what is to be done now, in this order."""
        commands, self._commands = self._commands, []
        return commands

    def restore(self, log_id: str, contents: CacheContents) -> None:
        """Takes what was known of this log before; ahead of ``start``, which goes on from there."""
        self.log_id = log_id
        self._take_over(contents)

    def saved(self, engine: str, dp: int) -> SavedCache | None:
        """Returns what may be known again later; None where it is not exact, or hidden."""
        contents = self.contents
        if contents is None or not self._shown or not contents.whole or contents.doubtful_at is not None:
            return None
        return contents.saved(engine, dp, self.log_id)

    def start(self) -> None:
        """Begins; once."""
        self._connect()

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._hide_at is not None and now >= self._hide_at:
            self._hide_at = None
            self._show(False)
        if self._retry.at is not None and now >= self._retry.at:
            self._retry.at = None
            self._connect()

    def stop(self) -> None:
        """Leaves the index."""
        self._close_all()
        self._drop_shadow()
        self._forget()
        self._retry.at = self._hide_at = None

    # What Watches say.

    def begun(self, number: int, log_id: str, upcoming: int, first: int, now: float) -> None:
        """The first message: the log, the sequence of its next batch, and where this Watch begins."""
        watch = self._heard(number, now)
        if watch is None:
            return
        watch.begun, self.lasting = True, False
        if log_id != self.log_id:
            self._new_log(log_id)
        self.known_next = max(self.known_next, upcoming)
        if watch is self._fill:
            return
        self._hide_at = None
        if watch.mode is Mode.TAIL and self.contents is None:
            self._take_over(CacheContents(self._index, first, whole=first == 0))
        self._show(True)
        if watch.mode is Mode.HEARTBEAT:
            self._promised = upcoming
            self._drain(now)
            self._fill_before(upcoming)

    def batches(self, number: int, first: int, payloads: Sequence[bytes], now: float) -> None:
        """Batches in sequence from ``first`` on."""
        if self._heard(number, now) is None or self.contents is None:
            return
        for sequence, payload in enumerate(payloads, first):
            if not self._fold(sequence, payload, now):
                return
        self._go_live()

    def dropped(self, number: int, first: int, last: int, now: float) -> None:
        """Sequences without a batch; AllBlocksCleared follows them in the log."""
        if self._heard(number, now) is None or self.contents is None:
            return
        if first <= self.contents.next_sequence <= last:
            self.contents.advance(last + 1)
            self.known_next = max(self.known_next, last + 1)
            self._check(now)

    def snapshot(self, number: int, part: int, next_sequence: int, payloads: Sequence[bytes], now: float) -> None:
        """A part of a snapshot, batches in all; part 0 begins one, whatever came before."""
        for _ in self.snapshot_slices(number, part, next_sequence, payloads, now):
            continue

    def snapshot_slices(
        self, number: int, part: int, next_sequence: int, payloads: Sequence[bytes], now: float
    ) -> Iterator[None]:
        """Takes a ``snapshot`` in steps of a millisecond or two: between them others may have their turn. What else is
        told meanwhile counts; a Watch that ends takes the rest of the part with it."""
        if self._heard(number, now) is None:
            return
        if part == 0:
            self._drop_shadow()
            self._shadow = CacheContents(self._index, next_sequence)
        shadow = self._shadow
        if shadow is None:
            return
        try:
            for payload in payloads:
                for events in portions(self._decode(payload)):
                    self.counts.unknown += shadow.apply(events)
                    yield
                    if self._shadow is not shadow:
                        return
        except msgspec.DecodeError as error:
            self.counts.undecodable += 1
            self._fail(error, now)

    def snapshot_complete(self, number: int, state: StateDigest | None, now: float) -> None:
        """The last part came; ``state`` is what all parts must come to."""
        if self._heard(number, now) is None or self._shadow is None:
            return
        shadow, self._shadow = self._shadow, None
        if state is not None and shadow.digest() != state:
            self.counts.digests_different += 1
            shadow.blocks.drop()
            self._fail(ValueError(f"the snapshot at {state.next_sequence} does not come to its own digest"), now)
            return
        self.counts.snapshots += 1
        if state is not None and state.doubtful:
            # Its publisher cannot read what came either.
            shadow.doubtful_at = shadow.next_sequence
        self._take_over(shadow)
        self._go_live()

    def heartbeat(self, number: int, next_sequence: int, state: StateDigest | None, now: float) -> None:
        """Whoever has all before ``next_sequence`` is current; ``state`` is the digest of some sequence up to it."""
        watch = self._heard(number, now)
        if watch is None or self.contents is None:
            return
        self.known_next = max(self.known_next, next_sequence)
        if state is not None and self.contents.whole:
            self._expected = state
        if not self._check(now):
            return
        if watch.mode is Mode.HEARTBEAT:
            # What was published before the heartbeat before this one is not on its way any more.
            self._fill_before(self._promised)
            self._promised = next_sequence
        else:
            self._go_live()

    def ended(self, number: int, error: Exception | None, now: float) -> None:
        """A Watch ended: with the error that it told, or with None."""
        if self._fill is not None and number == self._fill.number:
            self._fill = None
            if error is None:
                self._drain(now)
                return
        elif self._main is None or number != self._main.number:
            return
        self._fail(error, now)

    def told_load(self, number: int, load: EngineLoad | None) -> None:
        """Takes what a heartbeat said of the engine."""
        if self._main is not None and self._main.number == number:
            self.load = load

    # What PUB says.

    def live(self, sequence: int, payload: bytes, now: float) -> None:
        """A frame of PUB. It has no log id, so it waits until a Watch says that the log is still the same."""
        if not self._live or self.contents is None:
            return
        following = self._main is not None and self._main.mode is Mode.HEARTBEAT
        if not self._buffer.put(sequence, payload):
            # Numbers that go back may be another log: ask again before anything of it counts.
            self._buffer.clear()
            self._commands.append(ResetLive())
            if following:
                self._close_all()
                self._open(Mode.HEARTBEAT, self.log_id)
        elif following and self._main is not None and self._main.begun:
            self._drain(now)

    # How it goes on.

    def _connect(self) -> None:
        if self.contents is None:
            self._rebuild()
        elif self._live and not self.lag:
            self._open(Mode.HEARTBEAT, self.log_id)
        else:
            self._open(Mode.TAIL, self.log_id, self.contents.next_sequence)

    def _rebuild(self) -> None:
        self._close_all()
        self._drop_shadow()
        if self._snapshots:
            self._open(Mode.SNAPSHOT)
        else:
            self._forget()
            self._open(Mode.TAIL)

    def _fail(self, error: Exception | None, now: float) -> None:
        """A Watch ended, or said what cannot be. Nothing ends a follower: docs/followers.md has the table."""
        main = self._main
        resumed = main is not None and main.resumes
        was_snapshot = main is not None and main.mode is Mode.SNAPSHOT
        self._exact_at = self.exact_at
        self.counts.failures += 1
        self.last_error = error
        self._close_all()
        self._drop_shadow()
        if isinstance(error, StaleLog | EventsSequenceInFuture):
            self._forget()
        if resumed and isinstance(error, _MOVED_ON) and now - self._moved_at > LONGEST_PAUSE_SECONDS:
            # Not again and again: two publishers behind one address would. Whoever answers next may keep snapshots.
            self._snapshots, self._moved_at = True, now
            self._rebuild()
        elif was_snapshot and self._snapshots and _keeps_none(error):
            self._snapshots = False
            self._rebuild()
        else:
            self.lasting = _is_lasting(error, heard=self.heard_at is not None)
            self._snapshots = self._snapshots or self.contents is None
            if self._shown and self._hide_at is None:
                self._hide_at = now + HIDE_AFTER_SECONDS
            self._retry.later(now, _asked_seconds(error))

    def _go_live(self) -> None:
        """Once it has caught up, PUB brings the rest."""
        main = self._main
        if not self._live or main is None or main.mode is Mode.HEARTBEAT or self.contents is None:
            return
        if self._shadow is None and not self.lag:
            self._close_all()
            self._open(Mode.HEARTBEAT, self.log_id)

    def _drain(self, now: float) -> None:
        """Takes what PUB brought and what fits; asks for what lies before the rest."""
        while self.contents is not None:
            self._buffer.forget_before(self.contents.next_sequence)
            payload = self._buffer.take(self.contents.next_sequence)
            if payload is None:
                break
            self._fold(self.contents.next_sequence, payload, now)
        if self.contents is not None and self._buffer.first is not None:
            self._fill_before(self._buffer.first)

    def _fill_before(self, sequence: int) -> None:
        if self.contents is None or self._fill is not None or self.contents.next_sequence >= sequence:
            return
        self.counts.gaps += 1
        self.counts.replays += 1
        self._fill = self._open(Mode.REPLAY, self.log_id, self.contents.next_sequence, sequence - 1)

    def _fold(self, sequence: int, payload: bytes, now: float) -> bool:
        """Takes one batch; one that is in already is passed over. False where what follows must not be taken."""
        contents = self.contents
        assert contents is not None
        if sequence < contents.next_sequence:
            return True
        if sequence > contents.next_sequence:
            self._fail(ValueError(f"a Watch went from {contents.next_sequence} to {sequence}"), now)
            return False
        try:
            doubtful_at = contents.doubtful_at
            self.counts.unknown += contents.apply(self._decode(payload))
            self.counts.doubts += contents.doubtful_at not in (None, doubtful_at)
        except msgspec.DecodeError as error:
            # What it said is lost, so what is shown is no state of the cache any more.
            self.counts.undecodable += 1
            self._forget()
            if self._snapshots:
                self._fail(error, now)
                return False
            # Asking again says the same.
            self.last_error = error
            self._take_over(CacheContents(self._index, sequence + 1, whole=False))
            return True
        contents.advance(sequence + 1)
        self.counts.batches += 1
        self.known_next = max(self.known_next, contents.next_sequence)
        return self._check(now)

    def _check(self, now: float) -> bool:
        """Compares with the digest that was told last, once its sequence is reached."""
        contents, expected = self.contents, self._expected
        if contents is None or expected is None or contents.next_sequence < expected.next_sequence:
            return True
        self._expected = None
        own = contents.digest_at(expected.next_sequence)
        if own is None:
            return True
        if own == expected:
            self.counts.digests_equal += 1
            if not expected.doubtful and contents.doubtful_at is not None:
                # Its publisher can read what came before, and the blocks are these.
                contents.doubtful_at = None if contents.doubtful_at < own.next_sequence else contents.doubtful_at
            return True
        if expected.doubtful and contents.doubtful_at is None:
            # It counts blocks that may be gone, by an event that was read here.
            return True
        self.counts.digests_different += 1
        self._forget()
        self._fail(ValueError(f"the contents at {expected.next_sequence} do not come to the publisher's digest"), now)
        return False

    def _new_log(self, log_id: str) -> None:
        if self.log_id:
            self.counts.new_logs += 1
            self._forget()
            self._commands.append(ResetLive())
        self.log_id, self.known_next = log_id, 0

    def _take_over(self, contents: CacheContents) -> None:
        contents.blocks.show(None if self.contents is None else self.contents.blocks)
        self.contents, self._shown, self._expected = contents, True, None
        self.known_next = max(self.known_next, contents.next_sequence)

    def _show(self, shown: bool) -> None:
        if self.contents is not None and shown is not self._shown:
            self._shown = shown
            if shown:
                self.contents.blocks.show()
            else:
                self.contents.blocks.hide()

    def _forget(self) -> None:
        """Drops the blocks that are shown: they are no state of the cache any more."""
        if self.contents is not None:
            self.contents.blocks.drop()
        self.contents, self._shown, self._expected = None, False, None
        self._buffer.clear()

    def _drop_shadow(self) -> None:
        if self._shadow is not None:
            self._shadow.blocks.drop()
            self._shadow = None

    def _open(self, mode: Mode, log_id: str = "", first: int | None = None, last: int | None = None) -> _Watch:
        self._opened += 1
        watch = _Watch(self._opened, mode, resumes=bool(log_id))
        if mode is not Mode.REPLAY:
            self._main = watch
        self._commands.append(OpenWatch(watch.number, mode, log_id, first, last))
        return watch

    def _close_all(self) -> None:
        for watch in (self._main, self._fill):
            if watch is not None:
                self._commands.append(CloseWatch(watch.number))
        self._main = self._fill = None

    def _heard(self, number: int, now: float) -> _Watch | None:
        for watch in (self._main, self._fill):
            if watch is not None and watch.number == number:
                self._exact_at, self.heard_at = self.exact_at, now
                return watch
        return None


def _keeps_none(error: Exception | None) -> bool:
    """True if a publisher refused a snapshot because it keeps none, or is older than snapshots."""
    if isinstance(error, InvalidRequest):
        return error.metadata.get("field") == "mode"
    return isinstance(error, FeatureDisabled)


def _is_lasting(error: Exception | None, *, heard: bool) -> bool:
    """True if time alone can hardly mend it: a wrong name, no permission, another server."""
    if not isinstance(error, KvGrpcError) or isinstance(error, _MOVED_ON) or error.retry_after is not None:
        return False
    if error.code in _BREAKS:
        return False
    return not (heard and error.code in _BREAKS_WITHIN)


def _asked_seconds(error: Exception | None) -> float:
    """Returns how long the publisher asks to be left alone."""
    return error.retry_after or 0.0 if isinstance(error, KvGrpcError) else 0.0
