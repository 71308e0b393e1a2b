"""The real state machines with one rule switched off: the simulation must notice.

The rules, as the table of cases of docs/prefetch/cases.md names them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from kvgrpc.prefetch.model import NotEnoughPages, OperationState, PageOutcome, PageResult, Pages, Stop
from kvgrpc.prefetch.protocol.backup import Backup
from kvgrpc.prefetch.protocol.operation import Operation, PageBatch, Reserve, Work
from kvgrpc.prefetch.protocol.prefetch import Prefetch
from kvgrpc.prefetch.protocol.votes import Decision, Stage


class _NeverLingers(Operation):
    @property
    def lingers(self) -> bool:
        return False


class _OwnPrefix(Prefetch):
    """Hands over what arrived here, whatever the others say."""

    def on_decided(self, decision: Decision) -> None:
        if decision.stage is Stage.COMPLETED and decision.pages:
            decision = replace(decision, pages=self.covered + self._done)
        super().on_decided(decision)


class _ReservesNoPrefix(Prefetch):
    """Room may be made of the pages that it stands behind."""

    def take_work(self) -> list[Work]:
        return [replace(each, behind=()) if isinstance(each, Reserve) else each for each in super().take_work()]


class _CountsGaps(Prefetch):
    """Pages behind one that did not come count, too."""

    def _advance(self, there: tuple[PageOutcome, ...]) -> int:
        self._done = sum(outcome in there for outcome in self.outcomes)
        return self._done


class _TakesNoShare(Prefetch):
    def _hold(self, pages: int) -> None:
        """The share of the host is nobody's to keep."""


class _ReadsOn(Prefetch):
    """Goes on after it was cut."""

    def take_batch(self, now: float) -> PageBatch | None:
        cut, self.cut = self.cut, False
        try:
            return super().take_batch(now)
        finally:
            self.cut = cut or self.cut

    def on_read(self, batch: PageBatch, results: list[PageResult], now: float) -> PageBatch | None:
        cut, self.cut = self.cut, False
        try:
            return super().on_read(batch, results, now)
        finally:
            self.cut = cut or self.cut


class _KeepsLateRoom(Prefetch):
    """Room that comes after a cancel is forgotten."""

    def on_room(self, pages: Pages | NotEnoughPages) -> None:
        if self.cut and not isinstance(pages, NotEnoughPages):
            self._asked = 0
            self._leave()
            return
        super().on_room(pages)


class _NoDeadline(Operation):
    def __post_init__(self) -> None:
        self.deadline = self.began + 1e9


class _WaitsForLookUps(Prefetch):
    """A cancel waits for what the look-up finds."""

    def terminate(self, stop: Stop, now: float) -> None:
        if self.state is OperationState.QUERYING and not self.cut:
            self.stop = self.stop or stop
            self._cut_later = True
            return
        super().terminate(stop, now)

    _cut_later = False

    def on_found(self, hit: int, stop: Stop, failure: object) -> None:
        super().on_found(hit, stop, None)
        if self._cut_later:
            self._cut_later = False
            super().terminate(Stop.CANCELLED, 0.0)


class _WaitsForReads(Prefetch):
    """A cut waits for what is being read, however long that takes."""

    def _await_reads(self, now: float) -> None:
        """Nothing but the end of the reads ends them."""


class _TrustsOthers(Backup):
    """What another rank writes is in storage."""

    def on_written(self, batch: PageBatch, results: list[PageResult], now: float) -> PageBatch | None:
        for index in batch.of:
            if index not in batch.indices and self.outcomes[index] is PageOutcome.PENDING and not batch.attempt:
                self.outcomes[index] = PageOutcome.SKIPPED
                self.completed += 1
        return super().on_written(batch, results, now)


class _LetsGoAtOnce(Backup):
    """Its pages may be evicted as soon as it is cut."""

    def terminate(self, stop: Stop, now: float) -> None:
        if not self.finishing and not self.closing and self.state is OperationState.TRANSFERRING:
            self._let_go()
        super().terminate(stop, now)


class _EndsWithoutTheOthers(Backup):
    """What it wrote is completed, whatever the others wrote."""

    def _settle(self, decision: Decision) -> None:
        super()._settle(replace(decision, pages=len(self.outcomes)) if decision.pages else decision)


class _GivesNoReason(Prefetch):
    """One that was cut to the host's share says nothing of it."""

    def _begin_reading(self, decision: Decision) -> None:
        super()._begin_reading(decision)
        self._why_fewer = Stop.NONE


_PREFETCHES: dict[str, type[Operation]] = {
    "storage lets go of a page before the pool has it": _NeverLingers,
    "all ranks take the prefix that every one has": _OwnPrefix,
    "no room is made of the prefix that it stands behind": _ReservesNoPrefix,
    "pages behind one that did not come are of no use": _CountsGaps,
    "prefetches hold their share of the host at most": _TakesNoShare,
    "nothing is begun after a cut": _ReadsOn,
    "room that comes after a cut goes back": _KeepsLateRoom,
    "its time ends it": _NoDeadline,
    "a cut before the first read waits for nobody": _WaitsForLookUps,
    "a read that hangs holds nobody after a cut": _WaitsForReads,
    "fewer pages than storage has need a reason": _GivesNoReason,
}
_BACKUPS: dict[str, type[Operation]] = {
    "storage lets go of a page before it may be evicted": _NeverLingers,
    "a page of another writer is looked for": _TrustsOthers,
    "its pages stay while storage reads them": _LetsGoAtOnce,
    "what counts is in storage for every rank": _EndsWithoutTheOthers,
}
RULES = (*_PREFETCHES, *_BACKUPS)


def classes(off: Collection[str]) -> tuple[type[Prefetch], type[Backup]]:
    """The state machines of a world in which these rules do not hold."""
    return _without(Prefetch, _PREFETCHES, off), _without(Backup, _BACKUPS, off)


def _without(real: type[Operation], rules: dict[str, type[Operation]], off: Collection[str]) -> type:
    mixed = tuple(rule for name, rule in rules.items() if name in off)
    if not mixed:
        return real
    bases = (*mixed, real) if not issubclass(mixed[0], real) else mixed
    return dataclass(eq=False)(type(f"{real.__name__}Without", bases, {}))
