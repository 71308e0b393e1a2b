"""Several of prefill's pages fill one of decode's: each token arrives where it belongs, and nothing else is touched."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import ParallelLayoutMismatch
from kvgrpc.model import Attention, Layout, ModelIdentity, Pool, PoolKind, RankId
from kvgrpc.transfer.layout.engines import EngineShape, topology
from kvgrpc.transfer.layout.plan import Plan, geometry
from kvgrpc.transfer.layout.topology import Shape, owed_part, parts_of_pages
from kvgrpc.transfer.protocol.prefill.chunks import Chunk, Chunks
from kvgrpc.transfer.protocol.types import Align, DecodeEntry, Destination, Handle, KVPoll, RoomKey, Want
from kvgrpc.transfer.runtime.writing.gather import slices_of
from tests.support.prefill_side import D0, KEY, Side, reason
from tests.unit.transfer.axes import tokens_of

LAYERS, PAGES, HEADS, DIM, UNTOUCHED = 2, 24, 4, 2, -1
ORDERS = [
    *(",".join((*order, "dim")) for order in itertools.permutations(("token", "head"))),
    *(",".join((*order, "dim")) for order in itertools.permutations(("kv", "token", "head"))),
]


class Memory:
    """A pool in numpy with ``gap`` numbers between its pages."""

    def __init__(self, axes: str, tokens: int, tp_size: int = 1, tp: int = 0, gap: int = 0) -> None:
        self.axes, self.tokens = axes.split(","), tokens
        self.heads = range(tp * HEADS // tp_size, (tp + 1) * HEADS // tp_size)
        sizes = {"kv": 2, "token": tokens, "head": len(self.heads), "dim": DIM}
        shape = [sizes[axis] for axis in self.axes]
        count = int(np.prod(shape))
        names = ["kv"] if "kv" in self.axes else ["k", "v"]
        keys = [(layer, name) for layer in range(LAYERS) for name in names]
        self.whole = {key: np.full((PAGES, count + gap), UNTOUCHED, np.int32) for key in keys}
        strides = np.empty((PAGES, *shape), np.int32).strides[1:]
        self.arrays = {
            key: np.ndarray((PAGES, *shape), np.int32, memory, 0, (memory.strides[0], *strides))
            for key, memory in self.whole.items()
        }
        self.pool = Pool.from_arrays(
            self.arrays, page_tokens=tokens, axes=axes, heads_total=HEADS, head_start=self.heads[0],
            head_count=len(self.heads),
        )  # fmt: skip
        self.shape = Shape(
            RankId("engine", tp=tp), Layout(tp=tp_size), (self.pool,), (), "shm", ModelIdentity(attention=Attention.MHA)
        )

    def view(self, layer: int, part: int) -> npt.NDArray[np.int32]:
        """(page, token, head, dim), of this very memory."""
        return tokens_of(self.arrays, self.axes, layer, part)

    def numbers(self) -> list[npt.NDArray[np.int32]]:
        return [memory.copy() for memory in self.whole.values()]


def value(layer: int, part: int, token: int, head: int, dim: int) -> int:
    return 1 + int(np.ravel_multi_index((layer, part, token, head, dim), (LAYERS, 2, 512, HEADS, DIM)))


def fill(memory: Memory, pages: list[int]) -> None:
    """Token t of the prompt, also those behind its end in the last page, is in page t // tokens."""
    for layer, part in itertools.product(range(LAYERS), range(2)):
        view = memory.view(layer, part)
        for at, page in enumerate(pages):
            for token, head, dim in np.ndindex(memory.tokens, len(memory.heads), DIM):
                place = at * memory.tokens + token
                view[page, token, head, dim] = value(layer, part, place, memory.heads[head], dim)


