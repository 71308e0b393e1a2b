"""SGLang's own router (sglang-router) in front of one prefill and two decodes, of which one is killed.

The router tells neither side which engine the other half of a request went to, and waits for both halves.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from tests.engines.engine import LOCAL, Engine
from tests.engines.model import Case, Reference
from tests.engines.scripts import WITHOUT_GPU, Script, post
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(1000)
# docs/engines/sglang.md, "Faults": prefill ends a request of a dead decode after 10 s, and the router tries again, with
# its defaults as often as not at the dead one. Without that it waited for prefill's 300 s.
CLIENT_SECONDS = 60.0


@dataclass
class Answer:
    """``status`` 0: none within a client's patience."""

    status: int = 0
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Deployment:
    router: int
    decodes: dict[str, Script]
    scripts: list[Script]

    def ask(self, case: Case, **more: Any) -> Answer:
        """As a client does that waits a minute."""
        sampling = {"max_new_tokens": len(case.tokens), "temperature": 0, "ignore_eos": True}
        answer, began = Answer(), time.monotonic()
        try:
            body = post(
                self.router, "/generate", {"input_ids": case.prompt, "sampling_params": sampling}, CLIENT_SECONDS
            )
            answer.status, answer.tokens = 200, body["output_ids"]
        except urllib.error.HTTPError as error:
            answer.status = error.code
        except (OSError, HTTPException):
            pass
        answer.seconds = time.monotonic() - began
        return answer

    def ask_at_once(self, cases: list[Case]) -> list[Answer]:
        answers: list[Answer] = [Answer()] * len(cases)

        def ask(number: int) -> None:
            answers[number] = self.ask(cases[number])

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(cases))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers


@pytest.fixture(scope="module")
def deployment(folder: Path, reference: Reference) -> Iterator[Deployment]:
    names = ("PREFILL_PORT", "BOOTSTRAP_PORT", "DECODE_PORT", "ROUTER_PORT")
    ports = {name: free_port() for name in names}
    other = free_port()
    environment = {
        **Engine.environment(folder, {}, {}),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "BASE_GPU_ID": "0",
        **{name: str(port) for name, port in ports.items()},
    }
    arguments = [str(reference.path), *WITHOUT_GPU]
    without_backup = ("--disaggregation-decode-retraction-backup", "none")
    scripts: list[Script] = []
    try:
        scripts.append(Script("sglang/prefill.sh", arguments, environment, folder))
        decodes = {}
        for name, port in (("first", ports["DECODE_PORT"]), ("second", other)):
            decode = Script(
                "sglang/decode.sh", [*arguments, *without_backup], {**environment, "DECODE_PORT": str(port)}, folder
            )
            scripts.append(decode)
            decodes[name] = decode
        scripts[0].wait_healthy(ports["PREFILL_PORT"])
        decodes["first"].wait_healthy(ports["DECODE_PORT"])
        decodes["second"].wait_healthy(other)
        more = ["--decode", f"http://{LOCAL}:{other}", "--policy", "round_robin", "--prometheus-port", str(free_port())]
        scripts.append(Script("sglang/router.sh", more, environment, folder))
        deployment = Deployment(ports["ROUTER_PORT"], decodes, scripts)
        _wait_until_served(deployment, reference)
        yield deployment
    finally:
        for script in reversed(scripts):
            script.close()


def _wait_until_served(deployment: Deployment, reference: Reference) -> None:
    """The router says that it is healthy before it has engines."""
    end = time.monotonic() + 60
    while deployment.ask(reference.case(20)).status != 200:
        assert time.monotonic() < end, "\n".join(script.tail() for script in deployment.scripts)
        time.sleep(0.5)


def test_requests_over_the_router_have_the_tokens_of_transformers(deployment: Deployment, reference: Reference) -> None:
    cases = [reference.case(length) for length in (3, 40, 100, 300, 5, 60, 150, 250)]
    answers = deployment.ask_at_once(cases)
    assert [answer.tokens for answer in answers] == [case.tokens for case in cases]


def test_after_a_decode_was_killed_no_request_hangs(deployment: Deployment, reference: Reference) -> None:
    """Half of them the router still sends to the dead one: prefill has their other halves."""
    cases = [reference.case(100) for _ in range(6)]
    deployment.decodes["second"].signal(signal.SIGKILL)
    answers = deployment.ask_at_once(cases)
    print("after the kill:", [(answer.status, round(answer.seconds, 2)) for answer in answers])
    for case, answer in zip(cases, answers, strict=True):
        assert answer.status, f"no answer in {CLIENT_SECONDS:g} s\n{deployment.scripts[-1].tail()}"
        assert answer.tokens == case.tokens or answer.status >= 500
    assert any(answer.status == 200 for answer in answers)
