"""The simulation of a fleet (benchmarks/fleet.py) says what it shall: pulls spare computing where placing does not."""

from __future__ import annotations

from benchmarks.fleet import Result, Setup, simulate

SETUP = Setup(host_blocks=4_000, speed=2_000.0)


def share(result: Result) -> float:
    return result.computed / result.tokens


def test_pulls_spare_computing_and_time() -> None:
    alone, pulled = simulate("turn", SETUP, 400), simulate("turn, pull", SETUP, 400)
    assert pulled.pulls and pulled.moved and not alone.pulls
    assert share(pulled) < share(alone)
    assert sum(pulled.first_token) < sum(alone.first_token)


def test_nothing_is_pulled_between_engines_that_are_far_from_each_other() -> None:
    far = Setup(host_blocks=4_000, speed=2_000.0, rate=1e3)
    assert not simulate("plan, pull", far, 200).pulls
