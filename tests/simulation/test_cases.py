"""Every line of the case table in docs/session/cases.md, in its order, as directed schedules of the real cores."""

from __future__ import annotations

import pytest

from kvgrpc.transfer.protocol.types import KVPoll, RoomKey, RoomState, Want, Writes
from tests.simulation.checks import KNOWS_OF_A_STOP, LATENCY
from tests.simulation.processes import POOL_PAGES, TIMING
from tests.simulation.requests import Request
from tests.simulation.stage import FOREVER, KEY, SECOND, Stage, failed, part_of

REQUEST = Request(KEY)
AGAIN = Request(RoomKey(KEY.room, 1))
OTHER = Request(RoomKey(8, 0))
FAN_IN = Request(KEY, prefills=(0, 1, 2))


def test_decode_first_and_prefill_never_comes(stage: Stage) -> None:
    _, handle = stage.receive(REQUEST)
    passed = stage.until(lambda: failed(handle, "ROOM_NOT_FOUND"), TIMING.unclaimed)
    assert passed >= TIMING.unclaimed - 2 * SECOND
    stage.until_over()


def test_pages_before_the_registrys_answer_go_out_with_it_though_the_session_stands(stage: Stage) -> None:
    stage.receive(OTHER)
    stage.until_named(OTHER.key)
    stage.decode.begin(REQUEST, late=True)
    stage.send(REQUEST)
    handle = stage.decode.receiving[KEY].handle
    stage.until(lambda: handle.poll is KVPoll.Success)


def test_prefill_first_and_decode_never_comes(stage: Stage) -> None:
    handle = stage.send(REQUEST)
    assert stage.until(lambda: failed(handle, "ROOM_DEADLINE"), FOREVER) == TIMING.room_deadline
    assert handle.release_safe


def test_prefill_fails_before_decode_came(stage: Stage) -> None:
    stage.send(REQUEST)
    stage.prefill.abort(KEY)
    _, handle = stage.receive(REQUEST)
    stage.until(lambda: failed(handle, "ROOM_CANCELLED"), 2 * SECOND)
    stage.until_over()


def test_decode_cancels_before_prefill_came(stage: Stage) -> None:
    _, handle = stage.receive(REQUEST)
    stage.until_named()
    stage.decode.abort(KEY)
    assert failed(handle, "ROOM_CANCELLED")
    stage.until_over()
    late = stage.send(REQUEST)
    assert failed(late, "ROOM_CANCELLED") and late.failure is not None and late.failure.origin == str(stage.decode.ref)
    assert KEY not in stage.prefill.core.rooms


def test_chunks_before_write_wait(stage: Stage) -> None:
    handle = stage.send(REQUEST)
    stage.steps(3 * SECOND)
    assert handle.poll is KVPoll.WaitingForInput and not stage.prefill.core.open_writes
    _, receiver = stage.receive(REQUEST)
    stage.until(lambda: handle.poll is receiver.poll is KVPoll.Success)


def test_stop_crosses_success(stage: Stage) -> None:
    room, receiver = stage.receive(REQUEST)
    sender = stage.send(REQUEST)
    stage.until(lambda: sender.poll is KVPoll.Success)
    if receiver.poll is not KVPoll.Success:
        stage.decode.abort(KEY)
    stage.until_over()
    assert receiver.poll is KVPoll.Failed and sender.poll is KVPoll.Success
    assert part_of(room).state is RoomState.SUCCESS and part_of(room).writes is Writes.SETTLED


def test_failed_with_writes_open_is_not_forgotten(stage: Stage) -> None:
    room, receiver = stage.receive(REQUEST)
    stage.send(REQUEST)
    plane = stage.freeze()
    stage.prefill.abort(KEY)
    stage.until(lambda: failed(receiver, "ROOM_CANCELLED"))
    stage.steps(10 * SECOND)
    assert part_of(room).state is RoomState.FAILED and part_of(room).writes is Writes.OPEN
    assert not part_of(room).forgot and not receiver.release_safe
    plane.frozen = False
    stage.until_over()


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("moment", range(1, 40, 3))
def test_a_break_in_any_state_changes_nothing(stage: Stage, moment: int, lost: bool) -> None:
    request = Request(KEY, pages=3)
    _, receiver = stage.receive(request)
    sender = stage.send(request)
    stage.steps(moment)
    for link in list(stage.network.links):
        # A decode that hears of it more than a second after prefill comes too late (3, break and loss).
        stage.snap(link) if lost else stage.network.break_stream(link, learn=(0, stage.random.choice([0, 60, 999])))
    stage.until(lambda: sender.poll is receiver.poll is KVPoll.Success)
    stage.until_over()


