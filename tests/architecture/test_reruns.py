"""`.ci/run` has a failed test run once more: a few may pass then, many may not, and one that fails twice has failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MOST_RERUNS

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
    (tmp_path / "test_unsteady.py").write_text(UNSTEADY.format(tests=tests, failures=failures))
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_sessionfinish\n")
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", f"--rootdir={tmp_path}", "--reruns=1", "-raR"]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert done.stdout.count("RERUN") == tests
