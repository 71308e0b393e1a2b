"""One sender whose pages several decode ranks are owed: one outcome, one owner a place, nothing left behind."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import ParallelLayoutMismatch
from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.prefill.core import PrefillRoom
from kvgrpc.transfer.protocol.prefill.fan_out import FanOut, PlaceHandle
from kvgrpc.transfer.protocol.types import DecodeEntry, Destination, Handle, KVPoll, RoomKey, RoomState, Want, Writes
from tests.support.prefill_side import CANCELLED, KEY, TIMING, Side, reason

T0, T1 = (RankRef(RankId("D", tp=tp), 7) for tp in range(2))
LATER = RankRef(RankId("D", tp=1), 9)
OTHER = RankRef(RankId("E", tp=1), 7)


class Wide(Side):
    """A prefill rank that owes each room to two decode ranks."""

    def hello(self, ref: RankRef = T0) -> object:
        stream = super().hello(ref)
        pair = self.core.pairs[ref]
        pair.place, pair.places, pair.sends_aux = ref.rank.tp, 2, True
        return stream

    def both_named(self) -> None:
        for ref in (T0, T1):
            self.name(ref=ref)

    def end_writes(self, outcome: Outcome = Outcome.DONE) -> int:
        submissions = self.take("submissions")
        for submission in submissions:
            self.core.on_outcome(submission, outcome)
        return len(submissions)


@pytest.fixture
def side() -> Wide:
    return Wide()


def steps(side: Wide) -> dict[str, object]:
    record: list[PrefillRoom] = []
    handle = Handle()

    def claim() -> None:
        made = side.core.claim(KEY, handle)
        assert made is not None
        record.append(made)
        side.expect(made, 3)

    return {
        "handle": handle,
        "claim": claim,
        "first": lambda: side.send(record[0], 0, 1),
        "last": lambda: side.send(record[0], 1, 3, last=True, aux=b"aux"),
        "t0": lambda: side.name(ref=T0),
        "t1": lambda: side.name(ref=T1),
    }


@pytest.mark.parametrize(
    "order",
    [
        o
        for o in itertools.permutations(["claim", "first", "last", "t0", "t1"])
        if o.index("claim") < o.index("first") < o.index("last")
    ],
    ids="-".join,
)
def test_in_whichever_order_they_come_each_rank_gets_every_page_and_the_sender_ends_once(
    order: tuple[str, ...],
) -> None:
    side = Wide()
    step = steps(side)
    for name in order:
        step[name]()  # type: ignore[operator]
    handle = step["handle"]
    assert isinstance(handle, Handle) and handle.poll is KVPoll.Transferring and not handle.release_safe
    moved: dict[RankRef, dict[int, int]] = {T0: {}, T1: {}}
    submissions = side.take("submissions")
    for number, submission in enumerate(submissions):
        moved[submission.pair.ref].update(zip(submission.destination.tolist(), submission.source.tolist(), strict=True))
        assert handle.poll is not KVPoll.Success
        side.core.on_outcome(submission, Outcome.DONE)
        assert (handle.poll is KVPoll.Success) == (number == len(submissions) - 1)
    assert moved[T0] == moved[T1] == {10: 100, 11: 101, 12: 102}
    assert handle.release_safe
    for ref in (T0, T1):
        side.core._records.pending.add(side.core.pairs[ref], KEY.at(ref.rank.tp))
    said = {ref: side.core.flush(side.core.pairs[ref])[0] for ref in (T0, T1)}
    assert {(entry.state, entry.writes, entry.aux) for entry in said.values()} == {
        (RoomState.SUCCESS, Writes.SETTLED, b"aux")
    }


def test_it_waits_for_every_rank(side: Wide) -> None:
    _, handle = side.claim()
    side.name(ref=T1)
    assert handle.poll is KVPoll.WaitingForInput  # init was called
    fresh = Handle()
    side.name(ref=T0, key=RoomKey(6))
    side.core.claim(RoomKey(6), fresh)
    assert fresh.poll is KVPoll.Bootstrapping
    side.name(ref=T1, key=RoomKey(6))
    assert fresh.poll is KVPoll.WaitingForInput


def test_its_progress_is_that_of_the_rank_that_has_least(side: Wide) -> None:
    side.both_named()
    record, handle = side.claim()
    side.send(record, 0, 1)
    side.send(record, 1, 2)
    submissions = side.take("submissions")
    writes = {ref: [one for one in submissions if one.pair.ref == ref] for ref in (T0, T1)}
    seen = []
    for ref, number in ((T0, 0), (T0, 1), (T1, 0), (T1, 1)):
        side.core.on_outcome(writes[ref][number], Outcome.DONE)
        seen.append(handle.pages_done)
    assert seen == [0, 0, 1, 2] and handle.poll is KVPoll.Transferring


def one_rank_done(side: Wide) -> tuple[PrefillRoom, Handle]:
    """The first decode rank has all and has forgotten the room; the second one's write runs."""
    side.both_named()
    record, handle = side.claim()
    side.send(record, 0, 3, last=True)
    first = next(each for each in side.take("submissions") if each.pair.ref == T0)
    side.core.on_outcome(first, Outcome.DONE)
    side.name(Want.FORGET, ref=T0)
    assert KEY not in side.core.rooms and not handle.release_safe
    return record, handle


