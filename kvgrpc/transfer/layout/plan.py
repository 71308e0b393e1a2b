"""Plans which bytes go where: all layers of a chunk in one vectorised pass. Pure numpy.

Pages that follow each other at the source *and* at the destination become one descriptor (the seeds'
``group_concurrent_contiguous``), because a data plane pays per descriptor, not per byte (docs/performance.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvgrpc.errors import InvalidRequest, KvIndexOutOfRange
from kvgrpc.model import Pool, Region
from kvgrpc.transfer.layout.heads import runs, shared
from kvgrpc.transfer.protocol.destination import Destination, largest_of

U32Array = npt.NDArray[np.uint32]
U64Array = npt.NDArray[np.uint64]
Number = TypeVar("Number", np.uint32, np.uint64)
Pages = TypeVar("Pages")


class Plan(Struct, eq=False):
    """Descriptors of one chunk, uint64[n] each: own addresses, the peer's addresses, bytes. All regions of a run of
    pages, then those of the next run."""

    source: U64Array
    destination: U64Array
    nbytes: U64Array

    @property
    def columns(self) -> tuple[U64Array, U64Array, U64Array]:
        return self.source, self.destination, self.nbytes


class Side(NamedTuple):
    """The regions of one side: where they begin, from page to page, bytes of a page that travel; uint64[n, 1] each."""

    address: U64Array
    stride: U64Array
    nbytes: U64Array


class Geometry:
    """The place of one pair's pools in both memories; made once, used for every chunk. Thread-safe, immutable.

    ``is_even``: in the destination it is as far from any page, or part of one, to the next.
    """

    __slots__ = (
        "_dense",
        "_destination",
        "_destination_stride",
        "_page_bytes",
        "_parts",
        "_source",
        "_source_stride",
        "_steps",
        "bytes_of_a_page",
        "is_even",
    )

    def __init__(
        self,
        source: Sequence[Region],
        destination: Sequence[Region],
        parts: Sequence[int] = (),
        steps: Sequence[int] = (),
    ) -> None:
        """Regions match by position (topology.py has compared them).

        ``parts``: where pages of the destination are numbered by their parts, how many one has in each region, and
        ``steps``: how far it is from one part to the next.
        """
        self._source = _array([region.address for region in source])
        self._destination = _array([region.address for region in destination])
        self._source_stride = _array([region.page_stride_bytes for region in source])
        self._destination_stride = _array([region.page_stride_bytes for region in destination])
        self._page_bytes = _array([region.page_bytes for region in source])
        self._parts, self._steps = _array(parts), _array(steps)
        self.is_even = not parts
        if parts and bool((self._steps * self._parts == self._destination_stride).all()):
            self._destination_stride, self.is_even = self._steps, True  # each part is like a page
        gapless = (self._source_stride == self._page_bytes) & (self._destination_stride == self._page_bytes)
        self._dense = bool(gapless.all()) and self.is_even
        self.bytes_of_a_page = sum(region.page_bytes for region in source)

    @property
    def source(self) -> Side:
        return Side(_column(self._source), _column(self._source_stride), _column(self._page_bytes))

    @property
    def destination(self) -> Side:
        return Side(_column(self._destination), _column(self._destination_stride), _column(self._page_bytes))

    def plan(self, source: U32Array, destination: U32Array) -> Plan:
        """Descriptors that write page ``source[i]`` (uint32[n]) to page ``destination[i]`` in every region.

        With gaps between the pages of any region no run is merged: padding is nobody's to write.
        """
        return self.plans([(source, destination)])[0]

    def plans(self, chunks: Sequence[tuple[U32Array, U32Array]]) -> list[Plan]:
        """Plans several chunks of one page or more in one pass; no run goes on from one into the next."""
        if len(chunks) == 1:
            source, destination = chunks[0]
            if len(source) == 1:
                return [self._plan_of_page(source.item(), destination.item())]
        else:
            source, destination = (np.concatenate(column) for column in zip(*chunks, strict=True))
        ends = list(itertools.accumulate(len(source) for source, _ in chunks))
        if not self._dense:
            first, lengths = np.arange(len(source)), np.ones(len(source), np.uint64)
        else:
            first, lengths = page_runs(source, destination, np.array(ends[:-1], np.intp))
        sources = (self._source + _column(source[first]).astype(np.uint64) * self._source_stride).ravel()
        destinations = self._places(_column(destination[first]).astype(np.uint64)).ravel()
        nbytes = (self._page_bytes * _column(lengths)).ravel()
        if len(chunks) == 1:
            return [Plan(sources, destinations, nbytes)]
        cuts = [0, *(np.searchsorted(first, ends) * len(self._source)).tolist()]
        return [Plan(sources[cut:end], destinations[cut:end], nbytes[cut:end]) for cut, end in itertools.pairwise(cuts)]

    def _plan_of_page(self, source: int, destination: int) -> Plan:
        """Little code, because what a CPU has not run lately costs tens of us: rooms of a page come alone."""
        return Plan(
            self._source + self._source_stride * np.uint64(source),
            self._places(np.uint64(destination)),
            self._page_bytes,
        )

    def _places(self, pages: U64Array | np.uint64) -> U64Array:
        """The addresses of pages of the destination, or of parts of them, in each region."""
        if self.is_even:
            return self._destination + pages * self._destination_stride
        whole: U64Array = pages // self._parts
        return self._destination + whole * self._destination_stride + (pages - whole * self._parts) * self._steps


def geometry(source: Sequence[Pool], destination: Sequence[Pool]) -> Geometry:
    """The geometry of a pair whose pools were compared: one page number addresses every pool, and of the layers and
    heads those move that both sides hold. Where several of our pages fill one of theirs, it is of those parts.
    """
    pairs = [runs(*shared(ours, theirs)) for ours, theirs in zip(source, destination, strict=True)]
    divided = any(each.parts > 1 for each in pairs)
    return Geometry(
        [region for each in pairs for region in each.source],
        [region for each in pairs for region in each.destination],
        [each.parts for each in pairs for _ in each.source] if divided else (),
        [step for each in pairs for step in each.steps or (region.page_stride_bytes for region in each.destination)],
    )


def page_runs(
    source: U32Array, destination: U32Array, cuts: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], U64Array]:
    """The begin of each run that goes up by one on both sides, and its number of pages; one begins at each cut."""
    breaks = (source[1:] != source[:-1] + np.uint32(1)) | (destination[1:] != destination[:-1] + np.uint32(1))
    breaks[cuts - 1] = True
    first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(first, append=len(source))
    return first, lengths.astype(np.uint64)


def joined(plans: Sequence[Plan]) -> Plan:
    """One plan of all."""
    if not plans:
        nothing = np.empty(0, np.uint64)
        return Plan(nothing, nothing, nothing)
    return Plan(*map(np.concatenate, zip(*(plan.columns for plan in plans), strict=True)))


def check_pages(pages: U32Array, pool_pages: int, pool: str) -> None:
    """Raises KvIndexOutOfRange naming the first page that is not in the pool."""
    if len(pages) and largest_of(pages) >= pool_pages:
        check_inside(Destination(pages), pool_pages, pool)


def check_each_pool(
    check: Callable[[Pages, int, str], None],
    first: Pages,
    others: Sequence[Pages] | None,
    pool_pages: Sequence[int],
    pools: Sequence[str],
) -> None:
    """``check_pages`` or ``check_destination`` for every pool: ``others`` are of the second pool, the third and so on;
    None: ``first`` is every pool's, and the smallest is the bound."""
    if others is None:
        least = min(pool_pages)
        check(first, least, pools[pool_pages.index(least)])
        return
    for each, count, pool in zip((first, *others), pool_pages, pools, strict=True):
        check(each, count, pool)


