"""The demo's engine as deploy/compose.yaml starts it: its commands, environments and health checks, as plain processes.

Only names differ: each service has an address of 127.0.0.0/8 of its own, as it has one in compose's network.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest
import yaml

from kvgrpc.client import SyncClient, SyncIndexes
from kvgrpc.v1 import index_service_pb2 as pb
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
INDEXES = ("index", "index-2")
SERVICES = ("registry", *INDEXES, "prefill", "decode", "router")
STATE = "/var/lib/kvgrpc"
# What an image starts, here.
PROGRAMS = {"kvgrpc": ["-m", "kvgrpc"], "kvgrpc-demo": ["-m", "kvgrpc.demo.service"]}
# Two of them load torch, on a machine that is busy.
START_SECONDS, END_SECONDS = 120.0, 60.0
# In which questions go on after one of two indexes was killed, and how many of them may stay without an answer.
ASKED_SECONDS, WITHOUT_SECONDS = 2.0, 1.0
open_url = build_opener(ProxyHandler({})).open

pytestmark = [
    pytest.mark.timeout(2 * START_SECONDS + 60),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the demo's engine needs torch"),
]


class Services:
    """Registry, indexes, prefill, decode and router, once each is healthy by its own check."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Ports are compose's, so the network is one that no other run of this test has.
        network = f"127.{64 + secrets.randbelow(128)}.{secrets.randbelow(256)}"
        self._hosts = {name: f"{network}.{number}" for number, name in enumerate(SERVICES, 1)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for name in SERVICES:  # in the order of depends_on
            for needed in COMPOSE[name].get("depends_on", ()):
                wait_until(partial(self._is_healthy, needed), START_SECONDS)
            self._folder.joinpath(name).mkdir()
            service = COMPOSE[name]
            self.processes[name] = subprocess.Popen(
                [sys.executable, *PROGRAMS[service["image"]], *self._here(name, service["command"])],
                env=self._environment(name),
                cwd=ROOT,
            )
        wait_until(partial(self._is_healthy, "router"), START_SECONDS)

    def address(self, name: str, port: int) -> str:
        return f"{self._hosts[name]}:{port}"

    def end(self) -> dict[str, int]:
        """Exit codes, after SIGTERM to each in turn, the last one first."""
        for process in reversed(list(self.processes.values())):
            process.send_signal(signal.SIGTERM)
            process.wait(END_SECONDS)
        return {name: process.returncode for name, process in self.processes.items()}

    def kill(self, *names: str) -> None:
        """Those of these names, or all."""
        for name in names or self.processes:
            self.processes[name].kill()
            self.processes[name].wait(END_SECONDS)

    def _here(self, name: str, words: list[str]) -> list[str]:
        """What compose says inside of ``name``, with addresses in the place of names."""
        hosts = self._hosts | {"0.0.0.0": self._hosts[name], "127.0.0.1": self._hosts[name]}
        named = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, hosts))})(?=:\d)")
        folder = str(self._folder / name)
        return [named.sub(lambda found: hosts[found[1]], word).replace(STATE, folder) for word in words]

    def _environment(self, name: str) -> dict[str, str]:
        told = COMPOSE[name].get("environment", {})
        here = dict(zip(told, self._here(name, list(told.values())), strict=True))
        return {key: value for key, value in os.environ.items() if not key.startswith("KVGRPC_")} | here

    def _is_healthy(self, name: str) -> bool:
        assert self.processes[name].poll() is None, f"{name} ended with {self.processes[name].returncode}"
        shell, program, *words = self._here(name, COMPOSE[name]["healthcheck"]["test"])
        assert shell == "CMD"
        started = {"kvgrpc": [sys.executable, "-m", "kvgrpc"], "python": [sys.executable]}[program]
        return subprocess.run([*started, *words], cwd=ROOT, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    started = Services(tmp_path_factory.mktemp("services"))
    try:
        started.start()
        yield started
    finally:
        started.kill()


def asked(services: Services, **question: Any) -> dict[str, Any]:
    url = f"http://{services.address('router', 8000)}/generate"
    with open_url(url, json.dumps(question).encode(), timeout=END_SECONDS) as response:
        answer: dict[str, Any] = json.loads(response.read())
        return answer


def test_the_line_in_compose_is_answered_as_by_one_process(services: Services) -> None:
    """And so is a prompt of several chunks, whose pages go while the rest is computed."""
    from kvgrpc.demo.engine.config import PREFILL
    from kvgrpc.demo.engine.engine import DemoEngine
    from kvgrpc.demo.engine.paging import OwnMemory
    from kvgrpc.demo.processes.reference import answer
    from kvgrpc.demo.prompts import built_in, tokens_of

    (line,) = re.findall(r"curl 127\.0\.0\.1:8000/generate -d (.*)$", (ROOT / "deploy/compose.yaml").read_text(), re.M)
    question = json.loads(shlex.split(line)[0])
    longer = list(built_in()[1].tokens)
    one_process = DemoEngine(PREFILL, OwnMemory())
    for told, prompt in ((question, tokens_of(question["prompt"])), ({"prompt": longer, "tokens": 8}, longer)):
        tokens = asked(services, **told)["tokens"]
        assert len(tokens) == told.get("tokens", 32)
        assert tokens == answer(one_process, prompt, len(tokens))[0]


def test_both_engines_are_registered_and_the_hand_off_is_told(services: Services) -> None:
    room = asked(services, prompt="which room is this?")["room"]
    with SyncClient(services.address("registry", 8998)) as registry:
        assert sorted(each.name for each in registry.list_engines()) == ["decode", "prefill"]
    told = subprocess.run(
        [sys.executable, "-m", "kvgrpc", "why", str(room), "-s", services.address("registry", 8998)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=END_SECONDS,
    )
    assert told.returncode == 0 and "SUCCESS: " in told.stdout, told.stdout + told.stderr


def test_a_question_that_is_none_is_refused_with_what_one_is(services: Services) -> None:
    questions: tuple[dict[str, Any], ...] = (
        {},
        {"prompt": [2000]},
        {"prompt": []},
        {"prompt": "x" * 5000},
        {"prompt": "x", "tokens": 0},
    )
    for question in questions:
        with pytest.raises(HTTPError) as refused:
            asked(services, **question)
        assert refused.value.code == 400 and b"prompt" in refused.value.read()


def test_one_of_two_indexes_answers_while_the_other_is_killed(services: Services) -> None:
    asked(services, prompt="something that is cached since then")
    addresses = [services.address(name, 8997) for name in INDEXES]

    def held(address: str) -> list[tuple[str, int]]:
        with SyncClient(address) as index:
            return [(source.engine, sum(each.blocks for each in source.blocks)) for source in index.list_sources()]

    wait_until(lambda: held(addresses[0]) == held(addresses[1]) and any(blocks for _, blocks in held(addresses[0])))
    question = pb.PlanRequest(prompts=[pb.PlanPrompt(prompt=pb.ScorePrompt(block_hashes=pb.BlockHashes(values=[1])))])
    with SyncIndexes(addresses) as indexes:
        assert indexes.plan(question, ASKED_SECONDS) is not None
        services.kill(INDEXES[0])
        killed_at = time.monotonic()
        answered: list[float] = []
        while time.monotonic() < killed_at + ASKED_SECONDS:
            if indexes.plan(question) is not None:
                answered.append(time.monotonic() - killed_at)
        gaps = [after - before for before, after in pairwise([0.0, *answered, ASKED_SECONDS])]
        assert max(gaps) < WITHOUT_SECONDS, gaps


def test_sigterm_ends_each_in_good_order(services: Services) -> None:
    """Runs last: what these processes registered is taken back by them, and no lease has to run out."""
    assert services.end() == dict.fromkeys(SERVICES, 0) | {INDEXES[0]: -signal.SIGKILL}