def test_an_abort_ends_it_at_the_ranks_that_are_not_done_though_the_first_is(side: Wide) -> None:
    record, _ = one_rank_done(side)
    side.core.fail(record, CANCELLED)
    left = side.core.find(KEY)
    assert left is not None and left.failure == CANCELLED, "its decode would wait, and write on, to its deadline"


def test_people_see_the_rank_that_is_not_done_though_the_first_is(side: Wide) -> None:
    one_rank_done(side)
    left = side.core.find(KEY)
    assert left is not None and left.key.place == 1
    assert left.state_of_all is RoomState.TRANSFERRING and left.failure_of_all is None


def test_a_second_sender_disturbs_nobody_though_the_first_rank_is_done(side: Wide) -> None:
    """The later ranks would be written what it sends, and the first sender would never end."""
    side.both_named()
    record, handle = side.claim()
    side.send(record, 0, 3, last=True)
    first, second = side.take("submissions")
    side.core.on_outcome(first, Outcome.DONE)
    side.name(Want.FORGET, ref=T0)
    late = Handle()
    assert side.core.claim(KEY, late) is None
    assert reason(late) == "ROOM_CONFLICT" and late.release_safe
    side.core.on_outcome(second, Outcome.DONE)
    assert handle.poll is KVPoll.Success and handle.release_safe


def test_a_rank_that_looks_for_the_sender_finds_it_though_the_first_rank_is_done(side: Wide) -> None:
    """It would look until its deadline, for pages that wait for it."""
    record, _ = side.claim()
    side.name(ref=T0)
    side.send(record, 0, 3, last=True)
    assert side.end_writes() == 1
    side.name(Want.FORGET, ref=T0)
    assert KEY not in side.core.rooms and side.core.has_sender(KEY)
    side.name(ref=T1)
    assert side.end_writes() == 1
    side.name(Want.FORGET, ref=T1)
    assert not side.core.has_sender(KEY)


@pytest.mark.parametrize("owner", [T0, T1])
def test_a_hello_that_is_refused_fails_no_room_of_others_though_the_first_rank_is_done_or_to_come(
    side: Wide, owner: RankRef
) -> None:
    side.name(ref=owner)
    record, handle = side.claim()
    side.send(record, 0, 3, last=True)
    if owner == T0:
        side.end_writes()
        side.name(Want.FORGET, ref=T0)
    side.core.on_refused_hello([KEY], owner.rank.engine, ParallelLayoutMismatch("another layout"))
    assert handle.poll is not KVPoll.Failed
    left = side.core.find(KEY)
    assert left is not None and left.failure is None


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.REJECTED])
def test_people_are_told_once_that_it_ended_and_how_it_did_for_all(side: Wide, outcome: Outcome) -> None:
    """It was told as soon as the first rank was done: a room that failed later was counted as one that succeeded."""
    side.both_named()
    record, handle = side.claim()
    side.send(record, 0, 3, last=True)
    first, second = side.take("submissions")
    side.core.on_outcome(first, Outcome.DONE)
    assert not side.take("ended")
    side.core.on_outcome(second, outcome)
    (ended,) = side.take("ended")
    failed = outcome is not Outcome.DONE
    assert (ended.failure is not None) is failed is (handle.poll is KVPoll.Failed)
    assert (record.state_of_all is RoomState.FAILED) is failed is (record.failure_of_all is not None)
    assert isinstance(ended.handle, PlaceHandle) and ended.handle.sender is handle


def test_the_failure_of_a_later_rank_is_remembered_when_all_have_forgotten_the_room(side: Wide) -> None:
    side.both_named()
    record, _ = side.claim()
    side.send(record, 0, 3, last=True)
    for submission, outcome in zip(side.take("submissions"), (Outcome.DONE, Outcome.REJECTED), strict=True):
        side.core.on_outcome(submission, outcome)
    for ref in (T0, T1):
        side.name(Want.FORGET, ref=ref)
    (failed,) = side.take("failed")
    assert failed.failure is not None and not side.core.rooms


