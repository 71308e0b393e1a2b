"""Whole engines of other sizes: what decode's ranks hold after a hand-off, by a model that knows of no plan.

Each number of the cache is its own: that of a layer, of keys or values, of a token and a head. A rank's memory is made
of what its pools say they are; then every plan between two engines is run, and each byte of decode compared.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrpc.model import Attention, Layout, ModelIdentity, Pool, PoolKind, RankId, RankRef, Region, check_pools
from kvgrpc.transfer.layout.plan import geometry
from kvgrpc.transfer.layout.token_shares import axes_of_shares
from kvgrpc.transfer.layout.topology import (
    Shape,
    check_layers,
    layers_of_pools,
    owed_part,
    parts_of_pages,
    prefill_ranks,
    wanted_part,
)
from kvgrpc.transfer.protocol.destination import Destination
from kvgrpc.transfer.runtime.writing.checksums import PageReader, PeerPages

PAGES, DIM, HEADS, TOKENS, UNTOUCHED = 8, 2, 8, 512, -1
AXES = ["token,head,dim", "head,token,dim", "kv,token,head,dim", "token,head,kv,dim", "head,token,kv,dim"]
PEER = RankRef(RankId("P"), 1)
Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Engine:
    """``stages``: the layers of each, up to the next one's first. ``kinds``: the layers of each pool. ``heads`` 0: MLA.
    ``shares``: decode context parallelism. ``page``: tokens in one of the first pool, ``other_page`` in the others."""

    layout: Layout
    stages: Sequence[range]
    kinds: Sequence[Sequence[int]]
    heads: int
    axes: str
    page: int
    other_page: int
    gap: int = 0
    shares: int = 1


@dataclass
class Place:
    """A region in a rank's memory: numbers from ``begin`` on, ``stride`` of them from page to page."""

    layer: int
    part: int
    begin: int
    stride: int
    axes: list[str]
    heads: range
    page: int
    shares: int = 1
    share: int = 0

    def numbers(self, page: int) -> tuple[Numbers, Numbers]:
        """What is in a page of the prompt, and the token that each number is of, both in their order in memory."""
        tokens = range(page * self.page + self.share, (page + 1) * self.page, self.shares)
        of = {"token": tokens, "head": self.heads, "kv": range(2), "dim": range(DIM)}
        grid = dict(zip(self.axes, np.meshgrid(*(of[axis] for axis in self.axes), indexing="ij"), strict=True))
        number = self.layer * 2 + grid.get("kv", np.array(self.part))
        number = (number * TOKENS + grid["token"]) * HEADS + grid.get("head", np.array(0))
        return (number * DIM + grid["dim"]).astype(np.int32).ravel(), grid["token"].ravel()

    def at(self, page: int) -> slice:
        begin, count = self.begin + page * self.stride, self.numbers(0)[0].size
        return slice(begin, begin + count)


@dataclass
class Rank:
    shape: Shape
    places: list[list[Place]]
    memory: Numbers = field(repr=False)


