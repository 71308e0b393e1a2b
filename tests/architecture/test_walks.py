"""How many files somebody reads who follows one unit through a capability: measured, and a ceiling that only falls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PREFETCH_FILES = 26
"""Files of kvgrpc/prefetch that run for one prefetch of a remote client, with storage in files; 31 before protocol/ was
pure, 16 to reach."""


def walked() -> list[str]:
    command = [sys.executable, "-m", "tests.support.prefetch_walk"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_prefetch_runs_through_no_more_files_than_it_did() -> None:
    files = walked()
    assert "protocol/prefetch.py" in files and "runtime/controller.py" in files, files
    assert len(files) <= PREFETCH_FILES, f"{len(files)} files: {files}"
    assert len(files) == PREFETCH_FILES, f"the walk is shorter: lower the ceiling to {len(files)}"


def test_the_reading_path_of_the_cache_names_files_that_there_are() -> None:
    folder = ROOT / "kvgrpc" / "prefetch"
    named = re.findall(r"`([\w/]+\.py)`", (folder / "README.md").read_text())
    assert len(named) > 15
    assert [name for name in named if not (folder / name).is_file() and not (ROOT / name).is_file()] == []
