"""The common part of a prefetch and a backup: its state, and the work that its steps ask for. Pure.

An operation is a state machine. Whoever runs it (``runtime/controller.py``; a world in tests/simulation) tells it what
happened (``begin``, ``terminate``, ``tick``, ``on_...``), takes the work that this made (``take_work``) and does it, in
order. It calls nobody, waits for nothing and knows no time but what it is told. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvgrpc.errors import Failure, KvGrpcError, StorageFailed
from kvgrpc.prefetch.model import (
    OperationKind,
    OperationRow,
    OperationState,
    PageOutcome,
    PageResult,
    Pages,
    PageStatus,
    PrefetchLimits,
    Stop,
)
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.prefetch.protocol.votes import Decision, Stage, Vote

NO_PAGES: Pages = np.empty(0, dtype=np.int64)
LOOK_AGAIN_SECONDS = 0.05
"""What nobody tells of (storage lets go of a page, another rank has written one) is looked at so often."""


@dataclass(frozen=True, slots=True)
class LookUp:
    """A thread looks what the keeper and storage have: ``take_look_up``, ``on_covered``, ``on_found``."""


@dataclass(frozen=True, slots=True)
class ReadNext:
    """A thread reads the next batch from storage: ``take_batch``, ``on_read``."""


@dataclass(frozen=True, slots=True)
class WriteNext:
    """A thread writes the next batch, or looks for pages of others: ``take_batch``, ``on_written``, ``on_there``."""


@dataclass(frozen=True, slots=True)
class Say:
    """This rank votes; without ``answered`` it needs no decision. Else ``on_decided`` within about ``seconds``."""

    vote: Vote
    seconds: float
    answered: bool = True


@dataclass(frozen=True, slots=True)
class Reserve:
    """The keeper gives ``count`` host pages, without eviction of the pages ``behind`` which they come: ``on_room``."""

    count: int
    behind: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Host pages go back to the pool."""

    pages: Pages


@dataclass(frozen=True, slots=True)
class EndRead:
    """Host pages that were read-locked may be evicted again."""

    pages: Pages


@dataclass(frozen=True, slots=True)
class Keep:
    """The keeper has these pages of ``hashes[covered:]`` from now on: ``on_kept``, or ``on_error``."""

    hashes: tuple[str, ...]
    covered: int
    pages: Pages


@dataclass(frozen=True, slots=True)
class Wake:
    """``tick`` in so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class End:
    """Its last state: nothing of it moves any more, and it holds no page."""

    state: OperationState
    stop: Stop


Work = LookUp | ReadNext | WriteNext | Say | Reserve | Release | EndRead | Keep | Wake | End


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Pages of one call of storage, by their number in the operation. ``of``: the batch whose pages are tried again;
    ``attempt`` counts from 0. ``look``: storage is asked whether it has them, for others write them."""

    indices: tuple[int, ...]
    of: range
    attempt: int = 0
    look: bool = False


class Over(Protocol):
    """Somebody may wait for the end of an operation."""

    def set(self) -> None: ...

    def wait(self, timeout: float) -> bool: ...


class _Nobody:
    def set(self) -> None:
        """Nobody waits."""

    def wait(self, timeout: float) -> bool:
        return False


