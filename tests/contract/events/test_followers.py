"""Followers over real servers: what they know is what the cache holds, whatever happened in between."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import zmq
import zmq.asyncio

from kvgrpc.client import (
    Client,
    EventFollower,
    Heartbeat,
    Payloads,
    PrefixIndex,
    Snapshot,
    SyncEventFollower,
    SyncPrefixIndex,
)
from kvgrpc.client.following.live import LiveFrames
from kvgrpc.errors import InvalidRequest, PeerUnreachable, StaleLog
from kvgrpc.events.following.index import Match
from kvgrpc.events.following.messages import FollowerState
from kvgrpc.v1 import event_service_pb2 as events_pb
from tests.support.publishing import Publishing
from tests.support.waiting import until

LIVE: dict[str, Any] = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:0"}


def knows(follower: EventFollower, engine: Publishing, blocks: Iterable[int] = range(20)) -> bool:
    """Whether the follower is current and knows what the cache holds."""
    if follower.state is not FollowerState.CURRENT or follower.freshness.next_sequence != engine.next_sequence:
        return False
    for block in blocks:
        assert follower.media_of(block) == engine.media_of(block), block
    return True


async def test_a_follower_knows_what_was_there_and_what_came() -> None:
    async with Publishing() as engine:
        await engine.store([1, 2, 3])
        await engine.store([2, -5], "CPU")
        async with EventFollower(engine.address) as follower:
            await follower.until_current()
            assert knows(follower, engine)
            assert follower.match([1, 2, 3, 4]) == Match(3, 3, 3, 3)
            assert follower.media_of(2**64 - 5) == {"CPU"}
            assert follower.blocks == {"CPU": 2, "GPU": 3}
            await engine.remove([1])
            await engine.store([4])
            await until(lambda: knows(follower, engine))
            assert follower.match([1]) == Match(0, 0, 0, 0)
            await engine.clear()
            await until(lambda: knows(follower, engine))
            assert follower.blocks == {}
            assert follower.counts.snapshots == 1


async def test_a_follower_goes_on_where_a_connection_broke() -> None:
    async with Publishing() as engine, EventFollower(engine.address) as follower:
        await engine.store([1])
        await follower.until_current()
        await engine.hang_up()
        await engine.store([2])
        await until(lambda: follower.state is FollowerState.CONNECTING)
        assert follower.match([1]) == Match(1, 1, 1, 1)
        await engine.serve()
        await until(lambda: knows(follower, engine))
        assert follower.counts.snapshots == 1


async def test_another_log_is_another_cache() -> None:
    async with Publishing() as engine, EventFollower(engine.address) as follower:
        await engine.store([1, 2])
        await until(lambda: knows(follower, engine))
        before = follower.freshness.log_id
        await engine.restart()
        await engine.store([3])
        await until(lambda: follower.freshness.log_id != before and knows(follower, engine))
        assert follower.match([1]) == Match(0, 0, 0, 0)
        assert follower.counts.new_logs == 1


async def test_a_follower_that_fell_behind_takes_a_snapshot() -> None:
    async with Publishing(buffer_steps=3) as engine, EventFollower(engine.address) as follower:
        await engine.store([1])
        await until(lambda: knows(follower, engine))
        await engine.hang_up()
        for block in range(2, 12):
            await engine.store([block])
        await engine.remove([1])
        await engine.serve()
        await until(lambda: knows(follower, engine))
        assert follower.counts.snapshots == 2


async def test_without_snapshots_a_follower_reads_the_log_from_its_beginning() -> None:
    async with Publishing(snapshots=False) as engine:
        await engine.store([1, 2])
        async with EventFollower(engine.address) as follower:
            await until(lambda: knows(follower, engine))
            assert follower.freshness.whole


async def test_without_snapshots_and_without_the_beginning_it_says_that_there_may_be_more() -> None:
    async with Publishing(snapshots=False, buffer_steps=1) as engine:
        await engine.store([1])
        await engine.store([2])
        async with EventFollower(engine.address) as follower:
            await until(lambda: follower.state is FollowerState.CURRENT)
            assert not follower.freshness.whole
            assert (follower.match([1]).device, follower.match([2]).device) == (0, 1)
            await engine.clear()
            await until(lambda: knows(follower, engine))
            assert follower.freshness.whole


async def test_the_digest_is_compared() -> None:
    async with Publishing() as engine, EventFollower(engine.address) as follower:
        await engine.store(range(100))
        await until(lambda: follower.counts.digests_equal >= 2)
        contents = follower.core.contents
        assert contents is not None
        contents.blocks.stored("GPU", [777])
        contents._digest.add("GPU", 0, [777], 1)
        await until(lambda: follower.counts.digests_different == 1)
        await until(lambda: knows(follower, engine, [*range(100), 777]))


@pytest.mark.parametrize("live", [False, True], ids=["watch", "pub"])
async def test_the_digest_is_compared_while_the_stream_is_never_idle(live: bool) -> None:
    async with Publishing(**(LIVE if live else {})) as engine, EventFollower(engine.address, live=live) as follower:
        await follower.until_current()

        async def publish() -> None:
            while True:
                await engine.store([next(numbers) % 5000])
                await asyncio.sleep(0)

        numbers = itertools.count()
        publishing = asyncio.create_task(publish())
        await until(lambda: follower.counts.digests_equal >= 3)
        assert not publishing.done()
        publishing.cancel()
        assert follower.counts.digests_different == 0


async def test_live_frames_bring_what_follows() -> None:
    async with Publishing(**LIVE) as engine, EventFollower(engine.address, live=True) as follower:
        await engine.store([1])
        await follower.until_current()
        for block in range(2, 18):
            await engine.store([block], "CPU" if block % 2 else None)
        await until(lambda: knows(follower, engine))
        assert (follower.counts.snapshots, follower.counts.failures) == (1, 0)
        await engine.restart()
        await engine.store([5])
        await until(lambda: follower.counts.new_logs == 1 and knows(follower, engine))


async def test_what_live_frames_lost_is_read_again() -> None:
    async with Publishing(**LIVE) as engine, EventFollower(engine.address, live=True) as follower:
        await engine.store([1])
        await follower.until_current()
        core, live, frames = follower.core, follower.core.live, []

        def lossy(sequence: int, payload: bytes, now: float) -> None:
            frames.append(sequence)
            if sequence % 3:
                live(sequence, payload, now)

        core.live = lossy  # type: ignore[method-assign]
        for block in range(2, 14):
            await engine.store([block])
            await engine.remove([block - 1])
        await until(lambda: knows(follower, engine))
        assert frames and follower.counts.replays > 0
        assert follower.counts.snapshots == 1


async def test_the_end_that_live_frames_lost_is_read_again() -> None:
    """Nothing comes after it that would show the gap."""
    async with Publishing(**LIVE) as engine, EventFollower(engine.address, live=True) as follower:
        await engine.store([1])
        await until(lambda: knows(follower, engine))
        follower.core.live = lambda sequence, payload, now: None  # type: ignore[method-assign]
        for block in range(2, 6):
            await engine.store([block])
        await until(lambda: knows(follower, engine))
        assert (follower.counts.replays, follower.counts.snapshots) == (1, 1)


async def test_an_endpoint_that_no_socket_takes_costs_the_live_frames_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A publisher says it: it must not make the process that follows unhealthy for good."""
    async with Publishing(**LIVE) as engine:
        engine.publisher.stream.pub_endpoint = "tcp://engine-7"
        async with EventFollower(engine.address, live=True) as follower:
            for block in (1, 2, 3):
                await engine.store([block])
                await until(lambda: knows(follower, engine))
            assert follower.counts.failures == 0
    assert [record.message for record in caplog.records if "background task" in record.message] == []
    assert any("no live frames from 'tcp://engine-7'" in record.message for record in caplog.records)


