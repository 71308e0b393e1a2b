"""The pages that a sender gives for one room, and the page of decode's that each goes to (rule 13, chunks). Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import msgspec
import numpy as np

from kvgrpc.errors import KvGrpcError
from kvgrpc.transfer.protocol import failures
from kvgrpc.transfer.protocol.types import ALIGN_HEAD, ALIGN_TAIL, Align, Destination, RoomKey, U32Array

Wait = Callable[[], None]


class Coverage(msgspec.Struct, eq=False, gc=False):
    """The positions of a room that are there: half-open intervals that never overlap.

    ``prefix`` positions from 0 on without a gap, and intervals beyond it: almost always none, because engines send
    from front to back."""

    prefix: int = 0
    _beyond: list[tuple[int, int]] | None = None

    @property
    def stop(self) -> int:
        """One past the last position that is there."""
        return self._beyond[-1][1] if self._beyond else self.prefix

    def add(self, start: int, count: int) -> bool:
        """Adds [start, start + count); False, and nothing added, when a part of it was there before."""
        if start == self.prefix and not self._beyond:
            self.prefix += count
            return True
        return count == 0 or self._add_beyond(start, start + count)

    def covers(self, start: int, stop: int) -> bool:
        """All of [start, stop) is there; an empty interval always is."""
        return stop <= self.prefix or start >= stop or self.first_gap(start) >= stop

    def first_gap(self, start: int) -> int:
        """The first position from ``start`` on that is not there."""
        gap = max(start, self.prefix)
        for first, last in self._beyond or ():
            if first <= gap < last:
                gap = last
        return gap

    def _add_beyond(self, start: int, stop: int) -> bool:
        beyond = self._beyond or []
        index = bisect_right(beyond, (start, start))
        touches_left = beyond[index - 1][1] > start if index else self.prefix > start
        if touches_left or (index < len(beyond) and beyond[index][0] < stop):
            return False
        beyond.insert(index, (start, stop))
        while beyond and beyond[0][0] == self.prefix:
            self.prefix = beyond.pop(0)[1]
        self._beyond = beyond or None
        return True


class Chunk(msgspec.Struct, eq=False, gc=False):
    """The pages of one ``send``: uint32 numbers in prefill's pool, for positions start, start + 1, … of the room.

    ``wait`` runs on the transfer thread before the pages are read (an engine's "forward is done" event). ``others``:
    pages of the second pool, the third and so on, after those that came with the chunks before; None: ``pages`` are
    those of every pool.
    """

    pages: U32Array
    start: int
    is_last: bool
    wait: Wait | None = None
    others: tuple[U32Array, ...] | None = None


class Placed(msgspec.Struct, eq=False, gc=False):
    """A chunk, or the part of it that decode wants: our page ``source[i]`` is written to decode's ``destination[i]``,
    which is at position start + i of decode's pages.

    ``others``: the same for the second pool, the third and so on; None: every pool uses the same page numbers.
    """

    source: U32Array
    destination: U32Array
    start: int
    wait: Wait | None
    others: tuple[tuple[U32Array, U32Array], ...] | None = None


class Chunks(msgspec.Struct, eq=False, gc=False):
    """The chunks of one room. ``total``: how many pages will be sent in all; None: known with the last chunk.

    Chunks wait here until the destination is known. Nothing here knows where the pages go: ``destination`` is an
    argument. The garbage collector does not look at it: it is part of no cycle once its room has ended (``drop``).
    """

    align: Align = Align.HEAD
    total: int | None = None
    last_seen: bool = False
    _waiting: list[Chunk] | None = None
    _covered: Coverage = msgspec.field(default_factory=Coverage)
    # Pages that came for each of the other pools, and how many of them are placed.
    _others: list[list[int]] | None = None

    def copy(self) -> Chunks:
        """The same chunks for another destination; only while none was placed."""
        other = Chunks()
        other.align, other.total, other.last_seen = self.align, self.total, self.last_seen
        for chunk in self._waiting or ():
            other._covered.add(chunk.start, len(chunk.pages))
        other._waiting = list(self._waiting or ())
        other._others = None if self._others is None else [list(counts) for counts in self._others]
        return other

    @property
    def waiting(self) -> bool:
        """Some are not placed yet."""
        return bool(self._waiting)

    def add(self, key: RoomKey, chunk: Chunk, at_most: int) -> KvGrpcError | None:
        """Takes a chunk of the engine. Returns what is wrong with it, and then takes nothing; None when it is right."""
        start, count = chunk.start, len(chunk.pages)
        waiting = len(self._waiting) if self._waiting is not None else 0
        if waiting >= at_most:
            return failures.too_many("chunks of one room", at_most, waiting)
        if self.last_seen:
            return failures.bad_send(key, "pages were sent after the last chunk", "index_slice", start)
        if not self._covered.add(start, count):
            text = f"positions {start} to {start + count - 1} were sent before"
            return failures.bad_send(key, text, "index_slice", start)
        stop = self._covered.stop
        if self.total is not None and stop > self.total:
            text = f"positions end at {stop}, init said {self.total} pages"
            return failures.bad_send(key, text, "index_slice", stop)
        if chunk.others is not None:
            self._count_others(chunk.others)
        if chunk.is_last:
            self.last_seen = True
            if self.total is None:
                self.total = stop
        if self._waiting is None:
            self._waiting = [chunk]
        else:
            self._waiting.append(chunk)
        return None

    def place(self, destination: Destination) -> list[Placed]:
        """Places the chunks that waited; positions that decode does not want are dropped."""
        if not self._waiting or (self._from_the_end and not self.last_seen):
            return []
        shift = self._shift(destination)
        if shift is None:
            return []
        waiting, self._waiting = self._waiting, None
        placed = []
        for chunk in waiting:
            wanted = _place(chunk, destination, shift)
            if chunk.others is not None:
                wanted = self._place_others(chunk, chunk.others, destination, wanted)
            if wanted is not None:
                placed.append(wanted)
        return placed

    def first_wanted(self, destination: Destination) -> int | None:
        """Returns which page of the prompt decode's first one is. None: decode has a prefix, and what is sent does not
        show how long it is; what decode says of it is not to be believed where other rooms depend on it.
        """
        shift = self._shift(destination)
        return None if destination.first_page and not shift else shift

    @property
    def _from_the_end(self) -> bool:
        """Pages of other pools go to decode's last ones first: how many there are is known with the last chunk."""
        return self.align is ALIGN_TAIL and self._others is not None

    def _count_others(self, others: tuple[U32Array, ...]) -> None:
        counts = self._others = self._others or [[0, 0] for _ in others]
        for count, pages in zip(counts, others, strict=True):
            count[0] += len(pages)

    def _place_others(
        self, chunk: Chunk, pages: tuple[U32Array, ...], destination: Destination, first: Placed | None
    ) -> Placed | None:
        """With the pages of the other pools; ``first``: what decode wants of the first pool's."""
        others = tuple(map(self._place_other, range(len(pages)), pages, destination.others or ()))
        if first is None and any(len(source) for source, _ in others):
            first = Placed(chunk.pages[:0], chunk.pages[:0], 0, chunk.wait)
        if first is not None:
            first.others = others
        return first

    def _place_other(self, pool: int, pages: U32Array, destination: Destination) -> tuple[U32Array, U32Array]:
        assert self._others is not None
        sent, start = self._others[pool]
        self._others[pool][1] += len(pages)
        if self.align is ALIGN_TAIL:
            start -= sent - destination.count
            unwanted = min(max(-start, 0), len(pages))
            pages, start = np.ascontiguousarray(pages[unwanted:]), start + unwanted
        return pages, destination.slice(start, start + len(pages))

    def wanted(self, destination: Destination) -> int:
        """Returns how many of our pages decode's get, as far as is known: its last of several may have room."""
        count = destination.count
        if destination.parts == 1 or self.total is None:
            return count
        shift = self._shift(destination)
        if shift is None:
            return count
        return min(count, max(self.total - shift, count - destination.parts + 1, 0))

    def misfit(self, key: RoomKey, destination: Destination) -> KvGrpcError | None:
        """Returns what is wrong with the pages of the other pools, each of which must get as many as decode wants.

        With ``Align.TAIL`` more may be sent: decode gets the last ones. Not where several of ours fill one of decode's:
        which of them the last one is it would not show.
        """
        if destination.parts > 1 and self.align is ALIGN_TAIL:
            return failures.counted_from_the_end(key, destination.parts)
        if destination.others is None and not self._others:
            return None
        per_pool = [chunk.others is not None for chunk in self._waiting or ()]
        if any(each is not (destination.others is not None) for each in per_pool):
            text = "decode gave pages for each pool, so must send, and the other way round"
            return failures.bad_send(key, text, "pages", len(destination.others or ()) + 1)
        for pool, ((sent, _), wanted) in enumerate(zip(self._others or (), destination.others or (), strict=False), 1):
            too_many = sent > wanted.count and self.align is ALIGN_HEAD
            if too_many or (self.last_seen and sent < wanted.count):
                text = f"{sent} pages of pool {pool}, decode wants {wanted.count}"
                return failures.bad_send(key, text, "pages", sent)
        return None

    def missing(self, key: RoomKey, destination: Destination) -> KvGrpcError | None:
        """Returns what decode wants and the sender will not send any more, because its last chunk was seen."""
        if not self.last_seen:
            return None
        shift, wanted = self._shift(destination), self.wanted(destination)
        if shift is None or (shift >= 0 and self._covered.covers(shift, shift + wanted)):
            return None
        page = 0 if shift < 0 else self._covered.first_gap(shift) - shift
        text = f"the last chunk was sent, but decode's page {page} of {wanted} was not"
        return failures.bad_send(key, text, "pages", page)

    def drop(self) -> None:
        """The room ended: nothing more is placed."""
        self._waiting = None

    def _shift(self, destination: Destination) -> int | None:
        """Returns which of our positions decode's first page is; None: not known yet, the total is open.

        Whoever sends more than decode wants, and decode has a prefix, sends the whole prompt.
        """
        first, wanted, total = destination.first_page, destination.count, self.total
        if self.align is ALIGN_HEAD and not first:
            return 0
        if total is None:
            return None
        if self.align is ALIGN_HEAD:
            return first if total > wanted else 0
        return total - wanted


def _place(chunk: Chunk, destination: Destination, shift: int) -> Placed | None:
    start = chunk.start - shift
    stop = start + len(chunk.pages)
    first = start if start > 0 else 0
    stop = stop if stop < destination.count else destination.count
    if first >= stop:
        return None
    source = chunk.pages
    if stop - first != len(source):
        source = np.ascontiguousarray(source[first - start : stop - start])
    return Placed(source, destination.slice(first, stop), first, chunk.wait)
