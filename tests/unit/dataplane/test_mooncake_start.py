"""Mooncake is started with the transport that was asked for, safe settings, and never in an unsafe version."""

from __future__ import annotations

import logging
import os
from importlib import metadata

import pytest

from kvgrpc.dataplane.mooncake.environment import DEFAULTS, for_a_process_of_ours
from kvgrpc.dataplane.mooncake.start import adopt_engine
from kvgrpc.errors import FeatureDisabled
from tests.support.mooncake_engine import FakeEngine, clean, ports, start

__all__ = ["clean"]


def engine_with(**attributes: object) -> type[FakeEngine]:
    return type("Engine", (FakeEngine,), attributes)


def test_without_adapters_tcp_is_forced_while_it_starts_and_only_then() -> None:
    started = start()
    assert (started.session, started.transport, started.data_ports) == ("127.0.0.1:15001", "tcp", frozenset({15002}))
    assert FakeEngine.made.arguments == ("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    assert FakeEngine.made.environment["MC_FORCE_TCP"] == "1"
    assert "MC_FORCE_TCP" not in os.environ


def test_defaults_are_there_before_it_starts_unless_the_user_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "3")
    start()
    expected = {**DEFAULTS, "MC_TCP_PROGRESS_TIMEOUT_SEC": "3"}
    assert expected.items() <= FakeEngine.made.environment.items()


def test_a_log_directory_is_removed_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MC_LOG_DIR", "/tmp")
    with caplog.at_level(logging.WARNING):
        start()
    assert "MC_LOG_DIR" not in FakeEngine.made.environment
    assert "MC_LOG_DIR was removed" in caplog.text


def test_what_is_as_it_must_be_anyway_may_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MC_TCP_PROTO": "2", "MC_USE_TENT": "0", "MC_TRANSFER_TIMEOUT": "20"}.items():
        monkeypatch.setenv(name, value)
    assert start().transport == "tcp"


def test_processes_of_ours_leave_out_what_they_cannot_stand() -> None:
    given = {"MC_TCP_PROTO": "1", "MC_LOG_DIR": "/tmp", "MC_LOG_LEVEL": "INFO", "PATH": "/bin"}
    assert for_a_process_of_ours(given, {"MC_LOG_LEVEL": "ERROR", "MC_X": "1"}) == {
        "MC_LOG_LEVEL": "INFO",
        "MC_X": "1",
        "PATH": "/bin",
    }


def test_adapters_are_used_where_there_are_some() -> None:
    rdma = engine_with(topology='{"cpu:0": [["mlx5_1"], ["mlx5_0"]], "cuda:0": [[], ["mlx5_0"]]}', opens=frozenset())
    started = start(rdma)
    assert (started.transport, started.data_ports) == ("rdma", frozenset())
    assert FakeEngine.made.environment["MC_FORCE_HCA"] == "1"
    start(rdma, device="mlx5_1")
    assert FakeEngine.made.arguments[3] == "mlx5_1"
    with pytest.raises(ValueError, match="no adapter mlx5_7 here, only: mlx5_0, mlx5_1"):
        start(rdma, device="mlx5_7")


@pytest.mark.parametrize("by_environment", [False, True])
def test_tcp_can_be_asked_for_where_there_are_adapters(monkeypatch: pytest.MonkeyPatch, by_environment: bool) -> None:
    if by_environment:
        monkeypatch.setenv("MC_FORCE_TCP", "1")
    started = start(engine_with(topology='{"cpu:0": [["mlx5_1"], []]}'), device="" if by_environment else "tcp")
    assert started.transport == "tcp"
    assert os.environ.get("MC_FORCE_TCP") == ("1" if by_environment else None)


@pytest.mark.parametrize("topology", ["nonsense", "[]", "", '{"cpu:0": 5}'])
def test_a_topology_that_is_not_understood_means_tcp(topology: str) -> None:
    assert start(engine_with(topology=topology)).transport == "tcp"


def test_an_engine_that_runs_something_else_is_refused() -> None:
    with pytest.raises(FeatureDisabled, match="no TCP data port"):
        start(engine_with(opens=frozenset({15001})))
    with pytest.raises(FeatureDisabled, match="initialize returned -1"):
        start(engine_with(code=-1))


@pytest.mark.parametrize("version", ["0.3.11.post1", "0.3.7", "0.2", "0.3.11rc1"])
def test_versions_that_check_no_addresses_are_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: version)
    with pytest.raises(FeatureDisabled, match=r"0\.3\.12 is needed"):
        start()
    with pytest.raises(FeatureDisabled):
        adopt_engine(FakeEngine(), "127.0.0.1")


def test_an_unpackaged_build_is_judged_by_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(package: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", unknown)
    start()
    with pytest.raises(FeatureDisabled, match="too old"):
        start(engine_with(register_memory=lambda self: 0))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "host:8998", "a b", "-x", "http://x"])
def test_hosts_that_no_peer_can_reach_are_refused(host: str) -> None:
    with pytest.raises(ValueError, match="host"):
        start(host=host)


def test_ipv6_is_written_in_brackets_and_switched_on() -> None:
    assert start(host="::1").session == "[::1]:15001"
    assert FakeEngine.made.environment["MC_USE_IPV6"] == "1"


def test_a_foreign_engine_is_taken_as_it_is() -> None:
    ports.update({15001, 15002})
    assert adopt_engine(FakeEngine(), "127.0.0.1").data_ports == {15002, 15999}, "too many are safe, too few are not"
    with pytest.raises(ValueError, match="not a mooncake"):
        adopt_engine(object(), "127.0.0.1")