def rank_of(engine: Engine, pp: int, tp: int) -> Rank:
    size, at, heads = engine.layout.tp, 16, range(1)
    if engine.heads:
        first = tp * engine.heads // size
        heads = range(first, first + max(engine.heads // size, 1))
    places = []
    for index, kind in enumerate(engine.kinds):
        axes = engine.axes.split(",") if engine.heads else ["token", "dim"]
        found = []
        parts = (0,) if "kv" in axes or not engine.heads else (0, 1)
        for layer, part in itertools.product((layer for layer in kind if layer in engine.stages[pp]), parts):
            page, share = (engine.other_page if index else engine.page), tp % engine.shares
            place = Place(layer, part, at, 0, axes, heads, page, engine.shares, share)
            place.stride = place.numbers(0)[0].size + engine.gap
            at += place.stride * PAGES
            found.append(place)
        places.append(found)
    memory = np.full(at, UNTOUCHED, np.int32)
    pools = tuple(pool_of(engine, index, found, heads, tp, memory) for index, found in enumerate(places))
    check_pools(pools)
    model = ModelIdentity(attention=Attention.MHA if engine.heads else Attention.MLA)
    return Rank(Shape(RankId("E", pp=pp, tp=tp), engine.layout, pools, (8,), "shm", model), places, memory)


def pool_of(engine: Engine, index: int, places: Sequence[Place], heads: range, tp: int, memory: Numbers) -> Pool:
    axes, total, first, count = engine.axes, engine.heads, heads.start, len(heads)
    if not total:
        first, count = (tp % engine.shares, 1) if engine.shares > 1 else (0, 0)
        axes = axes_of_shares(engine.shares) if engine.shares > 1 else engine.axes
    names = ["latent"] if not total else ["kv"] if "kv" in axes else ["k", "v"]
    regions = [
        Region(each.layer, names[each.part], memory.ctypes.data + 4 * each.begin, 4 * each.stride, 4 * size)
        for each in places
        for size in [each.numbers(0)[0].size]
    ]
    page = engine.other_page if index else engine.page
    return Pool(f"pool-{index}", PoolKind.KV, page, PAGES, "int32", regions, axes, total, first, count)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Engine, Engine, int]:
    """A prefill and a decode engine that fit, and of how many of prefill's pages a prompt is."""
    sizes = st.sampled_from([1, 2, 4])
    few, each = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    layers = sorted(draw(st.sets(st.integers(0, 11), min_size=max(few * each, 2), max_size=8)))
    cuts = sorted(draw(st.sets(st.sampled_from(layers[1:]), min_size=few * each - 1, max_size=few * each - 1)))
    bounds = [0, *cuts, 12]
    fine = [range(*bound) for bound in itertools.pairwise(bounds)]
    coarse = [range(fine[at].start, fine[at + each - 1].stop) for at in range(0, len(fine), each)]
    kind_of = draw(st.lists(st.integers(0, 1), min_size=len(layers), max_size=len(layers)))
    number = draw(st.sampled_from([1, 2]))
    kinds = [
        [layer for layer, kind in zip(layers, kind_of, strict=True) if kind % number == at] for at in range(number)
    ]
    heads, (tp, other_tp) = draw(st.sampled_from([0, 1, 2, 8])), draw(st.tuples(sizes, sizes))
    shares = draw(st.sampled_from([size for size in (1, 2, 4) if size <= other_tp])) if not heads else 1
    page, pages = shares * draw(st.integers(1, 3)), draw(st.integers(1, 6))
    parts = draw(st.integers(1, 3))
    axes = draw(st.sampled_from(AXES)) if heads else "token,dim"
    other_axes = draw(st.sampled_from(AXES)) if heads and (number == 1 or parts == 1) else axes
    stages = [fine, coarse] if draw(st.booleans()) else [coarse, fine]
    gaps = draw(st.tuples(st.sampled_from([0, 3]), st.sampled_from([0, 3])))
    prefill = Engine(Layout(pp=len(stages[0]), tp=tp), stages[0], kinds, heads, axes, page, page, gaps[0])
    layout = Layout(pp=len(stages[1]), tp=other_tp)
    decode = Engine(layout, stages[1], kinds, heads, other_axes, page * parts, page, gaps[1], shares)
    return prefill, decode, pages


@settings(max_examples=60)
@given(pairs(), st.randoms())
def test_each_decode_rank_holds_what_it_says_it_does_and_nothing_else_was_written(
    engines: tuple[Engine, Engine, int], random: Random
) -> None:
    prefill, decode, pages = engines
    parts = decode.page // prefill.page
    stages, ranks = range(prefill.layout.pp), range(prefill.layout.tp)
    ours = {(0, pp, 0, tp): rank_of(prefill, pp, tp) for pp, tp in itertools.product(stages, ranks)}
    for pp, tp in itertools.product(range(decode.layout.pp), range(decode.layout.tp)):
        theirs = rank_of(decode, pp, tp)
        begin = random.randrange(-(-pages // parts))  # decode holds so many pages of its own
        sent = [random.sample(range(PAGES), pages) for _ in prefill.kinds]
        taken = [random.sample(range(PAGES), count) for count in (-(-pages // parts), *[pages] * len(sent[1:]))]
        senders = [ours[each] for each in prefill_ranks(theirs.shape.rank, decode.layout, prefill.layout, 0)]
        if prefill.layout.pp > decode.layout.pp:
            of_stage = {each.shape.rank.pp: layers_of_pools(each.shape.pools) for each in senders}
            check_layers(theirs.shape.pools, list(of_stage.values()))
        sends_aux = [hand_over(each, theirs, sent, taken, begin) for each in senders]
        assert sends_aux.count(True) == 1
        assert np.array_equal(theirs.memory, expected(theirs, taken, begin, pages * prefill.page))


def expected(theirs: Rank, taken: list[list[int]], begin: int, tokens: int) -> Numbers:
    """The memory of a decode rank that wants its pages from ``begin`` on of a prompt of so many tokens."""
    memory = np.full_like(theirs.memory, UNTOUCHED)
    for index, (places, pages) in enumerate(zip(theirs.places, taken, strict=True)):
        for place, page in itertools.product(places, range(0 if index else begin, len(pages))):
            numbers, of_token = place.numbers(page)
            memory[place.at(pages[page])] = np.where(of_token < tokens, numbers, UNTOUCHED)
    return memory


def hand_over(ours: Rank, theirs: Rank, sent: list[list[int]], taken: list[list[int]], begin: int) -> bool:
    """Runs all plans of one pair, each byte but once, and compares checksums; whether the pair moves aux."""
    pools, other = ours.shape.pools, theirs.shape.pools
    part, parts = owed_part(ours.shape, theirs.shape), parts_of_pages(pools, other)
    stage = layers_of_pools(pools)
    assert part == wanted_part(theirs.shape, ours.shape.rank[1:], ours.shape.layout, stage)
    if part.empty:
        return part.aux
    for places, pages in zip(ours.places, sent, strict=True):
        for place, (number, page) in itertools.product(places, enumerate(pages)):
            ours.memory[place.at(page)] = place.numbers(number)[0]
    sums = []
    for index, (pool, its) in enumerate(zip(pools, other, strict=True)):
        source = np.array(sent[index][0 if index else begin * parts :], np.uint32)
        wanted = Destination(np.array(taken[index][0 if index else begin :], np.uint32))
        plan = geometry([pool], [its])
        destination = (wanted if index else wanted.divided(parts)).slice(0, len(source))
        run(plan.plan(source, destination).columns, theirs.memory)
        sums.append(PageReader(plan.source).sums(source))
    if parts == 1:
        told = np.concatenate(sums).astype("<u4").tobytes()
        others = tuple(Destination(np.array(pages, np.uint32)) for pages in taken[1:]) or None
        wanted = Destination(np.array(taken[0][begin:], np.uint32), begin, others)
        peer = PeerPages([pool.without_addresses() for pool in pools], other)
        assert peer.compare(wanted, told, PEER, PEER, lambda: False) is None
    return part.aux


def run(columns: Sequence[npt.NDArray[np.uint64]], memory: Numbers) -> None:
    for source, destination, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        at = (destination - memory.ctypes.data) // 4
        assert (memory[at : at + nbytes // 4] == UNTOUCHED).all(), "nothing is written twice"
        ctypes.memmove(destination, source, nbytes)
