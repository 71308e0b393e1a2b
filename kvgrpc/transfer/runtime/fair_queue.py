"""Writes that wait for the transfer thread, of each peer in their order, and the peers in turns. Not thread-safe."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from kvgrpc.transfer.protocol.prefill_core import PrefillPair, Submission


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
