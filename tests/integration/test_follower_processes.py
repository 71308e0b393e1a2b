"""Followers of a publisher in a process of its own, which is killed, stopped and flooded: they end with its cache.

Run as a script this file is the publisher: a cache with evictions, as fast as it may, at fixed ports.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc.client import EventFollower
from kvgrpc.events import BlockRemoved, BlockStored, EventServicer, KVEventBatch, open_publisher
from kvgrpc.events.following.messages import FollowerState
from kvgrpc.model import RankId, RankRef, new_epoch
from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.options import SERVER_OPTIONS
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.v1.event_service_pb2_grpc import add_EventServiceServicer_to_server
from tests.support import waiting
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
SECONDS = 60.0
until = partial(waiting.until, seconds=SECONDS)
HASHES, CAPACITY = 2000, 600


class Engine:
    """The process under test, which can be started again at its ports."""

    def __init__(self) -> None:
        self.port, self.pub = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.process: Any = None

    async def start(self, pause: float, keep: int) -> None:
        arguments = [__file__, str(self.port), str(self.pub), str(pause), str(keep)]
        pipe = asyncio.subprocess.PIPE
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=pipe, stdout=pipe, limit=2**24, env=environment
        )
        assert await self.line() == "serving"

    async def line(self) -> Any:
        return json.loads(await asyncio.wait_for(self.process.stdout.readline(), SECONDS))

    async def pause(self) -> dict[str, Any]:
        """It publishes nothing any more; what its cache holds."""
        self.process.stdin.write(b"pause\n")
        answer: dict[str, Any] = await self.line()
        return answer

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("live", [False, True], ids=["tail", "pub"])
async def test_killed_stopped_and_flooded_publishers_are_followed_exactly(
    live: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine()
    await engine.start(pause=0.002, keep=10_000)
    healed: dict[str, float] = {}
    try:
        async with EventFollower(engine.address, live=live) as follower:
            await follower.until_current(SECONDS)
            first = follower.freshness.next_sequence
            await until(lambda: follower.freshness.next_sequence >= first + 100)
            healed["another log after kill -9"] = await heal_after_a_kill(engine, follower, pause=0.002, keep=10_000)
            engine.process.send_signal(signal.SIGSTOP)
            await until(lambda: follower.state is FollowerState.CONNECTING)
            engine.process.send_signal(signal.SIGCONT)
            begin = time.monotonic()
            await follower.until_current(SECONDS)
            healed["SIGSTOP beyond the silence"] = time.monotonic() - begin
            # A ring that holds almost nothing, as fast as the process can: it overtakes every reader now and then.
            healed["kill -9, then a flood"] = await heal_after_a_kill(engine, follower, pause=0.0, keep=50)
            await asyncio.sleep(2.0)  # the flood itself
            truth = await engine.pause()
            begin = time.monotonic()
            await until(lambda: same(follower, truth))
            healed["behind the flood"] = time.monotonic() - begin
            with capsys.disabled():
                print(f"\n{'pub' if live else 'tail'}: healed in {healed}, {follower.counts}")
            assert follower.counts.new_logs == 2
            assert follower.counts.digests_different == 0
    finally:
        await engine.kill()


async def heal_after_a_kill(engine: Engine, follower: EventFollower, pause: float, keep: int) -> float:
    """Seconds from the moment the successor serves."""
    logs = follower.counts.new_logs
    await engine.kill()
    await engine.start(pause, keep)
    begin = time.monotonic()
    await until(lambda: follower.counts.new_logs > logs and follower.freshness.whole)
    return time.monotonic() - begin


def same(follower: EventFollower, truth: dict[str, Any]) -> bool:
    fresh = follower.freshness
    if (fresh.log_id, fresh.next_sequence) != (truth["log"], truth["next"]):
        return False
    found = {block for block in range(HASHES) if follower.media_of(block)}
    assert found == set(truth["held"])
    return follower.state is FollowerState.CURRENT


class PublishingCache:
    """Holds the blocks used last; publishes what comes and goes."""

    def __init__(self, publisher: Any) -> None:
        self.publisher = publisher
        self.held: OrderedDict[int, None] = OrderedDict()
        self.rng = random.Random()

    def use(self) -> None:
        used = [self.rng.randrange(HASHES) for _ in range(16)]
        events: list[Any] = []
        new = [block for block in dict.fromkeys(used) if block not in self.held]
        for block in used:
            self.held[block] = None
            self.held.move_to_end(block)
        if new:
            events.append(BlockStored(new, None, [1] * 16 * len(new), 16, medium="GPU"))
        evicted = [self.held.popitem(last=False)[0] for _ in range(max(0, len(self.held) - CAPACITY))]
        if evicted:
            events.append(BlockRemoved(evicted, medium="GPU"))
        self.publisher.publish(KVEventBatch(time.time(), events))


def publish_for_ever(port: str, pub: str, pause: str, keep: str) -> None:
    settings = {"endpoint": f"tcp://127.0.0.1:{pub}", "bind": True, "buffer_steps": int(keep), "hwm": 100}
    publisher: Any = open_publisher(settings, RankRef(RankId("engine"), new_epoch()))
    LoopThread.shared().run(serve(publisher, port), SECONDS)
    paused = threading.Event()

    def pause_at_a_word() -> None:
        sys.stdin.readline()
        paused.set()

    threading.Thread(target=pause_at_a_word, daemon=True).start()
    cache = PublishingCache(publisher)
    print(json.dumps("serving"), flush=True)
    while not paused.is_set():
        cache.use()
        time.sleep(float(pause))
        while publisher.counts.unsent > 1000:
            time.sleep(0.001)
    while publisher.counts.unsent:
        time.sleep(0.001)
    stream = publisher.stream
    print(json.dumps({"log": stream.log_id, "next": stream.next_sequence, "held": list(cache.held)}), flush=True)
    signal.pause()


async def serve(publisher: Any, port: str) -> None:
    server = grpc.aio.server(interceptors=interceptors_of(ServerSecurity()), options=SERVER_OPTIONS)
    add_EventServiceServicer_to_server(EventServicer([publisher.stream]), server)
    assert server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    publisher.server = server


if __name__ == "__main__":
    publish_for_ever(*sys.argv[1:])
