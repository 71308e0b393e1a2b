"""The drivers: how each language's is built and begun, and why it cannot be here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / "clients"
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/go/bin", str(Path.home() / ".cargo/bin")])
# Proxies of the machine are no business of loopback traffic.
DIRECT = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()} | {"PYTHONPATH": str(ROOT)}
BUILD_SECONDS = 900.0


class Missing(Exception):
    """What this machine, or this checkout, lacks for a language."""


def _python() -> list[str]:
    return [sys.executable, "-m", "tests.conformance.scenarios.driver"]


def _go() -> list[str]:
    built = ROOT / ".cache/conformance/go"
    _run([_tool("go"), "build", "-o", str(built), "./conformance"], CLIENTS / "go")
    return [str(built)]


def _rust() -> list[str]:
    # As .ci/rust builds the rest, so that nothing is built twice.
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / ".cache/rust"))
    build = [_tool("cargo"), "build", "--quiet", "--workspace", "--all-features", "--example", "conformance"]
    _run([*build, "--target-dir", str(target)], CLIENTS / "rust")
    return [str(target / "debug/examples/conformance")]


def _typescript() -> list[str]:
    built = CLIENTS / "typescript/dist/conformance/driver.js"
    if not built.exists():
        raise Missing(".ci/typescript was not run")
    return [_tool("node"), str(built)]


LANGUAGES: dict[str, Callable[[], list[str]]] = {"python": _python, "go": _go, "rust": _rust, "typescript": _typescript}


def _tool(name: str) -> str:
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise Missing(f"there is no {name} here")
    return found


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": _PATH}, capture_output=True, text=True, timeout=BUILD_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
