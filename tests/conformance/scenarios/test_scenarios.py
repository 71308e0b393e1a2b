"""One file of scenarios against real servers, the same lines in every language; README.md says what a driver is."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.scenarios.languages import DIRECT, LANGUAGES, ROOT, Missing
from tests.conformance.scenarios.stage import SCENARIOS, Stage

# Longer than a driver waits for anything.
ANSWER_SECONDS = 40.0
# The time is that of a build of Go or Rust from nothing.
pytestmark = pytest.mark.timeout(900)
# Those of Python run with the quick tests, the others behind the builds of their languages (.ci/clients).
BY_LANGUAGE = [pytest.param(name, marks=[pytest.mark.slow] if name != "python" else []) for name in LANGUAGES]


class Driver:
    """The process of one language: a command in, a line out."""

    def __init__(self, command: list[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=DIRECT)
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, command: dict[str, Any], seconds: float) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return f"(nothing within {seconds:g} s)"

    def end(self) -> int:
        """Its exit status, once its input has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(20)
        finally:
            self._process.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put("(it ended)")


@pytest.fixture(scope="module")
def commands() -> dict[str, list[str]]:
    return {}


@pytest.fixture
def driver(language: str, commands: dict[str, list[str]]) -> Iterator[Driver]:
    try:
        command = commands[language] if language in commands else commands.setdefault(language, LANGUAGES[language]())
    except Missing as missing:
        pytest.skip(str(missing))
    driver = Driver(command)
    yield driver
    assert driver.end() == 0, "a driver ends well when its input does"


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.end()


def fits(said: str, expected: str) -> bool:
    """Letter by letter; ``*`` is what no two runs have in common, such as an id."""
    return re.fullmatch(re.escape(expected).replace(r"\*", r"\S+"), said) is not None


@pytest.mark.parametrize("language", BY_LANGUAGE)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[each["name"] for each in SCENARIOS])
def test_every_language_says_the_same(scenario: dict[str, Any], stage: Stage, driver: Driver) -> None:
    for number, step in enumerate(scenario["steps"]):
        if "client" not in step:
            stage.act(step)
            continue
        said = driver.ask(stage.filled(step["client"]), step.get("within", ANSWER_SECONDS))
        assert fits(said, step["says"]), f"step {number}, {json.dumps(step['client'])}: {said}, not {step['says']}"
