"""A snapshot says exactly what the events before it come to, whatever happens after it was cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrpc.errors import TooManyRequests
from kvgrpc.events.codec import BatchEncoder, Dialect, Encoding, decode_batch
from kvgrpc.events.log.digest import CHECKPOINT_BATCHES, DigestCounter, StateDigest, hash_key, medium_key, mix
from kvgrpc.events.log.journal import MAX_BATCH_BYTES, DroppedRange
from kvgrpc.events.log.recorder import (
    LONGEST_SECONDS,
    MAX_PART_BYTES,
    MAX_SNAPSHOTS,
    PART_BYTES,
    STALLED_SECONDS,
    WAITING_BATCHES,
    WAITING_BYTES,
    Recorder,
    SnapshotCut,
    SnapshotGivenUp,
)
from kvgrpc.events.log.snapshot import RUN_BLOCKS, RUN_BYTES, CacheState, Cut, stored_event
from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored, Event, KVEventBatch, UnknownEvent
from kvgrpc.observability import metrics

hashes: st.SearchStrategy[int | bytes] = st.integers(-8, 8) | st.sampled_from(
    [2**64 - 3, b"\x00" * 31 + b"\x05", b"\xff" * 8]
)
media = st.sampled_from([None, "GPU", "gpu", "CPU"])
groups = st.sampled_from([None, 0, 1])


@st.composite
def stored(draw: st.DrawFn) -> BlockStored:
    blocks = draw(st.lists(hashes, min_size=1, max_size=4))
    lists: list[list[Any]] = [[], [7] * (2 * len(blocks)), [7] * 3, [[1, 2]] * (2 * len(blocks))]
    tokens = draw(st.sampled_from(lists))
    extra = draw(st.sampled_from([None, [("salt",)] * len(blocks)]))
    medium, group = draw(media), draw(groups)
    parent = draw(st.none() | hashes)
    return BlockStored(blocks, parent, tokens, 2, None, medium, extra_keys=extra, group_idx=group)


events = stored() | st.builds(BlockRemoved, st.lists(hashes, max_size=4), media, groups) | st.builds(AllBlocksCleared)
histories = st.lists(st.lists(events, max_size=4), max_size=8)


class Model:
    """What events come to, said as plainly as possible."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[str, int, int]] = Counter()

    def apply(self, happened: Iterable[Event]) -> None:
        for event in happened:
            if isinstance(event, AllBlocksCleared):
                self.copies.clear()
            elif isinstance(event, BlockStored | BlockRemoved):
                for block in event.block_hashes:
                    place = (medium_key(event.medium), event.group_idx or 0, hash_key(block))
                    if isinstance(event, BlockStored):
                        self.copies[place] += 1
                    elif self.copies[place]:
                        self.copies[place] -= 1
        self.copies += Counter()

    def digest(self, next_sequence: int) -> StateDigest:
        counter = DigestCounter()
        for (medium, group, key), copies in self.copies.items():
            counter.add(medium, group, [key] * copies, 1)
        return counter.digest(next_sequence)


def replayed(cut: Cut) -> Model:
    """What a follower gets from the snapshot, over the wire."""
    model, encoder = Model(), BatchEncoder(Dialect.VLLM, Encoding.MAP, 0)
    for run in cut.runs():
        model.apply(decode_batch(encoder.encode(KVEventBatch(0.0, [stored_event(run)]))).events)
    return model


@given(histories)
def test_a_snapshot_leads_where_the_events_lead(history: list[list[Event]]) -> None:
    state, model = CacheState(), Model()
    for batch in history:
        state.apply(batch)
        model.apply(batch)
        state.next_sequence += 1
    assert state.digest() == model.digest(len(history))
    assert state.copies == model.copies.total()
    assert replayed(state.cut()).copies == model.copies


@given(histories, histories)
def test_a_cut_stays_as_it_was(before: list[list[Event]], after: list[list[Event]]) -> None:
    state, model = CacheState(), Model()
    for batch in before:
        state.apply(batch)
        model.apply(batch)
    cut = state.cut()
    for batch in after:
        state.apply(batch)
    assert replayed(cut).copies == model.copies


