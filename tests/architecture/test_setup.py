"""What a bare machine is told by ``.ci/setup``."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A Debian without python3-venv and without Mooncake's libraries, for somebody who is not root.
BARE = {
    "python3": 'case "$*" in *ensurepip*) exit 1;; *-V*) echo Python 3.11.2;; esac',
    "ldconfig": "echo 0 libs found",
    "id": "echo 1000",
    "apt-get": "exit 1",
}


def test_all_missing_packages_are_named_in_one_line(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in BARE.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    (tmp_path / ".ci").mkdir()
    for name in (".ci/setup", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    ran = subprocess.run(
        [str(tmp_path / ".ci/setup"), "main"], env=environment, capture_output=True, text=True, timeout=20
    )
    (said,) = ran.stderr.splitlines()
    assert said.endswith("--no-install-recommends python3-venv libibverbs1 libnuma1 libcurl4")
    assert ran.returncode == 1


def test_who_tells_how_far_a_set_up_is_ends_with_it() -> None:
    """Who reads what a set-up says waits for all that hold its stderr."""
    script = (ROOT / ".ci/setup").read_text()
    functions = script[script.index("telling() {") : script.index("need_python() {")]
    ran = subprocess.run(["bash", "-euc", f"{functions}\ntelling false"], capture_output=True, timeout=60)
    assert ran.returncode == 1
