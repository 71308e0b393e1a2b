"""How many files somebody reads who follows one unit through a capability: measured, and a ceiling that only falls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {"room": 31, "event": 18, "registration": 17, "prefetch": 25}
"""Files of the capability's own package that run for one unit (tests/support/walks.py). Once a prefetch took 32, a room
36; docs/architecture.md says why what remains does."""
# One that only a late tick reaches may be missing.
MAY_BE_MISSING = 2
DECIDES = {
    "room": "protocol/decode/core.py",
    "event": "log/batch_queue.py",
    "registration": "store/memory.py",
    "prefetch": "protocol/prefetch.py",
}


@pytest.mark.parametrize("unit", FILES)
def test_a_unit_runs_through_no_more_files_than_it_did(unit: str) -> None:
    command = [sys.executable, "-m", "tests.support.walks", unit]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=55)
    assert done.returncode == 0, done.stderr
    files = done.stdout.split()
    assert DECIDES[unit] in files, files
    assert len(files) <= FILES[unit], f"{len(files)} files: {files}"
    assert len(files) >= FILES[unit] - MAY_BE_MISSING, f"the walk is shorter: lower the ceiling to {len(files)}"


def test_the_reading_path_of_the_cache_names_files_that_there_are() -> None:
    folder = ROOT / "kvgrpc" / "prefetch"
    named = re.findall(r"`([\w/]+\.py)`", (folder / "README.md").read_text())
    assert len(named) > 15
    assert [name for name in named if not (folder / name).is_file() and not (ROOT / name).is_file()] == []
