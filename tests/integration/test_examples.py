"""The programs of examples/ do what they say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.pull.model import PullConfig
from kvgrpc.server import IndexServer, RegistryServer
from tests.support.cache_serving import CacheRank, hashes_of, open_cache_rank, prompt
from tests.support.waiting import wait_until

ROUTER = Path(__file__).parents[2] / "examples/engine/router.py"
SCORES = Path(__file__).parents[2] / "examples/router/router.py"
ROUTER_IN_GO = Path(__file__).parents[2] / "clients/go/examples/router"
GO_PATH = f"{os.environ.get('PATH', '')}:/usr/local/go/bin"
WARM = Path(__file__).parents[2] / "examples/prefetch/warm.py"


@pytest.mark.skipif(not (find_spec("torch") and find_spec("mooncake")), reason="install kvgrpc[demo] for it")
@pytest.mark.timeout(180)
def test_the_toy_engine_hands_over_a_prompt_a_rest_of_one_and_gives_one_up() -> None:
    ran = subprocess.run([sys.executable, ROUTER], capture_output=True, text=True, timeout=170, check=False)
    assert ran.stdout.splitlines() == [
        "prefill {'room': 1, 'end': 'Success', 'why': '', 'sent': 3}",
        "decode  {'room': 1, 'end': 'Success', 'why': '', 'right': True, 'first_token': 1021}",
        "prefill {'room': 2, 'end': 'Success', 'why': '', 'sent': 3}",
        "decode  {'room': 2, 'end': 'Success', 'why': '', 'right': True, 'first_token': 1010}",
        "prefill {'room': 3, 'end': 'Failed', 'why': 'ROOM_CANCELLED', 'sent': 0}",
        "decode  {'room': 3, 'end': 'Failed', 'why': 'ROOM_CANCELLED'}",
    ], ran.stderr


def test_a_router_warms_a_cache_before_it_sends_the_request(tmp_path: Path) -> None:
    cache = open_cache_rank(tmp_path)
    cache.store(hashes_of(prompt(20)))
    said = []
    for tokens in (prompt(22), prompt(22), prompt(5, first=9)):
        ran = subprocess.run(
            [sys.executable, WARM, cache.address],
            input=json.dumps(tokens),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        said.append(ran.stdout.split(" tokens")[0])
    assert said == ["80 of 88", "80 of 88", "0 of 20"]
    cache.assert_bytes(hashes_of(prompt(20)))
    assert len(cache.manager.controller.book.all()) == 2, "a backup, and one prefetch: the second request was covered"
    cache.close()


@pytest.fixture(params=["python", pytest.param("go", marks=pytest.mark.slow)])
def router(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The command of the example, in each language in which there is one."""
    if request.param == "python":
        return [sys.executable, str(SCORES)]
    go = shutil.which("go", path=GO_PATH)
    if go is None:
        pytest.skip("there is no Go here")
    subprocess.run([go, "build", "-o", str(tmp_path / "router"), "."], cwd=ROUTER_IN_GO, check=True, timeout=300)
    return [str(tmp_path / "router")]


@pytest.mark.timeout(400)
def test_a_router_has_pages_of_a_busy_engine_pulled_to_an_idle_one(router: list[str], tmp_path: Path) -> None:
    registry = RegistryServer(["127.0.0.1:0"]).open()
    index = IndexServer(["127.0.0.1:0"], registry=registry.address).open()
    tokens = prompt(12)

    def engine(name: str, waiting: int) -> CacheRank:
        rank = open_cache_rank(
            tmp_path, None, engine=name, registry=registry.address, pull=PullConfig(), events={"publisher": "null"}
        )
        rank.rank.load.say(prefill_tokens_per_second=100.0, waiting_tokens=waiting)
        return rank

    busy, idle = engine("busy", 100_000), engine("idle", 0)
    busy.fill(hashes_of(tokens))
    try:
        with SyncClient(index.address) as client:
            wait_until(lambda: sum(each.blocks for source in client.list_sources() for each in source.blocks) == 12)
            wait_until(lambda: len(client.list_sources()) == 2)
        # What the ranks have to do is heard with their next heartbeat.
        wait_until(lambda: _routed(router, registry, index, tokens) == ("idle", "busy", 12), 20.0)
        idle.assert_bytes(hashes_of(tokens))
        wait_until(lambda: _routed(router, registry, index, tokens) == ("idle", None, 12), 20.0)
    finally:
        for each in (busy, idle, index, registry):
            each.close()


def _routed(
    router: list[str], registry: RegistryServer, index: IndexServer, tokens: list[int]
) -> tuple[object, object, object]:
    ran = subprocess.run(
        [*router, "--registry", registry.address, "--index", index.address],
        input=json.dumps({"tokens": tokens}),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    answer = json.loads(ran.stdout)
    return answer["engine"], answer["pulled_from"], answer["blocks"]
