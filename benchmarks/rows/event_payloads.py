"""events.decode, events.encode, events.snapshot: what payloads cost, and how long a million blocks take to be told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Worker

DECODE, ENCODE, SNAPSHOT, CUT = "events.decode", "events.encode", "events.snapshot", "events.snapshot.cut"
BLOCK_TOKENS = 16
# As engines send on average: long runs, single blocks, removals.
RUNS = (64, 1, 1, 8)
BATCHES = 400
Form = Literal["kvgrpc", "msgspec"]
Reading = Literal["snapshot", "log"]


def benchmarks(plan: Plan) -> list[Benchmark]:
    return [
        Benchmark(
            metrics=(Metric(DECODE, "events/s", "higher", "msgspec, one dialect, typed", Target(ratio=0.5)),),
            ours=lambda: Codec(_open_mixed, "kvgrpc"),
            baseline=lambda: Codec(_open_one_dialect, "msgspec"),
        ),
        Benchmark(
            metrics=(Metric(ENCODE, "us a batch of 64 blocks", "lower", "msgspec, seed class"),),
            ours=lambda: Encode("kvgrpc"),
            baseline=lambda: Encode("msgspec"),
        ),
        Benchmark(
            metrics=(
                Metric(SNAPSHOT, "s", "lower", "the whole log", Target(value=10)),
                Metric(CUT, "ms", "lower", "copy of a dict of as many blocks", Target(value=20)),
            ),
            ours=lambda: Snapshot("snapshot", plan.snapshot_blocks),
            baseline=lambda: Snapshot("log", plan.snapshot_blocks),
            warm_ups=0,
        ),
    ]


class _InAWorker:
    def __init__(self, name: str) -> None:
        self.worker = Worker(name)

    def peak_rss(self) -> int:
        return self.worker.peak_rss()

    def close(self) -> None:
        self.worker.close()


class Codec(_InAWorker):
    """Decodes the same payloads again and again."""

    def __init__(self, prepare: Callable[[Desk], None], form: Form) -> None:
        super().__init__(f"{form}-decoder")
        self.worker.call(prepare)

    def turn(self) -> Figures:
        return {DECODE: self.worker.call(_decode_all)}


class Encode(_InAWorker):
    """Encodes the same batch of 64 blocks again and again."""

    def __init__(self, form: Form) -> None:
        super().__init__(f"{form}-encoder")
        self.worker.call(_open_encoder, form)

    def turn(self) -> Figures:
        return {ENCODE: self.worker.call(_encode_often)}


class Snapshot:
    """A publisher with a state, and a reader in another process that has it told from the beginning."""

    def __init__(self, reading: Reading, blocks: int) -> None:
        self._reading: Reading = reading
        self._blocks = blocks
        self.publisher, self.reader = Worker(f"{reading}-publisher"), Worker(f"{reading}-reader")
        self._address = self.publisher.call(_publish_blocks, blocks)

    def turn(self) -> Figures:
        cut = self.publisher.call(_cut if self._reading == "snapshot" else _copy)
        return {SNAPSHOT: self.reader.call(_read_all, self._address, self._reading, self._blocks), CUT: cut}

    def peak_rss(self) -> int:
        return self.publisher.peak_rss() + self.reader.peak_rss()

    def close(self) -> None:
        self.reader.close()
        self.publisher.close()


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[int]
    medium: str | None


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed]
    rank: int | None


def _batches() -> list[Any]:
    from kvgrpc.events import BlockRemoved, BlockStored, KVEventBatch

    batches, number = [], 2**48
    for count in range(BATCHES):
        blocks = RUNS[count % len(RUNS)]
        hashes = list(range(number, number + blocks))
        tokens = [(number + offset) % 150_000 for offset in range(blocks * BLOCK_TOKENS)]
        number += blocks
        removed = [BlockRemoved([other - 1000], "GPU") for other in hashes[:4]]
        batches.append(KVEventBatch(1.0, [BlockStored(hashes, number, tokens, BLOCK_TOKENS, None, "GPU"), *removed]))
    return batches


def _payloads(desk: Desk, dialects: list[tuple[Any, Any]]) -> None:
    from kvgrpc.events.codec import BatchEncoder

    encoders = [BatchEncoder(dialect, encoding, 0) for dialect, encoding in dialects]
    batches = _batches()
    desk.items["payloads"] = [encoders[n % len(encoders)].encode(batch) for n, batch in enumerate(batches)]
    desk.items["events"] = sum(len(batch.events) for batch in batches)


def _open_mixed(desk: Desk) -> None:
    from kvgrpc.events.codec import Dialect, Encoding, decode_batch

    _payloads(desk, [(dialect, encoding) for dialect in Dialect for encoding in Encoding])
    desk.items["decode"] = decode_batch


def _open_one_dialect(desk: Desk) -> None:
    from kvgrpc.events.codec import Dialect, Encoding

    _payloads(desk, [(Dialect.VLLM, Encoding.MAP)])
    desk.items["decode"] = msgspec.msgpack.Decoder(_Batch).decode


def _decode_all(desk: Desk) -> float:
    """Events a second."""
    decode, payloads = desk.items["decode"], desk.items["payloads"]
    begin = time.perf_counter()
    events = 0
    for _ in range(5):
        for payload in payloads:
            events += len(decode(payload).events)
    took = time.perf_counter() - begin
    if events != 5 * desk.items["events"]:
        raise AssertionError(f"{events} events were read, {5 * desk.items['events']} written")
    return events / took


def _open_encoder(desk: Desk, form: Form) -> None:
    from benchmarks.baselines import events as seed

    hashes, tokens = list(range(2**48, 2**48 + 64)), list(range(2**17, 2**17 + 64 * BLOCK_TOKENS))
    if form == "msgspec":
        batch: object = seed.Batch(1.0, [seed.BlockStored(hashes, None, tokens, BLOCK_TOKENS, None)], 0)
        desk.items["encode"], desk.items["batch"] = msgspec.msgpack.Encoder().encode, batch
        return
    from kvgrpc.events import BlockStored, KVEventBatch
    from kvgrpc.events.codec import BatchEncoder, Dialect, Encoding

    desk.items["encode"] = BatchEncoder(Dialect.VLLM, Encoding.MAP, 0).encode
    desk.items["batch"] = KVEventBatch(1.0, [BlockStored(hashes, None, tokens, BLOCK_TOKENS, None, "GPU")], 0)


def _encode_often(desk: Desk) -> float:
    encode, batch = desk.items["encode"], desk.items["batch"]
    begin = time.perf_counter()
    for _ in range(5_000):
        encode(batch)
    return (time.perf_counter() - begin) / 5_000 * 1e6


def _publish_blocks(desk: Desk, blocks: int) -> str:
    from benchmarks.sides.ours import open_publishing_rank
    from kvgrpc.events import BlockStored, JournalingPublisher, KVEventBatch

    rank = open_publishing_rank(buffer_steps=blocks, encoding="map")
    publisher = rank.events
    assert isinstance(publisher, JournalingPublisher)
    for first in range(0, blocks, 64):
        hashes = [(number * 0x9E3779B97F4A7C15) % 2**64 for number in range(first, first + 64)]
        tokens = [number % 150_000 for number in range(first, first + 64 * BLOCK_TOKENS)]
        publisher.publish(KVEventBatch(1.0, [BlockStored(hashes, None, tokens, BLOCK_TOKENS, None, "GPU")]))
        while publisher.counts.unsent > 1_000:
            time.sleep(0.001)
    while publisher.counts.unsent:
        time.sleep(0.001)
    desk.items["rank"], desk.items["publisher"] = rank, publisher
    return rank.address


def _cut(desk: Desk) -> float:
    """Milliseconds of a new cut, with nothing left to fold."""
    stream = desk.items["publisher"].stream
    while stream.digest(stream.next_sequence).next_sequence < stream.next_sequence:
        time.sleep(0.001)
    begin = time.perf_counter()
    stream.recorder.snapshot(stream.next_sequence)
    return (time.perf_counter() - begin) * 1e3


def _copy(desk: Desk) -> float:
    """Milliseconds of a copy of a dict of so many blocks, which is what a cut would cost without shards."""
    if "blocks" not in desk.items:
        blocks = desk.items["publisher"].stream.digest(0).tiers[0].blocks
        desk.items["blocks"] = {number << 40: (number,) for number in range(blocks)}
    begin = time.perf_counter()
    desk.items["blocks"].copy()
    return (time.perf_counter() - begin) * 1e3


def _read_all(desk: Desk, address: str, reading: Reading, blocks: int) -> float:
    """Seconds until every block was told, and its payload read."""
    import grpc

    from kvgrpc.events import BlockStored, decode_batch
    from kvgrpc.v1 import event_service_pb2 as pb
    from kvgrpc.v1.event_service_pb2_grpc import EventServiceStub

    mode = pb.WATCH_MODE_SNAPSHOT if reading == "snapshot" else pb.WATCH_MODE_REPLAY
    told: set[int | bytes] = set()
    with grpc.insecure_channel(address) as channel:
        begin = time.perf_counter()
        call = EventServiceStub(channel).Watch(pb.WatchRequest(mode=mode), timeout=120)
        for message in call:
            for payload in (*message.raw.payloads, *message.snapshot.payloads):
                for event in decode_batch(payload).events:
                    if isinstance(event, BlockStored):
                        told.update(event.block_hashes)
            if message.snapshot.last:
                break
        took = time.perf_counter() - begin
        call.cancel()
    if len(told) != blocks:
        raise AssertionError(f"{len(told)} blocks were told, {blocks} stored")
    return took
