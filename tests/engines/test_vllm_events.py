"""KV events of a real vLLM engine, by vLLM's publisher and by ours."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
)

from kvgrpc.client import EventFollower, SyncClient
from kvgrpc.client.watch import Payloads
from kvgrpc.events.codec import decode_batch
from kvgrpc.events.following.contents import CacheContents
from kvgrpc.events.following.index import BlockIndex
from kvgrpc.server import EventRelay
from kvgrpc.v1 import event_service_pb2
from tests.engines.engine import LOCAL
from tests.engines.model import Case, Reference
from tests.engines.relayed import shown_by_a_relay
from tests.engines.vllm_engine import BLOCK, CONNECTOR, VllmEngine, vllm_arguments
from tests.support.ports import free_port

pytestmark = pytest.mark.timeout(900)
# Without it the hashes of blocks begin with a random number.
HASH_SEED = {"PYTHONHASHSEED": "0"}
FLOAT64 = 0xCB


class Published:
    """An engine whose events somebody reads, from the first on."""

    def __init__(self, folder: Path, model: Path, **extra: Any) -> None:
        self.port, self.replay = free_port(), free_port()
        arguments = {
            **vllm_arguments(model, 1),
            "num_gpu_blocks_override": 1 + 16,  # so that blocks are removed
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "endpoint": f"tcp://*:{self.port}",
                "replay_endpoint": f"tcp://*:{self.replay}",
                "topic": "kv",
            },
            "kv_transfer_config": {**CONNECTOR, "kv_role": "kv_producer", "kv_connector_extra_config": extra},
        }
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(f"tcp://{LOCAL}:{self.port}")
        port = str(free_port())
        self.engine = VllmEngine("prefill", folder, arguments, {**HASH_SEED, "VLLM_MOONCAKE_BOOTSTRAP_PORT": port})

    def serve(self, cases: list[Case]) -> list[tuple[bytes, int, bytes]]:
        """Topic, sequence number and payload of what was published while these were computed, one after another."""
        for case in cases:
            assert self.engine.generate(case.prompt, len(case.tokens)).result() == case.tokens
        assert self.engine.is_empty()
        messages = []
        while self._socket.poll(2000):
            topic, number, payload = self._socket.recv_multipart()
            messages.append((topic, int.from_bytes(number, "big"), payload))
        return messages

    def close(self) -> None:
        self.engine.close()
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def cases(reference: Reference) -> list[Case]:
    first = reference.case(4 * BLOCK + 3)
    return [first, reference.case(6 * BLOCK, prefix=first.prompt[: 2 * BLOCK]), *map(reference.case, (300, 300))]


@pytest.fixture(scope="module")
def ours(folder: Path, reference: Reference) -> Iterator[Published]:
    published = Published(folder, reference.path, events_listen=f"{LOCAL}:0")
    published.engine.wait_ready()
    yield published
    published.close()


async def test_vllms_own_publisher_is_followed_through_a_relay() -> None:
    """An engine without our connector."""
    port, replay = free_port(), free_port()
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=f"tcp://*:{port}",
        replay_endpoint=f"tcp://*:{replay}",
        topic="kv",
    )
    publisher = EventPublisherFactory.create(config, 0)
    try:
        stored = BlockStored([b"a" * 32, b"b" * 32], None, [1, 2, 3, 4], 2, None, "GPU", None)
        for events in ([AllBlocksCleared()], [stored], [BlockRemoved([b"a" * 32], "GPU")]):
            publisher.publish(KVEventBatch(ts=1.0, events=events))
        relay = EventRelay(
            f"{LOCAL}:0", f"tcp://{LOCAL}:{port}", "vllm", replay=f"tcp://{LOCAL}:{replay}", topic="kv"
        ).open()
        try:
            async with EventFollower(relay.address) as follower:
                while follower.blocks != {"GPU": 1}:
                    await asyncio.wait_for(follower.changed(), 20)
                assert follower.match([b"b" * 32]).device == 1
        finally:
            relay.close()
    finally:
        publisher.shutdown()


def without_times(messages: list[tuple[bytes, int, bytes]]) -> list[bytes]:
    """The payloads but for the eight bytes of their times, behind the headers of the batch and of a float64."""
    assert all(payload[1] == FLOAT64 for _, _, payload in messages)
    return [payload[:2] + payload[10:] for _, _, payload in messages]


def held(messages: list[tuple[bytes, int, bytes]]) -> dict[str, int]:
    """Blocks by medium that the payloads come to."""
    contents = CacheContents(BlockIndex())
    for _, _, payload in messages:
        contents.apply(decode_batch(payload).events)
    return contents.blocks.counts()


def test_batches_are_those_of_vllms_own_publisher_byte_by_byte(
    ours: Published, folder: Path, reference: Reference, cases: list[Case]
) -> None:
    # The first batch of a log says that nothing is cached; vLLM's own publisher has no such batch.
    published = [message for message in ours.serve(cases) if message[1] > 0]
    (address,) = re.findall(r"kvgrpc: events of .* replayed at (\S+)", ours.engine.log())
    with SyncClient(address) as client:
        (stream,) = client.list_streams()
        parts = client.watch(mode=event_service_pb2.WATCH_MODE_REPLAY, engine=stream.engine)
        replayed = [payload for part in parts if isinstance(part, Payloads) for payload in part.payloads]
    assert replayed[1:] == [payload for _, _, payload in published]
    assert [number for _, number, _ in published] == list(range(1, 1 + len(published)))

    theirs = Published(folder, reference.path)
    try:
        theirs.engine.wait_ready()
        expected = theirs.serve(cases)
        assert shown_by_a_relay("vllm", theirs.port, theirs.replay, held(expected)) == held(expected) != {}
    finally:
        theirs.close()
    assert {topic for topic, _, _ in published} == {topic for topic, _, _ in expected} == {b"kv"}
    removed = [payload for payload in without_times(expected) if b"BlockRemoved" in payload]
    assert removed, "the pool is not small enough for the test"
    assert without_times(published) == without_times(expected)
