"""``make test`` and ``make test-engines`` run their tests in parts, `.ci/run` the suites beside the former, and nothing
is left out."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
RUN = (ROOT / ".ci" / "run").read_text()
ENGINES = sorted((ROOT / "tests" / "engines").glob("test_*.py"))
# What starts a model server does it by this.
STARTS_ENGINES = "tests.engines.engine"
# These start processes that load the engine's package, ten seconds each.
ANOTHER_PROCESS = re.compile(r"_(doctor|unasked)$")


def said(target: str, *settings: str) -> str:
    """What ``make TARGET`` would run."""
    environment = {"PATH": os.environ["PATH"]}  # and neither ARGS nor jobs of a make around this test
    command = ["make", "-n", target, *settings]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
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


@pytest.fixture(scope="module")
def engine_parts() -> dict[str, list[str]]:
    """The modules of tests/engines that each part of ``make test-engines`` runs, in the order of the parts."""
    listed = re.search(r"^ENGINE_PARTS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed is not None
    run = {part: said("test-engines", f"PART={part}") for part in listed[1].split()}
    return {part: re.findall(r"tests/engines/(test_\w+)\.py", line) for part, line in run.items()}


def test_each_test_of_engines_is_in_one_part(engine_parts: dict[str, list[str]]) -> None:
    found = Counter(name for names in engine_parts.values() for name in names)
    assert found == Counter(path.stem for path in ENGINES)


def test_what_starts_no_engine_is_the_first_part_and_all_of_it(engine_parts: dict[str, list[str]]) -> None:
    """Its tests are those of a change to an adapter: nobody waits for an engine there, and none is left out."""
    here = [path for path in ENGINES if not ANOTHER_PROCESS.search(path.stem)]
    without = [path.stem for path in here if STARTS_ENGINES not in modules_reached(path)]
    first, names = next(iter(engine_parts.items()))
    assert (first, sorted(names)) == ("adapters", without)


def modules_reached(path: Path) -> set[str]:
    """Modules of tests that this one imports, and those that they import."""
    reached, left = set[str](), [path]
    while left:
        for node in ast.walk(ast.parse(left.pop().read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tests."):
                continue
            for module in (node.module or "", *(f"{node.module}.{name.name}" for name in node.names)):
                file = ROOT / f"{module.replace('.', '/')}.py"
                if module not in reached and file.exists():
                    reached.add(module)
                    left.append(file)
    return reached


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_each_night_has_all_parts(engine: str, engine_parts: dict[str, list[str]]) -> None:
    nightly = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    run = re.findall(rf'test-engines ENGINES={engine} PART="(.+)"', nightly)
    assert " ".join(run).split() == [*engine_parts, "versions"]