@given(histories)
def test_parents_come_before_children_within_a_tier_and_group(history: list[list[Event]]) -> None:
    state = CacheState()
    for batch in history:
        state.apply(batch)
    told: set[tuple[str, int, int]] = set()
    there = {
        (name, key): block
        for name, shards in state.cut().tiers.items()
        for shard in shards
        for key, block in shard.items()
    }
    for run in state.cut().runs():
        name = (medium_key(run[0].about.medium), run[0].about.group_idx or 0)
        for block in run:
            parent = None if block.parent is None else hash_key(block.parent)
            if (
                parent is not None
                and (name, parent) in there
                and not _in_a_circle(there, name, hash_key(block.block_hash))
            ):
                assert (*name, parent) in told
            told.add((*name, hash_key(block.block_hash)))


def _in_a_circle(there: Any, name: Any, key: int) -> bool:
    """A hostile engine's; no order is right there."""
    seen: set[int] = set()
    block = there[name, key]
    while block is not None and block.parent is not None:
        key = hash_key(block.parent)
        if key in seen:
            return True
        seen.add(key)
        block = there.get((name, key))
    return False


def test_a_chain_is_one_event_with_its_tokens() -> None:
    state = CacheState()
    state.apply([BlockStored([number], number - 1 if number else None, [number, number], 2) for number in range(100)])
    (run,) = state.cut().runs()
    assert decoded(stored_event(run)) == BlockStored(
        list(range(100)), None, [number for number in range(100) for _ in range(2)], 2
    )


def test_a_long_chain_is_several_events() -> None:
    state = CacheState()
    state.apply([BlockStored(list(range(1000)), None, [5] * 1000, 1)])
    runs = list(state.cut().runs())
    assert [len(run) for run in runs] == [RUN_BLOCKS, RUN_BLOCKS, RUN_BLOCKS, 1000 - 3 * RUN_BLOCKS]
    assert decoded(stored_event(runs[1])).parent_block_hash == RUN_BLOCKS - 1


def test_what_an_event_says_besides_its_blocks_comes_back() -> None:
    event = BlockStored(
        [1, 2], 9, [10, 11], 1, 3, "CPU", "adapter", [["a"], None], 1, "mamba", 7, "LOCAL", "o", "s", [[1], [2]],
        "salt", {"new": 5},
    )  # fmt: skip
    state = CacheState()
    state.apply([event])
    (run,) = state.cut().runs()
    assert decoded(stored_event(run)) == event


def test_tokens_that_are_not_those_of_the_blocks_are_left_out() -> None:
    state = CacheState()
    state.apply([BlockStored([1, 2], None, list(range(8)), 2)])
    (run,) = state.cut().runs()
    assert decoded(stored_event(run)) == BlockStored([1, 2], None, [], 2)


def test_removing_what_nobody_stored_changes_nothing() -> None:
    state = CacheState()
    state.apply(
        [BlockStored([1], None, [], 1), BlockRemoved([2]), BlockRemoved([1], "CPU"), UnknownEvent("x", b"\xc0")]
    )
    assert state.copies == 1


def test_readers_of_one_moment_share_one_snapshot_and_its_bytes() -> None:
    recorder = Recorder(Dialect.VLLM, 0)
    recorder.add([encoded(BlockStored([number], None, [], 1)) for number in range(5)])
    first = recorder.snapshot(3)
    assert recorder.snapshot(5) is first
    assert recorder.snapshot(0).part(0)[0] is first.part(0)[0]
    recorder.add([encoded(BlockStored([5], None, [], 1))])
    second = recorder.snapshot(6)
    assert second is not first
    assert (first.copies, second.copies, first.next_sequence, second.next_sequence) == (5, 6, 5, 6)


def test_a_snapshot_without_tokens_names_the_same_blocks_in_a_fifth_of_the_bytes() -> None:
    recorder, size = Recorder(Dialect.VLLM, 0), 16
    for first in range(0, 4_000, 40):
        hashes, tokens = [mix(first + at) for at in range(40)], [100_000 + first] * (40 * size)
        about = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "extra_keys": [["salt"]] * 40}
        parent = mix(first - 1) if first else None
        recorder.add([encoded(BlockStored(hashes, parent, tokens, size, None, "GPU", **about))])  # type: ignore[arg-type]
    recorder.add([encoded(BlockRemoved([mix(7)], "GPU", 1))])
    whole, named = recorder.snapshot(0), recorder.snapshot(0, without_tokens=True)
    assert recorder.snapshot(0, without_tokens=True) is named and recorder.snapshot(0) is whole is not named
    told = [event for payload in payloads(named) for event in decode_batch(payload).events]
    model = Model()
    model.apply(told)
    assert model.digest(101) == named.digest == whole.digest
    assert all(isinstance(event, BlockStored) and not event.token_ids and not event.extra_keys for event in told)
    said = {(event.block_size, event.group_idx, event.kv_cache_spec_kind) for event in told}  # type: ignore[union-attr]
    assert said == {(size, 1, "sliding_window")}
    assert 5 * sum(map(len, payloads(named))) < sum(map(len, payloads(whole)))


