"""Rooms whose pools have pages of their own: whole in every topology, or failed on both sides where these differ."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from kvgrpc.transfer.protocol.types import Align
from tests.simulation.fleet import FLEETS, SINGLES, Fleet
from tests.simulation.requests import Request
from tests.simulation.stage import KEY, SECOND, Stage

UNEQUAL = FLEETS[1]


def hand_off(fleet: Fleet, request: Request) -> Counter[str]:
    """How the handles of all its ranks ended; what simulation checks of pages and bytes held."""
    stage = Stage(fleet=fleet)
    for number in request.decodes:
        stage.begin_decode(number, request)
    for number in request.prefills:
        stage.begin_prefill(number, request)
    handles = len(request.decodes) + len(request.prefills)
    stage.until(lambda: stage.outcomes.total() == handles, 60 * SECOND)
    stage.until(lambda: not any(decode.receiving for decode in stage.decodes), 60 * SECOND)
    assert stage.violations == []
    return stage.outcomes


def request_of(
    fleet: Fleet, states: tuple[int | None, int | None], extra: int = 0, align: Align = Align.HEAD
) -> Request:
    prefills, decodes = fleet.replica(fleet.prefills, 0), fleet.replica(fleet.decodes, 0)
    decodes = decodes[:1] if fleet is SINGLES else decodes
    return Request(KEY, prefills, 2, extra, align, bool(extra), decodes=decodes, states=states)


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("fleet", [*sorted({*FLEETS} - {SINGLES}, key=str), SINGLES], ids=str)
def test_pages_of_two_pools_arrive_in_every_topology(fleet: Fleet, extra: int) -> None:
    request = request_of(fleet, (3, 3), extra)
    assert hand_off(fleet, request) == {"D ok": len(request.decodes), "P ok": len(request.prefills)}


@pytest.mark.parametrize("states", [(2, 5), (0, 2)])
@pytest.mark.parametrize("fleet", [*sorted({*FLEETS} - {SINGLES}, key=str), SINGLES], ids=str)
def test_with_the_tail_aligned_decode_gets_the_last_pages_of_each_pool(fleet: Fleet, states: tuple[int, int]) -> None:
    request = request_of(fleet, states, 1, Align.TAIL)
    assert hand_off(fleet, request) == {"D ok": len(request.decodes), "P ok": len(request.prefills)}


@pytest.mark.parametrize(
    ("states", "align"),
    [((1, 2), Align.HEAD), *itertools.product([(2, 1), (2, 0), (1, None), (None, 1)], Align)],
)
@pytest.mark.parametrize("fleet", [SINGLES, UNEQUAL])
def test_sides_that_say_other_pages_of_a_pool_fail(
    fleet: Fleet, states: tuple[int | None, int | None], align: Align
) -> None:
    request = request_of(fleet, states, align=align)
    outcomes = hand_off(fleet, request)
    assert outcomes["D INVALID_REQUEST"] == len(request.decodes)
    assert not outcomes["P ok"] and not outcomes["D ok"], outcomes
