"""Slices that lie together at decode: every byte arrives once, in few writes, from slots that nobody else reads."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgrpc.dataplane.base import MemoryRange, Outcome, Result, Transfer
from kvgrpc.model import Pool, PoolKind, RankId, RankRef, Region
from kvgrpc.transfer.layout.plan import Geometry, Plan, geometry
from kvgrpc.transfer.protocol.prefill.core import PrefillPair, PrefillRoom, Submission
from kvgrpc.transfer.protocol.types import RoomKey
from kvgrpc.transfer.runtime.guarded import GuardedPlane
from kvgrpc.transfer.runtime.writing import gather
from kvgrpc.transfer.runtime.writing.gather import (
    BLOCK_BYTES,
    SLOTS,
    GatheredTransfer,
    GatherStaging,
    PeerSlots,
    slices_of,
)
from kvgrpc.transfer.runtime.writing.worker import PeerMemory, TransferWorker

TOKENS, HEADS, DIM, LAYERS, PAGES = 4, 4, 8, 3, 9
RUN_BYTES = TOKENS * HEADS // 2 * DIM  # of half of the heads
TOKENS_FIRST, HEADS_FIRST = "token,head,dim", "head,token,dim"
DONE = Result(Outcome.DONE)


class Rank:
    """A pool of real memory: uint8[LAYERS, PAGES, bytes of a page and of a gap behind it]."""

    def __init__(self, start: int, count: int, axes: str = TOKENS_FIRST, gap: int = 0) -> None:
        page = TOKENS * count * DIM
        self.memory = np.zeros((LAYERS, PAGES, page + gap), np.uint8)
        self.heads = start, count
        self.peer: Rank | None = None
        address = self.memory.ctypes.data
        regions = tuple(
            Region(layer, "kv", address + layer * self.memory.strides[0], page + gap, page) for layer in range(LAYERS)
        )
        self.pool = Pool("kv", PoolKind.KV, TOKENS, PAGES, "uint8", regions, axes, HEADS, start, count)

    def fill(self) -> None:
        self.memory[:] = np.random.default_rng(1).integers(1, 256, self.memory.shape)

    def heads_of(self, start: int, count: int, pages: Any) -> Any:
        """uint8[LAYERS, pages, TOKENS, count, DIM]"""
        own_start, own = self.heads
        held = self.memory[:, pages, : TOKENS * own * DIM].reshape(LAYERS, len(pages), TOKENS, own, DIM)
        return held[:, :, :, start - own_start : start - own_start + count]


class Write:
    """Moves its bytes when it is told to end."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.stopped = plan, False
        self.result: Result | None = None

    def end(self, outcome: Outcome = Outcome.DONE) -> None:
        self.result = Result(outcome, "", int(self.plan.nbytes.sum()) if outcome is Outcome.DONE else 0)
        if outcome is Outcome.DONE:
            for source, destination, nbytes in zip(*(column.tolist() for column in self.plan.columns), strict=True):
                ctypes.memmove(destination, source, nbytes)

    def poll(self) -> Result | None:
        return self.result

    def stop(self) -> None:
        self.stopped = True


class Plane:
    """Gives memory, and moves what it is told to."""

    name, poll_interval, quick_bytes = "fake", 0.001, 0

    def __init__(self, gathers_slices: bool = True) -> None:
        self.gathers_slices = gathers_slices
        self.blocks: list[Any] = []
        self.registered: list[MemoryRange] = []
        self.writes: list[Write] = []

    def allocate(self, nbytes: int, location: str = "cpu:0") -> int:
        self.blocks.append(np.zeros(nbytes, np.uint8))
        return int(self.blocks[-1].ctypes.data)

    def register(self, ranges: list[MemoryRange]) -> None:
        self.registered += ranges

    def submit(self, peer: object, *columns: Any) -> Transfer:
        self.writes.append(Write(Plan(*columns)))
        return self.writes[-1]


