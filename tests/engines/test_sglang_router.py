"""SGLang's own router (sglang-router) in front of two prefills and two decodes, one of each killed.

The router tells neither side which engine the other half of a request went to, and waits for both halves.
"""

from __future__ import annotations

import itertools
import signal
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
# What a try at a killed engine takes until the router hears of it: prefill ends a request that no decode names after
# 10 s, and decode one whose prefill cannot be reached after 5 s (docs/session/loss.md).
TRY_SECONDS = {"decode": 10.0, "prefill": 5.0}
TRIES = 5  # by the router's defaults
# For the one that serves, and for a machine on which an engine starts meanwhile.
BUSY_SECONDS = 20.0
CLIENTS = 3


@dataclass
class Answer:
    """``status`` 0: none within a client's patience."""

    status: int = 0
    body: Any = None
    seconds: float = 0.0

    @property
    def tokens(self) -> list[int]:
        return list(self.body["output_ids"]) if self.status == 200 else []


class Place:
    """One engine: its port, and the script that runs it, which may be killed and started again."""

    def __init__(self, script: str, arguments: list[str], environment: dict[str, str], folder: Path, port: int) -> None:
        self.port = port
        self._opens: Callable[[], Script] = lambda: Script(script, arguments, environment, folder)
        self.script = self._opens()

    def kill(self) -> None:
        self.script.signal(signal.SIGKILL)

    def start_again(self) -> None:
        """Returns when the router sends it requests again."""
        self.script.close()
        self.script = self._opens()
        self.script.wait_healthy(self.port)
        own, end = self._served(), time.monotonic() + 200  # SGLang's own, to warm up
        while self._served() < own + 2:
            assert time.monotonic() < end, f"the router does not come back to it\n{self.script.tail()}"
            time.sleep(0.5)

    def _served(self) -> int:
        return self.script.log.read_text(errors="replace").count('"POST /generate')


