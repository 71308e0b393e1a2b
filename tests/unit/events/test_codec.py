"""What goes on the wire, byte for byte, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.events.codec import BatchEncoder, Dialect, decode_batch
from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

GOLDEN = Path(__file__).parents[2] / "conformance" / "events"
CASES: dict[str, Any] = json.loads((GOLDEN / "cases.json").read_text())
EVENTS = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved, "AllBlocksCleared": AllBlocksCleared}

hashes = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=1, max_size=32)
media = st.sampled_from([None, "GPU", "gpu", "CPU", "DISK", "STORAGE"])
stored = st.builds(
    BlockStored,
    st.lists(hashes, max_size=4),
    st.none() | hashes,
    st.lists(st.integers(0, 2**32), max_size=8),
    st.integers(0, 2**20),
    st.none() | st.integers(0, 100),
    media,
)
removed = st.builds(BlockRemoved, st.lists(hashes, max_size=4), media)
events = st.lists(stored | removed | st.builds(AllBlocksCleared), max_size=5)
batches = st.builds(KVEventBatch, st.floats(0, 4e9), events, st.integers(0, 63))


class SglangBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


class MapRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]


def encoder(dialect: Dialect = Dialect.VLLM, rank: int = 3) -> BatchEncoder:
    return BatchEncoder(dialect, rank)


@pytest.mark.parametrize("name", CASES)
def test_golden_bytes_are_written(name: str) -> None:
    case = CASES[name]
    assert encoder(Dialect(case["dialect"])).encode(batch_of(case)) == payload_of(name)


@pytest.mark.parametrize("name", CASES)
def test_golden_bytes_are_read(name: str) -> None:
    assert decode_batch(payload_of(name)) == batch_of(CASES[name])


def test_every_golden_file_has_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.msgpack")} == set(CASES)


@given(batches)
def test_with_medium_a_batch_survives_the_wire(batch: KVEventBatch) -> None:
    assert decode_batch(encoder().encode(batch)) == batch


@given(batches)
def test_without_medium_what_concerns_the_device_survives_the_wire(batch: KVEventBatch) -> None:
    back = decode_batch(encoder(Dialect.SGLANG).encode(batch))
    kept = [event for event in batch.events if (getattr(event, "medium", None) or "GPU").upper() == "GPU"]
    assert [without_medium(event) for event in kept] == back.events
    assert (back.ts, back.data_parallel_rank) == (batch.ts, batch.data_parallel_rank)


@given(batches)
def test_array_lengths_are_those_of_the_seeds(batch: KVEventBatch) -> None:
    lengths = {
        Dialect.SGLANG: {"BlockStored": 6, "BlockRemoved": 2},
        Dialect.VLLM: {"BlockStored": 7, "BlockRemoved": 3},
    }
    for dialect, length in lengths.items():
        written = msgpack.unpackb(encoder(dialect).encode(batch))[1]
        assert [len(event) for event in written] == [length.get(event[0], 1) for event in written]


def test_the_rank_is_filled_in_but_not_in_the_object() -> None:
    ours, theirs = KVEventBatch(1.0, []), SglangBatch(1.0, [])
    for batch in (ours, theirs):
        assert msgpack.unpackb(encoder(rank=5).encode(batch)) == [1.0, [], 5]
    assert ours.data_parallel_rank is None
    assert theirs.attn_dp_rank is None


def test_a_rank_that_is_there_stays() -> None:
    assert msgpack.unpackb(encoder(rank=5).encode(SglangBatch(1.0, [], 2))) == [1.0, [], 2]


@pytest.mark.parametrize("dialect", Dialect)
def test_an_engines_own_batch_goes_as_it_is(dialect: Dialect) -> None:
    batch = SglangBatch(1.0, [MapRemoved([7])], 0)
    assert encoder(dialect).encode(batch) == msgspec.msgpack.encode(batch)


def test_encoded_bytes_go_as_they_are() -> None:
    assert encoder().encode(b"\x93anything") == b"\x93anything"


def test_numpy_arrays_and_scalars_are_lists_and_numbers() -> None:
    event = BlockStored([np.int64(-2), np.uint64(2**63)], None, np.arange(4, dtype=np.int32), 2)  # type: ignore[list-item,arg-type]
    assert decode_batch(encoder().encode(KVEventBatch(1.0, [event]))).events == [
        BlockStored([-2, 2**63], None, [0, 1, 2, 3], 2)
    ]


@pytest.mark.parametrize(
    "nonsense",
    [None, {}, "text", b"", object(), KVEventBatch(1.0, [BlockRemoved([2**64])]), KVEventBatch(1.0, [object()])],  # type: ignore[list-item]
    ids=repr,
)
def test_nonsense_is_an_exception_and_nothing_worse(nonsense: object) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        encoder().encode(nonsense)


def test_a_clear_is_written_like_the_batches_around_it() -> None:
    arrays = encoder().encode(KVEventBatch(1.0, [BlockRemoved([7])]))
    maps = encoder().encode(SglangBatch(1.0, [MapRemoved([7])]))
    for like in (b"", arrays, encoder().encode(KVEventBatch(1.0, [])), b"\xc1", b"\x01"):
        assert msgpack.unpackb(encoder(rank=2).clear(like))[1:] == [[["AllBlocksCleared"]], 2]
    assert msgpack.unpackb(encoder(rank=2).clear(maps))[1:] == [[{"type": "AllBlocksCleared"}], 2]


def payload_of(name: str) -> bytes:
    return (GOLDEN / f"{name}.msgpack").read_bytes()


def batch_of(case: dict[str, Any]) -> KVEventBatch:
    return KVEventBatch(case["ts"], [event_of(event) for event in case["events"]], case["rank"])


def event_of(fields: dict[str, Any]) -> Any:
    values = {name: value for name, value in fields.items() if name != "type"}
    if "block_hashes" in values:
        values["block_hashes"] = [
            bytes.fromhex(value[4:]) if isinstance(value, str) else value for value in values["block_hashes"]
        ]
    return EVENTS[fields["type"]](**values)


def without_medium(event: Any) -> Any:
    return event if isinstance(event, AllBlocksCleared) else msgspec.structs.replace(event, medium=None)
