"""Floods of HTTP/2 frames from one connection, before anybody is asked who they are: an honest pair hands over on.

The library's switches are as kvgrpc ships them. With its event engine left out, which kvgrpc once did for 0.07 ms a
frame, one burst of pings stopped all sockets of the process for 6 to 13 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.support.hostile.floods import FLOODS, Flood, flooding, header_bombs
from tests.support.hostile.honest_pair import hand_over, held
from tests.support.rank_host import RankHost
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

SECONDS = 2.0
# Of an honest room beside a flood: far above what a busy machine makes of its milliseconds, below any stop.
LONGEST_ROOM_SECONDS = 4.0
MOST_BYTES_KEPT = 128 << 20

# grpcio 1.85 never frees a call whose head is above its limit, in any server (docs/bounds.md has the front).
KEPT_BY_THE_LIBRARY = (header_bombs,)


@pytest.mark.parametrize("flood", FLOODS, ids=[flood.__name__ for flood in FLOODS])
def test_an_honest_pair_hands_over_beside_it(prefill: RankHost, decode: RankHost, flood: Callable[[], Flood]) -> None:
    hand_over(prefill, decode)
    before = held()
    longest = 0.0
    with flooding(prefill.rank.address, flood) as begun:
        assert begun.wait(20)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            longest = max(longest, hand_over(prefill, decode))
    assert longest < LONGEST_ROOM_SECONDS
    # What the flood's connections held goes with them, a moment after they are closed.
    wait_until(lambda: flood in KEPT_BY_THE_LIBRARY or held() - before < MOST_BYTES_KEPT)


def test_kvgrpc_leaves_the_librarys_experiments_alone() -> None:
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    code = "import os, kvgrpc.server; print(os.environ.get('GRPC_EXPERIMENTS'))"
    asked = subprocess.run(
        [sys.executable, "-c", code], env=clean, check=True, capture_output=True, text=True, timeout=60
    )
    assert asked.stdout.strip() == "None"
