"""The Go and Rust clients' indexes answer as Python's does: over registries, and publishers that die and come back."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from kvgrpc.client import PrefixIndex, Question, Wanted
from kvgrpc.errors import InvalidRequest
from kvgrpc.events import BlockRemoved, BlockStored
from kvgrpc.events.following.sources import CacheScore
from kvgrpc.model import Layout, ModelIdentity
from kvgrpc.registry.model import Endpoints, RankRow
from kvgrpc.v1 import index_service_pb2
from kvgrpc.v1 import registry_service_pb2 as pb
from tests.support.publishing import Publishing
from tests.support.registry_builders import row
from tests.support.registry_serving import Served
from tests.support.rust import built_example
from tests.support.waiting import until

EXAMPLE = Path(__file__).parents[2] / "clients" / "go" / "examples" / "score"
SEARCH = f"{os.environ.get('PATH', '')}:/usr/local/go/bin"
GO = shutil.which("go", path=SEARCH)
DIRECT = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
MEDIA = ("GPU", "CPU", "CPU_PINNED", "DISK", "EXTERNAL", None)
GROUPS_OF = {"P": 1, "Q": 3, "R": 4}
GROUPS = ((None, None), ("full_attention", None), ("sliding_window", 40), ("mamba", None))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module", params=["go", "rust"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's example ``score``."""
    if request.param == "rust":
        return Path(built_example("score"))
    if GO is None:
        pytest.skip("there is no Go here")
    program = tmp_path_factory.mktemp("go") / "score"
    command = [GO, "build", "-o", str(program), "."]
    subprocess.run(command, cwd=EXAMPLE, env={**os.environ, "PATH": SEARCH}, check=True, timeout=280)
    return program


