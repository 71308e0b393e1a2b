"""What changed is told in the order in which it did, a frame's worth at a time, to peers that a stream leads to."""

from __future__ import annotations

from kvgrpc.transfer.protocol.pairs import PendingRooms, take_keys
from kvgrpc.transfer.protocol.types import RoomKey


class Pair:
    def __init__(self) -> None:
        self.pending_rooms: dict[RoomKey, None] = {}
        self.up = True


def test_a_piece_is_taken_from_the_front_and_the_rest_stays() -> None:
    pair = Pair()
    pair.pending_rooms.update(dict.fromkeys(RoomKey(room) for room in range(1, 6)))
    assert [key.room for key in take_keys(pair, 2)] == [1, 2]
    pair.pending_rooms[RoomKey(1)] = None  # it changed again
    assert [key.room for key in take_keys(pair, 3)] == [3, 4, 5]
    assert [key.room for key in take_keys(pair, 3)] == [1]
    assert take_keys(pair, 3) == [] and not pair.pending_rooms


def test_what_nobody_waits_for_rides_with_other_news_or_goes_with_the_second_tick() -> None:
    pending, pair = PendingRooms[Pair](), Pair()
    pending.add_later(pair, RoomKey(1))
    assert pending.take_pairs() == []
    pending.add(pair, RoomKey(2))
    assert pending.take_pairs() == [pair] and list(pair.pending_rooms) == [RoomKey(1), RoomKey(2)]
    pending.add_later(pair, RoomKey(3))
    pending.tick()
    assert pending.take_pairs() == []
    pending.tick()
    assert pending.take_pairs() == [pair] and pending.take_pairs() == []
    pending.tick()
    pending.tick()
    assert pending.take_pairs() == [], "it was told already"


def test_a_pair_that_is_told_news_in_each_tick_is_sent_nothing_by_the_ticks() -> None:
    pending, pair = PendingRooms[Pair](), Pair()
    for room in range(1, 20, 2):
        pending.add(pair, RoomKey(room))
        assert pending.take_pairs() == [pair]
        pending.add_later(pair, RoomKey(room + 1))
        pending.tick()
        assert pending.take_pairs() == []


def test_what_nobody_waits_for_goes_at_once_where_it_has_become_much() -> None:
    pending, pair = PendingRooms[Pair](), Pair()
    for room in range(1, 1024):
        pending.add_later(pair, RoomKey(room))
    assert pending.take_pairs() == []
    pending.add_later(pair, RoomKey(1024))
    assert pending.take_pairs() == [pair]


def test_a_pair_without_a_stream_has_nobody_to_tell() -> None:
    pending, pair = PendingRooms[Pair](), Pair()
    pair.up = False
    pending.add(pair, RoomKey(1))
    assert pending.take_pairs() == []
    pair.up = True
    pending.add_all(pair, [RoomKey(1), RoomKey(2)])
    assert pending.take_pairs() == [pair] and list(pair.pending_rooms) == [RoomKey(1), RoomKey(2)]
