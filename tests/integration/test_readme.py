"""The README's example runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_engine_author_s_example_hands_a_room_over() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    ran = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=50, check=False)
    assert ran.stdout == "room 7: Success 42\n", ran.stderr