def payloads(snapshot: SnapshotCut) -> list[bytes]:
    found: list[bytes] = []
    last = False
    while not last:
        payload, last = snapshot.part(len(found))
        found.append(payload)
    return found


def test_an_empty_state_is_one_part() -> None:
    payload, last = Recorder(Dialect.SGLANG, 0).snapshot(0).part(0)
    assert last
    assert decode_batch(payload).events == []


@settings(max_examples=20)
@given(st.integers(1, 3000), st.integers(1, 40))
def test_the_parts_together_are_the_state(blocks: int, size: int) -> None:
    recorder = Recorder(Dialect.VLLM, 0)
    recorder.add([encoded(BlockStored([number], None, [100_000] * size, size)) for number in range(blocks)])
    snapshot, model, index, last = recorder.snapshot(0), Model(), 0, False
    while not last:
        payload, last = snapshot.part(index)
        assert len(payload) < 1_000_000
        model.apply(decode_batch(payload).events)
        index += 1
    assert model.digest(blocks) == snapshot.digest == recorder.digest(0)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"digest": True},
        {"group_idx": 3, "kv_cache_spec_kind": "sliding_window", "session_id": "s" * 100},
        {"digest": True, "extra_keys": [["x" * 300]], "cache_salt": "y" * 100},
        {"unknown_keys": {"new": "z" * 200}},
    ],
    ids=["plain", "digests", "group_kind_session", "digests_extra_keys", "unknown_keys"],
)
def test_a_part_is_what_any_client_takes_whatever_blocks_say_of_themselves(shape: dict[str, Any]) -> None:
    """One block in an event, without tokens: all that it says is beside what a part is measured by."""
    fields = dict(shape)
    wide = fields.pop("digest", False)
    hashes = [number.to_bytes(32, "big") if wide else 2**62 + number for number in range(12_000)]
    recorder = Recorder(Dialect.VLLM, 0)
    recorder.add([encoded(*(BlockStored([block], None, [], 16, None, "GPU", **fields) for block in hashes))])
    blocks, largest = sizes_of_parts(recorder)
    assert blocks == 12_000 and largest <= MAX_PART_BYTES


def test_a_part_is_what_any_client_takes_though_a_block_beside_others_is_as_large_as_a_batch_may_be() -> None:
    recorder = Recorder(Dialect.VLLM, 0)
    recorder.add([encoded(*(BlockStored([number], None, [100_000] * 16, 16) for number in range(1, 2_000)))])
    recorder.add([encoded(BlockStored([2_000], None, [100_000] * 770_000, 770_000))])
    blocks, largest = sizes_of_parts(recorder)
    assert blocks == 2_000 and 3_800_000 < largest < MAX_BATCH_BYTES, "it is there, in a part of its own"


def test_a_run_that_is_too_large_is_said_as_several() -> None:
    recorder = Recorder(Dialect.VLLM, 0)
    recorder.add(
        [encoded(BlockStored([n + 1], n or None, [], 16, extra_keys=[["x" * 60_000]])) for n in range(RUN_BLOCKS)]
    )
    blocks, largest = sizes_of_parts(recorder)
    assert blocks == RUN_BLOCKS and largest <= MAX_BATCH_BYTES


@pytest.mark.parametrize("growing", [False, True], ids=["a_name", "what_grows_beyond_a_batch"])
def test_what_blocks_have_in_common_is_said_once_however_large_it_is(growing: bool) -> None:
    """Numbers of 4 bytes become 8 when they are written again; no half of such a run would be small enough."""
    common: dict[str, Any] = {"unknown_keys": {"new": [0.5] * 600_000}} if growing else {"lora_name": "x" * 1_100_000}
    recorder = Recorder(Dialect.VLLM, 0)
    recorder.add([encoded(BlockStored(list(range(1, 65)), None, [], 16, None, "GPU", **common))])
    snapshot = recorder.snapshot(0)
    payload, last = snapshot.part(0)
    (event,) = decode_batch(payload).events
    assert last and isinstance(event, BlockStored) and len(event.block_hashes) == 64


