"""Rooms, handles and times as both sides see them, and how failures are put for people."""

from __future__ import annotations

import pytest

from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol import failures
from kvgrpc.transfer.protocol.types import (
    DecodeEntry,
    Handle,
    KVPoll,
    PrefillEntry,
    RoomKey,
    RoomState,
    Timing,
    Want,
    Writes,
    room_from_transfer_id,
)

ROOM = RoomKey(7, 1)


def test_a_room_without_more_is_the_first_attempt_and_an_entry_says_only_what_it_was_given() -> None:
    assert RoomKey(7) == RoomKey(7, 0, 0)
    assert DecodeEntry(ROOM, Want.STOP) == DecodeEntry(ROOM, Want.STOP, None, 0, None, "", None)
    said = PrefillEntry(ROOM, RoomState.TRANSFERRING, Writes.OPEN)
    assert said == PrefillEntry(ROOM, RoomState.TRANSFERRING, Writes.OPEN, 0, b"", None, b"")


def test_milliseconds_are_told_in_whole_ticks_of_which_a_wait_has_one_at_least() -> None:
    timing = Timing(tick_seconds=0.1)
    assert [timing.ticks(milliseconds) for milliseconds in (0, 1, 100, 300)] == [1, 1, 1, 3]
    assert [timing.milliseconds(ticks) for ticks in (-1, 0, 1, 3)] == [0, 0, 100, 300]


def test_a_room_of_a_transfer_id_is_fixed_for_ever() -> None:
    assert room_from_transfer_id("cmpl-1") == 6956485835667952681


@pytest.mark.parametrize("poll", [KVPoll.Success, KVPoll.Failed])
def test_whoever_listens_to_a_handle_hears_its_last_change_and_is_let_go(poll: KVPoll) -> None:
    heard: list[bool] = []
    handle = Handle()
    handle.on_change = lambda: heard.append(handle.release_safe)
    handle.turn(poll)
    assert handle.on_change is not None, "its pages are not free yet"
    handle.release()
    assert handle.on_change is None and heard == [False, True]


def test_a_failure_shows_as_much_as_people_read() -> None:
    ranks = [RankId("p", tp=number) for number in range(9)]
    assert failures.other_ranks(ROOM, ranks).metadata["peer"].split() == [str(rank) for rank in ranks[:8]]
    assert failures.not_written(ROOM, "mooncake", "FAILED", "x" * 300).metadata["code"] == "x" * 200
    peer = RankRef(ranks[0], 5)
    assert f"evidence that {peer} writes no more" in failures.pages_held(5, 3, 1.0, peer).message
    assert "evidence that nobody writes" in failures.pages_held(5, 3, 1.0).message
