"""Followers of a cache that serves real requests end with exactly its content, whatever they miss on the way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvgrpc.client import EventFollower
from kvgrpc.events import EventServicer, KVEventBatch, open_publisher
from kvgrpc.events.base import EventPublisher
from kvgrpc.events.log.digest import DigestCounter, StateDigest, hash_key
from kvgrpc.model import RankId, RankRef, new_epoch
from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.v1.event_service_pb2_grpc import add_EventServiceServicer_to_server
from tests.support.prefix_cache import PrefixCache, hash_of, requests

SECONDS = 40.0


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


def same(follower: EventFollower, cache: PrefixCache) -> None:
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
        shown = {block for block in ever if follower.media_of(block)}
        assert shown <= cache.content["GPU"]
        assert follower.counts.digests_different == 0
