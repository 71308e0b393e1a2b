"""GitHub's workflows ask for Pythons, targets, scripts and folders that are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is not here")

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((GITHUB / "workflows").glob("*.yml"))}
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def jobs() -> list[tuple[str, dict[str, Any]]]:
    return [(f"{name}:{job}", what) for name, flow in WORKFLOWS.items() for job, what in flow["jobs"].items()]


def commands(job: dict[str, Any]) -> list[str]:
    """What its steps run, with each value that its matrix has."""
    matrix = job.get("strategy", {}).get("matrix", {})
    runs = [step["run"] for step in job["steps"] if "run" in step]
    for key, values in matrix.items():
        runs = [run.replace(f"${{{{ matrix.{key} }}}}", value) for run in runs for value in values]
    return runs


def test_every_python_that_is_promised_is_tested() -> None:
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    assert WORKFLOWS["ci"]["jobs"]["test"]["strategy"]["matrix"]["python"] == promised


@pytest.mark.parametrize(("name", "job"), jobs(), ids=[name for name, _ in jobs()])
def test_a_job_ends_and_runs_what_is_there(name: str, job: dict[str, Any]) -> None:
    assert job["timeout-minutes"] <= 180
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(job):
        for target in re.findall(r"\bmake ([a-z-]+)", command):
            assert target in targets, command
        for script in re.findall(r"(?<![\w/])\.ci/[\w-]+", command):
            assert (ROOT / script).stat().st_mode & 0o111, script


def test_a_release_publishes_only_what_release_check_has_tried() -> None:
    """Under a tag that is the version, with checksums, and without a password."""
    flow = WORKFLOWS["release"]["jobs"]
    built = [step.get("run", "") for step in flow["build"]["steps"]]
    assert "make release-check" in built and any("GITHUB_REF_NAME" in run and "__version__" in run for run in built)
    assert flow["python"]["needs"] == "build" and flow["python"]["permissions"] == {"id-token": "write"}
    assert any("SHA256SUMS" in step.get("run", "") for step in flow["page"]["steps"])
    release_check = (ROOT / ".ci" / "release-check").read_text()
    assert "SHA256SUMS" in release_check and "kvgrpc.protoset" in release_check
    assert "secrets." not in (GITHUB / "workflows" / "release.yml").read_text()


def test_owners_and_the_dependency_bot_name_what_is_there() -> None:
    owned = [line.split()[0] for line in (GITHUB / "CODEOWNERS").read_text().splitlines() if line[:1] in ("/", "*")]
    assert owned[0] == "*" and [path for path in owned[1:] if not (ROOT / path.lstrip("/")).exists()] == []
    bot = yaml.safe_load((GITHUB / "dependabot.yml").read_text())["updates"]
    manifest = {
        "github-actions": ".github/workflows",
        "pip": "pyproject.toml",
        "gomod": "go.mod",
        "cargo": "Cargo.toml",
        "npm": "package.json",
        "docker": "Dockerfile",
    }
    watched = [ROOT / one["directory"].lstrip("/") / manifest[one["package-ecosystem"]] for one in bot]
    assert len(watched) == len(manifest) and [path for path in watched if not path.exists()] == []
