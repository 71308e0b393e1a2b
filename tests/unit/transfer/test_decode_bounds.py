"""What decode counts, bounds and tells people, at its limits; and the fewest pages that wait for evidence."""

from __future__ import annotations

import numpy as np
import pytest

from kvgrpc.errors import Failure, Reason
from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.decode import core as decode_core
from kvgrpc.transfer.protocol.decode.core import DecodeRoom
from kvgrpc.transfer.protocol.types import (
    Bounds,
    DecodeEntry,
    Destination,
    Handle,
    KVPoll,
    LostPair,
    PrefillEntry,
    RoomKey,
    RoomState,
    Target,
    Want,
    Writes,
)
from tests.support.decode_side import CANCELLED, KEY, P0, P1, TIMING, Side, reason, side

__all__ = ["side"]
SIX, SEVEN = RoomKey(6), RoomKey(7)


class TestEvidence:
    def test_the_only_page_of_a_room_comes_back_by_evidence_too(self, side: Side) -> None:
        room, stream = side.writing(pages=1)
        side.core.fail(room, CANCELLED)
        side.ticks(2 * TIMING.settle, stream)
        assert not room.handle.release_safe and side.core.held_pages == 1
        side.hear(stream, RoomState.FAILED, Writes.SETTLED)
        assert room.handle.release_safe and side.core.held_pages == 0

    def test_so_does_the_only_page_of_another_pool(self, side: Side) -> None:
        room = side.open()
        (stream,) = side.welcome()
        state = (Destination(np.arange(1, dtype=np.uint32)),)
        side.core.write(room, Destination(np.arange(0, dtype=np.uint32), others=state))
        side.said()
        side.core.fail(room, CANCELLED)
        assert not room.handle.release_safe
        side.hear(stream, RoomState.FAILED, Writes.SETTLED)
        assert room.handle.release_safe

    def test_a_room_without_pages_has_none_to_wait_for(self, side: Side) -> None:
        room, _ = side.writing(pages=0)
        side.core.fail(room, CANCELLED)
        assert room.handle.release_safe and side.core.held_pages == 0

    def test_the_settle_time_counts_from_the_first_word_that_it_stopped(self, side: Side) -> None:
        room, stream = side.writing()
        side.ticks(2 * TIMING.settle, stream)
        side.hear(stream, RoomState.FAILED, Writes.STOPPED)
        for _ in range(TIMING.settle):
            side.ticks(1, stream)
            side.hear(stream, RoomState.FAILED, Writes.STOPPED)
        assert not room.handle.release_safe
        side.ticks(1, stream)
        assert room.handle.release_safe

    def test_pages_that_came_back_before_the_settle_time_are_looked_at_no_more(self, side: Side) -> None:
        room, stream = side.writing()
        side.hear(stream, RoomState.FAILED, Writes.STOPPED)
        side.hear(stream, RoomState.FAILED, Writes.SETTLED)
        assert room.handle.release_safe
        side.ticks(1, stream)
        assert [entry.want for entry in side.said()] == [Want.FORGET] and not side.core.rooms
        side.ticks(2 * TIMING.settle, stream)

    def test_pages_stay_those_that_were_given_first(self, side: Side) -> None:
        room, _ = side.writing(pages=2)
        destination = room.destination
        side.core.write(room, Destination(np.arange(9, dtype=np.uint32)), 4)
        assert room.destination is destination and room.aux_index is None and side.said() == []

    def test_a_room_that_ended_takes_none(self, side: Side) -> None:
        room = side.open()
        side.core.fail(room, CANCELLED)
        side.core.write(room, Destination(np.arange(2, dtype=np.uint32)))
        assert room.destination is None and len(side.core._due) == 0


