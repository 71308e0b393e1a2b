"""What must hold of any bytes that are offered as a payload: refused, or every reader of ours survives them."""

from __future__ import annotations

import math

import msgspec

from kvgrpc.events import wire
from kvgrpc.events.codec import BatchEncoder, Dialect, Encoding, decode_batch
from kvgrpc.events.codec.decoder import check_batch
from kvgrpc.events.following.contents import CacheContents
from kvgrpc.events.following.index import BlockIndex
from kvgrpc.events.log.journal import Batches
from kvgrpc.events.log.recorder import SnapshotCut
from kvgrpc.events.log.snapshot import CacheState
from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, UnknownEvent
from kvgrpc.v1 import index_service_pb2

MAP = BatchEncoder(Dialect.VLLM, Encoding.MAP, 0)


def read(payload: bytes) -> KVEventBatch | None:
    """The batch, or None where it was refused. Fails where a reader does, or where two of them differ."""
    try:
        batch = decode_batch(payload)
    except msgspec.DecodeError:
        return None
    check_batch(payload)
    for event in batch.events:
        assert isinstance(event, BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent)
    if math.isfinite(batch.ts) and abs(batch.ts) <= 1e11:
        written = MAP.encode(batch)
        again = decode_batch(written)
        # Not the values themselves: what is not a number is not equal to itself.
        assert [type(event) for event in again.events] == [type(event) for event in batch.events]
        assert MAP.encode(again) == written
    _follow(batch)
    message = wire.part_to_pb(Batches(0, [payload]), wire.Form(typed=True))
    assert len(message.typed.batches[0].events) == len(batch.events)
    message.SerializeToString()
    return batch


def _follow(batch: KVEventBatch) -> None:
    """The publisher's state, a follower's contents, and those that a snapshot leads to, are the same."""
    state, contents, rebuilt = CacheState(), CacheContents(BlockIndex()), CacheContents(BlockIndex())
    state.apply(batch.events)
    contents.apply(batch.events)
    snapshot = SnapshotCut(state.cut(), MAP)
    part, last = snapshot.part(0)
    index = 0
    while not last:
        rebuilt.apply(decode_batch(part).events)
        index += 1
        part, last = snapshot.part(index)
    rebuilt.apply(decode_batch(part).events)
    assert state.digest() == contents.digest() == rebuilt.digest()
    wire.digest_to_pb(state.digest()).SerializeToString()
    index_service_pb2.IndexSource(page_tokens=contents.page_tokens)