def test_what_blocks_have_in_common_is_said_once_for_each_copy_of_all() -> None:
    batch = BlockStored(list(range(1, 65)), None, [], 16, None, "GPU", lora_name="x" * 1_100_000)
    recorder = Recorder(Dialect.VLLM, 0)
    recorder.add([encoded(batch)] * 3)
    snapshot, sizes, last = recorder.snapshot(0), list[int](), False
    while not last:
        payload, last = snapshot.part(len(sizes))
        sizes += [len(event.block_hashes) for event in decode_batch(payload).events if isinstance(event, BlockStored)]
    assert sizes == [64] * 3


def sizes_of_parts(recorder: Recorder) -> tuple[int, int]:
    """Blocks of all parts, and the bytes of the largest; they come to the digest, and parents come first."""
    snapshot, model, index, last = recorder.snapshot(0), Model(), 0, False
    largest, told = 0, set[int]()
    while not last:
        payload, last = snapshot.part(index)
        largest, index = max(largest, len(payload)), index + 1
        events = decode_batch(payload).events
        model.apply(events)
        for event in events:
            assert isinstance(event, BlockStored)
            assert event.parent_block_hash is None or hash_key(event.parent_block_hash) in told
            told.update(map(hash_key, event.block_hashes))
    assert model.digest(snapshot.next_sequence) == snapshot.digest
    return model.copies.total(), largest


def encoded(*events: Event) -> bytes:
    return BatchEncoder(Dialect.VLLM, Encoding.MAP, 0).encode(KVEventBatch(0.0, list(events)))


def decoded(event: BlockStored) -> BlockStored:
    (back,) = decode_batch(encoded(event)).events
    assert isinstance(back, BlockStored)
    return back


def test_numbers_go_on_behind_what_could_not_be_published() -> None:
    recorder = Recorder(Dialect.VLLM, 0)
    recorder.add([encoded(BlockStored([1], None, [], 16)), DroppedRange(1, 7, "queue full")])
    assert recorder.snapshot(0).next_sequence == 8


def test_what_came_after_a_hole_is_in_the_next_snapshot() -> None:
    recorder = Recorder(Dialect.VLLM, 0)
    recorder.add([DroppedRange(0, 3, "queue full"), encoded(BlockStored([1], None, [], 16))])
    assert (recorder.snapshot(0).next_sequence, recorder.snapshot(0).copies) == (5, 1)


