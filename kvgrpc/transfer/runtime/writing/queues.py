"""Writes that wait for the transfer thread, of each peer in their order, and the peers in turns. Not thread-safe.

Chunks whose pages are summed before they are written (14, aux and checksums) wait in a queue of their own, some bytes a
turn: such a turn ends soon, and polls, stops, and the writes of peers that do not verify come between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from kvgrpc.dataplane.base import Result
from kvgrpc.transfer.protocol.destination import U32Array
from kvgrpc.transfer.protocol.prefill.core import PrefillPair, Submission
from kvgrpc.transfer.runtime.guarded import attempt
from kvgrpc.transfer.runtime.writing.checksums import PageReader

# 9 ms where a region has 64 KiB a page, 80 ms where it has 256 bytes.
BYTES_OF_A_TURN = 8 << 20
_BYTES_OF_A_STEP = 1 << 20

Sets = Iterator[tuple[PageReader, U32Array, U32Array]]


class SubmissionQueue:
    """However many wait for one peer, another one's first is taken in the next turn, as long as ``most`` peers wait."""

    def __init__(self) -> None:
        self._of_pair: dict[PrefillPair, deque[Submission]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, submissions: Iterable[Submission]) -> None:
        of_pair = self._of_pair
        for submission in submissions:
            queue = of_pair.get(submission.pair)
            if queue is None:
                queue = of_pair[submission.pair] = deque()
            queue.append(submission)
            self._count += 1

    def take(self, most: int) -> list[Submission]:
        """At most ``most``: an equal share of each peer, its neighbours together, as they are planned in one pass."""
        taken: list[Submission] = []
        while self._count > len(taken) and len(taken) < most:
            share = max(1, (most - len(taken)) // len(self._of_pair))
            for pair in list(self._of_pair)[: most - len(taken)]:
                queue = self._of_pair.pop(pair)
                taken += self._first(queue, share)
                if queue:
                    self._of_pair[pair] = queue  # behind those that have not had their turn
        self._count -= len(taken)
        return taken

    @staticmethod
    def _first(queue: deque[Submission], count: int) -> Iterator[Submission]:
        for _ in range(min(count, len(queue))):
            yield queue.popleft()


class SummingQueue:
    """The chunks of each peer in their order, and the peers in turns: a short chunk never waits for a long one of
    another peer.
    """

    def __init__(self) -> None:
        self._of_pair: dict[PrefillPair, deque[tuple[Submission, Iterator[int]]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, submission: Submission, sets: Sets) -> None:
        """``sets``: of each pool what reads it, our pages and decode's; taken when its turn comes."""
        self._of_pair.setdefault(submission.pair, deque()).append((submission, _steps(submission, sets)))
        self._count += 1

    def go_on(self) -> Iterator[tuple[Submission, Result | None]]:
        """Reads BYTES_OF_A_TURN at most, and a page at least; the chunks that have their checksums now, with None, that
        cannot have them, with the reason, or whose room has ended: it reads no page of these.
        """
        left = BYTES_OF_A_TURN
        while self._of_pair and left > 0:
            pair = next(iter(self._of_pair))
            queue = self._of_pair.pop(pair)
            submission, steps = queue[0]
            nbytes = None if submission.record.ended else attempt(partial(next, steps, None))
            if isinstance(nbytes, int):
                left -= nbytes
            else:
                queue.popleft()
                self._count -= 1
                yield submission, nbytes
            if queue:
                self._of_pair[pair] = queue  # behind those that have not had their turn


def _steps(submission: Submission, sets: Sets) -> Iterator[int]:
    """Sums a few pages a step, of the bytes as they are then; each step says how many bytes it read."""
    sums: list[tuple[U32Array, U32Array]] = []
    for reader, source, destination in sets:
        found = np.empty(len(source), np.uint32)
        pages = max(1, _BYTES_OF_A_STEP // max(1, reader.page_bytes))
        for start in range(0, len(source), pages):
            some = source[start : start + pages]
            found[start : start + pages] = reader.sums(some)
            yield len(some) * reader.page_bytes
        sums.append((destination, found))
    submission.checksums = tuple(sums)
