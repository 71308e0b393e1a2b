"""Orders to an engine's cache: as an operator gives them, by the command line, and by a router that dies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.engines.engine import ROOT

_ROUTER = """
import sys, time
from kvgrpc.client import SyncClient
from kvgrpc.v1 import prefetch_service_pb2 as proto
address, tokens, seconds = sys.argv[1], list(map(int, sys.argv[2].split())), float(sys.argv[3])
client, pages = SyncClient(address), proto.PromptPages(tokens=tokens)
if seconds:
    print(client.pin_pages(pages, seconds).pinned_pages, flush=True)
else:
    print(client.start_prefetch(pages).operation_id, flush=True)
time.sleep(600)
"""


def prefetch_and_die(address: str, tokens: Sequence[int]) -> str:
    """A router's process begins a prefetch and is killed once it has the answer. Returns the operation's id."""
    return _killed_once_answered(address, tokens, 0.0)


def pin_and_die(address: str, tokens: Sequence[int], seconds: float) -> int:
    """The same of a pin for so long. Returns how many pages were pinned."""
    return int(_killed_once_answered(address, tokens, seconds))


def _killed_once_answered(address: str, tokens: Sequence[int], seconds: float) -> str:
    command = [sys.executable, "-c", _ROUTER, address, " ".join(map(str, tokens)), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as router:
        assert router.stdout is not None
        answer = router.stdout.readline().strip()
        router.kill()
    assert router.returncode == -signal.SIGKILL and answer, "it ended before it was killed"
    return answer


def order_by_name(registry: str, engine: str, tokens: Sequence[int], *more: str) -> dict[str, Any]:
    """``kvgrpc prefetch start``, waited for. Returns the operation as its ``--json`` tells it last."""
    words = ["prefetch", "start", "-s", registry, "--engine", engine, "--json", "--tokens", " ".join(map(str, tokens))]
    said = subprocess.run([sys.executable, "-m", "kvgrpc", *words, *more], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stdout + said.stderr
    operation: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return operation
