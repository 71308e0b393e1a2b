"""Followers of a cache that serves real requests end with exactly its content, whatever they miss on the way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc.client import (
    Client,
    EventFollower,
    Heartbeat,
    PrefixIndex,
    Snapshot,
    SyncEventFollower,
    TypedBatches,
)
from kvgrpc.events import EventServicer, JournalingPublisher, KVEventBatch, open_publisher
from kvgrpc.events.base import EventPublisher
from kvgrpc.events.following.contents import CacheContents
from kvgrpc.events.following.index import BlockIndex
from kvgrpc.events.log.digest import DigestCounter, StateDigest, TierDigest, hash_key
from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvgrpc.model import RankId, RankRef, new_epoch
from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.server import EventRelay
from kvgrpc.v1 import event_service_pb2 as pb
from kvgrpc.v1.event_service_pb2_grpc import add_EventServiceServicer_to_server
from tests.support import waiting
from tests.support.prefix_cache import PrefixCache, hash_of, requests, timed_requests

SECONDS = 40.0
until = partial(waiting.until, seconds=SECONDS)
SNAPSHOT = pb.WATCH_MODE_SNAPSHOT
GO_SEARCH = f"{os.environ.get('PATH', '')}:/usr/local/go/bin"
GO = shutil.which("go", path=GO_SEARCH)
GO_EXAMPLE = Path(__file__).parents[2] / "clients" / "go" / "examples" / "tail"


@asynccontextmanager
async def publishing(**settings: Any) -> AsyncIterator[tuple[EventPublisher, str]]:
    publisher = open_publisher({"endpoint": "tcp://127.0.0.1:0"} | settings, RankRef(RankId("engine"), new_epoch()))
    assert publisher.stream is not None
    server = grpc.aio.server(interceptors=interceptors_of(ServerSecurity()))
    add_EventServiceServicer_to_server(EventServicer([publisher.stream], heartbeat_seconds=0.1), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield publisher, f"127.0.0.1:{port}"
    finally:
        publisher.shutdown()
        await server.stop(0)


async def serve(cache: PrefixCache, publisher: EventPublisher, limit: int | None = None) -> None:
    """The requests as quickly as they can be served, each with the chance to be heard of."""
    for number, blocks in enumerate(requests(limit)):
        happened = cache.request(blocks)
        if happened:
            assert publisher.publish(KVEventBatch(float(number), happened))
        if number % 8 == 0:
            await asyncio.sleep(0)


async def exact(follower: EventFollower, publisher: EventPublisher) -> None:
    """Waits until it has everything, and nothing is on its way."""
    assert publisher.stream is not None
    end = asyncio.get_running_loop().time() + SECONDS
    while True:
        await follower.until_current(SECONDS)
        if follower.freshness.next_sequence == publisher.stream.next_sequence:
            return
        assert asyncio.get_running_loop().time() < end, f"{follower.freshness}, {follower.last_error}"
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(follower.changed(), 1.0)


def digest_of(cache: PrefixCache, next_sequence: int) -> StateDigest:
    counter = DigestCounter()
    for medium, hashes in cache.content.items():
        counter.add(medium, 0, [hash_key(block) for block in hashes], len(hashes))
    return counter.digest(next_sequence)


def same(follower: EventFollower | SyncEventFollower, cache: PrefixCache) -> None:
    assert follower.blocks == {medium: len(hashes) for medium, hashes in cache.content.items()}
    for medium, hashes in cache.content.items():
        assert all(medium in follower.media_of(block) for block in hashes)


@pytest.mark.parametrize("live", [False, True], ids=["watch", "pub"])
@pytest.mark.parametrize(
    ("device", "host", "served", "settings"),
    [
        (100_000, 0, 1_000, {}),
        (500, 1_000, 400, {}),
        (500, 1_000, 400, {"encoding": "array"}),
        (100, 50, 400, {"buffer_steps": 20, "hwm": 5}),
        (2_000, 500, 400, {"dialect": "sglang", "buffer_steps": 1}),
        pytest.param(2_000, 8_000, None, {}, marks=pytest.mark.slow),
        pytest.param(2_000, 8_000, None, {"buffer_steps": 100, "hwm": 50}, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_followers_end_with_the_content_of_the_cache(
    live: bool, device: int, host: int, served: int | None, settings: dict[str, Any]
) -> None:
    cache = PrefixCache(device, host)
    async with publishing(**settings) as (publisher, address), EventFollower(address, live=live) as early:
        await serve(cache, publisher, served)
        await exact(early, publisher)
        async with EventFollower(address, live=live) as late:
            await exact(late, publisher)
            assert publisher.stream is not None
            assert publisher.stream.digest(0) == digest_of(cache, publisher.stream.next_sequence)
            for follower in (early, late):
                same(follower, cache)
                assert follower.counts.digests_different == 0


async def test_what_is_lost_before_it_is_published_is_under_stated_and_never_wrong() -> None:
    """A queue of 8 overflows: what was lost is followed by a clear, and nothing is shown that is not cached."""
    cache = PrefixCache(500, 0)
    ever: set[int] = set()
    settings = {"max_queue_size": 8, "buffer_steps": 50}
    async with publishing(**settings) as (publisher, address), EventFollower(address) as follower:
        taken = []
        for blocks in requests(500):
            ever.update(map(hash_of, blocks))
            taken.append(publisher.publish(KVEventBatch(0.0, cache.request(blocks))))
        await exact(follower, publisher)
        assert not all(taken)
        # One more, for which there is room: all may have been cleared, and nothing shown would be no lie either.
        last = 10**9
        assert publisher.publish(KVEventBatch(0.0, cache.request([last])))
        await exact(follower, publisher)
        shown = {block for block in ever | {hash_of(last)} if follower.media_of(block)}
        assert hash_of(last) in shown
        assert shown <= cache.content["GPU"]
        assert follower.counts.digests_different == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_followers_of_every_kind_end_with_the_content_after_the_trace_at_real_time_times_n(
    tmp_path: Path,
) -> None:
    """N is what serves each 1,000 requests in 6 s. Those that follow: Watch, PUB, plain code, an index, a typed Watch,
    one behind a relay, and the Go client where there is Go."""
    cache = PrefixCache(2_000, 8_000)
    async with contextlib.AsyncExitStack() as stack:
        publisher, address = await stack.enter_async_context(publishing(replay_endpoint="tcp://127.0.0.1:0"))
        assert publisher.stream is not None
        stream = publisher.stream.state()
        relay = EventRelay("127.0.0.1:0", stream.pub_endpoint, "relayed", replay=stream.replay_endpoint)
        await asyncio.to_thread(relay.open)
        stack.push_async_callback(asyncio.to_thread, relay.close)
        followers = [EventFollower(address), EventFollower(address, live=True), EventFollower(relay.address)]
        for follower in followers:
            await stack.enter_async_context(follower)
        plain = SyncEventFollower(address)
        await asyncio.to_thread(plain.start)
        stack.push_async_callback(asyncio.to_thread, plain.close)
        index = await stack.enter_async_context(PrefixIndex(sources=[address]))
        typed = asyncio.create_task(typed_contents(address, reached := asyncio.Event()))
        go = await go_client(tmp_path, address) if GO else None
        speed = await serve_in_time(cache, publisher)
        wanted = {medium: len(hashes) for medium, hashes in cache.content.items()}
        upcoming = publisher.stream.next_sequence
        final = digest_of(cache, upcoming)
        print(f"\nreal time x {speed:.0f}, {upcoming} batches, {wanted}")
        for follower in followers[:2]:
            await exact(follower, publisher)
        # The relay counts from its own first batch, and how many blocks a full cache holds says nothing of when.
        await until(lambda: tiers_of(followers[2]) == final.tiers)
        await until(lambda: plain.freshness.next_sequence == upcoming)
        await until(lambda: any(source.freshness.next_sequence == upcoming for source in index.sources()))
        reached.set()
        contents = await asyncio.wait_for(typed, SECONDS)
        assert contents.digest() == final
        for follower in followers:
            same(follower, cache)
        await asyncio.to_thread(same, plain, cache)
        (source,) = index.sources()
        # Nobody publishes any more: a digest that is compared from now on is that of the end.
        plainly, found = plain.counts.digests_equal, source.counts.digests_equal
        await until(lambda: plain.counts.digests_equal > plainly)
        await until(lambda: index.sources()[0].counts.digests_equal > found)
        assert source.blocks == wanted
        assert source.counts.digests_different == plain.counts.digests_different == 0
        # All that the device holds, asked of the index block by block.
        assert all(index.score([hash_key(block)])[0].device_blocks == 1 for block in cache.content["GPU"])
        if go is not None:
            places = " ".join(f"{{{medium} 0}}:{count}" for medium, count in sorted(wanted.items()))
            await go_says(go, f"current at {upcoming}: map[{places}], digest equal: true")


def tiers_of(follower: EventFollower) -> tuple[TierDigest, ...]:
    contents = follower.core.contents
    return () if contents is None else contents.digest().tiers


async def serve_in_time(cache: PrefixCache, publisher: EventPublisher) -> float:
    """The requests as far apart as they came, N times faster. N."""
    trace = list(timed_requests())
    speed = max(1.0, trace[-1][0] / (0.006 * len(trace)))
    clock = asyncio.get_running_loop().time
    began = clock()
    for came, blocks in trace:
        await asyncio.sleep(max(0.0, began + came / speed - clock()))  # the pace of the trace
        happened = cache.request(blocks)
        if happened:
            assert publisher.publish(KVEventBatch(came, happened))
    await asyncio.to_thread(wait_published, publisher)
    return speed


def wait_published(publisher: EventPublisher) -> None:
    assert isinstance(publisher, JournalingPublisher)
    while publisher.counts.unsent:
        time.sleep(0.005)


async def typed_contents(address: str, reached: asyncio.Event) -> CacheContents:
    """What a typed Watch comes to, up to what its stream has when ``reached`` is set."""
    contents = CacheContents(BlockIndex())
    async with Client(address) as client, aclosing(client.watch(mode=SNAPSHOT, typed=True)) as parts:  # type: ignore[type-var]
        async for part in parts:
            if isinstance(part, Snapshot):
                contents.apply(map(event_of, part.events))
                contents.advance(part.next_sequence)
            elif isinstance(part, TypedBatches):
                for sequence, batch in enumerate(part.batches, part.first_sequence):
                    contents.apply(map(event_of, batch.events))
                    contents.advance(sequence + 1)
            elif isinstance(part, Heartbeat) and reached.is_set() and part.next_sequence == contents.next_sequence:
                break
    return contents


def event_of(message: pb.KvEvent) -> Event:
    kind = message.WhichOneof("kind")
    if kind == "stored":
        said = message.stored
        hashes = [block.value for block in said.block_hashes]
        return BlockStored(hashes, medium=said.medium, group_idx=said.group, block_size=said.page_tokens)
    if kind == "removed":
        gone = message.removed
        return BlockRemoved([block.value for block in gone.block_hashes], gone.medium, gone.group)
    assert kind == "cleared"
    return AllBlocksCleared()


async def go_client(folder: Path, address: str) -> asyncio.subprocess.Process:
    """The Go client's example, which prints what its cache holds."""
    environment = {**os.environ, "PATH": GO_SEARCH}
    build = await asyncio.create_subprocess_exec(
        str(GO), "build", "-o", str(folder / "tail"), ".", cwd=GO_EXAMPLE, env=environment
    )
    assert await build.wait() == 0
    return await asyncio.create_subprocess_exec(
        str(folder / "tail"), address, stdout=asyncio.subprocess.PIPE, limit=2**24
    )


async def go_says(process: asyncio.subprocess.Process, words: str) -> None:
    assert process.stdout is not None
    try:
        while True:
            line = (await asyncio.wait_for(process.stdout.readline(), SECONDS)).decode()
            assert line, "it ended"
            if words in line:
                return
    finally:
        process.kill()
        await process.wait()
