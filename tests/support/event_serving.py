"""EventService of publishers in this process over a real server, what they publish, and what a stub of it reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
import pytest

from kvgrpc.errors import KvGrpcError
from kvgrpc.events import EventServicer, EventStream, JournalingPublisher, KVEventBatch, decode_batch, open_publisher
from kvgrpc.events.model import BlockStored, Event
from kvgrpc.model import RankId, RankRef
from kvgrpc.rpc.interceptors import Admission, CallLimits, interceptors_of
from kvgrpc.rpc.options import SERVER_OPTIONS
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import event_service_pb2 as pb
from kvgrpc.v1.event_service_pb2_grpc import EventServiceStub, add_EventServiceServicer_to_server
from tests.support.waiting import until

REPLAY, TAIL, HEARTBEAT = pb.WATCH_MODE_REPLAY, pb.WATCH_MODE_TAIL, pb.WATCH_MODE_HEARTBEAT
SNAPSHOT, TYPED = pb.WATCH_MODE_SNAPSHOT, pb.WATCH_ENCODING_TYPED


@dataclass
class Served:
    """Publishers, the servicer over their streams, and a client of it."""

    publishers: list[JournalingPublisher]
    servicer: EventServicer
    stub: Any
    address: str

    @property
    def publisher(self) -> JournalingPublisher:
        return self.publishers[0]

    @property
    def stream(self) -> EventStream:
        return self.publishers[0].stream

    async def publish(self, *words: bytes) -> None:
        """Publishes a batch for each word and waits until they are in the journal."""
        for word in words:
            assert self.publisher.publish_raw(said(word))
        await until(lambda: self.publisher.counts.unsent == 0)

    def watch(self, mode: pb.WatchMode.ValueType = REPLAY, **fields: Any) -> Any:
        return self.stub.Watch(pb.WatchRequest(mode=mode, **fields), timeout=30)

    async def read(self, mode: pb.WatchMode.ValueType = REPLAY, **fields: Any) -> list[pb.WatchResponse]:
        return [message async for message in self.watch(mode, **fields)]

    async def refusal(self, mode: pb.WatchMode.ValueType = REPLAY, **fields: Any) -> KvGrpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.read(mode, **fields)
        return error_from(caught.value)


@asynccontextmanager
async def served(
    *, dps: int = 1, max_watches: int = 256, watches_per_caller: int = 64, heartbeat: float = 60.0, **settings: Any
) -> AsyncIterator[Served]:
    publishers = [open_publisher({"publisher": "null", "clear_first": False} | settings, rank(dp)) for dp in range(dps)]
    assert all(isinstance(publisher, JournalingPublisher) for publisher in publishers)
    streams = [publisher.stream for publisher in publishers if publisher.stream is not None]
    servicer = EventServicer(streams, max_watches=max_watches, heartbeat_seconds=heartbeat)
    admission = Admission(CallLimits(watches_per_caller=watches_per_caller))
    server = grpc.aio.server(interceptors=interceptors_of(ServerSecurity(), admission), options=SERVER_OPTIONS)
    add_EventServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(publishers, servicer, EventServiceStub(channel), f"127.0.0.1:{port}")  # type: ignore[arg-type]
    finally:
        await server.stop(0)
        for publisher in publishers:
            publisher.shutdown(1)


def rank(dp: int = 0) -> RankRef:
    return RankRef(RankId("engine", dp=dp), 77)


def said(word: bytes) -> bytes:
    """A batch that can be told from others."""
    return msgspec.msgpack.encode([1.0, [{"type": "Said", "word": word}], 0])


def kinds(messages: list[pb.WatchResponse]) -> list[str | None]:
    return [message.WhichOneof("kind") for message in messages]


def payloads(messages: list[pb.WatchResponse]) -> list[bytes]:
    return [payload for message in messages for payload in message.raw.payloads]


def stored(
    *hashes: int, medium: str | None = "GPU", parent: int | None = None, group: int | None = None
) -> BlockStored:
    return BlockStored([*hashes], parent, [7] * 4 * len(hashes), 4, None, medium, group_idx=group)


async def publish(events: Served, *happened: Event) -> None:
    """A batch for each."""
    for event in happened:
        assert events.publisher.publish(KVEventBatch(1.0, [event]))
    await until(lambda: events.publisher.counts.unsent == 0)


async def snapshot_of(call: Any) -> list[pb.SnapshotPart]:
    """The parts of the snapshot that comes next."""
    parts: list[pb.SnapshotPart] = []
    while not parts or not parts[-1].last:
        message = await call.read()
        assert message.WhichOneof("kind") == "snapshot"
        assert message.snapshot.index == len(parts)
        parts.append(message.snapshot)
    return parts


def blocks_of(parts: list[pb.SnapshotPart]) -> list[int | bytes]:
    """The blocks that RAW parts say, in their order."""
    return [
        block
        for part in parts
        for payload in part.payloads
        for event in decode_batch(payload).events
        if isinstance(event, BlockStored)
        for block in event.block_hashes
    ]
