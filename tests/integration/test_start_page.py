"""What docs/start.md and docs/engines/api.md say to type runs as it is typed, and ``kvgrpc why`` finds the room."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "start.md").read_text()
# In place of the second terminal.
LOOK = """
import subprocess, sys
for typed in {typed}:
    command = [sys.executable, "-m", "kvgrpc", *typed, "-s", prefill.address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30)
    print(shown.stdout + shown.stderr, file=sys.stderr)
    assert shown.returncode == 0
"""


def typed_in_the_second_terminal() -> list[list[str]]:
    (console,) = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    return [line.split()[2:-2] for line in console.splitlines()]


def test_the_first_hand_off_prints_what_the_page_says_and_why_tells_the_cause() -> None:
    *blocks, end = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (printed,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    looks = typed_in_the_second_terminal()
    assert [look[0] for look in looks] == ["why", "top"]
    session = "\n".join([*blocks, LOOK.format(typed=looks), end])
    ran = subprocess.run([sys.executable, "-c", session], capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    said, promised = ran.stdout.splitlines(), printed.splitlines()
    assert re.sub(r":\d+$", "", said[0]) == re.sub(r":\d+$", "", promised[0])
    assert said[1:] == promised[1:]
    noise = re.findall(r"^WARNING: Logging before|^E\d{4} .*", ran.stderr, re.MULTILINE)
    assert noise == [], "Mooncake's, of what went well"
    assert "the user went away" in ran.stderr and "ROOM_CANCELLED" in ran.stderr


def test_the_api_guide_of_engines_runs_as_it_stands() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines" / "api.md").read_text()
    session = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    ran = subprocess.run([sys.executable, "-c", session], capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stdout.splitlines() if not line.startswith(("I2", "W2"))] == [
        *("True True", "0.0", "WaitingForInput", "Success Success 1.0 4242", "Failed ROOM_CANCELLED", "True"),
        "0 True",
    ]


def test_the_blocks_can_be_pasted_into_a_prompt() -> None:
    """There a block of indented lines ends with an empty one, and an error does not stop what follows."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    command = [sys.executable, "-i", "-q", "-c", ""]
    ran = subprocess.run(command, input="".join(blocks), capture_output=True, text=True, timeout=100, check=False)
    assert "Traceback" not in ran.stderr and "SyntaxError" not in ran.stderr, ran.stderr
    assert "pages 5 and 6 are ours again: True" in ran.stdout