@dataclass(eq=False)
class Operation:
    """The state of one operation; callers read ``row`` and ``wait``.

    The pages of the prompt from ``covered`` on are its own, and ``outcomes`` begins there. It has ``ended`` only once
    all reads and writes of its pages were over. ``cut``: nothing more is begun. ``finishing``: its part is done, the
    other ranks' last word is waited for. ``settled``: a prefetch whose prefix is the keeper's; it ends once storage
    lets go of the other pages. ``owner``: the caller that began it; "": this rank or its engine did.
    """

    order: Order
    limits: PrefetchLimits = field(default_factory=PrefetchLimits)
    page_bytes: int = 0
    began: float = 0.0
    backend: str = "storage"
    over: Over = field(default_factory=_Nobody)
    owner: str = ""
    state: OperationState = OperationState.QUEUED
    stop: Stop = Stop.NONE
    failure: Failure | None = None
    number: int = 0
    revision: int = 0
    covered: int = 0
    hit: int = 0
    agreed: int = 0
    completed: int = 0
    retries: int = 0
    nbytes: int = 0
    used: int = 0
    wasted: int = 0
    outcomes: list[PageOutcome] = field(default_factory=list)
    pages: Pages = field(default_factory=lambda: NO_PAGES)
    in_flight: int = 0
    finishing: bool = False
    settled: bool = False
    cut: bool = False
    closing: bool = False
    blocked_since: float | None = None
    deadline: float = 0.0
    ended_at: float = 0.0
    lingering: list[PageResult] = field(default_factory=list)
    changed: bool = False
    _work: list[Work] = field(default_factory=list)
    _awaited: Stage | None = None
    _next_page: int = 0
    _done: int = 0
    _failing: bool = False

    def __post_init__(self) -> None:
        timeout = self.order.timeout
        self.deadline = self.began + (self.limits.operation_timeout if timeout is None else timeout)

    @property
    def kind(self) -> OperationKind:
        return self.order.kind

    @property
    def operation_id(self) -> str:
        return self.order.operation_id

    @property
    def hashes(self) -> tuple[str, ...]:
        return self.order.hashes

    @property
    def ended(self) -> bool:
        """True if it is in its last state: its pages are quiescent then."""
        return self.state.ended

    @property
    def lingers(self) -> bool:
        """True if a backend may still read or write one of its pages."""
        self.lingering = [each for each in self.lingering if not each.quiescent]
        return bool(self.lingering)

    def wait(self, timeout: float) -> bool:
        """Waits until it has ended and everybody was told so, for any thread but a controller's own."""
        return self.over.wait(timeout)

    def row(self, now: float, *, with_pages: bool = True) -> OperationRow:
        """The operation as it is at this moment."""
        return OperationRow(
            self.operation_id,
            self.order.request_id,
            self.kind,
            self.state,
            self.stop,
            self.revision,
            len(self.hashes),
            self.covered,
            self.hit,
            self.agreed,
            self.completed,
            self.nbytes,
            self.retries,
            self.order.priority,
            self.order.tenant,
            self.ended,
            now - self.began,
            (self.ended_at or now) - self.began,
            tuple(self.outcomes) if with_pages else (),
            self.failure,
            self.used,
            self.wasted,
        )

    # What happens to it; each kind says what it makes of that.

    def begin(self) -> None:
        """It is in the book, and its time runs."""

    def take_batch(self, now: float) -> PageBatch | None:
        """A thread is there for its next pages; None: there are none now."""

    def on_decided(self, decision: Decision) -> None:
        """Takes what holds for all ranks."""

    def on_error(self, error: BaseException) -> None:
        """A bug, of ours or of somebody who was asked."""

    def terminate(self, stop: Stop, now: float) -> None:
        """Begins nothing more."""

    def give_up(self) -> None:
        """Ends it without the other ranks' last word: this rank is closed or reset."""

    def shut_down(self) -> bool:
        """Nobody runs it any more; False while storage may still touch its pages."""
        return True

    def tick(self, now: float) -> None:
        """Time passed."""

    def take_work(self) -> list[Work]:
        """Hands over what the steps since the last call ask for, to be done in this order."""
        work, self._work = self._work, []
        return work

    # What both kinds are made of.

    def _turn(self, state: OperationState) -> None:
        self.state, self.changed = state, True

    def _say(self, stage: Stage, pages: int, stop: Stop, seconds: float) -> None:
        self._awaited = stage
        self._work.append(Say(Vote(self.operation_id, stage, pages, stop), seconds))

    def _say_only(self, stage: Stage, pages: int, stop: Stop) -> None:
        """Others hear it; this rank goes on without a decision."""
        vote = Vote(self.operation_id, stage, pages, stop)
        self._work.append(Say(vote, self.limits.agreement_timeout, answered=False))

    def _is_awaited(self, decision: Decision) -> bool:
        """Once for each vote that was answered; nobody waits for what comes after the end."""
        if self._awaited is not decision.stage or self.closing:
            return False
        self._awaited = None
        return True

    def _end(self, state: OperationState, stop: Stop) -> None:
        """Nothing is changed after it."""
        self.closing = True
        self._awaited = None
        self._work.append(End(state, stop))

    def _record(self, index: int, result: PageResult, outcome: PageOutcome, page: int) -> None:
        """Notes the end of one page, ``page`` of the prompt. A page that the backend still holds is nobody's."""
        self.outcomes[index] = outcome
        if result.ok:
            self.nbytes += self.page_bytes
        else:
            self.note_failure(f"page {page}: {result.detail or result.status.value}", result.status.name)
        if not result.quiescent:
            self.lingering.append(result)

    def note_failure(self, text: str, status: str) -> None:
        """Remembers the first one, for people."""
        if self.failure is None:
            metadata = {"backend": self.backend, "status": status}
            self.failure = Failure.of(StorageFailed(f"{self.backend}: {text}", metadata=metadata))

    def _advance(self, there: tuple[PageOutcome, ...]) -> int:
        """Leading pages that have one of these outcomes. Each is looked at once: they stay as they are."""
        outcomes, done = self.outcomes, self._done
        while done < len(outcomes) and outcomes[done] in there:
            done += 1
        self._done = done
        return done

    def _again(self, batch: PageBatch, results: list[PageResult]) -> PageBatch | None:
        """The pages that may come at another try, as often as there are tries."""
        if batch.attempt + 1 >= self.limits.attempts or self.cut:
            return None
        failed = [
            index
            for index, result in zip(batch.indices, results, strict=True)
            if not result.ok and result.retryable and result.quiescent
        ]
        self.retries += len(failed)
        return PageBatch(tuple(failed), batch.of, batch.attempt + 1) if failed else None


def failed_pages(error: BaseException, count: int) -> list[PageResult]:
    """For a call that raised: a backend promises not to; one that breaks it has ended its reads and writes with it."""
    return [PageResult(PageStatus.FAILED, f"{type(error).__name__}: {error}", True)] * count


def failure_of(error: BaseException, backend: str) -> Failure:
    """The failure that people are told of an error; what is none of ours is STORAGE_FAILED."""
    if isinstance(error, KvGrpcError):
        return Failure.of(error)
    text = f"{backend}: {type(error).__name__}: {error}"
    return Failure.of(StorageFailed(text, metadata={"backend": backend, "status": "FAILED"}))


def state_of(stop: Stop, pages: int) -> OperationState:
    """The state of an operation that ended without all that was agreed, with so many pages in place."""
    if stop in (Stop.CANCELLED, Stop.SHUT_DOWN):
        return OperationState.CANCELLED
    if stop is Stop.DEADLINE:
        return OperationState.EXPIRED
    return OperationState.PARTIAL if pages else OperationState.FAILED
