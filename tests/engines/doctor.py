"""``kvgrpc doctor --engine`` in the environment of a real engine."""

from __future__ import annotations

import json
import subprocess
import sys

from kvgrpc.engines.compatibility import ENGINES
from tests.engines.engine import ROOT


def finds_all_features(name: str) -> None:
    engine = ENGINES[name]
    command = [sys.executable, "-m", "kvgrpc", "doctor", "--json", "--engine", name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    states = {each["what"]: each["state"] for each in map(json.loads, ended.stdout.splitlines())}
    assert states[name] == "ok", ended.stdout
    for feature in engine.needs:
        assert states[f"{engine.title} {feature}"] == "ok", ended.stdout
    assert ended.returncode == 0, ended.stdout + ended.stderr