class TestBounds:
    def test_up_to_the_bound_of_held_pages_a_new_room_is_taken(self) -> None:
        side = Side(bounds=Bounds(held_pages=2))
        room, _ = side.writing(pages=2)
        side.core.fail(room, CANCELLED)
        assert side.open(SIX).failure is None and not side.core.refuses_all

    def test_a_bound_of_no_held_pages_refuses_nobody_before_one_is_held(self) -> None:
        side = Side(bounds=Bounds(held_pages=0))
        room, _ = side.writing(pages=1)
        side.core.fail(room, CANCELLED)
        assert reason(side.open(SIX)) == "PAGES_HELD"

    @pytest.mark.parametrize("first", [P0, P1])
    def test_a_room_that_one_peer_may_not_have_is_told_to_all_that_owe_it(self, first: Target) -> None:
        """Their senders would wait until their deadline."""
        side = Side(bounds=Bounds(held_pages=2))
        room, _ = side.writing(KEY, P0, pages=3)
        side.open(SEVEN, P1)
        side.welcome()
        side.core.fail(room, CANCELLED)
        side.said()
        second = P1 if first is P0 else P0
        assert reason(side.open(SIX, first, second)) == "PAGES_HELD"
        told = {pair.ref: side.core.flush(pair) for pair in side.take("tell")}
        assert {ref: [(each.key, each.want) for each in entries] for ref, entries in told.items()} == {
            each.ref: [(SIX, Want.STOP)] for each in (P0, P1)
        }

    @pytest.mark.parametrize(("pages", "all_refused"), [(2, False), (3, True)])
    def test_two_peers_past_it_refuse_all(self, pages: int, all_refused: bool) -> None:
        side = Side(bounds=Bounds(held_pages=2))
        for key, target, count in ((KEY, P0, 3), (SIX, P1, pages)):
            room, _ = side.writing(key, target, pages=count)
            side.core.fail(room, CANCELLED)
            side.said()
        assert side.core.refuses_all is all_refused
        late = DecodeRoom(SEVEN, Handle())
        assert side.core.open(late) is not all_refused
        if all_refused:
            assert late.failure is not None
            assert late.failure.metadata == {"held": "6", "limit": "4"} and late.failure.retry_after == 2.0

    def test_one_peer_with_many_pages_is_one_peer(self) -> None:
        side = Side(bounds=Bounds(held_pages=2))
        room, _ = side.writing(pages=100)
        side.core.fail(room, CANCELLED)
        assert not side.core.refuses_all and side.core.held_pages == 100

    @pytest.mark.parametrize("beyond", [0, 1])
    def test_aux_has_its_bound(self, beyond: int) -> None:
        side = Side(bounds=Bounds(aux_bytes=4))
        room, stream = side.writing()
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED, aux=bytes(4 + beyond))
        assert (room.handle.poll is KVPoll.Success) is (not beyond)

    def test_refusals_of_one_pair_have_theirs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decode_core, "REFUSALS_AT_MOST", 2)
        side = Side(bounds=Bounds(rooms=1))
        side.writing()
        for number in range(11, 15):
            room = DecodeRoom(RoomKey(number), Handle())
            side.core.open(room)
            side.core.bind(room, (P0,))
        assert [entry.key.room for entry in side.said()] == [11, 12]

    def test_rooms_that_nobody_here_knows_are_answered_up_to_the_bound_of_rooms(self) -> None:
        side = Side(bounds=Bounds(rooms=3))
        _, stream = side.writing()
        for number in range(11, 20):
            side.hear(stream, RoomState.FAILED, Writes.STOPPED, RoomKey(number))
        side.ticks(2, stream)
        assert [entry.key.room for entry in side.said()] == [11, 12, 13]


class TestTables:
    def test_open_rooms_are_those_that_have_not_ended(self, side: Side) -> None:
        first, stream = side.writing()
        second = side.open(SIX)
        assert side.core.open_rooms == 2
        side.core.fail(second, CANCELLED)
        side.core.fail(second, CANCELLED)
        assert side.core.open_rooms == 1
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED)
        assert side.core.open_rooms == 0 and first.handle.poll is KVPoll.Success
        assert side.take("ended") == [second, first]

    def test_a_refused_room_is_none_of_them_and_its_end_is_told(self) -> None:
        side = Side(bounds=Bounds(rooms=1))
        side.open()
        refused = DecodeRoom(SIX, Handle())
        assert not side.core.open(refused) and side.core.open_rooms == 1 and side.take("ended") == [refused]
        assert refused.failure is not None and refused.failure.metadata == {
            "limit": "1",
            "value": "1",
            "scope": "rooms",
        }

    def test_a_failed_room_can_be_asked_about_once_it_is_dropped(self, side: Side) -> None:
        room, stream = side.writing()
        side.core.fail(room, CANCELLED)
        assert side.take("failed") == []
        side.hear(stream, RoomState.FAILED, Writes.SETTLED)
        side.ticks(1, stream)
        side.said()
        assert side.take("failed") == [room] and not side.core.rooms

    def test_a_room_that_never_got_its_pages_says_how_long_it_waited(self, side: Side) -> None:
        room = side.open()
        (stream,) = side.welcome()
        side.ticks(TIMING.room_deadline, stream)
        assert room.failure is not None
        assert room.failure.metadata == {"room": "5", "attempt": "0", "state": "WAITING_FOR_INPUT", "limitMs": "300000"}

    def test_decode_says_how_long_it_still_waits(self, side: Side) -> None:
        room = side.open()
        (stream,) = side.welcome()
        side.ticks(1, stream)
        (entry,) = side.said()
        assert (entry.want, entry.time_left_ms) == (Want.ANNOUNCE, 299_900)
        side.ticks(100, stream)
        side.core.write(room, Destination(np.arange(2, dtype=np.uint32)))
        (entry,) = side.said()
        assert (entry.want, entry.time_left_ms) == (Want.WRITE, 300_000)

    def test_a_lost_pair_is_told_with_its_reason_and_its_rooms(self, side: Side) -> None:
        side.writing()
        side.open(SIX)
        side.ticks(TIMING.idle_timeout + 1)
        assert side.take("lost") == [LostPair(P0.ref, "not a word for 60000 ms, though its connection stood", 2)]
        assert side.take("lost_peers") == [P0.ref]
        side.ticks(1)
        assert side.take("lost") == side.take("lost_peers") == [], "once"

    def test_one_that_never_welcomed_us_is_no_lost_peer(self, side: Side) -> None:
        side.open()
        side.ticks(TIMING.idle_timeout + 1)
        assert side.take("lost_peers") == []

    def test_news_of_a_pair_that_was_given_up_is_old(self, side: Side) -> None:
        room, stream = side.writing()
        side.ticks(TIMING.idle_timeout + 1)
        heard_at = stream.pair.heard_at
        side.core.on_heard(stream)
        side.core.on_goodbye(stream, None)
        assert stream.pair.heard_at == heard_at and reason(room) == "PEER_LOST"


