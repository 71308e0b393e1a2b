"""What is generated from our own sources is what `make gen` writes now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "written"), [("sync_client.py", "kvgrpc/client/sync.py"), ("settings_page.py", "docs/settings.md")]
)
def test_a_generated_file_is_what_its_sources_give(script: str, written: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / ".ci" / script), str(tmp_path / "fresh")]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "fresh").read_text() == (ROOT / written).read_text(), "type make gen, and commit the result"
