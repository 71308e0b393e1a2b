"""Rules of docs/session.md that the table of cases leaves out, as directed schedules of the real cores."""

from __future__ import annotations

from functools import partial

import pytest
from msgspec.structs import replace

from kvgrpc.dataplane.base import Outcome
from kvgrpc.transfer.protocol.types import Bounds, Destination, KVPoll, RoomKey, Want, Writes
from tests.simulation.checks import LATENCY
from tests.simulation.processes import POOL_PAGES, TIMING
from tests.simulation.requests import Request
from tests.simulation.stage import FOREVER, KEY, SECOND, Stage, failed, part_of

REQUEST = Request(KEY)
OTHER = Request(RoomKey(8, 0))


@pytest.mark.parametrize(("outcome", "settle"), [(Outcome.REJECTED, 0), (Outcome.FAILED_SRC_FREE, TIMING.settle)])
def test_a_failed_write_gives_the_pages_back_by_what_it_said(stage: Stage, outcome: Outcome, settle: int) -> None:
    _, receiver = stage.receive(REQUEST)
    stage.send(REQUEST)
    plane = stage.freeze()
    plane.end_all(outcome)
    stage.until(lambda: failed(receiver, "TRANSFER_FAILED"))
    passed = stage.until(lambda: receiver.release_safe)
    assert settle <= passed <= settle + LATENCY + TIMING.settle
    stage.until_over()


def test_unknown_writes_hold_the_pages_until_the_engine_is_destroyed(stage: Stage) -> None:
    _, receiver = stage.receive(REQUEST)
    sender = stage.send(REQUEST)
    plane = stage.freeze()
    plane.end_all(Outcome.FAILED_UNKNOWN)
    stage.until(lambda: failed(receiver, "TRANSFER_FAILED"))
    stage.steps(2 * TIMING.ended_record)
    assert not receiver.release_safe and not sender.release_safe
    plane.destroy()
    assert sender.release_safe
    assert stage.until(lambda: receiver.release_safe) > TIMING.settle
    stage.until_over()


def test_past_the_bound_of_unknown_writes_a_decode_is_refused_until_a_probe_is_done() -> None:
    stage = Stage(bounds=Bounds(unknown_writes=1))
    for number in (1, 2):
        request = Request(RoomKey(number), pages=1)  # one write each
        _, receiver = stage.receive(request)
        stage.send(request)
        plane = stage.freeze(request.key)
        plane.end_all(Outcome.FAILED_UNKNOWN)
        plane.frozen = False
        stage.until(partial(failed, receiver, "TRANSFER_FAILED"))
    sender, (_, receiver) = stage.send(REQUEST), stage.receive(REQUEST)
    stage.until(lambda: failed(receiver, "TOO_MANY_REQUESTS") and failed(sender, "TOO_MANY_REQUESTS"))
    assert receiver.failure is not None and receiver.failure.retry_after is not None
    stage.steps(TIMING.probe)
    again = Request(RoomKey(8))
    sender, (_, receiver) = stage.send(again), stage.receive(again)
    stage.until(lambda: sender.poll is receiver.poll is KVPoll.Success)


def test_a_connection_that_is_left_holds_the_pages_after_the_settle_time(stage: Stage) -> None:
    _, receiver = stage.receive(REQUEST)
    stage.send(REQUEST)
    stage.freeze()
    writer = stage.prefill.ref
    stage.cut(stage.decode, stage.prefill, FOREVER)
    stage.kill_prefill(stage.prefill)
    stage.until(lambda: failed(receiver, "PEER_LOST"))
    stage.steps(10 * TIMING.settle)
    assert not receiver.release_safe, "nobody answers: nothing is proven"
    stage.network.cuts.clear()
    stage.until(lambda: receiver.release_safe, FOREVER)
    assert not stage.connections(stage.decode, writer), "the last byte came before"
    stage.until_over()


def test_a_first_dial_that_does_not_connect_fails_after_the_time_for_it(stage: Stage) -> None:
    stage.stop(stage.prefill, FOREVER)
    _, receiver = stage.receive(REQUEST)
    passed = stage.until(lambda: failed(receiver, "PEER_LOST"))
    assert TIMING.connect_within <= passed <= TIMING.connect_within + LATENCY
    assert receiver.release_safe, "nothing was ever asked of it"
    stage.until_over()


@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
@pytest.mark.parametrize("moment", [0, 1, 2, 3, 5, 8, 13, 20, 30])
def test_a_peer_whose_interpreter_is_held_loses_no_room_at_whatever_stage(stage: Stage, moment: int, side: str) -> None:
    request = Request(KEY, pages=3)
    _, receiver = stage.receive(request)
    sender = stage.send(request)
    stage.steps(moment)
    if side != "decode":
        stage.hold(stage.prefill, 100)
    if side != "prefill":
        stage.hold(stage.decode, 100)
    stage.until(lambda: sender.poll is receiver.poll is KVPoll.Success, 20 * SECOND)
    stage.until_over()


