"""The Rust client against a real registry that wants tokens: its example is what its README says."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.server import RegistryServer
from kvgrpc.v1 import registry_service_pb2 as registry_pb
from tests.support.publishing import Publishing
from tests.support.rank_host import RankHost
from tests.support.registry_builders import row as made_row
from tests.support.registry_serving import Served
from tests.support.rust import built_example
from tests.support.waiting import wait_until

SECRET = "9f86d081884c7d659a2feaa0c55ad015"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def example() -> str:
    return built_example("engines")


@pytest.fixture(scope="module")
def tail_program() -> str:
    return built_example("tail")


class Tail:
    """The example that follows a cache, line by line."""

    def __init__(self, program: str, address: str, **environment: str) -> None:
        environ = {**os.environ, **environment}
        self.process = subprocess.Popen([program, address], stdout=subprocess.PIPE, text=True, env=environ)
        self._timer = threading.Timer(120.0, self.process.kill)
        self._timer.start()

    def until(self, *words: str) -> str:
        """The next line that holds all the words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if all(word in line for word in words):
                return line
        raise AssertionError(f"it ended before a line with {words}")

    def close(self) -> None:
        self._timer.cancel()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"consumer:{SECRET}\nrank:{SECRET}r\n")
    server = RegistryServer(["127.0.0.1:0"], lease_ttl=60.0, security=ServerSecurity(token_file=str(tokens))).open()
    yield server.address
    server.close()


def run(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([example, *arguments], capture_output=True, text=True, timeout=60)


def test_engines_are_listed_and_a_refusal_has_its_reason_and_metadata(example: str) -> None:
    rank = RankHost("P", "PREFILL", {"registry": "embedded", "lease_ttl": 1.0})
    lines = ["P ROLE_PREFILL ready=true", "EngineNotFound engine=nobody"]
    wait_until(lambda: run(example, rank.rank.address).stdout.splitlines() == lines)  # a registry warms up for a lease
    rank.close(2.0)


def test_a_token_lets_in_and_none_does_not(example: str, registry: str) -> None:
    assert run(example, registry, SECRET).stdout.splitlines() == ["WarmingUp engine=nobody"]
    refused = run(example, registry)
    assert refused.returncode == 1 and "CredentialsInvalid" in refused.stderr
    assert "ShortSecret" in run(example, registry, "short").stderr


@pytest.mark.parametrize("encoding", [{}, {"TYPED": "1"}], ids=["raw", "typed"])
async def test_the_example_follows_an_engine_over_a_restart(tail_program: str, encoding: dict[str, str]) -> None:
    async with Publishing(snapshots=True) as engine:
        tail = Tail(tail_program, engine.address, **encoding)
        try:
            await engine.store([1, 2, 3])
            await engine.remove([2])
            await asyncio.to_thread(tail.until, "[GPU 0: 2]", "digest equal: true")
            before = engine.publisher.stream.log_id
            await engine.restart()
            await engine.store([7, 8, 9])
            line = await asyncio.to_thread(tail.until, "log ", ": from the beginning")
            assert before not in line and engine.publisher.stream.log_id in line
            await asyncio.to_thread(tail.until, "[GPU 0: 3]", "digest equal: true")
        finally:
            tail.close()


class Registered:
    """The example that keeps a row registered, line by line."""

    def __init__(self, engine: str, epoch: int, addresses: str) -> None:
        command = [built_example("register"), engine, str(epoch), addresses]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._timer = threading.Timer(120.0, self.process.kill)
        self._timer.start()

    def line(self, *words: str) -> str:
        """The next line, which begins with one of the words."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(words), line
        return line

    def end(self) -> None:
        self._timer.cancel()
        self.process.communicate(timeout=30)


async def test_a_row_stays_registered_over_a_restart_of_its_registry_until_a_newer_one_takes_it() -> None:
    served = (await Served(ttl=1.0).start()).grown_up()
    row = await asyncio.to_thread(Registered, "P", 7, served.address)
    try:
        await asyncio.to_thread(row.line, "registered")
        await served.stop()
        await asyncio.to_thread(row.line, "retrying")
        again = (await Served(ttl=1.0).start(served.port)).grown_up()
        while "registered" not in await asyncio.to_thread(row.line, "registered", "retrying"):
            pass
        engine = (await again.stub.GetEngine(registry_pb.GetEngineRequest(engine="P"), timeout=10)).engine
        assert [each.rank.epoch for each in engine.rows] == [7]
        await again.register(made_row("P", epoch=9))
        while "superseded by epoch 9" not in await asyncio.to_thread(row.line, "superseded", "retrying"):
            pass
        await asyncio.to_thread(row.line, "closed")
    finally:
        row.end()
    engine = (await again.stub.GetEngine(registry_pb.GetEngineRequest(engine="P"), timeout=10)).engine
    assert [each.rank.epoch for each in engine.rows] == [9], "what was taken over is not the old one's to remove"
    await again.stop()


async def test_a_row_that_is_closed_is_gone() -> None:
    served = (await Served().start()).grown_up()
    row = await asyncio.to_thread(Registered, "P", 7, served.address)
    await asyncio.to_thread(row.line, "registered")
    await asyncio.to_thread(row.end)
    listed = await served.stub.ListEngines(registry_pb.ListEnginesRequest(), timeout=10)
    assert not listed.engines
    await served.stop()
