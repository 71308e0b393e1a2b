"""The command is an extra: engines install kvgrpc without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run_without(*packages: str) -> subprocess.CompletedProcess[str]:
    """``kvgrpc --version`` in an interpreter where these packages are not installed."""
    script = f"""
import sys
sys.modules.update(dict.fromkeys({packages!r}))  # an import of None is an ImportError
sys.argv = ["kvgrpc", "--version"]
from kvgrpc.__main__ import main
main()
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=30)


@pytest.mark.parametrize(("packages", "named"), [(("click", "rich"), "click and rich"), (("rich",), "rich")])
def test_without_the_extra_it_ends_with_one_line_that_names_it(packages: tuple[str, ...], named: str) -> None:
    done = run_without(*packages)
    assert (done.returncode, done.stdout) == (76, "")
    assert done.stderr == f"kvgrpc: the command needs {named}: pip install 'kvgrpc[cli]'\n"


def test_with_the_extra_it_runs() -> None:
    done = run_without()
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("kvgrpc")
