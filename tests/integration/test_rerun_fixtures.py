"""What a rerun makes for a module ends with the module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = """
import pytest

LEFT_TO_FAIL = [1]


@pytest.fixture(scope="module")
def first():
    if LEFT_TO_FAIL:
        LEFT_TO_FAIL.pop()
        raise RuntimeError("the machine is busy")
    print("first opens")
    yield
    print("first closes")


@pytest.fixture(scope="module")
def second(request):
    print("second opens")
    yield request.module.__name__
    print("second closes")
"""
ONE = "def test_it(first, second): pass\ndef test_on(second): pass\n"
OTHER = "def test_of_another_module(second): print('has', second)\n"


def test_a_fixture_of_a_module_that_a_rerun_makes_is_not_there_for_the_next_module(tmp_path: Path) -> None:
    for name, text in (("conftest.py", CONFTEST), ("test_one.py", ONE), ("test_other.py", OTHER)):
        (tmp_path / name).write_text(text)
    options = ["-sq", "--reruns=1", "-p", "tests.support.rerun_fixtures", "-p", "no:cacheprovider", "-c", "/dev/null"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    said = [line.lstrip(".R") for line in run.stdout.splitlines()]
    steps = [line for line in said if line.startswith(("first", "second", "has"))]
    in_the_rerun, after_it = ["first opens", "second opens"], ["second opens", "has test_other", "second closes"]
    assert sorted(steps[2:4]) == ["first closes", "second closes"] and "1 rerun" in run.stdout, run.stdout
    assert steps == [*in_the_rerun, *steps[2:4], *after_it], run.stdout
