"""KV events of SGLang, by SGLang's publisher and by ours."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import zmq
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
)

from kvgrpc.client import EventFollower, SyncClient
from kvgrpc.client.watch import Payloads
from kvgrpc.engines.sglang.events import KvGrpcPublisher
from kvgrpc.engines.sglang.plugin import add_publisher
from kvgrpc.errors import InvalidRequest
from kvgrpc.events.codec import decode_batch
from kvgrpc.events.model import BlockRemoved as Removed
from kvgrpc.events.model import BlockStored as Stored
from kvgrpc.server import EventRelay
from kvgrpc.v1 import event_service_pb2
from tests.engines.engine import LOCAL, PAGE, Engine, engine_arguments
from tests.engines.model import Case, Reference
from tests.engines.relayed import shown_by_a_relay
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(400)
END = (-1).to_bytes(8, "big", signed=True)
TOPIC = b"kv"


def batches() -> list[KVEventBatch]:
    """Every kind of event, with every field that SGLang may leave out."""
    full = BlockStored([5, -6], 4, [1, 2, 3, 4], 2, None, "GPU", cache_salt="s", session_id="t", lora_name="l")
    events = ([AllBlocksCleared()], [full], [BlockStored([7], None, [1, 2], 2, 3)], [BlockRemoved([5]), full])
    return [KVEventBatch(float(number), list(each)) for number, each in enumerate(events)]


def config(publisher: str, port: int, replay: int) -> str:
    return json.dumps(
        {
            "publisher": publisher,
            "endpoint": f"tcp://*:{port}",
            "replay_endpoint": f"tcp://*:{replay}",
            "topic": TOPIC.decode(),
        }
    )


def replayed(port: int, wanted: int, seconds: float = 20.0) -> list[tuple[int, bytes]]:
    """Number and payload of all batches from 0, by the ROUTER; asks until there are so many."""
    end = time.monotonic() + seconds
    while True:
        found = _replay(port)
        if len(found) >= wanted or time.monotonic() > end:
            return found
        time.sleep(0.1)


def _replay(port: int) -> list[tuple[int, bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{LOCAL}:{port}")
        dealer.send_multipart((b"", (0).to_bytes(8, "big")))
        found: list[tuple[int, bytes]] = []
        while dealer.poll(5000):
            _, topic, number, payload = dealer.recv_multipart()
            if number == END:
                return found
            assert topic == TOPIC
            found.append((int.from_bytes(number, "big"), payload))
    raise AssertionError(f"the replay at {port} did not end")


def test_the_same_batches_have_the_same_bytes_and_are_described_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGRPC_EVENTS", json.dumps({"clear_first": False}))
    add_publisher()
    published, described = [], []
    for name in ("zmq", "kvgrpc"):
        port, replay = free_port(), free_port()
        publisher = EventPublisherFactory.create(config(name, port, replay), 0)
        try:
            for batch in batches():
                publisher.publish(batch)
            published.append(replayed(replay, len(batches())))
            source = publisher.describe_local_source(PAGE)
            assert source is not None
            described.append({**source, "endpoint": source["endpoint"].replace(str(port), "PORT")})
            described[-1]["replay_endpoint"] = source["replay_endpoint"].replace(str(replay), "PORT")
        finally:
            publisher.shutdown()
    assert len(published[0]) == len(batches())
    assert published[0] == published[1]
    assert described[0] == described[1]


async def test_sglangs_own_publisher_is_followed_through_a_relay() -> None:
    """An engine without our plug-in."""
    port, replay = free_port(), free_port()
    publisher = EventPublisherFactory.create(config("zmq", port, replay), 0)
    try:
        for batch in batches():
            publisher.publish(batch)
        relay = EventRelay(
            f"{LOCAL}:0", f"tcp://{LOCAL}:{port}", "sglang", replay=f"tcp://{LOCAL}:{replay}", topic="kv"
        ).open()
        try:
            async with EventFollower(relay.address) as follower:
                wanted = held(replayed(replay, len(batches())))
                while follower.blocks != wanted:
                    await asyncio.wait_for(follower.changed(), 20)
                assert wanted != {}
        finally:
            relay.close()
    finally:
        publisher.shutdown()


def test_a_publisher_that_cannot_be_served_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())  # those of other tests may be about to end
    monkeypatch.setenv("KVGRPC_EVENTS_LISTEN", "no address")
    with pytest.raises(InvalidRequest):
        KvGrpcPublisher(0, endpoint=f"tcp://*:{free_port()}")
    assert not [each for each in set(threading.enumerate()) - before if each.name.startswith("kvgrpc-events")]


class Published:
    """An engine that publishes events and its load."""

    def __init__(self, folder: Path, model: Path, publisher: str) -> None:
        self.port, self.replay, self.load = free_port(), free_port(), free_port()
        arguments = {
            **engine_arguments(model, 1),
            "port": free_port(),
            "max_total_tokens": 40 * PAGE,  # so that blocks are removed
            "max_running_requests": 1,
            "kv_events_config": config(publisher, self.port, self.replay),
            "load_publish_endpoint": f"tcp://*:{self.load}",
        }
        # Without the first batch of ours the numbers and bytes are those of SGLang's own publisher.
        ours = {"KVGRPC_EVENTS_LISTEN": f"{LOCAL}:0", "KVGRPC_EVENTS": json.dumps({"clear_first": False})}
        self.engine = Engine(publisher, folder, arguments, ours)

    def serve(self, cases: list[Case]) -> list[tuple[int, bytes]]:
        """What was published while these were computed, one after another, and after a flush."""
        for case in cases:
            assert self.engine.generate(case.prompt, len(case.tokens)).result() == case.tokens
        assert self.engine.is_empty()
        count = len(replayed(self.replay, 1))
        while True:
            time.sleep(1.0)
            found = replayed(self.replay, 1)
            if len(found) == count:
                return found
            count = len(found)


@pytest.fixture(scope="module")
def cases(reference: Reference) -> list[Case]:
    first = reference.case(8 * PAGE + 3)
    return [first, reference.case(10 * PAGE, prefix=first.prompt[: 4 * PAGE]), *map(reference.case, (300, 280))]


@pytest.fixture(scope="module")
def ours(folder: Path, reference: Reference) -> Iterator[Published]:
    published = Published(folder, reference.path, "kvgrpc")
    try:
        published.engine.wait_ready()
        yield published
    finally:
        published.engine.close()


class Batch(msgspec.Struct, array_like=True):
    """Its events as they were written."""

    ts: float
    events: list[msgspec.Raw]
    attn_dp_rank: int | None = None


def events(published: list[tuple[int, bytes]]) -> list[bytes]:
    """The bytes of all events in their order: which of them share a batch depends on the scheduler's steps.

    A clear right after another is left out: the engine is flushed as often as it takes until its pool is free.
    """
    found = [bytes(event) for _, payload in published for event in msgspec.msgpack.decode(payload, type=Batch).events]
    return [event for before, event in pairwise([b"", *found]) if event != before or b"AllBlocksCleared" not in event]


def test_an_engines_events_are_those_that_it_publishes_itself(
    ours: Published, folder: Path, reference: Reference, cases: list[Case]
) -> None:
    own = ours.serve(cases)
    ours.engine.stop()
    theirs = Published(folder, reference.path, "zmq")
    try:
        theirs.engine.wait_ready()
        expected = theirs.serve(cases)
        assert theirs.engine.generate(cases[0].prompt, 1).result() == cases[0].tokens[:1]
        wanted = held(replayed(theirs.replay, len(expected) + 1))
        assert shown_by_a_relay("sglang", theirs.port, theirs.replay, wanted) == wanted != {}
    finally:
        theirs.engine.close()
        ours.engine.go_on()
    kinds = {msgspec.msgpack.decode(event)["type"] for event in events(expected)}
    assert kinds == {"AllBlocksCleared", "BlockStored", "BlockRemoved"}
    assert events(own) == events(expected)
    assert [number for number, _ in own] == list(range(len(own)))


async def test_watch_and_a_follower_give_what_was_published(ours: Published, cases: list[Case]) -> None:
    own = ours.serve(cases)
    (address,) = re.findall(r"kvgrpc: events of .* served at (\S+)", ours.engine.log())
    assert ours.engine.generate(cases[0].prompt, 1).result() == cases[0].tokens[:1]
    async with EventFollower(address) as follower:
        await follower.until_current(20)
        shown = follower.blocks
        assert follower.counts.digests_different == 0
    own = replayed(ours.replay, len(own) + 1)
    assert shown == held(own) != {}


def test_watch_replays_the_same_bytes(ours: Published, cases: list[Case]) -> None:
    own = ours.serve(cases)
    (address,) = re.findall(r"kvgrpc: events of .* served at (\S+)", ours.engine.log())
    with SyncClient(address) as client:
        (stream,) = client.list_streams()
        parts = client.watch(mode=event_service_pb2.WATCH_MODE_REPLAY, engine=stream.engine)
        payloads = [payload for part in parts if isinstance(part, Payloads) for payload in part.payloads]
    assert payloads == [payload for _, payload in own]


def test_sglangs_load_is_published_beside_them(ours: Published) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"load")
        subscriber.connect(f"tcp://{LOCAL}:{ours.load}")
        assert subscriber.poll(10_000)
        topic, _, payload = subscriber.recv_multipart()
    assert (topic, msgspec.msgpack.decode(payload)[0]) == (b"load", "LoadStat")


def held(published: list[tuple[int, bytes]]) -> dict[str, int]:
    """Blocks by medium that the payloads come to, told as plainly as possible."""
    there: dict[str, set[object]] = {}
    for _, payload in published:
        for event in decode_batch(payload).events:
            if isinstance(event, Stored):
                there.setdefault(event.medium or "GPU", set()).update(event.block_hashes)
            elif isinstance(event, Removed):
                there.setdefault(event.medium or "GPU", set()).difference_update(event.block_hashes)
            else:
                there.clear()
    return {medium: len(blocks) for medium, blocks in there.items() if blocks}