def check_destination(destination: Destination, pool_pages: int, pool: str, field: str = "pages") -> None:
    """Checks like ``check_pages``, and raises InvalidRequest for a page that occurs twice: the second page of the
    prompt would overwrite the first."""
    if destination.clearly_fits(pool_pages):
        return
    check_inside(destination, pool_pages, pool)
    twice = destination.twice()
    if twice is not None:
        raise InvalidRequest.of(field, twice, "page numbers that are there once")


def check_inside(destination: Destination, pool_pages: int, pool: str) -> None:
    """Checks as ``check_pages`` does; runs are looked at as runs."""
    outside = destination.outside(pool_pages)
    if outside is not None:
        position, page = outside
        signed = f" ({page - 2**32} as int32)" if page >= 2**31 else ""  # as an engine gave it
        raise KvIndexOutOfRange(
            f"page {page}{signed} at position {position} is outside pool {pool!r} of {pool_pages} pages",
            metadata={"pool": pool, "page": page, "pages": pool_pages, "position": position},
        )


def check_first_page(first_page: int) -> None:
    """Raises InvalidRequest for what cannot be a logical page."""
    if type(first_page) is not int or not 0 <= first_page < 2**32:
        raise InvalidRequest.of("first_page", first_page, "0 to 2^32-1")


def _array(values: Sequence[int]) -> U64Array:
    return np.array(values, dtype=np.uint64)


def _column(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    return values.reshape(-1, 1)
