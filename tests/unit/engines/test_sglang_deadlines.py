"""SGLang's own time-outs as the deadlines of a rank; without SGLang."""

from __future__ import annotations

import logging

import pytest

from kvgrpc.engines.sglang.deadlines import BOOTSTRAP_TIMEOUT, WAITING_TIMEOUT, timing_of
from kvgrpc.engines.sglang.rank import rank_config
from kvgrpc.errors import InvalidRequest
from kvgrpc.model import Role
from kvgrpc.transfer.protocol.types import Timing
from tests.support.sglang_process import kv_args, place

BOTH = {BOOTSTRAP_TIMEOUT: "900", WAITING_TIMEOUT: "600"}


def test_decode_waits_for_a_hand_off_as_long_as_sglang_says() -> None:
    assert timing_of(Role.DECODE, BOTH).room_deadline == 6000


def test_prefill_waits_for_decode_as_long_as_sglang_says_and_for_its_own_half_as_long_as_decode_waits() -> None:
    """Else a decode that was told to wait for longer would hear ROOM_NOT_FOUND after prefill's 300 s."""
    timing = timing_of(Role.PREFILL, BOTH)
    assert (timing.room_deadline, timing.unclaimed) == (9000, 6000)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_without_them_the_deadlines_are_ours(role: Role) -> None:
    unnamed = {"unnamed_after_loss": 100} if role is Role.PREFILL else {}
    assert timing_of(role, {}) == Timing(**unnamed)


def test_what_a_dead_decode_may_have_named_waits_no_longer_than_any_other_room() -> None:
    assert timing_of(Role.PREFILL, {BOOTSTRAP_TIMEOUT: "5"}).unnamed_after_loss == 50


@pytest.mark.parametrize("value", ["-1", "0", "1", "86401", "nan", "inf", "2.5", "soon", "", "9" * 5000])
@pytest.mark.parametrize(("role", "name"), [(Role.PREFILL, BOOTSTRAP_TIMEOUT), (Role.DECODE, WAITING_TIMEOUT)])
def test_a_time_that_cannot_be_is_refused_by_its_name(role: Role, name: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"{name}.*whole number of seconds, 2 to 86400"):
        timing_of(role, {name: value})


@pytest.mark.parametrize(("role", "ticks"), [(Role.PREFILL, 9000), (Role.DECODE, 6000)])
def test_a_rank_has_them_and_says_which(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, role: Role, ticks: int
) -> None:
    for name, value in BOTH.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO):
        assert rank_config(kv_args(), place(role)).timing.room_deadline == ticks
    name = BOOTSTRAP_TIMEOUT if role is Role.PREFILL else WAITING_TIMEOUT
    assert f"rooms fail after {ticks // 10} s ({name})" in caplog.text


def test_our_own_timing_is_stronger(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(WAITING_TIMEOUT, "600")
    monkeypatch.setenv("KVGRPC_TIMING", '{"room_deadline": 50}')
    with caplog.at_level(logging.INFO):
        assert rank_config(kv_args(), place(Role.DECODE)).timing.room_deadline == 50
    assert f"rooms fail after 5 s (timing of kvgrpc's settings, {WAITING_TIMEOUT} does not count)" in caplog.text
