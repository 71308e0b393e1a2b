"""The pages of decode's pool where it wants a room, as a list or as runs that stay runs until somebody writes. Pure."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

U32Array = npt.NDArray[np.uint32]
_Index = npt.NDArray[np.int64]
_U32 = np.dtype("<u4")
_NO_PAGES: U32Array = np.empty(0, dtype=np.uint32)
_NONE: _Index = np.empty(0, dtype=np.int64)
_FEW = 16
# Marking pages in a table of the pool is quicker than sorting them from so many on, and up to so many places for each.
_MANY, _SPREAD = 512, 32


class Destination(msgspec.Struct, eq=False, gc=False):
    """``count`` pages (uint32, in the order of the prompt), after the ``first_page`` logical pages that decode has.

    ``others``: pages of the second pool, the third and so on, where each pool has its own; the first pool's positions
    are the prompt's. None: one list of pages addresses every pool.

    ``parts``: prefill's pages may be smaller than decode's, and so many fill one: then ``divided`` counts those.

    Runs of a few bytes may name millions of pages: they take no memory until ``slice`` is asked for some.
    """

    # Little-endian as they came, or an array; None: runs. An array of one page is twice as much as all else here.
    _pages: bytes | U32Array | None
    first_page: int = 0
    others: tuple[Destination, ...] | None = None
    count: int = -1
    _starts: _Index = _NONE
    _ends: _Index = _NONE
    parts: int = 1
    _whole: Destination | None = None

    def __post_init__(self) -> None:
        if self._pages is not None:
            self.count = len(self._pages) // _U32.itemsize if isinstance(self._pages, bytes) else len(self._pages)

    @classmethod
    def of_runs(cls, starts: npt.ArrayLike, lengths: npt.ArrayLike, first_page: int = 0) -> Destination:
        """Run i is the pages ``starts[i]``, ``starts[i] + 1``, …, ``lengths[i]`` of them, the last one below 2^32."""
        ends = np.cumsum(np.asarray(lengths, np.int64))
        count = int(ends[-1]) if len(ends) else 0
        return cls(None, first_page, count=count, _starts=np.asarray(starts, np.int64), _ends=ends)

    def divided(self, parts: int) -> Destination:
        """The same place in pages of prefill's, of which ``parts`` fill one of the first pool: part i of page p is
        p x parts + i."""
        if parts == 1:
            return self
        counts = self.first_page * parts, self.others, self.count * parts
        return Destination(None, *counts, parts=parts, _whole=self)

    @property
    def held(self) -> int:
        """The number of pages that it names, over all pools."""
        return self.count if self.others is None else self.count + sum(other.count for other in self.others)

    @property
    def pages(self) -> U32Array:
        """All of them."""
        return self.slice(0, self.count)

    @property
    def raw(self) -> bytes:
        """The numbers of ``pages``, little-endian."""
        return self._pages if isinstance(self._pages, bytes) else self.pages.astype(_U32, copy=False).tobytes()

    def clearly_fits(self, pages: int) -> bool:
        """True if this is a short list that names pages below ``pages`` only, and each once. False: look closer, with
        ``outside`` and ``twice``."""
        if self._pages is None or self.count > _FEW:
            return False
        numbers = _array(self._pages).tolist()
        return not numbers or (max(numbers) < pages and len(set(numbers)) == len(numbers))

    def outside(self, pages: int) -> tuple[int, int] | None:
        """(position, page) of the first page number that does not exist in a pool of ``pages`` pages; None: all do."""
        if not self.count:
            return None
        if self._pages is not None:
            numbers = _array(self._pages)
            if largest_of(numbers) < pages:
                return None
            position = int(np.argmax(numbers >= pages))
            return position, int(numbers[position])
        lengths = self._lengths()
        wrong = np.flatnonzero((self._starts + lengths > pages) & (lengths > 0))
        if not len(wrong):
            return None
        run = wrong[0]
        page = max(pages, int(self._starts[run]))
        return int(self._ends[run] - lengths[run]) + page - int(self._starts[run]), page

    def twice(self) -> int | None:
        """A page that occurs more than once, None: no page does."""
        if self._pages is not None:
            pages = _array(self._pages)
            if bool((pages[1:] > pages[:-1]).all()) or _are_distinct(pages):
                return None
            ordered = np.sort(pages)
            again = ordered[1:][ordered[1:] == ordered[:-1]]
            return int(again[0]) if len(again) else None
        lengths = self._lengths()
        if len(lengths) < 2:
            return None
        firsts, lasts = self._starts, self._starts + lengths - 1
        if bool((firsts > lasts).any()):
            firsts, lasts = firsts[lengths > 0], lasts[lengths > 0]  # without the empty ones
        if bool((firsts[1:] > lasts[:-1]).all()):
            return None
        # Where the n-th run begins, the n before it have ended: so it is of runs that share no page, and of no others,
        # and nobody needs to know which last page is whose. numpy sorts 32 bits six times as fast as it makes an order.
        firsts, lasts = firsts.astype(np.uint32), lasts.astype(np.uint32)
        firsts.sort()
        lasts.sort()
        shared = firsts[1:] <= lasts[:-1]
        return int(firsts[1 + int(shared.argmax())]) if bool(shared.any()) else None

    def slice(self, first: int, stop: int) -> U32Array:
        """The page numbers at positions [first, stop), uint32; runs are expanded for these positions only."""
        if self._whole is not None:
            return self._slice_of_parts(self._whole, first, stop)
        if self._pages is not None:
            pages = _array(self._pages)
            return pages if not first and stop == self.count else pages[first:stop]
        if first >= stop:
            return _NO_PAGES
        from_run = int(np.searchsorted(self._ends, first, side="right"))
        to_run = int(np.searchsorted(self._ends, stop, side="left")) + 1
        # A run begins where the one before it ends. Of these runs alone: a room may have many, and many slices.
        before = int(self._ends[from_run - 1]) if from_run else 0
        begins = np.concatenate(([before], self._ends[from_run : to_run - 1]))
        lengths = np.minimum(self._ends[from_run:to_run], stop) - np.maximum(begins, first)
        # A position of the room is a page of its run: what is added is the same all along a run.
        shifts = np.repeat(self._starts[from_run:to_run] - begins, lengths)
        expanded: U32Array = (np.arange(first, stop, dtype=np.int64) + shifts).astype(np.uint32)
        return expanded

    def _slice_of_parts(self, whole: Destination, first: int, stop: int) -> U32Array:
        begin = first // self.parts
        pages = whole.slice(begin, -(-stop // self.parts)).astype(np.int64)
        at = np.arange(first, stop, dtype=np.int64)
        numbers: U32Array = (pages[at // self.parts - begin] * self.parts + at % self.parts).astype(np.uint32)
        return numbers

    def same(self, other: Destination) -> bool:
        """The same pages in the same order, in each pool, and the same prefix."""
        mine, theirs = self.others, other.others
        if mine is None or theirs is None:
            return mine is theirs and self._same(other)
        same = len(mine) == len(theirs) and all(map(Destination._same, mine, theirs))
        return same and self._same(other)

    def _same(self, other: Destination) -> bool:
        if self._whole is not None and other._whole is not None:
            return self.parts == other.parts and self._whole._same(other._whole)
        if self.first_page != other.first_page or self.count != other.count:
            return False
        if self._pages is None and other._pages is None:
            return np.array_equal(self._starts, other._starts) and np.array_equal(self._ends, other._ends)
        return np.array_equal(self.pages, other.pages)

    def _lengths(self) -> _Index:
        return np.diff(self._ends, prepend=0)


def _array(pages: bytes | U32Array) -> U32Array:
    return np.frombuffer(pages, _U32) if isinstance(pages, bytes) else pages


def _are_distinct(pages: U32Array) -> bool:
    """True if no page occurs twice; False too where sorting them is quicker."""
    if len(pages) < _MANY or (places := largest_of(pages) + 1) > _SPREAD * len(pages):
        return False
    marked = np.zeros(places, np.bool_)
    marked[pages.astype(np.intp)] = True
    return int(np.count_nonzero(marked)) == len(pages)


def largest_of(pages: U32Array) -> int:
    """The largest of one page or more."""
    # A ufunc's reduction costs more than a handful of Python integers.
    return max(pages.tolist()) if len(pages) <= _FEW else int(pages.max())
