"""What goes on the wire, byte for byte, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvgrpc.events.codec import BatchEncoder, Dialect, Encoding, check_batch, decode_batch
from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, UnknownEvent
from tests.fuzz.corpus import hostile
from tests.fuzz.reading import read

GOLDEN = Path(__file__).parents[2] / "conformance" / "events"
CASES: dict[str, Any] = json.loads((GOLDEN / "cases.json").read_text())
EVENTS = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared, UnknownEvent)}
FORMS = [(dialect, encoding) for dialect in Dialect for encoding in Encoding]

hashes = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=1, max_size=32)
tokens = st.lists(st.integers(0, 2**32), max_size=8) | st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2))
media = st.sampled_from([None, "GPU", "gpu", "CPU", "DISK", "STORAGE"])
texts = st.none() | st.text(max_size=5)
groups = st.none() | st.integers(0, 3)
more = st.none() | st.dictionaries(st.sampled_from(["reason", "x"]), st.integers() | st.text(max_size=3), min_size=1)
stored = st.builds(
    BlockStored,
    st.lists(hashes, max_size=4),
    st.none() | hashes,
    tokens,
    st.integers(0, 2**20),
    st.none() | st.integers(0, 100),
    media,
    texts,
    group_idx=groups,
    kv_cache_spec_kind=texts,
    locality=texts,
    session_id=texts,
    cache_salt=texts,
    unknown_keys=more.filter(
        lambda keys: keys is None or all(-(2**63) <= v < 2**64 for v in keys.values() if isinstance(v, int))
    ),
)
removed = st.builds(BlockRemoved, st.lists(hashes, max_size=4), media, groups, texts)
unknown = st.builds(
    lambda n: UnknownEvent("Moved", msgspec.msgpack.encode({"type": "Moved", "n": n})), st.integers(0, 9)
)
events = st.lists(stored | removed | st.builds(AllBlocksCleared) | unknown, max_size=5)
batches = st.builds(KVEventBatch, st.floats(0, 4e9), events, st.integers(0, 63))


class SglangBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


class MapRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]


def encoder(dialect: Dialect = Dialect.VLLM, encoding: Encoding = Encoding.MAP, rank: int = 3) -> BatchEncoder:
    return BatchEncoder(dialect, encoding, rank)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.get("read_only")])
def test_golden_bytes_are_written(name: str) -> None:
    case = CASES[name]
    assert encoder(Dialect(case["dialect"]), Encoding(case["encoding"])).encode(batch_of(case)) == payload_of(name)


@pytest.mark.parametrize("name", CASES)
def test_golden_bytes_are_read(name: str) -> None:
    assert decode_batch(payload_of(name)) == batch_of(CASES[name])


def test_every_golden_file_has_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.msgpack")} == set(CASES)


@pytest.mark.parametrize("dialect", Dialect)
@given(batches)
def test_a_map_loses_nothing_in_either_dialect(dialect: Dialect, batch: KVEventBatch) -> None:
    assert decode_batch(encoder(dialect).encode(batch)) == batch


@given(batches)
def test_arrays_of_seed_001_carry_the_medium_and_the_first_group(batch: KVEventBatch) -> None:
    back = decode_batch(encoder(Dialect.VLLM, Encoding.ARRAY).encode(batch))
    assert back.events == [stripped(event, medium=True) for event in batch.events if not getattr(event, "group_idx", 0)]
    assert (back.ts, back.data_parallel_rank) == (batch.ts, batch.data_parallel_rank)


@given(batches)
def test_arrays_of_seed_000_carry_the_device_tier_alone(batch: KVEventBatch) -> None:
    back = decode_batch(encoder(Dialect.SGLANG, Encoding.ARRAY).encode(batch))
    kept = [
        event
        for event in batch.events
        if not getattr(event, "group_idx", 0) and (getattr(event, "medium", None) or "GPU").upper() == "GPU"
    ]
    assert back.events == [stripped(event, medium=False) for event in kept]


def test_a_reader_of_seed_000_takes_removed_from_host_for_removed_from_device_in_arrays_of_seed_001() -> None:
    """Why the sglang dialect leaves host events out, and what a fleet with such readers has to choose."""
    batch = KVEventBatch(1.0, [BlockRemoved([7], "CPU")])
    name, block_hashes, *_ = msgpack.unpackb(encoder(Dialect.VLLM, Encoding.ARRAY).encode(batch))[1][0]
    assert (name, block_hashes) == ("BlockRemoved", [7])
    assert msgpack.unpackb(encoder(Dialect.SGLANG, Encoding.ARRAY).encode(batch))[1] == []


@given(batches)
def test_array_lengths_are_those_of_the_seeds(batch: KVEventBatch) -> None:
    lengths = {
        Dialect.SGLANG: {"BlockStored": 6, "BlockRemoved": 2},
        Dialect.VLLM: {"BlockStored": 7, "BlockRemoved": 3},
    }
    for dialect, length in lengths.items():
        written = msgpack.unpackb(encoder(dialect, Encoding.ARRAY).encode(batch))[1]
        arrays = [event for event in written if isinstance(event, list)]
        assert [len(event) for event in arrays] == [length.get(event[0], 1) for event in arrays]


def test_the_rank_is_filled_in_but_not_in_the_object() -> None:
    ours, theirs = KVEventBatch(1.0, []), SglangBatch(1.0, [])
    for batch in (ours, theirs):
        assert msgpack.unpackb(encoder(rank=5).encode(batch)) == [1.0, [], 5]
    assert ours.data_parallel_rank is None
    assert theirs.attn_dp_rank is None


def test_a_rank_that_is_there_stays() -> None:
    assert msgpack.unpackb(encoder(rank=5).encode(SglangBatch(1.0, [], 2))) == [1.0, [], 2]


@pytest.mark.parametrize(("dialect", "encoding"), FORMS)
def test_an_engines_own_batch_goes_as_it_is(dialect: Dialect, encoding: Encoding) -> None:
    batch = SglangBatch(1.0, [MapRemoved([7])], 0)
    assert encoder(dialect, encoding).encode(batch) == msgspec.msgpack.encode(batch)


@pytest.mark.parametrize("name", CASES)
def test_encoded_bytes_go_as_they_are(name: str) -> None:
    assert encoder().encode(payload_of(name)) == payload_of(name)


def test_numpy_arrays_and_scalars_are_lists_and_numbers() -> None:
    event = BlockStored([np.int64(-2), np.uint64(2**63)], None, np.arange(4, dtype=np.int32), 2)  # type: ignore[arg-type]
    for dialect, encoding in FORMS:
        assert decode_batch(encoder(dialect, encoding).encode(KVEventBatch(1.0, [event]))).events == [
            BlockStored([-2, 2**63], None, [0, 1, 2, 3], 2)
        ]


NO_BATCHES = {case.name: case.payload for case in hostile() if case.events is None}


@pytest.mark.parametrize("nonsense", NO_BATCHES.values(), ids=NO_BATCHES)
def test_bytes_that_are_no_batch_are_refused_and_nothing_worse(nonsense: bytes) -> None:
    for reader in (decode_batch, check_batch, encoder().encode):
        with pytest.raises(msgspec.DecodeError):
            reader(nonsense)


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        {},
        "text",
        object(),
        MapRemoved([7]),
        KVEventBatch(1.0, [BlockRemoved([2**64])]),
        KVEventBatch(1.0, [object()]),  # type: ignore[list-item]
    ],
    ids=["None", "{}", "text", "object", "a map", "a hash too large", "a batch of an object"],
)
def test_nonsense_is_an_exception_and_nothing_worse(nonsense: object) -> None:
    for dialect, encoding in FORMS:
        with pytest.raises((TypeError, ValueError, OverflowError, msgspec.DecodeError)):
            encoder(dialect, encoding).encode(nonsense)


@pytest.mark.parametrize("dialect", Dialect)
def test_a_clear_of_our_own_takes_the_configured_encoding(dialect: Dialect) -> None:
    assert msgpack.unpackb(encoder(dialect, Encoding.MAP, 2).clear())[1:] == [[{"type": "AllBlocksCleared"}], 2]
    assert msgpack.unpackb(encoder(dialect, Encoding.ARRAY, 2).clear())[1:] == [[["AllBlocksCleared"]], 2]


STRANGE = [
    ({"type": "BlockMoved", "block_hashes": [5]}, "BlockMoved"),
    (["BlockMoved", [5]], "BlockMoved"),
    (["BlockStored", "no list"], "BlockStored"),
    ({"type": "BlockStored", "block_hashes": [1.5]}, "BlockStored"),
    ({"type": 7}, ""),
    ({"no": "type"}, ""),
    ({"type": "BlockRemoved", "block_hashes": [1], 7: 8}, "BlockRemoved"),
    ([], ""),
    (17, ""),
    (None, ""),
]


@pytest.mark.parametrize(("event", "name"), STRANGE, ids=str)
def test_a_strange_event_costs_no_other_one_and_keeps_its_bytes(event: object, name: str) -> None:
    raw = msgpack.packb(event)
    neighbours = [["BlockRemoved", [1]], {"type": "BlockRemoved", "block_hashes": [2]}]
    payload = msgpack.packb([1.0, [neighbours[0], event, neighbours[1]], 0])
    batch = decode_batch(payload)
    assert batch.events == [BlockRemoved([1]), UnknownEvent(name, raw), BlockRemoved([2])]
    for dialect, encoding in FORMS:
        assert raw in encoder(dialect, encoding).encode(batch)


def test_arrays_and_maps_may_stand_in_one_batch() -> None:
    payload = msgpack.packb([1, [{"type": "AllBlocksCleared"}, ["BlockRemoved", [-2]]]])
    assert decode_batch(payload) == KVEventBatch(1.0, [AllBlocksCleared(), BlockRemoved([-2])], None)


def test_no_tokens_and_no_size_are_read() -> None:
    for tokens, size in ((None, None), (None, 4), ([5, 6], None)):
        fields = {"block_hashes": [1], "parent_block_hash": None, "token_ids": tokens, "block_size": size}
        expected = BlockStored([1], None, tokens or [], size or 0)
        for event in ({"type": "BlockStored", **fields}, ["BlockStored", *fields.values()]):
            assert decode_batch(msgpack.packb([1.0, [event], 0])).events == [expected]


@pytest.mark.parametrize(
    ("behind_the_name", "group"),
    [([None], None), ([None, None], None), ([None, None, 2], 2), ([None, [{"image": 1}]], None), ([None, [], 2], 2)],
    ids=str,
)
def test_a_list_of_images_may_stand_before_the_group(behind_the_name: list[object], group: int | None) -> None:
    """Dynamo's, in an array however short; nil for the tokens keeps it from the typed reader."""
    event = ["BlockStored", [1], None, None, 4, None, "GPU", "adapter", *behind_the_name]
    expected = BlockStored([1], None, [], 4, None, "GPU", "adapter", group_idx=group)
    assert decode_batch(msgpack.packb([1.0, [event], 0])).events == [expected]