@dataclass
class Deployment:
    router: int
    prefills: list[Place]
    decodes: list[Place]
    scripts: list[Script]

    def ask(self, case: Case, seconds: float = CLIENT_SECONDS, **more: Any) -> Answer:
        """As a client does that waits so long. ``more``: of the sampling parameters."""
        answer, began = Answer(), time.monotonic()
        try:
            answer.body = self.post({"input_ids": case.prompt}, len(case.tokens), seconds, **more)
            answer.status = 200
        except urllib.error.HTTPError as error:
            answer.status = error.code
        except (OSError, HTTPException):
            pass
        answer.seconds = time.monotonic() - began
        return answer

    def post(self, body: dict[str, Any], new_tokens: int, seconds: float = CLIENT_SECONDS, **more: Any) -> Any:
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True, **more}
        return post(self.router, "/generate", {**body, "sampling_params": sampling}, seconds)

    @contextmanager
    def asked_meanwhile(self, cases: list[Case], seconds: float) -> Iterator[list[tuple[Case, Answer]]]:
        """Clients that ask one request after the other and wait so long for each, and what they got."""
        answers: list[tuple[Case, Answer]] = []
        over = threading.Event()

        def ask_on(own: list[Case]) -> None:
            for case in itertools.cycle(own):
                if over.is_set():
                    return
                answers.append((case, self.ask(case, seconds)))

        threads = [threading.Thread(target=ask_on, args=(cases[number::CLIENTS],)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield answers
        finally:
            over.set()
            for thread in threads:
                thread.join()

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
    router = free_port()
    environment = {
        **Engine.environment(folder, {}, {}),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "BASE_GPU_ID": "0",
        "ROUTER_PORT": str(router),
    }
    arguments = [str(reference.path), *WITHOUT_GPU]
    without_backup = ("--disaggregation-decode-retraction-backup", "none")
    places: list[Place] = []
    scripts: list[Script] = []

    def opened(role: str, more: tuple[str, ...] = (), **ports: int) -> Place:
        named = {f"{name.upper()}_PORT": str(port) for name, port in ports.items()}
        place = Place(f"sglang/{role}.sh", [*arguments, *more], {**environment, **named}, folder, ports[role])
        places.append(place)
        return place

    bootstraps = [free_port() for _ in range(2)]
    try:
        prefills = [opened("prefill", prefill=free_port(), bootstrap=bootstrap) for bootstrap in bootstraps]
        decodes = [opened("decode", without_backup, decode=free_port()) for _ in range(2)]
        for place in places:
            place.script.wait_healthy(place.port)
        first = {"PREFILL_PORT": prefills[0].port, "BOOTSTRAP_PORT": bootstraps[0], "DECODE_PORT": decodes[0].port}
        more = [
            *("--prefill", f"http://{LOCAL}:{prefills[1].port}", str(bootstraps[1])),
            *("--decode", f"http://{LOCAL}:{decodes[1].port}"),
            *("--policy", "round_robin", "--prometheus-port", str(free_port())),
        ]
        named = {name: str(port) for name, port in first.items()}
        scripts.append(Script("sglang/router.sh", more, {**environment, **named}, folder))
        deployment = Deployment(router, prefills, decodes, scripts)
        _wait_until_served(deployment, reference)
        yield deployment
    finally:
        for script in [*scripts, *(place.script for place in places)]:
            script.close()


def _wait_until_served(deployment: Deployment, reference: Reference) -> None:
    """The router says that it is healthy before it has engines."""
    end = time.monotonic() + 60
    while deployment.ask(reference.case(20)).status != 200:
        assert time.monotonic() < end, deployment.scripts[0].tail()
        time.sleep(0.5)


def test_requests_over_the_router_have_the_tokens_of_transformers(deployment: Deployment, reference: Reference) -> None:
    cases = [reference.case(length) for length in (3, 40, 100, 300, 5, 60, 150, 250)]
    answers = deployment.ask_at_once(cases)
    assert [answer.tokens for answer in answers] == [case.tokens for case in cases]


def test_samples_batches_and_log_probabilities_come_through_it(deployment: Deployment, reference: Reference) -> None:
    case, other = reference.case(100), reference.case(40)
    samples = deployment.ask(case, n=2).body
    assert [sample["output_ids"] for sample in samples] == [case.tokens] * 2
    batch = deployment.post({"input_ids": [case.prompt, other.prompt]}, len(case.tokens))
    assert [each["output_ids"] for each in batch] == [case.tokens, other.tokens]
    with_logprobs = deployment.post({"input_ids": case.prompt, "return_logprob": True}, len(case.tokens))
    told = with_logprobs["meta_info"]["output_token_logprobs"]
    assert [token for _, token, *_ in told] == case.tokens


@pytest.mark.parametrize("number", [0, 1], ids=["the first", "the second"])
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_one_that_was_killed_under_load_and_comes_back_serves_again(
    deployment: Deployment, reference: Reference, role: str, number: int
) -> None:
    """No request hangs, none has wrong tokens, and hardly one is lost."""
    place = (deployment.decodes if role == "decode" else deployment.prefills)[number]
    most = TRIES * TRY_SECONDS[role] + BUSY_SECONDS
    cases = [reference.case(length) for length in (40, 100, 200) * 4]
    with deployment.asked_meanwhile(cases, most) as answers:
        time.sleep(5)  # of load before the kill
        place.kill()
        place.start_again()
        time.sleep(5)  # of load after it is back
    bad = [answer for _, answer in answers if answer.status != 200]
    slowest = max(answer.seconds for _, answer in answers)
    print(f"{role}: {len(answers)} requests, {[answer.status for answer in bad]}, the slowest {slowest:.1f} s")
    for case, answer in answers:
        assert answer.status, f"no answer in {most:g} s\n{deployment.scripts[0].tail()}"
        assert answer.status >= 500 or answer.tokens == case.tokens
    # What the kill cuts off, one request of each client, the router tries again. Any is lost only if all its tries go
    # to the killed engine, which the router leaves out after ten failures.
    assert len(bad) <= CLIENTS
    cases = [reference.case(60) for _ in range(6)]
    assert [answer.tokens for answer in deployment.ask_at_once(cases)] == [case.tokens for case in cases]


def test_after_a_decode_was_killed_no_request_hangs(deployment: Deployment, reference: Reference) -> None:
    """Half of them the router still sends to the dead one: prefill has their other halves. The last test here."""
    cases = [reference.case(100) for _ in range(6)]
    deployment.decodes[1].kill()
    answers = deployment.ask_at_once(cases)
    print("after the kill:", [(answer.status, round(answer.seconds, 2)) for answer in answers])
    for case, answer in zip(cases, answers, strict=True):
        assert answer.status, f"no answer in {CLIENT_SECONDS:g} s\n{deployment.scripts[-1].tail()}"
        assert answer.tokens == case.tokens or answer.status >= 500
    # Those that the router sends to the live one first, each second one.
    assert sum(answer.status == 200 for answer in answers) >= len(cases) // 2
