"""Follows one event stream over the network: makes the Watches that the core asks for, and tells it what they say."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import grpc

from kvgrpc.client.following.live import LiveFrames
from kvgrpc.client.stall import StallDetector
from kvgrpc.errors import KvGrpcError, PeerUnreachable
from kvgrpc.events.codec import decode_batch
from kvgrpc.events.following.follower import FollowerCore
from kvgrpc.events.following.index import BlockIndex, Match
from kvgrpc.events.following.messages import CloseWatch, FollowerCounts, FollowerState, OpenWatch, ResetLive
from kvgrpc.events.following.sources import Freshness, freshness
from kvgrpc.events.log.digest import StateDigest, TierDigest, hash_key
from kvgrpc.observability.logging import RateLimited
from kvgrpc.rpc.dialing.channel import open_channel, retire
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.rpc.status import error_from
from kvgrpc.rpc.within import check_seconds, within
from kvgrpc.v1 import event_service_pb2 as pb
from kvgrpc.v1.event_service_pb2_grpc import EventServiceStub
from kvgrpc.wire import load_from_pb

# Heartbeats come each second.
IDLE_TIMEOUT_SECONDS = 5.0
# Of batches that wait, folded in one turn of the loop: about a millisecond.
FOLD_BYTES = 64 * 1024

LOG_SECONDS = 60.0
_log = logging.getLogger(__name__)


class EventFollower:
    """The exact contents of one cache, kept so: ``async with EventFollower("127.0.0.1:50051") as follower``.

    It reads a snapshot and then what follows, begins again where a connection broke, rebuilds where the log moved on
    without it or another one began, and compares with the publisher's digest. With ``live`` the batches come over ZMQ
    PUB and Watches fill what PUB lost. It never gives up; ``state``, ``last_error`` and ``lasting`` say how it stands.
    All methods belong to one event loop; hashes are what events carry (integers of either sign, or digests).
    """

    def __init__(
        self,
        address: str,
        *,
        engine: str = "",
        dp: int = 0,
        live: bool = False,
        security: ClientSecurity | None = None,
        index: BlockIndex | None = None,
        turn: asyncio.Lock | None = None,
    ) -> None:
        self.address = address
        self.engine = engine
        self.dp = dp
        self.cache = (engine, dp)
        """Engine and dp as the publisher names them; what was asked for, until it has."""
        self.core = FollowerCore(index or BlockIndex(), _events, live=live)
        self._security = security or ClientSecurity()
        # Shared by followers of one index: of all of them one folds in a turn of the loop, and Score comes between.
        self._turn = turn or asyncio.Lock()
        self._stamp: object = None
        self._no_answer = False
        self._channel: grpc.aio.Channel | None = None
        self._closing: asyncio.Future[None] | None = None
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        # While somebody waits.
        self._changed: asyncio.Event | None = None
        self._frames = LiveFrames(address, self._on_frame) if live else None
        self._lines = RateLimited(_log, lines=1, seconds=LOG_SECONDS)
        self._doubts = 0

    async def __aenter__(self) -> EventFollower:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Begins to follow. Raises AddressNotAllowed and InvalidRequest for security that cannot be used."""
        self._dial()
        self.core.start()
        self._obey()

    async def close(self) -> None:
        """Ends, and forgets the contents."""
        self.core.stop()
        self._obey()
        if self._timer is not None:
            self._timer.cancel()
        if self._frames is not None:
            await self._frames.close()
        ending = list(self._watches.values())
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    @property
    def state(self) -> FollowerState:
        """The relation of what is known to the cache."""
        return self.core.state

    @property
    def freshness(self) -> Freshness:
        """Log, sequence, lag, and how long the publisher was silent."""
        return freshness(self.core, time.monotonic())

    @property
    def counts(self) -> FollowerCounts:
        """Counts of what happened since the start."""
        return self.core.counts

    @property
    def last_error(self) -> Exception | None:
        """Why something last failed; None: nothing did."""
        return self.core.last_error

    @property
    def lasting(self) -> bool:
        """True if a person is needed: a wrong name, no permission. It is repeated all the same, until it is mended."""
        return self.core.lasting

    @property
    def blocks(self) -> dict[str, int]:
        """The number of different blocks that the cache holds in each medium."""
        contents = self.core.contents
        return {} if contents is None else contents.blocks.counts()

    def match(self, hashes: Iterable[int | bytes]) -> Match:
        """Returns how many leading blocks of ``hashes`` the cache holds in which tiers."""
        contents = self.core.contents
        nothing = Match(0, 0, 0, 0)
        if contents is None:
            return nothing
        return contents.blocks.match([hash_key(block) for block in hashes])

    def media_of(self, block: int | bytes) -> frozenset[str]:
        """The media that hold a block, by the engine's names in capitals ("GPU", "CPU_PINNED"); empty: nowhere."""
        contents = self.core.contents
        return frozenset() if contents is None else contents.blocks.media_of(hash_key(block))

    async def until_current(self, timeout: float = 30.0) -> None:
        """Waits until the contents are exact and nothing is known to be missing.

        Raises PeerUnreachable after ``timeout`` seconds (``math.inf``: never), with what failed last.
        """
        check_seconds("timeout", max(timeout, 0.0), math.inf)
        end = time.monotonic() + timeout
        while self.state is not FollowerState.CURRENT:
            try:
                await within(max(0.0, end - time.monotonic()), self.changed())
            except asyncio.TimeoutError:
                why = f"{self.address}: not current after {timeout:g} s, {self.state.value}; {self.last_error or ''}"
                raise PeerUnreachable(why, metadata={"address": self.address}) from None

    async def changed(self) -> None:
        """Waits for the next thing that the publisher says, or that fails."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    def _obey(self) -> None:
        """Does what the core wants, and wakes who waits."""
        if self.core.counts.doubts != self._doubts:
            self._doubts = self.core.counts.doubts
            where = f"{self.address}, log {self.core.log_id}, before {self.core.next_sequence}"
            text = f"{where}: an event that may have been a removal cannot be read: blocks that are shown may be gone"
            self._lines.warning("doubtful", text)
        for command in self.core.take_commands():
            if isinstance(command, OpenWatch):
                task = asyncio.ensure_future(self._watch(command))
                self._watches[command.number] = task
                task.add_done_callback(partial(self._watch_ended, command.number))
            elif isinstance(command, CloseWatch):
                closed = self._watches.pop(command.number, None)
                if closed is not None:
                    closed.cancel()
            elif isinstance(command, ResetLive) and self._frames is not None:
                self._frames.reset()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.core.wake_at is not None:
            delay = max(0.0, self.core.wake_at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _watch_ended(self, number: int, task: asyncio.Task[None]) -> None:
        wanted = self._watches.pop(number, None) is not None
        error: KvGrpcError
        if task.cancelled():
            # Not by us: a Watch of which nothing is heard any more must not look like one that has nothing to say.
            error = PeerUnreachable(f"{self.address}: the call was cancelled", metadata={"address": self.address})
            self._no_answer = True
        elif task.exception() is not None:
            # A bug of ours must not end the follower: it is said, and the Watch is one that failed.
            _log.error("following %s failed", self.address, exc_info=task.exception())
            error = KvGrpcError(f"a bug: {task.exception()!r}")
        else:
            return
        if wanted:
            self.core.ended(number, error, time.monotonic())
            self._obey()

    def _tick(self) -> None:
        self.core.tick(time.monotonic())
        self._obey()

    def _on_frame(self, sequence: int, payload: bytes) -> None:
        self.core.live(sequence, payload, time.monotonic())
        self._obey()

    async def _watch(self, order: OpenWatch) -> None:
        """One Watch, from its call to its end."""
        error: Exception | None = None
        try:
            async with contextlib.aclosing(self._messages(order)) as messages:
                async for message in messages:
                    async with self._turn:
                        await self._hear(order.number, message)
                    self._obey()
        except grpc.aio.AioRpcError as failure:
            error = _named(failure, self.address)
        except TimeoutError as stall:
            error = PeerUnreachable(f"{self.address}: {stall}", metadata={"address": self.address})
        except KvGrpcError as refusal:
            error = refusal
        self._no_answer = self._no_answer or isinstance(error, PeerUnreachable)
        self.core.ended(order.number, error, time.monotonic())
        self._obey()

    def _dial(self) -> grpc.aio.Channel:
        """The channel; a new one where the files of our certificate were replaced, and where nobody answered on the old
        one: it waits longer and longer between attempts of its own."""
        stamp = self._security.stamp
        if self._channel is None or self._no_answer or stamp != self._stamp:
            if self._channel is not None:
                retire(self._channel)
            # Else a new channel may take over the silent connection of the old one, which is not closed yet.
            self._channel = open_channel(self.address, self._security, own_connection=True)
            self._stamp = stamp
            self._no_answer = False
        return self._channel

    async def _messages(self, order: OpenWatch) -> AsyncGenerator[pb.WatchResponse, None]:
        request = pb.WatchRequest(
            engine=self.engine,
            dp=self.dp,
            log_id=order.log_id,
            from_sequence=order.first,
            end_sequence=order.last,
            mode=pb.WatchMode.ValueType(order.mode),
            without_tokens=True,
        )
        call = EventServiceStub(self._dial()).Watch(request)
        stream = StallDetector(call, IDLE_TIMEOUT_SECONDS)
        try:
            while (message := await stream.next_message()) is not None:
                yield message
        finally:
            stream.close()
            call.cancel()

    async def _hear(self, number: int, message: pb.WatchResponse) -> None:
        core, now, kind = self.core, time.monotonic(), message.WhichOneof("kind")
        if kind == "begin":
            stream = message.begin.stream
            self.cache = (stream.engine, stream.dp)
            if self._frames is not None:
                self._frames.subscribe(stream.pub_endpoint, stream.topic)
            core.begun(number, stream.log_id, stream.next_sequence, message.begin.first_sequence, now)
        elif kind == "raw":
            first = message.raw.first_sequence
            for begin, payloads in _slices(message.raw.payloads):
                if begin:
                    await asyncio.sleep(0)
                core.batches(number, first + begin, payloads, now)
        elif kind == "dropped":
            core.dropped(number, message.dropped.first_sequence, message.dropped.last_sequence, now)
        elif kind == "heartbeat":
            beat = message.heartbeat
            core.told_load(number, load_from_pb(beat.load) if beat.HasField("load") else None)
            core.heartbeat(number, beat.next_sequence, _digest(beat.state) if beat.HasField("state") else None, now)
        elif kind == "snapshot":
            part = message.snapshot
            for _ in core.snapshot_slices(number, part.index, part.next_sequence, part.payloads, now):
                await asyncio.sleep(0)
            if part.last:
                core.snapshot_complete(number, _digest(part.state) if part.HasField("state") else None, now)


def _slices(payloads: Sequence[bytes]) -> Iterator[tuple[int, Sequence[bytes]]]:
    """A message's payloads, as many at a time as a turn of the loop may take, and the number of the first; once at
    least."""
    begin, size = 0, 0
    for end, payload in enumerate(payloads):
        size += len(payload)
        if size >= FOLD_BYTES and end + 1 < len(payloads):
            yield begin, payloads[begin : end + 1]
            begin, size = end + 1, 0
    yield begin, payloads[begin:]


def _events(payload: bytes) -> Iterable[object]:
    return decode_batch(payload).events


def _digest(state: pb.StateDigest) -> StateDigest | None:
    if state.kind not in (pb.DIGEST_KIND_UNSPECIFIED, pb.DIGEST_KIND_MIX64_SUM):
        return None
    tiers = (TierDigest(tier.medium, tier.group, tier.blocks, tier.mixed_hashes) for tier in state.tiers)
    return StateDigest(state.next_sequence, tuple(tiers), state.doubtful)


def _named(error: grpc.aio.AioRpcError, address: str) -> KvGrpcError:
    known: Any = error_from(error)
    if known.reason == KvGrpcError.reason and error.code() is grpc.StatusCode.UNAVAILABLE:
        return PeerUnreachable(f"nobody answered at {address}: {error.details()}", metadata={"address": address})
    return known  # type: ignore[no-any-return]
