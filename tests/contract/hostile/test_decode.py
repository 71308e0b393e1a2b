"""Decode ranks that say nonsense, too much, or nothing: each hurts itself alone (rule 15, hostile frames)."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgrpc.errors import Reason
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol.types import RoomKey
from kvgrpc.v1 import common_pb2, error_reason_pb2
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.v1.transfer_service_pb2_grpc import TransferServiceStub
from kvgrpc.wire import pool_to_pb, rank_ref_to_pb
from tests.support.rank_host import AUX_BYTES, LAYERS, PAGES, RankHost
from tests.support.transfer_peers import FAILED, SETTLED, STOP, SUCCESS, DecodeClient, Memory, core_of, session_tasks
from tests.support.waiting import wait_until

Dial = Callable[..., DecodeClient]
ROOMS = itertools.count(2_000_000)
MEGABYTE = 1 << 20
CANCELLED = error_reason_pb2.ERROR_REASON_ROOM_CANCELLED


def raw_pages(pages: Any) -> common_pb2.PageSet:
    return common_pb2.PageSet(pages_u32_le=np.array(pages, "<u4").tobytes())


def runs(starts: list[int], lengths: list[int]) -> common_pb2.PageSet:
    return common_pb2.PageSet(run_starts=starts, run_lengths=lengths)


@contextlib.contextmanager
def at_most(limit: int) -> Iterator[None]:
    """What this process, both ends, allocates meanwhile; numpy's arrays count."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def all_ended(client: DecodeClient, rooms: Sequence[int]) -> list[Any]:
    """The terminal states of rooms that may come in one frame."""
    ended: dict[int, Any] = {}
    while len(ended) < len(rooms):
        ended.update({each.room: each for each in client.read().rooms if each.state >= SUCCESS})
    return [ended[room] for room in rooms]


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
            ([raw_pages([5, 5])], Reason.INVALID_REQUEST),
            ([raw_pages([*range(1, 40), 20])], Reason.INVALID_REQUEST),
            ([runs([3, 1], [2, 3])], Reason.INVALID_REQUEST),
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
        states = dict(zip((wrong, right), all_ended(client, [wrong, right]), strict=True))
        assert (states[wrong].state, states[wrong].failure.reason) == (FAILED, reason)
        assert states[right].state == SUCCESS

    @pytest.mark.parametrize(
        ("pages", "twice"),
        [(raw_pages([7, 1, 7]), 7), (raw_pages([*range(30), 4]), 4), (runs([0, 20, 25], [9, 6, 9]), 25)],
    )
    def test_a_page_given_twice_is_named(self, dial: Dial, pages: Any, twice: int) -> None:
        """Of two pages of the prompt one would be lost, and decode would be told that both are there."""
        client, room = dial().open(), next(ROOMS)
        client.send(rooms=[pb.DecodeRoom(room=room, want=pb.WANT_WRITE, pages=[pages])])
        last = client.ended(room)
        assert last.failure.reason == Reason.INVALID_REQUEST
        assert last.failure.metadata["field"] == "rooms[0].pages[0]" and last.failure.metadata["value"] == str(twice)

    def test_a_run_costs_no_more_than_the_pool_has_pages(self, dial: Dial) -> None:
        client = dial().open()
        bomb = [runs([0], [2**24 - 1])]
        rooms = [next(ROOMS) for _ in range(500)]
        with at_most(32 * MEGABYTE):  # the pages of one of them are 64 MiB
            client.send(rooms=[pb.DecodeRoom(room=room, want=pb.WANT_WRITE, pages=bomb) for room in rooms])
            for last in all_ended(client, rooms):
                assert last.failure.reason == Reason.INVALID_REQUEST
                assert last.failure.metadata["field"].endswith(".pages[0].run_lengths")

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
        wait_until(lambda: not core_of(prefill).pairs[client.ref].answers)

    def test_failures_of_a_megabyte_are_cut(self, dial: Dial, prefill: RankHost) -> None:
        client = dial().open()
        text = "ä" * (MEGABYTE // 2)
        ref = rank_ref_to_pb(client.ref)
        ref.rank.engine = text
        causes = [
            common_pb2.Failure(reason=CANCELLED, message=text),
            common_pb2.Failure(reason=CANCELLED, metadata={"key": text}),
            common_pb2.Failure(reason=CANCELLED, metadata={text: "value"}),
            common_pb2.Failure(reason=CANCELLED, metadata={str(key): "x" * 100 for key in range(9000)}),
            common_pb2.Failure(reason=CANCELLED, origin=ref),
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
        for number, region in enumerate(wild.regions):
            region.address = 0x1000 + number * wild.pages * region.page_stride_bytes
        for changes in (
            {"pools": [wild]},
            {"data_plane_address": b"\xff" * 1000},
            {"data_plane_address": b"{}"},
            {"data_plane_address": b"[" * 65_536},
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

    def test_so_is_a_layout_with_other_ranks_that_name_its_rooms(self, dial: Dial) -> None:
        """A sender that had been aborted got its pages back while they were still written to it."""
        client = dial().open()
        other = dial()
        other.ref = client.ref
        refused = other.refused(stream=2, layout=common_pb2.Layout(dp=1, pp=2, cp=1, tp=1))
        assert (refused.reason, refused.metadata["field"]) == (Reason.INVALID_REQUEST, "hello.layout")


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

    @pytest.mark.parametrize("want", [5, 99, -1])
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
        client.send(rooms=[pb.DecodeRoom(room=5, want=pb.WANT_STOP, traceparent="x" * (4 * MEGABYTE + 20_000))])
        failure = client.goodbye()
        assert failure.reason.name == "FRAME_TOO_LARGE" and int(failure.metadata["value"]) > 4 * MEGABYTE
        client.again(2).close()

    def test_more_rooms_than_a_frame_may_have_are_refused_before_any_is_looked_at(self, dial: Dial) -> None:
        client = dial().open()
        client.send(forget_rooms=list(range(1, 65_538)))
        failure = client.goodbye()
        assert failure.reason.name == "FRAME_TOO_LARGE"
        assert failure.metadata == {"limit": "65536", "value": "65537"}

    def test_one_frame_takes_many_turns_of_the_loop_and_others_have_theirs_between(
        self, dial: Dial, prefill: RankHost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        applied: list[int] = []
        core = core_of(prefill)
        frame = core.on_frame

        def on_frame(stream: object, ref: RankRef, entries: Any) -> None:
            applied.append(len(entries))
            frame(stream, ref, entries)

        monkeypatch.setattr(core, "on_frame", on_frame)
        client = dial().open()
        client.send(forget_rooms=list(range(1, 65_537)))
        room = next(ROOMS)
        client.want(room, STOP)
        client.ended(room)
        assert sum(applied) >= 65_536 and max(applied) <= 1024

    def test_runs_of_whole_pools_cost_nothing(self, dial: Dial, prefill: RankHost) -> None:
        client = dial()
        pool = pool_to_pb(client.memory.pool)
        pool.pages = 2**24
        for number, region in enumerate(pool.regions):
            region.address = 0x1000 + number * pool.pages * region.page_stride_bytes
        client.open(pools=[pool])
        rooms, whole = [next(ROOMS) for _ in range(60)], [runs([0], [2**24])]
        with at_most(32 * MEGABYTE):
            client.send(rooms=[pb.DecodeRoom(room=room, want=pb.WANT_WRITE, pages=whole) for room in rooms])
            for last in all_ended(client, rooms):
                assert last.failure.reason == Reason.INVALID_REQUEST, "it wants more than this prefill's pool has"

    def test_a_trace_context_that_is_none_fails_its_room_and_is_not_kept(self, dial: Dial, prefill: RankHost) -> None:
        client, long, good = dial().open(), next(ROOMS), next(ROOMS)
        client.write(long, [1], traceparent="x" * 100_000).write(good, [1])
        last = client.ended(long)
        assert last.failure.reason == Reason.INVALID_REQUEST and "traceparent" in last.failure.metadata["field"]
        assert len(last.failure.SerializeToString()) < 1024
        wait_until(lambda: RoomKey(good) in core_of(prefill).rooms)
        with grpc.insecure_channel(prefill.rank.address) as channel:  # past failures are remembered
            kept = TransferServiceStub(channel).GetRoom(pb.GetRoomRequest(room=long), timeout=20)
        assert kept.room.state == FAILED and not kept.room.traceparent

    def test_a_list_of_rooms_is_cut_where_a_message_of_any_client_ends(self, dial: Dial, prefill: RankHost) -> None:
        """Whatever peers said of the rooms that failed: clients of other languages take 4 MiB."""
        client = dial().open()
        why = common_pb2.Failure(reason=3, message="\u20ac" * 1024, metadata={"k": "\u20ac" * 2000})  # type: ignore[arg-type]
        rooms = [next(ROOMS) for _ in range(600)]
        for part in (rooms[:300], rooms[300:]):
            client.send(rooms=[pb.DecodeRoom(room=room, want=STOP, failure=why) for room in part])
            all_ended(client, part)
        found, token = set[int](), ""
        with grpc.insecure_channel(prefill.rank.address) as channel:
            while True:
                request = pb.ListRoomsRequest(page_size=1000, page_token=token)
                page = TransferServiceStub(channel).ListRooms(request, timeout=20)
                assert page.ByteSize() < 4 << 20
                found.update(room.room for room in page.rooms)
                token = page.next_page_token
                if not token:
                    break
        assert found >= set(rooms)

    def test_frames_to_a_decode_fit_what_it_said_it_takes(self, dial: Dial) -> None:
        least = 2 * (64 + 8192) + AUX_BYTES
        refused = dial().refused(max_frame_bytes=least - 1)
        assert (refused.reason, refused.metadata["field"]) == (Reason.INVALID_REQUEST, "hello.max_frame_bytes")
        client = dial().open(max_frame_bytes=least)
        rooms = [next(ROOMS) for _ in range(200)]
        client.send(rooms=[pb.DecodeRoom(room=room, want=STOP) for room in rooms])
        all_ended(client, rooms)
        assert max(message.ByteSize() for message in client.kept) <= least

    def test_regions_that_share_memory_are_refused_by_name(self, dial: Dial) -> None:
        """A page that arrives in one of them would be the end of another's."""
        client = dial()
        pool = pool_to_pb(client.memory.pool)
        pool.regions[1].address = pool.regions[0].address + 1
        client.dial().send(hello=client.hello(pools=[pool]))
        failure = client.goodbye()
        assert failure.reason is Reason.INVALID_REQUEST
        assert failure.metadata["field"].startswith("hello.pools[0].regions[")
        assert failure.metadata["rule"].startswith("memory of its own")

    def test_layers_as_far_apart_as_there_are_numbers_cost_nothing(self, dial: Dial, memory: Memory) -> None:
        """All numbers between them were walked over, two minutes in which the loop did nothing else."""
        far = pool_to_pb(memory.pool)
        far.regions[0].layer, far.regions[-1].layer = LAYERS, 2**32 - 1
        refused = dial().refused(pools=[far], layout=common_pb2.Layout(dp=1, pp=2, cp=1, tp=1))
        assert refused.reason is Reason.PARALLEL_LAYOUT_MISMATCH
        assert "pools[0].layers" in refused.metadata["mismatchedFields"]

    def test_pages_of_no_tokens_that_say_where_their_tokens_are_are_refused(self, dial: Dial, memory: Memory) -> None:
        """How many bytes a token has was divided by zero: INTERNAL, and a bug in the log."""
        states = pool_to_pb(memory.pool)
        states.MergeFrom(common_pb2.PagePool(kind=common_pb2.POOL_KIND_STATE, axes="token,head,dim", head_count=1))
        states.page_tokens = 0
        refused = dial().refused(pools=[states])
        assert refused.reason is Reason.PARALLEL_LAYOUT_MISMATCH
        assert "pools[0].page_tokens" in refused.metadata["mismatchedFields"]

    def test_a_giant_hello_is_refused_at_once(self, dial: Dial) -> None:
        pools = [common_pb2.PagePool(name=str(number), kind=common_pb2.POOL_KIND_KV) for number in range(50_000)]
        regions = common_pb2.PagePool(
            name="kv", kind=common_pb2.POOL_KIND_KV, regions=[common_pb2.PoolRegion()] * 300_000
        )
        somebody = rank_ref_to_pb(RankRef(dial().ref.rank, 1))
        for reason, field, changes in (
            (Reason.INVALID_REQUEST, "hello.pools", {"pools": pools}),
            (Reason.INVALID_REQUEST, "hello.pools.regions", {"pools": [regions]}),
            (Reason.INVALID_REQUEST, "hello.aux_item_bytes", {"aux_item_bytes": [1] * 500_000}),
            (Reason.INVALID_REQUEST, "hello.waiting_rooms", {"waiting_rooms": [pb.RoomKey(room=1)] * 1_025}),
            (Reason.PARALLEL_LAYOUT_MISMATCH, None, {"data_plane": "x" * MEGABYTE}),
            (Reason.INVALID_REQUEST, "hello.data_plane_address", {"data_plane_address": b"y" * 65_537}),
            (Reason.WRONG_RANK, None, {"to": somebody}),
            (Reason.FRAME_TOO_LARGE, None, {"data_plane_address": b"y" * (4 * MEGABYTE + 10_000)}),
        ):
            client = dial()
            hello = client.hello(**changes)
            began = time.monotonic()
            client.dial().send(hello=hello)
            failure = client.goodbye()
            assert (failure.reason, failure.metadata.get("field")) == (reason, field)
            assert client.kept[-1].ByteSize() < 10_000
            assert time.monotonic() - began < 10.0

    @pytest.mark.parametrize("sizes", [{"tp": 2**30}, {"tp": 32, "pp": 9}])
    def test_more_decode_ranks_than_a_room_may_have_are_refused(self, dial: Dial, sizes: dict[str, int]) -> None:
        """Each room that a sender claimed got a record, a handle and an answer for every one of them."""
        refused = dial().refused(layout=common_pb2.Layout(**{"dp": 1, "pp": 1, "cp": 1, "tp": 1, **sizes}))
        assert (refused.reason, refused.metadata["field"]) == (Reason.INVALID_REQUEST, "hello.layout")
        assert "at most 256" in refused.message

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
                for name in ("ListSessions", "ListRooms", "GetRoom", "CancelRoom", "GetRank"):
                    call: Any = channel.unary_unary(f"/kvgrpc.v1.TransferService/{name}")
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
        wait_until(lambda: len(core_of(prefill).pairs) >= 100)
        for client in sessions:
            client.close()
        wait_until(lambda: len(core_of(prefill).pairs) < 10)

    def test_a_peer_that_never_reads_is_given_up_and_its_call_ends(self, dial: Dial, prefill: RankHost) -> None:
        transfer = cast(Any, prefill.rank.transfer)
        before = session_tasks(prefill)
        client = dial()
        client.dial(read=False).send(hello=client.hello())
        wait_until(lambda: client.ref in core_of(prefill).pairs)
        first = next(ROOMS)
        for _ in range(4000):
            next(ROOMS)
        cause = common_pb2.Failure(reason=CANCELLED, message="x" * 1000)
        client.send(rooms=[pb.DecodeRoom(room=first + n, want=pb.WANT_STOP, failure=cause) for n in range(4000)])
        wait_until(lambda: client.ref not in core_of(prefill).pairs)
        wait_until(lambda: session_tasks(prefill) <= before)
        assert client.ref not in [pair.ref for pair in transfer._sessions]

    def test_a_newer_stream_ends_an_older_one_that_never_reads(self, dial: Dial, prefill: RankHost) -> None:
        client = dial()
        client.dial(read=False).send(hello=client.hello())
        wait_until(lambda: client.ref in core_of(prefill).pairs)
        cause = common_pb2.Failure(reason=CANCELLED, message="x" * 1000)
        first = next(ROOMS)
        for _ in range(2000):
            next(ROOMS)
        client.send(rooms=[pb.DecodeRoom(room=first + n, want=pb.WANT_STOP, failure=cause) for n in range(2000)])
        wait_until(lambda: core_of(prefill).pairs[client.ref].rooms)  # what comes after the newer stream does not count
        again = client.again(2)
        assert again.ended(first).state == FAILED
        again.close()
