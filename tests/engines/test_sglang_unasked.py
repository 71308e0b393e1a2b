"""Beside an SGLang that lacks what kvgrpc needs, who does not ask for kvgrpc goes on, and who does is told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvgrpc.engines.sglang import EX_CONFIG

pytestmark = pytest.mark.timeout(700)

# What each process of SGLang does at its start.
SCRIPT = """
from sglang.srt.managers.io_struct import GenerateReqInput
del GenerateReqInput.regenerate_rid
from sglang.srt.plugins import load_plugins
load_plugins()
print("SGLang goes on")
"""


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=600)


def test_who_asks_for_nothing_goes_on() -> None:
    done = start()
    assert done.returncode == 0 and "SGLang goes on" in done.stdout, done.stderr


def test_who_asks_for_kvgrpc_is_told_what_is_missing() -> None:
    done = start("--disaggregation-transfer-backend", "kvgrpc")
    assert done.returncode == EX_CONFIG and "SGLang goes on" not in done.stdout, done.stderr
    assert "GenerateReqInput.regenerate_rid; install sglang==" in done.stderr
