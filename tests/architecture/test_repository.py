"""What may lie in the repository at all."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP_LEVEL = {
    *("protos", "kvgrpc", "clients", "examples", "deploy", "tests", "benchmarks", "docs", ".ci", ".github"),
    *("pyproject.toml", "hatch_build.py", "buf.yaml", "buf.gen.yaml", "Makefile", ".gitignore", ".gitattributes"),
    *(".editorconfig", ".pre-commit-config.yaml"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"),
}
# Split, so that this file does not contain what it looks for.
ONE_MACHINE = ["/" + "root/", "/" + "home/", "/" + "work/", "/" + "opt/wheels"]
REGISTRY_HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("npmjs", "org"),
        ("proxy", "golang", "org"),
        ("deb", "debian", "org"),
        ("static", "crates", "io"),
        ("download", "pytorch", "org"),
    )
]


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_the_top_level_holds_nothing_else(tracked: list[Path]) -> None:
    names = {path.relative_to(ROOT).parts[0] for path in tracked}
    assert {name for name in names - TOP_LEVEL if not name.endswith(".lock")} == set()


def test_no_file_names_a_path_of_one_machine_or_the_host_of_a_registry(tracked: list[Path]) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in tracked
        for text in [path.read_bytes().decode("utf-8", "ignore")]
        for word in ONE_MACHINE + REGISTRY_HOSTS
        if word in text
    ]
    assert found == []
