"""Rooms of a session, message by message: what the comments of transfer_service.proto promise of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Reason
from kvgrpc.transfer import KVPoll
from kvgrpc.transfer.protocol.types import Bounds, RoomKey, Timing
from kvgrpc.v1 import common_pb2, error_reason_pb2
from kvgrpc.v1 import transfer_service_pb2 as pb
from tests.support.faults.dataplane import Fault
from tests.support.rank_host import AUX_BYTES, PAGES, RankHost
from tests.support.transfer_peers import (
    FAILED,
    FORGET,
    OPEN,
    SETTLED,
    STOP,
    STOPPED,
    SUCCESS,
    DecodeClient,
    core_of,
    named,
    sender_of,
)
from tests.support.waiting import wait_until

ROOMS = iter(range(1_000, 10_000_000))
Dial = Callable[..., DecodeClient]


def fails(sender: Any) -> None:
    wait_until(lambda: sender.poll() is KVPoll.Failed)


class TestRooms:
    def test_write_moves_the_pages_and_success_brings_aux(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        source, destination = [3, 1, 400, 77], [500, 8, 9, 10]
        client.memory.bytes[:] = 0
        client.write(room, destination)
        prefill.send(room, source, aux_row=5)
        last = client.ended(room)
        assert (last.state, last.writes, last.pages_done) == (SUCCESS, SETTLED, 4)
        assert last.aux == prefill.aux_row(5)
        assert len(last.aux) == AUX_BYTES
        assert np.array_equal(client.memory.bytes[:, destination], prefill.memory[:, source])
        untouched = np.setdiff1d(np.arange(PAGES), destination)
        assert not client.memory.bytes[:, untouched].any()
        client.want(room, FORGET)
        wait_until(lambda: RoomKey(room) not in core_of(prefill).rooms)

    def test_states_only_advance(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [1, 2, 3])
        prefill.send(room, [1, 2], last=False)
        client.room(room, lambda entry: entry.pages_done == 2)
        prefill.send_rest(room, 3)
        client.ended(room)
        seen = [entry for message in client.kept for entry in message.rooms if entry.room == room]
        for field in ("state", "writes", "pages_done"):
            values = [getattr(entry, field) for entry in seen]
            assert values == sorted(values)

    def test_pages_travel_raw_and_as_runs(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        runs = [common_pb2.PageSet(run_starts=[100, 10], run_lengths=[3, 2])]
        client.send(rooms=[pb.DecodeRoom(room=room, want=pb.WANT_WRITE, pages=runs)])
        prefill.send(room, [20, 21, 22, 23, 24])
        assert client.ended(room).state == SUCCESS
        assert np.array_equal(client.memory.bytes[:, [100, 101, 102, 10, 11]], prefill.memory[:, 20:25])

    def test_a_full_prefix_hit_is_a_set_without_pages(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [], first_page=9)
        prefill.send(room, [], aux_row=3)
        last = client.ended(room)
        assert (last.state, last.aux) == (SUCCESS, prefill.aux_row(3))
        assert prefill.senders[room, 0].decode_prefix_pages == 9

    def test_repeats_are_harmless(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        for _ in range(3):
            client.write(room, [30, 31])
        prefill.send(room, [1, 2])
        done = client.ended(room)
        client.write(room, [30, 31])
        assert client.room(room) == done
        for _ in range(3):
            client.want(room, FORGET)
        client.send(forget_rooms=[room, room])
        wait_until(lambda: RoomKey(room) not in core_of(prefill).rooms)

    def test_changed_pages_are_a_conflict(self, prefill: RankHost, dial: Dial) -> None:
        for pages, first_page in (([1, 3], 0), ([1], 0), ([1, 2], 1)):
            client = dial(prefill).open()
            room = next(ROOMS)
            client.write(room, [1, 2])
            sender = sender_of(prefill, room)
            client.write(room, pages, first_page=first_page)
            last = client.ended(room)
            assert (last.state, last.failure.reason) == (FAILED, Reason.ROOM_CONFLICT)
            fails(sender)

    def test_stop_fails_both_sides_with_the_cause_that_decode_gave(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [1, 2])
        sender = sender_of(prefill, room)
        cause = common_pb2.Failure(
            reason=error_reason_pb2.ERROR_REASON_ROOM_DEADLINE, message="why not", metadata={"a": "b"}
        )
        client.want(room, STOP, failure=cause)
        last = client.ended(room)
        assert (last.state, last.writes) == (FAILED, SETTLED)
        assert (last.failure.reason, last.failure.message, last.failure.metadata) == (4, "why not", {"a": "b"})
        wait_until(lambda: sender.failure is not None)
        assert (sender.failure.reason, sender.failure.message) == (Reason.ROOM_DEADLINE, "why not")

    def test_stop_of_an_unclaimed_room_is_stopped_not_settled(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.want(room, STOP)
        last = client.ended(room)
        assert (last.state, last.writes, last.failure.reason) == (FAILED, STOPPED, Reason.ROOM_CANCELLED)
        late = sender_of(prefill, room)
        wait_until(lambda: late.poll() is KVPoll.Failed)
        assert late.failure.reason is Reason.ROOM_CANCELLED

    def test_stop_after_success_changes_nothing(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [1])
        prefill.send(room, [1])
        client.ended(room)
        client.want(room, STOP)
        again = client.room(room)
        assert (again.state, again.writes) == (SUCCESS, SETTLED)
        assert prefill.senders[room, 0].poll() is KVPoll.Success

    def test_nothing_goes_back(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.want(room, STOP)
        client.ended(room)
        client.write(room, [1])
        assert client.room(room).state == FAILED

    def test_forget_of_what_is_not_settled_is_ignored(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [1])
        sender = sender_of(prefill, room)
        wait_until(lambda: sender.poll() is KVPoll.WaitingForInput)
        core = core_of(prefill)
        ignored = core.ignored_entries
        client.want(room, FORGET)
        client.want(next(ROOMS), FORGET)
        wait_until(lambda: core.ignored_entries > ignored)
        client.write(room, [1])
        sender.init(1, 0)
        sender.send([5])
        assert client.ended(room).state == SUCCESS

    def test_no_local_sender_in_the_time_left_is_room_not_found(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [1], time_left_ms=1500)
        last = client.ended(room)
        assert "within 500 ms" in last.failure.message  # so that decode hears it before its own deadline
        assert (last.state, last.writes, last.failure.reason) == (FAILED, STOPPED, Reason.ROOM_NOT_FOUND)
        late = sender_of(prefill, room)
        wait_until(lambda: late.failure is not None)
        assert late.failure.reason is Reason.ROOM_NOT_FOUND

    def test_another_asker_gets_conflict_until_it_forgets_and_disturbs_nobody(
        self, prefill: RankHost, dial: Dial
    ) -> None:
        owner, other = dial(prefill).open(), dial(prefill).open()
        room = next(ROOMS)
        owner.write(room, [1])
        named(prefill, room)
        for _ in range(2):
            other.write(room, [2])
            answer = other.room(room)
            assert (answer.state, answer.writes > OPEN) == (FAILED, True)
            assert answer.failure.reason == Reason.ROOM_CONFLICT
            assert answer.failure.metadata["owner"] == str(owner.ref)
        other.want(room, STOP)
        assert other.room(room).failure.reason == Reason.ROOM_CONFLICT
        other.want(room, FORGET)
        assert other.quiet()
        prefill.send(room, [1])
        assert owner.ended(room).state == SUCCESS

    def test_attempts_are_independent_rooms(self, prefill: RankHost, dial: Dial) -> None:
        one, two = dial(prefill).open(), dial(prefill).open()
        room = next(ROOMS)
        one.write(room, [1])
        two.write(room, [2], attempt=1)
        prefill.send(room, [3], attempt=1)
        done = two.ended(room)
        assert (done.attempt, done.state) == (1, SUCCESS)
        prefill.send(room, [4])
        assert one.ended(room).attempt == 0

    def test_a_sender_abort_reaches_decode(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [1])
        sender = sender_of(prefill, room)
        sender.abort("too warm")
        last = client.ended(room)
        assert (last.state, last.writes, last.failure.message) == (FAILED, SETTLED, "too warm")

    def test_past_the_bound_of_unknown_writes_rooms_are_refused_until_one_that_is_tried_is_done(
        self, dial: Dial
    ) -> None:
        settings = {"bounds": Bounds(unknown_writes=1), "timing": Timing(probe=20), "slow_seconds": {10**6: 0.0}}
        host = RankHost("V", "PREFILL", settings)
        try:
            plane: Any = host.rank.plane
            plane.fault = lambda number, _: Fault(Outcome.FAILED_UNKNOWN) if number < 2 else None
            client = dial(host).open()

            def hand_off(room: int) -> Any:
                sender = sender_of(host, room)
                named(host, room)
                client.write(room, [4])
                sender.init(1, 0)
                sender.send([1])
                entry = client.ended(room)
                wait_until(lambda: sender.ended)
                return entry

            assert [hand_off(room).failure.reason for room in (1, 2)] == [Reason.TRANSFER_FAILED] * 2
            refused = hand_off(3)
            assert (refused.failure.reason, refused.writes) == (Reason.TOO_MANY_REQUESTS, SETTLED)
            assert refused.failure.metadata["scope"] == "unknown_writes"
            assert 0 < refused.failure.retry_after.ToMilliseconds() <= 2_000
            assert host.rank.transfer.depths()["unknown_writes"] == 2
            assert host.rank.transfer.depths()["peers_refused"] == 1
            rooms = itertools.count(4)
            wait_until(lambda: hand_off(next(rooms)).state == SUCCESS)
            assert host.rank.transfer.depths()["peers_refused"] == 0
        finally:
            host.close(1.0)

    def test_a_prefill_that_closes_says_that_writes_nobody_knew_of_are_over(self, dial: Dial) -> None:
        """Its pages come back by its word, and not only by a refused dial of its address."""
        host = RankHost("U", "PREFILL", {"slow_seconds": {10**6: 0.0}})
        try:
            plane: Any = host.rank.plane
            plane.fault = lambda number, _: Fault(Outcome.FAILED_UNKNOWN)
            host.rank._parts.owns_plane = True  # as where the rank opened it: closing the rank closes the plane
            client, room = dial(host).open(), next(ROOMS)
            client.write(room, [1])
            host.send(room, [1])
            assert client.room(room, lambda entry: entry.state == FAILED).writes == pb.WRITES_UNKNOWN
        finally:
            host.close(2.0)
        assert client.room(room, lambda entry: entry.writes != pb.WRITES_UNKNOWN).writes == pb.WRITES_STOPPED
        assert client.goodbye().reason is Reason.SERVER_DRAINING

    def test_a_draining_prefill_fails_new_rooms_and_finishes_old_ones(self, dial: Dial) -> None:
        host = RankHost("Q", "PREFILL", {})
        try:
            client = dial(host).open()
            running, late = next(ROOMS), next(ROOMS)
            client.write(running, [1, 2])
            host.send(running, [1], last=False)
            client.room(running, lambda entry: entry.pages_done == 1)
            host.rank._loop.loop.call_soon_threadsafe(core_of(host).drain)
            client.write(late, [3])
            last = client.ended(late)
            assert (last.state, last.failure.reason) == (FAILED, Reason.SERVER_DRAINING)
            host.send_rest(running, 2)
            assert client.ended(running).state == SUCCESS
        finally:
            host.close(1.0)
        assert client.goodbye().reason is Reason.SERVER_DRAINING
