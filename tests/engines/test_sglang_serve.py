"""`sglang.launch_server` by the scripts of examples/sglang: HTTP as clients see it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from tests.engines.engine import LOCAL, Engine
from tests.engines.model import Case, Reference
from tests.engines.scripts import WITHOUT_GPU, Script, run
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(400)

# The environment and the options of either engine.
ROUTES: dict[str, tuple[dict[str, str], list[str]]] = {
    "backend kvgrpc": ({}, []),
    # SGLang's tokenizer workers load no plug-ins: they must know the backend's name.
    "two tokenizer workers": (
        {
            "KVGRPC_SGLANG": "mooncake",
            "TRANSFER_BACKEND": "mooncake",
            # A worker that answers later than this, 5 s else, is killed: on a busy machine each one, while it imports.
            "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120",
        },
        ["--tokenizer-worker-num", "2"],
    ),
}


@pytest.fixture(scope="module", params=ROUTES)
def environment(request: pytest.FixtureRequest, folder: Path, reference: Reference) -> Iterator[dict[str, str]]:
    """Of both engines, which are up, and of whoever asks them."""
    variables, options = ROUTES[request.param]
    ports = {name: free_port() for name in ("PREFILL_PORT", "DECODE_PORT", "BOOTSTRAP_PORT")}
    environment = {
        **Engine.environment(folder, {}, variables),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "BASE_GPU_ID": "0",  # counts NUMA nodes here
        **{name: str(port) for name, port in ports.items()},
    }
    arguments = [str(reference.path), *WITHOUT_GPU, *options]
    scripts: list[Script] = []
    try:
        scripts.append(Script("sglang/prefill.sh", arguments, environment, folder))
        without_backup = ("--disaggregation-decode-retraction-backup", "none")
        scripts.append(Script("sglang/decode.sh", [*arguments, *without_backup], environment, folder))
        scripts[0].wait_healthy(ports["PREFILL_PORT"])
        scripts[1].wait_healthy(ports["DECODE_PORT"])
        yield environment
    finally:
        for script in scripts:
            script.close()


def asked(case: Case) -> str:
    sampling = {"max_new_tokens": len(case.tokens), "temperature": 0, "ignore_eos": True}
    return json.dumps({"input_ids": case.prompt, "sampling_params": sampling})


@pytest.mark.parametrize("length", [3, 100, 300], ids=lambda length: f"{length} tokens")
def test_a_request_to_both_engines_has_the_tokens_of_transformers(
    environment: dict[str, str], reference: Reference, length: int
) -> None:
    case = reference.case(length)
    answer = json.loads(run("sglang/direct.sh", asked(case), environment=environment))
    assert answer["output_ids"] == case.tokens


def test_the_bootstrap_port_is_the_registry(environment: dict[str, str]) -> None:
    with SyncClient(f"{LOCAL}:{environment['BOOTSTRAP_PORT']}") as client:
        (engine,) = client.list_engines()
        assert engine.name == f"{LOCAL}-{environment['BOOTSTRAP_PORT']}"
