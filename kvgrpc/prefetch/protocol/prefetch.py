"""A prefetch as a state machine: look up, agree, reserve, agree, read in batches, agree, hand over. Pure.

QUEUED -> QUERYING -> AGREEING -> TRANSFERRING -> ENDING -> its last state; docs/prefetch/cases.md has the cases.
Host pages are reserved once it is known what comes, and belong to the operation until nothing writes them any more.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from kvgrpc.errors import Failure
from kvgrpc.prefetch.model import (
    NotEnoughPages,
    OperationState,
    PageOutcome,
    PageResult,
    Pages,
    PageStatus,
    Stop,
)
from kvgrpc.prefetch.protocol.operation import (
    LOOK_AGAIN_SECONDS,
    Keep,
    LookUp,
    Operation,
    PageBatch,
    ReadNext,
    Release,
    Reserve,
    Wake,
    failure_of,
    state_of,
)
from kvgrpc.prefetch.protocol.votes import Decision, Stage

_OUTCOMES = {
    PageStatus.OK: PageOutcome.OK,
    PageStatus.MISSING: PageOutcome.MISSING,
    PageStatus.FAILED: PageOutcome.FAILED,
    PageStatus.TIMEOUT: PageOutcome.TIMEOUT,
}
_BEFORE_READING = (OperationState.QUEUED, OperationState.QUERYING, OperationState.AGREEING)
_TRIES_FOR_ROOM = 3  # a keeper may say that fewer lack than do, once
LET_GO_SECONDS = 0.5
"""Reads that are under way at a cut get so long; then what has arrived is handed over, and storage keeps the rest."""


@dataclass(slots=True)
class HostShare:
    """Host pages that prefetches may hold at a time, all together; ``held`` by those that have not ended."""

    pages: int
    held: int = 0

    @property
    def left(self) -> int:
        return self.pages - self.held


@dataclass(eq=False)
class Prefetch(Operation):
    """Brings the leading pages of a prompt from storage to the host."""

    page_tokens: int = 1
    share: HostShare = field(default_factory=lambda: HostShare(1))
    _held: int = 0
    _asked: int = 0
    _tries: int = 0
    _why_fewer: Stop = Stop.NONE
    _last_word: Decision | None = None
    _handed: int = 0
    _let_go_at: float = 0.0
    _last: tuple[OperationState, Stop] | None = None

    @property
    def least(self) -> int:
        """Fewer pages are not worth the while."""
        return max(1, -(-self.limits.threshold_tokens // self.page_tokens))

    # What happens to it.

    def begin(self) -> None:
        """Looks up what there is, or declines."""
        if self.closing:
            return
        if len(self.hashes) * self.page_tokens < max(self.limits.threshold_tokens, self.page_tokens):
            self.decline(Stop.TOO_SHORT)
        elif self.share.left < 1:
            self.decline(Stop.RATE_LIMITED)
        else:
            self._work += [Wake(max(0.0, self.deadline - self.began)), LookUp()]

    def decline(self, stop: Stop) -> None:
        """Ends it with nothing begun."""
        self._close(OperationState.DECLINED, stop)

    def take_look_up(self) -> bool:
        """A thread is there for it; False when there is nothing to look up any more."""
        if self.closing or self.cut or self.state is not OperationState.QUEUED:
            return False
        self._turn(OperationState.QUERYING)
        return True

    def on_covered(self, pages: int) -> None:
        """So many leading pages need not come."""
        if self.state is OperationState.QUERYING and not self.cut:
            self.covered = self.completed = max(0, min(pages, len(self.hashes)))

    def on_found(self, hit: int, stop: Stop, failure: Failure | None) -> None:
        """So many pages are in storage behind those that are covered."""
        if self.state is not OperationState.QUERYING or self.cut or self.closing:
            return
        self.hit = hit
        self.failure = self.failure or failure
        self._turn(OperationState.AGREEING)
        stop = stop or (Stop.COVERED if self.covered == len(self.hashes) else Stop.BELOW_THRESHOLD)
        self._say(Stage.HITS, self.covered + hit, stop, self.limits.agreement_timeout)

    def on_decided(self, decision: Decision) -> None:
        """Takes what holds for all ranks."""
        if not self._is_awaited(decision):
            return
        if decision.stage is Stage.HITS:
            self._reserve(decision)
        elif decision.stage is Stage.RESERVED:
            self._begin_reading(decision)
        else:
            self._last_word = decision
            self._hand_over()

    def on_room(self, pages: Pages | NotEnoughPages) -> None:
        """The keeper's answer to ``Reserve``."""
        asked, self._asked = self._asked, 0
        if self.closing:
            # A bug ended it meanwhile; nobody else knows of this room.
            if not isinstance(pages, NotEnoughPages) and len(pages):
                self._work.append(Release(pages))
            return
        if isinstance(pages, NotEnoughPages):
            self._why_fewer = Stop.CAPACITY
            self._leave() if self.cut else self._ask_for_room(asked - max(1, pages.missing))
            return
        self.pages = pages
        self._hold(len(pages))
        if self.cut:
            self._leave()
        else:
            self._say(Stage.RESERVED, self.covered + len(pages), self._why_fewer, self.limits.agreement_timeout)

    def take_batch(self, now: float) -> PageBatch | None:
        """The next pages to read; None: there are none, or it is over."""
        first = self._next_page
        if self.closing or self.cut or self.state is not OperationState.TRANSFERRING or first >= len(self.pages):
            return None
        if now >= self.deadline:
            self.terminate(Stop.DEADLINE, now)
            return None
        self._next_page = min(first + self.limits.batch_pages, len(self.pages))
        self.in_flight += 1
        span = range(first, self._next_page)
        return PageBatch(tuple(span), span)

    def on_read(self, batch: PageBatch, results: list[PageResult], now: float) -> PageBatch | None:
        """Takes what came of each page; returns those to ask for again at once.

        The bytes of a page are in place before anybody can see that it completed. One that cannot come ends the
        operation: what lies behind it is of no use. What comes after its last vote counts no more."""
        if self.finishing:
            self.in_flight -= 1
            self.lingering += results
            self._fail_when_quiet() if self._failing else self._end_when_quiet()
            return None
        for index, result in zip(batch.indices, results, strict=True):
            self._record(index, result, _OUTCOMES[result.status], self.covered + index)
        if now < self.deadline and (again := self._again(batch, results)) is not None:
            return again
        if any(self.outcomes[index] not in (PageOutcome.OK, PageOutcome.PENDING) for index in batch.of):
            self.cut = True
            # A read had no more time than the operation.
            self.stop = self.stop or (Stop.DEADLINE if now >= self.deadline else Stop.PAGE_LOST)
        self.in_flight -= 1
        self.completed = self.covered + self._advance((PageOutcome.OK,))
        self.changed = True
        if self._next_page < len(self.pages) and not self.cut:
            self._work.append(ReadNext())
        else:
            self._finish_when_quiet()
            self._await_reads(now)
        return None

    def on_kept(self, found: object) -> None:
        """So many leading pages of the prompt are found, now that the keeper has these."""
        try:
            pages = max(0, min(operator.index(found), self._handed))  # type: ignore[arg-type]
        except TypeError:
            # It has the pages, and nobody knows of how many it says so.
            self.on_error(TypeError(f"the keeper's keep answered {found!r}, not a number of pages"))
            return
        self._conclude(pages)

    def on_error(self, error: BaseException) -> None:
        """A bug of ours, of a backend or of a keeper ends it; pages that are still written stay reserved until they are
        not."""
        if self.closing:
            return
        self.failure = self.failure or failure_of(error, self.backend)
        self._asked = 0
        if self.state in (OperationState.TRANSFERRING, OperationState.ENDING) and not self.finishing:
            self.cut = True
            self._finish_when_quiet()
            self._work.append(Wake(0.0))
            return
        self._failing = True
        self._fail_when_quiet()

    def terminate(self, stop: Stop, now: float) -> None:
        """Begins nothing more; what is in place once the batches on their way are there stays usable. They get
        LET_GO_SECONDS.

        Before it reads it holds nothing that moves, so it ends at once, whatever its look-up does."""
        if self.ended or self.closing or self.cut:
            return
        self.cut, self.changed = True, True
        self.stop = self.stop or stop
        if self.state is OperationState.TRANSFERRING:
            self._turn(OperationState.ENDING)
            self._finish_when_quiet()
            self._await_reads(now)
        elif self.state in _BEFORE_READING and not self._asked:
            self._leave()

    def give_up(self) -> None:
        """Ends it without the other ranks' last word: this rank is closed or reset."""
        if self.finishing and self._last_word is None and not self.closing:
            self._awaited = None
            self._last_word = Decision(self.operation_id, Stage.COMPLETED, 0, Stop.RANK_ABSENT)
            self._hand_over()

    def shut_down(self) -> bool:
        """Nobody runs it any more; False while storage may still write into its pages."""
        self.cut = True
        if self.in_flight or self._asked or self.lingers:
            return False
        self._close(OperationState.CANCELLED, Stop.SHUT_DOWN)
        return True

    def tick(self, now: float) -> None:
        """Time passed: its own is over, or storage has let go of a page."""
        if self.closing:
            return
        if self._failing:
            self._fail_when_quiet()
        elif self.settled:
            self._end_when_quiet()
        elif self._last_word is not None and not self._handed:
            self._hand_over()
        elif self.cut and self.in_flight:
            self._await_reads(now)
        elif now >= self.deadline:
            self.terminate(Stop.DEADLINE, now)

    # Its steps.

    def _reserve(self, decision: Decision) -> None:
        """Room for what all ranks have, or for as much of it as is worth the while."""
        self.agreed = max(decision.pages, self.covered)
        wanted = decision.pages - self.covered
        if decision.stop is Stop.RANK_ABSENT or wanted < min(self.least, len(self.hashes)):
            self._withdraw(decision.stop or Stop.BELOW_THRESHOLD)
            return
        if self.share.left < wanted:
            # Alone it would have the whole share: what lacks is what the others hold, as long as they hold it.
            wanted, self._why_fewer = self.share.left, Stop.RATE_LIMITED if self.share.held else Stop.CAPACITY
        self._tries = _TRIES_FOR_ROOM
        self._ask_for_room(wanted)

    def _ask_for_room(self, wanted: int) -> None:
        if wanted < self.least or not self._tries:
            self._withdraw(self._why_fewer)
            return
        self._tries -= 1
        self._asked = wanted
        self._hold(wanted)
        self._work.append(Reserve(wanted, self.hashes[: self.covered]))

    def _withdraw(self, stop: Stop) -> None:
        """This rank reads nothing: it has what it has, and the others hear so for the steps that are left."""
        if stop is not Stop.RANK_ABSENT:
            self._say_only(Stage.RESERVED, self.covered, stop)
            self._say_only(Stage.COMPLETED, self.covered, stop)
        self._close(OperationState.DECLINED, stop)

    def _leave(self) -> None:
        """Cut before its first read: the other ranks hear that nothing comes from here."""
        for stage in Stage:
            self._say_only(stage, self.covered, self.stop)
        self._close(state_of(self.stop, 0), self.stop)

    def _begin_reading(self, decision: Decision) -> None:
        count = decision.pages - self.covered
        if count < 1:
            if decision.pages:
                # Others have less of it than is covered here: they read, and count on what this rank has.
                self._say_only(Stage.COMPLETED, self.covered, decision.stop)
            self._close(OperationState.DECLINED, decision.stop or Stop.CAPACITY)
            return
        # What some rank had no room for is a reason, though all that was agreed may come.
        self._why_fewer = decision.stop if decision.pages < self.agreed else Stop.NONE
        self.agreed = decision.pages
        self._give_back(count)
        self.outcomes = [PageOutcome.PENDING] * count
        self._turn(OperationState.TRANSFERRING)
        readers = min(self.limits.readers, -(-count // self.limits.batch_pages))
        self._work += [ReadNext()] * readers

    def _finish_when_quiet(self) -> None:
        """Says how much arrived, once no read is on its way and none is to come."""
        if not self.in_flight and (self.cut or self._next_page >= len(self.pages)):
            self._finish()

    def _await_reads(self, now: float) -> None:
        """Of one that was cut: reads that hang keep the pages that they may still write, and nobody else waiting."""
        if self.finishing or not self.in_flight:
            return
        if not self._let_go_at:
            self._let_go_at = now + LET_GO_SECONDS
        if now < self._let_go_at:
            self._work.append(Wake(self._let_go_at - now))
            return
        for index in range(self._next_page):
            if self.outcomes[index] is PageOutcome.PENDING:
                self.outcomes[index] = PageOutcome.TIMEOUT
        self._finish()

    def _finish(self) -> None:
        if self.finishing:
            return
        self.finishing = True
        self._turn(OperationState.ENDING)
        self._say(Stage.COMPLETED, self.covered + self._done, self.stop, self.limits.agreement_timeout)

    def _hand_over(self) -> None:
        """The agreed prefix is the keeper's; the rest goes back once no backend holds any of it."""
        assert self._last_word is not None
        if self.lingers and any(each.ok for each in self.lingering):
            self._work.append(Wake(LOOK_AGAIN_SECONDS))
            return
        completed = max(self.covered, min(self._last_word.pages, self.covered + self._done))
        self._handed = completed
        pages, self.pages = self.pages[: completed - self.covered], self.pages[completed - self.covered :]
        self._hold(len(self.pages))
        if not (self.in_flight or self.lingers):
            self._give_back(0)
        if len(pages):
            self._work.append(Keep(self.hashes[:completed], self.covered, pages))
        else:
            self._conclude(completed)

    def _conclude(self, found: int) -> None:
        assert self._last_word is not None
        self._mark_completed(found)
        stop = self.stop or (Stop.PAGE_LOST if found < self._handed else self._last_word.stop)
        whole = found == self.agreed and not self.cut
        state = OperationState.DONE if whole else state_of(stop, max(0, found - self.covered))
        self._last = state, self._why_fewer if whole else stop
        self.settled, self.changed = True, True
        self._end_when_quiet()

    def _end_when_quiet(self) -> None:
        """It has handed over; what storage still has goes back when storage lets go."""
        if self._last is None or self.in_flight:
            return
        if self.lingers:
            self._work.append(Wake(LOOK_AGAIN_SECONDS))
        else:
            self._close(*self._last)

    def _mark_completed(self, pages: int) -> None:
        """So many leading pages are in place; those behind them that were read came in vain."""
        self.completed = pages
        for index in range(max(0, pages - self.covered), len(self.outcomes)):
            if self.outcomes[index] is PageOutcome.OK:
                self.outcomes[index] = PageOutcome.SKIPPED

    def _fail_when_quiet(self) -> None:
        if self.in_flight:
            return
        if self.lingers:
            self._work.append(Wake(LOOK_AGAIN_SECONDS))
            return
        if self.finishing:
            self._mark_completed(self.covered)
        self._close(OperationState.FAILED, Stop.NONE)

    def _close(self, state: OperationState, stop: Stop) -> None:
        if self.closing:
            return
        self._give_back(0)
        self._hold(0)
        self._end(state, stop)

    def _hold(self, pages: int) -> None:
        """Counts its host pages in the share of all prefetches."""
        self.share.held += pages - self._held
        self._held = pages

    def _give_back(self, keep: int) -> None:
        """Its pages behind the first ``keep`` go back to the pool."""
        rest, self.pages = self.pages[keep:], self.pages[:keep]
        if len(rest):
            self._hold(len(self.pages))
            self._work.append(Release(rest))
