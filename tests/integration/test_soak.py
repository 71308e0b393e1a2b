"""Short soaks: every room ends with a reason, every Success has its bytes, and nothing is left."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgrpc.dataplane.base import Outcome
from tests.soak import rank, router
from tests.soak.floods import FloodPlan, FloodSoak
from tests.soak.node import Engine, Node
from tests.soak.orders import NO_REASON, ROOM_SECONDS, Ended, Fault, OpenRank, content
from tests.soak.pulls import PullPlan, PullSoak
from tests.soak.router import Router
from tests.soak.verdict import KILLED, LATE_FROM_ROOMS, Plan, Result, Room
from tests.support.faults.dataplane import Submission
from tests.support.hostile.floods import FLOODS

NEEDS_MOONCAKE = pytest.mark.skipif(not find_spec("mooncake"), reason="install kvgrpc[mooncake-cpu] for it")


def soak(plan: Plan, logs: Path) -> Result:
    return Router(plan, logs, lambda result, open_rooms: None).run()


@pytest.mark.timeout(290)
@pytest.mark.parametrize(
    "data_plane", [pytest.param("shm", marks=pytest.mark.slow), pytest.param("mooncake", marks=NEEDS_MOONCAKE)]
)
def test_36_hand_offs_at_once_with_failing_writes_all_end_and_leave_nothing(data_plane: str, tmp_path: Path) -> None:
    """The shape of SGLang's own manual liveness test: all end within 120 s, idle within 30 s after, and nobody dies."""
    plan = Plan(rooms=36, seconds=0.1, in_flight=36, kill_every=1e9, unknown_share=0.0, data_plane=data_plane)
    result = soak(plan, tmp_path)
    assert result.problems == []
    assert result.kills.total() + result.stops.total() == 0
    assert (result.rooms, sum(result.reasons.values())) == (36, 36)
    assert result.successes >= 15
    assert result.seconds < 150


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_ranks_killed_every_second_cost_only_their_own_rooms(tmp_path: Path) -> None:
    result = soak(Plan(rooms=600, seconds=20, kill_every=1.0), tmp_path)
    assert result.problems == []
    # A rank that a busy machine is slow to start puts off the next one.
    assert result.kills.total() + result.stops.total() >= 3
    assert result.successes >= 300


@pytest.mark.timeout(290)
@pytest.mark.parametrize("data_plane", ["shm", pytest.param("mooncake", marks=[NEEDS_MOONCAKE, pytest.mark.slow])])
def test_pulls_among_engines_that_are_killed_and_stopped_bring_right_bytes(data_plane: str, tmp_path: Path) -> None:
    result = PullSoak(PullPlan(12.0, data_plane), tmp_path).run()
    assert result.problems == [], (tmp_path / f"pulls-{data_plane}.log").read_text()[-4000:]
    assert result.faults.total() >= 2


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_beside_each_flood_rooms_bring_right_bytes_and_none_is_lost() -> None:
    result = FloodSoak(FloodPlan(15.0)).run()
    assert result.problems == []
    assert set(result.rooms) == {flood.__name__ for flood in FLOODS} and 0 not in result.rooms.values()


def never_opens(pipe: Connection, *others: object) -> None:
    """Instead of a rank or a registry: a process that says nothing."""
    with suppress(EOFError):
        pipe.recv()


