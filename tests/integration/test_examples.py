"""The toy engine of examples/ does what its README says."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROUTER = Path(__file__).parents[2] / "examples/engine/router.py"


@pytest.mark.skipif(not (find_spec("torch") and find_spec("mooncake")), reason="install kvgrpc[demo] for it")
@pytest.mark.timeout(180)
def test_the_toy_engine_hands_over_a_prompt_a_rest_of_one_and_gives_one_up() -> None:
    ran = subprocess.run([sys.executable, ROUTER], capture_output=True, text=True, timeout=170, check=False)
    assert ran.stdout.splitlines() == [
        "prefill {'room': 1, 'end': 'Success', 'why': '', 'sent': 3}",
        "decode  {'room': 1, 'end': 'Success', 'why': '', 'right': True, 'first_token': 1021}",
        "prefill {'room': 2, 'end': 'Success', 'why': '', 'sent': 3}",
        "decode  {'room': 2, 'end': 'Success', 'why': '', 'right': True, 'first_token': 1010}",
        "prefill {'room': 3, 'end': 'Failed', 'why': 'ROOM_CANCELLED', 'sent': 0}",
        "decode  {'room': 3, 'end': 'Failed', 'why': 'ROOM_CANCELLED'}",
    ], ran.stderr
