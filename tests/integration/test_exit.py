"""A process that ends while its rank is open: the rank is closed first, and aborts nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPEN = """
import mmap, sys, ctypes
from kvgrpc.model import Pool, PoolKind, Region, Role
from kvgrpc.server import RankConfig, open_rank
plane = sys.argv[1]
memory = mmap.mmap(-1, 8 * 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
if plane == "shm":
    import kvgrpc.dataplane
    plane = kvgrpc.dataplane.open_plane("shm")
    address = plane.allocate(8 * 4096)
pool = Pool("kv", PoolKind.KV, 16, 8, "float32", (Region(0, "kv", address, 4096, 4096),))
rank = open_rank(RankConfig(engine="P", role=Role.PREFILL, pools=(pool,), data_plane=plane))
print(rank.address, flush=True)
"""
SAYS_SO = """
stop = rank.transfer.stop
async def said():
    await stop()
    print("closed", flush=True)
rank.transfer.stop = said
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize("end", ["", "sys.exit(33)", "raise KeyboardInterrupt"])
def test_a_rank_that_is_open_at_the_end_of_its_process_is_closed(end: str) -> None:
    done = run(OPEN + SAYS_SO + end, "shm")
    assert done.stdout.endswith("closed\n"), done
    assert done.returncode == {"": 0, "sys.exit(33)": 33}.get(end, done.returncode)


def test_a_rank_that_was_closed_is_not_closed_again_and_one_of_a_fork_is_its_parents() -> None:
    code = "import os\nif not os.fork(): sys.exit(0)\nos.wait()\nprint('the child is gone', flush=True)"
    done = run(OPEN + SAYS_SO + code, "shm")
    assert done.stdout.split("\n")[1:] == ["the child is gone", "closed", ""], done
    done = run(OPEN + SAYS_SO + "rank.close()", "shm")
    assert done.stdout.count("closed") == 1, done


def test_a_close_that_hangs_keeps_no_process_from_ending() -> None:
    hangs = "import asyncio\nrank.transfer.drain = rank.transfer.stop = lambda *_: asyncio.sleep(600)\n"
    began = time.monotonic()
    done = run(OPEN + hangs, "shm")
    assert done.returncode == 0 and time.monotonic() - began < 30.0, done


@pytest.mark.parametrize("times", [4, pytest.param(25, marks=[pytest.mark.slow, pytest.mark.timeout(400)])])
def test_a_process_with_an_open_mooncake_rank_ends_with_its_own_exit_code(times: int) -> None:
    """It aborted (rc 134), 6 times in 25, where the engine's threads outlived the interpreter."""
    pytest.importorskip("mooncake.engine")
    assert [run(OPEN, "mooncake").returncode for _ in range(times)] == [0] * times
