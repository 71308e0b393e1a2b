"""``kvgrpc doctor --engine`` in the environment of a real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

from kvgrpc.engines.compatibility import ENGINES, ORDERS, STAGES, is_tried, version_of
from tests.engines.engine import ROOT

# What releases beside those of the locks lack, by feature.
LACKS: Mapping[str, Mapping[str, str]] = {
    "sglang 0.5.21": {STAGES: "PPConsensusStore", ORDERS: "MatchResult has no device_prefix_len"},
    "vllm 0.31.0": {ORDERS: "SecondaryTierManager has no tolerates_off_thread_polling"},
    "vllm 0.32.0": {ORDERS: "SecondaryTierManager has no tolerates_off_thread_polling"},
}


def finds_all_features(name: str) -> None:
    """But those that this release is known to lack, of which it names what is not there."""
    engine = ENGINES[name]
    lacks = LACKS.get(f"{name} {version_of(engine)}", {})
    command = [sys.executable, "-m", "kvgrpc", "doctor", "--json", "--engine", name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=650, cwd=ROOT)
    found = {each["what"]: (each["state"], each["remark"]) for each in map(json.loads, ended.stdout.splitlines())}
    assert found[name][0] == ("ok" if is_tried(engine) else "note"), ended.stdout
    for feature in engine.needs:
        state, remark = found[f"{engine.title} {feature}"]
        assert state == ("missing" if feature in lacks else "ok"), ended.stdout
        assert lacks.get(feature, "") in remark, remark
    assert ended.returncode == bool(lacks), ended.stdout + ended.stderr