def test_the_first_rank_whose_write_fails_fails_the_room_for_all(side: Wide) -> None:
    side.both_named()
    record, handle = side.claim()
    side.send(record, 0, 3, last=True)
    first, second = side.take("submissions")
    side.core.on_outcome(first, Outcome.FAILED_SRC_FREE, "cut")
    assert reason(handle) == "TRANSFER_FAILED" and not handle.release_safe
    side.core.on_outcome(second, Outcome.DONE)
    assert handle.release_safe
    assert {room.state for room in side.core.rooms.values()} == {RoomState.FAILED}


def test_one_rank_that_stops_stops_the_others(side: Wide) -> None:
    side.both_named()
    _, handle = side.claim()
    side.name(Want.STOP, ref=T1)
    assert reason(handle) == "ROOM_CANCELLED"
    assert {room.state for room in side.core.rooms.values()} == {RoomState.FAILED}


def test_a_rank_that_is_lost_takes_the_room_with_it(side: Wide) -> None:
    side.both_named()
    _, handle = side.claim()
    side.core.on_end(side.streams.pop(T1), T1)
    side.ticks(TIMING.welcome_within + 1)
    assert reason(handle) == "PEER_LOST"


def test_an_abort_reaches_every_rank(side: Wide) -> None:
    side.both_named()
    record, handle = side.claim()
    side.core.fail(record, CANCELLED)
    assert reason(handle) == "ROOM_CANCELLED"
    for ref in (T0, T1):
        assert side.core.flush(side.core.pairs[ref])[0].state is RoomState.FAILED


def test_a_sender_that_comes_after_one_rank_stopped_fails_at_once_and_tells_the_other(side: Wide) -> None:
    side.both_named()
    side.name(Want.STOP, ref=T1)
    handle = Handle()
    side.core.claim(KEY, handle)
    assert reason(handle) == "ROOM_CANCELLED" and handle.release_safe
    assert side.core.flush(side.core.pairs[T0])[0].state is RoomState.FAILED


def test_each_place_has_one_owner_and_another_engine_gets_none(side: Wide) -> None:
    side.both_named()
    _, handle = side.claim()
    side.name(ref=LATER)
    side.name(ref=OTHER)
    for ref in (LATER, OTHER):
        (entry,) = side.core.flush(side.core.pairs[ref])
        assert entry.failure is not None and entry.failure.reason.name == "ROOM_CONFLICT"
    assert handle.poll is KVPoll.WaitingForInput


@pytest.mark.parametrize("first", [T0, T1])
def test_a_rank_of_another_engine_gets_none_though_its_place_is_free(side: Wide, first: RankRef) -> None:
    """It has one place, and the room another that nobody named yet."""
    side.name(ref=first)
    side.name(key=RoomKey(6), ref=T0)
    Side.hello(side, OTHER)
    side.name(ref=OTHER)
    (entry,) = side.core.flush(side.core.pairs[OTHER])
    assert entry.failure is not None and entry.failure.reason.name == "ROOM_CONFLICT"


def test_nor_do_several_ranks_get_the_room_of_one(side: Wide) -> None:
    Side.hello(side, OTHER)
    side.name(ref=OTHER)
    side.name(ref=T1)
    (entry,) = side.core.flush(side.core.pairs[T1])
    assert entry.failure is not None and entry.failure.reason.name == "ROOM_CONFLICT"


def test_a_room_of_one_rank_beside_goes_its_own_way(side: Wide) -> None:
    side.both_named()
    Side.hello(side, OTHER)
    side.name(Want.ANNOUNCE, RoomKey(6), ref=OTHER)
    side.name(Want.FORGET, RoomKey(6), ref=OTHER)
    assert RoomKey(6) not in side.core.rooms and side.core._records.owners.places == {KEY: 2}


def test_ranks_of_one_replica_belong_together_where_they_count_alike(side: Wide) -> None:
    for ref in (T0, T1, LATER, OTHER):
        side.hello(ref)
    pairs = side.core.pairs
    assert pairs[T0].serves_with(pairs[T1]) and not pairs[T0].serves_with(pairs[OTHER])
    pairs[LATER].places = 4
    assert not pairs[T0].serves_with(pairs[LATER])


def test_how_many_ranks_there_are_is_known_as_long_as_one_has_a_record(side: Wide) -> None:
    side.both_named()
    side.name(Want.FORGET, ref=T0)
    assert side.core._records.owners.places == {KEY: 2}
    side.name(Want.FORGET, ref=T1)
    assert side.core._records.owners.places == {} and side.core.open_rooms == 0


def test_decodes_prefix_is_known_once_every_rank_named_its_pages(side: Wide) -> None:
    _, handle = side.claim()
    for ref, known in ((T0, None), (T1, 4)):
        side.hello(ref)
        destination = Destination(np.arange(3, dtype=np.uint32), 4)
        side.core.on_frame(side.streams[ref], ref, [DecodeEntry(KEY, Want.WRITE, destination, 5000)])
        assert handle.prefix_pages == known


