"""Programs of the Rust client, built as ``.ci/rust`` builds them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CARGO = shutil.which("cargo", path=f"{os.environ.get('PATH', '')}:{Path.home()}/.cargo/bin")
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / ".cache/rust"))
BUILD_SECONDS = 1500


def built_example(name: str) -> str:
    """An example of the crate; the test is skipped where there is no cargo."""
    return _built(["--example", name], f"debug/examples/{name}")


def built_fleet() -> str:
    """A made-up fleet for the native index; the test is skipped where there is no cargo."""
    return _built(["-p", "kvgrpc-index", "--example", "fleet"], "debug/examples/fleet")


def built_index() -> str:
    """The native index, unoptimised; the test is skipped where there is no cargo."""
    return _built(["-p", "kvgrpc-index"], "debug/kvgrpc-index")


def _built(what: list[str], program: str) -> str:
    if CARGO is None:
        pytest.skip("there is no cargo here")
    manifest = str(ROOT / "clients/rust/Cargo.toml")
    command = [CARGO, "build", "--quiet", *what, "--manifest-path", manifest, "--target-dir", str(TARGET)]
    subprocess.run(command, check=True, timeout=BUILD_SECONDS)
    return str(TARGET / program)
