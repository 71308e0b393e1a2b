"""``make test-clients`` says which languages were checked, has their drivers answer, and fails where one does."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "clients"


def run(tmp_path: Path, *languages: str, **bodies: str) -> subprocess.CompletedProcess[str]:
    """The script beside languages' own that do so much."""
    folder = tmp_path / ".ci"
    folder.mkdir()
    shutil.copy(SCRIPT, folder)
    for language in ("go", "rust", "typescript", "java", "cpp", "scenarios"):
        path = folder / language
        path.write_text(f"#!/bin/sh\n{bodies.get(language, 'echo ok')}\n")
        path.chmod(0o755)
    return subprocess.run([folder / "clients", *languages], capture_output=True, text=True, timeout=30)


def test_all_are_named(tmp_path: Path) -> None:
    assert run(tmp_path).stdout.splitlines() == ["kvgrpc clients: OK (python go rust typescript java cpp)"]


def test_one_without_tools_is_said_to_be_skipped(tmp_path: Path) -> None:
    done = run(tmp_path, rust="echo 'clients/rust: not checked, there is no cargo here'")
    assert done.stdout.splitlines() == [
        "kvgrpc clients: skipped (rust)",
        "kvgrpc clients: OK (python go typescript java cpp)",
    ]
    assert "there is no cargo here" in done.stderr and done.returncode == 0


@pytest.mark.parametrize("language", ["go", "rust", "typescript", "java", "cpp", "scenarios"])
def test_one_that_fails_fails_all(tmp_path: Path, language: str) -> None:
    done = run(tmp_path, **{language: "exit 3"})
    assert done.returncode == 3 and "OK" not in done.stdout


@pytest.mark.parametrize(
    ("languages", "chosen"),
    [
        ([], "-k python or go or typescript"),
        (["go", "rust", "typescript"], "-k go or typescript"),
        (["typescript"], "-k typescript"),
        (["rust", "java"], None),
    ],
)
def test_the_scenarios_are_those_of_what_was_built(tmp_path: Path, languages: list[str], chosen: str | None) -> None:
    rust = "echo 'clients/rust: not checked, there is no cargo here'"
    done = run(tmp_path, *languages, rust=rust, scenarios='echo "scenarios: $*"')
    assert [line for line in done.stderr.splitlines() if line.startswith("scenarios: ")] == (
        [f"scenarios: {chosen}"] if chosen else []
    )