def test_frames_of_an_old_half_open_stream_are_ignored(stage: Stage) -> None:
    room, receiver = stage.receive(REQUEST)
    stage.until(lambda: part_of(room).told_write)
    old = stage.link
    stale = [what for _, kind, what in old.to_prefill if kind == "rooms"] or [
        [stage.decode.core.rooms[KEY].entry(part_of(room), stage.decode.core.now, TIMING)]
    ]
    old.broken = True
    old.to_prefill.clear()
    old.to_decode.append((stage.now, "end", None))  # only decode learns of the break
    stage.until(lambda: any(link is not old and link.standing for link in stage.network.links))
    stage.decode.abort(KEY)
    stage.until(lambda: KEY not in stage.decode.core.rooms)
    for frame in stale:
        stage.prefill.core.on_frame(old, stage.decode.ref, frame)
    assert KEY not in stage.prefill.core.rooms or stage.record().want is not Want.WRITE
    assert failed(receiver, "ROOM_CANCELLED")


@pytest.mark.parametrize("moment", ["resolved", "named", "writing"])
def test_prefill_killed(stage: Stage, moment: str) -> None:
    room, receiver = stage.receive(REQUEST)
    if moment == "resolved":
        stage.until(lambda: room.handle.poll is KVPoll.WaitingForInput)
    else:
        stage.until_named()
    if moment == "writing":
        stage.send(REQUEST)
        stage.freeze()
    stage.kill_prefill(stage.prefill)
    assert stage.until(lambda: failed(receiver, "PEER_LOST")) <= 1 * SECOND
    held = not receiver.release_safe
    passed = stage.until(lambda: receiver.release_safe)
    assert passed >= TIMING.settle - SECOND if held else moment == "resolved"
    stage.until_over()


@pytest.mark.parametrize("kind", ["stopped", "cut off"])
def test_prefill_stopped_or_cut_off_and_later_continued(stage: Stage, kind: str) -> None:
    _, receiver = stage.receive(REQUEST)
    stage.until_named()
    if kind == "stopped":
        stage.stop(stage.prefill, FOREVER)
    else:
        stage.cut(stage.decode, stage.prefill, FOREVER)
    passed = stage.until(lambda: failed(receiver, "PEER_LOST"))
    assert KNOWS_OF_A_STOP - 5 <= passed <= KNOWS_OF_A_STOP + LATENCY
    stage.steps(10 * SECOND)
    assert not receiver.release_safe, "silence is no evidence"
    stage.network.cuts.clear()
    stage.go_on(stage.prefill)
    stage.until_over()


def test_prefill_stopped_and_then_killed(stage: Stage) -> None:
    _, receiver = stage.receive(REQUEST)
    stage.until_named()
    stage.stop(stage.prefill, FOREVER)
    stage.until(lambda: failed(receiver, "PEER_LOST"))
    stage.kill_prefill(stage.prefill)
    passed = stage.until(lambda: receiver.release_safe)
    assert TIMING.settle < passed <= TIMING.settle + TIMING.longest_backoff + LATENCY
    stage.until_over()


def test_prefill_replaced_elsewhere_while_the_old_one_is_stopped(stage: Stage) -> None:
    _, receiver = stage.receive(REQUEST)
    stage.until_named()
    old = stage.prefill
    stage.stop(old, FOREVER)
    stage.restart(0, "elsewhere")
    stage.until(lambda: failed(receiver, "PEER_LOST"))
    stage.steps(10 * SECOND)
    assert not receiver.release_safe, "a newer incarnation elsewhere proves nothing"
    _, other = stage.receive(OTHER)
    stage.send(OTHER)
    stage.until(lambda: other.poll is KVPoll.Success)
    stage.go_on(old)
    stage.until_over()


def test_prefill_restarted_on_its_address(stage: Stage) -> None:
    _, receiver = stage.receive(REQUEST)
    stage.until_named()
    stage.kill_prefill(stage.prefill)
    stage.restart(0, "a0")
    assert stage.until(lambda: failed(receiver, "PEER_LOST")) <= 1 * SECOND
    stage.until_over()


def test_decode_killed(stage: Stage) -> None:
    stage.receive(REQUEST)
    stage.prefill.lazy = True
    sender = stage.send(REQUEST)
    stage.until_named()
    stage.kill_decode(stage.decode)
    assert stage.until(lambda: failed(sender, "PEER_LOST")) <= 2 * SECOND
    stage.prefill.lazy = False
    stage.steps(2 * SECOND)
    assert not stage.prefill.core.open_writes, "nothing further is written"
    assert sender.release_safe
    stage.until(lambda: not stage.prefill.core.rooms and not stage.prefill.core.pairs, FOREVER)


def test_decode_restarted_with_the_same_room(stage: Stage) -> None:
    stage.receive(REQUEST)
    stage.prefill.lazy = True
    stage.send(REQUEST)
    stage.until_named()
    stage.kill_decode(stage.decode)
    _, receiver = stage.receive(REQUEST)
    stage.until(lambda: failed(receiver, "ROOM_CONFLICT"))
    stage.prefill.lazy = False
    _, retry = stage.receive(AGAIN)
    stage.send(AGAIN)
    stage.until(lambda: retry.poll is KVPoll.Success)
    stage.until_over()