class IndexProgram:
    """The example as a process: a question in, an answer out."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, hashes: list[int], **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"Hashes": hashes, **more}).encode() + b"\n")
        line = await asyncio.wait_for(self.process.stdout.readline(), 30)
        return dict(json.loads(line))

    async def until(self, holds: Callable[[dict[str, Any]], bool], hashes: list[int], **more: Any) -> dict[str, Any]:
        end = asyncio.get_running_loop().time() + 30
        while not holds(told := await self.ask(hashes, **more)):
            assert asyncio.get_running_loop().time() < end, told
            await asyncio.sleep(0.05)
        return told


@pytest.fixture
async def opened(built: Path) -> AsyncIterator[Callable[..., Any]]:
    processes = []

    async def open_index(*arguments: str) -> IndexProgram:
        process = await asyncio.create_subprocess_exec(
            str(built), *arguments, env=DIRECT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        processes.append(process)
        return IndexProgram(process)

    yield open_index
    for process in processes:
        process.kill()
        await process.wait()


@pytest.fixture
async def registry() -> AsyncIterator[Served]:
    served = (await Served().start()).grown_up()
    yield served
    await served.stop()


def publishing(engine: Publishing, model: str = "", epoch: int = 1) -> RankRow:
    layout, port = Layout(dp=engine.dp + 1), int(engine.address.rpartition(":")[2])
    made = row(engine.engine, dp=engine.dp, layout=layout, epoch=epoch, port=port, model=ModelIdentity(name=model))
    return replace(made, serves_events=True, endpoints=Endpoints(grpc=engine.address))


def holders(told: dict[str, Any]) -> list[str]:
    return [score["engine"] for score in told["Scores"] or ()]


def plain(score: CacheScore) -> tuple[Any, ...]:
    freshness = score.freshness
    assert freshness is not None
    known = (f"INDEX_SOURCE_STATE_{freshness.state.name}", freshness.log_id, freshness.next_sequence)
    return (*score[:7], *known, freshness.lag, freshness.whole)


def plain_of(told: dict[str, Any]) -> list[tuple[Any, ...]]:
    scores = []
    for written in told["Scores"] or ():
        score = json_format.ParseDict(written, index_service_pb2.CacheScore())
        blocks = (score.device_blocks, score.host_blocks, score.disk_blocks, score.blocks)
        known = (index_service_pb2.IndexSourceState.Name(score.freshness.state), score.freshness.log_id)
        counts = (score.freshness.next_sequence, score.freshness.lag_batches, score.freshness.whole)
        scores.append((score.engine, score.dp, *blocks, score.page_tokens, *known, *counts))
    return scores


async def live(engine: Publishing, chance: random.Random, page_tokens: int, groups: int) -> None:
    """Some of a chain of 40 blocks comes and goes, in any medium and so many groups."""
    for _ in range(60):
        begin = chance.choice((0, chance.randrange(0, 40)))
        hashes, medium = list(range(begin, min(40, begin + chance.randrange(1, 40)))), chance.choice(MEDIA)
        group = chance.randrange(groups)
        if chance.random() < 0.2:
            await engine.publish(BlockRemoved(hashes, medium=medium, group_idx=group))
            continue
        kind, window = GROUPS[group]
        stored = BlockStored(hashes, None, [], page_tokens, medium=medium, group_idx=group or None)
        stored.kv_cache_spec_kind, stored.kv_cache_spec_sliding_window = kind, window
        await engine.publish(stored)


async def same_answers(ours: PrefixIndex, theirs: IndexProgram, chance: random.Random) -> int:
    """How many caches 60 questions found, in both."""
    found = 0
    for _ in range(60):
        hashes, model = list(range(chance.randrange(1, 45))), chance.choice(("m", "n"))
        chains = chance.choice(({0: hashes}, {0: hashes, 32: hashes[::2]}, {16: hashes}))
        step = chance.choice((0, 0, 16)) if 0 in chains else 0
        most, engines = chance.choice((0, 1)), chance.choice(([], ["P"], ["Q", "R"]))
        expected = ours.ask(Question(chains, model, step), Wanted(engines, most))
        by_size = {str(size): chain for size, chain in chains.items() if size}
        more = {"Chains": by_size, "Model": model, "StepTokens": step, "Engines": engines, "Most": most}
        told = await theirs.ask(chains.get(0, []), **more)
        assert plain_of(told) == [plain(score) for score in expected], (chains, model, step)
        found += len(expected)
    return found


def with_state(end: str) -> str:
    engine, dp, rest = end.split(" ", 2)
    return f"{engine} {dp} INDEX_SOURCE_STATE_CURRENT {rest}"


async def as_far(ours: PrefixIndex, theirs: IndexProgram, engines: list[Publishing]) -> None:
    """Both have all that was published."""
    ends = [f"{each.engine} dp{each.dp} {each.publisher.stream.log_id} {each.next_sequence}" for each in engines]

    def whole() -> list[str]:
        known = [(each.engine, each.dp, each.freshness) for each in ours.sources()]
        return [f"{engine} dp{dp} {fresh.log_id} {fresh.next_sequence}" for engine, dp, fresh in known]

    await ours.until_current(len(engines))
    await until(lambda: whole() == ends)
    current = [with_state(end) for end in ends]
    await theirs.until(lambda told: told["Sources"] == current, [0])


@pytest.mark.parametrize("seed", range(3))
async def test_it_answers_as_the_index_in_python_does(registry: Served, opened: Callable[..., Any], seed: int) -> None:
    chance = random.Random(seed)
    async with Publishing("P", snapshots=True) as p, Publishing("Q", snapshots=True) as q, Publishing("R") as r:
        engines = [p, q, r]
        for engine, model, size in ((p, "m", 16), (q, "m", 32), (r, "n", 16)):
            await engine.store([0], "GPU")
            await live(engine, chance, size, GROUPS_OF[engine.engine])
            await registry.register(publishing(engine, model))
        theirs: IndexProgram = await opened("-registry", registry.address)
        async with PrefixIndex(registry=registry.address) as ours:
            await as_far(ours, theirs, engines)
            assert await same_answers(ours, theirs, chance) > 20
            with pytest.raises(InvalidRequest):
                ours.score([0])
            assert "name one of" in (await theirs.ask([0]))["Error"]
            await p.restart()
            await q.hang_up()
            await live(p, chance, 16, GROUPS_OF["P"])
            await live(q, chance, 32, GROUPS_OF["Q"])
            await q.serve()
            await p.store([0], "GPU")
            await as_far(ours, theirs, engines)
            assert await same_answers(ours, theirs, chance) > 20


async def test_a_named_publisher_that_dies_and_comes_back_is_told_truly(opened: Callable[..., Any]) -> None:
    async with Publishing("P", snapshots=True) as engine:
        await engine.store([1, 2, 3])
        index: IndexProgram = await opened(engine.address)
        await index.until(lambda told: [each["blocks"] for each in told["Scores"] or ()] == [3], [1, 2, 3])
        await engine.hang_up()
        await index.until(lambda told: "STATE_CONNECTING" in told["Sources"][0], [1])
        told = await index.ask([1, 2, 3])
        assert [each["blocks"] for each in told["Scores"]] == [3], "it may be there: for half a minute it is shown"
        await engine.restart()
        await engine.store([7])
        await index.until(lambda told: holders(told) == ["P"], [7])
        assert holders(await index.ask([1])) == [], "another log: what was known is gone"


async def test_engines_come_and_go_and_another_models_is_never_told(
    registry: Served, opened: Callable[..., Any]
) -> None:
    other = (await Served().start()).grown_up()
    async with Publishing("P", snapshots=True) as first, Publishing("Q", snapshots=True) as second:
        await first.store([1])
        await second.store([1, 2])
        index: IndexProgram = await opened("-registry", f"{registry.address},{other.address}")
        registered = await registry.register(publishing(first, "m"))
        await index.until(lambda told: holders(told) == ["P"], [1])
        await registry.register(publishing(second, "n"))
        await index.until(lambda told: holders(told) == ["Q"], [1, 2], Model="n")
        assert holders(await index.ask([1, 2], Model="m")) == ["P"]
        assert holders(await index.ask([1, 2], Model="nobody's")) == []
        told = await index.ask([1, 2])
        assert not told["Scores"] and '"m"' in told["Error"] and '"n"' in told["Error"]
        await registry.stub.Deregister(pb.DeregisterRequest(ranks=[registered.leases[0].rank]))
        await first.hang_up()
        await index.until(lambda told: len(told["Sources"]) == 1, [1], Model="m")
        await first.serve()
        await registry.server.stop(0)
        await index.until(lambda told: any(registry.address in line for line in told["NotFollowed"] or ()), [1])
        await other.register(publishing(first, "m", epoch=2), row("S"))
        await index.until(lambda told: holders(told) == ["P"], [1], Model="m")
        assert holders(await index.ask([1, 2], Model="n")) == ["Q"], (
            "the other registry knows nothing of it: it answers"
        )
        told = await index.ask([1], Model="m")
        assert "S: none of its 1 registered ranks serves events" in told["NotFollowed"]
    await other.stop()
