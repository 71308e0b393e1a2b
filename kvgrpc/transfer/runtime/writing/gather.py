"""Slices that lie apart here and together at decode, copied together before they are written.

Over TCP a write costs 25 us, whatever its size (docs/performance.md). Where decode has more tensor-parallel ranks than
prefill and its pages keep the token before the head, what a decode rank gets of a page is a slice a token here and one
run of bytes there: copied together first, it is one write (docs/topology.md has the figures).

Each peer has a block of slots of its own, so that one that hangs holds nobody else's; one for which there is no block
gets its slices one by one. A slot is used again when its write has ended for certain (rule 7, writes), and else never.
Used by the transfer thread alone.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvgrpc.dataplane.base import DataPlane, Outcome, Peer, Result, Transfer
from kvgrpc.model import Pool
from kvgrpc.transfer.layout.plan import Geometry, Plan, U32Array, U64Array, page_runs
from kvgrpc.transfer.runtime.guarded import GuardedPlane, attempt

logger = logging.getLogger(__name__)
SLOT_BYTES = 1 << 20  # copied in one poll, which may take 2 ms
SLOTS = 4
BLOCK_BYTES = SLOTS * SLOT_BYTES
RETRY_SECONDS = 5.0
_FEWEST_SLICES = 4
_U8Array = npt.NDArray[np.uint8]


class GatherStaging:
    """The memory in which a rank's slices are copied together: at most ``nbytes``, taken when a peer needs it.

    None for a plane that says that gathering does not pay, and for pools in the memory of a device. Where the plane has
    none it is asked again after RETRY_SECONDS.
    """

    def __init__(
        self, plane: GuardedPlane, pools: Sequence[Pool], nbytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        useful = plane.gathers_slices and all(pool.location.startswith("cpu") for pool in pools)
        self._blocks_left = nbytes // BLOCK_BYTES if useful else 0
        self._plane = plane
        self._clock, self._refused_until = clock, -1.0
        self._pages = min((pool.pages for pool in pools), default=0)
        self._blocks: list[int] = []
        self._free: list[int] = []
        self._lost: set[int] = set()  # slots that somebody may read for ever

    def open(self, shape: Geometry) -> PeerSlots | None:
        """For a peer whose slices lie together in its memory; None: it is no such, or nothing is gathered here."""
        slices = slices_of(shape, self._pages) if self._blocks or self._blocks_left else None
        return PeerSlots(slices, self._lost) if slices is not None else None

    def fill(self, slots: PeerSlots) -> bool:
        """Gives a peer what its share lacks, as far as there is any; whether it has a slot, or will have one.

        At each chunk, because what others used may be free by now. A slot that was lost to a peer stays in its share,
        so that one which hangs takes nobody else's.
        """
        lacks = 0 if slots.closed else slots.lacks
        if lacks > len(self._free) and self._blocks_left and self._clock() >= self._refused_until:
            self._free += self._block()
        if lacks and self._free:
            slots.free += self._free[:lacks]
            del self._free[:lacks]
        return slots.left

    def close_peer(self, slots: PeerSlots) -> None:
        """The peer is gone: its slots are the next one's, those in use when their writes have ended."""
        self._free += slots.free
        slots.free, slots.closed = self._free, True

    def close(self) -> None:
        """Nothing runs any more: the next rank on the same plane takes the blocks that nobody reads."""
        spare = [block for block in self._blocks if self._lost.isdisjoint(_slots_of(block))]
        if spare:
            _spare_of(self._plane.plane).extend(spare)
        self._blocks, self._free, self._blocks_left = [], [], 0

    def _block(self) -> Iterable[int]:
        spare = _spare_of(self._plane.plane)
        block = spare.pop() if spare else self._plane.buffer(BLOCK_BYTES)
        if block is None:
            logger.warning("slices for more peers are written one by one meanwhile, which is slower")
            self._refused_until = self._clock() + RETRY_SECONDS
            return ()
        self._blocks_left -= 1
        self._blocks.append(block)
        return _slots_of(block)


# Blocks that ranks of before had, by the plane that gave them: what is registered stays so until the plane is closed.
_SPARE: weakref.WeakKeyDictionary[DataPlane, list[int]] = weakref.WeakKeyDictionary()


def _spare_of(plane: DataPlane) -> list[int]:
    """Nothing is remembered of a plane that somebody else wrote without a hash or weak references."""
    try:
        return _SPARE.setdefault(plane, [])
    except TypeError:
        return []


def _slots_of(block: int) -> range:
    return range(block, block + SLOTS * SLOT_BYTES, SLOT_BYTES)


