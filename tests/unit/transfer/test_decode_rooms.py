"""A room at decode, from its receiver to its end: what it waits for, what it is told and believes, and when it is
refused. docs/session.md."""

from __future__ import annotations

import numpy as np

from kvgrpc.errors import Failure, Reason
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol.decode.core import DecodePair, DecodeRoom, Stream
from kvgrpc.transfer.protocol.types import (
    Bounds,
    DecodeEntry,
    Destination,
    Handle,
    KVPoll,
    PrefillEntry,
    RoomKey,
    RoomState,
    Target,
    Want,
    Writes,
)
from tests.support.decode_side import CANCELLED, KEY, P0, P1, Side, reason, side

__all__ = ["side"]


class TestPoll:
    def test_it_waits_for_input_once_all_targets_are_welcomed_and_before_there_are_pages(self, side: Side) -> None:
        room = side.open(KEY, P0, P1)
        first, second = side.take("dials")
        side.core.on_welcome(first)
        assert room.handle.poll is KVPoll.Bootstrapping
        side.core.on_welcome(second)
        assert room.handle.poll is KVPoll.WaitingForInput
        assert {entry.want for entry in side.said()} == {Want.ANNOUNCE}, "prefill knows its decode before the pages"

    def test_pages_that_came_before_the_rank_was_known_are_told_to_a_session_that_stands_already(
        self, side: Side
    ) -> None:
        side.writing()
        late = DecodeRoom(RoomKey(6), Handle())
        side.core.open(late)
        side.core.write(late, Destination(np.arange(2, dtype=np.uint32)))
        assert not side.said()
        side.core.bind(late, (P0,))
        assert [(entry.key, entry.want) for entry in side.said()] == [(late.key, Want.WRITE)]

    def test_a_room_is_announced_only_where_its_pages_do_not_come_within_a_tick(self, side: Side) -> None:
        side.writing()
        quick, slow = side.open(RoomKey(6)), side.open(RoomKey(7))
        assert not side.said()
        side.core.write(quick, Destination(np.arange(2, dtype=np.uint32)))
        assert [(entry.key, entry.want) for entry in side.said()] == [(quick.key, Want.WRITE)]
        side.ticks(1)
        assert [(entry.key, entry.want) for entry in side.said()] == [(slow.key, Want.ANNOUNCE)]
        side.ticks(5)
        assert not side.said()

    def test_a_sender_that_says_again_that_it_is_there_is_news_once(self, side: Side) -> None:
        room = side.open()
        (stream,) = side.welcome()
        changes: list[bool] = []
        room.handle.on_change = lambda: changes.append(room.handle.prefill_ready)
        for _ in range(3):
            side.hear(stream, RoomState.WAITING_FOR_INPUT, Writes.OPEN)
        assert changes == [True]

    def test_a_room_of_which_a_part_is_looked_for_anew_is_not_ready(self, side: Side) -> None:
        room = side.open(KEY, P0, P1)
        first, second = side.take("dials")
        side.core.on_welcome(first)
        side.core.on_goodbye(second, Failure(Reason.SERVER_DRAINING, "drains"))
        assert side.take("resolves") == [room]
        side.hear(first, RoomState.WAITING_FOR_INPUT, Writes.OPEN)
        assert not room.handle.prefill_ready, "who has the other part is not known yet"

    def test_news_of_another_incarnation_is_not_news_of_the_room(self, side: Side) -> None:
        room, stream = side.writing()
        side.core.predial(Target(RankRef(P0.ref.rank, 9), "host:9"))
        (other,) = side.welcome()
        side.hear(other, RoomState.SUCCESS, Writes.SETTLED)
        assert not room.ended
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED)
        assert room.handle.poll is KVPoll.Success

    def test_it_says_transferring_then_success(self, side: Side) -> None:
        room, stream = side.writing()
        side.hear(stream, RoomState.TRANSFERRING, Writes.OPEN)
        assert room.handle.poll is KVPoll.Transferring
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED)
        assert room.handle.poll is KVPoll.Success and room.handle.release_safe

    def test_tables_follow_it_and_its_end_is_told_to_the_shell_once(self, side: Side) -> None:
        side.ticks(3)
        room, stream = side.writing(pages=4)
        (part,) = room.parts
        assert (room.created_at, room.state, part.sender_seen) == (3, RoomState.WAITING_FOR_INPUT, False)
        moving = PrefillEntry(KEY, RoomState.TRANSFERRING, Writes.OPEN, 3, b"", None)
        earlier = PrefillEntry(KEY, RoomState.TRANSFERRING, Writes.OPEN, 1, b"", None)
        side.core.on_frame(stream, [moving, earlier])
        assert (room.state, part.pages_done, room.handle.pages_done) == (RoomState.TRANSFERRING, 3, 3)
        assert part.sender_seen and part.told and side.take("ended") == []
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED, aux=b"token")
        assert (room.state, room.aux, room.handle.pages_done) == (RoomState.SUCCESS, None, 4)
        assert side.take("ended") == [room] and side.take("ended") == []

    def test_a_failed_one_keeps_no_aux_and_is_told_once(self, side: Side) -> None:
        room, _ = side.writing()
        side.core.fail(room, CANCELLED)
        assert (room.state, room.aux, room.handle.failure) == (RoomState.FAILED, None, CANCELLED)
        assert side.take("ended") == [room]

    def test_progress_is_never_more_than_was_asked_for(self, side: Side) -> None:
        room, stream = side.writing(pages=2)
        side.core.on_frame(stream, [PrefillEntry(KEY, RoomState.TRANSFERRING, Writes.OPEN, 9, b"", None)])
        assert room.handle.pages_done == 2

    def test_success_waits_until_the_writer_is_settled(self, side: Side) -> None:
        room, stream = side.writing()
        side.hear(stream, RoomState.SUCCESS, Writes.OPEN)
        assert room.handle.poll is KVPoll.WaitingForInput
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED)
        assert room.handle.poll is KVPoll.Success

    def test_a_pair_that_stands_serves_the_next_room_at_once(self, side: Side) -> None:
        side.writing()
        assert side.open(RoomKey(6)).handle.poll is KVPoll.WaitingForInput
        assert not side.take("dials")


