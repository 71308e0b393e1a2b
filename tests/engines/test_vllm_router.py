"""Routers that people have, in front of two `vllm serve`, each started as its own documents say.

vllm-router is a package of PyPI. The others are not: an environment variable names the program, and without it they are
skipped here, and their requests are sent as they were recorded (test_vllm_serve.py).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.engine import LOCAL
from tests.engines.model import Case, Reference
from tests.engines.scripts import Script, get, post
from tests.engines.vllm_engine import WITHOUT_GPU, VllmEngine
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(900)
CLIENT_SECONDS = 60.0
# docs/engines/vllm.md, "Faults": a request for a prefill that is dead ends within about a second at decode. The rest is
# two cores, and whoever waits for the other half.
DEAD_SECONDS = 5.0

SIDECAR = os.environ.get("KVGRPC_TEST_PD_SIDECAR", "")
STACK = os.environ.get("KVGRPC_TEST_PRODUCTION_STACK", "")
HAS_VLLM_ROUTER = find_spec("vllm_router") is not None


@dataclass
class Places:
    """Their ports."""

    model: str = ""
    prefill: int = field(default_factory=free_port)
    decode: int = field(default_factory=free_port)
    bootstrap: int = field(default_factory=free_port)


@dataclass(frozen=True)
class Kind:
    """One router in one of its modes. ``missing``: why it cannot be started here."""

    missing: str
    command: Callable[[Places, int], list[str]]
    # llm-d's scheduler, which is not here, tells its sidecar in a header which prefill it has chosen.
    names_prefill: bool = False


def _vllm_router(connector: str) -> Kind:
    def command(at: Places, port: int) -> list[str]:
        boot = [str(at.bootstrap)] if connector == "mooncake" else []
        return [
            *(sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"),
            *("--prefill", f"http://{LOCAL}:{at.prefill}", *boot, "--decode", f"http://{LOCAL}:{at.decode}"),
            *("--kv-connector", connector, "--policy", "round_robin", "--host", LOCAL, "--port", str(port)),
            *("--prometheus-port", str(free_port())),
        ]

    return Kind("" if HAS_VLLM_ROUTER else "vllm-router is not installed: .ci/setup vllm", command)


def _sidecar(connector: str) -> Kind:
    def command(at: Places, port: int) -> list[str]:
        return [
            *(SIDECAR, "--port", str(port), "--model-server-port", str(at.decode), "--secure-proxy=false"),
            *("--kv-connector", connector, "--mooncake-bootstrap-port", str(at.bootstrap)),
        ]

    missing = "" if SIDECAR else "KVGRPC_TEST_PD_SIDECAR names no pd-sidecar of llm-d-router"
    return Kind(missing, command, names_prefill=True)


def _production_stack() -> Kind:
    def command(at: Places, port: int) -> list[str]:
        return [
            *("/usr/bin/env", "-u", "PYTHONPATH", STACK, "-m", "vllm_router.app", "--host", LOCAL, "--port", str(port)),
            *("--service-discovery", "static"),
            *("--static-backends", f"http://{LOCAL}:{at.prefill},http://{LOCAL}:{at.decode}"),
            *("--static-models", f"{at.model},{at.model}", "--static-model-labels", "prefill,decode"),
            *("--routing-logic", "disaggregated_prefill_orchestrated"),
            *("--prefill-model-labels", "prefill", "--decode-model-labels", "decode"),
        ]

    return Kind("" if STACK else "KVGRPC_TEST_PRODUCTION_STACK names no Python that has its vllm_router", command)


KINDS = {
    "vllm-router, nixl": _vllm_router("nixl"),
    "vllm-router, mooncake": _vllm_router("mooncake"),
    "llm-d's sidecar, nixlv2": _sidecar("nixlv2"),
    "llm-d's sidecar, mooncake": _sidecar("mooncake"),
    "production-stack": _production_stack(),
}
each_router = pytest.mark.parametrize(
    "router",
    [
        pytest.param(name, marks=pytest.mark.skipif(bool(kind.missing), reason=kind.missing))
        for name, kind in KINDS.items()
    ],
)


@dataclass
class Deployment:
    at: Places
    ports: dict[str, int]
    scripts: list[Script]
    start_prefill: Callable[[], Script]
    prefill: Script

    def ask(self, router: str, case: Case) -> list[int]:
        """Its tokens."""
        headers = {"x-prefiller-host-port": f"{LOCAL}:{self.at.prefill}"} if KINDS[router].names_prefill else {}
        body = {"model": self.at.model, "prompt": case.prompt, "max_tokens": len(case.tokens), "temperature": 0}
        body.update(ignore_eos=True, return_token_ids=True)
        (choice,) = post(self.ports[router], "/v1/completions", body, CLIENT_SECONDS, headers)["choices"]
        return list(choice["token_ids"])

    def outcome(self, router: str, case: Case) -> tuple[int, float]:
        """The status that a client gets, 0 for none, and after how many seconds; tokens must be the right ones."""
        began = time.monotonic()
        status = 0
        try:
            assert self.ask(router, case) == case.tokens
            status = 200
        except urllib.error.HTTPError as error:
            status = error.code
        except (OSError, HTTPException):
            pass
        return status, time.monotonic() - began

    def prompt_tokens_at_decode(self, source: str) -> int:
        """vLLM's own count."""
        pattern = rf'vllm:prompt_tokens_by_source_total\{{[^}}]*source="{source}"[^}}]*\}} (\S+)'
        return int(sum(float(count) for count in re.findall(pattern, get(self.at.decode, "/metrics"))))


