"""The leading rank's end of JoinAgreement: counts the votes of all ranks, tells decisions and starts."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvgrpc.errors import InvalidRequest, StaleEpoch, TooManyRequests, WrongRank
from kvgrpc.model import Layout, RankId, RankRef, Role
from kvgrpc.prefetch import wire
from kvgrpc.prefetch.protocol.book import MAX_OPEN_PAGES
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.prefetch.protocol.votes import AgreementCore, Decided, Decision, Stage, Vote
from kvgrpc.prefetch.threads.timers import Alarms
from kvgrpc.rpc.callers import check_speaker
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.turns import next_turn
from kvgrpc.rpc.within import within
from kvgrpc.v1 import prefetch_service_pb2 as pb
from kvgrpc.wire import layout_from_pb, rank_id_to_pb, rank_ref_from_pb

MAX_VOTES_OF_A_MESSAGE = 4_096
MAX_WAITING_MESSAGES = 65_536
# About 2 ms of the loop.
_VOTES_OF_A_TURN = 256
# Of what is told: what one message takes to be made, and so does its sending.
_DECISIONS_OF_A_MESSAGE = _MESSAGES_OF_A_MESSAGE = 512
_HELLO_SECONDS = 5.0


class LeaderAgreement:
    """Votes of this rank from any thread, of the others from their streams on the loop.

    A rank that has no stream is absent: what needs it is declined at once. So nobody waits for a rank that is known to
    be gone, and for one that hangs no longer than the votes' own time.
    """

    def __init__(self, rank: RankRef, layout: Layout, *, doubt: float = 60.0) -> None:
        self._rank = rank
        self._layout = layout
        self._doubt = doubt
        self._lock = threading.Lock()
        self._core = AgreementCore(ranks_of(rank.rank, layout), doubt=doubt, born=time.monotonic())
        self._waiting: dict[tuple[str, Stage], Decided] = {}
        self._streams: dict[RankId, _Stream] = {}
        self._alarms = Alarms("agreement-alarms")
        self._alarm_at: float | None = None
        for member in self._core.members - {rank.rank}:
            self._core.lose(member)

    @property
    def live(self) -> frozenset[RankId]:
        """Ranks that take part now, this one included."""
        with self._lock:
            return frozenset(member for member in self._core.live if isinstance(member, RankId))

    def vote(self, vote: Vote, timeout: float, decided: Decided) -> None:
        with self._lock:
            self._waiting[vote.key, vote.stage] = decided
            now = time.monotonic()
            decisions = self._core.vote(self._rank.rank, replace(vote, beat=now), now, timeout)
        self._alarms.after(timeout, self._expire, awake=True)
        self._tell(decisions)

    def forget(self, key: str) -> None:
        with self._lock:
            for stage in Stage:
                self._waiting.pop((key, stage), None)

    def tell_start(self, order: Order, timeout: float) -> None:
        """Every rank begins this operation, and has so many seconds for it."""
        if not self._is_heard():
            return  # of 65,536 pages it takes 25 ms to say it
        start = pb.AgreementStart(
            operation_id=order.operation_id,
            page_hashes=[bytes.fromhex(each) for each in order.hashes],
            priority=order.priority,
            tenant=order.tenant,
            extra_key=order.extra_key,
            engines=order.engines,
            timeout=wire.seconds_to_pb(timeout),
            kind=pb.OperationKind.ValueType(order.kind),
        )
        self._send(pb.JoinAgreementResponse(starts=[start]))

    def tell_terminated(self, operation_id: str) -> None:
        """Every rank ends it."""
        self._send(pb.JoinAgreementResponse(terminated=[operation_id]))

    def close(self, timeout: float) -> bool:
        """Ends its thread; streams end with the server."""
        return self._alarms.stop(timeout)

    async def serve(self, context: Any, role: Role) -> None:
        """One rank's stream, on the event loop, until it breaks: then the rank is absent. ``role``: of the replica.

        Raises InvalidRequest, WrongRank, StaleEpoch, IdentityMismatch for a hello that is not right, TooManyRequests
        when it was too slow or a newer stream of the same rank took its place.
        """
        member = self._member_of(await self._hello(context), role)
        stream = _Stream(asyncio.get_running_loop(), self._doubt / _BEATS)
        with self._lock:
            older = self._streams.pop(member, None)
            decisions = [] if older is None else self._core.lose(member)
            self._core.join(member)
            self._streams[member] = stream
        if older is not None:
            older.end()
        self._tell_soon(decisions)
        self._tell_live()
        writing = asyncio.ensure_future(stream.write_all(context.write))
        reading = asyncio.ensure_future(self._read_all(member, stream, context))
        try:
            done, _ = await asyncio.wait([writing, reading], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            stream.check()
        finally:
            for task in (writing, reading):
                task.cancel()
            self._leave(member, stream)

    async def _hello(self, context: Any) -> pb.AgreementHello:
        with contextlib.suppress(asyncio.TimeoutError):
            message = await within(_HELLO_SECONDS, context.read())
            if isinstance(message, pb.JoinAgreementRequest) and message.HasField("hello"):
                return message.hello
        raise InvalidRequest.of("hello", "missing", f"the first message, within {_HELLO_SECONDS:g} s")

    def _member_of(self, hello: pb.AgreementHello, role: Role) -> RankId:
        speaker, meant = rank_ref_from_pb(hello.member), rank_ref_from_pb(hello.to)
        check_speaker(speaker, role, "hello.member")
        if speaker.rank not in self._core.members or speaker.rank == self._rank.rank:
            raise WrongRank(
                f"{speaker.rank} is no other rank of the replica that {self._rank.rank} leads",
                metadata={"expected": str(self._rank.rank), "actual": str(speaker.rank)},
            )
        if meant.epoch not in (0, self._rank.epoch):
            raise StaleEpoch(
                f"incarnation {meant.epoch} was meant, this is {self._rank.epoch}",
                metadata={
                    "requestEpoch": meant.epoch,
                    "currentEpoch": self._rank.epoch,
                    "rank": str(self._rank.rank),
                },
            )
        if layout_from_pb(hello.layout) != self._layout:
            raise InvalidRequest.of("hello.layout", layout_from_pb(hello.layout), f"the leader's, {self._layout}")
        return speaker.rank

    async def _read_all(self, member: RankId, stream: _Stream, context: Any) -> None:
        """Counts what comes, until nothing does any more or a newer stream of this rank took the place of this one."""
        while isinstance(message := await context.read(), pb.JoinAgreementRequest):
            if len(message.votes) > MAX_VOTES_OF_A_MESSAGE:
                text = f"{len(message.votes)} votes"
                raise InvalidRequest.of("votes", text, f"at most {MAX_VOTES_OF_A_MESSAGE} in one message")
            for first in range(0, len(message.votes), _VOTES_OF_A_TURN):
                if first:
                    await next_turn()
                if not self._take_votes(member, stream, message.votes[first : first + _VOTES_OF_A_TURN]):
                    return

    def _take_votes(self, member: RankId, stream: _Stream, messages: Sequence[pb.AgreementVote]) -> bool:
        """False, and none of them counts, if a newer stream of this rank took the place of the one they came on."""
        votes = [wire.vote_from_pb(vote) for vote in messages]
        now = time.monotonic()
        with self._lock:
            if self._streams.get(member) is not stream:
                return False
            decisions = [each for vote in votes for each in self._core.vote(member, vote, now, _OTHERS_SECONDS)]
        self._tell(decisions)
        self._expire_in_time()
        return True

    def _leave(self, member: RankId, stream: _Stream) -> None:
        with self._lock:
            if self._streams.get(member) is not stream:
                return
            del self._streams[member]
            decisions = self._core.lose(member)
        self._tell_soon(decisions)
        self._tell_live()

    def _expire_in_time(self) -> None:
        """One alarm for all ballots that others opened, whatever they send."""
        with self._lock:
            due = self._core.next_deadline()
            if due is None or (self._alarm_at is not None and self._alarm_at <= due):
                return
            self._alarm_at = due
        self._alarms.after(due - time.monotonic(), self._expire_others, awake=True)

    def _expire_others(self) -> None:
        with self._lock:
            self._alarm_at = None
        self._expire()
        self._expire_in_time()

    def _expire(self) -> None:
        with self._lock:
            decisions = self._core.expire(time.monotonic())
        self._tell(decisions)

    def _tell_soon(self, decisions: list[Decision]) -> None:
        """On the loop: as many as a rank may leave behind take many turns of it."""
        if decisions:
            background(self._tell_in_turns(decisions), "agreement-decisions")

    async def _tell_in_turns(self, decisions: list[Decision]) -> None:
        for first in range(0, len(decisions), _DECISIONS_OF_A_MESSAGE):
            await next_turn()
            self._tell(decisions[first : first + _DECISIONS_OF_A_MESSAGE])

    def _tell(self, decisions: list[Decision]) -> None:
        if not decisions:
            return
        if self._is_heard():
            self._send(pb.JoinAgreementResponse(decisions=[wire.decision_to_pb(each) for each in decisions]))
        for decision in decisions:
            with self._lock:
                decided = self._waiting.pop((decision.key, decision.stage), None)
            if decided is not None:
                decided(decision)

    def _tell_live(self) -> None:
        with self._lock:
            epoch = self._core.epoch
        live = [rank_id_to_pb(each) for each in sorted(self.live)]
        self._send(pb.JoinAgreementResponse(epoch=epoch, live=live))

    def _is_heard(self) -> bool:
        with self._lock:
            return bool(self._streams)

    def _send(self, message: pb.JoinAgreementResponse) -> None:
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.put(message)


# A rank that speaks first waits for the others' schedulers, whose own time is the agreement_timeout of their limits.
_OTHERS_SECONDS = 30.0
# A last vote counts for half of the doubt, and is as old as the beat before it.
_BEATS = 16


class _Stream:
    """The messages to one rank: appended from any thread, written on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, beat_seconds: float) -> None:
        self._loop = loop
        self._beat_seconds = beat_seconds
        self._wake = asyncio.Event()
        self._lock = threading.Lock()
        self._waiting: deque[pb.JoinAgreementResponse] = deque()
        # Of the starts among them, which have all of their memory.
        self._pages = 0
        self._ended = False

    def put(self, message: pb.JoinAgreementResponse) -> None:
        with self._lock:
            if self._ended:  # a write that hangs takes nothing any more
                return
            self._waiting.append(message)
            self._pages += _pages_of(message)
            self._ended = len(self._waiting) > MAX_WAITING_MESSAGES or self._pages > MAX_OPEN_PAGES
        self._loop.call_soon_threadsafe(self._wake.set)

    def end(self) -> None:
        with self._lock:
            self._ended = True
        self._loop.call_soon_threadsafe(self._wake.set)

    def check(self) -> None:
        """Raises TooManyRequests once it was too slow, or a newer one took its place."""
        if self._ended:
            limit, value, scope = MAX_WAITING_MESSAGES, len(self._waiting), "agreement"
            if self._pages > MAX_OPEN_PAGES:
                limit, value, scope = MAX_OPEN_PAGES, self._pages, "pages of an agreement"
            raise TooManyRequests(
                "this stream was too slow, or a newer one took its place",
                metadata={"limit": limit, "value": value, "scope": scope},
                retry_after=0.1,
            )

    async def write_all(self, write: Callable[[pb.JoinAgreementResponse], Any]) -> None:
        """Yields what waits, many things in one message, or a beat, until the stream ends.

        Raises TooManyRequests as ``check`` does."""
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(self._beat_seconds, self._wake.wait())
            self._wake.clear()
            self.check()
            await write(self._next_message())

    def _next_message(self) -> pb.JoinAgreementResponse:
        """Takes what waits, or as much of it as is told at once."""
        merged = pb.JoinAgreementResponse(beat=wire.beat_to_pb(time.monotonic()))
        for _ in range(_MESSAGES_OF_A_MESSAGE):
            with self._lock:
                if not self._waiting:
                    return merged
                message = self._waiting.popleft()
                self._pages -= _pages_of(message)
            if message.epoch:
                merged.ClearField("live")
            merged.MergeFrom(message)
            if merged.starts or len(merged.decisions) >= _DECISIONS_OF_A_MESSAGE:
                break
        self._wake.set()
        return merged


def _pages_of(message: pb.JoinAgreementResponse) -> int:
    return sum(len(start.page_hashes) for start in message.starts)


def ranks_of(rank: RankId, layout: Layout) -> list[RankId]:
    """All ranks of the replica that a rank belongs to."""
    return [
        RankId(rank.engine, rank.dp, pp, cp, tp)
        for pp in range(layout.pp)
        for cp in range(layout.cp)
        for tp in range(layout.tp)
    ]
