"""Peers that say nonsense, too much, or nothing: each hurts itself alone (rule 15)."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgrpc.errors import Reason
from kvgrpc.model import RankRef
from kvgrpc.transfer import KVPoll, KVReceiver, KVSender
from kvgrpc.transfer.model import Timing
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.v1.transfer_service_pb2_grpc import TransferServiceStub
from kvgrpc.wire import pool_to_pb, rank_ref_to_pb
from tests.contract.transfer_peers import (
    FAILED,
    OPEN,
    SECONDS,
    SETTLED,
    STOP,
    SUCCESS,
    DecodeClient,
    Memory,
    PrefillServer,
    Script,
    eventually,
    said,
)
from tests.integration.rank_host import PAGES, RankHost

# Patience 2 s, a break 0.5 s, ended records 1 s.
TIMING = Timing(
    tick_seconds=0.05, heartbeat=4, welcome_within=10, patience=40, settle=4, abandon_dial=10, ended_record=20
)
Dial = Callable[..., DecodeClient]
Serve = Callable[[Script], PrefillServer]
ROOMS = itertools.count(1_000_000)
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def prefill() -> Iterator[RankHost]:
    host = RankHost("P", "PREFILL", {"registry": "embedded", "timing": TIMING})
    host.fill(1)
    yield host
    host.close(1.0)


@pytest.fixture(scope="module")
def decode() -> Iterator[RankHost]:
    host = RankHost("D", "DECODE", {"timing": TIMING})
    yield host
    host.close(1.0)


@pytest.fixture(scope="module")
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.plane.close(1.0)


@pytest.fixture(autouse=True)
def nobody_else_notices(prefill: RankHost, decode: RankHost, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Around every test: a hand-off between honest ranks goes on, nothing was a bug, and nothing stays."""
    room = next(ROOMS)
    receiver = receiver_of(decode, f"{prefill.rank.address}/P", room)
    eventually(lambda: receiver.poll() is KVPoll.WaitingForInput)
    yield
    receiver.init([1, 2, 3], 1)
    prefill.send(room, [4, 5, 6], aux_row=2)
    eventually(lambda: receiver.poll() >= KVPoll.Success or receiver.failure is not None)
    assert receiver.failure is None
    assert np.array_equal(decode.memory[:, 1:4], prefill.memory[:, 4:7])
    assert decode.aux_row(1) == prefill.aux_row(2)
    for host in (prefill, decode):
        assert host.rank.healthy
        assert cast(Any, host.rank.transfer).errors == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture
def dial(prefill: RankHost, memory: Memory) -> Iterator[Dial]:
    clients: list[DecodeClient] = []

    def make(**named: Any) -> DecodeClient:
        clients.append(DecodeClient(prefill, memory, **named))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def serve(prefill: RankHost, memory: Memory) -> Iterator[Serve]:
    """Makes prefill ranks that answer by a script, and closes them."""
    servers: list[PrefillServer] = []

    def make(script: Script) -> PrefillServer:
        servers.append(PrefillServer(script, prefill.rank.address, memory.pool))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def core_of(host: RankHost) -> Any:
    return host.rank.transfer.core


def sender_of(host: RankHost, room: int) -> Any:
    return KVSender(cast(Any, host.rank.transfer), "", room)


def receiver_of(host: RankHost, bootstrap: str, room: int) -> Any:
    return KVReceiver(cast(Any, host.rank.transfer), bootstrap, room)


def raw_pages(pages: Any) -> common_pb2.PageSet:
    return common_pb2.PageSet(pages_u32_le=np.array(pages, "<u4").tobytes())


def runs(starts: list[int], lengths: list[int]) -> common_pb2.PageSet:
    return common_pb2.PageSet(run_starts=starts, run_lengths=lengths)


