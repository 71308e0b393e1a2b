"""`.ci/run` has a failed test run once more: a few may pass then, many may not. One that fails twice has failed, unless
it passes in a process of its own, which counts as one more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MOST_RERUNS, TALLY

pytestmark = pytest.mark.timeout(400)  # each starts processes of pytest
ROOT = Path(__file__).parents[2]
UNSTEADY = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({tests}))
def test_that_fails(number):
    runs = pathlib.Path(__file__).with_name(str(number))
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
    assert len(runs.read_text()) > {failures}
"""


@pytest.mark.parametrize(
    ("tests", "failures", "passes"), [(MOST_RERUNS, 1, True), (MOST_RERUNS + 1, 1, False), (1, 2, False)]
)
def test_a_few_tests_may_fail_once(tmp_path: Path, tests: int, failures: int, passes: bool) -> None:
    assert run_unsteady(tmp_path, tests, failures) == passes


def test_all_processes_of_a_run_share_the_few(tmp_path: Path) -> None:
    """`make test` has several; each takes what those before it left."""
    tally = {TALLY: str(tmp_path / "tally")}
    assert run_unsteady(tmp_path / "first", MOST_RERUNS, 1, tally)
    assert run_unsteady(tmp_path / "second", 1, 0, tally), "it had none run again"
    assert not run_unsteady(tmp_path / "third", 1, 1, tally)


@pytest.mark.parametrize(("failures", "passes"), [(2, True), (3, False)])
def test_one_that_fails_twice_is_tried_in_a_process_of_its_own(tmp_path: Path, failures: int, passes: bool) -> None:
    tally = tmp_path / "tally"
    assert run_unsteady(tmp_path / "run", 1, failures, {TALLY: str(tally)}) == passes
    assert tally.read_text().split() == ["2"], "the rerun and this"


def run_unsteady(folder: Path, tests: int, failures: int, tally: dict[str, str] | None = None) -> bool:
    """Runs so many tests that fail so many times each; True if the run passed."""
    folder.mkdir(exist_ok=True)
    (folder / "test_unsteady.py").write_text(UNSTEADY.format(tests=tests, failures=failures))
    (folder / "conftest.py").write_text("from tests.conftest import pytest_sessionfinish\n")
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", f"--rootdir={folder}", "--reruns=1", "-raR"]
    environment = {name: value for name, value in os.environ.items() if name != TALLY} | (tally or {})
    done = subprocess.run(
        [*command, str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.count("RERUN") == (tests if failures else 0), done.stdout + done.stderr
    return done.returncode == 0
