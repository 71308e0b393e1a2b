"""The gRPC library runs without its event engine where that was measured, and never against the process's own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from kvgrpc import grpc_experiments
from kvgrpc.grpc_experiments import VARIABLE, WITHOUT_EVENT_ENGINE

MEASURED = tuple(map(int, version("grpcio").split(".")[:2])) in grpc_experiments.MEASURED


def said(code: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != VARIABLE}
    asked = [sys.executable, "-c", f"import os; {code}; print(os.environ.get({VARIABLE!r}))"]
    return subprocess.run(
        asked, env=clean | environment, check=True, capture_output=True, text=True, timeout=60
    ).stdout.strip()


@pytest.mark.skipif(not MEASURED, reason="not measured with this version of grpcio")
def test_a_measured_version_runs_without_the_event_engine() -> None:
    assert said("import kvgrpc") == WITHOUT_EVENT_ENGINE


def test_what_the_process_chose_itself_stays() -> None:
    assert said("import kvgrpc", **{VARIABLE: ""}) == ""
    assert said("import kvgrpc", **{VARIABLE: "event_engine_fork"}) == "event_engine_fork"


def test_a_library_that_is_loaded_already_is_left_alone() -> None:
    assert said("import grpc, kvgrpc") == "None"


@pytest.mark.parametrize("known", [None, (1, 75), (1, 999)])
def test_other_versions_keep_their_own_choice(known: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, "grpc", raising=False)
    monkeypatch.setattr(grpc_experiments, "_version", lambda: known)
    assert not grpc_experiments.leave_out_event_engine()
    assert VARIABLE not in os.environ


def test_the_version_is_that_of_the_library() -> None:
    assert grpc_experiments._version() == tuple(map(int, version("grpcio").split(".")[:2]))
