"""``make test`` runs its tests in parts, `.ci/run` the suites beside it, and together these leave nothing out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
RUN = (ROOT / ".ci" / "run").read_text()


def said(target: str) -> str:
    """What ``make TARGET`` would run."""
    environment = {"PATH": os.environ["PATH"]}  # and neither ARGS nor jobs of a make around this test
    done = subprocess.run(["make", "-n", target], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def test() -> str:
    return said("test")


@pytest.fixture(scope="module")
def suites() -> str:
    return said("test-suites")


def parts(said: str) -> list[tuple[str, set[str], set[str]]]:
    """(environment, what it runs, what it leaves out) of each pytest that would run."""
    lines = [line for line in said.splitlines() if " -m pytest " in line]
    found = []
    for line in lines:
        environment = re.search(r"(\.venv[\w-]*)/bin/python", line)
        assert environment is not None and '-m "not slow"' in line
        left_out = set(re.findall(r"--ignore=(tests/\S+)", line))
        found.append((environment[1], set(re.findall(r"(?<= )tests/\S+", line)), left_out))
    return found


def test_what_one_part_leaves_out_another_runs(test: str, suites: str) -> None:
    of_test, beside = parts(test), parts(suites)
    (rest,) = [part for part in of_test if not part[1]]
    assert rest[2] == {"tests/contract", "tests/integration"}, "it runs every other folder, one that is new too"
    run = set.union(*(part[1] for part in of_test + beside))
    left_out = set.union(*(part[2] for part in of_test))
    assert left_out <= run, left_out - run
    assert all((ROOT / path).exists() for path in run | left_out)


def test_nothing_runs_twice_on_one_environment(test: str, suites: str) -> None:
    files = [
        (environment, path)
        for environment, run, left_out in parts(test) + parts(suites)
        for path in run
        if not any(path.startswith(f"{folder}/") for folder in ("tests/contract", "tests/integration") if folder in run)
    ]
    assert len(files) == len(set(files))


def test_the_contract_is_checked_on_both_protobufs(test: str, suites: str) -> None:
    whole = [(each, left_out) for each, run, left_out in parts(test) + parts(suites) if "tests/contract" in run]
    hostile = [each for each, run, _ in parts(suites) if "tests/contract/hostile" in run]
    assert whole == [(".venv-protobuf7", {"tests/contract/hostile"}), (".venv-protobuf6", set())]
    assert hostile == [".venv-protobuf7"]


def test_what_ci_runs_is_all_of_it(test: str, suites: str) -> None:
    assert re.findall(r"^make ([\w-]+)", RUN, re.MULTILINE) == ["test", "test-suites", "docs", "soak"]
    for command in ("/mypy", "/ruff check", "/lint-imports", "buf lint", ".ci/drift", ".ci/breaking"):
        assert command in test
    assert set(re.findall(r"\.ci/clients (\w+)", suites)) == {"go", "rust", "typescript"}


@pytest.mark.parametrize("target", ["test", "test-suites", "test-outages"])
def test_where_registries_over_etcd_are_tested_there_is_an_etcd(target: str) -> None:
    """Their tests are skipped without one."""
    assert re.search(r"\.ci/setup etcd|for each in [^;]*\betcd\b", said(target)), "its kills would be skipped"
