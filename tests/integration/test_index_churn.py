"""Every score of an index is right at its sequence, while engines die, come back, compact their logs and are flooded.

One checker, for the index in Python, of which `make test` has a short run, and for the native one.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from kvgrpc.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kvgrpc.server import IndexServer
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1.index_service_pb2_grpc import IndexServiceStub
from tests.support.native_index import NativeIndex
from tests.support.publishing import Publishing
from tests.support.waiting import until

ENGINES, BLOCKS, FLOOD, PROMPTS = 8, 48, 40, 8
# What makes a run: scores compared, and what happened at each engine meanwhile. A busy machine takes longer for it.
SCORES, LONGEST_SECONDS = 1000, 300.0
SHORT, LONG = 30, 150
MEDIA = ("GPU", "GPU", "CPU", "CPU_PINNED", "DISK", "EXTERNAL")
REACHED = ({"GPU"}, {"GPU", "CPU", "CPU_PINNED"}, {"GPU", "CPU", "CPU_PINNED", "DISK"}, set(MEDIA))
State = tuple[frozenset[str], ...]

pytestmark = pytest.mark.timeout(1800)


class Recorded(Publishing):
    """An engine that keeps every state that its cache ever had, by log and next sequence."""

    def __init__(self, engine: str) -> None:
        # A journal that is soon too short, so that whoever was away needs a snapshot.
        super().__init__(engine, snapshots=True, clear_first=False, buffer_steps=2 * FLOOD)
        self.states: dict[tuple[str, int], State] = {}
        self._next = 0

    async def restart(self) -> None:
        await super().restart()
        self._next = 0
        self._note()

    async def tell(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        """Publishes it; the state that it leads to is noted before anybody can see it."""
        if isinstance(event, AllBlocksCleared):
            self.holds = {}
        else:
            held = self.holds.setdefault(event.medium or "GPU", Counter())
            for block in event.block_hashes:
                held[int(block)] = max(0, held[int(block)] + (1 if isinstance(event, BlockStored) else -1))
        self._next += 1
        self._note()
        batch = KVEventBatch(time.time(), [event])
        await until(lambda: self.publisher.publish(batch))

    def _note(self) -> None:
        self.states[self.publisher.stream.log_id, self._next] = tuple(
            frozenset(self.media_of(block)) for block in range(BLOCKS)
        )

    @property
    def now(self) -> tuple[str, int]:
        """Log and next sequence of what it holds."""
        return self.publisher.stream.log_id, self._next


def holds(state: State, first: int, blocks: int) -> tuple[int, ...]:
    """How many of the blocks from ``first`` on lie on the device, to the host, to the disk, anywhere."""
    ends = []
    for media in REACHED:
        missing = (at for at in range(blocks) if not state[first + at] & media)
        ends.append(next(missing, blocks))
    return tuple(ends)


async def churn(engine: Recorded, chance: random.Random, checker: Checker, happenings: int) -> None:
    """Whatever happens to an engine and its cache, as long as scores are compared."""
    happened = 0
    while not checker.is_enough or happened < happenings:
        happened += 1
        kind = chance.random()
        if kind < 0.02:
            await engine.restart()
        elif kind < 0.05:
            await engine.hang_up()
            for _ in range(chance.choice((1, 3 * FLOOD))):
                await engine.tell(happening(chance))
            await engine.serve()
        elif kind < 0.1:
            for _ in range(FLOOD):
                await engine.tell(happening(chance))
        elif kind < 0.12:
            await engine.tell(AllBlocksCleared())
        else:
            await engine.tell(happening(chance))
        await asyncio.sleep(chance.random() * 0.02)


def happening(chance: random.Random) -> BlockStored | BlockRemoved:
    first = chance.choice((0, 0, chance.randrange(BLOCKS)))
    hashes = list(range(first, min(BLOCKS, first + chance.randrange(1, BLOCKS))))
    if chance.random() < 0.3:
        return BlockRemoved(hashes[: chance.randrange(1, 4)], medium=chance.choice(MEDIA))
    return BlockStored(hashes, None, [], 16, medium=chance.choice(MEDIA))


class Checker:
    """Asks, and compares each score with what the engine's cache held at that sequence."""

    def __init__(self, address: str, engines: Sequence[Recorded]) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._index = IndexServiceStub(self._channel)
        self._engines = {engine.engine: engine for engine in engines}
        self.scores = 0
        self.states: Counter[str] = Counter()

    async def ask(self, chance: random.Random) -> None:
        prompts = []
        for _ in range(PROMPTS):
            first = chance.choice((0, chance.randrange(BLOCKS)))
            prompts.append((first, chance.randrange(1, BLOCKS - first + 1)))
        told = await self.told(prompts)
        for (first, blocks), answer in zip(prompts, told, strict=True):
            for score in answer.scores:
                self._check(score, first, blocks)

    @property
    def is_enough(self) -> bool:
        """Whether it compared enough, of caches that were followed and of some that were away."""
        return self.scores >= SCORES and {"CURRENT", "CONNECTING"} <= set(self.states)

    async def told(self, prompts: Sequence[tuple[int, int]]) -> Sequence[pb.PromptScores]:
        request = pb.ScoreRequest(with_freshness=True)
        for first, blocks in prompts:
            request.prompts.add().block_hashes.values.extend(range(first, first + blocks))
        return (await self._index.Score(request, timeout=10.0)).prompts

    def _check(self, score: pb.CacheScore, first: int, blocks: int) -> None:
        fresh = score.freshness
        state = self._engines[score.engine].states[fresh.log_id, fresh.next_sequence]
        said = (score.device_blocks, score.host_blocks, score.disk_blocks, score.blocks)
        assert said == holds(state, first, blocks), (score, first, blocks)
        self.scores += 1
        self.states[pb.IndexSourceState.Name(fresh.state).removeprefix("INDEX_SOURCE_STATE_")] += 1

    async def is_exact(self) -> bool:
        """Whether it knows of every engine all that there is now."""
        (answer,) = await self.told([(0, BLOCKS)])
        known = {score.engine: (score.freshness.log_id, score.freshness.next_sequence) for score in answer.scores}
        return known == {name: engine.now for name, engine in self._engines.items()}

    async def close(self) -> None:
        await self._channel.close()