def test_a_break_while_prefills_interpreter_is_held_loses_no_room(stage: Stage) -> None:
    _, receiver = stage.receive(REQUEST)
    stage.until_named()
    stage.hold(stage.prefill, 100)
    stage.steps(SECOND)
    stage.snap(stage.link)
    stage.steps(5 * SECOND)
    sender = stage.send(REQUEST)
    stage.until(lambda: sender.poll is receiver.poll is KVPoll.Success, 20 * SECOND)


def test_a_peer_that_is_silent_past_its_bound_is_lost(stage: Stage) -> None:
    _, receiver = stage.receive(REQUEST)
    stage.until_named()
    stage.decode.core._due.clear(stage.decode.core.rooms[KEY])  # else it would be the deadline
    stage.hold(stage.prefill, FOREVER)
    passed = stage.until(lambda: failed(receiver, "PEER_LOST"), FOREVER)
    assert TIMING.silence <= passed <= TIMING.silence + LATENCY
    assert not receiver.release_safe, "it is alive, and may write"
    stage.go_on(stage.prefill)
    stage.until_over()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("kind", ["stop", "cut"])
@pytest.mark.parametrize(("seconds", "survives"), [(3, True), (6, False)])
def test_a_stop_or_a_cut_of_three_seconds_loses_no_room_and_one_of_six_does(
    stage: Stage, seconds: int, survives: bool, kind: str, side: str
) -> None:
    _, receiver = stage.receive(REQUEST)
    stage.prefill.lazy = True
    sender = stage.send(REQUEST)
    stage.until_named()
    process = stage.prefill if side == "prefill" else stage.decode
    if kind == "stop":
        stage.stop(process, seconds * SECOND)
    else:
        stage.cut(stage.decode, stage.prefill, seconds * SECOND)
    stage.steps(seconds * SECOND + 2 * SECOND)
    stage.prefill.lazy = False
    if survives:
        stage.until(lambda: sender.poll is receiver.poll is KVPoll.Success)
    else:
        stage.until(lambda: failed(sender, "PEER_LOST") and failed(receiver, "PEER_LOST"))
    stage.until_over()


def test_a_loss_spares_a_part_that_is_settled(stage: Stage) -> None:
    request = Request(KEY, prefills=(0, 1))
    room, receiver = stage.receive(request)
    stage.send(request)
    stage.until(lambda: part_of(room).arrived)
    stage.kill_prefill(stage.prefill)
    stage.steps(SECOND)
    stage.send(request, 1)
    stage.until(lambda: receiver.poll is KVPoll.Success)


def test_a_room_meets_a_registry_that_was_behind_once(stage: Stage) -> None:
    stale = stage.registry[0]
    stage.kill_prefill(stage.prefill)
    stage.restart(0, "a0")
    current, stage.registry[0] = stage.registry[0], stale
    request = Request(KEY, prefills=(0, 1))
    room, receiver = stage.receive(request)
    stage.until(lambda: room.resolved_again)
    stage.registry[0] = current
    stage.send(request, 0)
    stage.send(request, 1)
    stage.until(lambda: receiver.poll is KVPoll.Success)
    stage.registry[0] = stale
    stage.kill_prefill(stage.prefill)
    stage.restart(0, "a0")
    stage.registry[0] = stale
    _, other = stage.receive(OTHER)
    stage.until(lambda: failed(other, "STALE_EPOCH"))
    stage.until_over()


@pytest.mark.parametrize("orderly", [True, False])
def test_a_room_that_prefill_was_never_told_of_outlives_it_once(stage: Stage, orderly: bool) -> None:
    """Killed or closed and opened again: nobody fails of whom it did not know."""
    stage.stop(stage.prefill, FOREVER)
    room, receiver = stage.receive(REQUEST)
    stage.steps(SECOND)
    stage._retire(stage.prefill, goodbye=True) if orderly else stage.kill_prefill(stage.prefill)
    stage.restart(0, "a0")
    stage.until(lambda: room.resolved_again and room.bound)
    stage.send(REQUEST)
    stage.until(lambda: receiver.poll is KVPoll.Success)
    stage.until_over()


def test_a_room_of_which_the_second_prefill_died_too_fails(stage: Stage) -> None:
    stage.stop(stage.prefill, FOREVER)
    room, receiver = stage.receive(REQUEST)
    stage.steps(SECOND)
    stage.kill_prefill(stage.prefill)  # and the registry still names it
    stage.until(lambda: failed(receiver, "PEER_LOST"))
    assert room.resolved_again and receiver.release_safe
    stage.until_over()


def test_one_part_is_resolved_again_while_the_others_go_on(stage: Stage) -> None:
    request = Request(KEY, prefills=(0, 1))
    stage.stop(stage.current[1], FOREVER)
    room, receiver = stage.receive(request)
    stage.until_named(number=0) if receiver.poll is KVPoll.WaitingForInput else stage.steps(SECOND)
    stage.kill_prefill(stage.current[1])
    stage.restart(1, "a1")
    stage.send(request, 0)
    stage.send(request, 1)
    stage.until(lambda: receiver.poll is KVPoll.Success)
    assert room.resolved_again
    stage.until_over()


