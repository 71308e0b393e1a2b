"""``kvgrpc doctor --engine`` in the environment of a real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

from kvgrpc.engines.compatibility import ENGINES, HAND_OFFS, ORDERS, STAGES, WINDOWS, version_of
from tests.engines.engine import ROOT

# Releases beside those of the locks with which plain hand-offs were run: what they lack, by feature.
LACKS: Mapping[str, Mapping[str, str]] = {
    "sglang 0.5.21": {
        STAGES: "PPConsensusStore",
        ORDERS: "MatchResult has no device_prefix_len",
        WINDOWS: "KVArgs has no swa_kv_cache_layout",
    },
    "sglang 0.5.22": {},
    "vllm 0.31.0": {ORDERS: "SecondaryTierManager has no tolerates_off_thread_polling"},
    "vllm 0.32.0": {ORDERS: "SecondaryTierManager has no tolerates_off_thread_polling"},
}


def finds_all_features(name: str) -> None:
    """But those that this release is known to lack, of which it names what is not there; of those that were never run
    with it, all but hand-offs where it is not the lock's, it says that.
    """
    engine = ENGINES[name]
    version = version_of(engine).partition("+")[0]
    lacks = LACKS.get(f"{name} {version}", {})
    is_locked = f"\n{name}=={version} " in (ROOT / f"requirements-{name}.lock").read_text()
    run = set(engine.needs) if is_locked else {HAND_OFFS} if f"{name} {version}" in LACKS else set()
    command = [sys.executable, "-m", "kvgrpc", "doctor", "--json", "--engine", name]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=650, cwd=ROOT)
    found = {each["what"]: (each["state"], each["remark"]) for each in map(json.loads, ended.stdout.splitlines())}
    assert found[name][0] == ("ok" if run else "note"), ended.stdout
    for feature in engine.needs:
        state, remark = found[f"{engine.title} {feature}"]
        assert state == ("missing" if feature in lacks else "ok" if feature in run else "note"), ended.stdout
        assert lacks.get(feature, "") in remark, remark
        assert ("never run with this version" in remark) is (feature not in run and feature not in lacks), remark
    assert ended.returncode == bool(lacks), ended.stdout + ended.stderr