def test_the_engine_hears_of_each_change_and_the_shell_of_the_end_once(side: Wide) -> None:
    side.both_named()
    handle = Handle()
    heard: list[tuple[KVPoll, bool]] = []
    handle.on_change = lambda: heard.append((handle.poll, handle.release_safe))
    record = side.core.claim(KEY, handle)
    assert record is not None
    side.expect(record, 3)
    side.send(record, 0, 3, last=True)
    side.end_writes()
    assert heard == [
        (KVPoll.WaitingForInput, False), (KVPoll.Transferring, False), (KVPoll.Transferring, True),
        (KVPoll.Success, True),
    ]  # fmt: skip
    assert side.take("ended") == [record] and side.core.open_rooms == 0


def test_a_rank_that_never_comes_ends_the_room_by_its_deadline(side: Wide) -> None:
    side.name(ref=T0)
    _, handle = side.claim()
    side.ticks(TIMING.room_deadline + 1)
    assert reason(handle) == "ROOM_DEADLINE"


def test_nothing_is_left_of_rooms_that_went_any_way() -> None:
    """Random interleavings of everything that can happen to 200 rooms of two ranks."""
    for seed in range(30):
        chance = random.Random(seed)
        side = Wide()
        todo: list[tuple[str, int]] = []
        for room in range(1, 8):
            todo += [("t0", room), ("t1", room), ("claim", room)]
            todo += [("stop0", room)] if chance.random() < 0.2 else []
            todo += [("abort", room)] if chance.random() < 0.2 else []
        chance.shuffle(todo)
        handles: dict[int, tuple[PrefillRoom | None, Handle]] = {}
        for what, number in todo:
            key = RoomKey(number)
            if what == "claim":
                handle = Handle()
                handles[number] = side.core.claim(key, handle), handle
                record = handles[number][0]
                if record is not None:
                    side.expect(record, 3)
                    side.send(record, 0, 3, last=True)
            elif what == "abort":
                record = handles.get(number, (None, None))[0]
                if record is not None:
                    side.core.fail(record, CANCELLED)
            else:
                side.name(Want.STOP if what == "stop0" else Want.WRITE, key=key, ref=T1 if what == "t1" else T0)
            if chance.random() < 0.5:
                side.end_writes(chance.choice([Outcome.DONE, Outcome.DONE, Outcome.FAILED_SRC_FREE]))
        side.end_writes()
        assert all(handle.poll in (KVPoll.Success, KVPoll.Failed) for _, handle in handles.values())
        assert all(handle.release_safe for _, handle in handles.values())
        for number, ref in itertools.product(range(1, 8), (T0, T1)):
            side.name(Want.FORGET, key=RoomKey(number), ref=ref)
        side.ticks(TIMING.ended_record + 2)
        assert side.core.rooms == {} and side.core._records.owners.places == {} and side.core.open_writes == 0


def test_one_failure_ends_the_room_for_as_many_decode_ranks_as_there_may_be() -> None:
    """Each place failed the next within its own call: some 330 were as deep as Python goes."""
    side, places = Side(), 1_000
    side.hello(T0)
    pair = side.core.pairs[T0]
    pair.place, pair.places = 0, places
    side.name(ref=T0)
    handle = Handle()
    sender = side.core.claim(KEY, handle)
    assert sender is not None and len(sender.siblings) == places
    side.core.fail(side.core.rooms[KEY], CANCELLED)
    assert handle.poll is KVPoll.Failed and all(each.failure is CANCELLED for each in sender.siblings)
    assert side.core.open_rooms == 0 and len(side.take("ended")) == 1


def test_all_places_are_looked_at_once_for_each_step_that_all_have_made() -> None:
    looks = 0

    class Counted(list[PlaceHandle]):
        def __iter__(self) -> Iterator[PlaceHandle]:
            nonlocal looks
            looks += 1
            return super().__iter__()

    handle = Handle()
    fan_out = FanOut(handle, 100)
    places = fan_out.places
    fan_out.places = Counted(places)
    for before, pages in ((0, 3), (3, 8)):
        for place in places:
            assert handle.pages_done == before
            place.note_done(pages)
        assert handle.pages_done == pages
    assert looks == 2


def test_people_are_told_once_of_a_room_that_ended_before_all_met(side: Wide) -> None:
    side.both_named()
    side.name(Want.STOP, ref=T0)
    (ended,) = side.take("ended")
    assert ended.key.place == 0
    side.core.claim(KEY, Handle())
    assert all(room.ended for room in side.core.rooms.values()) and side.take("ended") == []


def test_people_are_told_once_of_a_sender_that_ended_before_decode_came(side: Wide) -> None:
    record, _ = side.claim()
    side.core.fail(record, CANCELLED)
    assert side.take("ended") == [record]
    side.both_named()
    assert all(room.ended for room in side.core.rooms.values()) and side.take("ended") == []
