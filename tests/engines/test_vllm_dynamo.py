"""Dynamo's frontend in front of two `vllm serve`, each with Dynamo's own worker for vLLM's gRPC beside it.

Its other worker, `dynamo.vllm`, starts vLLM in its own process, and 1.6.1 does not load beside vLLM 0.33.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engine import LOCAL, ROOT
from tests.engines.model import VOCABULARY, Case, Reference
from tests.engines.scripts import Script, get, post
from tests.engines.vllm_engine import WITHOUT_GPU, VllmEngine
from tests.support.ports import free_port

# An environment of its own: the package brings plug-ins for vLLM and for pytest.
PYTHON = ROOT / ".venv-dynamo/bin/python"
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="Dynamo is not installed: .ci/setup dynamo"),
]
FIRST = 0x4E00  # the character of token 0
CLIENT_SECONDS = 60.0


def with_tokenizer(model: Path, to: Path) -> Path:
    """A copy of it whose tokens are a character each: Dynamo's frontend answers with text alone."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    shutil.copytree(model, to)
    tokenizer = Tokenizer(models.WordLevel({chr(FIRST + token): token for token in range(VOCABULARY)}, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(to / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "bos_token": chr(FIRST + 1)}
    about["eos_token"] = chr(FIRST + 2)
    (to / "tokenizer_config.json").write_text(json.dumps(about))
    return to


@dataclass
class Deployment:
    model: str
    frontend: int
    decode: int
    scripts: dict[str, Script]
    start_prefill: Callable[[], None]

    def ask(self, case: Case) -> list[int]:
        body: dict[str, Any] = {"model": self.model, "prompt": case.prompt, "max_tokens": len(case.tokens)}
        body.update(temperature=0, ignore_eos=True)
        (choice,) = post(self.frontend, "/v1/completions", body, CLIENT_SECONDS)["choices"]
        return [ord(character) - FIRST for character in choice["text"]]

    def wait_served(self, case: Case, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                assert self.ask(case) == case.tokens
                return
            except (OSError, urllib.error.HTTPError) as error:
                assert time.monotonic() < end, f"{error}\n" + "\n".join(each.tail() for each in self.scripts.values())
            time.sleep(1)

    def prompt_tokens_at_decode(self, source: str) -> int:
        """vLLM's own count."""
        pattern = rf'vllm:prompt_tokens_by_source_total\{{[^}}]*source="{source}"[^}}]*\}} (\S+)'
        return int(sum(float(count) for count in re.findall(pattern, get(self.decode, "/metrics"))))


@pytest.fixture(scope="module")
def deployment(folder: Path, reference: Reference) -> Iterator[Deployment]:
    model = str(with_tokenizer(reference.path, folder / "dynamo" / "model"))
    ports = {name: free_port() for name in ("prefill", "decode", "bootstrap", "frontend")}
    grpc = {"prefill": free_port(), "decode": free_port()}
    environment = {
        **VllmEngine.environment(folder, {}, {}),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **{f"{name.upper()}_PORT": str(port) for name, port in ports.items()},
        "VLLM_USE_RUST_FRONTEND": "1",
    }
    dynamo = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "dynamo" / "discovery"),
    }
    dynamo.update(DYN_REQUEST_PLANE="tcp", DYN_EVENT_PLANE="zmq", DYN_TCP_RPC_HOST=LOCAL)
    scripts: dict[str, Script] = {}

    def start_engine(role: str) -> None:
        arguments = [option for option in WITHOUT_GPU if option != "--skip-tokenizer-init"]
        more = ["--host", LOCAL, "--grpc-port", str(grpc[role])]
        scripts[role] = Script(f"vllm/{role}.sh", [model, *arguments, *more], environment, folder)
        scripts[role].wait_healthy(ports[role])

    def start_worker(role: str) -> None:
        command = ["-m", "dynamo.vllm.sidecar", "--grpc-endpoint", f"{LOCAL}:{grpc[role]}"]
        command += ["--disaggregation-mode", role, *(["--component", "prefill"] if role == "prefill" else [])]
        scripts[f"worker {role}"] = Script(str(PYTHON), command, dynamo, folder)

    def start_prefill() -> None:
        for name in ("worker prefill", "prefill"):
            if name in scripts:
                scripts[name].close()
        start_engine("prefill")
        start_worker("prefill")

    try:
        start_prefill()
        start_engine("decode")
        start_worker("decode")
        command = ["-m", "dynamo.frontend", "--http-host", LOCAL, "--http-port", str(ports["frontend"])]
        scripts["frontend"] = Script(str(PYTHON), command, dynamo, folder)
        scripts["frontend"].wait_healthy(ports["frontend"], "/live")
        deployment = Deployment(model, ports["frontend"], ports["decode"], scripts, start_prefill)
        deployment.wait_served(reference.case(20), 60)
        yield deployment
    finally:
        for script in scripts.values():
            script.close()


def test_completions_have_the_tokens_of_transformers_by_what_prefill_computed(
    deployment: Deployment, reference: Reference
) -> None:
    before = deployment.prompt_tokens_at_decode("external_kv_transfer")
    lengths = (3, 100, 300)
    for length in lengths:
        case = reference.case(length)
        assert deployment.ask(case) == case.tokens
    # vLLM computes the last one of each anew, and may count it either way.
    taken = deployment.prompt_tokens_at_decode("external_kv_transfer") - before
    assert sum(lengths) - len(lengths) <= taken <= sum(lengths)


def test_a_prefill_that_was_killed_is_told_to_clients_and_serves_when_it_is_back(
    deployment: Deployment, reference: Reference
) -> None:
    deployment.scripts["prefill"].signal(signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(urllib.error.HTTPError) as refused:
        deployment.ask(reference.case(100))
    print(f"after the kill: {refused.value.code} in {time.monotonic() - began:.1f} s")
    assert refused.value.code >= 500
    deployment.start_prefill()
    deployment.wait_served(reference.case(100), 120)