def test_a_map_with_keys_of_others_has_no_field_more_than_one_without() -> None:
    event = BlockStored([1], None, [5], 1, unknown_keys={"reason": "x"})
    without = BlockStored([1], None, [5], 1)
    for dialect in Dialect:
        written, plain = (
            msgpack.unpackb(encoder(dialect).encode(KVEventBatch(1.0, [e])))[1][0] for e in (event, without)
        )
        assert written == plain | {"reason": "x"}


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=4) | st.integers(0, 9), children, max_size=4)
    ),
    max_leaves=12,
)
names = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])
keys = st.sampled_from(["type", "block_hashes", "token_ids", "block_size", "medium", "kvgrpc.unknown_keys", "x"])
likely = st.lists(names | anything, max_size=14) | st.dictionaries(keys, names | anything, max_size=8) | anything


@given(st.binary(max_size=200))
@example(b"\x91" * 100_000)
@example(b"\x93\x00\x91" + b"\x91" * 100_000)
@example(b"\x93\xcb" + bytes(8) + b"\x91\x82\xa4type\xabBlockStored\xb1parent_block_hash" + b"\x91" * 50_000)
@example(b"\x93\xcb" + bytes(8) + b"\x91\x96\xabBlockStored\xdd\x00\x0f\xff\xff" * 100)
@example(b"\x93\x00\x91\xd6\xff\x00\x00\x00\x00\x00")
@example(b"\x93\x00\x91\xa2\xff\xfe\x00")
@example(b"\x93\x00\x91\x81\x91\x01\x00\x00")
def test_hostile_bytes_are_a_batch_or_refused(payload: bytes) -> None:
    read(payload)