def expected(memory: Memory, pages: list[int], first: int, stop: int) -> list[npt.NDArray[np.int32]]:
    """What the memory holds when tokens [first, stop) of the prompt have come to it, and nothing else."""
    before = memory.numbers()
    for layer, part in itertools.product(range(LAYERS), range(2)):
        view = memory.view(layer, part)
        for place in range(first, stop):
            page, token = pages[(place - first) // memory.tokens], place % memory.tokens
            for head, dim in np.ndindex(len(memory.heads), DIM):
                view[page, token, head, dim] = value(layer, part, place, memory.heads[head], dim)
    found = memory.numbers()
    for memory_now, old in zip(memory.whole.values(), before, strict=True):
        memory_now[...] = old
    return found


def copy(plan: Plan) -> None:
    for source, destination, nbytes in zip(*plan.columns, strict=True):
        ctypes.memmove(int(destination), int(source), int(nbytes))


def destination_of(pages: list[int], first_page: int, as_runs: bool) -> Destination:
    if as_runs:
        return Destination.of_runs(pages, [1] * len(pages), first_page)
    return Destination(np.array(pages, np.uint32), first_page)


@given(
    st.sampled_from(ORDERS),
    st.sampled_from([*ORDERS, None, None, None, None]),
    st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)]),
    st.sampled_from([2, 3, 4]),
    st.integers(1, 5),
    st.integers(1, 30),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_every_token_arrives_and_no_byte_beside_them(
    one: str, other: str | None, sizes: tuple[int, int], parts: int, tokens: int, length: int, draw: Any
) -> None:
    """Of a prompt of ``length`` pages of prefill, the last of which may be anywhere in one of decode's: decode holds
    some pages; prefill sends all, or what decode does not hold, in chunks of any size and order."""
    other = other or one
    sources = [Memory(one, tokens, sizes[0], tp, draw.choice([0, 3])) for tp in range(sizes[0])]
    # Fewer of its own pages fit in decode's pool than prefill has.
    length = min(length, PAGES - 1)
    ours = draw.sample(range(PAGES), length)
    held = draw.randrange(-(-length // parts) + 1)
    theirs = draw.sample(range(PAGES), -(-length // parts) - held)
    suffix = draw.random() < 0.5
    sent = ours[held * parts :] if suffix and theirs else ours
    for memory in sources:
        fill(memory, ours)
    for tp in range(sizes[1]):
        target = Memory(other, tokens * parts, sizes[1], tp, draw.choice([0, 3]))
        first = held * parts * tokens
        after = expected(target, theirs, first, max(first, length * tokens) if theirs else first)
        for memory in sources:
            if not set(memory.heads) & set(target.heads):
                continue
            owed_part(memory.shape, target.shape)
            assert parts_of_pages([memory.pool], [target.pool]) == parts
            shape = geometry([memory.pool], [target.pool])
            for source, to in placed(sent, destination_of(theirs, held, draw.random() < 0.5).divided(parts), draw):
                if (slices := slices_of(shape, PAGES)) is not None and draw.random() < 0.5:
                    for piece in slices.pieces(len(source)):
                        copy(slices.apart(piece, source, to))
                else:
                    copy(shape.plan(source, to))
        for now, then in zip(target.whole.values(), after, strict=True):
            assert np.array_equal(now, then)


def placed(pages: list[int], destination: Destination, draw: Any) -> list[tuple[Any, Any]]:
    """Which page goes where, of chunks that a sender cuts as it likes."""
    chunks = Chunks(total=len(pages) if draw.random() < 0.5 else None)
    cuts = sorted({0, len(pages), *(draw.randrange(len(pages) + 1) for _ in range(2))})
    spans = list(itertools.pairwise(cuts)) or [(0, 0)]
    draw.shuffle(spans)
    found = []
    for number, (start, stop) in enumerate(spans, 1):
        chunk = Chunk(np.array(pages[start:stop], np.uint32), start, number == len(spans))
        assert chunks.add(RoomKey(5), chunk, 16) is None
        assert chunks.missing(RoomKey(5), destination) is None and chunks.misfit(RoomKey(5), destination) is None
        found += chunks.place(destination)
    assert not chunks.waiting
    moved = sum(len(each.source) for each in found)
    assert moved == chunks.wanted(destination)
    return [(each.source, each.destination) for each in found]


# A room at prefill.


@pytest.fixture
def side() -> Side:
    side = Side()
    side.hello()
    side.core.pairs[D0].parts = 2
    return side


def test_decode_is_told_of_its_own_pages(side: Side) -> None:
    """Its pages 10, 11 and 12, of which the last has room left: five of ours."""
    side.name(pages=3)
    record, handle = side.claim(total=5)
    side.send(record, 0, 3)
    assert side.done() == {20: 100, 21: 101, 22: 102}
    side.ticks(1)
    assert side.said()[KEY].pages_done == 1 and handle.pages_done == 3
    side.send(record, 3, 5, last=True)
    assert side.done() == {23: 103, 24: 104}
    assert side.said()[KEY].pages_done == 3 and handle.poll is KVPoll.Success
    assert record.page_count == 5


def test_a_page_that_two_writes_fill_is_there_when_both_are(side: Side) -> None:
    side.name(pages=1)
    record, handle = side.claim(total=2)
    side.send(record, 0, 1)
    side.send(record, 1, 2, last=True)
    first, second = side.take("submissions")
    side.core.on_outcome(second, Outcome.DONE)
    assert handle.poll is KVPoll.Transferring and not record.pages_done
    side.core.on_outcome(first, Outcome.FAILED_SRC_FREE, "gone")
    assert reason(handle) == "TRANSFER_FAILED"


@pytest.mark.parametrize("total", [4, None])
def test_too_few_pages_for_decodes_fail_the_room(side: Side, total: int | None) -> None:
    """Its three pages are of five of ours, or six."""
    side.name(pages=3)
    record, handle = side.claim(total=total)
    side.send(record, 0, 4, last=True)
    assert reason(handle) == "INVALID_REQUEST"
    assert handle.failure is not None and "decode's page 4 of 5" in handle.failure.message


def test_what_counts_from_the_end_is_refused(side: Side) -> None:
    """A window may begin anywhere in a page of decode's."""
    side.name(pages=3)
    record, handle = side.claim(total=5, align=Align.TAIL)
    side.send(record, 0, 5, last=True)
    assert reason(handle) == "INVALID_REQUEST" and not side.take("submissions")
    assert handle.failure is not None and "2 of ours fill one of decode's" in handle.failure.message


def test_another_destination_later_fails_and_the_same_does_not(side: Side) -> None:
    side.name(pages=3)
    _, handle = side.claim(total=5)
    side.name(pages=3)
    assert handle.poll is not KVPoll.Failed
    side.name(pages=2)
    assert reason(handle) == "ROOM_CONFLICT"


def test_one_list_of_pages_for_pools_that_differ_is_refused(side: Side) -> None:
    pair = side.core.pairs[D0]
    pair.pools = 2
    side.name(pages=3)
    record = side.core.find(KEY)
    assert record is not None and record.failure is not None
    assert "a set for each of 2 pools" in record.failure.message


def test_a_state_beside_them_goes_where_it_is_to(side: Side) -> None:
    side.core.pairs[D0].pools = 2
    destination = Destination(np.array([7], np.uint32), others=(Destination(np.array([9], np.uint32)),))
    side.core.on_frame(side.streams[D0], D0, [DecodeEntry(KEY, Want.WRITE, destination, 300_000)])
    record, handle = side.claim(total=2)
    state = (np.array([5], np.uint32),)
    side.core.send(record, Chunk(np.array([3, 4], np.uint32), 0, True, None, state))
    (submission,) = side.take("submissions")
    assert submission.destination.tolist() == [14, 15]
    assert [(one.tolist(), other.tolist()) for one, other in submission.others] == [([5], [9])]
    side.core.on_outcome(submission, Outcome.DONE)
    assert handle.poll is KVPoll.Success


def test_a_page_of_ever_so_many_parts_takes_no_memory_until_it_is_asked_for() -> None:
    destination = Destination(np.array([1, 0], np.uint32)).divided(2**30)
    assert destination.count == 2**31
    assert destination.slice(2**30 - 1, 2**30 + 1).tolist() == [2**31 - 1, 0]
    assert destination.same(Destination(np.array([1, 0], np.uint32)).divided(2**30))


# Refusals.


@pytest.mark.parametrize(
    ("ours", "theirs"), [(4, 2), (4, 6), (2, 3)], ids=["larger at prefill", "one and a half", "odd"]
)
@pytest.mark.parametrize("axes", ["token,head,dim", "head,kv,token,dim"])
def test_other_sizes_are_refused_with_both(axes: str, ours: int, theirs: int) -> None:
    with pytest.raises(ParallelLayoutMismatch) as refused:
        owed_part(Memory(axes, ours).shape, Memory(axes, theirs).shape)
    assert f"pools[0].page_tokens: prefill {ours}, decode {theirs}" in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"axes": ""},
        {"axes": "head,kv,vec"},  # tokens are packed as one kernel likes them
        {"axes": "head,token,dim"},  # K and V in one region: the engine alone knows where
        {"axes": "block,token,head,dim"},
        {"axes": "head,kv,token,dim", "head_count": 0, "heads_total": 0},
        {"pages": 2**31},
    ],
    ids=str,
)
def test_pages_of_which_nobody_knows_the_parts_are_refused(changes: dict[str, Any]) -> None:
    shapes = [
        replace(each.shape, pools=(replace(each.pool, **changes),))
        for each in (Memory("head,kv,token,dim", 2), Memory("head,kv,token,dim", 4))
    ]
    with pytest.raises(ParallelLayoutMismatch) as refused:
        owed_part(shapes[0], shapes[1])
    assert "pools[0].page_tokens: prefill 2, decode 4" in str(refused.value)


def test_pages_whose_bytes_are_no_multiple_are_refused() -> None:
    target = Memory("token,head,dim", 4)
    first, *rest = target.pool.regions
    wrong = replace(target.pool, regions=(first._replace(page_bytes=first.page_bytes - 32), *rest))
    with pytest.raises(ParallelLayoutMismatch) as refused:
        owed_part(Memory("token,head,dim", 2).shape, replace(target.shape, pools=(wrong,)))
    assert "page" in str(refused.value)


@pytest.mark.parametrize("tokens", [(2, 4), (4, 4)], ids=["a window", "a window of equal pages"])
def test_a_second_pool_has_pages_of_equal_size(tokens: tuple[int, int]) -> None:
    sides = []
    for first, second in zip((2, 4), tokens, strict=True):
        one, other = Memory("token,head,dim", first), Memory("token,head,dim", second)
        sides.append(replace(one.shape, pools=(one.pool, replace(other.pool, name="swa-1"))))
    if tokens == (4, 4):
        owed_part(sides[0], sides[1])
        return
    with pytest.raises(ParallelLayoutMismatch) as refused:
        owed_part(sides[0], sides[1])
    assert str(refused.value.metadata["mismatchedFields"]).startswith("pools[1].page_tokens")


def test_a_state_beside_pages_of_two_sizes_is_served() -> None:
    state = Pool.from_arrays([np.zeros((4, 3), np.uint8)], page_tokens=0, name="state-1", kind=PoolKind.STATE)
    first, second = (
        replace(each.shape, pools=(each.pool, state))
        for each in (Memory("token,head,dim", 2), Memory("token,head,dim", 4))
    )
    owed_part(first, second)


def test_the_topology_of_two_engines_counts_the_pieces_of_prefills_page() -> None:
    one, other = (EngineShape(Layout(), 4, axes="head,kv,token,dim", page_tokens=tokens) for tokens in (16, 32))
    assert [line.descriptors for line in topology(one, other)] == [8]
    assert [line.descriptors for line in topology(one, one)] == [1]


def test_a_handle_is_told_the_prefix_in_its_own_pages(side: Side) -> None:
    destination = Destination(np.array([7], np.uint32), first_page=3)
    side.core.on_frame(side.streams[D0], D0, [DecodeEntry(KEY, Want.WRITE, destination, 300_000)])
    handle = Handle()
    side.core.claim(KEY, handle)
    assert handle.prefix_pages == 6