class Piece(NamedTuple):
    """Pages ``first_page`` to ``last_page`` (positions in the chunk) of runs ``first_run`` to ``last_run``; the last
    are those behind them."""

    first_run: int
    last_run: int
    first_page: int
    last_page: int


class Slices:
    """The slices of a page: in each of ``runs``, ``count`` slices of ``nbytes`` that follow each other at decode."""

    def __init__(self, source: list[_U8Array], destination: U64Array, destination_stride: U64Array) -> None:
        """``source``: of each run uint8[pages, count, nbytes]; the others uint64[runs], where page 0 of decode's run
        begins and how far the next page is."""
        self._source = source
        self._destination, self._stride = destination, destination_stride
        self.runs, self.run_bytes = len(source), source[0][0].size
        self._dense = bool((destination_stride == self.run_bytes).all())

    def pieces(self, pages: int) -> Iterator[Piece]:
        """Each page of each run once, in pieces of at most SLOT_BYTES."""
        blocks = max(1, -(-pages * self.run_bytes // SLOT_BYTES))
        pages_at_once = max(1, min(-(-pages // blocks), SLOT_BYTES // self.run_bytes))
        runs_at_once = max(1, SLOT_BYTES // (pages_at_once * self.run_bytes))
        for run in range(0, self.runs, runs_at_once):
            for page in range(0, pages, pages_at_once):
                yield Piece(run, min(run + runs_at_once, self.runs), page, min(page + pages_at_once, pages))

    def gather(self, piece: Piece, slot: int, source: U32Array, destination: U32Array) -> Plan:
        """Copies the piece of a chunk into ``slot`` (an address) and says how it is written from there."""
        source = source[piece.first_page : piece.last_page]
        destination = destination[piece.first_page : piece.last_page]
        views = self._source[piece.first_run : piece.last_run]
        staged = _memory(slot, (len(views), len(source), *views[0].shape[1:]))
        for to, view in zip(staged, views, strict=True):
            to[...] = view[source]
        runs = slice(piece.first_run, piece.last_run)
        return self._plan(slot, self._destination[runs], self._stride[runs], destination)

    def apart(self, piece: Piece, source: U32Array, destination: U32Array) -> Plan:
        """The piece as it lies, a write for each slice: for where there is no slot."""
        source = source[piece.first_page : piece.last_page]
        destination = destination[piece.first_page : piece.last_page]
        _, count, nbytes = self._source[0].shape
        of_slice = np.arange(count, dtype=np.uint64)
        sources, destinations = [], []
        for run in range(piece.first_run, piece.last_run):
            view, begin, stride = self._source[run], self._destination[run], self._stride[run]
            of_page = np.uint64(view.ctypes.data) + source.astype(np.uint64) * np.uint64(view.strides[0])
            to_page = begin + destination.astype(np.uint64) * stride
            sources.append(of_page[:, None] + of_slice * np.uint64(view.strides[1]))
            destinations.append(to_page[:, None] + of_slice * np.uint64(nbytes))
        columns = np.ravel(sources), np.ravel(destinations)
        return Plan(*columns, np.full(len(columns[0]), nbytes, np.uint64))

    def _plan(self, slot: int, begins: U64Array, strides: U64Array, pages: U32Array) -> Plan:
        """Pages that follow each other at decode are one write: in the slot they do."""
        own = np.arange(len(pages), dtype=np.uint32)
        if self._dense and len(pages) > 1:
            first, lengths = page_runs(own, pages, np.empty(0, np.intp))
        else:
            first, lengths = own.astype(np.intp), np.ones(len(pages), np.uint64)
        of_run = np.arange(len(begins), dtype=np.uint64)[:, None] * np.uint64(len(pages) * self.run_bytes)
        sources = np.uint64(slot) + of_run + first.astype(np.uint64) * np.uint64(self.run_bytes)
        destinations = begins[:, None] + pages[first].astype(np.uint64) * strides[:, None]
        nbytes = np.broadcast_to(lengths * np.uint64(self.run_bytes), sources.shape)
        return Plan(sources.ravel(), destinations.ravel(), nbytes.ravel())


def slices_of(shape: Geometry, pages: int) -> Slices | None:
    """The slices of a pair, where four or more of them lie together at decode, in all of its pools alike; else None.

    ``pages``: of our pools; reads no memory.
    """
    source, destination = shape.source, shape.destination
    rows = len(source.address)
    if rows < _FEWEST_SLICES or not shape.is_even:
        return None
    size, step = int(source.nbytes[0, 0]), int(source.address[1, 0]) - int(source.address[0, 0])
    steps, own_steps = (np.diff(side.address.ravel()) for side in (destination, source))
    apart = np.flatnonzero((steps != size) | (own_steps != own_steps[0]))
    count = int(apart[0]) + 1 if len(apart) else rows
    if count < _FEWEST_SLICES or rows % count or step < size or count * size > SLOT_BYTES:
        return None
    at, stride, nbytes = (column.reshape(-1, count) for column in source)
    to, to_stride, _ = (column.reshape(-1, count) for column in destination)
    alike = (nbytes == size).all() and (np.diff(to, axis=1) == size).all() and (np.diff(at, axis=1) == step).all()
    if not alike or not all((each == each[:, :1]).all() for each in (stride, to_stride)):
        return None
    views = [
        _memory(address, (pages, count, size), (of_page, step, 1))
        for address, of_page in zip(at[:, 0].tolist(), stride[:, 0].tolist(), strict=True)
    ]
    return Slices(views, to[:, 0], to_stride[:, 0])


def _memory(address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> _U8Array:
    """Memory of this process, which the caller keeps."""
    span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if strides else 0
    memory = (ctypes.c_uint8 * (span or int(np.prod(shape)))).from_address(address)
    array: _U8Array = np.ndarray(shape, np.uint8, np.ctypeslib.as_array(memory), 0, strides)
    return array


class PeerSlots:
    """The slices of one peer, and the slots that are its own."""

    __slots__ = ("_lost", "_lost_here", "closed", "free", "in_use", "slices")

    def __init__(self, slices: Slices, lost: set[int]) -> None:
        self.slices, self._lost = slices, lost
        self.free: list[int] = []
        self.in_use = self._lost_here = 0
        self.closed = False

    @property
    def left(self) -> bool:
        """True if there is a slot, or will be."""
        return not self.closed and bool(self.free or self.in_use)

    @property
    def lacks(self) -> int:
        """The number of slots that its share may still get."""
        return SLOTS - len(self.free) - self.in_use - self._lost_here

    def take(self) -> int:
        self.in_use += 1
        return self.free.pop()

    def give_back(self, slot: int | None, certain: bool) -> None:
        """``certain``: nothing reads it any more. None: there was no slot."""
        if slot is None:
            return
        self.in_use -= 1
        if certain:
            self.free.append(slot)
        else:
            self._lost.add(slot)
            self._lost_here += 1


class GatheredTransfer:
    """See Transfer: one chunk, piece by piece, each copied when a slot of its peer is free. Once the peer has none and
    will have none, the rest goes slice by slice."""

    def __init__(
        self, plane: GuardedPlane, peer: Peer, slots: PeerSlots, source: U32Array, destination: U32Array
    ) -> None:
        self._plane, self._peer, self._slots = plane, peer, slots
        self._source, self._destination = source, destination
        self._pieces = slots.slices.pieces(len(source))
        self._next = next(self._pieces, None)
        self._running: list[tuple[int | None, Transfer]] = []
        self._worst, self._nbytes = Result(Outcome.DONE), 0

    def poll(self) -> Result | None:
        """Copies one piece at most."""
        self._reap()
        if self._next is not None and (self._slots.free or not self._slots.left):
            self._begin(self._next)
        if self._running or self._next is not None:
            return None
        return Result(self._worst.outcome, self._worst.detail, self._nbytes)

    def stop(self) -> None:
        if self._next is not None:
            self._fail(Result(Outcome.REJECTED, "stopped"))
        for _, transfer in self._running:
            self._plane.stop(transfer)

    def _begin(self, piece: Piece) -> None:
        slots, pages = self._slots, (self._source, self._destination)
        slot = slots.take() if slots.left else None
        if slot is None:
            plan = attempt(partial(slots.slices.apart, piece, *pages))
        else:
            plan = attempt(partial(slots.slices.gather, piece, slot, *pages))
        if isinstance(plan, Result):
            slots.give_back(slot, certain=True)
            self._fail(plan)
            return
        self._running.append((slot, self._plane.submit(self._peer, plan)))
        self._next = next(self._pieces, None)
        self._reap()  # a write begins with its first poll

    def _reap(self) -> None:
        running, self._running = self._running, []
        for slot, transfer in running:
            result = self._plane.poll(transfer)
            if result is None:
                self._running.append((slot, transfer))
                continue
            self._nbytes += result.nbytes
            self._slots.give_back(slot, certain=result.outcome is not Outcome.FAILED_UNKNOWN)
            if result.outcome is not Outcome.DONE:
                self._fail(result)
        if self._worst.outcome is not Outcome.DONE:
            self.stop()

    def _fail(self, result: Result) -> None:
        """Nothing more is begun; the worst counts, and of equals the first."""
        self._next = None
        if result.outcome < self._worst.outcome:
            self._worst = result
