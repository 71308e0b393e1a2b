"""The examples of the clients' README.md run as they stand against a real publisher; Rust's, test_rust_client runs."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.publishing import Publishing

CLIENTS = Path(__file__).parents[2] / "clients"
SEARCH = f"{os.environ.get('PATH', '')}:/usr/local/go/bin"
GO = shutil.which("go", path=SEARCH)
DIRECT = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
pytestmark = pytest.mark.timeout(300)

# What the example leaves to its reader.
GO_PROGRAM = """package main

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	kvgrpc "kvgrpc.dev/go"
	kvgrpcv1 "kvgrpc.dev/go/kvgrpc/v1"
)

func main() {
	ctx := context.Background()
	EXAMPLE
}
"""


def example(language: str, shown: str, address: str) -> str:
    """The page's only block of a language, with the address of ours."""
    (text,) = re.findall(rf"```{shown}\n(.*?)```", (CLIENTS / language / "README.md").read_text(), re.DOTALL)
    assert '"127.0.0.1:50051"' in text
    return str(text).replace("127.0.0.1:50051", address)


@pytest.fixture
async def engine() -> AsyncIterator[Publishing]:
    async with Publishing(snapshots=True) as publishing:
        await publishing.store([1, 2**64 - 3, 5])
        yield publishing


async def follows(engine: Publishing, command: list[str], folder: Path, words: str) -> None:
    """The example's process says three blocks, and after a restart of the engine the one of the next log."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=DIRECT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        await heard(process, f"{words}3")
        await engine.restart()
        await engine.store([9])
        await heard(process, f"{words}1")
    finally:
        process.kill()
        await process.wait()


async def heard(process: asyncio.subprocess.Process, words: str) -> None:
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or words not in lines[-1]:
        lines.append((await asyncio.wait_for(process.stdout.readline(), 60)).decode())
        assert lines[-1], f"it ended after {lines}"


@pytest.mark.slow
@pytest.mark.skipif(GO is None, reason="there is no Go here")
async def test_the_example_for_go_follows_an_engine(engine: Publishing, tmp_path: Path) -> None:
    program = GO_PROGRAM.replace("EXAMPLE", example("go", "go", engine.address))
    (tmp_path / "main.go").write_text(program)
    tail = CLIENTS / "go/examples/tail"
    module = (tail / "go.mod").read_text().replace("../..", str(CLIENTS / "go"))
    (tmp_path / "go.mod").write_text(module)
    shutil.copy(tail / "go.sum", tmp_path)
    build = await asyncio.create_subprocess_exec(
        str(GO), "build", "-o", "example", ".", cwd=tmp_path, env={**os.environ, "PATH": SEARCH}
    )
    assert await build.wait() == 0
    await follows(engine, [str(tmp_path / "example")], tmp_path, "map[{GPU 0}:")


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no Node here")
@pytest.mark.skipif(not (CLIENTS / "typescript/dist/src/index.js").exists(), reason=".ci/typescript was not run")
async def test_the_example_for_typescript_follows_an_engine(engine: Publishing, tmp_path: Path) -> None:
    package = tmp_path / "node_modules/@kvgrpc/client"
    package.parent.mkdir(parents=True)
    package.symlink_to(CLIENTS / "typescript")
    # It has no types, so it is what tsc makes of it.
    (tmp_path / "example.mjs").write_text(example("typescript", "ts", engine.address))
    await follows(engine, ["node", "example.mjs"], tmp_path, "medium: 'GPU', group: 0, blocks: ")


def test_the_first_example_for_rust_is_the_program_that_is_run() -> None:
    program = (CLIENTS / "rust/examples/engines.rs").read_text()
    (shown, *_) = re.findall(r"```rust\n(.*?)```", (CLIENTS / "rust/README.md").read_text(), re.DOTALL)
    assert program.endswith("\n\n" + shown)