def test_pages_are_in_place_when_prefill_says_so_and_decode_has_named_them(side: Side) -> None:
    room, stream = side.writing()
    side.hear(stream, RoomState.TRANSFERRING, Writes.OPEN)
    assert room.handle.pages_done == 0
    early = side.open(RoomKey(6))
    side.core.on_frame(stream, [PrefillEntry(RoomKey(6), RoomState.TRANSFERRING, Writes.OPEN, 5, b"", None)])
    assert early.handle.pages_done == 0


def test_the_engine_hears_once_that_pages_move(side: Side) -> None:
    room, stream = side.writing()
    heard: list[KVPoll] = []
    room.handle.on_change = lambda: heard.append(room.handle.poll)
    for _ in range(2):
        side.hear(stream, RoomState.TRANSFERRING, Writes.OPEN)
    assert heard == [KVPoll.Transferring]


class TestRefusals:
    def test_a_second_receiver_of_a_key_conflicts_and_the_first_goes_on(self, side: Side) -> None:
        first, second = side.open(), side.open()
        assert reason(second) == "ROOM_CONFLICT" and second.handle.release_safe
        assert first.handle.poll is KVPoll.Bootstrapping

    def test_rooms_are_bounded(self) -> None:
        side = Side(bounds=Bounds(rooms=1))
        side.open()
        refused = side.open(RoomKey(6))
        assert reason(refused) == "TOO_MANY_REQUESTS"
        assert refused.failure is not None and refused.failure.retry_after == 1.0

    def test_past_the_bound_of_held_pages_new_rooms_of_that_peer_are_refused(self) -> None:
        side = Side(bounds=Bounds(held_pages=1))
        room, _ = side.writing()
        side.core.fail(room, CANCELLED)
        assert side.core.held_pages == 2
        refused = side.open(RoomKey(6))
        assert reason(refused) == "PAGES_HELD"
        assert refused.failure is not None and refused.failure.retry_after == 2.0, "the settle time"
        assert side.open(RoomKey(7), P1).handle.poll is KVPoll.Bootstrapping, "another peer's"
        assert not side.core.refuses_all

    def test_past_the_bound_with_two_peers_all_are_refused(self) -> None:
        side = Side(bounds=Bounds(held_pages=1))
        first, stream = side.writing(KEY, P0)
        second, _ = side.writing(RoomKey(6), P1)
        side.core.fail(first, CANCELLED)
        side.core.fail(second, CANCELLED)
        assert side.core.refuses_all
        third = DecodeRoom(RoomKey(7), Handle())
        assert not side.core.open(third) and reason(third) == "PAGES_HELD"
        side.hear(stream, RoomState.FAILED, Writes.SETTLED)
        assert not side.core.refuses_all and side.core.held_pages == 2

    def test_a_room_that_is_refused_here_is_told_to_its_prefill_until_it_answers(self) -> None:
        side = Side(bounds=Bounds(rooms=1))
        _, stream = side.writing()
        refused = DecodeRoom(RoomKey(6), Handle())
        assert not side.core.open(refused) and refused.refused and refused.handle.release_safe
        side.core.bind(refused, (P0,))
        (entry,) = side.said()
        assert (entry.key, entry.want, entry.failure) == (refused.key, Want.STOP, refused.failure)
        side.ticks(5, stream)
        side.core.on_end(stream)
        (again,) = side.welcome()
        assert {each.key: each.want for each in side.said()} == {KEY: Want.WRITE, refused.key: Want.STOP}
        side.hear(again, RoomState.FAILED, Writes.STOPPED, refused.key)
        side.ticks(2, again)
        assert [(each.key, each.want) for each in side.said()] == [(refused.key, Want.FORGET)]
        assert not stream.pair.refusals and list(side.core.rooms) == [KEY]

    def test_a_receiver_that_conflicts_with_a_living_one_is_not_told_to_anybody(self, side: Side) -> None:
        side.writing()
        second = DecodeRoom(KEY, Handle())
        assert not side.core.open(second) and not second.refused
        side.core.bind(second, (P0,))
        assert side.said() == []

    def test_a_refusal_before_the_first_welcome_fails_with_its_cause_and_the_next_room_asks_again(
        self, side: Side
    ) -> None:
        room = side.open()
        (stream,) = side.take("dials")
        side.core.on_goodbye(stream, Failure(Reason.PARALLEL_LAYOUT_MISMATCH, "tp 2 != 1"))
        assert reason(room) == "PARALLEL_LAYOUT_MISMATCH" and not side.core.rooms and not side.core.pairs
        side.open()
        assert len(side.take("dials")) == 1


