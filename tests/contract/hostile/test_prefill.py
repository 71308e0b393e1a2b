"""Prefill ranks that lie, as a real decode rank sees them: each hurts itself alone (rule 15, hostile frames)."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgrpc.errors import Reason
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.transfer import KVPoll
from kvgrpc.transfer.runtime.death_proofs import NOTHING, DeathProofs, Resolved
from kvgrpc.transfer.runtime.manager import ENTRIES_IN_A_TURN
from kvgrpc.v1 import common_pb2, error_reason_pb2
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.v1.transfer_service_pb2_grpc import TransferServiceStub
from kvgrpc.wire import rank_ref_to_pb
from tests.support.hostile.honest_pair import TIMING
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import (
    FAILED,
    OPEN,
    SETTLED,
    SUCCESS,
    PrefillServer,
    Script,
    core_of,
    receiver_of,
    said,
    session_tasks,
)
from tests.support.waiting import wait_until

Serve = Callable[[Script], PrefillServer]
ROOMS = itertools.count(3_000_000)
MEGABYTE = 1 << 20
CANCELLED = error_reason_pb2.ERROR_REASON_ROOM_CANCELLED
TRANSFER_FAILED = error_reason_pb2.ERROR_REASON_TRANSFER_FAILED


class TestPrefillsThatLie:
    """Seen from a real decode rank: its room there fails by name, or waits; its other rooms go on."""

    @pytest.fixture
    def room(self) -> int:
        return next(ROOMS)

    def meet(self, decode: RankHost, server: PrefillServer, room: int) -> Any:
        receiver = receiver_of(decode, server.bootstrap, room)
        receiver.init([10, 11], 3)
        return receiver

    def fails(self, receiver: Any, reason: Reason) -> Any:
        wait_until(lambda: receiver.poll() is KVPoll.Failed)
        assert receiver.failure.reason is reason, receiver.failure
        return receiver.failure

    def gives_back(self, receiver: Any) -> None:
        wait_until(lambda: receiver.release_safe)

    def answering(self, *answers: Any) -> Script:
        """Welcomes, and sends the answers once it was told where to write; then it listens."""

        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            next(requests)
            yield server.welcome()
            for request in requests:
                if any(entry.want == pb.WANT_WRITE for entry in request.rooms):
                    yield from answers
            yield pb.SessionResponse(goodbye=pb.Goodbye())

        return script

    def test_aux_of_the_wrong_size(self, decode: RankHost, serve: Serve, room: int) -> None:
        before = decode.aux.copy()
        for aux in (b"", b"x" * 63, b"x" * 65, b"x" * MEGABYTE):
            wrong = next(ROOMS)
            server = serve(self.answering(said(wrong, SUCCESS, aux=aux, pages_done=2)))
            receiver = self.meet(decode, server, wrong)
            assert self.fails(receiver, Reason.INVALID_REQUEST).metadata["field"] == "aux"
            self.gives_back(receiver)
        assert np.array_equal(decode.aux[3], before[3])

    def test_it_welcomes_as_somebody_else(self, decode: RankHost, serve: Serve, prefill: RankHost, room: int) -> None:
        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            welcome = server.welcome()
            welcome.welcome.rank.CopyFrom(rank_ref_to_pb(prefill.rank.ref))
            yield welcome
            yield from (pb.SessionResponse() for request in requests)

        failure = self.fails(self.meet(decode, serve(script), room), Reason.INVALID_REQUEST)
        assert failure.metadata["field"] == "welcome.rank"

    def test_an_address_of_its_data_plane_without_end(self, decode: RankHost, serve: Serve, room: int) -> None:
        """It was read on the loop in each tick in which a page of the dead peer was held."""

        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            yield server.welcome(data_plane_address=b"y" * 65_537)
            yield from (pb.SessionResponse() for request in requests)

        failure = self.fails(self.meet(decode, serve(script), room), Reason.INVALID_REQUEST)
        assert failure.metadata["field"] == "welcome.data_plane_address"

    def test_it_welcomes_again_and_again(self, decode: RankHost, serve: Serve, room: int) -> None:
        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            for _ in range(50):
                yield server.welcome()
            for request in requests:
                if request.rooms:
                    yield said(room, FAILED, failure=common_pb2.Failure(reason=CANCELLED, message="enough"))

        server = serve(script)
        before = session_tasks(decode)
        receiver = self.meet(decode, server, room)
        wait_until(lambda: receiver.poll() is KVPoll.Failed)
        assert session_tasks(decode) <= before + 3

    def test_a_decode_that_closed_dials_nobody_again(self, serve: Serve, room: int) -> None:
        """Its pages are held still, and the goodbye that answers its own looked like a break: the session that followed
        outlived the rank."""

        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            yield server.welcome()
            yield from (pb.SessionResponse() for _ in requests)
            yield pb.SessionResponse(goodbye=pb.Goodbye())

        server = serve(script)
        closing = RankHost("D2", "DECODE", {"timing": TIMING})
        before = session_tasks(closing)
        receiver = self.meet(closing, server, room)
        wait_until(lambda: any(request.rooms for request in server.heard))
        time.sleep(10 * TIMING.tick_seconds)  # an early break would wait before its dial
        closing.close(2.0)
        assert receiver.failure is not None
        time.sleep(0.5)  # in which no other session must come
        assert server.sessions == 1
        assert session_tasks(closing) <= before

    def test_a_dial_that_was_given_up_during_its_lookup_is_not_made_later(
        self, decode: RankHost, serve: Serve, room: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody knew of it any more: with a peer that answers nothing it stayed for good, and so did the next one."""
        loop = LoopThread.shared().loop
        answered: asyncio.Future[Resolved] = loop.create_future()

        async def slow(refusals: DeathProofs, address: str) -> Resolved:
            return await asyncio.shield(answered)

        def silent(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            for _ in requests:
                continue
            yield pb.SessionResponse()

        before = session_tasks(decode)
        monkeypatch.setattr(DeathProofs, "behind", slow)
        server = serve(silent)
        self.fails(self.meet(decode, server, room), Reason.PEER_LOST)
        wait_until(lambda: all(pair.ref != server.ref for pair in core_of(decode).pairs.values()))
        loop.call_soon_threadsafe(answered.set_result, NOTHING)
        wait_until(lambda: session_tasks(decode) <= before)
        assert not server.sessions

    def test_one_that_speaks_rarely_and_said_so_is_healthy(self, decode: RankHost, serve: Serve, room: int) -> None:
        """Decode gives a silent peer up after 2 s; this one asked for 4 s, and for heartbeats each 0.1 s."""
        heard, loud = 0, threading.Event()

        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            yield server.welcome(heartbeat=Duration(nanos=100_000_000), idle_timeout=Duration(seconds=4))
            began = time.monotonic()
            for _ in requests:
                nonlocal heard
                heard += 1
                if heard >= 5 and loud.is_set() and time.monotonic() - began > 2.8:
                    break
            yield said(room, FAILED, failure=common_pb2.Failure(reason=CANCELLED, message="enough"))
            yield from (pb.SessionResponse() for request in requests)

        server = serve(script)
        receiver = self.meet(decode, server, room)

        def paces() -> list[int]:
            sessions = list(cast(Any, decode.rank.transfer)._sessions.items())
            return [session.heartbeat for stream, session in sessions if stream.pair.ref == server.ref]

        wait_until(lambda: paces() == [2])  # ticks; its own pace is 4
        loud.set()
        assert self.fails(receiver, Reason.ROOM_CANCELLED).message == "enough"
        assert server.sessions == 1

    def test_it_says_success_before_it_was_told_where_to_write(self, decode: RankHost, serve: Serve, room: int) -> None:
        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            yield said(room, SUCCESS, aux=b"x" * 64)
            yield server.welcome()
            yield said(room, SUCCESS, aux=b"x" * 64)
            yield from (pb.SessionResponse() for request in requests)

        receiver = receiver_of(decode, serve(script).bootstrap, room)
        wait_until(lambda: receiver.poll() is KVPoll.Failed)
        assert receiver.failure.reason is Reason.INVALID_REQUEST

    def test_it_talks_of_rooms_that_nobody_asked_for(
        self, decode: RankHost, serve: Serve, prefill: RankHost, room: int
    ) -> None:
        other = next(ROOMS)
        receiver = receiver_of(decode, f"{prefill.rank.address}/P", other)
        frame = pb.SessionResponse(
            rooms=[pb.PrefillRoom(room=number, state=SUCCESS, writes=SETTLED) for number in [*range(1, 3000), other]]
        )
        server = serve(self.answering(frame, said(room, FAILED, failure=common_pb2.Failure(message="last"))))
        mine = self.meet(decode, server, room)
        wait_until(lambda: mine.poll() is KVPoll.Failed)
        assert receiver.poll() is not KVPoll.Success
        wait_until(lambda: len({number for each in server.heard for number in each.forget_rooms}) >= 3000)
        receiver.abort()

    def test_it_goes_back(self, decode: RankHost, serve: Serve, room: int) -> None:
        server = serve(
            self.answering(
                said(room, pb.ROOM_STATE_TRANSFERRING, OPEN, pages_done=2),
                said(room, pb.ROOM_STATE_BOOTSTRAPPING, OPEN),
                said(room, FAILED, SETTLED, failure=common_pb2.Failure(reason=TRANSFER_FAILED, message="first")),
                said(room, SUCCESS, OPEN, aux=b"y" * 64),
                said(room, SUCCESS, SETTLED, aux=b"y" * 64),
                said(
                    room,
                    FAILED,
                    SETTLED,
                    failure=common_pb2.Failure(
                        reason=error_reason_pb2.ERROR_REASON_KV_INDEX_OUT_OF_RANGE, message="second"
                    ),
                ),
            )
        )
        receiver = self.meet(decode, server, room)
        assert self.fails(receiver, Reason.TRANSFER_FAILED).message == "first"
        wait_until(lambda: receiver.release_safe)

    def test_it_fails_without_a_failure(self, decode: RankHost, serve: Serve, room: int) -> None:
        receiver = self.meet(decode, serve(self.answering(said(room, FAILED))), room)
        assert "without a reason" in self.fails(receiver, Reason.UNSPECIFIED).message

    def test_its_failure_has_a_megabyte_and_an_impossible_time(self, decode: RankHost, serve: Serve, room: int) -> None:
        failure = common_pb2.Failure(reason=TRANSFER_FAILED, message="m" * MEGABYTE, metadata={"k": "v" * MEGABYTE})
        failure.time.seconds = 2**62
        receiver = self.meet(decode, serve(self.answering(said(room, FAILED, failure=failure))), room)
        found = self.fails(receiver, Reason.TRANSFER_FAILED)
        assert len(str(found)) < 10_000
        with grpc.insecure_channel(decode.rank.address) as channel:
            TransferServiceStub(channel).ListRooms(pb.ListRoomsRequest(), timeout=5)

    @pytest.mark.parametrize(
        ("room_number", "state", "writes"),
        [
            (0, SUCCESS, SETTLED),
            (2**63, SUCCESS, SETTLED),
            (5, 0, SETTLED),
            (5, 6, SETTLED),
            (5, SUCCESS, 0),
            (5, 4, 9),
        ],
    )
    def test_its_frames_are_nonsense(
        self, decode: RankHost, serve: Serve, room: int, room_number: int, state: int, writes: int
    ) -> None:
        server = serve(self.answering(said(room_number, state, writes)))
        receiver = self.meet(decode, server, room)
        failure = self.fails(receiver, Reason.INVALID_REQUEST)
        assert failure.metadata["field"].startswith("rooms[0].")

    def test_it_sends_bytes_that_are_no_message(self, decode: RankHost, serve: Serve, room: int) -> None:
        server = serve(self.answering(b"\xff\xff\xff"))
        receiver = self.meet(decode, server, room)
        wait_until(lambda: server.sessions >= 3)
        server.script = self.answering(said(room, SUCCESS, aux=b"z" * 64, pages_done=2))
        wait_until(lambda: receiver.poll() is KVPoll.Success)
        assert decode.aux_row(3) == b"z" * 64

    def test_it_sends_a_frame_above_the_librarys_limit(self, decode: RankHost, serve: Serve, room: int) -> None:
        server = serve(self.answering(b"\x0a\x80\x80\x80\x10" + bytes(40 * MEGABYTE)))
        receiver = self.meet(decode, server, room)
        wait_until(lambda: server.sessions >= 2)
        receiver.abort()
        server.script = self.answering()

    def test_it_never_answers_the_hello(self, decode: RankHost, serve: Serve, room: int) -> None:
        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            server.stopping.wait(20)
            yield pb.SessionResponse()

        failure = self.fails(self.meet(decode, serve(script), room), Reason.PEER_LOST)
        assert "not a word" in failure.metadata["how"]

    def test_it_only_breathes_before_welcome(self, decode: RankHost, serve: Serve, room: int) -> None:
        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            while not server.stopping.wait(0.05):
                yield pb.SessionResponse()

        self.fails(self.meet(decode, serve(script), room), Reason.PEER_LOST)

    @pytest.mark.parametrize("reason", [None, 0, Reason.INVALID_REQUEST, Reason.STALE_EPOCH, Reason.SERVER_DRAINING])
    def test_it_says_goodbye_at_once(self, decode: RankHost, serve: Serve, room: int, reason: int | None) -> None:
        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            goodbye = pb.Goodbye()
            if reason is not None:
                goodbye.failure.reason = reason  # type: ignore[assignment]
                goodbye.failure.time.seconds = 2**62
            yield pb.SessionResponse(goodbye=goodbye)

        receiver = self.meet(decode, serve(script), room)
        wait_until(lambda: receiver.poll() is KVPoll.Failed)
        assert receiver.failure.reason in (reason or 0, Reason.PEER_LOST)
        wait_until(lambda: receiver.release_safe)

    def test_it_floods_and_others_have_their_turns_of_the_loop_between(
        self, decode: RankHost, serve: Serve, room: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        applied: list[int] = []
        on_frame = core_of(decode).on_frame

        def counted(stream: Any, entries: Any) -> None:
            applied.append(len(entries))
            on_frame(stream, entries)

        monkeypatch.setattr(core_of(decode), "on_frame", counted)
        frame = pb.SessionResponse(
            rooms=[pb.PrefillRoom(room=n, state=SUCCESS, writes=SETTLED) for n in range(1, 5_000)]
        )

        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            yield server.welcome()
            for _ in range(10):
                yield frame
            yield said(room, FAILED, failure=common_pb2.Failure(reason=CANCELLED))
            yield from (pb.SessionResponse() for request in requests)

        self.fails(self.meet(decode, serve(script), room), Reason.ROOM_CANCELLED)
        assert sum(applied) >= 49_990 and max(applied) <= ENTRIES_IN_A_TURN

    def test_it_asks_for_tiny_frames(self, decode: RankHost, serve: Serve, room: int) -> None:
        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            yield server.welcome(max_frame_bytes=1)
            for request in requests:
                yield from (said(entry.room, SUCCESS, aux=b"t" * 64) for entry in request.rooms)

        server = serve(script)
        receivers = [self.meet(decode, server, next(ROOMS)) for _ in range(20)]
        wait_until(lambda: all(receiver.failure is not None for receiver in receivers))
        assert {receiver.failure.reason for receiver in receivers} == {Reason.FRAME_TOO_LARGE}

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(raw=st.binary(max_size=100))
    def test_it_answers_at_random(self, decode: RankHost, serve: Serve, raw: bytes) -> None:
        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            yield raw
            yield server.welcome()
            yield raw

        server = serve(script)
        receiver = self.meet(decode, server, next(ROOMS))
        wait_until(lambda: server.sessions >= 1)
        receiver.abort()
        server.close()
        wait_until(lambda: receiver.release_safe)
