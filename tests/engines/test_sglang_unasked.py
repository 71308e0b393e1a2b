"""Beside an SGLang that nobody asked for kvgrpc nothing of SGLang is changed, and one that lacks what kvgrpc needs goes
on; who asks there is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from kvgrpc.engines.sglang import EX_CONFIG

pytestmark = pytest.mark.timeout(700)

LACKING = """
from sglang.srt.managers.io_struct import GenerateReqInput
del GenerateReqInput.regenerate_rid
"""
HOOKED_BY_ANOTHER = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
rid = "sglang.srt.managers.io_struct.GenerateReqInput.regenerate_rid"
HookRegistry.register(rid, lambda original, one: original(one), HookType.AROUND)
"""
# What each process of SGLang does at its start.
START = """
from sglang.srt.plugins import load_plugins
load_plugins()
print("SGLang goes on")
"""
# What it does with the backend that was chosen, here without a word of it on the command line.
CHOOSE = """
from sglang.srt.disaggregation.utils import TransferBackend
print(TransferBackend("kvgrpc").name, "is made")
"""
LOOK = """
import json, os, sys
from sglang.srt.disaggregation import decode, prefill, utils
from sglang.srt.managers import disagg_service
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin

def of_sglang():
    return {
        "TransferBackend": utils.TransferBackend,
        "get_kv_class": utils.get_kv_class,
        "get_kv_class of prefill": prefill.get_kv_class,
        "get_kv_class of the start": disagg_service.get_kv_class,
        "queue": decode.DecodeTransferQueue.__init__,
        "sample": GenerateReqInput.__getitem__,
        "rid": GenerateReqInput.regenerate_rid,
        "sender": prefill.PrefillBootstrapQueue.create_sender,
        "receiver": decode.DecodePreallocQueue._create_receiver_and_enqueue,
        "ring": SchedulerPPMixin._pp_pd_get_decode_transferred_ids,
        "end of transfers": SchedulerPPMixin.process_decode_transfer_queue,
        "requests": Scheduler.process_input_requests,
    }

def changed():
    return sorted(what for what, now in of_sglang().items() if now is not before[what])

before = of_sglang()
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
hooks = {target: {source and source.plugin_name for *_, source in each} for target, each in HookRegistry._hooks.items()}
seen = {
    "unasked": changed(),
    "hooked": [target for target, plugins in hooks.items() if "kvgrpc" in plugins],
    "loaded": sorted({"kvgrpc.transfer", "kvgrpc.events", "kvgrpc.server"} & set(sys.modules)),
}
if "SGLANG_RUST_SERVER" in os.environ and hasattr(disagg_service, "rust_server_serves_kv_bootstrap"):
    seen["rust"] = disagg_service.rust_server_serves_kv_bootstrap("kvgrpc")
backend = utils.TransferBackend("kvgrpc")
seen["chosen"] = changed()
seen["class"] = prefill.get_kv_class(backend, utils.KVClassType.SENDER).__name__
seen["again"] = utils.TransferBackend("kvgrpc") is backend
print(json.dumps(seen))
"""


def start(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600)


def looked(**environment: str) -> dict[str, Any]:
    done = start(LOOK, **environment)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_where_nobody_asks_all_of_sglang_is_its_own_until_the_backend_is_chosen() -> None:
    """By a file or by SGLang's ``Engine`` in Python: no command line says so."""
    seen = looked()
    assert (seen["unasked"], seen["loaded"]) == ([], [])
    assert seen["hooked"] == ["sglang.srt.disaggregation.utils.TransferBackend._missing_"]
    hooked = ["get_kv_class", "get_kv_class of prefill", "get_kv_class of the start", "queue", "receiver", "rid"]
    assert seen["chosen"] == sorted([*hooked, "sample", "sender", "ring", "end of transfers"])
    assert (seen["class"], seen["again"]) == ("KvGrpcSender", True)


def test_sglangs_rust_server_is_told_that_we_bring_a_bootstrap_server() -> None:
    """It asks before anything else has made the backend, and may be the first."""
    seen = looked(SGLANG_RUST_SERVER="1")
    assert not seen.get("rust") and seen["class"] == "KvGrpcSender"
    assert set(seen["unasked"]) == set(seen["loaded"]) == set()


def test_who_asks_for_nothing_goes_on() -> None:
    done = start(LACKING + START)
    assert done.returncode == 0 and "SGLang goes on" in done.stdout, done.stderr


def test_who_asks_for_kvgrpc_is_told_what_is_missing() -> None:
    done = start(LACKING + START, "--disaggregation-transfer-backend", "kvgrpc")
    assert done.returncode == EX_CONFIG and "SGLang goes on" not in done.stdout, done.stderr
    assert "GenerateReqInput.regenerate_rid; install sglang==" in done.stderr


@pytest.mark.parametrize(
    ("before", "says"),
    [
        (LACKING, "GenerateReqInput.regenerate_rid; install sglang=="),
        (
            HOOKED_BY_ANOTHER,
            "GenerateReqInput.regenerate_rid, which another plug-in has hooked; set KVGRPC_SGLANG=backend",
        ),
    ],
    ids=["something is missing", "another plug-in"],
)
def test_who_chooses_the_backend_without_a_word_on_the_command_line_is_told_when_it_is_made(
    before: str, says: str
) -> None:
    done = start(before + START + CHOOSE)
    assert done.returncode != 0 and done.stdout.strip().endswith("SGLang goes on"), done.stderr
    assert says in done.stderr


def test_beside_another_plug_in_the_route_makes_it_known_in_time() -> None:
    done = start(HOOKED_BY_ANOTHER + START + CHOOSE, KVGRPC_SGLANG="backend")
    assert done.returncode == 0 and done.stdout.strip().endswith("KVGRPC is made"), done.stderr
