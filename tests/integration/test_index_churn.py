"""Every score of an index is right at its sequence, while engines die, come back, compact their logs and are flooded.

One checker, for the index in Python, of which `make test` has a short run, and for the native one. A cache that is not
told had nothing to tell. One engine has two dp ranks, two have a group beside full attention, and one is a process that
is killed with -9.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from typing import Any, NamedTuple

import grpc
import pytest

from kvgrpc.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kvgrpc.events.following.groups import CacheGroup
from kvgrpc.server import IndexServer
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1.index_service_pb2_grpc import IndexServiceStub
from tests.support.cache_groups import serves
from tests.support.native_index import NativeIndex
from tests.support.publishing import Publishing, publish_when_told
from tests.support.quick_start import process_of
from tests.support.waiting import until

BLOCKS, PAGE, FLOOD, PROMPTS = 48, 16, 40, 8
# What makes a run: scores compared, caches that were not told looked at, and what happened at each engine meanwhile. A
# busy machine takes longer for it.
SCORES, ABSENT, LONGEST_SECONDS = 1000, 50, 300.0
SHORT, LONG = 30, 150
RESTARTED = 10  # after so many happenings each is at least once
MEDIA = ("GPU", "GPU", "CPU", "CPU_PINNED", "DISK", "EXTERNAL")
REACHED = ({"GPU"}, {"GPU", "CPU", "CPU_PINNED"}, {"GPU", "CPU", "CPU_PINNED", "DISK"}, set(MEDIA))
WINDOW, STATE = CacheGroup("sliding_window", 40, PAGE), CacheGroup("mamba", 0, PAGE)
CURRENT = pb.INDEX_SOURCE_STATE_CURRENT
# For each group of a cache, in which media each block lies.
State = tuple[tuple[frozenset[str], ...], ...]
Happening = BlockStored | BlockRemoved | AllBlocksCleared

pytestmark = pytest.mark.timeout(1800)


class Recorded(Publishing):
    """An engine that keeps every state that its cache ever had, by log and next sequence, in their order."""

    def __init__(self, engine: str, dp: int = 0, group: CacheGroup | None = None) -> None:
        # A journal that is soon too short, so that whoever was away needs a snapshot.
        super().__init__(engine, dp, snapshots=True, clear_first=False, buffer_steps=2 * FLOOD)
        self.groups = (None,) if group is None else (None, group)
        self.held: list[dict[str, Counter[int]]] = []
        self.states: dict[tuple[str, int], State] = {}
        self._next = 0

    @property
    def log_id(self) -> str:
        return str(self.publisher.stream.log_id)

    async def restart(self) -> None:
        await super().restart()
        self._begin()

    async def tell(self, event: Happening, group: int = 0) -> None:
        """Publishes it; the state that it leads to is noted before anybody can see it."""
        if isinstance(event, AllBlocksCleared):
            self.held = [{} for _ in self.groups]
        else:
            held = self.held[group].setdefault(event.medium or "GPU", Counter())
            for block in event.block_hashes:
                held[int(block)] = max(0, held[int(block)] + (1 if isinstance(event, BlockStored) else -1))
            event.group_idx = group or None
            kind = self.groups[group]
            if kind is not None and isinstance(event, BlockStored):
                event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window = kind.kind, kind.window or None
        self._next += 1
        self._note()
        await self._publish(event)

    async def _publish(self, event: Happening) -> None:
        batch = KVEventBatch(time.time(), [event])
        await until(lambda: self.publisher.publish(batch))

    def _begin(self) -> None:
        self.held, self._next = [{} for _ in self.groups], 0
        self._note()

    def _note(self) -> None:
        self.states[self.log_id, self._next] = tuple(
            tuple(frozenset(medium for medium, held in group.items() if held[block] > 0) for block in range(BLOCKS))
            for group in self.held
        )

    @property
    def now(self) -> tuple[str, int]:
        """Log and next sequence of what it holds."""
        return self.log_id, self._next

    def right_at(self, at: tuple[str, int], first: int, blocks: int) -> set[tuple[int, ...]]:
        """How many of the blocks from ``first`` on lie on the device, to the host, to the disk, anywhere, and are of
        use. A group without any block may be known or not."""
        state = self.states[at]
        others = [(group, state[number]) for number, group in enumerate(self.groups) if group is not None]
        known = [(group, lie) for group, lie in others if any(lie)]
        return {tuple(counts(state[0], needed, first, blocks)) for needed in (known, others)}


class Killed(Recorded):
    """One in a process of its own: to restart it is to kill it with -9 in the middle of an event."""

    def __init__(self, engine: str) -> None:
        super().__init__(engine)
        self._log_id = ""
        self._process: Any = None
        self._pipe: Any = None

    @property
    def log_id(self) -> str:
        return self._log_id

    async def restart(self) -> None:
        if self._process is not None:
            self._next += 1
            self._note()  # as it is: the event that nobody waits for is one of nothing
            self._pipe.send(("publish", BlockStored([], None, [], PAGE, medium="GPU")))
            self._end()
        self._pipe, child = Pipe()
        self._process = process_of(publish_when_told, (child, self.engine, self.address, self.settings))
        self._process.start()
        child.close()
        self.address, self._log_id = await self._answer()
        self._begin()

    async def hang_up(self) -> None:
        await self._ask("hang_up")

    async def serve(self) -> None:
        await self._ask("serve")

    async def __aexit__(self, *_: object) -> None:
        self._end()

    async def _publish(self, event: Happening) -> None:
        await self._ask("publish", event)

    async def _ask(self, *words: object) -> None:
        self._pipe.send(words)
        await self._answer()

    async def _answer(self) -> Any:
        return await asyncio.to_thread(self._pipe.recv)

    def _end(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(10.0)
        self._pipe.close()


def counts(
    lie: Sequence[frozenset[str]],
    needed: Sequence[tuple[CacheGroup, Sequence[frozenset[str]]]],
    first: int,
    blocks: int,
) -> Iterator[int]:
    for media in REACHED:
        prefix = next((at for at in range(blocks) if not lie[first + at] & media), blocks)
        held = [(group, {at for at in range(blocks) if there[first + at] & media}) for group, there in needed]
        yield next(
            length
            for length in range(prefix, -1, -1)
            if all(serves(length, group, range(blocks), blocks_of, PAGE) for group, blocks_of in held)
        )


async def churn(engine: Recorded, chance: random.Random, checker: Checker, happenings: int) -> None:
    """Whatever happens to an engine and its cache, as long as scores are compared."""

    async def tell() -> None:
        await engine.tell(happening(chance), chance.randrange(len(engine.groups)))

    happened = 0
    while not checker.is_enough or happened < happenings:
        happened += 1
        kind = chance.random()
        if kind < 0.02 or happened == RESTARTED:
            await engine.restart()
        elif kind < 0.05:
            await engine.hang_up()
            for _ in range(chance.choice((1, 3 * FLOOD))):
                await tell()
            await engine.serve()
        elif kind < 0.1:
            for _ in range(FLOOD):
                await tell()
        elif kind < 0.12:
            await engine.tell(AllBlocksCleared())
        else:
            await tell()
        await asyncio.sleep(chance.random() * 0.02)


def happening(chance: random.Random) -> BlockStored | BlockRemoved:
    first = chance.choice((0, 0, chance.randrange(BLOCKS)))
    hashes = list(range(first, min(BLOCKS, first + chance.randrange(1, BLOCKS))))
    if chance.random() < 0.3:
        return BlockRemoved(hashes[: chance.randrange(1, 4)], medium=chance.choice(MEDIA))
    return BlockStored(hashes, None, [], PAGE, medium=chance.choice(MEDIA))


class Source(NamedTuple):
    """As far as an index knows a cache, and how often it had to begin anew."""

    at: tuple[str, int]
    current: bool
    begun: tuple[int, int]


class Checker:
    """Asks, and compares each score with what the engine's cache held at that sequence; and of caches that were not
    told that they held nothing at one that the index had reached by then."""

    def __init__(self, address: str, engines: Sequence[Recorded]) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._index = IndexServiceStub(self._channel)
        self._engines = {(engine.engine, engine.dp): engine for engine in engines}
        self.scores = self.absent = 0
        self.states: Counter[str] = Counter()

    async def ask(self, chance: random.Random) -> None:
        prompts = []
        for _ in range(PROMPTS):
            first = chance.choice((0, chance.randrange(BLOCKS)))
            prompts.append((first, chance.randrange(1, BLOCKS - first + 1)))
        before = await self.sources()
        told = await self.told(prompts)
        after = await self.sources()
        for (first, blocks), answer in zip(prompts, told, strict=True):
            for score in answer.scores:
                self._check(score, first, blocks)
            for key in self._engines.keys() - {(score.engine, score.dp) for score in answer.scores}:
                self._check_absent(key, before.get(key), after.get(key), first, blocks)

    @property
    def is_enough(self) -> bool:
        """Whether it compared enough, of caches that were followed and of some that were away."""
        enough = self.scores >= SCORES and self.absent >= ABSENT
        return enough and {"CURRENT", "CONNECTING"} <= set(self.states)

    async def told(self, prompts: Sequence[tuple[int, int]]) -> Sequence[pb.PromptScores]:
        request = pb.ScoreRequest(with_freshness=True)
        for first, blocks in prompts:
            request.prompts.add().block_hashes.values.extend(range(first, first + blocks))
        return (await self._index.Score(request, timeout=10.0)).prompts

    async def sources(self) -> Mapping[tuple[str, int], Source]:
        listed = (await self._index.ListSources(pb.ListSourcesRequest(), timeout=10.0)).sources
        return {
            (each.engine, each.dp): Source(
                (each.freshness.log_id, each.freshness.next_sequence),
                each.freshness.state == CURRENT,
                (each.new_logs, each.snapshots),
            )
            for each in listed
        }

    def _check(self, score: pb.CacheScore, first: int, blocks: int) -> None:
        fresh = score.freshness
        engine = self._engines[score.engine, score.dp]
        said = (score.device_blocks, score.host_blocks, score.disk_blocks, score.blocks)
        assert said in engine.right_at((fresh.log_id, fresh.next_sequence), first, blocks), (score, first, blocks)
        self.scores += 1
        self.states[pb.IndexSourceState.Name(fresh.state).removeprefix("INDEX_SOURCE_STATE_")] += 1

    def _check_absent(
        self, key: tuple[str, int], before: Source | None, after: Source | None, first: int, blocks: int
    ) -> None:
        if before is None or after is None or not (before.current and after.current) or before.begun != after.begun:
            return  # it may have been left out while it was read anew
        (log_id, begin), (_, end) = before.at, after.at
        engine = self._engines[key]
        nothing = (0,) * len(REACHED)
        assert any(nothing in engine.right_at((log_id, at), first, blocks) for at in range(begin, end + 1)), (
            f"{key} held something from {begin} to {end}, and was not told",
            (first, blocks),
        )
        self.absent += 1

    async def is_exact(self) -> bool:
        """Whether it knows of every engine all that there is now."""
        known = {key: source.at for key, source in (await self.sources()).items() if source.current}
        return known == {key: engine.now for key, engine in self._engines.items()}

    async def close(self) -> None:
        await self._channel.close()


@pytest.fixture
async def engines() -> AsyncIterator[list[Recorded]]:
    made = [
        *(Recorded("engine-0", dp) for dp in range(2)),
        *(
            Recorded(f"engine-{number}", group=group)
            for number, group in enumerate((WINDOW, STATE, None, None, None), 1)
        ),
        Killed("engine-6"),
    ]
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
        for group in range(len(engine.groups)):
            await engine.tell(BlockStored([0], None, [], PAGE, medium="GPU"), group)
    await until(checker.is_exact)
    compared = checker.scores
    await checker.ask(chance)
    (answer,) = await checker.told([(0, 1)])
    for score in answer.scores:
        checker._check(score, 0, 1)
    assert len(answer.scores) == len(engines) < checker.scores - compared
    print(f"{checker.scores} scores, none wrong: {dict(checker.states)}; {checker.absent} rightly not told")
    await checker.close()