def test_what_waits_is_folded_past_its_bytes_too() -> None:
    recorder = Recorder(Dialect.VLLM, 0)
    large = encoded(BlockStored([1], None, [7] * 20_000, 20_000))
    count = WAITING_BYTES // len(large) + 2
    assert count < WAITING_BATCHES
    recorder.add([large] * (count // 2))
    recorder.catch_up()
    assert recorder._waiting, "little waits: readers fold it when they come"
    recorder.add([large] * (count - count // 2))
    recorder.catch_up()
    assert not recorder._waiting
    recorder.add([large] * (count // 2))
    recorder.catch_up()
    assert recorder._waiting, "what was folded does not count again"


@pytest.mark.parametrize("blocks", [1, 7, 8, 15, 16, 17, RUN_BLOCKS])
def test_the_tokens_of_a_chain_are_put_together_whatever_their_number(blocks: int) -> None:
    """As bytes: each length of a msgpack header is met."""
    state = CacheState()
    for block in range(blocks):
        state.apply([BlockStored([block + 1], block or None, [block * 2, block * 2 + 1], 2)])
    (run,) = state.cut().runs()
    assert decoded(stored_event(run)).token_ids == list(range(2 * blocks))


def test_events_that_nobody_here_knows_are_counted() -> None:
    def counted() -> float:
        (family,) = metrics.EVENTS_UNKNOWN.collect()
        return next(sample.value for sample in family.samples if sample.name.endswith("_total"))

    before, recorder = counted(), Recorder(Dialect.VLLM, 0)
    events = [["BlockMoved", 1], ["BlockStored", [5], None, [], 16], {"type": "BlockStored", "block_hashes": "none"}]
    recorder.add([msgspec.msgpack.encode([1.0, events, 0]), msgspec.msgpack.encode([1.0, events[:1], 0])])
    while recorder.fold():
        pass
    assert counted() - before == 3
    assert recorder.snapshot(0).copies == 1


def batches(recorder: Recorder, count: int, first: int = 0) -> None:
    recorder.add([encoded(BlockStored([number], None, [], 1)) for number in range(first, first + count)])


def test_so_many_batches_may_wait_to_be_folded() -> None:
    recorder = Recorder(Dialect.VLLM, 0)
    batches(recorder, WAITING_BATCHES)
    recorder.catch_up()
    assert len(recorder._waiting) == WAITING_BATCHES
    batches(recorder, 1, WAITING_BATCHES)
    recorder.catch_up()
    assert not recorder._waiting and recorder.digest(0).next_sequence == WAITING_BATCHES + 1


def test_a_reader_is_told_the_digest_of_a_moment_that_it_can_compare() -> None:
    recorder = Recorder(Dialect.VLLM, 0)
    assert recorder.digest(0) == StateDigest(0)
    batches(recorder, CHECKPOINT_BATCHES + 6)
    for _ in range(CHECKPOINT_BATCHES + 1):
        assert recorder.fold()
    assert recorder.digest(0).next_sequence == CHECKPOINT_BATCHES, "the latest is made when nothing waits"
    while recorder.fold():
        pass
    latest = recorder.digest(CHECKPOINT_BATCHES + 6)
    assert (latest.next_sequence, latest.tiers[0].blocks) == (CHECKPOINT_BATCHES + 6, CHECKPOINT_BATCHES + 6)
    kept = recorder.digest(CHECKPOINT_BATCHES + 7)
    assert (kept.next_sequence, kept.tiers[0].blocks) == (CHECKPOINT_BATCHES, CHECKPOINT_BATCHES)


def read_by_others(recorder: Recorder) -> list[SnapshotCut]:
    """As many snapshots as there may be, each of another moment and read by somebody just now."""
    held = []
    for number in range(MAX_SNAPSHOTS):
        batches(recorder, 1, number)
        held.append(recorder.snapshot(number + 1))
        held[-1].part(0)
    batches(recorder, 1, MAX_SNAPSHOTS)
    return held


def test_snapshots_that_readers_still_read_are_bounded() -> None:
    recorder = Recorder(Dialect.VLLM, 0)
    held = read_by_others(recorder)
    with pytest.raises(TooManyRequests) as caught:
        recorder.snapshot(MAX_SNAPSHOTS + 1)
    assert (
        caught.value.metadata == {"limit": "4", "value": "5", "scope": "snapshots"} and caught.value.retry_after == 1.0
    )
    assert recorder.snapshot(MAX_SNAPSHOTS) is held[-1] and recorder.snapshot(0) in held
    assert [snapshot.part(0)[1] for snapshot in held] == [True] * MAX_SNAPSHOTS


@pytest.mark.parametrize(("clock", "seconds"), [("read_at", STALLED_SECONDS), ("cut_at", LONGEST_SECONDS)])
def test_one_that_nobody_reads_on_or_that_was_read_for_long_gives_way(clock: str, seconds: float) -> None:
    recorder = Recorder(Dialect.VLLM, 0)
    held = read_by_others(recorder)
    setattr(held[2], clock, getattr(held[2], clock) - seconds + 1.0)
    with pytest.raises(TooManyRequests):
        recorder.snapshot(MAX_SNAPSHOTS + 1)
    setattr(held[2], clock, getattr(held[2], clock) - 1.0)
    new = recorder.snapshot(MAX_SNAPSHOTS + 1)
    assert len(recorder._snapshots) == MAX_SNAPSHOTS, "no other reader gets the one that is gone"
    assert (new.next_sequence, new.copies, new.part(0)[1]) == (MAX_SNAPSHOTS + 1, MAX_SNAPSHOTS + 1, True)
    for snapshot in held:
        if snapshot is held[2]:
            with pytest.raises(SnapshotGivenUp):
                snapshot.part(0)
            assert not snapshot._parts and not list(snapshot._rest), "what it held is free though its reader stays"
        else:
            assert snapshot.part(0)[1]


def test_a_snapshot_knows_when_it_was_read_last() -> None:
    recorder = Recorder(Dialect.VLLM, 0)
    snapshot = recorder.snapshot(0)
    snapshot.read_at = 0.0
    snapshot.part(0)
    assert snapshot.read_at >= snapshot.cut_at


@pytest.mark.parametrize(("tokens", "sizes"), [(RUN_BYTES // 3, [3, 3, 1]), (RUN_BYTES // 4, [3, 3, 1])])
def test_a_run_has_fewer_bytes_of_tokens_than_its_bound(tokens: int, sizes: list[int]) -> None:
    """Three thirds are a byte less than the bound, four quarters are the bound."""
    count = tokens - (5 if tokens - 3 >= 2**16 else 3)
    state = CacheState()
    state.apply([BlockStored(list(range(1, 8)), None, [7] * (7 * count), count)])
    assert {len(block.tokens) for block in next(state.cut().runs())} == {tokens}
    assert [len(run) for run in state.cut().runs()] == sizes


@pytest.mark.parametrize("size", [15, 16, 300, 2**15, 70_000])
def test_tokens_come_back_however_many_a_block_has(size: int) -> None:
    """As bytes: each kind of msgpack header is met, of a block and of all."""
    state = CacheState()
    state.apply([BlockStored([1, 2], None, [number % 128 for number in range(2 * size)], size)])
    (run,) = state.cut().runs()
    assert decoded(stored_event(run)).token_ids == [number % 128 for number in range(2 * size)]


def test_a_child_about_which_other_things_are_said_is_an_event_of_its_own() -> None:
    stored_events = [BlockStored([1], None, [], 16, 3), BlockStored([2], 1, [], 16, 4)]
    state = CacheState()
    state.apply(stored_events)
    assert [decoded(stored_event(run)) for run in state.cut().runs()] == stored_events


@pytest.mark.parametrize("extra", [{"extra_keys": [["a"], None]}, {"lookahead_token_ids": [[5], [6]]}])
def test_what_is_said_of_each_block_comes_back_though_it_is_one_thing(extra: dict[str, Any]) -> None:
    state = CacheState()
    state.apply([BlockStored([1, 2], None, [], 16, **extra)])
    (run,) = state.cut().runs()
    assert decoded(stored_event(run)) == BlockStored([1, 2], None, [], 16, **extra)


def test_what_is_not_said_of_each_block_is_left_out() -> None:
    state = CacheState()
    state.apply([BlockStored([1, 2], None, [], 16, extra_keys=[["a"]], lookahead_token_ids=[[5], [6]])])
    (run,) = state.cut().runs()
    assert decoded(stored_event(run)) == BlockStored([1, 2], None, [], 16, lookahead_token_ids=[[5], [6]])


def test_a_change_after_a_cut_copies_a_shard_once() -> None:
    state = CacheState()
    state.apply([BlockStored([1], None, [], 16)])
    cut = state.cut()
    ((name, tier),) = state._tiers.items()
    state.apply([BlockStored([1], None, [], 16)])
    copied = list(tier._shards)
    state.apply([BlockStored([1], None, [], 16)])
    assert all(now is before for now, before in zip(tier._shards, copied, strict=True))
    assert sum(now is not before for now, before in zip(copied, cut.tiers[name], strict=True)) == 1


def test_parts_are_measured_before_they_are_encoded_and_others_run_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the estimate each of these events is a 512th of a part."""
    pauses: list[float] = []
    monkeypatch.setattr("kvgrpc.events.log.recorder.time.sleep", pauses.append)
    count = PART_BYTES // 512 - 160 - 16 - 3
    recorder = Recorder(Dialect.VLLM, 0)
    recorder.add([encoded(BlockStored([number], None, [7] * count, count)) for number in range(1, 1536)])
    snapshot, sizes, last = recorder.snapshot(0), list[int](), False
    while not last:
        payload, last = snapshot.part(len(sizes))
        sizes.append(len(decode_batch(payload).events))
        assert last or len(snapshot._parts) == len(sizes) + 1, "one more than is read, to know whether it is the last"
    assert sizes == [512, 512, 511]
    assert len(pauses) == 2, "one after each 512 blocks"
    assert [snapshot.part(index)[1] for index in range(3)] == [False, False, True], "for the next reader too"


def test_two_blocks_that_are_too_large_together_are_said_one_by_one() -> None:
    large: list[Any] = [["x" * (2 * MAX_BATCH_BYTES // 3)]]
    recorder = Recorder(Dialect.VLLM, 0)
    recorder.add([encoded(BlockStored([n + 1], n or None, [], 16, extra_keys=large)) for n in range(2)])
    blocks, largest = sizes_of_parts(recorder)
    assert blocks == 2 and largest <= MAX_BATCH_BYTES
