"""Frames carry rooms unchanged, whatever their size; what is wrong with one entry stays with that entry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.errors import Failure, InvalidRequest, Reason
from kvgrpc.transfer import wire
from kvgrpc.transfer.protocol.types import DecodeEntry, Destination, PrefillEntry, RoomKey, RoomState, Want, Writes
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.v1.common_pb2 import PageSet
from kvgrpc.wire import failure_from_pb

POOLS = [("kv", 2**31)]
pages = st.lists(st.integers(0, 2**31 - 1), max_size=40, unique=True) | st.integers(0, 2**20).flatmap(
    lambda start: st.integers(0, 60).map(lambda count: list(range(start, start + count)))
)
keys = st.tuples(st.integers(1, 2**63 - 1), st.integers(0, 2**32 - 1)).map(lambda pair: RoomKey(*pair))


@given(pages)
def test_page_sets_round_trip(numbers: list[int]) -> None:
    message = PageSet()
    wire.fill_page_set(message, Destination(np.array(numbers, dtype=np.uint32)))
    read = wire.destination_from_pb(PageSet.FromString(message.SerializeToString()), first_page=7)
    assert (read.pages.tolist(), read.first_page) == (numbers, 7)


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        (PageSet(pool=2), "rooms[1].pages[0].pool: must be 0, in the order of the Hello, not 2"),
        (PageSet(pages_u32_le=b"abc"), "rooms[1].pages[0].pages_u32_le: must be a multiple of 4 bytes, not 3"),
        (PageSet(pages_u32_le=bytes(4), run_starts=[1]), "rooms[1].pages[0].run_starts: must be empty when"),
        (PageSet(pages_u32_le=bytes(8)), "rooms[1].pages[0]: must be page numbers that are there once, not 0"),
        (PageSet(run_starts=[1, 2]), "rooms[1].pages[0].run_lengths: must be as many as run_starts"),
    ],
)
def test_what_is_wrong_with_pages_is_named_by_its_place_in_the_frame(pages: PageSet, text: str) -> None:
    frame = pb.SessionRequest(rooms=[pb.DecodeRoom(room=room, want=pb.WANT_WRITE) for room in (1, 2)])
    frame.rooms[0].pages.add()
    frame.rooms[1].pages.append(pages)
    right, wrong = wire.parse_request(frame, [("kv", 8)])
    assert right.error is None and wrong.destination is None
    assert isinstance(wrong.error, InvalidRequest) and wrong.error.message.startswith(text)
    assert wrong.error.metadata["field"] == text.partition(":")[0] == wrong.error.violations[0].field


def test_runs_only_where_they_are_at_most_one_for_eight_pages() -> None:
    runs, raw = PageSet(), PageSet()
    wire.fill_page_set(runs, Destination(np.arange(16, dtype=np.uint32)))
    wire.fill_page_set(raw, Destination(np.array([0, 1, 2, 3, 9, 10, 11, 12], dtype=np.uint32)))
    assert (list(runs.run_starts), list(runs.run_lengths), runs.pages_u32_le) == ([0], [16], b"")
    assert not raw.run_starts and len(raw.pages_u32_le) == 32


@pytest.mark.parametrize(("pool", "allowed"), [(1, 1), (8, 1), (9, 2), (2**10, 128)])
def test_runs_are_at_most_one_for_eight_pages_of_the_pool(pool: int, allowed: int) -> None:
    """Empty runs, or short ones, would fill a frame with two million of them: no sender has so many of so few pages."""
    empty = PageSet(run_starts=[0] * allowed, run_lengths=[0] * allowed)
    assert wire.destination_from_pb(empty, pool).count == 0
    empty.run_starts.append(0)
    empty.run_lengths.append(0)
    with pytest.raises(InvalidRequest, match=f"at most {allowed}, one for 8 pages of {pool}") as raised:
        wire.destination_from_pb(empty, pool)
    assert (raised.value.metadata["field"], raised.value.metadata["value"]) == ("run_starts", str(allowed + 1))


def test_the_most_runs_that_a_sender_makes_of_a_pool_are_taken() -> None:
    """Every page of the pool, in runs of eight, the last one first."""
    starts = np.arange(128)[::-1] * 8
    numbers = (starts[:, None] + np.arange(8)).ravel().astype(np.uint32)
    message = PageSet()
    wire.fill_page_set(message, Destination(numbers))
    assert len(message.run_starts) == 128
    assert wire.destination_from_pb(message, 1024).pages.tolist() == numbers.tolist()


@given(st.lists(st.tuples(keys, pages, st.integers(0, 2**20)), max_size=8), st.integers(700, 4000))
def test_decode_entries_round_trip_in_frames_of_any_size(
    rooms: list[tuple[RoomKey, list[int], int]], limit: int
) -> None:
    entries = [
        DecodeEntry(key, Want.WRITE, Destination(np.array(numbers, np.uint32), first), 5000, None, "00-ab-cd-01")
        for key, numbers, first in rooms
    ]
    entries += [DecodeEntry(key, Want.FORGET) for key, _, _ in rooms]
    too_large: list[DecodeEntry] = []
    frames = [frame.SerializeToString() for frame in wire.encode_requests(entries, limit, too_large)]
    assert not too_large and all(len(frame) <= limit for frame in frames)
    decoded = [entry for frame in frames for entry in wire.parse_request(pb.SessionRequest.FromString(frame), POOLS)]
    said = sorted((entry.key, entry.want) for entry in decoded)  # order between rooms means nothing
    assert said == sorted((entry.key, entry.want) for entry in entries)
    writes = [entry for entry in decoded if entry.want is Want.WRITE]
    for one, other in zip(entries[: len(rooms)], writes, strict=True):
        assert other.error is None and one.destination is not None and other.destination is not None
        assert one.destination.same(other.destination)
        assert (other.time_left_ms, other.traceparent) == (5000, "00-ab-cd-01")


def test_an_entry_that_no_frame_can_carry_is_told_and_leaves_the_others_alone() -> None:
    large, small = (
        DecodeEntry(RoomKey(room), Want.WRITE, Destination(np.arange(0, 2 * count, 2, dtype=np.uint32)))
        for room, count in ((1, 2000), (2, 10))
    )
    too_large: list[DecodeEntry] = []
    (frame,) = wire.encode_requests([large, small], 4096, too_large)
    assert too_large == [large]
    assert [room.room for room in frame.rooms] == [2]


def test_what_a_room_says_besides_its_pages_counts_too() -> None:
    pages = Destination(np.array([1], dtype=np.uint32))
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    entries = [DecodeEntry(RoomKey(2**63 - n, 2**32 - 1), Want.WRITE, pages, 2**31, None, trace) for n in range(1, 500)]
    failure = Failure(Reason.ROOM_CANCELLED, "x" * 1000, {"by": "y" * 1000}, "z" * 100)
    entries += [DecodeEntry(RoomKey(2**63 - n), Want.STOP, failure=failure) for n in range(500, 600)]
    frames = list(wire.encode_requests(entries, 16_384, []))
    assert sum(len(frame.rooms) for frame in frames) == len(entries)
    assert all(frame.ByteSize() <= 16_384 for frame in frames)


def test_a_frame_stays_below_its_limit_when_its_rooms_allow() -> None:
    entries = [
        DecodeEntry(RoomKey(room), Want.WRITE, Destination(np.arange(0, 200, 2, dtype=np.uint32)))
        for room in range(1, 100)
    ]
    frames = list(wire.encode_requests(entries, 4096, []))
    assert len(frames) > 1
    assert all(len(frame.SerializeToString()) <= 4096 for frame in frames)


@given(
    keys,
    st.sampled_from(RoomState),
    st.sampled_from(Writes),
    st.integers(0, 2**32 - 1),
    st.binary(max_size=100),
)
def test_prefill_entries_round_trip(
    key: RoomKey, state: RoomState, writes: Writes, pages_done: int, aux: bytes
) -> None:
    failure = Failure(Reason.TRANSFER_FAILED, "no", {"outcome": "REJECTED"}, "P/dp0/pp0/cp0/tp0@7", 12.5, 2.5)
    entry = PrefillEntry(key, state, writes, pages_done, aux, failure if state is RoomState.FAILED else None)
    (frame,) = wire.encode_responses([entry], 1 << 20)
    assert list(wire.parse_response(pb.SessionResponse.FromString(frame.SerializeToString()))) == [entry]


@pytest.mark.parametrize(
    ("seconds", "nanos", "kept"), [(2**62, 2**31 - 1, 3600.0), (-(2**62), -(2**31), 0.0), (1, 500_000_000, 1.5)]
)
def test_whatever_a_peer_says_of_when_to_come_again_is_within_an_hour(seconds: int, nanos: int, kept: float) -> None:
    said = common_pb2.Failure(message="no")
    said.retry_after.seconds, said.retry_after.nanos = seconds, nanos
    assert failure_from_pb(said).retry_after == kept


@pytest.mark.parametrize(
    ("room", "error"),
    [
        (pb.DecodeRoom(room=5, want=pb.WANT_WRITE), "rooms[0].pages"),
        (pb.DecodeRoom(room=5, want=pb.WANT_WRITE, pages=[PageSet(pages_u32_le=b"123")]), "pages_u32_le"),
        (pb.DecodeRoom(room=5, want=pb.WANT_WRITE, pages=[PageSet(run_starts=[1])]), "run_lengths"),
        (
            pb.DecodeRoom(room=5, want=pb.WANT_WRITE, pages=[PageSet(run_starts=[2**32 - 1], run_lengths=[2])]),
            "run_lengths",
        ),
        (
            pb.DecodeRoom(room=5, want=pb.WANT_WRITE, pages=[PageSet(run_starts=[0], run_lengths=[2**32 - 1])]),
            "run_lengths",
        ),
        (pb.DecodeRoom(room=5, want=pb.WANT_WRITE, pages=[PageSet(pool=1)]), "pages[0].pool"),
        (
            pb.DecodeRoom(
                room=5, want=pb.WANT_WRITE, pages=[PageSet(pages_u32_le=b"1234", run_starts=[1], run_lengths=[1])]
            ),
            "run_starts",
        ),
        (pb.DecodeRoom(room=5, want=pb.WANT_WRITE, pages=[PageSet(pages_u32_le=b"\xff\xff\xff\xff")]), "page"),
    ],
)
def test_a_wrong_entry_fails_alone_and_names_the_field(room: pb.DecodeRoom, error: str) -> None:
    frame = pb.SessionRequest(rooms=[room, pb.DecodeRoom(room=6, want=pb.WANT_FORGET)])
    wrong, right = wire.parse_request(frame, POOLS)
    assert wrong.error is not None and error in str(wrong.error)
    assert right == DecodeEntry(RoomKey(6), Want.FORGET)


@pytest.mark.parametrize("others", [None, (), ([3], [])])
def test_pages_travel_for_each_pool_or_once_for_all(others: tuple[list[int], ...] | None) -> None:
    destination = Destination(np.array([1, 2], np.uint32), 7)
    if others:
        destination.others = tuple(Destination(np.array(pages, np.uint32)) for pages in others)
    (frame,) = wire.encode_requests([DecodeEntry(RoomKey(5), Want.WRITE, destination, 300)], 1 << 20, [])
    pools = [("kv", 100), ("state", 4), ("window", 8)]
    (entry,) = wire.parse_request(pb.SessionRequest.FromString(frame.SerializeToString()), pools, [100, 4, 8])
    assert entry.destination is not None and entry.destination.same(destination), entry.error
    assert len(frame.rooms[0].pages) == (3 if others else 1)


FIVE_OF_POOL_1 = PageSet(pool=1, run_starts=[0], run_lengths=[5])


@pytest.mark.parametrize(
    ("sets", "field"),
    [
        ([PageSet(), PageSet(pool=1)], "rooms[0].pages"),
        ([PageSet(), PageSet(pool=2), PageSet(pool=1)], "rooms[0].pages[1].pool"),
        (
            [PageSet(), PageSet(pool=1, run_starts=[0], run_lengths=[5]), PageSet(pool=2)],
            "rooms[0].pages[1].run_lengths",
        ),
    ],
)
def test_sets_that_do_not_fit_the_pools_fail_the_room(sets: list[PageSet], field: str) -> None:
    frame = pb.SessionRequest(rooms=[pb.DecodeRoom(room=5, want=pb.WANT_WRITE, pages=sets)])
    (entry,) = wire.parse_request(frame, [("kv", 100), ("state", 4), ("window", 8)], [100, 4, 8])
    assert entry.error is not None and entry.error.metadata["field"] == field


def test_a_page_that_one_pool_does_not_have_is_no_page_of_every_pool() -> None:
    pages = [PageSet(pages_u32_le=np.array([4], "<u4").tobytes())]
    frame = pb.SessionRequest(rooms=[pb.DecodeRoom(room=5, want=pb.WANT_WRITE, pages=pages)])
    (entry,) = wire.parse_request(frame, [("kv", 100), ("state", 4)], [100, 100])
    assert entry.error is not None and entry.error.metadata["pool"] == "state"


def test_an_announced_room_travels_with_its_time_and_trace() -> None:
    entry = DecodeEntry(RoomKey(5, 1), Want.ANNOUNCE, None, 300, None, "00-trace")
    (frame,) = wire.encode_requests([entry], 1 << 20, [])
    assert list(wire.parse_request(pb.SessionRequest.FromString(frame.SerializeToString()), POOLS)) == [entry]


@pytest.mark.parametrize(
    "room",
    [
        pb.DecodeRoom(room=0, want=pb.WANT_STOP),
        pb.DecodeRoom(room=2**63, want=pb.WANT_STOP),
        pb.DecodeRoom(room=1),
        pb.DecodeRoom(room=1, want=5),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_room_or_want_ends_the_session(room: pb.DecodeRoom) -> None:
    with pytest.raises(InvalidRequest):
        list(wire.parse_request(pb.SessionRequest(rooms=[room]), POOLS))
