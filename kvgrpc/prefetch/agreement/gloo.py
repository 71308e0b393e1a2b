"""Rank agreement over torch.distributed, for ranks that have a process group anyway.

One thread a rank exchanges one tensor of fixed shape, over and over, whatever its scheduler does: no collective ever
depends on which operations a rank knows, so ranks that come to operations in different orders, or not at all, hang
nobody. What is decided follows from what all have seen, so all decide the same.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from datetime import timedelta

import torch
import torch.distributed as dist

from kvgrpc.model import RankId
from kvgrpc.prefetch.model import Stop
from kvgrpc.prefetch.protocol.votes import Decided, Decision, Vote

_log = logging.getLogger(__name__)

SLOTS = 128
_FIELDS = 5  # key, stage, pages, stop, expired
_BUSY_SECONDS, _IDLE_SECONDS = 0.001, 0.02
_REMEMBERED = 8192
_Key = tuple[int, int]


class GlooAgreement:
    """Votes of this rank from any thread. ``ranks``: of the default group, those of the replica, in one order
    everywhere.

    Every rank makes one at the same point of its start, as ``new_group`` wants. ``timeout``: seconds of one exchange;
    when one fails (a rank died or hangs), this agreement is over: every vote is answered RANK_ABSENT from then on,
    until all ranks make a new one. ``epoch`` must be equal at all ranks; another one is such a failure.
    """

    def __init__(self, ranks: list[int], *, epoch: int = 1, timeout: float = 5.0) -> None:
        self._group = dist.new_group(ranks, timeout=timedelta(seconds=timeout), backend="gloo")
        self._size = len(ranks)
        self._own = ranks.index(dist.get_rank())
        self._epoch = epoch
        self._lock = threading.Lock()
        self._waiting: OrderedDict[_Key, tuple[Vote, float, Decided]] = OrderedDict()
        self._votes: OrderedDict[_Key, dict[int, tuple[int, int]]] = OrderedDict()
        self._decided: OrderedDict[_Key, tuple[int, int]] = OrderedDict()
        self._broken = ""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvgrpc-gloo", daemon=True)
        self._thread.start()

    @property
    def broken(self) -> str:
        """Why it is over; empty while it works."""
        return self._broken

    @property
    def live(self) -> frozenset[RankId] | None:
        """All, until it is broken: then nobody knows of anybody else."""
        return frozenset() if self._broken else None

    def vote(self, vote: Vote, timeout: float, decided: Decided) -> None:
        key = _key(vote)
        with self._lock:
            known = self._decided.get(key)
            if known is None and not self._broken:
                self._waiting[key] = (vote, time.monotonic() + timeout, decided)
                return
        pages, stop = known or (0, Stop.RANK_ABSENT)
        decided(Decision(vote.key, vote.stage, pages, Stop(stop)))

    def forget(self, key: str) -> None:
        """Forgets nothing: decisions are remembered for the ranks that come later; they are bounded."""

    def close(self, timeout: float = 10.0) -> bool:
        """Every rank calls it; ends with the exchange that all ranks close in, or when that fails."""
        self._closing = True
        self._thread.join(timeout)
        self._fail("closed")
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._exchange():
                continue
        except Exception as error:
            _log.error("gloo agreement is over, prefetches are declined from now on: %s", error)
            self._fail(str(error))

    def _exchange(self) -> bool:
        """One round with all ranks; False when all of them close."""
        mine = self._record()
        everything = [torch.zeros_like(mine) for _ in range(self._size)]
        dist.all_gather(everything, mine, group=self._group)
        heads = [each[0].tolist() for each in everything]
        if any(head[0] != self._epoch for head in heads):
            raise RuntimeError(f"epochs differ: {[head[0] for head in heads]}")
        for rank, each in enumerate(everything):
            self._take_votes(rank, each)
        self._decide()
        if all(head[1] for head in heads):
            return False
        # All ranks sleep for the same time, because all saw the same.
        time.sleep(_BUSY_SECONDS if any(head[2] for head in heads) else _IDLE_SECONDS)
        return True

    def _record(self) -> torch.Tensor:
        now = time.monotonic()
        rows = torch.zeros((SLOTS + 1, _FIELDS), dtype=torch.int64)
        with self._lock:
            waiting = list(self._waiting.items())[:SLOTS]
        rows[0, 0], rows[0, 1], rows[0, 2] = self._epoch, int(self._closing), len(waiting)
        for number, ((name, stage), (vote, deadline, _)) in enumerate(waiting, 1):
            rows[number] = torch.tensor([name, stage, vote.pages, vote.stop, int(now >= deadline)])
        return rows

    def _take_votes(self, rank: int, rows: torch.Tensor) -> None:
        for name, stage, pages, stop, expired in rows[1 : 1 + int(rows[0, 2])].tolist():
            key = (name, stage)
            if key in self._decided:
                continue
            self._votes.setdefault(key, {}).setdefault(rank, (pages, stop))
            if expired:
                self._votes[key][-1] = (0, Stop.RANK_ABSENT)

    def _decide(self) -> None:
        for key, votes in list(self._votes.items()):
            if -1 not in votes and len(votes) < self._size:
                continue
            del self._votes[key]
            pages, stop = votes.get(-1) or min(votes.values(), key=lambda vote: (vote[0], -vote[1]))
            with self._lock:
                self._decided[key] = (pages, stop)
                while len(self._decided) > _REMEMBERED:
                    self._decided.popitem(last=False)
        with self._lock:
            done = [(key, self._waiting.pop(key)) for key in list(self._waiting) if key in self._decided]
        for key, (vote, _, decided) in done:
            pages, stop = self._decided[key]
            decided(Decision(vote.key, vote.stage, pages, Stop(stop)))

    def _fail(self, why: str) -> None:
        with self._lock:
            self._broken = self._broken or why
            waiting, self._waiting = list(self._waiting.values()), OrderedDict()
        for vote, _, decided in waiting:
            decided(Decision(vote.key, vote.stage, 0, Stop.RANK_ABSENT))


def _key(vote: Vote) -> _Key:
    """A name of 63 bits, the same at every rank."""
    digest = hashlib.blake2b(vote.key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1, int(vote.stage)
