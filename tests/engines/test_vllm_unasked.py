"""Beside a vLLM that lacks what kvgrpc needs, who does not ask for kvgrpc goes on, and who does is told."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(700)

# What each process of vLLM does at its start.
SCRIPT = """
from vllm.distributed.kv_events import EventPublisherFactory
del EventPublisherFactory._registry
EventPublisherFactory.__annotations__.pop("_registry", None)
from vllm.plugins import load_general_plugins
load_general_plugins()
print("vLLM goes on")
"""


def start(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | environment, capture_output=True, text=True, timeout=600
    )


def test_who_asks_for_nothing_goes_on() -> None:
    done = start()
    assert done.returncode == 0 and "vLLM goes on" in done.stdout, done.stderr


def test_who_asks_for_kvgrpc_is_told_what_is_missing() -> None:
    done = start(KVGRPC_EVENTS_LISTEN="127.0.0.1:0")
    assert done.returncode != 0 and "vLLM goes on" not in done.stdout
    assert "EventPublisherFactory has no _registry; install vllm==" in done.stderr
