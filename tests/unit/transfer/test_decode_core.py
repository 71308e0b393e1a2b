"""Decode's half of a session: what it dials, says, believes and gives back. docs/session.md has the rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from kvgrpc.dataplane.base import DataPlane
from kvgrpc.errors import Failure, Reason
from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.decode_core import DecodeCore, DecodePair, DecodeRoom, Stream
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
    Timing,
    Want,
    Writes,
)
from kvgrpc.transfer.runtime.guarded import GuardedPlane
from tests.simulation.work import Work

ME, KEY, TIMING = RankRef(RankId("D"), 1), RoomKey(5), Timing()
P0, P1 = Target(RankRef(RankId("P0"), 2), "host:1"), Target(RankRef(RankId("P1"), 3), "host:2")
CANCELLED = Failure(Reason.ROOM_CANCELLED, "enough")


class Side:
    """A decode core, and the shell around it by hand."""

    def __init__(self, **settings: object) -> None:
        self.connections: frozenset[str] | None = frozenset()
        self.aux: list[bytes | None] = []
        self.aux_failure: Failure | None = None
        self.core = DecodeCore(
            ME,
            connections=lambda pair: self.connections,
            deliver_aux=self._deliver_aux,
            **settings,  # type: ignore[arg-type]
        )
        self.take = Work(self.core).take

    def open(self, key: RoomKey = KEY, *targets: Target) -> DecodeRoom:
        room = DecodeRoom(key, Handle())
        if self.core.open(room):
            self.core.bind(room, targets or (P0,))
        return room

    def welcome(self) -> list[Stream]:
        streams = self.take("dials")
        for stream in streams:
            self.core.on_welcome(stream)
        return streams

    def writing(self, key: RoomKey = KEY, *targets: Target, pages: int = 2) -> tuple[DecodeRoom, Stream]:
        """A room whose prefill was told where to write."""
        room = self.open(key, *targets)
        (stream, *_) = self.welcome()
        self.core.write(room, Destination(np.arange(pages, dtype=np.uint32)))
        assert {entry.want for entry in self.said()} == {Want.WRITE}
        return room, stream

    def said(self) -> list[DecodeEntry]:
        return [entry for pair in self.take("tell") for entry in self.core.flush(pair)]

    def hear(self, stream: Stream, state: RoomState, writes: Writes, key: RoomKey = KEY, aux: bytes = b"") -> None:
        failure = Failure(Reason.TRANSFER_FAILED, "no") if state is RoomState.FAILED else None
        self.core.on_frame(stream, [PrefillEntry(key, state, writes, 0, aux, failure)])

    def ticks(self, count: int, hear: Stream | None = None) -> None:
        for _ in range(count):
            self.core.tick()
            if hear is not None:
                self.core.on_heard(hear)

    def _deliver_aux(self, room: DecodeRoom) -> Failure | None:
        self.aux.append(room.aux)
        return self.aux_failure


@pytest.fixture
def side() -> Side:
    return Side()


def reason(room: DecodeRoom) -> str:
    assert room.handle.poll is KVPoll.Failed and room.handle.failure is not None
    return room.handle.failure.reason.name


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
        (part,) = room.parts.values()
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
        side.ticks(1, again)
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


class TestBreaksAndLoss:
    def test_a_peer_that_asked_for_a_longer_idle_timeout_gets_it(self, side: Side) -> None:
        room = side.open()
        (stream,) = side.take("dials")
        side.core.on_welcome(stream, 2 * TIMING.idle_timeout)
        side.ticks(2 * TIMING.idle_timeout)
        assert room.handle.poll is KVPoll.WaitingForInput
        side.ticks(1)
        assert reason(room) == "PEER_LOST"

    def test_a_break_redials_at_once_and_says_every_room_again(self, side: Side) -> None:
        _, stream = side.writing()
        side.ticks(5, stream)
        side.core.on_end(stream)
        (again,) = side.take("dials")
        assert again.number > stream.number
        side.core.on_welcome(again)
        assert [entry.want for entry in side.said()] == [Want.WRITE]

    def test_without_a_welcome_within_a_second_of_a_break_the_pair_is_lost(self, side: Side) -> None:
        room, stream = side.writing()
        side.ticks(5, stream)
        side.core.on_end(stream)
        side.ticks(TIMING.welcome_within)
        assert room.handle.poll is KVPoll.WaitingForInput
        side.ticks(1)
        assert reason(room) == "PEER_LOST" and not room.handle.release_safe

    def test_no_word_for_the_idle_timeout_loses_the_pair_and_ends_its_stream(self, side: Side) -> None:
        room, stream = side.writing()
        side.ticks(TIMING.idle_timeout)
        assert room.handle.poll is KVPoll.WaitingForInput
        side.ticks(1)
        assert reason(room) == "PEER_LOST" and stream in side.take("closes")
        side.hear(stream, RoomState.FAILED, Writes.SETTLED)
        assert not room.handle.release_safe, "no later frame of it is applied"

    def test_a_returning_peer_is_told_stop_and_its_word_gives_the_pages_back(self, side: Side) -> None:
        room, _ = side.writing()
        side.ticks(TIMING.idle_timeout + 1)
        (again,) = side.welcome()
        assert [entry.want for entry in side.said()] == [Want.STOP]
        side.hear(again, RoomState.FAILED, Writes.SETTLED)
        assert room.handle.release_safe
        side.ticks(1)
        assert [entry.want for entry in side.said()] == [Want.FORGET] and not side.core.rooms

    def test_a_lost_pair_is_dialled_ever_more_seldom_while_pages_are_held(self, side: Side) -> None:
        side.writing()
        moments = []
        for _ in range(600):
            side.ticks(1)
            for stream in side.take("dials"):
                moments.append(side.core.now)
                side.core.on_end(stream)
        waits = np.diff(moments)
        assert waits.max() == waits[-1] == TIMING.longest_backoff and (np.diff(waits) >= 0).all()

    def test_streams_that_break_as_soon_as_they_are_welcomed_are_not_dialled_in_a_loop(self, side: Side) -> None:
        _, stream = side.writing()
        side.core.on_end(stream)
        dials = 0
        for _ in range(100):
            side.ticks(1)
            for again in side.take("dials"):
                dials += 1
                side.core.on_welcome(again)
                side.core.on_end(again)
        assert dials <= 30

    def test_an_idle_pair_that_breaks_is_dropped(self, side: Side) -> None:
        _, stream = side.writing()
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED)
        side.ticks(1)
        side.said()
        side.core.on_goodbye(stream, None)
        side.ticks(1)
        assert not side.core.pairs and not side.take("dials")


class TestProofOfDeath:
    def prove(self, side: Side, stream: Stream, how: str) -> None:
        side.ticks(5, stream)
        side.core.on_end(stream)
        (again,) = side.take("dials")
        if how == "refused":
            side.core.on_refused(again)
        else:
            side.core.on_goodbye(again, Failure(Reason[how], "not me"))

    @pytest.mark.parametrize("how", ["refused", "STALE_EPOCH", "WRONG_RANK"])
    def test_pages_come_back_after_the_settle_time(self, side: Side, how: str) -> None:
        room, stream = side.writing()
        self.prove(side, stream, how)
        assert reason(room) == "PEER_LOST"
        side.ticks(TIMING.settle)
        assert not room.handle.release_safe
        side.ticks(1)
        assert room.handle.release_safe and not side.core.rooms and not side.core.held_pages
        side.ticks(1)
        assert not side.core.pairs

    def test_a_connection_that_stood_at_the_proof_holds_them_longer(self, side: Side) -> None:
        room, stream = side.writing()
        side.connections = frozenset({"host:1 -> us"})
        self.prove(side, stream, "refused")
        side.ticks(5 * TIMING.settle)
        assert not room.handle.release_safe
        side.connections = frozenset({"a later one"})
        side.ticks(1)
        assert room.handle.release_safe

    def test_a_plane_that_cannot_tell_later_gives_no_evidence(self, side: Side) -> None:
        """Through the guard: a plane that raised once answered other names than at the proof, and pages came back."""
        named: frozenset[str] | None = frozenset({"host:1 -> us"})

        def connections_from(address: bytes) -> frozenset[str]:
            if named is None:
                raise OSError("too many open files")
            return named

        plane = GuardedPlane(cast(DataPlane, SimpleNamespace(connections_from=connections_from)))
        side.core = DecodeCore(
            ME, connections=lambda pair: plane.connections_from(b"there"), deliver_aux=lambda room: None
        )
        side.take = Work(side.core).take
        room, stream = side.writing()
        self.prove(side, stream, "refused")
        for answer in (named, None, named):
            named = answer
            side.ticks(2 * TIMING.settle)
            assert not room.handle.release_safe
        named = frozenset()
        side.ticks(1)
        assert room.handle.release_safe

    def test_one_that_could_not_tell_at_the_proof_is_believed_when_it_can(self, side: Side) -> None:
        room, stream = side.writing()
        side.connections = None
        self.prove(side, stream, "refused")
        for connections in (None, frozenset({"host:1 -> us"}), None):
            side.connections = connections
            side.ticks(2 * TIMING.settle)
            assert not room.handle.release_safe
        side.connections = frozenset({"a later one"})
        side.ticks(1)
        assert room.handle.release_safe

    def test_a_goodbye_is_none(self, side: Side) -> None:
        room, stream = side.writing()
        side.ticks(5, stream)
        side.core.on_goodbye(stream, Failure(Reason.SERVER_DRAINING, "bye"))
        assert room.handle.poll is not KVPoll.Failed and len(side.take("dials")) == 1

    def test_a_new_room_on_it_fails_at_once(self, side: Side) -> None:
        _, stream = side.writing()
        self.prove(side, stream, "refused")
        late = side.open(RoomKey(6))
        assert reason(late) == "PEER_LOST" and late.handle.release_safe

    def test_another_incarnation_before_the_first_welcome_means_resolve_again_once(self, side: Side) -> None:
        room = side.open(KEY, P0, P1)
        first, second = side.take("dials")
        side.core.on_welcome(second)
        side.core.on_goodbye(first, Failure(Reason.STALE_EPOCH, "restarted"))
        assert side.take("resolves") == [room]
        assert room.handle.poll is KVPoll.Bootstrapping, "one of its targets is open"
        side.core.bind(room, (Target(RankRef(RankId("P0"), 9), "host:1"), P1))
        (third,) = side.take("dials")
        side.core.on_goodbye(third, Failure(Reason.STALE_EPOCH, "restarted again"))
        assert not side.take("resolves") and reason(room) == "STALE_EPOCH"

    def test_a_room_that_went_elsewhere_is_no_business_of_the_pair_that_it_left(self, side: Side) -> None:
        """Its record is gone when that pair is lost, which looks at all of its rooms."""
        room = side.open()
        (old,) = side.welcome()
        side.core.on_goodbye(old, Failure(Reason.SERVER_DRAINING, "drains"))
        assert side.take("resolves") == [room] and not old.pair.rooms
        side.core.bind(room, (P1,))
        (new,) = [stream for stream in side.welcome() if stream.pair is not old.pair]
        side.core.write(room, Destination(np.arange(2, dtype=np.uint32)))
        side.said()
        side.hear(new, RoomState.SUCCESS, Writes.SETTLED)
        side.ticks(1, new)
        side.said()
        assert room.handle.poll is KVPoll.Success and not side.core.rooms
        side.ticks(TIMING.idle_timeout + TIMING.welcome_within + 2, new)
        assert old.pair.ref not in side.core.pairs

    def test_while_a_target_is_resolved_again_the_others_alone_are_not_enough(self, side: Side) -> None:
        room = side.open(KEY, P0, P1)
        side.core.write(room, Destination(np.arange(2, dtype=np.uint32)))
        first, second = side.take("dials")
        side.core.on_goodbye(first, Failure(Reason.STALE_EPOCH, "restarted"))
        side.core.on_welcome(second)
        assert room.handle.poll is KVPoll.Bootstrapping, "ready only with all targets"
        assert [entry.want for entry in side.said()] == [Want.WRITE]
        side.hear(second, RoomState.SUCCESS, Writes.SETTLED)
        assert room.handle.poll is KVPoll.Bootstrapping, "and arrived only with all"
        side.core.bind(room, (Target(RankRef(RankId("P0"), 9), "host:1"), P1))
        (third,) = side.welcome()
        side.said()
        side.hear(third, RoomState.SUCCESS, Writes.SETTLED)
        assert room.handle.poll is KVPoll.Success

    def test_redials_follow_after_200_ms_and_then_400_ms(self, side: Side) -> None:
        room, stream = side.writing()
        side.ticks(TIMING.idle_timeout - 1, stream)
        side.ticks(2, stream)
        side.core.on_end(stream)
        (again,) = side.take("dials")
        moments = [side.core.now]
        side.core.on_end(again)
        for _ in range(TIMING.welcome_within - 1):
            side.ticks(1)
            for each in side.take("dials"):
                moments.append(side.core.now)
                side.core.on_end(each)
        assert np.diff(moments).tolist() == [2, 4] and room.handle.poll is not KVPoll.Failed


class TestEvidence:
    def test_a_part_that_was_never_told_where_to_write_holds_nothing(self, side: Side) -> None:
        room = side.open(KEY, P0, P1)
        first, _ = side.take("dials")
        side.core.on_welcome(first)
        side.core.write(room, Destination(np.arange(2, dtype=np.uint32)))
        side.said()
        side.core.fail(room, CANCELLED)
        assert not room.handle.release_safe and side.core.held_pages == 2
        side.hear(first, RoomState.FAILED, Writes.SETTLED)
        assert room.handle.release_safe and not side.core.held_pages

    def test_settled_gives_pages_back_at_once(self, side: Side) -> None:
        room, stream = side.writing()
        side.hear(stream, RoomState.FAILED, Writes.SETTLED)
        assert reason(room) == "TRANSFER_FAILED" and room.handle.release_safe

    def test_stopped_after_the_settle_time(self, side: Side) -> None:
        room, stream = side.writing()
        side.hear(stream, RoomState.FAILED, Writes.STOPPED)
        side.ticks(TIMING.settle, stream)
        side.hear(stream, RoomState.FAILED, Writes.STOPPED)  # said once more, so it is looked at once more
        assert not room.handle.release_safe
        side.ticks(1, stream)
        assert room.handle.release_safe

    @pytest.mark.parametrize("writes", [Writes.OPEN, Writes.UNKNOWN])
    def test_open_and_unknown_never(self, side: Side, writes: Writes) -> None:
        room, stream = side.writing()
        side.hear(stream, RoomState.FAILED, writes)
        side.ticks(1000, stream)
        assert not room.handle.release_safe
        assert Want.FORGET not in [entry.want for entry in side.said()]
        side.hear(stream, RoomState.FAILED, Writes.STOPPED)
        side.ticks(TIMING.settle + 1, stream)
        assert room.handle.release_safe and side.core.held_pages == 0

    def test_an_abort_fails_the_handle_at_once_and_holds_the_pages(self, side: Side) -> None:
        room, _ = side.writing()
        side.core.fail(room, CANCELLED)
        assert reason(room) == "ROOM_CANCELLED" and not room.handle.release_safe and side.core.held_pages == 2
        (said,) = side.said()
        assert said.want is Want.STOP and said.failure == CANCELLED

    def test_an_abort_before_anybody_was_told_holds_nothing(self, side: Side) -> None:
        room = side.open()
        side.welcome()
        side.core.fail(room, CANCELLED)
        assert room.handle.release_safe
        assert [entry.want for entry in side.said()] == [Want.STOP], "a late sender is to fail too"

    def test_every_part_that_was_told_has_to_give_it(self, side: Side) -> None:
        room = side.open(KEY, P0, P1)
        first, second = side.welcome()
        side.core.write(room, Destination(np.arange(2, dtype=np.uint32)))
        side.said()
        side.hear(first, RoomState.FAILED, Writes.SETTLED)
        assert reason(room) == "TRANSFER_FAILED" and not room.handle.release_safe
        assert {entry.want for entry in side.said()} == {Want.STOP, Want.FORGET}
        side.hear(second, RoomState.SUCCESS, Writes.SETTLED)
        assert room.handle.release_safe

    def test_the_deadline_counts_anew_from_the_pages(self, side: Side) -> None:
        room = side.open()
        (stream,) = side.welcome()
        side.ticks(TIMING.room_deadline - 1, stream)
        side.core.write(room, Destination(np.arange(2, dtype=np.uint32)))
        side.ticks(TIMING.room_deadline - 1, stream)
        assert room.handle.poll is KVPoll.WaitingForInput
        side.ticks(1, stream)
        assert reason(room) == "ROOM_DEADLINE"


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
        (part,) = room.parts.values()
        assert part.writes is Writes.UNKNOWN and side.core.ignored_entries == 1

    def test_a_room_it_does_not_know_is_answered_forget(self, side: Side) -> None:
        _, stream = side.writing()
        side.hear(stream, RoomState.FAILED, Writes.STOPPED, key=RoomKey(99))
        side.ticks(1, stream)
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


class TestChecksums:
    """A room whose pages are there, and are being compared with their checksums on another thread."""

    DIFFERS = Failure(Reason.CHECKSUM_MISMATCH, "page 3")

    @staticmethod
    def comparing(side: Side, *targets: Target) -> tuple[DecodeRoom, Stream]:
        room, stream = side.writing(KEY, *targets)
        stream.pair.verify = True
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED, aux=b"token")
        assert side.take("compares") == [room]
        assert room.handle.poll is not KVPoll.Success and not side.aux, "nothing is said, or delivered, before"
        return room, stream

    def test_pages_that_are_as_they_were_sent_are_success(self, side: Side) -> None:
        room, _ = self.comparing(side)
        side.core.on_compared(room, None)
        assert room.handle.poll is KVPoll.Success and side.aux == [b"token"]
        side.ticks(1)
        assert [entry.want for entry in side.said()] == [Want.FORGET]

    def test_a_page_that_differs_fails_the_room_and_the_pages_come_back_at_once(self, side: Side) -> None:
        room, _ = self.comparing(side)
        side.core.on_compared(room, self.DIFFERS)
        assert reason(room) == "CHECKSUM_MISMATCH" and room.handle.release_safe and not side.aux

    @pytest.mark.parametrize("result", [None, DIFFERS])
    def test_an_abort_meanwhile_counts_and_the_result_changes_nothing(self, side: Side, result: Failure | None) -> None:
        room, _ = self.comparing(side)
        side.core.fail(room, CANCELLED)
        assert reason(room) == "ROOM_CANCELLED" and room.handle.release_safe
        side.core.on_compared(room, result)
        assert reason(room) == "ROOM_CANCELLED" and not side.aux
        assert side.take("ended") == [room], "it ended once"

    def test_the_deadline_counts_while_pages_are_compared(self, side: Side) -> None:
        room, stream = self.comparing(side)
        side.ticks(TIMING.room_deadline, hear=stream)
        assert reason(room) == "ROOM_DEADLINE"
        side.core.on_compared(room, None)
        assert reason(room) == "ROOM_DEADLINE" and not side.aux

    def test_a_success_that_is_said_again_compares_nothing_again(self, side: Side) -> None:
        room, stream = self.comparing(side)
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED, aux=b"token")
        assert side.take("compares") == [] and room.handle.poll is not KVPoll.Success
        side.core.on_compared(room, None)
        assert room.handle.poll is KVPoll.Success and side.aux == [b"token"]

    def test_a_peer_that_is_lost_meanwhile_takes_nothing_from_a_room_that_has_all(self, side: Side) -> None:
        room, _ = self.comparing(side)
        side.ticks(TIMING.idle_timeout + 1)
        assert side.take("lost") and room.handle.failure is None
        side.core.on_compared(room, None)
        assert room.handle.poll is KVPoll.Success and side.aux == [b"token"]

    def test_a_room_without_pages_has_nothing_to_compare(self, side: Side) -> None:
        room = side.open()
        (stream,) = side.welcome()
        stream.pair.verify = True
        side.core.write(room, Destination(np.arange(0, dtype=np.uint32)))
        side.said()
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED)
        assert side.take("compares") == [] and room.handle.poll is KVPoll.Success


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
        side.ticks(1, stream)
        side.said()
    pair: DecodePair = stream.pair  # type: ignore[union-attr]
    assert not side.core.rooms and not pair.rooms and not pair.pending_rooms
    assert len(side.core._due) == 0 and not side.core._held.rooms


def test_a_room_that_its_prefill_knows_by_name_fails_with_its_death(side: Side) -> None:
    room = side.open()
    (stream,) = side.welcome()
    side.ticks(1, stream)
    assert [entry.want for entry in side.said()] == [Want.ANNOUNCE]
    side.core.on_end(stream)
    side.ticks(1)
    (again,) = side.take("dials")
    side.core.on_refused(again)
    assert reason(room) == "PEER_LOST" and side.take("resolves") == []


def test_a_dial_that_nobody_answers_is_closed_before_the_next_and_with_its_pair(side: Side) -> None:
    side.open()
    (first,) = side.take("dials")
    side.ticks(TIMING.abandon_dial + 1)
    assert side.take("closes") == [first] and len(side.take("dials")) == 1
    side.core.predial(P1)
    (alone,) = side.take("dials")
    side.ticks(TIMING.abandon_dial + 1)
    assert alone in side.take("closes") and P1.ref not in side.core.pairs


def test_others_hear_that_an_idle_peer_is_gone(side: Side) -> None:
    side.core.predial(P0)
    (stream,) = side.welcome()
    side.core.on_end(stream)
    side.ticks(1)
    assert side.take("lost_peers") == [P0.ref] and not side.core.pairs


def test_a_lost_pair_is_dialled_at_once_and_then_seldom_though_rooms_waited_for_it(side: Side) -> None:
    _, stream = side.writing()
    side.core.on_goodbye(stream, CANCELLED)
    side.ticks(1)
    assert len(side.take("dials")) == 1
    side.open(RoomKey(6))
    side.ticks(TIMING.idle_timeout + 2)
    assert RoomKey(6) not in side.core.rooms and KEY in side.core.rooms
    side.take("dials")
    side.ticks(100)
    assert 0 < len(side.take("dials")) < 10


def test_nothing_is_left_of_a_room_that_ended_without_pages_when_its_peer_is_lost(side: Side) -> None:
    room = side.open()
    (stream,) = side.welcome()
    side.ticks(1, stream)
    side.said()
    side.core.fail(room, CANCELLED)
    assert [entry.want for entry in side.said()] == [Want.STOP] and side.core.rooms
    side.core.on_goodbye(stream, CANCELLED)
    assert not side.core.rooms


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


def test_a_room_that_failed_keeps_no_aux(side: Side) -> None:
    room, stream = side.writing(KEY, P0, P1)
    side.hear(stream, RoomState.SUCCESS, Writes.SETTLED, aux=b"token")
    assert room.aux == b"token"
    side.core.fail(room, CANCELLED)
    assert room.aux is None
