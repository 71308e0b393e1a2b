"""The Go client's example against real servers: it follows an engine over a restart, and asks the index."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvgrpc.server import IndexServer
from tests.support.publishing import Publishing

EXAMPLE = Path(__file__).parents[2] / "clients" / "go" / "examples" / "tail"
SEARCH = f"{os.environ.get('PATH', '')}:/usr/local/go/bin"
GO = shutil.which("go", path=SEARCH)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(GO is None, reason="there is no Go here"),
    pytest.mark.timeout(300),
]


@pytest.fixture
async def built(tmp_path: Path) -> Path:
    build = await asyncio.create_subprocess_exec(
        str(GO), "build", "-o", str(tmp_path / "tail"), ".", cwd=EXAMPLE, env={**os.environ, "PATH": SEARCH}
    )
    assert await build.wait() == 0
    return tmp_path / "tail"


class Tail:
    """The example as a process, line by line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def until(self, *words: str) -> str:
        """The next line that holds all the words."""
        assert self.process.stdout is not None
        for _ in range(1000):
            line = (await asyncio.wait_for(self.process.stdout.readline(), 60)).decode()
            assert line, f"it ended after {self.lines}"
            self.lines.append(line)
            if all(word in line for word in words):
                return line
        raise AssertionError(f"no line with {words} among {self.lines[-20:]}")


@pytest.fixture
async def tail(built: Path) -> AsyncIterator[Tail]:
    async with Publishing(snapshots=True) as engine:
        index = await asyncio.to_thread(IndexServer(["127.0.0.1:0"], sources=[engine.address]).open)
        process = await asyncio.create_subprocess_exec(
            str(built), engine.address, index.address, stdout=asyncio.subprocess.PIPE
        )
        tail = Tail(process)
        tail.engine = engine  # type: ignore[attr-defined]
        yield tail
        process.kill()
        await process.wait()
        await asyncio.to_thread(index.close)


async def test_the_example_follows_an_engine_and_asks_the_index(tail: Tail) -> None:
    engine: Publishing = tail.engine  # type: ignore[attr-defined]
    await engine.store([1, 2, 3])
    await engine.remove([2])
    await tail.until("map[{GPU 0}:2]", "digest equal: true")
    await tail.until(": engine dp0 holds it", "INDEX_SOURCE_STATE_CURRENT")
    before = engine.publisher.stream.log_id
    await engine.restart()
    await engine.store([7, 8, 9])
    line = await tail.until("log ", ": from the beginning")
    assert before not in line and engine.publisher.stream.log_id in line
    await tail.until("map[{GPU 0}:3]", "digest equal: true")