def test_both_asleep_then_continued(stage: Stage) -> None:
    _, receiver = stage.receive(REQUEST)
    stage.until_named()
    stage.stop(stage.decode, FOREVER)
    stage.stop(stage.prefill, FOREVER)
    stage.steps(20 * SECOND)
    stage.go_on(stage.decode)
    stage.go_on(stage.prefill)
    sender = stage.send(REQUEST)
    stage.until(lambda: sender.poll is receiver.poll is KVPoll.Success)


def test_one_part_fails_the_others_are_stopped_and_all_give_evidence(stage: Stage) -> None:
    room, receiver = stage.receive(FAN_IN)
    stage.current[1].lazy = stage.current[2].lazy = True
    senders = [stage.send(FAN_IN, number) for number in range(3)]
    stage.until(lambda: part_of(room, 0).arrived)
    stage.until_named(number=2)
    stage.current[2].lazy = False
    plane = stage.freeze(number=2)
    stage.current[1].abort(KEY)
    stage.until(lambda: failed(receiver, "ROOM_CANCELLED"))
    assert receiver.failure is not None and receiver.failure.origin == str(stage.current[1].ref)
    stage.until(lambda: failed(senders[2], "ROOM_CANCELLED"))
    assert senders[2].failure is not None and senders[2].failure.origin == str(stage.current[1].ref)
    stage.steps(5 * SECOND)
    assert senders[0].poll is KVPoll.Success and not receiver.release_safe
    plane.frozen = False
    stage.until_over()


def test_a_lost_forget_is_answered_again(stage: Stage) -> None:
    _, receiver = stage.receive(REQUEST)
    _, other = stage.receive(OTHER)
    stage.send(REQUEST)
    stage.until(lambda: receiver.poll is KVPoll.Success)
    stage.network.cut(stage.decode, stage.prefill.address, FOREVER)
    stage.until(lambda: KEY not in stage.decode.core.rooms)
    assert KEY in stage.prefill.core.rooms, "FORGET is on its way"
    stage.snap(stage.link)
    stage.network.cuts.clear()
    assert stage.until(lambda: KEY not in stage.prefill.core.rooms) < TIMING.ended_record
    assert not other.terminal


def test_two_attempts_are_independent(stage: Stage) -> None:
    _, first = stage.receive(REQUEST)
    _, second = stage.receive(AGAIN)
    stage.prefill.lazy = True
    stage.send(REQUEST)
    stage.send(AGAIN)
    stage.until_named()
    stage.decode.abort(KEY)
    stage.prefill.lazy = False
    stage.until(lambda: second.poll is KVPoll.Success)
    assert failed(first, "ROOM_CANCELLED")
    stage.until_over()


def test_drain_during_writes_keeps_the_port_until_the_last_one(stage: Stage) -> None:
    _, receiver = stage.receive(REQUEST)
    stage.send(REQUEST)
    draining, plane = stage.prefill, stage.freeze()
    stage.drain(draining)
    stage.steps(5 * SECOND)
    assert stage.listening[draining.address] is draining and not receiver.terminal
    plane.frozen = False
    stage.until(lambda: receiver.poll is KVPoll.Success)
    stage.until(lambda: draining.state == "dead")
    _, other = stage.receive(OTHER)
    stage.send(OTHER)
    stage.until(lambda: other.poll is KVPoll.Success)


def test_drain_refuses_new_rooms(stage: Stage) -> None:
    stage.receive(REQUEST)
    stage.send(REQUEST)
    draining, plane = stage.prefill, stage.freeze()
    stage.drain(draining)
    stage.steps(SECOND)
    stage.registry[0] = draining.target  # which is behind
    _, other = stage.receive(OTHER)
    stage.until(lambda: failed(other, "SERVER_DRAINING"))
    assert failed(draining.begin(Request(RoomKey(9)), stage.random), "SERVER_DRAINING")
    plane.frozen = False


def test_a_room_that_a_draining_prefill_refuses_by_name_goes_to_its_successor(stage: Stage) -> None:
    draining = stage.prefill
    draining.draining = True  # it does not end while the test looks
    draining.core.drain()
    stage.decode.free.clear()
    room, receiver = stage.receive(REQUEST)
    stage.restart(0, "elsewhere")
    stage.until(lambda: room.resolved_again and room.bound)
    stage.decode.free.extend(range(POOL_PAGES))
    stage.send(REQUEST)
    stage.until(lambda: receiver.poll is KVPoll.Success)
    stage.until_over()


def test_close_with_held_pages_keeps_them(stage: Stage) -> None:
    _, receiver = stage.receive(REQUEST)
    stage.until_named()
    stage.stop(stage.prefill, FOREVER)
    stage.decode.abort(KEY)
    stage.steps(10 * SECOND)
    assert not receiver.release_safe
    assert stage.decode.core.held_pages == 2, "reported, not freed"
    stage.go_on(stage.prefill)
    stage.until_over()
    assert stage.decode.core.held_pages == 0
