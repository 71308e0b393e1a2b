"""A publisher that can be killed, stopped, flooded or fed with junk, and a follower, each in a process of its own.

Run as a script this file is the publisher: it serves the requests of the trace, and says on demand what it caches; or
a follower, which says what it shows.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc.client import EventFollower
from kvgrpc.events import (
    BlockRemoved,
    BlockStored,
    EventPublisher,
    EventServicer,
    JournalingPublisher,
    KVEventBatch,
    open_publisher,
)
from kvgrpc.events.model import Event
from kvgrpc.model import RankId, RankRef, new_epoch
from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.v1.event_service_pb2_grpc import add_EventServiceServicer_to_server
from tests.support.ports import free_port
from tests.support.prefix_cache import PrefixCache, hash_of, requests

ROOT = Path(__file__).parents[2]


# Processes start within it on a machine that does much else.
SECONDS = 90.0


# Leaves the cache as it was. 1,000 of them are 50 MB: more than sockets and gRPC hold for a reader that does not read.
FILLER: list[Event] = [BlockStored([1], None, list(range(70_000, 80_000)), 10_000), BlockRemoved([1])]


Content = dict[str, set[int]]


Report = Callable[[str], None]


class Publisher:
    """The process, behind the words of ``within`` (a command that runs another). ``ask`` tells it a word and returns
    its answer."""

    def __init__(
        self, grpc_port: int, pub_port: int, *, host: str = "127.0.0.1", within: Sequence[str] = (), **settings: Any
    ) -> None:
        self.address = f"{host}:{grpc_port}"
        settings = {"endpoint": f"tcp://{host}:{pub_port}", "bind": True} | settings
        self._command = [*within, sys.executable, __file__, self.address, json.dumps(settings)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert self._line() == "ready"

    def ask(self, word: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")
        return self._line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _line(self) -> Any:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], SECONDS)[0], f"no line in {SECONDS:g} s"
        return json.loads(self.process.stdout.readline())


class FollowerProcess:
    """A follower in a process of its own."""

    def __init__(self, address: str, live: bool) -> None:
        command = [sys.executable, __file__, "follow", address, json.dumps(live)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )

    def __enter__(self) -> FollowerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=SECONDS)

    def shown(self, next_sequence: int) -> tuple[Content, dict[str, int]]:
        """What it shows once it has all before that sequence, and what happened to it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(b"%d\n" % next_sequence)
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], 2 * SECONDS)[0], f"no line in {2 * SECONDS:g} s"
        content, counts = json.loads(self.process.stdout.readline())
        return {medium: set(hashes) for medium, hashes in content.items()}, counts


@contextmanager
def publisher(**settings: Any) -> Iterator[Publisher]:
    started = Publisher(free_port(), free_port(), **settings)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.kill()


async def healed(follower: EventFollower, content: Content, next_sequence: int) -> float:
    """Seconds until it has exactly this content; fails after SECONDS."""
    began = time.monotonic()
    while follower.freshness.next_sequence != next_sequence or follower.blocks != sizes(content):
        assert time.monotonic() - began < SECONDS, f"{follower.state}, {follower.freshness}, {follower.last_error}"
        await asyncio.wait_for(follower.changed(), SECONDS)
    for medium, hashes in content.items():
        assert all(medium in follower.media_of(block) for block in hashes)
    assert follower.counts.digests_different == 0
    return time.monotonic() - began


def sizes(content: Content) -> dict[str, int]:
    return {medium: len(hashes) for medium, hashes in content.items()}


async def told(source: Publisher, word: str) -> tuple[Content, int]:
    content, next_sequence = await asyncio.to_thread(source.ask, word)
    return {medium: set(hashes) for medium, hashes in content.items()}, next_sequence


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    """Prints how long it took to heal, whether pytest keeps output to itself or not."""

    def say_it(line: str) -> None:
        with capsys.disabled():
            print(f"\n{line}")

    return say_it


async def follow(address: str, live: bool) -> None:
    """The follower's process."""
    ever = {hash_of(block) for blocks in requests() for block in blocks}
    async with EventFollower(address, live=live) as follower:
        while line := await asyncio.to_thread(sys.stdin.readline):
            while follower.freshness.next_sequence < int(line):
                await follower.changed()
            content: dict[str, list[int]] = {}
            for block in ever:
                for medium in follower.media_of(block):
                    content.setdefault(medium, []).append(block)
            say([content, dataclasses.asdict(follower.counts)])


async def serve(address: str, settings: dict[str, Any]) -> None:
    """The publisher's process."""
    source = open_publisher(settings, RankRef(RankId("engine"), new_epoch()))
    assert source.stream is not None
    server = grpc.aio.server(interceptors=interceptors_of(ServerSecurity()))
    add_EventServiceServicer_to_server(EventServicer([source.stream]), server)
    server.add_insecure_port(address)
    await server.start()
    cache, trace = PrefixCache(500, 1_000), requests()
    say("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        word, *number = line.split()
        if word == "junk":
            source.publish_raw(b"\xc1\xff")
            source.publish(object())
            # The clear comes when the publisher meets the junk, with the next number: not after what is stated again.
            await asyncio.to_thread(wait_published, source)
            say("published")
            continue
        if word == "restate":
            # What the clear after the junk has taken away.
            cache = PrefixCache(500, 1_000)
            number = ["100"]
            trace = requests()
        for count in range(int(number[0])):
            happened = FILLER if word == "fill" else cache.request(next(trace))
            if happened:
                source.publish(KVEventBatch(time.time(), happened))
            if word not in ("flood", "fill") and count % 4 == 0:
                await asyncio.sleep(0.002)
        await asyncio.to_thread(wait_published, source)
        content = {medium: sorted(hashes) for medium, hashes in cache.content.items()}
        say([content, source.stream.next_sequence])


def wait_published(source: EventPublisher) -> None:
    assert isinstance(source, JournalingPublisher)
    while source.counts.unsent:
        time.sleep(0.005)


def say(word: object) -> None:
    os.write(1, json.dumps(word).encode() + b"\n")


if __name__ == "__main__":
    if sys.argv[1] == "follow":
        asyncio.run(follow(sys.argv[2], json.loads(sys.argv[3])))
    else:
        asyncio.run(serve(sys.argv[1], json.loads(sys.argv[2])))
