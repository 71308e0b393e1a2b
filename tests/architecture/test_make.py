"""``make test`` runs its tests in parts, and together these leave nothing out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


@pytest.fixture(scope="module")
def said() -> str:
    """What ``make test`` would run."""
    environment = {"PATH": os.environ["PATH"]}  # and neither ARGS nor jobs of a make around this test
    done = subprocess.run(["make", "-n", "test"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_one_part_leaves_out_another_runs(said: str) -> None:
    parts = [line for line in said.splitlines() if " -m pytest " in line]
    (rest,) = [part for part in parts if "--ignore" in part]
    left_out = re.findall(r"--ignore=(tests/\w+)", rest)
    assert sorted(left_out) == ["tests/contract", "tests/integration"]
    assert not re.search(r" tests/", rest), "it runs every other folder, one that is new too"
    for folder, times in (("tests/contract", 2), ("tests/integration", 1)):
        assert sum(part.split().count(folder) for part in parts) == times, folder


def test_lint_and_the_clients_are_parts_of_it(said: str) -> None:
    for command in ("/mypy", "/ruff check", "/lint-imports", "buf lint", ".ci/drift", ".ci/breaking"):
        assert command in said
    assert set(re.findall(r"\.ci/clients (\w+)", said)) == {"go", "rust", "typescript"}