async def test_a_publisher_that_floods_leaves_turns_of_the_loop_to_others() -> None:
    """It sends the next frame before the last one is folded."""
    context: Any = zmq.Context(zmq.asyncio.Context.instance())
    taken = others = 0
    with context.socket(zmq.XPUB) as publisher:
        publisher.bind("inproc://flood")

        def on_frame(sequence: int, payload: bytes) -> None:
            nonlocal taken
            taken += 1
            if not others and taken < 20_000:
                publisher.send_multipart([b"", sequence.to_bytes(8, "big"), payload])

        frames = LiveFrames("127.0.0.1:1", on_frame)
        frames.subscribe("inproc://flood", b"")
        await until(lambda: publisher.poll(0) != 0)
        publisher.send_multipart([b"", bytes(8), b"one"])
        await until(lambda: taken > 0)
        others = 1
        assert taken < 20_000
        await frames.close()


async def test_nobody_there_is_said_and_tried_again() -> None:
    async with Publishing() as engine:
        await engine.hang_up()
        async with EventFollower(engine.address) as follower:
            with pytest.raises(PeerUnreachable, match=r"not current after 0\.3 s, connecting; PEER_UNREACHABLE"):
                await follower.until_current(0.3)
            await engine.serve()
            await follower.until_current()


@pytest.mark.parametrize("seconds", [0.0, -1.0, -60.0])
async def test_a_wait_whose_time_is_over_looks_once(seconds: float) -> None:
    """Who waits for several gives each what is left of one time, and that is negative where it is over."""
    async with Publishing() as engine, EventFollower(engine.address) as follower:
        await follower.until_current()
        await follower.until_current(seconds)
    with pytest.raises(PeerUnreachable, match="not current"):
        await EventFollower("127.0.0.1:1").until_current(seconds)
    index = PrefixIndex(sources=["127.0.0.1:1"])
    await index.until_current(0, seconds)
    with pytest.raises(TimeoutError, match="caches are current"):
        await index.until_current(1, seconds)

    def plain() -> None:
        with pytest.raises(PeerUnreachable, match="not current"):
            SyncEventFollower("127.0.0.1:1").until_current(seconds)
        with pytest.raises(TimeoutError, match="caches are current"):
            SyncPrefixIndex(sources=["127.0.0.1:1"]).until_current(1, seconds)

    await asyncio.to_thread(plain)


