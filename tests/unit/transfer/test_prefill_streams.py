"""One stream for each decode at prefill (rule 2, one stream per pair); without one a decode is lost, and no more is
written to it (rule 3, break and loss)."""

from __future__ import annotations

import pytest

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Reason
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol.types import Bounds, DecodeEntry, KVPoll, RoomKey, SessionState, Want
from tests.support.prefill_side import D0, KEY, ME, TIMING, Side, reason, side

__all__ = ["side"]


class TestStreams:
    def test_another_epoch_is_stale(self, side: Side) -> None:
        error = side.core.on_hello(object(), D0, RankRef(ME.rank, 99), 1)
        assert error is not None and error.reason is Reason.STALE_EPOCH and not side.core.pairs

    def test_a_larger_number_ends_the_older_stream_and_its_frames(self, side: Side) -> None:
        old = side.hello()
        new = side.hello()
        assert side.take("closes") == [old]
        side.core.on_frame(old, D0, [DecodeEntry(KEY, Want.STOP)])
        assert not side.core.rooms
        side.core.on_end(old, D0)
        assert side.core.pairs[D0].stream is new

    def test_a_smaller_number_is_refused_even_after_the_pair_was_dropped(self, side: Side) -> None:
        side.core.on_end(side.hello(), D0)
        side.ticks(TIMING.welcome_within + 1)
        assert D0 not in side.core.pairs and [pair.ref for pair in side.take("gone")] == [D0]
        error = side.core.on_hello(object(), D0, ME, 1)
        assert error is not None and error.reason is Reason.INVALID_REQUEST

    def test_a_welcome_says_every_room_that_is_not_forgotten_again(self, side: Side) -> None:
        side.writing()
        side.name(Want.STOP, RoomKey(6))
        side.said()
        side.name(Want.FORGET, RoomKey(6))
        assert side.core.pairs[D0].open_rooms == 1
        side.hello()
        assert set(side.said()) == {KEY}

    @pytest.mark.parametrize(("broken", "after"), [(True, TIMING.welcome_within), (False, TIMING.idle_timeout)])
    def test_a_lost_pair_fails_its_rooms_and_starts_no_further_write(
        self, side: Side, broken: bool, after: int
    ) -> None:
        side.name()
        record, handle = side.claim()
        side.send(record, 0, 1)
        (submission,) = side.take("submissions")
        if broken:
            side.core.on_end(side.streams[D0], D0)
        side.ticks(after, heard=False)
        assert handle.poll is KVPoll.Transferring
        side.ticks(1, heard=False)
        assert reason(handle) == "PEER_LOST" and side.take("stops") == [record]
        assert bool(side.take("closes")) is not broken
        side.send(record, 1, 3, last=True)
        assert not side.take("submissions")
        side.core.on_outcome(submission, Outcome.DONE)
        assert handle.release_safe

    def test_the_memory_of_a_lost_pair_is_given_back_at_once_and_once(self, side: Side) -> None:
        side.name(Want.STOP)
        side.core.on_end(side.streams[D0], D0)
        side.ticks(TIMING.welcome_within, heard=False)
        assert not side.take("gone")
        side.ticks(1, heard=False)
        assert side.take("gone") == [side.core.pairs[D0]] and side.core.rooms, "what it asked is remembered longer"
        side.ticks(TIMING.ended_record + 1, heard=False)
        assert not side.core.pairs and not side.take("gone")

    def test_a_pair_is_dropped_when_nothing_of_it_is_remembered(self, side: Side) -> None:
        side.name(Want.STOP)
        side.core.on_end(side.streams.pop(D0), D0)
        side.ticks(TIMING.ended_record + 1)
        assert not side.core.rooms and not side.core.pairs

    def test_an_asker_that_never_forgets_its_refusals_is_given_up(self) -> None:
        side = Side(bounds=Bounds(unclaimed=1))
        for number in (1, 2, 3):
            side.name(key=RoomKey(number))
        assert side.core.pairs[D0].state is SessionState.LOST
