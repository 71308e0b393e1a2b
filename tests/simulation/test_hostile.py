"""Peers that keep no rule (15, hostile frames), directed; the random schedules hold them too."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from kvgrpc.errors import Failure, Reason, RoomCancelled
from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.prefill.core import PrefillCore
from kvgrpc.transfer.protocol.prefill.records import Ownership
from kvgrpc.transfer.protocol.types import (
    Bounds,
    DecodeEntry,
    Destination,
    Handle,
    KVPoll,
    PrefillEntry,
    RoomKey,
    RoomState,
    Want,
    Writes,
)
from tests.simulation.checks import check_end
from tests.simulation.requests import Request
from tests.simulation.schedules import AMONG_ENEMIES, Schedule
from tests.simulation.stage import KEY, SECOND, Stage
from tests.simulation.world import World

NO_PAGES = Destination(np.empty(0, np.uint32))
STOPPED = Failure.of(RoomCancelled("enough", metadata={"room": 1, "attempt": 0, "by": "X"}), "X")


@pytest.mark.parametrize("seed", range(4))
def test_every_room_of_others_succeeds_beside_hostile_peers(seed: int) -> None:
    world = World(seed, bounds=AMONG_ENEMIES, rogues=3, liars=[2])
    world.calm = True
    among_enemies = [Request(RoomKey(room), (0, 2), 1) for room in range(50, 53)]
    honest = [Request(RoomKey(room), (0, 1) if room % 3 else (room % 2,), room % 4) for room in range(1, 40)]
    for start, request in enumerate([*among_enemies, *honest]):
        for number in request.prefills:
            world.at(start * 4, partial(world.begin_prefill, number, request))
        world.at(start * 4 + 2, partial(world.begin_decode, request.decodes[0], request))
    for _ in range(4 * 60):
        world.step()
    ended = [what for _, *what in world.log if what[1] == "ended"]
    for request in honest:
        ends = [end[3] for end in ended if end[2] == request.key]
        assert ends == ["ok"] * (len(request.prefills) + 1), (request, ends)
    world.end_hostilities()
    for _ in range(400):
        world.step()
    check_end(world)
    assert world.violations == []


def test_rogues_would_take_rooms_if_it_did_not_count_which_engine_a_sender_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the test above would show nothing of it (10, ownership)."""
    monkeypatch.setattr(Ownership, "may_name", lambda self, engine, key: True)
    world = World(1, bounds=AMONG_ENEMIES, rogues=3)
    world.calm = True
    for room in range(1, 20, 2):
        request = Request(RoomKey(room))
        world.at(room, partial(world.begin_prefill, 0, request))
        world.at(room + 40, partial(world.begin_decode, 0, request))
    for _ in range(100):
        world.step()
    assert any("a rogue decode changed a room of others" in str(each) for each in world.violations)


def test_a_decode_that_stops_rooms_and_forgets_none_is_refused_alone() -> None:
    core = PrefillCore(RankRef(RankId("P"), 1), bounds=Bounds(rooms=1000, unclaimed_per_session=100))
    rogue = RankRef(RankId("X"), 1)
    assert core.on_hello("stream", rogue, core.me, 1) is None
    for room in range(1, 5000):
        core.on_frame("stream", rogue, [DecodeEntry(RoomKey(room), Want.WRITE, NO_PAGES, 5000)])
        core.on_frame("stream", rogue, [DecodeEntry(RoomKey(room), Want.STOP, failure=STOPPED)])
    assert len(core.rooms) == 100
    assert {failure.reason for failure, _ in core.pairs[rogue].answers.values()} == {Reason.TOO_MANY_REQUESTS}
    handle = Handle()
    assert core.claim(RoomKey(9_999), handle) is not None and handle.failure is None


def test_what_such_a_decode_forgets_makes_room_for_its_next() -> None:
    core = PrefillCore(RankRef(RankId("P"), 1), bounds=Bounds(unclaimed_per_session=1))
    decode = RankRef(RankId("D"), 1)
    core.on_hello("stream", decode, core.me, 1)
    for room in range(1, 50):
        core.on_frame("stream", decode, [DecodeEntry(RoomKey(room), Want.ANNOUNCE, None, 5000)])
        core.on_frame("stream", decode, [DecodeEntry(RoomKey(room), Want.STOP, failure=STOPPED)])
        core.on_frame("stream", decode, [DecodeEntry(RoomKey(room), Want.FORGET)])
    assert not core.pairs[decode].answers and core.pairs[decode].unclaimed == 0


def test_a_late_sender_of_a_stopped_room_makes_room_for_another() -> None:
    core = PrefillCore(RankRef(RankId("P"), 1), bounds=Bounds(unclaimed_per_session=1))
    decode = RankRef(RankId("D"), 1)
    core.on_hello("stream", decode, core.me, 1)
    core.on_frame("stream", decode, [DecodeEntry(RoomKey(1), Want.ANNOUNCE, None, 5000)])
    core.on_frame("stream", decode, [DecodeEntry(RoomKey(1), Want.STOP, failure=STOPPED)])
    handle = Handle()
    core.claim(RoomKey(1), handle)
    assert handle.failure is not None and handle.failure.reason is Reason.ROOM_CANCELLED
    core.on_frame("stream", decode, [DecodeEntry(RoomKey(2), Want.ANNOUNCE, None, 5000)])
    assert RoomKey(2) in core.rooms


def test_more_pages_than_the_room_has_are_never_done(stage: Stage) -> None:
    request = Request(KEY, pages=2)
    _, handle = stage.receive(request)
    stage.until_named()
    stage.suspects = frozenset([0])
    lie = PrefillEntry(KEY, RoomState.TRANSFERRING, Writes.OPEN, 2**32 - 1)
    stage.decode.core.on_frame(stage.link.stream, [lie])
    assert (handle.poll, handle.pages_done) == (KVPoll.Transferring, 2)
    stage.send(request)
    stage.until(lambda: handle.poll is KVPoll.Success, 30 * SECOND)


def test_hostile_schedules_are_among_the_random_ones() -> None:
    schedule = Schedule(4)
    assert len(schedule.rogues) == 2
    assert any(Schedule(seed).liars for seed in range(4, 60, 5))