async def test_a_wait_may_be_for_ever_and_not_for_no_number() -> None:
    async with Publishing() as engine, EventFollower(engine.address) as follower:
        await follower.until_current(math.inf)
        async with PrefixIndex(sources=[engine.address]) as index:
            await index.until_current(1, math.inf)

        def plain() -> None:
            with SyncEventFollower(engine.address) as same, SyncPrefixIndex(sources=[engine.address]) as indexed:
                same.until_current(math.inf)
                indexed.until_current(1, math.inf)
                for wait in (same.until_current, partial(indexed.until_current, 1)):
                    with pytest.raises(InvalidRequest, match="timeout"):
                        wait(math.nan)

        await asyncio.to_thread(plain)
        for each in (follower.until_current(math.nan), PrefixIndex(sources=["127.0.0.1:1"]).until_current(1, math.nan)):
            with pytest.raises(InvalidRequest, match="timeout"):
                await each


async def read_over_a_break(
    engine: Publishing, client: Client, mode: events_pb.WatchMode.ValueType
) -> tuple[list[object], asyncio.Task[None]]:
    """Reads two parts, then one more that came while nobody served; whoever asks ends the task."""
    read: list[object] = []

    async def reading() -> None:
        async for part in client.watch(mode=mode):
            if not isinstance(part, Heartbeat):
                read.append(part)

    task = asyncio.create_task(reading())
    await until(lambda: len(read) == 2)
    await engine.hang_up()
    await engine.store([2])
    await engine.serve()
    await until(lambda: len(read) == 3)
    return read, task


class TestWatchGoesOn:
    async def test_a_tail_goes_on_behind_its_last_batch(self) -> None:
        async with Publishing(clear_first=False) as engine, Client(engine.address) as client:
            await engine.store([1])
            read, task = await read_over_a_break(engine, client, events_pb.WATCH_MODE_TAIL)
            assert [part.first_sequence for part in read if isinstance(part, Payloads)] == [0, 1]
            await engine.restart()
            with pytest.raises(StaleLog):
                await asyncio.wait_for(task, 20)

    async def test_a_snapshot_goes_on_as_a_tail(self) -> None:
        async with Publishing() as engine, Client(engine.address) as client:
            await engine.store([1])
            read, task = await read_over_a_break(engine, client, events_pb.WATCH_MODE_SNAPSHOT)
            assert isinstance(read[1], Snapshot) and read[1].last
            assert isinstance(read[2], Payloads) and read[2].first_sequence == read[1].next_sequence
            task.cancel()

    async def test_nobody_who_comes_back_is_said_in_time(self) -> None:
        async with Publishing() as engine, Client(engine.address, timeout=3.0) as client:
            parts = client.watch(mode=events_pb.WATCH_MODE_TAIL)
            await anext(parts)
            await engine.hang_up()
            begin = time.monotonic()
            with pytest.raises(PeerUnreachable):
                async for _ in parts:
                    pass
            assert time.monotonic() - begin < 15


async def test_the_same_for_plain_code() -> None:
    async with Publishing() as engine:
        await engine.store([1, 2])

        def plain() -> None:
            with SyncEventFollower(engine.address) as follower:
                follower.until_current()
                assert follower.match([1, 2, 3]) == Match(2, 2, 2, 2)
                assert follower.blocks == {"GPU": 2}
            with SyncPrefixIndex(sources=[engine.address]) as index:
                index.until_current()
                assert [score.blocks for score in index.score([1, 2, 3])] == [2]

        await asyncio.to_thread(plain)