@pytest.fixture(scope="module")
def deployment(folder: Path, reference: Reference) -> Iterator[Deployment]:
    at = Places(str(reference.path))
    environment = {
        **VllmEngine.environment(folder, {}, {}),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PREFILL_PORT": str(at.prefill),
        "DECODE_PORT": str(at.decode),
        "BOOTSTRAP_PORT": str(at.bootstrap),
    }
    scripts: list[Script] = []

    def start(name: str, arguments: Sequence[str], port: int, environment: dict[str, str]) -> Script:
        scripts.append(Script(name, arguments, environment, folder))
        scripts[-1].wait_healthy(port)
        return scripts[-1]

    def start_prefill() -> Script:
        return start("vllm/prefill.sh", [at.model, *WITHOUT_GPU], at.prefill, environment)

    try:
        prefill = start_prefill()
        start("vllm/decode.sh", [at.model, *WITHOUT_GPU], at.decode, environment)
        ports = {name: free_port() for name, kind in KINDS.items() if not kind.missing}
        for name, port in ports.items():
            program, *arguments = KINDS[name].command(at, port)
            start(program, arguments, port, dict(os.environ))
        yield Deployment(at, ports, scripts, start_prefill, prefill)
    finally:
        for script in scripts:
            script.close()


@each_router
def test_completions_have_the_tokens_of_transformers_by_what_prefill_computed(
    deployment: Deployment, reference: Reference, router: str
) -> None:
    before = deployment.prompt_tokens_at_decode("external_kv_transfer")
    lengths = (3, 100, 300)
    for length in lengths:
        case = reference.case(length)
        assert deployment.ask(router, case) == case.tokens
    # vLLM computes the last one of each anew, and may count it either way.
    taken = deployment.prompt_tokens_at_decode("external_kv_transfer") - before
    assert sum(lengths) - len(lengths) <= taken <= sum(lengths)


@pytest.mark.skipif(all(kind.missing for kind in KINDS.values()), reason="no router is installed")
def test_a_prefill_that_was_killed_is_told_to_clients_and_serves_when_it_is_back(
    deployment: Deployment, reference: Reference
) -> None:
    """The last test here: routers stay with their opinion of a worker for a while."""
    deployment.prefill.signal(signal.SIGKILL)
    cases = [reference.case(100) for _ in deployment.ports]
    with ThreadPoolExecutor(len(cases)) as clients:
        outcomes = dict(zip(deployment.ports, clients.map(deployment.outcome, deployment.ports, cases), strict=True))
    print("after the kill:", outcomes)
    assert all(status >= 500 and seconds < DEAD_SECONDS for status, seconds in outcomes.values())
    deployment.start_prefill()
    for router in deployment.ports:
        end = time.monotonic() + 120
        case = reference.case(100)
        while deployment.outcome(router, case)[0] != 200:
            assert time.monotonic() < end, f"{router} does not come back to it"
            time.sleep(1)
