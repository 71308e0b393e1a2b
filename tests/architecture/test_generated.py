"""What is generated from our own sources is what `make gen` writes now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.chart import PAGE, PICTURE, bars_of_page, draw

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


def test_the_chart_of_the_benchmarks_shows_the_table_of_its_page() -> None:
    bars = bars_of_page(PAGE.read_text())
    assert len(bars) >= 40
    assert draw(bars) == PICTURE.read_text(), "type python -m benchmarks.harness.chart, and commit the result"
