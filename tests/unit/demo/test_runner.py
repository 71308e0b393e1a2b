"""What the demo's own process says in the end."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvgrpc.demo import runner
from kvgrpc.demo.launch import DemoFailed
from kvgrpc.demo.view import JsonView


class Nothing:
    """Processes and steps of a demo that does nothing."""

    def __init__(self, *arguments: Any) -> None: ...

    def open(self, began: float) -> None: ...

    def run(self) -> None: ...


def test_a_process_that_ends_later_adds_no_second_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stay(processes: Any) -> None:
        raise DemoFailed("the decode process ended")

    monkeypatch.setattr(runner, "Processes", contextlib.nullcontext)
    monkeypatch.setattr(runner, "_Demo", Nothing)
    monkeypatch.setattr(runner, "_stay", stay)
    monkeypatch.setattr(JsonView, "servers", lambda view, result: None)
    assert runner.run(runner.DemoOptions("shm", as_json=True, keep_running=True)) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 and json.loads(out)
    assert "the decode process ended" in err


def test_a_demo_that_fails_says_how_long_it_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(demo: Any) -> None:
        raise DemoFailed("the decode process ended")

    monkeypatch.setattr(runner, "Processes", contextlib.nullcontext)
    monkeypatch.setattr(Nothing, "run", fail)
    monkeypatch.setattr(runner, "_Demo", Nothing)
    moments = iter((100.0, 107.5))
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    assert runner.run(runner.DemoOptions("shm", as_json=True)) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["reason"], told["seconds"]) == (False, "the decode process ended", 7.5)
