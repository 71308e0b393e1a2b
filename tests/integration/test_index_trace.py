"""An index of eight engines that serve a real trace: it holds what their caches hold, block by block.

`make test` serves a part of the sample with the index in Python; the whole trace, which ``TEST_TRACE`` names, is slow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from itertools import islice

import grpc
import pytest

from kvgrpc.events import KVEventBatch
from kvgrpc.events.log.digest import hash_key
from kvgrpc.server import IndexServer
from kvgrpc.v1 import index_service_pb2 as pb
from kvgrpc.v1.index_service_pb2_grpc import IndexServiceStub
from tests.support.native_index import NativeIndex
from tests.support.prefix_cache import PrefixCache, hash_of, requests
from tests.support.publishing import Publishing
from tests.support.waiting import until

ENGINES, DEVICE_BLOCKS, HOST_BLOCKS = 8, 500, 1_500
PART = 400
# How often all caches are compared on the way.
COMPARISONS = 4
PROMPTS = 1_024
EXACT_SECONDS = 60.0
HOST = "CPU_PINNED"

pytestmark = pytest.mark.timeout(900)


class Traced(Publishing):
    """An engine that caches what its requests leave behind."""

    def __init__(self, engine: str) -> None:
        super().__init__(engine, snapshots=True)
        self.cache = PrefixCache(DEVICE_BLOCKS, HOST_BLOCKS)

    async def request(self, blocks: list[int]) -> None:
        happened = self.cache.request(blocks)
        if happened:
            batch = KVEventBatch(time.time(), happened)
            await until(lambda: self.publisher.publish(batch))

    def keeps(self, block: int) -> tuple[int, int]:
        """Of a block whether it is on the device, and on the device or the host, as a score of it alone says."""
        on_device = hash_of(block) in self._keys.get("GPU", ())
        return int(on_device), int(on_device or hash_of(block) in self._keys.get(HOST, ()))

    def look(self) -> dict[str, int]:
        """How many blocks lie where; ``keeps`` tells of this moment."""
        self._keys = self.cache.content
        return {medium: len(hashes) for medium, hashes in self._keys.items()}


class Asked:
    """An index, and whoever routes by it: where most of a request lies, else, all begin alike, to the next in turn."""

    def __init__(self, address: str, engines: Sequence[Traced]) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._index = IndexServiceStub(self._channel)
        self._engines = {engine.engine: engine for engine in engines}
        self._turn = 0
        self.found = 0

    async def route(self, blocks: list[int]) -> Traced:
        (best,) = await self._scores([blocks], most=1)
        if best and 2 * best[0].blocks > len(blocks):
            self.found += 1
            return self._engines[best[0].engine]
        self._turn += 1
        return list(self._engines.values())[self._turn % ENGINES]

    async def is_exact(self) -> bool:
        listed = (await self._index.ListSources(pb.ListSourcesRequest(), timeout=10.0)).sources
        known = {source.engine: source.freshness.next_sequence for source in listed}
        return known == {name: engine.next_sequence for name, engine in self._engines.items()}

    async def compare(self, blocks: Sequence[int]) -> int:
        """Compares what it says of each of these blocks, and how many lie where; how many lie anywhere."""
        for engine in self._engines.values():
            await until(lambda engine=engine: engine.publisher.counts.unsent == 0, EXACT_SECONDS)  # type: ignore[misc]
        await until(self.is_exact, EXACT_SECONDS)
        counts = {name: engine.look() for name, engine in self._engines.items()}
        listed = (await self._index.ListSources(pb.ListSourcesRequest(), timeout=10.0)).sources
        told = {source.engine: {held.medium: held.blocks for held in source.blocks if held.blocks} for source in listed}
        assert told == counts
        assert not any(source.digests_different for source in listed)
        lying = 0
        for begin in range(0, len(blocks), PROMPTS):
            some = blocks[begin : begin + PROMPTS]
            for block, scores in zip(some, await self._scores([[block] for block in some]), strict=True):
                said = {score.engine: (score.device_blocks, score.host_blocks) for score in scores}
                held = {name: engine.keeps(block) for name, engine in self._engines.items()}
                assert said == {name: places for name, places in held.items() if any(places)}, block
                lying += len(said)
        return lying

    async def close(self) -> None:
        await self._channel.close()

    async def _scores(self, prompts: Sequence[Sequence[int]], most: int = 0) -> list[Sequence[pb.CacheScore]]:
        request = pb.ScoreRequest(max_scores=most)
        for blocks in prompts:
            request.prompts.add().block_hashes.values.extend(hash_key(hash_of(block)) for block in blocks)
        return [each.scores for each in (await self._index.Score(request, timeout=30.0)).prompts]


@pytest.fixture
async def engines() -> AsyncIterator[list[Traced]]:
    made = [Traced(f"engine-{number}") for number in range(ENGINES)]
    for engine in made:
        await engine.restart()
    yield made
    for engine in made:
        await engine.__aexit__()


@pytest.mark.parametrize(
    ("native", "served"),
    [
        (False, PART),
        pytest.param(False, None, marks=pytest.mark.slow),
        pytest.param(True, None, marks=pytest.mark.slow),
    ],
    ids=["python-part", "python-whole", "native-whole"],
)
async def test_an_index_of_eight_engines_holds_what_the_trace_left_in_their_caches(
    native: bool, served: int | None, engines: list[Traced]
) -> None:
    sources = [engine.address for engine in engines]
    server = NativeIndex(sources) if native else IndexServer(["127.0.0.1:0"], sources=sources)
    await asyncio.to_thread(server.open)
    asked, trace = Asked(server.address, engines), requests(served)
    total = sum(1 for _ in requests(served))
    seen, lying = dict[int, None](), list[int]()
    for _ in range(COMPARISONS):
        for blocks in islice(trace, -(-total // COMPARISONS)):
            seen.update(dict.fromkeys(blocks))
            await (await asked.route(blocks)).request(blocks)
        lying.append(await asked.compare(list(seen)))
    print(f"{total} requests, {asked.found} found something, {len(seen)} blocks, held {lying}")
    assert asked.found, "no request came where its prefix lies"
    assert all(engine.cache.content.keys() == {"GPU", HOST} for engine in engines), "a tier of one was never used"
    await asked.close()
    await asyncio.to_thread(server.close)