def guarded(plane: Plane) -> GuardedPlane:
    return GuardedPlane(plane)  # type: ignore[arg-type]


def staging(plane: Plane, pool: Pool, nbytes: int = 1 << 30) -> GatherStaging:
    return GatherStaging(guarded(plane), [pool], nbytes)


def opened(plane: Plane, pool: Pool, shape: Geometry, nbytes: int = 1 << 30) -> PeerSlots:
    """A peer with its slots, of staging memory of its own."""
    memory = staging(plane, pool, nbytes)
    slots = memory.open(shape)
    assert slots is not None and memory.fill(slots)
    return slots


def gathered(plane: Plane, slots: PeerSlots, source: Any, destination: Any) -> GatheredTransfer:
    return GatheredTransfer(guarded(plane), object(), slots, source, destination)


def pair(axes: str = TOKENS_FIRST, gap: int = 0) -> tuple[Rank, Rank, Geometry]:
    """A prefill rank of all heads, and the second of two decode ranks."""
    prefill, decode = Rank(0, HEADS, axes), Rank(HEADS // 2, HEADS // 2, axes, gap)
    prefill.fill()
    prefill.peer = decode  # whose memory stays as long as prefill's
    return prefill, decode, geometry([prefill.pool], [decode.pool])


def run(transfer: GatheredTransfer, plane: Plane) -> Result:
    for _ in range(10_000):
        if (result := transfer.poll()) is not None:
            return result
        for write in plane.writes:
            if write.result is None:
                write.end()
    raise AssertionError("no result")


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of two pages of one run."""
    monkeypatch.setattr(gather, "SLOT_BYTES", 2 * RUN_BYTES)
    yield


PAGE_PAIRS = st.tuples(st.permutations(range(PAGES)), st.permutations(range(PAGES)), st.integers(0, PAGES))


@given(PAGE_PAIRS, st.sampled_from([1, 2, 3, 7, 100]), st.sampled_from([0, 16]))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_byte_arrives_once_and_no_other_is_touched(
    monkeypatch: pytest.MonkeyPatch, pages: tuple[list[int], list[int], int], runs_in_a_slot: int, gap: int
) -> None:
    monkeypatch.setattr(gather, "SLOT_BYTES", runs_in_a_slot * RUN_BYTES)
    prefill, decode, shape = pair(gap=gap)
    source, destination = (np.array(each[: pages[2]], np.uint32) for each in pages[:2])
    plane = Plane()
    slots = opened(plane, prefill.pool, shape)
    result = run(gathered(plane, slots, source, destination), plane)
    assert result == Result(Outcome.DONE, "", len(source) * LAYERS * RUN_BYTES)
    written = sum(int(write.plan.nbytes.sum()) for write in plane.writes)
    assert written == result.nbytes
    assert (decode.heads_of(2, 2, destination) == prefill.heads_of(2, 2, source)).all()
    assert np.count_nonzero(decode.memory) == result.nbytes
    assert len(slots.free) == SLOTS


def test_a_page_is_one_write_a_region_and_pages_that_follow_each_other_at_decode_are_one() -> None:
    prefill, _decode, shape = pair()
    plane = Plane()
    slots = opened(plane, prefill.pool, shape)
    source = np.array([7, 0, 3, 1], np.uint32)
    run(gathered(plane, slots, source, np.array([2, 3, 8, 5], np.uint32)), plane)
    (write,) = plane.writes
    assert write.plan.nbytes.tolist() == [2 * RUN_BYTES, RUN_BYTES, RUN_BYTES] * LAYERS
    assert len(shape.plan(source, source).nbytes) == len(source) * LAYERS * TOKENS


def test_only_what_lies_together_at_decode_and_apart_here_is_gathered() -> None:
    whole, half = Rank(0, HEADS), Rank(0, HEADS // 2)
    assert slices_of(geometry([whole.pool], [half.pool]), PAGES) is not None
    assert slices_of(geometry([half.pool], [whole.pool]), PAGES) is None, "apart at decode"
    assert slices_of(geometry([whole.pool], [Rank(0, HEADS).pool]), PAGES) is None, "whole pages"
    assert slices_of(pair(HEADS_FIRST)[2], PAGES) is None, "one run here too"
    assert slices_of(Geometry([], []), PAGES) is None, "another rank sends the same bytes"


def test_pages_of_another_engine_are_gathered_head_by_head_where_its_tokens_follow_each_other() -> None:
    """Of SGLang's order (K and V apart, token by token) what vLLM keeps as head, K or V, token, dim."""
    ours = [np.random.default_rng(n).integers(1, 256, (PAGES, TOKENS, HEADS, DIM), np.uint8) for n in range(2)]
    theirs = np.zeros((PAGES, HEADS, 2, TOKENS, DIM), np.uint8)
    kinds = PoolKind.KV, TOKENS, PAGES, "uint8"
    regions = tuple(
        Region(0, part, each.ctypes.data, each.strides[0], each[0].nbytes)
        for part, each in zip("kv", ours, strict=True)
    )
    region = Region(0, "kv", theirs.ctypes.data, theirs.strides[0], theirs[0].nbytes)
    prefill = Pool("kv", *kinds, regions, TOKENS_FIRST, HEADS, 0, HEADS)
    decode = Pool("kv", *kinds, (region,), "head,kv,token,dim", HEADS, 0, HEADS)
    shape, plane = geometry([prefill], [decode]), Plane()
    slots = opened(plane, prefill, shape, BLOCK_BYTES)
    source, destination = np.array([4, 0, 2], np.uint32), np.array([1, 8, 3], np.uint32)
    run(gathered(plane, slots, source, destination), plane)
    assert (theirs[destination] == np.stack([each[source] for each in ours]).transpose(1, 3, 0, 2, 4)).all()
    assert sum(len(write.plan.nbytes) for write in plane.writes) * TOKENS == len(shape.plan(source, destination).nbytes)


def test_pools_that_are_not_sliced_alike_are_not_gathered() -> None:
    whole, half = Rank(0, HEADS), Rank(0, HEADS // 2)
    both = geometry([whole.pool, half.pool], [half.pool, half.pool])
    assert slices_of(both, PAGES) is None


def test_only_where_the_plane_says_that_it_pays() -> None:
    prefill, _decode, shape = pair()
    assert staging(Plane(gathers_slices=False), prefill.pool).open(shape) is None


def test_not_for_the_memory_of_a_device() -> None:
    prefill, _decode, shape = pair()
    elsewhere = Pool("kv", PoolKind.KV, TOKENS, PAGES, "uint8", prefill.pool.regions, location="cuda:0")
    assert staging(Plane(), elsewhere).open(shape) is None


def peers_of(memory: GatherStaging, shape: Geometry, count: int) -> list[PeerSlots]:
    """Peers that have asked for slots, one after the other."""
    peers = [memory.open(shape) for _ in range(count)]
    assert None not in peers
    found = [peer for peer in peers if peer is not None]
    for peer in found:
        memory.fill(peer)
    return found


def test_memory_is_taken_when_a_peer_needs_it_bounded_and_used_again() -> None:
    prefill, _decode, shape = pair()
    plane = Plane()
    memory = staging(plane, prefill.pool, 2 * BLOCK_BYTES + 1)
    assert memory.open(pair(HEADS_FIRST)[2]) is None and not plane.blocks
    first, second, third = peers_of(memory, shape, 3)
    assert (len(first.free), len(second.free), third.left) == (SLOTS, SLOTS, False)
    assert [each.nbytes for each in plane.registered] == [BLOCK_BYTES] * 2
    memory.close_peer(first)
    assert memory.fill(third) and len(third.free) == SLOTS and not first.free
    assert not set(third.free) & set(second.free)


def test_slots_of_a_peer_that_is_gone_are_the_next_ones_when_their_writes_have_ended() -> None:
    prefill, _decode, shape = pair()
    memory = staging(Plane(), prefill.pool, BLOCK_BYTES)
    first, second = peers_of(memory, shape, 2)
    in_use = [first.take() for _ in range(SLOTS)]
    memory.close_peer(first)
    assert not first.left and not memory.fill(second)
    for slot in in_use[1:]:
        first.give_back(slot, certain=True)
    first.give_back(in_use[0], certain=False)
    assert memory.fill(second) and sorted(second.free) == sorted(in_use[1:])


def test_a_peer_that_came_when_there_was_little_has_its_whole_share_once_there_is_more() -> None:
    """It had as many slots as were free when it came, for ever, however many lay idle later."""
    prefill, _decode, shape = pair()
    memory = staging(Plane(), prefill.pool, BLOCK_BYTES)
    first, late = peers_of(memory, shape, 2)
    in_use = [first.take() for _ in range(SLOTS)]
    memory.close_peer(first)
    first.give_back(in_use.pop(), certain=True)
    assert memory.fill(late) and len(late.free) == 1
    for slot in in_use:
        first.give_back(slot, certain=True)
    late.take()
    assert memory.fill(late) and len(late.free) == SLOTS - 1, "the one in use is of its share"


def test_a_peer_that_loses_its_slots_takes_nobody_elses() -> None:
    prefill, _decode, shape = pair()
    memory = staging(Plane(), prefill.pool, 3 * BLOCK_BYTES)
    (hangs,) = peers_of(memory, shape, 1)
    for _ in range(SLOTS):
        hangs.give_back(hangs.take(), certain=False)
    assert not memory.fill(hangs)
    assert all(len(peer.free) == SLOTS for peer in peers_of(memory, shape, 2))


def test_the_next_rank_on_a_plane_takes_the_memory_of_the_one_before_but_no_slot_that_somebody_may_read() -> None:
    prefill, _decode, shape = pair()
    plane = Plane()
    for lost in (False, True, False):
        memory = staging(plane, prefill.pool, BLOCK_BYTES)
        (slots,) = peers_of(memory, shape, 1)
        slots.give_back(slots.take(), certain=not lost)
        memory.close()
    assert len(plane.blocks) == len(plane.registered) == 2


@pytest.mark.usefixtures("small_slots")
def test_what_cannot_be_copied_is_rejected_and_its_slot_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, _decode, shape = pair()
    plane = Plane()
    transfer, slots = begun(plane, prefill, shape)

    def full(*_: object) -> Plan:
        raise MemoryError("none left")

    monkeypatch.setattr(slots.slices, "gather", full)
    result = transfer.poll()
    assert result is not None and result.outcome is Outcome.REJECTED and "none left" in result.detail
    assert len(slots.free) == SLOTS and not plane.writes


def test_memory_that_the_plane_has_not_is_asked_for_once() -> None:
    class Full(Plane):
        asked = 0

        def allocate(self, nbytes: int, location: str = "cpu:0") -> int:
            self.asked += 1
            raise MemoryError("none left")

    prefill, _decode, shape = pair()
    plane = Full()
    memory = staging(plane, prefill.pool)
    (slots,) = peers_of(memory, shape, 1)
    assert not slots.left and not memory.fill(slots) and plane.asked == 1


def begun(plane: Plane, prefill: Rank, shape: Geometry, pages: int = PAGES) -> tuple[GatheredTransfer, PeerSlots]:
    slots = opened(plane, prefill.pool, shape)
    numbers = np.arange(pages, dtype=np.uint32)
    return gathered(plane, slots, numbers, numbers[::-1].copy()), slots


def addresses(plane: Plane) -> list[int]:
    return [int(write.plan.source[0]) for write in plane.writes]


@pytest.mark.usefixtures("small_slots")
def test_a_slot_is_used_again_only_when_its_write_has_ended() -> None:
    prefill, _decode, shape = pair()
    plane = Plane()
    transfer, _ = begun(plane, prefill, shape)
    for _ in range(3 * SLOTS):
        assert transfer.poll() is None
    assert len(set(addresses(plane))) == SLOTS == len(plane.writes)
    plane.writes[1].end()
    for _ in range(3):
        assert transfer.poll() is None
    assert addresses(plane)[SLOTS:] == [addresses(plane)[1]]


@pytest.mark.usefixtures("small_slots")
@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.FAILED_SRC_FREE, Outcome.FAILED_UNKNOWN])
def test_a_failed_write_ends_it_when_the_others_have_ended(outcome: Outcome) -> None:
    prefill, _decode, shape = pair()
    plane = Plane()
    transfer, slots = begun(plane, prefill, shape)
    for _ in range(3):
        transfer.poll()
    plane.writes[1].end(outcome)
    assert transfer.poll() is None and all(plane.writes[n].stopped for n in (0, 2))
    plane.writes[0].end(Outcome.REJECTED)
    plane.writes[2].end()
    result = transfer.poll()
    assert result is not None and result.outcome is min(outcome, Outcome.REJECTED)
    assert result == transfer.poll() and len(plane.writes) == 3
    certain = outcome is not Outcome.FAILED_UNKNOWN
    assert (addresses(plane)[1] in slots.free) is certain and len(slots.free) == SLOTS - (not certain)


