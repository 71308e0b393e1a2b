"""``NativePrefixIndex``: the index in Rust as a process of the Python program that asks it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from kvgrpc.client import ClientSecurity, NativePrefixIndex, SyncClient, native_index
from kvgrpc.v1 import index_service_pb2 as pb
from tests.support.publishing import Publishing
from tests.support.rust import built_index
from tests.support.waiting import until, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(autouse=True)
def program(monkeypatch: pytest.MonkeyPatch) -> str:
    built = built_index()
    monkeypatch.setattr(native_index, "native_index_program", lambda: built)
    return built


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if each.name() == native_index.PROGRAM]


async def blocks_told(index: NativePrefixIndex) -> list[int]:
    request = pb.ScoreRequest()
    request.prompts.add().block_hashes.values.extend([1, 2, 3])
    answer = await index.client.score(request)
    return [score.blocks for score in answer.prompts[0].scores]


async def told(index: NativePrefixIndex, blocks: list[int]) -> bool:
    return await blocks_told(index) == blocks


async def test_it_answers_as_long_as_it_is_open_and_settings_of_others_are_not_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVGRPC_CALL_LIMITS", "those of a server that this process runs")
    async with Publishing("P", snapshots=True) as engine:
        await engine.store([1, 2])
        async with NativePrefixIndex(sources=[engine.address]) as index:
            await until(lambda: told(index, [2]))
            with SyncClient(index.address) as client:
                (source,) = await asyncio.to_thread(client.list_sources)
            assert source.engine == "P" and index.healthy
            (process,) = children()
        assert not process.is_running() and not index.healthy


async def test_one_that_was_killed_is_started_anew_at_the_same_address() -> None:
    async with Publishing("P", snapshots=True) as engine:
        await engine.store([1, 2])
        async with NativePrefixIndex(sources=[engine.address]) as index:
            await until(lambda: told(index, [2]))
            (first,) = children()
            first.kill()
            await until(lambda: [each for each in children() if each != first])
            await until(lambda: told(index, [2]))
            assert index.healthy


OWNER = """
import asyncio, sys
from kvgrpc.client import ClientSecurity, NativePrefixIndex, native_index

async def main():
    async with NativePrefixIndex(sources=["127.0.0.1:1"]) as index:
        print(index.address, flush=True)
        await asyncio.sleep(600)

native_index.native_index_program = lambda: sys.argv[1]
asyncio.run(main())
"""


def test_it_ends_with_a_process_that_is_killed(program: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline().startswith("unix:")
    (index,) = psutil.Process(owner.pid).children()
    owner.kill()
    owner.wait()
    wait_until(lambda: not index.is_running())


def below(folder: Path) -> list[Path]:
    return list(folder.rglob("*"))


def files_below(folder: Path) -> list[Path]:
    return [path for path in below(folder) if path.is_file()]


async def test_its_secret_lies_nowhere_once_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    security = ClientSecurity(token="9f86d081884c7d659a2feaa0c55ad015")
    async with NativePrefixIndex(sources=["127.0.0.1:1"], security=security) as index:
        assert files_below(tmp_path) == []
        assert index.healthy
    assert below(tmp_path) == []