class TestBinding:
    def test_rooms_of_a_pair_are_told_again_after_its_idle_time_was_not_said(self, side: Side) -> None:
        side.open()
        (stream,) = side.welcome()
        assert stream.pair.idle_timeout == TIMING.idle_timeout

    def test_a_rank_that_is_named_twice_owes_no_two_parts(self, side: Side) -> None:
        room = DecodeRoom(KEY, Handle())
        side.core.open(room)
        side.core.bind(room, (P0, P0))
        assert room.failure is not None and len(room.parts) == 1

    def test_an_engine_that_came_back_with_other_ranks_fails_the_room(self, side: Side) -> None:
        room = side.open(KEY, P0, P1)
        first, second = side.take("dials")
        side.core.on_welcome(second)
        side.core.on_goodbye(first, Failure(Reason.STALE_EPOCH, "restarted"))
        other = Target(RankRef(RankId("P0", tp=1), 9), "host:9")
        side.core.bind(room, (other,))
        assert reason(room) == "PEER_LOST" and not room.bound

    def test_a_room_that_ended_while_it_was_resolved_is_told_to_those_who_owe_it(self, side: Side) -> None:
        room = DecodeRoom(KEY, Handle())
        assert side.core.open(room)
        side.core.fail(room, CANCELLED)
        assert room.refused and room.handle.release_safe and not side.core.rooms
        side.core.bind(room, (P0,))
        side.welcome()
        assert side.said() == [DecodeEntry(KEY, Want.STOP, failure=CANCELLED)] and not room.parts

    def test_one_that_ended_while_a_part_was_looked_for_anew_gets_no_part_any_more(self, side: Side) -> None:
        room = side.open(KEY, P0, P1)
        first, second = side.take("dials")
        side.core.on_welcome(second)
        side.core.write(room, Destination(np.arange(2, dtype=np.uint32)))
        side.said()
        side.core.on_goodbye(first, Failure(Reason.STALE_EPOCH, "restarted"))
        side.core.fail(room, CANCELLED)
        later = Target(RankRef(P0.ref.rank, 9), "host:1")
        side.core.bind(room, (later, P1))
        assert room.ranks == {P1.ref.rank} and not room.handle.release_safe
        (third,) = side.welcome()
        assert third.pair.ref == later.ref
        said = side.said()
        assert said and all((entry.want, entry.failure) == (Want.STOP, CANCELLED) for entry in said)
        side.hear(second, RoomState.FAILED, Writes.SETTLED)
        assert room.handle.release_safe

    def test_a_new_room_of_a_lost_pair_dials_at_once_and_waits_no_longer_than_for_a_first_dial(
        self, side: Side
    ) -> None:
        side.writing()
        side.ticks(2 * TIMING.idle_timeout)
        for stream in side.take("dials"):
            side.core.on_end(stream)
        side.ticks(1)
        side.take("dials")
        late = side.open(SIX)
        dialled = []
        for _ in range(TIMING.connect_within):
            side.ticks(1)
            dialled.append(bool(side.take("dials")))
        assert late.failure is None and any(dialled[: TIMING.abandon_dial + 2])
        side.ticks(1)
        assert reason(late) == "PEER_LOST"

    def test_one_that_ended_after_it_is_told_once(self, side: Side) -> None:
        room = side.open()
        side.welcome()
        side.core.fail(room, CANCELLED)
        assert not room.refused and [entry.want for entry in side.said()] == [Want.STOP]
        side.core.bind(room, (P0,))
        assert side.said() == [] and len(room.parts) == 1

    def test_what_was_refused_is_not_told_to_one_that_is_proven_dead(self) -> None:
        side = Side(bounds=Bounds(rooms=1))
        _, stream = side.writing()
        side.core.on_refused(stream)
        refused = DecodeRoom(SIX, Handle())
        side.core.open(refused)
        side.core.bind(refused, (P0,))
        assert not stream.pair.refusals

    @pytest.mark.parametrize("sender", [False, True])
    def test_a_room_that_a_draining_prefill_knows_by_name_alone_goes_elsewhere(self, side: Side, sender: bool) -> None:
        room = side.open()
        (stream,) = side.welcome()
        side.ticks(1, stream)
        assert [entry.want for entry in side.said()] == [Want.ANNOUNCE]
        if sender:
            side.hear(stream, RoomState.WAITING_FOR_INPUT, Writes.OPEN)
        side.core.on_goodbye(stream, Failure(Reason.SERVER_DRAINING, "drains"))
        assert side.take("resolves") == ([] if sender else [room])

    @pytest.mark.parametrize("named", [Reason.SERVER_DRAINING, Reason.TRANSFER_FAILED])
    def test_so_does_one_that_it_refuses_by_name_because_it_drains(self, side: Side, named: Reason) -> None:
        room = side.open()
        (stream,) = side.welcome()
        side.ticks(1, stream)
        side.said()
        refused = PrefillEntry(KEY, RoomState.FAILED, Writes.STOPPED, 0, b"", Failure(named, "no"))
        side.core.on_frame(stream, [refused])
        assert side.take("resolves") == ([room] if named is Reason.SERVER_DRAINING else [])
        assert (room.failure is None) is (named is Reason.SERVER_DRAINING)

    def test_a_rank_that_a_room_left_is_answered_forget(self, side: Side) -> None:
        side.open()
        (stream,) = side.welcome()
        side.ticks(1, stream)
        side.core.on_goodbye(stream, Failure(Reason.SERVER_DRAINING, "drains"))
        assert side.core.flush(stream.pair) == [DecodeEntry(KEY, Want.FORGET)]

    def test_a_frame_keeps_a_pair_alive_and_a_goodbye_without_a_reason_dials_again(self, side: Side) -> None:
        _, stream = side.writing()
        for _ in range(2 * TIMING.idle_timeout):
            side.ticks(1)
            side.core.on_frame(stream, [])
        assert not stream.pair.lost and side.take("dials") == []
        side.core.on_goodbye(stream, None)
        assert len(side.take("dials")) == 1

    def test_what_a_peer_calls_wrong_is_not_said_again(self, side: Side) -> None:
        room, stream = side.writing()
        side.ticks(5, stream)
        side.core.on_goodbye(stream, Failure(Reason.INVALID_REQUEST, "no such field"))
        assert reason(room) == "INVALID_REQUEST" and side.take("dials") == [] and stream.pair.lost
        assert [lost.how for lost in side.take("lost")] == ["no such field"]

    def test_a_stream_that_was_refused_is_over_and_is_not_to_be_closed(self, side: Side) -> None:
        _, stream = side.writing()
        side.core.on_refused(stream)
        assert side.take("closes") == [] and stream.pair.stream is None

    def test_checksums_are_kept_for_who_compares_them(self, side: Side) -> None:
        room, stream = side.writing()
        stream.pair.verify = True
        said = PrefillEntry(KEY, RoomState.SUCCESS, Writes.SETTLED, 2, b"", None, b"12345678")
        side.core.on_frame(stream, [said])
        assert side.take("compares") == [room] and [part.checksums for part in room.to_compare] == [b"12345678"]

    def test_aux_goes_where_init_said(self, side: Side) -> None:
        room = side.open()
        side.core.write(room, Destination(np.arange(1, dtype=np.uint32)), 4)
        assert room.aux_index == 4

    def test_a_dead_pair_is_not_welcomed_again(self, side: Side) -> None:
        room, stream = side.writing()
        side.core.on_refused(stream)
        pair = stream.pair
        pair.stream = stream
        side.core.on_welcome(stream)
        assert not pair.up and reason(room) == "PEER_LOST"

    def test_a_predial_makes_one_stream_and_binds_nothing(self, side: Side) -> None:
        side.core.predial(P0)
        side.core.predial(P0)
        (stream,) = side.welcome()
        assert not stream.pair.rooms and side.said() == []
