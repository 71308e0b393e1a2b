"""A data plane that somebody else wrote, and wrote badly: what it raises or answers wrongly is an outcome."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvgrpc.dataplane.base import DataPlane, EndedTransfer, Outcome, Result, Transfer
from kvgrpc.transfer.layout.plan import Plan
from kvgrpc.transfer.runtime.guarded import GuardedPlane, attempt

ONE = np.ones(1, np.uint64)
PLAN = Plan(ONE, ONE, ONE)
DONE = Result(Outcome.DONE, "", 1)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("nor this")


def raises(*_: object, **__: object) -> Any:
    raise RuntimeError("a bug")


def guard(**parts: Any) -> GuardedPlane:
    return GuardedPlane(cast(DataPlane, SimpleNamespace(name="foreign", **parts)))


def transfer(poll: Callable[[], object]) -> Transfer:
    return cast(Transfer, SimpleNamespace(poll=poll, stop=raises))


def test_what_is_right_goes_through() -> None:
    plane = guard(submit=lambda *_: EndedTransfer(DONE), attach=lambda address: address)
    assert plane.attach(b"there") == b"there"
    assert plane.poll(plane.submit(object(), PLAN)) is DONE and plane.submitted == 1
    assert plane.poll(transfer(lambda: None)) is None


def test_a_submission_that_raises_has_an_unknown_end() -> None:
    plane = guard(submit=raises)
    result = plane.poll(plane.submit(object(), PLAN))
    assert result is not None and result.outcome is Outcome.FAILED_UNKNOWN and "a bug" in result.detail


@pytest.mark.parametrize(
    "poll",
    [
        raises,
        lambda: 3,
        lambda: Outcome.DONE,
        Unprintable,
        lambda: Result(cast(Outcome, 3), "", 1),
        lambda: Result(cast(Outcome, None)),
        lambda: Result(Outcome.DONE, "", -1),
        lambda: Result(Outcome.DONE, "", cast(int, "all")),
        lambda: Result(Outcome.DONE, "", cast(int, math.nan)),
        lambda: Result(Outcome.DONE, cast(str, None), 1),
    ],
)
def test_an_answer_that_is_none_leaves_unknown(poll: Callable[[], object]) -> None:
    result = guard().poll(transfer(poll))
    assert result is not None and result.outcome is Outcome.FAILED_UNKNOWN and result.nbytes == 0
    assert isinstance(result.detail, str)


def test_no_transfer_at_all_leaves_unknown() -> None:
    plane = guard(submit=lambda *_: None)
    result = plane.poll(plane.submit(object(), PLAN))
    assert result is not None and result.outcome is Outcome.FAILED_UNKNOWN


@pytest.mark.parametrize("attach", [raises, lambda address: None])
def test_a_peer_that_cannot_be_attached_refuses_the_write(attach: Callable[[bytes], object]) -> None:
    refusal = guard(attach=attach).attach(b"there")
    assert isinstance(refusal, Result) and refusal.outcome is Outcome.REJECTED and refusal.detail


def test_nobody_hears_of_a_detach_or_a_stop_that_raises() -> None:
    plane = guard(detach=raises)
    plane.detach(object())
    plane.stop(transfer(raises))


@pytest.mark.parametrize("close", [raises, lambda deadline: None, lambda deadline: "closed", lambda deadline: False])
def test_only_true_says_that_no_write_is_left(close: Callable[[float], object]) -> None:
    assert guard(close=close).close(1.0) is False
    assert guard(close=lambda deadline: True).close(1.0) is True


@pytest.mark.parametrize("interval", ["soon", None, -1.0, math.nan, math.inf, 60.0])
def test_a_sleep_is_short_whatever_the_plane_says(interval: object) -> None:
    assert guard(poll_interval=interval).poll_interval == 0.1
    assert guard().poll_interval == 0.1
    assert guard(poll_interval=0.0).poll_interval == 0.0


def test_what_an_older_plane_does_not_say_is_no() -> None:
    plane = guard(quick_bytes="many", gathers_slices="yes")
    assert (plane.quick_bytes, plane.gathers_slices) == (0, False)
    assert (guard().quick_bytes, guard().gathers_slices) == (0, False)
    assert guard().in_flight() == (0, 0)


def test_memory_that_is_refused_is_none() -> None:
    assert guard(allocate=raises, register=raises).buffer(8) is None
    assert guard(allocate=lambda nbytes: 4096, register=raises).buffer(8) is None
    assert guard(allocate=lambda nbytes: 4096, register=lambda ranges: None).buffer(8) == 4096


def test_memory_that_was_not_registered_is_not_allocated_again() -> None:
    allocated, refuses = iter((4096, 8192)), iter((True, True, False, False))

    def register(ranges: object) -> None:
        if next(refuses):
            raise OSError("not now")

    plane = guard(allocate=lambda nbytes: next(allocated), register=register)
    assert [plane.buffer(8) for _ in range(4)] == [None, None, 4096, 8192]


def test_counts_that_raise_are_none() -> None:
    assert guard(in_flight=raises, limits_of_a_peer=(1, 1)).in_flight() == (0, 0)
    assert guard(in_flight=lambda: (2, 3), limits_of_a_peer=(1, 1)).in_flight() == (2, 3)


def test_a_plane_that_raises_about_connections_says_nothing_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers: dict[bytes, Callable[[], object]] = {b"a": raises, b"b": lambda: {"port 1"}, b"c": lambda: 3}
    plane = guard(connections_from=lambda address: answers[address]())
    assert plane.connections_from_each([b"a"]) == plane.connections_from_each([b"c"]) == [None]
    assert len(caplog.records) == 1
    assert plane.connections_from_each([b"b", b"b"]) == [{"port 1"}, {"port 1"}]
    assert plane.connections_from_each([b"a"]) == [None]
    assert len(caplog.records) == 2, "it had answered since"


def test_what_comes_before_a_write_is_rejected_where_it_raises() -> None:
    assert attempt(lambda: 3) == 3
    refusal = attempt(raises)
    assert isinstance(refusal, Result) and refusal.outcome is Outcome.REJECTED and "a bug" in refusal.detail
