"""What keeps pulls right, each switched off for a world in which the simulation must notice that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvgrpc.errors import Failure
from kvgrpc.model import RankId
from kvgrpc.prefetch.storage.base import PageBuffers, PageResult
from kvgrpc.pull.common import PageAxes
from kvgrpc.pull.lending.lender import Lender, Loan
from kvgrpc.pull.model import Found, Holder, Lent
from kvgrpc.pull.staging import StagingPages
from kvgrpc.pull.taking.holders import check_lent
from kvgrpc.pull.taking.taker import Taker
from kvgrpc.transfer import KVReceiver
from kvgrpc.transfer.protocol.types import RoomKey
from kvgrpc.transfer.runtime.boundary import EngineHandle
from tests.simulation.pull_engines import WatchedSilent
from tests.simulation.pull_memory import WatchedStaging
from tests.simulation.pull_processes import Sending


@dataclass(frozen=True)
class Rules:
    """The parts that an engine is made of: the product's own, unless a rule is switched off."""

    staging: type[WatchedStaging] = WatchedStaging
    lending: type[StagingPages] = StagingPages
    landing: type[StagingPages] = StagingPages
    silent: type[WatchedSilent] = WatchedSilent
    sending: type[Sending] = Sending
    lender: type[Lender] = Lender
    taker: type[Taker] = Taker
    check_lent: Callable[[Lent, Holder, RankId], None] = check_lent


class _LendsTheCache(WatchedStaging):
    """What is lent lies in the cache until it is written."""

    def copy_in(self, pages: Sequence[int], buffers: Iterable[PageBuffers], to_common: PageAxes | None = None) -> bool:
        there = list(buffers)
        self.__dict__.setdefault("lent", {}).update(zip(pages, there, strict=True))
        return super().copy_in(pages, there, to_common)

    def content(self, page: int) -> bytes:
        lent = self.__dict__.get("lent", {})
        if page in lent:
            super().copy_in([page], [lent[page]])
        return super().content(page)


class _NeverCloses(WatchedStaging):
    def close(self, seconds: float) -> bool:
        return True


class _BackAtOnce(StagingPages):
    """Pages of a pull that was given up are given out again without evidence."""

    def retire(self, pages: Sequence[int], release_safe: Callable[[], bool]) -> None:
        self.give_back(pages)


class _TakesAll(StagingPages):
    def take(self, most: int, timeout: float = 0.0, *, leaving_half: bool = False) -> list[int]:
        return super().take(most, timeout)


class _LendsEverything(Lender):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._share = self._staging.lending.size


class _WaitsForTakers(Lender):
    def is_over(self, loan: Loan) -> bool:
        return loan.sender.ended


class _Patient(Taker):
    """Waits for a holder that sends nothing."""

    def _wait(self, room: Any, end: float) -> Generator[Any, Any, bool]:
        stall, self._stall = self._stall, 1e9
        try:
            return (yield from super()._wait(room, end))
        finally:
            self._stall = stall


class _Endless(Taker):
    def taking(
        self, found: Found, prompt: Sequence[str], first: int, buffers: Sequence[PageBuffers], timeout: float
    ) -> Generator[Any, Any, list[PageResult]]:
        return super().taking(found, prompt, first, buffers, 1e9)


class _Believes(Taker):
    """Pages of a room that failed count."""

    def _brought(self, receiver: KVReceiver) -> Failure | None:
        return None


class _OneShareDoes(Taker):
    """A page counts once the first of its shares is there."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._first = set[KVReceiver]()

    def _open(self, batch: Any) -> Generator[Any, Any, None]:
        yield from super()._open(batch)
        self._first.update(room.receiver for room in batch.rooms[:1])

    def _receive(self, room: Any, end: float) -> Generator[Any, Any, Failure | None]:
        return (yield from super()._receive(room, end)) if room.receiver in self._first else None


class _FirstLenderCounts(Taker):
    """As many pages count as the first holder lent, though another one lent fewer of them."""

    def _open(self, batch: Any) -> Generator[Any, Any, None]:
        yield from super()._open(batch)
        batch.count = batch.rooms[0].entry.lent if batch.count else 0


class _OneShareFrees(Taker):
    """A slot is free once nobody writes the first of its shares."""

    def _end(self, batch: Any) -> None:
        for room in batch.rooms[1:]:
            room.receiver.close()
            self._book.end(room.entry, room.receiver.failure)
        super()._end(replace(batch, rooms=batch.rooms[:1]))


class _LeavesRooms(Taker):
    """A pull that is cancelled ends nothing, and gives nothing back."""

    def _end(self, batch: Any) -> None:
        if sys.exc_info()[0] is not GeneratorExit:
            super()._end(batch)


class _AsksForEver(Taker):
    """Asks a busy holder until the time of the pull is over."""

    def _may_wait(self, failure: Failure, moved: float, end: float) -> bool:
        return failure.retry_after is not None and self._now() + failure.retry_after < end


class _AnyTaker(Sending):
    """A lent room is whosever names it."""

    def claim(self, key: RoomKey, handle: EngineHandle, decode: str) -> None:
        super().claim(key, handle, "")


class _AsksTheSilent(WatchedSilent):
    def __contains__(self, address: object) -> bool:
        return False


def _believes_holders(lent: Lent, holder: Holder, own: RankId) -> None: ...


RULES = Rules()
# What is switched off, and what the simulation says then.
OFF: dict[str, tuple[Rules, str]] = {
    "copies are lent": (replace(RULES, staging=_LendsTheCache), "a write reads a page that is another one now"),
    "lent pages come back by evidence": (
        replace(RULES, lending=_BackAtOnce),
        "a write reads a page that is another one now",
    ),
    "landing pages come back by evidence": (replace(RULES, landing=_BackAtOnce), "foreign write"),
    "an engine has a share": (replace(RULES, lender=_LendsEverything), "more than its share"),
    "a room that nobody opens ends": (replace(RULES, lender=_WaitsForTakers), "nobody opens"),
    "a holder that sends nothing is given up": (replace(RULES, taker=_Patient), "is not given up"),
    "a pull has an end": (replace(RULES, taker=_Endless), "does not end"),
    "a room that failed brought nothing": (replace(RULES, taker=_Believes), "wrong byte"),
    "all shares of a page are there": (replace(RULES, taker=_OneShareDoes), "wrong byte"),
    "all holders lent a page": (replace(RULES, taker=_FirstLenderCounts), "wrong byte"),
    "no share of a page is written any more": (replace(RULES, taker=_OneShareFrees), "foreign write"),
    "a pull that is cancelled ends its rooms": (replace(RULES, taker=_LeavesRooms), "are left"),
    "a busy holder is asked for a while": (replace(RULES, taker=_AsksForEver), "busy holder"),
    "a lent room is its taker's": (replace(RULES, sending=_AnyTaker), "went to another engine"),
    "a silent holder is left alone": (replace(RULES, silent=_AsksTheSilent), "silent holder is asked"),
    "a pull leaves landing pages": (replace(RULES, landing=_TakesAll), "takes all landing pages"),
    "nothing is copied after the close": (replace(RULES, staging=_NeverCloses), "memory that was freed"),
    "a holder speaks for itself": (replace(RULES, check_lent=_believes_holders), "another's address"),
}
