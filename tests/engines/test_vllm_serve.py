"""`vllm serve` by the scripts of examples/vllm, with the proxy in front: HTTP as clients see it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.engines.vllm.scheduler import UNUSED
from tests.engines.engine import LOCAL
from tests.engines.model import Reference
from tests.engines.scripts import EXAMPLES, Script, get, post
from tests.engines.vllm_engine import WITHOUT_GPU, VllmEngine
from tests.support.ports import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(500)
API_SERVERS = 2  # of decode


@dataclass
class Served:
    model: str
    prefill: int
    decode: int
    bootstrap: int
    proxy: int
    scripts: tuple[Script, ...]


@pytest.fixture(scope="module")
def served(folder: Path, reference: Reference) -> Iterator[Served]:
    prefill, decode, bootstrap, proxy = (free_port() for _ in range(4))
    environment = {
        **VllmEngine.environment(folder, {}, {}),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PREFILL_PORT": str(prefill),
        "DECODE_PORT": str(decode),
        "BOOTSTRAP_PORT": str(bootstrap),
    }
    model = str(reference.path)
    scripts: list[Script] = []
    try:
        for name, port, servers in (("prefill", prefill, 1), ("decode", decode, API_SERVERS)):
            arguments = [model, *WITHOUT_GPU, "--api-server-count", str(servers)]
            scripts.append(Script(f"vllm/{name}.sh", arguments, environment, folder))
            scripts[-1].wait_healthy(port)
        proxy_arguments = [
            *("--port", str(proxy), "--prefill", f"http://{LOCAL}:{prefill}"),
            *("--bootstrap", f"http://{LOCAL}:{bootstrap}", "--decode", f"http://{LOCAL}:{decode}"),
        ]
        runner = folder / "proxy.sh"
        runner.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" "{EXAMPLES}/vllm/proxy.py" "$@"\n')
        runner.chmod(0o755)
        scripts.append(Script(str(runner), proxy_arguments, environment, folder))
        scripts[-1].wait_healthy(proxy, "/openapi.json")
        yield Served(model, prefill, decode, bootstrap, proxy, tuple(scripts))
    finally:
        for script in scripts:
            script.close()


@pytest.mark.parametrize("length", [3, 100, 300], ids=lambda length: f"{length} tokens")
def test_a_completion_through_the_proxy_has_the_tokens_of_transformers(
    served: Served, reference: Reference, length: int
) -> None:
    case = reference.case(length)
    asked = {"max_tokens": len(case.tokens), "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = post(served.proxy, "/v1/completions", {"model": served.model, "prompt": case.prompt, **asked})
    (choice,) = answer["choices"]
    assert choice["token_ids"] == case.tokens


RECORDED = Path(__file__).parent / "recorded"
# Routers as they sent their two requests to servers that wrote them down; docs/lab/vllm.md says which versions.
TWO_STEPS = ("toy_proxy", "llm_d_nixlv2", "production_stack")
NAMING = ("llm_d_mooncake",)


@pytest.mark.parametrize("router", [*TWO_STEPS, *NAMING])
def test_the_two_requests_of_a_router_that_were_recorded_are_served(
    served: Served, reference: Reference, router: str
) -> None:
    """Decode is told another prompt with the same last token: it has the right tokens by prefill's pages alone."""
    sent = json.loads((RECORDED / f"{router}.json").read_text())
    case = reference.case(100)
    told = [*reference.case(100).prompt[:-1], case.prompt[-1]]
    ours = {"model": served.model, "ignore_eos": True, "return_token_ids": True}
    prefill = post(served.prefill, "/v1/completions", {**sent["prefill"], **ours, "prompt": case.prompt})
    parameters = sent["decode"]["kv_transfer_params"]
    if router in TWO_STEPS:  # what prefill answers decode gets, as it is
        answered = prefill["kv_transfer_params"]
        assert parameters.items() >= sent["answered"].items()
        assert answered.keys() >= sent["answered"].keys()  # vLLM adds what prefill had cached
    else:
        assert parameters["transfer_id"] == sent["prefill"]["kv_transfer_params"]["transfer_id"]
        engine = json.loads(get(served.bootstrap, "/query"))["0"]["engine_id"]
        answered = {"remote_bootstrap_addr": f"http://{LOCAL}:{served.bootstrap}", "remote_engine_id": engine}
        assert parameters.keys() >= answered.keys()
    asked = {**sent["decode"], **ours, "prompt": told, "kv_transfer_params": {**parameters, **answered}}
    (choice,) = post(served.decode, "/v1/completions", asked)["choices"]
    assert choice["token_ids"] == case.tokens


def test_both_engines_export_what_was_handed_over(served: Served) -> None:
    """Decode has one figure for all of its API servers."""
    _, decode, _ = served.scripts
    assert len(set(re.findall(r"ApiServer_\d", decode.log.read_text(errors="replace")))) == API_SERVERS
    for port in (served.prefill, served.decode):
        (count,) = re.findall(r"vllm:kvgrpc_handoff_seconds_count\{[^}]*\} (\S+)", get(port, "/metrics"))
        assert float(count) >= 3
        (nbytes,) = re.findall(r"vllm:kvgrpc_handoff_bytes_total\{[^}]*\} (\S+)", get(port, "/metrics"))
        assert float(nbytes) > 0


def test_a_request_that_cannot_use_its_prefill_is_told_in_the_answer_the_metrics_and_the_log(
    served: Served, reference: Reference
) -> None:
    """It comes from another connector's prefill. The requests before it, which used theirs, are not counted."""

    def counted() -> list[tuple[str, float]]:
        found = re.findall(r"vllm:kvgrpc_prefills_unused_total\{([^}]*)\} (\S+)", get(served.decode, "/metrics"))
        return [(re.sub(r'.*reason="(\w+)".*', r"\1", labels), float(count)) for labels, count in found]

    (_, decode, _), case = served.scripts, reference.case(100)
    assert counted() == []
    foreign = {"do_remote_prefill": True, "remote_engine_id": "other", "remote_block_ids": [[1, 2, 3, 4]]}
    asked = {"max_tokens": len(case.tokens), "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    prompt = {"model": served.model, "prompt": case.prompt, "kv_transfer_params": foreign}
    answer = post(served.decode, "/v1/completions", {**prompt, **asked})
    assert answer["choices"][0]["token_ids"] == case.tokens
    assert "comes without transfer_id, remote_bootstrap_addr" in answer["kv_transfer_params"][UNUSED]
    wait_until(lambda: counted() == [("parameters", 1.0)])
    lines = decode.log.read_text(errors="replace").splitlines()
    assert len([line for line in lines if "does not use what prefill computed" in line]) == 1


def test_the_bootstrap_port_answers_proxies_and_people(served: Served) -> None:
    assert "0" in json.loads(get(served.bootstrap, "/query"))
    with SyncClient(f"{LOCAL}:{served.bootstrap}") as client:
        (engine,) = client.list_engines()
        assert engine.name == f"{LOCAL}-{served.bootstrap}"


def test_a_decode_that_is_gone_is_told_to_the_client_at_once(served: Served, reference: Reference) -> None:
    """The last test here: it kills decode."""
    _, decode, _ = served.scripts
    decode.signal(signal.SIGKILL)
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(served.proxy, "/v1/completions", {"model": served.model, "prompt": reference.case(20).prompt}, 20.0)
    assert refused.value.code == 502
    assert f"decode at http://{LOCAL}:{served.decode} cannot be reached" in refused.value.read().decode()