def test_an_engine_that_came_back_with_other_ranks_fails_the_room(stage: Stage) -> None:
    request = Request(KEY, prefills=(0, 1))
    stage.stop(stage.current[1], FOREVER)
    room, receiver = stage.receive(request)
    stage.steps(SECOND)
    stage.kill_prefill(stage.current[1])
    stage.until(lambda: room.resolved_again)
    stage.decode.unbound.clear()
    stage.decode.core.bind(room, [stage.current[0].target, stage.current[2].target][1:])
    stage.until(lambda: failed(receiver, "PEER_LOST"))
    stage.until_over()


def test_an_announced_room_knows_when_its_prefill_is_there(stage: Stage) -> None:
    stage.decode.free.clear()  # no pages yet
    _, receiver = stage.receive(REQUEST)
    stage.until(lambda: KEY in stage.prefill.core.rooms)
    assert stage.record().want is Want.ANNOUNCE and not receiver.prefill_ready
    sender = stage.send(REQUEST)
    stage.until(lambda: receiver.prefill_ready)
    stage.decode.free.extend(range(POOL_PAGES))
    stage.until(lambda: sender.poll is receiver.poll is KVPoll.Success)
    stage.until_over()


def test_prefill_hears_the_death_of_a_decode_that_announced_a_room(stage: Stage) -> None:
    stage.decode.free.clear()
    stage.receive(REQUEST)
    sender = stage.send(REQUEST)
    stage.until(lambda: stage.record().want is Want.ANNOUNCE)
    stage.kill_decode(stage.decode)
    assert stage.until(lambda: failed(sender, "PEER_LOST")) <= 2 * SECOND


def test_an_announced_room_that_decode_gives_up_ends_its_sender(stage: Stage) -> None:
    stage.decode.free.clear()
    stage.receive(REQUEST)
    sender = stage.send(REQUEST)
    stage.until(lambda: stage.record().want is Want.ANNOUNCE)
    stage.decode.abort(KEY)
    stage.until(lambda: failed(sender, "ROOM_CANCELLED"), SECOND)
    stage.decode.free.extend(range(POOL_PAGES))
    stage.until_over()


def test_an_abort_before_the_room_is_bound_is_told_to_prefill(stage: Stage) -> None:
    sender = stage.send(REQUEST)
    stage.decode.begin(REQUEST, late=True)
    stage.decode.abort(KEY)
    stage.until(lambda: failed(sender, "ROOM_CANCELLED"))
    assert sender.failure is not None and sender.failure.origin == str(stage.decode.ref)
    stage.until_over()


def test_the_pages_of_a_write_never_change(stage: Stage) -> None:
    room, receiver = stage.receive(REQUEST)
    stage.prefill.lazy = True
    sender = stage.send(REQUEST)
    stage.until_named()
    assert room.destination is not None
    entry = room.entry(part_of(room), stage.decode.core.now, TIMING)
    assert entry is not None
    other = Destination(room.destination.pages[::-1].copy())
    stage.prefill.core.on_frame(stage.link, stage.decode.ref, [replace(entry, destination=other)])
    assert failed(sender, "ROOM_CONFLICT")
    stage.until(lambda: failed(receiver, "ROOM_CONFLICT"))
    stage.until_over()


def test_another_asker_gets_a_conflict_and_disturbs_nobody(stage: Stage) -> None:
    _, first = stage.receive(REQUEST)
    stage.prefill.lazy = True
    sender = stage.send(REQUEST)
    stage.until_named()
    stage.decodes[1].begin(REQUEST)
    second = stage.decodes[1].receiving[KEY].handle
    stage.until(lambda: failed(second, "ROOM_CONFLICT"))
    stage.until(lambda: KEY not in stage.decodes[1].core.rooms and KEY not in stage.decodes[1].receiving)
    assert failed(stage.send(REQUEST), "ROOM_CONFLICT"), "a second sender of the key"
    stage.prefill.lazy = False
    stage.until(lambda: first.poll is sender.poll is KVPoll.Success)


def test_a_room_that_fails_without_a_sender_says_stopped_or_unknown_never_settled(stage: Stage) -> None:
    room, receiver = stage.receive(REQUEST)
    stage.send(REQUEST)
    plane = stage.freeze()
    plane.end_all(Outcome.FAILED_UNKNOWN)
    stage.cut(stage.decode, stage.prefill, TIMING.ended_record + 10 * SECOND)
    stage.until(lambda: KEY not in stage.prefill.core.rooms, FOREVER)  # the record expired, its write may still land
    stage.until(lambda: part_of(room).writes is Writes.UNKNOWN, FOREVER)
    assert not receiver.release_safe
    plane.destroy()
    stage.until(lambda: receiver.release_safe)
    stage.until_over()