@pytest.mark.usefixtures("small_slots")
def test_stopped_it_begins_no_further_write() -> None:
    prefill, _decode, shape = pair()
    plane = Plane()
    transfer, slots = begun(plane, prefill, shape)
    transfer.poll()
    transfer.stop()
    assert transfer.poll() is None and plane.writes[0].stopped
    plane.writes[0].end()
    assert transfer.poll() == Result(Outcome.REJECTED, "stopped", 2 * RUN_BYTES)
    assert len(slots.free) == SLOTS


@pytest.mark.usefixtures("small_slots")
def test_where_all_slots_are_lost_the_rest_goes_slice_by_slice() -> None:
    prefill, decode, shape = pair(gap=16)
    plane = Plane()
    transfer, slots = begun(plane, prefill, shape)
    source, destination = np.array([4, 0, 7], np.uint32), np.array([2, 8, 3], np.uint32)
    waiting = gathered(plane, slots, source, destination)
    for _ in range(SLOTS):
        transfer.poll()
    assert waiting.poll() is None and slots.left
    for write in plane.writes:
        write.end(Outcome.FAILED_UNKNOWN)
    ended = transfer.poll()
    assert ended is not None and ended.outcome is Outcome.FAILED_UNKNOWN and not slots.left
    del plane.writes[:]
    assert run(waiting, plane) == Result(Outcome.DONE, "", 3 * LAYERS * RUN_BYTES)
    assert sum(len(write.plan.nbytes) for write in plane.writes) == 3 * LAYERS * TOKENS
    expected = prefill.heads_of(HEADS // 2, HEADS // 2, source)
    assert (decode.heads_of(HEADS // 2, HEADS // 2, destination) == expected).all()


@pytest.mark.parametrize("where", ["submit", "poll"])
def test_a_plane_that_raises_fails_that_write_and_loses_its_slot(where: str) -> None:
    class Broken(Write):
        def poll(self) -> Result | None:
            raise RuntimeError("a bug")

    class BrokenPlane(Plane):
        def submit(self, peer: object, *columns: Any) -> Transfer:
            if where == "submit":
                raise RuntimeError("a bug")
            return Broken(Plan(*columns))

    prefill, _decode, shape = pair()
    plane = BrokenPlane()
    slots = opened(plane, prefill.pool, shape)
    page = np.zeros(1, np.uint32)
    result = gathered(plane, slots, page, page).poll()
    assert result is not None and result.outcome is Outcome.FAILED_UNKNOWN and "a bug" in result.detail
    assert len(slots.free) == SLOTS - 1


class WholePlane(Plane):
    """What a TransferWorker needs besides. Writes end at once."""

    def attach(self, address: bytes) -> object:
        return address

    def detach(self, peer: object) -> None:
        pass

    def submit(self, peer: object, *columns: Any) -> Transfer:
        write = super().submit(peer, *columns)
        assert isinstance(write, Write)
        write.end()
        return write


def test_the_transfer_thread_gathers_for_one_peer_after_the_other_in_the_same_memory() -> None:
    prefill, plane, ended = Rank(0, HEADS), WholePlane(), list[tuple[Submission, Result]]()
    prefill.fill()
    worker = TransferWorker(guarded(plane), [prefill.pool], ended.extend, BLOCK_BYTES)
    pages = np.array([5, 2], np.uint32)
    for turn in range(3):
        decode = Rank(0, HEADS // 2)
        pair = PrefillPair(RankRef(RankId("D"), turn), PeerMemory([decode.pool], b"there"), 0)
        room = PrefillRoom(RoomKey(turn), RankRef(RankId("P"), 1), 0)
        worker.submit([Submission(room, pair, pages, pages, 0, None)])
        deadline = time.monotonic() + 20
        while len(ended) <= turn:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert ended[turn][1] == Result(Outcome.DONE, "", 2 * LAYERS * RUN_BYTES)
        assert len(plane.writes) == turn + 1 and len(plane.blocks) == 1
        assert (decode.heads_of(0, 2, pages) == prefill.heads_of(0, 2, pages)).all()
        worker.forget(pair)
    assert worker.close(20)


def test_the_transfer_thread_gathers_nothing_without_memory_for_it() -> None:
    prefill, decode, plane, ended = Rank(0, HEADS), Rank(0, 2), WholePlane(), list[tuple[Submission, Result]]()
    prefill.fill()
    worker = TransferWorker(guarded(plane), [prefill.pool], ended.extend)
    pair = PrefillPair(RankRef(RankId("D"), 2), PeerMemory([decode.pool], b"there"), 0)
    page = np.zeros(1, np.uint32)
    worker.submit([Submission(PrefillRoom(RoomKey(1), RankRef(RankId("P"), 1), 0), pair, page, page, 0, None)])
    assert worker.close(20) and [result.outcome for _, result in ended] == [Outcome.DONE]
    assert len(plane.writes[0].plan.nbytes) == LAYERS * TOKENS and not plane.blocks


def test_a_moment_without_memory_is_not_for_good() -> None:
    class Short(Plane):
        asked, short = 0, True

        def allocate(self, nbytes: int, location: str = "cpu:0") -> int:
            self.asked += 1
            if self.short:
                raise MemoryError("none now")
            return super().allocate(nbytes, location)

    plane, now = Short(), 100.0
    prefill, _, shape = pair()
    memory = GatherStaging(guarded(plane), [prefill.pool], 1 << 30, lambda: now)
    slots = memory.open(shape)
    assert slots is not None
    assert not any(memory.fill(slots) for _ in range(10)) and plane.asked == 1, "each chunk asks, the plane is spared"
    plane.short = False
    now += gather.RETRY_SECONDS - 0.1
    assert not memory.fill(slots)
    now += 0.2
    assert memory.fill(slots) and plane.asked == 2


class Unhashable(Plane):
    __hash__ = None  # type: ignore[assignment]


class Slotted:
    """Without weak references."""

    __slots__ = ("allocate", "gathers_slices", "name", "register")

    def __init__(self) -> None:
        plane = Plane()
        self.name, self.gathers_slices = plane.name, True
        self.allocate, self.register = plane.allocate, plane.register


@pytest.mark.parametrize("make", [Unhashable, Slotted])
def test_a_plane_that_cannot_be_remembered_gathers_too(make: Any) -> None:
    plane, (prefill, _, shape) = make(), pair()
    memory = staging(plane, prefill.pool)
    slots = memory.open(shape)
    assert slots is not None and memory.fill(slots)
    memory.close_peer(slots)
    memory.close()