class TestNews:
    def test_what_would_go_back_is_ignored_and_counted(self, side: Side) -> None:
        room, stream = side.writing()
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED)
        side.hear(stream, RoomState.FAILED, Writes.SETTLED)
        side.hear(stream, RoomState.TRANSFERRING, Writes.OPEN)
        assert room.handle.poll is KVPoll.Success and side.core.ignored_entries == 2

    def test_writes_that_would_go_back_are_ignored_too(self, side: Side) -> None:
        room, stream = side.writing()
        side.hear(stream, RoomState.FAILED, Writes.UNKNOWN)
        side.hear(stream, RoomState.FAILED, Writes.OPEN)
        (part,) = room.parts
        assert part.writes is Writes.UNKNOWN and side.core.ignored_entries == 1

    def test_a_room_it_does_not_know_is_answered_forget(self, side: Side) -> None:
        _, stream = side.writing()
        side.hear(stream, RoomState.FAILED, Writes.STOPPED, key=RoomKey(99))
        side.ticks(2, stream)
        assert side.said() == [DecodeEntry(RoomKey(99), Want.FORGET)]

    def test_frames_of_an_older_stream_and_before_welcome_are_not_applied(self, side: Side) -> None:
        room, stream = side.writing()
        side.ticks(5, stream)
        side.core.on_end(stream)
        (again,) = side.take("dials")
        for early_or_late in (stream, again):
            side.hear(early_or_late, RoomState.FAILED, Writes.SETTLED)
        assert room.handle.poll is KVPoll.WaitingForInput

    def test_success_before_it_was_told_where_is_refused(self, side: Side) -> None:
        room = side.open()
        (stream,) = side.welcome()
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED)
        assert reason(room) == "INVALID_REQUEST"

    def test_failed_without_a_reason_is_a_failure_too(self, side: Side) -> None:
        room, stream = side.writing()
        side.core.on_frame(stream, [PrefillEntry(KEY, RoomState.FAILED, Writes.SETTLED)])
        assert reason(room) == "UNSPECIFIED"


class TestAux:
    def test_it_is_delivered_before_success_is_told(self, side: Side) -> None:
        _, stream = side.writing()
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED, aux=b"token")
        assert side.aux == [b"token"]

    def test_one_that_does_not_fit_fails_the_room(self, side: Side) -> None:
        side.aux_failure = Failure(Reason.INVALID_REQUEST, "too short")
        room, stream = side.writing()
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED)
        assert reason(room) == "INVALID_REQUEST" and room.handle.release_safe

    def test_more_than_the_bound_is_not_even_kept(self, side: Side) -> None:
        room, stream = side.writing()
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED, aux=bytes(Bounds().aux_bytes + 1))
        assert reason(room) == "INVALID_REQUEST" and not side.aux


def test_a_room_that_failed_keeps_no_aux(side: Side) -> None:
    room, stream = side.writing(KEY, P0, P1)
    side.hear(stream, RoomState.SUCCESS, Writes.SETTLED, aux=b"token")
    assert room.aux == b"token"
    side.core.fail(room, CANCELLED)
    assert room.aux is None


def test_nothing_is_left_of_rooms_that_are_over(side: Side) -> None:
    stream: Stream | None = None
    for number in range(1, 200):
        key = RoomKey(number)
        room = side.open(key)
        for dialled in side.welcome():
            stream = dialled
        assert stream is not None
        side.core.write(room, Destination(np.arange(2, dtype=np.uint32)))
        side.said()
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED, key)
        side.ticks(2, stream)
        side.said()
    pair: DecodePair = stream.pair  # type: ignore[union-attr]
    assert not side.core.rooms and not pair.rooms and not pair.pending_rooms
    assert len(side.core._due) == 0 and not side.core._held.rooms
