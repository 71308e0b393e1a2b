"""A rank's end of JoinAgreement: its votes go to the leader, decisions and starts come back."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import grpc

from kvgrpc.errors import KvGrpcError
from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.prefetch import wire
from kvgrpc.prefetch.model import Stop
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.prefetch.protocol.votes import Decided, Decision, PendingVotes, Stage, Vote
from kvgrpc.prefetch.threads.timers import Alarms
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import prefetch_service_pb2 as pb
from kvgrpc.v1.prefetch_service_pb2_grpc import PrefetchServiceStub
from kvgrpc.wire import layout_to_pb, rank_id_from_pb, rank_ref_to_pb

_log = logging.getLogger(__name__)

FindLeader = Callable[[], Awaitable[str]]
OpenChannel = Callable[[str], grpc.aio.Channel]
Spawn = Callable[[Coroutine[Any, Any, None], str], Any]

_LONGEST_PAUSE_SECONDS = 1.0
_VOTES_OF_A_MESSAGE = 1_024
_MOST_UNSENT = 16_384


class JoinedAgreement:
    """Votes from any thread. A vote that nobody decides in its time is decided here: the leader is absent.

    The last vote of an operation has another time: after it the leader may have decided, so this rank waits for its
    word for ``doubt`` seconds that it is awake. After a break the rank dials again and says every vote that is still
    undecided; the leader remembers what it decided.
    """

    def __init__(self, rank: RankRef, layout: Layout, *, doubt: float = 60.0) -> None:
        self._rank = rank
        self._layout = layout
        self._lock = threading.Lock()
        self._said = PendingVotes(doubt)
        self._unsent: list[Vote] = []
        self._live: frozenset[RankId] = frozenset({rank.rank})
        self._alarms = Alarms("agreement-alarms")
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[Any] = []
        self._connected = False
        self._begin: Callable[[Order], None] = _nobody
        self._terminate: Callable[[str], None] = _nobody
        self._lines = RateLimited(_log)

    @property
    def live(self) -> frozenset[RankId]:
        """Ranks that take part now, as the leader said last; this one alone while it is not connected."""
        return self._live

    @property
    def connected(self) -> bool:
        return self._connected

    def vote(self, vote: Vote, timeout: float, decided: Decided) -> None:
        with self._lock:
            self._unsent.append(self._said.say(vote, decided))
            # While there is no leader only the newest are kept: the others are decided by their time anyway.
            del self._unsent[:-_MOST_UNSENT]
        if vote.stage is not Stage.COMPLETED:
            absent = Decision(vote.key, vote.stage, 0, Stop.RANK_ABSENT)
            self._alarms.after(timeout, lambda: self._decide(absent), awake=True)
        self._ring()

    def forget(self, key: str) -> None:
        with self._lock:
            self._said.forget(key)

    def connect(
        self,
        find_leader: FindLeader,
        open_channel: OpenChannel,
        spawn: Spawn,
        begin: Callable[[Order], None],
        terminate: Callable[[str], None],
    ) -> None:
        """Dials the leader on the event loop, for as long as it takes, and again after each break.

        ``begin`` and ``terminate`` (an operation by its id) are called there, as the leader orders it."""
        self._begin = begin
        self._terminate = terminate
        self._tasks = [
            spawn(self._stay_joined(find_leader, open_channel), f"prefetch-agreement {self._rank.rank}"),
            spawn(self._count_doubt(), f"prefetch-agreement-doubt {self._rank.rank}"),
        ]

    def close(self, timeout: float) -> bool:
        """Ends the stream and its thread."""
        for task in self._tasks:
            task.cancel()
        return self._alarms.stop(timeout)

    async def _stay_joined(self, find_leader: FindLeader, open_channel: OpenChannel) -> None:
        self._loop = asyncio.get_running_loop()
        pause = 0.05
        while True:
            try:
                address = await find_leader()
                channel = open_channel(address)
                try:
                    await self._join(channel)
                    pause = 0.05
                finally:
                    await channel.close()
            except Exception as error:
                # Whatever it is, the rank is absent until it succeeds, and nothing else is harmed.
                cause = error_from(error) if isinstance(error, grpc.aio.AioRpcError) else error
                level = logging.INFO if isinstance(cause, KvGrpcError) else logging.WARNING
                _log.log(level, "%s has no leader to agree with, tries again: %s", self._rank.rank, cause)
            self._live = frozenset({self._rank.rank})
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(_LONGEST_PAUSE_SECONDS, pause * 2)

    async def _count_doubt(self) -> None:
        """On the loop that reads the leader's messages: while it stands still, no time passes."""
        while True:
            with self._lock:
                given_up = self._said.tick(time.monotonic())
            for decision in given_up:
                _log.warning(
                    "%s: operation %s ends without its leader's word: other ranks may have its pages",
                    self._rank.rank,
                    decision.key,
                )
                self._decide(decision)
            await asyncio.sleep(self._said.step)

    async def _join(self, channel: grpc.aio.Channel) -> None:
        """One stream until it breaks."""
        self._wake = wake = asyncio.Event()
        call = PrefetchServiceStub(channel).JoinAgreement(self._messages(wake))
        try:
            async for message in call:
                if not self._connected:
                    self._connected = True
                    _log.info("%s agrees with its replica", self._rank.rank)
                self._heard(message)
        finally:
            self._connected = False
            call.cancel()
            # gRPC goes on to ask a broken stream for messages: left to wait, it would take the next stream's votes.
            self._wake = None
            wake.set()

    async def _messages(self, wake: asyncio.Event) -> AsyncIterator[pb.JoinAgreementRequest]:
        """Yields the messages of one stream: the hello, and votes each time it is woken, until the stream is over."""
        hello = pb.JoinAgreementRequest()
        hello.hello.member.CopyFrom(rank_ref_to_pb(self._rank))
        hello.hello.layout.CopyFrom(layout_to_pb(self._layout))
        with self._lock:
            # What was said on an earlier stream may not have arrived.
            unsent = {(vote.key, vote.stage) for vote in self._unsent}
            self._unsent[:0] = [vote for vote in self._said.undecided() if (vote.key, vote.stage) not in unsent]
        yield hello
        wake.set()
        while True:
            await wake.wait()
            wake.clear()
            if self._wake is not wake:
                return
            with self._lock:
                votes, self._unsent = self._unsent, []
            for start in range(0, len(votes), _VOTES_OF_A_MESSAGE):
                part = votes[start : start + _VOTES_OF_A_MESSAGE]
                yield pb.JoinAgreementRequest(votes=[wire.vote_to_pb(vote) for vote in part])

    def _heard(self, message: pb.JoinAgreementResponse) -> None:
        with self._lock:
            self._said.heard_beat(wire.beat_from_pb(message.beat))
        if message.epoch:
            self._live = frozenset(map(rank_id_from_pb, message.live))
        for start in message.starts:
            order = Order(
                kind=wire.kind_from_pb(start.kind),
                hashes=tuple(each.hex() for each in start.page_hashes),
                operation_id=start.operation_id,
                priority=start.priority,
                tenant=start.tenant,
                extra_key=start.extra_key,
                engines=tuple(start.engines),
                timeout=max(0.001, start.timeout.ToMicroseconds() / 1e6),
            )
            if not self._obey(start.operation_id, partial(self._begin, order)):
                # The leader hears of it as a rank that has none of the pages.
                self.vote(Vote(start.operation_id, Stage.HITS, 0, Stop.RATE_LIMITED), 1.0, lambda decision: None)
        for operation_id in message.terminated:
            self._obey(operation_id, partial(self._terminate, operation_id))
        for decision in message.decisions:
            try:
                self._decide(wire.decision_from_pb(decision))
            except KvGrpcError as error:
                _log.warning("%s: a decision that cannot be read: %s", self._rank.rank, error)

    def _obey(self, operation_id: str, call: Callable[[], None]) -> bool:
        """Obeys one order; whatever that does to this rank, its stream goes on."""
        try:
            call()
        except Exception as error:
            bug = not isinstance(error, KvGrpcError)
            text = f"{self._rank.rank}: operation {operation_id} cannot be begun or ended here: "
            text += one_line(f"{type(error).__name__}: {error}" if bug else str(error))
            level, key = (logging.ERROR, "orders that raised") if bug else (logging.WARNING, "refused orders")
            self._lines.say(level, key, text, exc_info=bug)
            return False
        return True

    def _decide(self, decision: Decision) -> None:
        with self._lock:
            decided = self._said.answered(decision.key, decision.stage)
        if decided is not None:
            decided(decision)

    def _ring(self) -> None:
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            loop.call_soon_threadsafe(wake.set)


def _nobody(order: Order | str) -> None:
    """Before ``connect``."""


__all__ = ["FindLeader", "JoinedAgreement", "OpenChannel", "Spawn"]