@pytest.fixture
async def engines() -> AsyncIterator[list[Recorded]]:
    made = [Recorded(f"engine-{number}") for number in range(ENGINES)]
    for engine in made:
        await engine.restart()
    yield made
    for engine in made:
        await engine.__aexit__()


@pytest.fixture(params=["python", pytest.param("native", marks=pytest.mark.slow)])
async def address(request: pytest.FixtureRequest, engines: list[Recorded]) -> AsyncIterator[str]:
    """Where an index of the engines listens."""
    sources = [engine.address for engine in engines]
    server = NativeIndex(sources) if request.param == "native" else IndexServer(["127.0.0.1:0"], sources=sources)
    await asyncio.to_thread(server.open)
    yield server.address
    await asyncio.to_thread(server.close)


@pytest.mark.parametrize(
    ("seed", "happenings"),
    [(2, SHORT), *(pytest.param(seed, LONG, marks=pytest.mark.slow) for seed in range(2))],
)
async def test_every_score_is_what_the_cache_held_at_its_sequence(
    address: str, engines: list[Recorded], seed: int, happenings: int
) -> None:
    checker, chance = Checker(address, engines), random.Random(seed)
    churning = [
        asyncio.ensure_future(churn(each, random.Random(f"{seed} {each.engine}"), checker, happenings))
        for each in engines
    ]
    end = time.monotonic() + LONGEST_SECONDS
    while not all(task.done() for task in churning):
        assert time.monotonic() < end, (checker.scores, checker.states)
        await checker.ask(chance)
    await asyncio.gather(*churning)
    for engine in engines:
        await engine.tell(BlockStored([0], None, [], 16, medium="GPU"))
    await until(checker.is_exact)
    (answer,) = await checker.told([(0, BLOCKS)])
    for score in answer.scores:
        checker._check(score, 0, BLOCKS)
    print(f"{checker.scores} scores, none wrong: {dict(checker.states)}")
    await checker.close()
