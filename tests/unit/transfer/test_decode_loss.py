"""Whom decode dials, and when it gives a peer up (rule 3, break and loss); only a proof that the peer is dead gives
back pages that it may still write (rule 4, proof of death)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from kvgrpc.dataplane.base import DataPlane
from kvgrpc.errors import Failure, Reason
from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.decode.core import DecodeCore, DecodePair, Stream
from kvgrpc.transfer.protocol.pairs import SilentPair
from kvgrpc.transfer.protocol.types import (
    Destination,
    KVPoll,
    RoomKey,
    RoomState,
    SessionState,
    Target,
    Timing,
    Want,
    Writes,
)
from kvgrpc.transfer.runtime.guarded import GuardedPlane
from tests.support.core_work import Work
from tests.support.decode_side import CANCELLED, KEY, ME, P0, P1, TIMING, Side, reason, side

__all__ = ["side"]


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
        side.ticks(2)
        assert [entry.want for entry in side.said()] == [Want.FORGET] and not side.core.rooms

    def test_a_lost_pair_is_dialled_ever_more_seldom_while_pages_are_held(self, side: Side) -> None:
        _, stream = side.writing()
        side.core.on_end(stream)
        moments = []
        for _ in range(600):
            side.ticks(1)
            for stream in side.take("dials"):
                moments.append(side.core.now)
                side.core.on_end(stream)
        waits = np.diff(moments)
        assert waits.max() == waits[-1] == TIMING.longest_backoff and (np.diff(waits) >= 0).all()

    def test_a_silent_peer_is_told_once_and_so_is_that_it_speaks_again(self, side: Side) -> None:
        _, stream = side.writing()
        side.ticks(TIMING.silent_after)
        assert side.take("silent") == [] and stream.pair.state is SessionState.OPEN
        side.ticks(100)
        assert side.take("silent") == [SilentPair(P0.ref, True, 3.1, 1)] and stream.pair.state is SessionState.SILENT
        side.core.on_heard(stream)
        side.ticks(1)
        assert side.take("silent") == [SilentPair(P0.ref, False, 0.1, 1)] and stream.pair.state is SessionState.OPEN

    def test_one_that_was_reached_and_never_heard_is_silent_too(self, side: Side) -> None:
        room = side.open()
        (stream,) = side.take("dials")
        side.core.on_connected(stream)
        side.ticks(TIMING.silent_after + 1)
        assert side.take("silent") == [SilentPair(P0.ref, True, 3.1, 1)]
        side.ticks(TIMING.silence - TIMING.silent_after - 1)
        assert not side.take("dials") and room.failure is None
        side.core.on_welcome(stream)
        assert room.handle.poll is KVPoll.WaitingForInput

    def test_a_silent_peer_whose_connection_ends_is_no_longer_silent(self, side: Side) -> None:
        _, stream = side.writing()
        side.ticks(TIMING.silent_after + 1)
        side.core.on_end(stream)
        side.ticks(1)
        assert len(side.take("silent")) == 1 and stream.pair.state is SessionState.BROKEN

    def test_silence_never_lasts_longer_than_a_room_may_take(self) -> None:
        side = Side(timing=Timing(room_deadline=50))
        _, stream = side.writing()
        side.core.on_welcome(stream, 10_000)
        side.ticks(50)
        assert not stream.pair.lost
        side.ticks(1)
        assert stream.pair.lost

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

    def idle(self, side: Side) -> Stream:
        _, stream = side.writing()
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED)
        side.ticks(TIMING.connect_within + 1, stream)
        side.said()
        return stream

    def test_an_idle_pair_that_breaks_is_dialled_once_and_dropped(self, side: Side) -> None:
        stream = self.idle(side)
        side.core.on_end(stream)
        (again,) = side.take("dials")
        side.core.on_end(again)
        side.ticks(1)
        assert not side.core.pairs and not side.take("dials")
        assert side.take("lost_peers") == [P0.ref] and not side.take("dead")

    def test_an_idle_pair_that_said_it_leaves_is_not_dialled(self, side: Side) -> None:
        side.core.on_goodbye(self.idle(side), Failure(Reason.SERVER_DRAINING, "leaves"))
        side.ticks(1)
        assert not side.core.pairs and not side.take("dials")

    def test_the_death_of_an_idle_peer_is_known_before_a_room_needs_it(self, side: Side) -> None:
        side.core.on_end(self.idle(side))
        (again,) = side.take("dials")
        side.core.on_refused(again)
        side.ticks(1)
        assert side.take("dead") == [P0.ref] == side.take("lost_peers") and not side.core.pairs

    def test_so_it_is_of_one_whose_stream_was_too_young_to_be_dialled_at_once(self, side: Side) -> None:
        _, stream = side.writing()
        side.hear(stream, RoomState.SUCCESS, Writes.SETTLED)
        side.ticks(1, stream)
        side.said()
        side.core.on_end(stream)
        assert not side.take("dials")
        side.ticks(TIMING.first_backoff)
        (again,) = side.take("dials")
        side.core.on_refused(again)
        side.ticks(1)
        assert side.take("dead") == [P0.ref] and not side.core.pairs

    def test_a_room_that_comes_after_its_break_has_as_long_as_one_that_was_there(self, side: Side) -> None:
        side.core.on_end(self.idle(side))
        side.ticks(TIMING.welcome_within - 1)  # the redial hangs
        room = side.open(key=RoomKey(8))
        side.ticks(TIMING.welcome_within)
        assert not room.ended
        side.ticks(1)
        assert room.ended

    def test_a_pair_that_was_given_up_is_not_dialled_again_without_a_room(self, side: Side) -> None:
        stream = self.idle(side)
        stream.pair.lost = True
        side.core.on_end(stream)
        assert not side.take("dials")


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
    side.ticks(TIMING.welcome_within + 2)
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
        side.ticks(32)
        assert room.handle.release_safe

    def test_it_is_asked_about_them_ever_less_often_and_about_several_at_once(self) -> None:
        side, asked = Side(), list[int]()

        def connections(pair: DecodePair) -> frozenset[str]:
            asked.append(side.core.now)
            return frozenset({"it stays"})

        side.core = DecodeCore(ME, connections=connections, deliver_aux=lambda room: None)
        side.take = Work(side.core).take
        for number in range(8):
            target = Target(RankRef(RankId(f"P{number}"), 2), f"host:{number}")
            room, stream = side.writing(RoomKey(number + 1), target)
            self.prove(side, stream, "refused")
            side.ticks(1)
        asked.clear()
        side.ticks(1000)
        assert len(asked) <= 8 * (1000 // 32 + 6), "it reads the sockets of the whole host"
        assert len({tick for tick in asked if tick > 300}) <= 1000 // 32
        assert not room.handle.release_safe

    @pytest.mark.parametrize("began", [0, 8, 16, 24])
    def test_one_that_stood_for_four_seconds_holds_them_for_two_more_at_most(self, side: Side, began: int) -> None:
        """It was six more: an engine had its pool back 10.8 s after a kill."""
        told: list[frozenset[str] | None] = [None]
        named = frozenset({"host:1 -> us"})

        def connections(pair: DecodePair) -> frozenset[str] | None:
            """As a thread tells: what it found after the question before."""
            told.append(named)
            return told[-2]

        side.core = DecodeCore(ME, connections=connections, deliver_aux=lambda room: None)
        side.take = Work(side.core).take
        side.ticks(began)
        room, stream = side.writing()
        self.prove(side, stream, "refused")
        side.ticks(40)
        named = frozenset()
        assert not room.handle.release_safe
        side.ticks(20)
        assert room.handle.release_safe

    def test_what_is_told_a_while_later_is_evidence_too(self) -> None:
        """The answer is what a thread found after the question before."""
        told: list[frozenset[str] | None] = [None, frozenset({"host:1 -> us"}), None, frozenset({"a later one"})]
        side = Side()
        side.core = DecodeCore(ME, connections=lambda pair: told.pop(0), deliver_aux=lambda room: None)
        side.take = Work(side.core).take
        room, stream = side.writing()
        self.prove(side, stream, "refused")
        side.ticks(TIMING.settle + 1)
        assert len(told) == 2 and not room.handle.release_safe
        side.ticks(8)
        assert not told and room.handle.release_safe

    def test_a_plane_that_cannot_tell_later_gives_no_evidence(self, side: Side) -> None:
        """Through the guard: a plane that raised once answered other names than at the proof, and pages came back."""
        named: frozenset[str] | None = frozenset({"host:1 -> us"})

        def connections_from(address: bytes) -> frozenset[str]:
            if named is None:
                raise OSError("too many open files")
            return named

        plane = GuardedPlane(cast(DataPlane, SimpleNamespace(connections_from=connections_from)))
        side.core = DecodeCore(
            ME, connections=lambda pair: plane.connections_from_each([b"there"])[0], deliver_aux=lambda room: None
        )
        side.take = Work(side.core).take
        room, stream = side.writing()
        self.prove(side, stream, "refused")
        for answer in (named, None, named):
            named = answer
            side.ticks(2 * TIMING.settle)
            assert not room.handle.release_safe
        named = frozenset()
        side.ticks(32)
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
        side.ticks(32)
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
        side.ticks(2, new)
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
        side.ticks(TIMING.connect_within + 1, stream)
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


@pytest.mark.parametrize("drained", [False, True])
def test_a_refused_address_is_told_as_dead_unless_its_rank_said_that_it_leaves(side: Side, drained: bool) -> None:
    """Rooms that come before its successor is registered fail, or wait for it (rule 3, break and loss)."""
    room, stream = side.writing()
    if drained:
        side.core.on_goodbye(stream, Failure(Reason.SERVER_DRAINING, "drains"))
    else:
        side.core.on_end(stream)
    side.ticks(TIMING.first_backoff)
    (again,) = side.take("dials")
    side.core.on_refused(again)
    assert side.take("dead") == ([] if drained else [P0.ref]) and reason(room) == "PEER_LOST"
