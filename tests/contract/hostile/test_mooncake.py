"""Mooncake: what its environment could take from our promises, and what it opens to everybody (sections 0 and 3)."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kvgrpc.cli.doctor import command as doctor
from kvgrpc.dataplane.mooncake.start import adopt_engine
from kvgrpc.errors import InvalidRequest
from tests.support.mooncake_engine import FakeEngine, clean, start

__all__ = ["clean"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MC_TCP_PROTO", "1"),
        ("MC_TCP_PROTO", "x"),
        ("MC_TCP_ENABLE_CONNECTION_POOL", "0"),
        ("MC_USE_TENT", "1"),
        ("MC_USE_TEV1", "1"),
        ("MC_SLICE_TIMEOUT", "3"),
        ("MC_TRANSFER_TIMEOUT", "600"),
        ("MC_TRANSFER_TIMEOUT", "5"),  # the progress of 10 s would not end first
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", "30"),
        ("MC_TCP_STATUS_TIMEOUT_SEC", "100"),
        ("MC_HANDSHAKE_CONNECT_TIMEOUT", "soon"),
        ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "1024"),
        ("MC_TCP_LANES_PER_PEER", "0"),
        ("MC_MIN_RPC_PORT", "-1"),
        ("MC_MIN_RPC_PORT", "17000"),
        ("MC_MAX_RPC_PORT", "70000"),
    ],
)
def test_a_variable_with_which_no_promise_would_hold_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    ways: tuple[Callable[[], object], ...] = (start, lambda: adopt_engine(FakeEngine(), "127.0.0.1"))
    for open_one in ways:
        with pytest.raises(InvalidRequest) as refused:
            open_one()
        assert (refused.value.metadata["field"], refused.value.metadata["value"]) == (name, value)
        assert refused.value.metadata["rule"]


def test_a_rank_says_in_one_line_what_it_listens_on_and_that_only_engines_may_reach_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        start()
    (line,) = [record.getMessage() for record in caplog.records if "every address" in record.getMessage()]
    assert "port 15001 (handshakes), data ports 15002" in line
    assert "reads and writes all registered memory" in line and "docs/security.md" in line


def test_doctor_warns_of_the_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_MIN_RPC_PORT", "15100")
    found = doctor.mooncake_ports()
    assert found.state == "note" and found.remark.startswith("15100 to 17000 listen on every address")
    assert "docs/security.md" in found.remark
