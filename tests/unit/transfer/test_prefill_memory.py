"""What prefill remembers of what is over: for how long, how much of it, and what goes first."""

from __future__ import annotations

from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.prefill.memory import EndedRecords, StreamNumbers, UnknownWrites
from kvgrpc.transfer.protocol.types import RoomKey, Writes

A, B, C = (RankRef(RankId(name), 1) for name in "ABC")
ONE, TWO, THREE = (RoomKey(room) for room in (1, 2, 3))


def test_a_record_that_changed_again_is_kept_from_then_on() -> None:
    ended = EndedRecords(10, 100)
    ended.keep(ONE, 0)
    ended.keep(TWO, 1)
    ended.keep(ONE, 5)
    assert ended.take_over(10) == []
    assert ended.take_over(11) == [(TWO, True)]
    assert ended.take_over(14) == [] and ended.take_over(15) == [(ONE, True)] and ended.take_over(99) == []


def test_past_the_limit_the_oldest_goes_though_its_time_is_not_over() -> None:
    ended = EndedRecords(10, 2)
    for now, key in enumerate((ONE, TWO, THREE)):
        ended.keep(key, now)
    assert ended.take_over(3) == [(ONE, False)]
    assert ended.take_over(3) == []
    ended.drop(TWO)
    ended.drop(TWO)
    assert ended.take_over(12) == [(THREE, True)]


def test_stream_numbers_only_grow_and_those_of_the_oldest_incarnation_go_first() -> None:
    numbers = StreamNumbers(2)
    assert numbers.largest(A) == 0
    numbers.note(A, 7)
    numbers.note(B, 1)
    numbers.note(A, 3)
    assert (numbers.largest(A), numbers.largest(B)) == (7, 1)
    numbers.note(C, 2)
    assert (numbers.largest(A), numbers.largest(B), numbers.largest(C)) == (7, 0, 2)


def test_past_the_limit_nobody_can_be_vouched_for() -> None:
    unknown = UnknownWrites(1)
    assert not unknown
    unknown.add(A)
    assert unknown and unknown.without_record(A) is Writes.UNKNOWN and unknown.without_record(B) is Writes.STOPPED
    unknown.add(B)
    assert unknown and unknown.without_record(C) is Writes.UNKNOWN
    unknown.clear()
    assert not unknown and unknown.without_record(A) is unknown.without_record(C) is Writes.STOPPED
    unknown.add(C)
    assert unknown.without_record(C) is Writes.UNKNOWN and unknown.without_record(A) is Writes.STOPPED
