"""Orders to an engine's cache as an operator gives them, by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def order_by_name(registry: str, engine: str, tokens: Sequence[int], *more: str) -> dict[str, Any]:
    """``kvgrpc prefetch start``, waited for. Returns the operation as its ``--json`` tells it last."""
    words = ["prefetch", "start", "-s", registry, "--engine", engine, "--json", "--tokens", " ".join(map(str, tokens))]
    said = subprocess.run([sys.executable, "-m", "kvgrpc", *words, *more], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stdout + said.stderr
    operation: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return operation