@pytest.mark.slow
@pytest.mark.timeout(290)
@pytest.mark.parametrize(
    ("assumed", "problem"), [(False, "not all ranks opened"), (True, "no room could be given out")]
)
def test_a_soak_whose_ranks_do_not_open_says_so_and_ends(
    assumed: bool, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``assumed``: they were open, and are so no more when the rooms are to be given out."""
    for serve in ("serve_rank", "serve_registry"):
        monkeypatch.setattr(rank, serve, never_opens)
    for name in ("OPEN_SECONDS", "STUCK_SECONDS", "OVERDUE_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(router, name, 0.2)
    if assumed:
        monkeypatch.setattr(Router, "_all_open", lambda self: True)
    result = soak(Plan(rooms=5, seconds=0.1, kill_every=1e9, unknown_share=0.0), tmp_path)
    assert result.rooms == 0
    assert result.problems[0].startswith(problem)
    assert bool(result.seconds) is assumed


def test_a_write_of_a_cursed_page_fails_wherever_its_bytes_were_gathered() -> None:
    """A slot of another size and order than the pool's: pages of one head, in between a cursed one."""
    cursed = Fault(Outcome.FAILED_UNKNOWN, 1)
    held = content(7, [1], [3, cursed.page, 900]), content(7, [1], [5])
    source = np.array([each.ctypes.data for each in held], np.uint64)
    nbytes = np.array([each.nbytes for each in held], np.uint64)
    write = Submission(None, source, source, nbytes)
    assert rank.pages_read(write).tolist() == [3, 5, 900, cursed.page]
    sound = Submission(None, source[1:], source[1:], nbytes[1:])
    for tp, fails in ((0, False), (1, True)):
        curse = rank.Curse(OpenRank("P", "PREFILL", tp, 2, "", 7, "mooncake"))
        found = curse(0, write)
        assert (found is not None and found.late) is fails
        assert curse(1, sound) is None


@pytest.mark.parametrize("happened", [{}, {"cancelled": True}, {"disturbed": True}], ids=["nothing", "cancel", "kill"])
@pytest.mark.parametrize("reason", ["INTERNAL", "INVALID_REQUEST", NO_REASON])
def test_no_cancel_and_no_kill_excuses_a_reason_that_it_cannot_bring(happened: dict[str, bool], reason: str) -> None:
    room = room_of("", "", **happened)
    assert room.wrong() == []
    room.ended["D.0"] = Ended(1, reason, 0.1)
    assert room.wrong() == [f"room 1 of P and D: {reason} at D.0"]


def test_each_reason_needs_what_brings_it() -> None:
    write = Fault(Outcome.REJECTED, 0)
    assert room_of("ROOM_CANCELLED", "ROOM_CANCELLED", cancelled=True).wrong() == []
    assert len(room_of("ROOM_CANCELLED", "ROOM_CANCELLED", disturbed=True).wrong()) == 2
    assert room_of(KILLED, "PEER_LOST", disturbed=True).wrong() == []
    assert len(room_of("", "PEER_LOST", cancelled=True).wrong()) == 1
    assert room_of("ROOM_DEADLINE", "ROOM_DEADLINE", unanswered=True).wrong() == []
    assert room_of("ROOM_DEADLINE", "ROOM_DEADLINE", disturbed=True).wrong() == []
    assert len(room_of("PEER_LOST", "PEER_LOST", unanswered=True).wrong()) == 2
    assert room_of("TRANSFER_FAILED", "TRANSFER_FAILED", fault=write).wrong() == []
    assert "Success at D.0" in room_of("TRANSFER_FAILED", "", fault=write, cancelled=True).wrong()[0]


def test_a_decode_that_goes_on_may_send_a_room_to_a_prefill_that_died_meanwhile() -> None:
    """Within a second, and to nobody else: it reads from its connections then who is gone."""
    prefill, decode, other = (engine_of(name) for name in ("P", "D", "O"))
    unaware = router.Unaware(decode.nodes[0], frozenset(prefill.nodes), until=8.0)
    assert unaware.may_send_to_the_dead(prefill, decode, 7.9)
    assert not unaware.may_send_to_the_dead(prefill, decode, 8.0)
    assert not unaware.may_send_to_the_dead(other, decode, 7.9)
    assert not unaware.may_send_to_the_dead(prefill, other, 7.9)


def test_an_end_past_the_deadline_is_wrong() -> None:
    room = room_of("", "", seconds=ROOM_SECONDS + 3.0)
    assert [text.split(": ")[1] for text in room.wrong()] == [
        f"Success at {name} after 23.0 s, its deadline is 20 s" for name in ("P.0", "D.0")
    ]


@pytest.mark.parametrize("happened", ["disturbed", "unanswered"])
def test_ranks_that_have_met_do_not_wait_for_the_deadline(happened: str) -> None:
    room = room_of("ROOM_DEADLINE", "ROOM_DEADLINE", **{happened: True})
    assert room.wrong() == []
    room.ended["D.0"] = Ended(1, "ROOM_DEADLINE", 20.0, since=19.0)
    assert room.wrong() == ["room 1 of P and D: ROOM_DEADLINE at D.0"]


def test_ranks_that_never_met_wait_for_the_deadline_and_not_longer() -> None:
    room = room_of("ROOM_DEADLINE", "ROOM_DEADLINE", seconds=ROOM_SECONDS + 3.0, disturbed=True)
    assert len(room.wrong()) == 2


@pytest.mark.parametrize(("longest", "late"), [(0.5, 7.5), (4.0, 7.5), (4.0, 8.5)])
def test_a_room_that_ends_too_long_after_a_kill_is_wrong_unless_all_rooms_are_slow(longest: float, late: float) -> None:
    result = Result(Plan(rooms=1000, seconds=30))
    result.settle(room_of("", "", seconds=longest))
    for seconds in (late, 6.0):
        room = room_of(KILLED, "PEER_LOST", disturbed=True)
        room.ended["D.0"] = Ended(1, "PEER_LOST", seconds + 1.0, since=seconds)
        result.settle(room)
    result.check_outcomes()
    allowed = 4.0 + max(3.0, longest)
    text = f"room 1 of P and D: PEER_LOST {late} s after a process of it was killed or stopped, {allowed} s are allowed"
    assert result.problems == ([text] if late > allowed else [])


def test_a_soak_in_which_too_many_are_refused_or_too_few_succeed_is_not_ok() -> None:
    def soaked(good: int, refused: int, cut_off: int) -> list[str]:
        result = Result(Plan(rooms=1000, seconds=30), rooms=good + refused + cut_off)
        for _ in range(good):
            result.settle(room_of("", ""))
        for _ in range(refused):
            result.settle(room_of("TOO_MANY_REQUESTS", "TOO_MANY_REQUESTS"))
        for _ in range(cut_off):
            result.settle(room_of(KILLED, "PEER_LOST", disturbed=True))
        result.check_outcomes()
        return result.problems

    assert soaked(360, 40, 320) == []
    assert soaked(359, 41, 0) == ["41 of 400 rooms to which nothing was done were refused"]
    assert soaked(399, 0, 401) == ["399 of 800 rooms succeeded"]
    assert len(soaked(0, 1000, 0)) == 2


def test_a_soak_in_which_nobody_is_killed_is_not_ok() -> None:
    result = Result(Plan(rooms=1000, seconds=30))
    result.check_disturbances(39.0)
    assert result.problems == ["0 kills and stops in 39 s, one every 3 s was to be"]
    result.problems.clear()
    result.kills["P.0"] += 1
    result.check_disturbances(39.0)
    assert result.problems == []


def test_a_soak_in_which_no_write_lands_late_is_not_ok() -> None:
    result = Result(Plan(rooms=1000, seconds=30))
    for _ in range(LATE_FROM_ROOMS):
        result.settle(room_of("TRANSFER_FAILED", "TRANSFER_FAILED", fault=Fault(Outcome.FAILED_UNKNOWN, 0)))
    result.late_writes["REJECTED"] += 1
    result.check_late_writes()
    assert result.problems == ["of 6 rooms with an unknown write none landed late: {'REJECTED': 1}"]
    result.problems.clear()
    result.late_writes["DONE"] += 1
    result.check_late_writes()
    assert result.problems == []


def room_of(at_prefill: str, at_decode: str, seconds: float = 0.1, **happened: Any) -> Room:
    """A room of one rank each that ended so."""
    prefill, decode = engine_of("P"), engine_of("D")
    ended = {"P.0": Ended(1, at_prefill, seconds), "D.0": Ended(1, at_decode, seconds)}
    return Room(1, prefill, decode, 0.0, 4, **{"cancelled": False, "fault": None, **happened}, ended=ended)


def engine_of(name: str) -> Engine:
    node = object.__new__(Node)  # no process
    node.name = f"{name}.0"
    return Engine(name, "", [node])
