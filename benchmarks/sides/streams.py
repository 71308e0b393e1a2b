"""Publisher and reader of KV-cache events of either protocol behind one face."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import zmq

from benchmarks.baselines import events as seed

TIMEOUT = 60.0
ProtocolName = Literal["kvgrpc", "seed"]


class PublisherSide(Protocol):
    """A publisher that keeps batches for replay. ``endpoint``: of live events; ``replay``: where a reader asks."""

    endpoint: str
    replay: str

    def batch(self, ts: float, hashes: list[int], tokens: list[int]) -> object: ...

    def publish(self, batch: Any) -> object: ...

    def wait_published(self, number: int) -> None:
        """Until this many can be replayed, or were evicted."""


class SeedPublisher:
    """The seeds' publisher."""

    def __init__(self, buffer_steps: int) -> None:
        self._publisher = seed.Publisher(buffer_steps=buffer_steps)
        self.endpoint = self._publisher.endpoint
        self.replay = self._publisher.replay_endpoint
        self.publish = self._publisher.publish

    def batch(self, ts: float, hashes: list[int], tokens: list[int]) -> seed.Batch:
        return seed.Batch(ts, [seed.BlockStored(hashes, None, tokens, len(tokens) // len(hashes), None)])

    def wait_published(self, number: int) -> None:
        _until(lambda: self._publisher.published >= number)


class KvgrpcPublisher:
    """A prefill rank that publishes."""

    def __init__(self, buffer_steps: int) -> None:
        from benchmarks.sides.ours import open_publishing_rank
        from kvgrpc.events import JournalingPublisher

        self._rank = open_publishing_rank(buffer_steps=buffer_steps)
        publisher = self._rank.events
        assert isinstance(publisher, JournalingPublisher)
        self._publisher = publisher
        self.endpoint = publisher.stream.state().pub_endpoint
        self.replay = self._rank.address
        self.publish = publisher.publish

    def batch(self, ts: float, hashes: list[int], tokens: list[int]) -> object:
        from kvgrpc.events import BlockStored, KVEventBatch

        return KVEventBatch(ts, [BlockStored([*hashes], None, tokens, len(tokens) // len(hashes))])

    @property
    def next_sequence(self) -> int:
        return self._publisher.stream.next_sequence

    def wait_published(self, number: int) -> None:
        _until(lambda: self._publisher.counts.published >= number)


def open_publisher(protocol: ProtocolName, buffer_steps: int = 10_000) -> PublisherSide:
    return SeedPublisher(buffer_steps) if protocol == "seed" else KvgrpcPublisher(buffer_steps)


def read_seed(endpoint: str, first: int) -> tuple[float, list[bytes]]:
    """Replays all from ``first`` on; seconds from the first batch that arrived to the end mark, and the batches.

    The wait before the first is left out, which is up to 100 ms: the seed looks for requests between two batches only.
    """
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.set(zmq.RCVTIMEO, int(TIMEOUT * 1000))
    socket.connect(endpoint)
    payloads = []
    try:
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        message = socket.recv_multipart()
        begin = time.perf_counter()
        while message[1] != seed.END:
            payloads.append(message[2])
            message = socket.recv_multipart()
        return time.perf_counter() - begin, payloads
    finally:
        socket.close(linger=0)
        context.term()


def read_kvgrpc(address: str, first: int) -> tuple[float, list[bytes]]:
    """Replays all from ``first`` on over an open channel; seconds from the call to its end, and the batches."""
    import grpc

    from kvgrpc.v1 import event_service_pb2 as pb
    from kvgrpc.v1.event_service_pb2_grpc import EventServiceStub

    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(TIMEOUT)
        watch = EventServiceStub(channel).Watch
        payloads: list[bytes] = []
        begin = time.perf_counter()
        for response in watch(pb.WatchRequest(mode=pb.WATCH_MODE_REPLAY, from_sequence=first), timeout=TIMEOUT):
            payloads.extend(response.raw.payloads)
        return time.perf_counter() - begin, payloads


def read(protocol: ProtocolName, where: str, first: int = 0) -> tuple[float, list[bytes]]:
    return read_seed(where, first) if protocol == "seed" else read_kvgrpc(where, first)


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not published within {TIMEOUT} s")
        time.sleep(0.001)