@given(anything, st.lists(likely, max_size=4), st.lists(anything, max_size=2))
def test_hostile_events_are_a_batch_or_refused(ts: object, listed: list[object], tail: list[object]) -> None:
    read(msgpack.packb([ts, listed, *tail]))


@given(st.sampled_from(sorted(CASES)), st.integers(0, 10_000), st.binary(min_size=1, max_size=4))
def test_damaged_batches_are_a_batch_or_refused(name: str, at: int, damage: bytes) -> None:
    payload = payload_of(name)
    at %= len(payload)
    read(payload[:at] + damage + payload[at + len(damage) :])
    read(payload[:at])


def payload_of(name: str) -> bytes:
    return (GOLDEN / f"{name}.msgpack").read_bytes()


def batch_of(case: dict[str, Any]) -> KVEventBatch:
    return KVEventBatch(case["ts"], [event_of(event) for event in case["events"]], case["rank"])


def event_of(fields: dict[str, Any]) -> Any:
    return EVENTS[fields["type"]](**{name: plain(value) for name, value in fields.items() if name != "type"})


def plain(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("hex:"):
        return bytes.fromhex(value[4:])
    return [plain(item) for item in value] if isinstance(value, list) else value


def stripped(event: Any, *, medium: bool) -> Any:
    """What the seeds' arrays have room for."""
    kept_medium = event.medium if medium and isinstance(event, BlockStored | BlockRemoved) else None
    if isinstance(event, BlockStored):
        kept = {name: getattr(event, name) for name in event.__struct_fields__[:5]}
        return BlockStored(**kept, medium=kept_medium)
    return BlockRemoved(event.block_hashes, kept_medium) if isinstance(event, BlockRemoved) else event