class TestEntriesOfDecode:
    """Wrong, but only for one room: that room fails, the session goes on."""

    @pytest.mark.parametrize(
        ("pages", "reason"),
        [
            ([raw_pages([PAGES])], Reason.KV_INDEX_OUT_OF_RANGE),
            ([raw_pages([0, 2**32 - 1])], Reason.KV_INDEX_OUT_OF_RANGE),
            ([], Reason.INVALID_REQUEST),
            ([raw_pages([1]), raw_pages([1])], Reason.INVALID_REQUEST),
            ([raw_pages([1])] * 5000, Reason.INVALID_REQUEST),
            ([common_pb2.PageSet(pool=1)], Reason.INVALID_REQUEST),
            ([common_pb2.PageSet(pages_u32_le=b"abc")], Reason.INVALID_REQUEST),
            ([common_pb2.PageSet(pages_u32_le=b"abcd", run_starts=[1])], Reason.INVALID_REQUEST),
            ([runs([1, 2], [1])], Reason.INVALID_REQUEST),
            ([runs([], [1])], Reason.INVALID_REQUEST),
            ([runs([2**32 - 1], [2])], Reason.INVALID_REQUEST),
            ([runs([0], [2**32 - 1])], Reason.INVALID_REQUEST),
            ([runs([0] * 1000, [2**32 - 1] * 1000)], Reason.INVALID_REQUEST),
            ([runs([0], [PAGES + 1])], Reason.INVALID_REQUEST),
            ([runs([0, 0], [PAGES, 1])], Reason.INVALID_REQUEST),
            ([raw_pages([0] * (PAGES + 1))], Reason.INVALID_REQUEST),
            ([runs([PAGES - 1], [2])], Reason.KV_INDEX_OUT_OF_RANGE),
        ],
    )
    def test_wrong_pages_fail_that_room_alone(self, dial: Dial, prefill: RankHost, pages: Any, reason: Reason) -> None:
        client = dial().open()
        wrong, right = next(ROOMS), next(ROOMS)
        entries = [
            pb.DecodeRoom(room=wrong, want=pb.WANT_WRITE, pages=pages),
            pb.DecodeRoom(room=right, want=pb.WANT_WRITE, pages=[raw_pages([1])]),
        ]
        client.send(rooms=entries)
        prefill.send(right, [1])
        states = {wrong: client.ended(wrong), right: client.ended(right)}
        assert (states[wrong].state, states[wrong].failure.reason) == (FAILED, reason)
        assert states[right].state == SUCCESS

    def test_a_run_costs_no_more_than_the_pool_has_pages(self, dial: Dial) -> None:
        client = dial().open()
        first = next(ROOMS)
        bomb = [runs([0], [2**24 - 1])]
        rooms = [pb.DecodeRoom(room=first + number, want=pb.WANT_WRITE, pages=bomb) for number in range(1, 500)]
        for _ in rooms:
            next(ROOMS)
        began = time.monotonic()
        client.send(rooms=rooms)
        client.ended(first + 499)
        assert time.monotonic() - began < 10.0

    def test_rooms_past_the_bound_are_too_many_requests_and_the_others_are_fine(
        self, dial: Dial, prefill: RankHost
    ) -> None:
        client = dial().open()
        first, count = next(ROOMS), 5000
        for _ in range(count):
            next(ROOMS)
        for start in range(0, count, 1000):
            entries = [
                pb.DecodeRoom(room=first + number, want=pb.WANT_WRITE, pages=[raw_pages([1])])
                for number in range(start, start + 1000)
            ]
            client.send(rooms=entries)
        refused: set[int] = set()
        while len(refused) < count - 4096:
            refused |= {entry.room for entry in client.read().rooms if entry.failure.reason == Reason.TOO_MANY_REQUESTS}
        assert min(refused) == first + 4096
        prefill.send(first, [1])
        assert client.ended(first).state == SUCCESS
        client.send(forget_rooms=range(first, first + count))
        eventually(lambda: not core_of(prefill).pairs[client.ref].answers)

    def test_failures_of_a_megabyte_are_cut(self, dial: Dial, prefill: RankHost) -> None:
        client = dial().open()
        text = "ä" * (MEGABYTE // 2)
        ref = rank_ref_to_pb(client.ref)
        ref.rank.engine = text
        causes = [
            common_pb2.Failure(reason=3, message=text),
            common_pb2.Failure(reason=3, metadata={"key": text}),
            common_pb2.Failure(reason=3, metadata={text: "value"}),
            common_pb2.Failure(reason=3, metadata={str(key): "x" * 100 for key in range(9000)}),
            common_pb2.Failure(reason=3, origin=ref),
        ]
        for cause in causes:
            client.want(room := next(ROOMS), STOP, failure=cause)
            last = client.ended(room)
            assert last.failure.reason == 3
            assert last.failure.ByteSize() < 8192
            with grpc.insecure_channel(prefill.rank.address) as channel:
                got = TransferServiceStub(channel).GetRoom(pb.GetRoomRequest(room=room), timeout=5)
            assert got.ByteSize() < 10_000

    def test_failures_with_impossible_times_and_reasons_are_taken(self, dial: Dial, prefill: RankHost) -> None:
        client = dial().open()
        for seconds, nanos, reason in ((2**62, 0, 3), (-(2**62), 0, 3), (0, -1, 3), (5, 2**31 - 1, 3), (0, 0, 12345)):
            cause = common_pb2.Failure(message="odd")
            cause.reason = reason  # type: ignore[assignment]
            cause.time.seconds, cause.time.nanos = seconds, nanos
            client.want(room := next(ROOMS), STOP, failure=cause)
            assert client.ended(room).failure.message == "odd"
        with grpc.insecure_channel(prefill.rank.address) as channel:
            TransferServiceStub(channel).ListRooms(pb.ListRoomsRequest(), timeout=5)

    def test_memory_that_is_not_there_fails_the_rooms_that_need_it(
        self, dial: Dial, prefill: RankHost, memory: Memory
    ) -> None:
        wild = pool_to_pb(memory.pool)
        for region in wild.regions:
            region.address = 0x1000
        for changes in (
            {"pools": [wild]},
            {"data_plane_address": b"\xff" * 1000},
            {"data_plane_address": b"{}"},
            {"data_plane_address": b"[" * 100_000},
        ):
            client = dial().open(**changes)
            client.write(room := next(ROOMS), [1])
            prefill.send(room, [1])
            last = client.ended(room)
            assert (last.state, last.writes) == (FAILED, SETTLED)
            assert last.failure.reason == Reason.TRANSFER_FAILED

    def test_pools_that_change_between_streams_are_refused(self, dial: Dial, memory: Memory) -> None:
        client = dial().open()
        larger = pool_to_pb(memory.pool)
        larger.pages *= 2
        other = dial()
        other.ref = client.ref
        assert other.refused(stream=2, pools=[larger]).reason is Reason.INVALID_REQUEST


class TestFramesOfDecode:
    """Wrong as a whole: that session ends with a reason, and its pair may come back."""

    @pytest.mark.parametrize(
        "frame",
        [
            {"rooms": [pb.DecodeRoom(room=0, want=pb.WANT_STOP)]},
            {"rooms": [pb.DecodeRoom(room=2**63, want=pb.WANT_STOP)]},
            {"rooms": [pb.DecodeRoom(room=2**64 - 1, want=pb.WANT_FORGET)]},
            {"rooms": [pb.DecodeRoom(room=1)]},
            {"forget_rooms": [0]},
            {"forget_rooms": [1, 2**63]},
        ],
    )
    def test_nonsense_ends_the_session_by_name(self, dial: Dial, frame: Any) -> None:
        client = dial().open()
        failure = client.send(**frame).goodbye()
        assert failure.reason is Reason.INVALID_REQUEST
        assert client.over() is None
        client.again(2).close()

    @pytest.mark.parametrize("want", [1, 5, 99, -1])
    def test_an_unknown_want_ends_the_session(self, dial: Dial, want: int) -> None:
        entry = pb.DecodeRoom(room=1)
        entry.want = want  # type: ignore[assignment]
        assert dial().open().send(rooms=[entry]).goodbye().metadata["field"] == "rooms[0].want"

    def test_what_came_before_the_nonsense_in_other_frames_stands(self, dial: Dial, prefill: RankHost) -> None:
        client = dial().open()
        client.write(room := next(ROOMS), [1])
        client.send(forget_rooms=[0]).goodbye()
        again = client.again(2)
        prefill.send(room, [1])
        assert again.ended(room).state == SUCCESS
        again.close()

    @pytest.mark.parametrize("raw", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x12\x02\x08", os.urandom(100) + b"\xff"])
    def test_undecodable_bytes_end_that_stream(self, dial: Dial, raw: bytes) -> None:
        client = dial().open()
        client.send_raw(raw).over()
        client.again(2).close()
        dial().dial().send_raw(raw).over()

    @pytest.mark.parametrize("size", [17 * MEGABYTE, 40 * MEGABYTE])
    def test_a_giant_frame_ends_that_stream(self, dial: Dial, size: int) -> None:
        client = dial().open()
        client.send_raw(b"\x0a\x80\x80\x80\x10" + bytes(size)).over()
        client.again(2).close()

    def test_a_frame_above_what_the_welcome_allows_is_named(self, dial: Dial) -> None:
        client = dial().open()
        client.send(rooms=[pb.DecodeRoom(room=5, want=pb.WANT_STOP, traceparent="x" * 5 * MEGABYTE)])
        failure = client.goodbye()
        assert failure.reason.name == "FRAME_TOO_LARGE" and int(failure.metadata["value"]) > 5 * MEGABYTE
        client.again(2).close()

    def test_a_giant_hello_is_refused_at_once(self, dial: Dial) -> None:
        for changes in (
            {"pools": [common_pb2.Pool(name=str(number), kind=1) for number in range(50_000)]},
            {"pools": [common_pb2.Pool(name="kv", kind=1, regions=[common_pb2.Region()] * 300_000)]},
            {"aux_item_bytes": [1] * 500_000},
            {"data_plane": "x" * MEGABYTE},
            {"to": rank_ref_to_pb(RankRef(dial().ref.rank, 1)), "features": ["y" * MEGABYTE]},
        ):
            client = dial()
            hello = client.hello(**changes)
            began = time.monotonic()
            client.dial().send(hello=hello)
            failure = client.goodbye()
            assert failure.reason is not Reason.UNSPECIFIED
            assert client.kept[-1].ByteSize() < 10_000
            assert time.monotonic() - began < 10.0

    def test_messages_after_goodbye_and_second_hellos_are_ignored(self, dial: Dial) -> None:
        client = dial().open()
        client.send(hello=client.hello(stream=9))
        client.want(room := next(ROOMS), STOP)
        assert client.ended(room).state == FAILED
        client.send(goodbye=pb.Goodbye())
        client.send(forget_rooms=[0])
        assert not client.goodbye().message

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(raw=st.lists(st.binary(max_size=200), min_size=1, max_size=4), hello=st.booleans())
    def test_random_bytes(self, dial: Dial, raw: list[bytes], hello: bool) -> None:
        client = dial().dial()
        if hello:
            client.send(hello=client.hello())
        for each in raw:
            client.send_raw(each)
        client.finish()
        client.over()
        client.close()

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        rooms=st.lists(
            st.builds(
                pb.DecodeRoom,
                room=st.integers(2**40, 2**40 + 3),
                attempt=st.sampled_from([0, 1, 2**32 - 1]),
                want=st.sampled_from([2, 3, 4]),
                time_left_ms=st.sampled_from([0, 1, 2**32 - 1]),
                first_page=st.sampled_from([0, 1, 2**32 - 1]),
                pages=st.lists(
                    st.builds(
                        common_pb2.PageSet,
                        pool=st.integers(0, 1),
                        pages_u32_le=st.binary(max_size=12),
                        run_starts=st.lists(st.integers(0, 2**32 - 1), max_size=2),
                        run_lengths=st.lists(st.integers(0, 2**32 - 1), max_size=2),
                    ),
                    max_size=2,
                ),
                traceparent=st.text(max_size=10),
            ),
            max_size=6,
        ),
        forget=st.lists(st.integers(2**40, 2**40 + 3), max_size=3),
    )
    def test_random_frames(self, dial: Dial, rooms: list[pb.DecodeRoom], forget: list[int]) -> None:
        client = dial().open()
        for entry in rooms:
            client.send(rooms=[entry])
        client.send(rooms=rooms, forget_rooms=forget)
        client.want(marker := 2**41, STOP)
        assert client.ended(marker).state == FAILED
        client.send(forget_rooms=[marker])
        client.close()

    def test_the_other_methods_survive_random_bytes(self, prefill: RankHost, decode: RankHost) -> None:
        source = np.random.default_rng(3)
        for host in (prefill, decode):
            with grpc.insecure_channel(host.rank.address) as channel:
                for name in ("ListSessions", "ListRooms", "GetRoom", "CancelRoom", "GetTopology"):
                    call = channel.unary_unary(f"/kvgrpc.v1.TransferService/{name}")
                    for size in (0, 1, 5, 50):
                        try:
                            call(source.bytes(size), timeout=5)
                        except grpc.RpcError as error:
                            assert cast(Any, error).code() is not grpc.StatusCode.DEADLINE_EXCEEDED


class TestSessionsOfDecode:
    def test_200_sessions_that_say_nothing_more(self, prefill: RankHost, memory: Memory) -> None:
        sessions = [DecodeClient(prefill, memory) for _ in range(200)]
        for client in sessions[:100]:
            client.dial(read=False)
        for client in sessions[100:]:
            client.dial(read=False).send(hello=client.hello())
        eventually(lambda: len(core_of(prefill).pairs) >= 100)
        for client in sessions:
            client.close()
        eventually(lambda: len(core_of(prefill).pairs) < 10)

    def test_a_peer_that_never_reads_is_given_up_and_its_call_ends(self, dial: Dial, prefill: RankHost) -> None:
        transfer = cast(Any, prefill.rank.transfer)
        before = session_tasks(prefill)
        client = dial()
        client.dial(read=False).send(hello=client.hello())
        eventually(lambda: client.ref in core_of(prefill).pairs)
        first = next(ROOMS)
        for _ in range(4000):
            next(ROOMS)
        cause = common_pb2.Failure(reason=3, message="x" * 1000)
        client.send(rooms=[pb.DecodeRoom(room=first + n, want=pb.WANT_STOP, failure=cause) for n in range(4000)])
        eventually(lambda: client.ref not in core_of(prefill).pairs)
        eventually(lambda: session_tasks(prefill) <= before)
        assert client.ref not in [pair.ref for pair in transfer._sessions]

    def test_a_newer_stream_ends_an_older_one_that_never_reads(self, dial: Dial, prefill: RankHost) -> None:
        client = dial()
        client.dial(read=False).send(hello=client.hello())
        eventually(lambda: client.ref in core_of(prefill).pairs)
        cause = common_pb2.Failure(reason=3, message="x" * 1000)
        first = next(ROOMS)
        for _ in range(2000):
            next(ROOMS)
        client.send(rooms=[pb.DecodeRoom(room=first + n, want=pb.WANT_STOP, failure=cause) for n in range(2000)])
        again = client.again(2)
        assert again.ended(first).state == FAILED
        again.close()


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
        eventually(lambda: receiver.poll() is KVPoll.Failed)
        assert receiver.failure.reason is reason, receiver.failure
        return receiver.failure

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
            eventually(lambda receiver=receiver: receiver.release_safe)
        assert np.array_equal(decode.aux[3], before[3])

    def test_it_welcomes_as_somebody_else(self, decode: RankHost, serve: Serve, prefill: RankHost, room: int) -> None:
        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            welcome = server.welcome()
            getattr(welcome.welcome, "from").CopyFrom(rank_ref_to_pb(prefill.rank.ref))
            yield welcome
            yield from (pb.SessionResponse() for request in requests)

        failure = self.fails(self.meet(decode, serve(script), room), Reason.INVALID_REQUEST)
        assert failure.metadata["field"] == "welcome.from"

    def test_it_welcomes_again_and_again(self, decode: RankHost, serve: Serve, room: int) -> None:
        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            for _ in range(50):
                yield server.welcome()
            for request in requests:
                if request.rooms:
                    yield said(room, FAILED, failure=common_pb2.Failure(reason=3, message="enough"))

        server = serve(script)
        before = session_tasks(decode)
        receiver = self.meet(decode, server, room)
        eventually(lambda: receiver.poll() is KVPoll.Failed)
        assert session_tasks(decode) <= before + 3

    def test_it_says_success_before_it_was_told_where_to_write(self, decode: RankHost, serve: Serve, room: int) -> None:
        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            yield said(room, SUCCESS, aux=b"x" * 64)
            yield server.welcome()
            yield said(room, SUCCESS, aux=b"x" * 64)
            yield from (pb.SessionResponse() for request in requests)

        receiver = receiver_of(decode, serve(script).bootstrap, room)
        eventually(lambda: receiver.poll() is KVPoll.Failed)
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
        eventually(lambda: mine.poll() is KVPoll.Failed)
        assert receiver.poll() is not KVPoll.Success
        eventually(lambda: len({number for each in server.heard for number in each.forget_rooms}) >= 3000)
        receiver.abort()

    def test_it_goes_back(self, decode: RankHost, serve: Serve, room: int) -> None:
        server = serve(
            self.answering(
                said(room, pb.ROOM_STATE_TRANSFERRING, OPEN, pages_done=2),
                said(room, pb.ROOM_STATE_BOOTSTRAPPING, OPEN),
                said(room, FAILED, SETTLED, failure=common_pb2.Failure(reason=9, message="first")),
                said(room, SUCCESS, OPEN, aux=b"y" * 64),
                said(room, SUCCESS, SETTLED, aux=b"y" * 64),
                said(room, FAILED, SETTLED, failure=common_pb2.Failure(reason=8, message="second")),
            )
        )
        receiver = self.meet(decode, server, room)
        assert self.fails(receiver, Reason.TRANSFER_FAILED).message == "first"
        eventually(lambda: receiver.release_safe)

    def test_it_fails_without_a_failure(self, decode: RankHost, serve: Serve, room: int) -> None:
        receiver = self.meet(decode, serve(self.answering(said(room, FAILED))), room)
        assert "without a reason" in self.fails(receiver, Reason.UNSPECIFIED).message

    def test_its_failure_has_a_megabyte_and_an_impossible_time(self, decode: RankHost, serve: Serve, room: int) -> None:
        failure = common_pb2.Failure(reason=9, message="m" * MEGABYTE, metadata={"k": "v" * MEGABYTE})
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
        eventually(lambda: server.sessions >= 3)
        server.script = self.answering(said(room, SUCCESS, aux=b"z" * 64, pages_done=2))
        eventually(lambda: receiver.poll() is KVPoll.Success)
        assert decode.aux_row(3) == b"z" * 64

    def test_it_sends_a_frame_above_the_librarys_limit(self, decode: RankHost, serve: Serve, room: int) -> None:
        server = serve(self.answering(b"\x0a\x80\x80\x80\x10" + bytes(40 * MEGABYTE)))
        receiver = self.meet(decode, server, room)
        eventually(lambda: server.sessions >= 2)
        receiver.abort()
        server.script = self.answering()

    def test_it_never_answers_the_hello(self, decode: RankHost, serve: Serve, room: int) -> None:
        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            server.stopping.wait(20)
            yield pb.SessionResponse()

        failure = self.fails(self.meet(decode, serve(script), room), Reason.PEER_LOST)
        assert "no welcome" in failure.metadata["how"]

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
        eventually(lambda: receiver.poll() is KVPoll.Failed)
        assert receiver.failure.reason in (reason or 0, Reason.PEER_LOST)
        eventually(lambda: receiver.release_safe)

    def test_it_floods(self, decode: RankHost, serve: Serve, room: int) -> None:
        frame = pb.SessionResponse(
            rooms=[pb.PrefillRoom(room=n, state=SUCCESS, writes=SETTLED) for n in range(1, 5_000)]
        )

        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            yield server.welcome()
            for _ in range(10):
                yield frame
            yield said(room, FAILED, failure=common_pb2.Failure(reason=3))
            yield from (pb.SessionResponse() for request in requests)

        self.fails(self.meet(decode, serve(script), room), Reason.ROOM_CANCELLED)

    def test_it_asks_for_tiny_frames(self, decode: RankHost, serve: Serve, room: int) -> None:
        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            yield server.welcome(max_frame_bytes=1)
            for request in requests:
                yield from (said(entry.room, SUCCESS, aux=b"t" * 64) for entry in request.rooms)

        server = serve(script)
        receivers = [self.meet(decode, server, next(ROOMS)) for _ in range(20)]
        eventually(lambda: all(receiver.poll() is KVPoll.Success for receiver in receivers))

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(raw=st.binary(max_size=100))
    def test_it_answers_at_random(self, decode: RankHost, serve: Serve, raw: bytes) -> None:
        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[Any]:
            yield raw
            yield server.welcome()
            yield raw

        server = serve(script)
        receiver = self.meet(decode, server, next(ROOMS))
        eventually(lambda: server.sessions >= 1)
        receiver.abort()
        server.close()
        eventually(lambda: receiver.release_safe)


class TestEnginesThatErr:
    """What an engine hands over wrongly fails its room, not the session that all rooms share."""

    def test_text_that_is_no_utf8_harms_nobody(self, prefill: RankHost, decode: RankHost) -> None:
        rooms = [next(ROOMS) for _ in range(3)]
        bootstrap = f"{prefill.rank.address}/P"
        receivers = [receiver_of(decode, bootstrap, room) for room in rooms[:2]]
        receivers.append(KVReceiver(cast(Any, decode.rank.transfer), bootstrap, rooms[2], traceparent="\ud800"))
        for receiver in receivers:
            receiver.init([20], 4)
        senders = [sender_of(prefill, room) for room in rooms]
        eventually(lambda: all(sender.poll() is KVPoll.WaitingForInput for sender in senders))
        receivers[0].abort("\ud800")
        senders[1].abort("\udfff")
        eventually(lambda: senders[0].failure is not None and receivers[1].failure is not None)
        assert senders[0].failure.reason is receivers[1].failure.reason is Reason.ROOM_CANCELLED
        senders[2].init(1, 0)
        senders[2].send([1])
        eventually(lambda: receivers[2].poll() is KVPoll.Success)

    @pytest.mark.parametrize("first_page", [-1, 2**32, "x", 1.5])
    def test_a_first_page_that_is_none_fails_that_room(
        self, prefill: RankHost, decode: RankHost, first_page: Any
    ) -> None:
        receiver = receiver_of(decode, f"{prefill.rank.address}/P", next(ROOMS))
        receiver.init([1], 0, first_page)
        eventually(lambda: receiver.poll() is KVPoll.Failed)
        assert receiver.failure.reason is Reason.INVALID_REQUEST

    @pytest.mark.parametrize("attempt", [-1, 2**32, 1.5, None, "1"])
    def test_an_attempt_that_is_none_fails_that_room(self, prefill: RankHost, decode: RankHost, attempt: Any) -> None:
        receiver = KVReceiver(cast(Any, decode.rank.transfer), f"{prefill.rank.address}/P", next(ROOMS), attempt)
        assert receiver.failure is not None
        assert receiver.failure.reason is Reason.INVALID_REQUEST

    @pytest.mark.parametrize("dp_rank", [-1, 7, "x"])
    def test_a_dp_rank_that_is_none_fails_that_room(self, prefill: RankHost, decode: RankHost, dp_rank: Any) -> None:
        receiver = KVReceiver(cast(Any, decode.rank.transfer), f"{prefill.rank.address}/P", next(ROOMS), 0, dp_rank)
        eventually(lambda: receiver.failure is not None)

    @pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:0", "127.0.0.1:99999", "\ud800:1", None, []])
    def test_an_address_that_is_none_fails_that_room(self, decode: RankHost, address: Any) -> None:
        receiver = receiver_of(decode, address, next(ROOMS))
        eventually(lambda: receiver.failure is not None)


def test_nothing_of_all_this_stays(prefill: RankHost, decode: RankHost) -> None:
    """Runs last: what strangers named is forgotten, and so are they."""
    eventually(lambda: len(core_of(prefill).pairs) <= 1)
    eventually(lambda: len(core_of(prefill).rooms) <= 1)
    eventually(lambda: len(core_of(decode).pairs) <= 1)
    eventually(lambda: len(core_of(decode).rooms) <= 1)
    transfer = cast(Any, prefill.rank.transfer)
    assert len(transfer._sessions) <= 1
    assert core_of(prefill).open_writes == 0
    assert decode.rank.transfer.held_pages == 0


def session_tasks(host: RankHost) -> int:
    """Tasks of the rank's loop that serve or hold a session."""
    loop = host.rank._loop.loop

    async def count() -> int:
        return sum("session" in repr(task) or "Session" in repr(task) for task in asyncio.all_tasks(loop))

    return host.rank._loop.run(count(), SECONDS)
