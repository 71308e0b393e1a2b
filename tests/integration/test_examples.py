"""The programs of examples/ do what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.cache_serving import hashes_of, open_cache_rank, prompt

ROUTER = Path(__file__).parents[2] / "examples/engine/router.py"
WARM = Path(__file__).parents[2] / "examples/prefetch/warm.py"


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


def test_a_router_warms_a_cache_before_it_sends_the_request(tmp_path: Path) -> None:
    cache = open_cache_rank(tmp_path)
    cache.store(hashes_of(prompt(20)))
    said = []
    for tokens in (prompt(22), prompt(22), prompt(5, first=9)):
        ran = subprocess.run(
            [sys.executable, WARM, cache.address],
            input=json.dumps(tokens),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        said.append(ran.stdout.split(" tokens")[0])
    assert said == ["80 of 88", "80 of 88", "0 of 20"]
    cache.assert_bytes(hashes_of(prompt(20)))
    assert len(cache.manager.controller.book.all()) == 2, "a backup, and one prefetch: the second request was covered"
    cache.close()
