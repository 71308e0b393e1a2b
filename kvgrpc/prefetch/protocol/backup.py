"""A backup as a state machine: host pages go to storage in batches, each page with its own end. Pure.

A batch that fails ends its own pages only. The pages are read-locked until nothing reads them any more. Of pages that
all ranks hold each has its writer; the others look whether storage has them, and write what does not come.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvgrpc.prefetch.model import OperationState, PageOutcome, PageResult, PageStatus, Stop
from kvgrpc.prefetch.protocol.operation import (
    LOOK_AGAIN_SECONDS,
    NO_PAGES,
    EndRead,
    Operation,
    PageBatch,
    Wake,
    WriteNext,
    failure_of,
    state_of,
)
from kvgrpc.prefetch.protocol.votes import Decision, Stage

IsWriter = Callable[[str], bool]
"""Whether this rank writes the page of a hash."""

_OUTCOMES = {
    PageStatus.OK: PageOutcome.OK,
    PageStatus.MISSING: PageOutcome.FAILED,
    PageStatus.FAILED: PageOutcome.FAILED,
    PageStatus.TIMEOUT: PageOutcome.TIMEOUT,
}
_THERE = (PageOutcome.OK, PageOutcome.SKIPPED)


def writer_of(page_hash: str, ranks: Iterable[int]) -> int:
    """The live rank that writes a page of which all have a copy: spread evenly, and when one goes only its pages
    move.

    Rendezvous hashing; every rank that knows the same ranks names the same one. Raises ValueError without any rank.
    """
    return max(ranks, key=lambda rank: hashlib.blake2b(f"{rank}:{page_hash}".encode(), digest_size=8).digest())


def every_page(page_hash: str) -> bool:
    """A rank whose pages nobody else holds writes all of them."""
    return True


@dataclass(eq=False)
class Backup(Operation):
    """Writes host pages to storage. ``pages`` are PRESENT and read-locked by the caller; the lock is its own from now
    on. ``agrees``: all ranks of the replica make it together. ``others``: pages that another rank writes and that
    storage did not have at the last look."""

    agrees: bool = False
    is_writer: IsWriter = every_page
    others: deque[int] = field(default_factory=deque)
    _others_since: float | None = None
    _waits: bool = False
    _gives_up_at: float | None = None

    # What happens to it.

    def begin(self) -> None:
        """Agrees with the other ranks how many pages are written, or begins with all."""
        if self.closing:
            return
        self.hit = len(self.pages)
        self._work.append(Wake(max(0.0, self.deadline - self.began)))
        if self.agrees:
            self._turn(OperationState.AGREEING)
            self._say(Stage.HITS, self.hit, Stop.NOT_PRESENT, self.limits.agreement_timeout)
        else:
            self._begin_writing(self.hit, Stop.NOT_PRESENT)

    def on_decided(self, decision: Decision) -> None:
        """Takes what holds for all ranks: how many pages are written; how many are in storage for each."""
        if not self._is_awaited(decision):
            return
        if decision.stage is Stage.HITS:
            self._begin_writing(decision.pages, decision.stop)
        else:
            self._settle(decision)

    def take_batch(self, now: float) -> PageBatch | None:
        """The next pages to write, or to look for; None: there is nothing to do now."""
        if self.closing or self.finishing or self.in_flight:
            return None
        self._waits = False
        if now >= self.deadline and not self.cut:
            self.cut, self.stop = True, self.stop or Stop.DEADLINE
        first, last = self._next_page, min(self._next_page + self.limits.batch_pages, len(self.pages))
        if self.cut:
            self._finish(now)
            return None
        if first < last:
            mine = tuple(index for index in range(first, last) if self.is_writer(self.hashes[index]))
            self._next_page = last
            batch = PageBatch(mine, range(first, last))
        elif self.others:
            self._others_since = now if self._others_since is None else self._others_since
            count = min(len(self.others), self.limits.batch_pages)
            batch = PageBatch(tuple(self.others[number] for number in range(count)), range(0), look=True)
        else:
            self._finish(now)
            return None
        self.in_flight += 1
        self._turn(OperationState.TRANSFERRING)
        return batch

    def on_written(self, batch: PageBatch, results: list[PageResult], now: float) -> PageBatch | None:
        """Takes what became of each page; returns those to write again at once."""
        for index, result in zip(batch.indices, results, strict=True):
            self._record(index, result, _OUTCOMES[result.status], index)
            self.completed += result.ok
        if (again := self._again(batch, results)) is not None:
            return again
        if batch.look:
            self._end_look(now)
            return None
        self.others.extend(index for index in batch.of if self.outcomes[index] is PageOutcome.PENDING)
        self._end_batch()
        # To the back of its tenant's queue: a large backup holds up nobody.
        self._go_on(now)
        return None

    def on_there(self, batch: PageBatch, there: list[bool], now: float) -> PageBatch | None:
        """Takes which pages of other writers are in storage; returns those to write here: their writer is gone, or they
        did not come within ``agreement_timeout``. A page that is stored twice is stored once."""
        for index, found in zip(batch.indices, there, strict=True):
            if found:
                self.outcomes[index] = PageOutcome.SKIPPED
                self.completed += 1
        late = self._is_late(now)
        missing = [index for index, found in zip(batch.indices, there, strict=True) if not found]
        ours = [] if self.cut else [index for index in missing if late or self.is_writer(self.hashes[index])]
        if ours:
            return PageBatch(tuple(ours), batch.of, look=True)
        self._end_look(now)
        return None

    def on_look_failed(self, text: str, now: float) -> None:
        """Storage did not say what it has. It is asked again until those pages are late."""
        self.note_failure(text, "FAILED")
        self.cut = self.cut or self._is_late(now)
        self._end_batch()
        self._finish(now) if self.cut else self._look_later()

    def on_error(self, error: BaseException) -> None:
        """A bug ends it, once storage reads none of its pages."""
        if self.closing:
            return
        self.failure = self.failure or failure_of(error, self.backend)
        self.cut = self._failing = True
        self._turn(OperationState.ENDING)
        self._fail_when_quiet()

    def terminate(self, stop: Stop, now: float) -> None:
        """Begins no further batch. One that is written waits for the others' last word no longer than for a vote."""
        if self.ended or self.closing:
            return
        agreeing = self.state is OperationState.AGREEING
        self.cut = True
        self.stop = self.stop or stop
        self._turn(OperationState.ENDING)
        if agreeing:
            self._say_only(Stage.COMPLETED, 0, self.stop)
            self._close(state_of(self.stop, 0), Stop.NONE)
        elif self.finishing:
            self._gives_up_at = now + self.limits.agreement_timeout
            self._work.append(Wake(self.limits.agreement_timeout))
        elif not self.in_flight:
            self._finish(now)

    def give_up(self) -> None:
        """Ends it without the other ranks' last word: this rank is closed or reset."""
        if self.finishing and not self.closing:
            self._settle(Decision(self.operation_id, Stage.COMPLETED, 0, Stop.RANK_ABSENT))

    def shut_down(self) -> bool:
        """Nobody runs it any more; False while storage may still read its pages."""
        self.cut = True
        if self.in_flight or self.lingers:
            return False
        self._close(OperationState.CANCELLED, Stop.SHUT_DOWN)
        return True

    def tick(self, now: float) -> None:
        """Time passed: its own is over, others may have written, or storage has let go of a page."""
        if self.closing or self.in_flight:
            return
        if self._failing:
            self._fail_when_quiet()
        elif self.finishing:
            if self._gives_up_at is not None and now >= self._gives_up_at:
                self.give_up()
        elif self.state is OperationState.AGREEING:
            return
        elif self.cut:
            self._finish(now)
        elif now >= self.deadline:
            self.cut, self.stop = True, self.stop or Stop.DEADLINE
            self._finish(now)
        elif self._waits:
            self._waits = False
            self._work.append(WriteNext())

    # Its steps.

    def _begin_writing(self, pages: int, stop: Stop) -> None:
        """The leading pages that every rank has are written."""
        count = min(pages, len(self.pages))
        rest, self.pages = self.pages[count:], self.pages[:count]
        self.agreed = count
        self.outcomes = [PageOutcome.PENDING] * count
        if len(rest):
            self._work.append(EndRead(rest))
        if count:
            self._turn(OperationState.QUEUED)
            self._work.append(WriteNext())
        else:
            self._close(OperationState.DECLINED, stop)

    def _end_batch(self) -> None:
        self.in_flight -= 1
        self.changed = True

    def _end_look(self, now: float) -> None:
        """The pages that are still nowhere stay first in line."""
        count = min(len(self.others), self.limits.batch_pages)
        batch = [self.others.popleft() for _ in range(count)]
        left = [index for index in batch if self.outcomes[index] is PageOutcome.PENDING]
        self.others.extendleft(reversed(left))
        self._end_batch()
        if len(left) < count or not self.others:
            self._go_on(now)
        else:
            self._look_later()

    def _go_on(self, now: float) -> None:
        if not self.cut and (self._next_page < len(self.pages) or self.others):
            self._work.append(WriteNext())
        else:
            self._finish(now)

    def _look_later(self) -> None:
        self._waits = True
        self._work.append(Wake(LOOK_AGAIN_SECONDS))

    def _is_late(self, now: float) -> bool:
        return self._others_since is not None and now - self._others_since >= self.limits.agreement_timeout

    def _finish(self, now: float) -> None:
        """Its end, once every page is where it belongs and no backend reads any of them."""
        if self.closing or self.finishing:
            return
        if self.lingers:
            self.cut = True
            self._turn(OperationState.ENDING)
            self._work.append(Wake(LOOK_AGAIN_SECONDS))
            return
        self._let_go()
        if not self.agrees:
            whole = self.completed == len(self.outcomes)
            self._close(OperationState.DONE if whole else state_of(self.stop, self.completed), Stop.NONE)
            return
        self.finishing = True
        self._turn(OperationState.ENDING)
        prefix = self._advance(_THERE)
        lost = Stop.NONE if prefix == len(self.outcomes) else Stop.PAGE_LOST
        seconds = self.limits.agreement_timeout
        if not self.cut:
            # Others say theirs when they have written, or when their time is over: it ends everywhere at once.
            seconds += max(0.0, min(self.deadline - now, self.limits.doubt_timeout / 2))
        self._say(Stage.COMPLETED, prefix, self.stop or lost, seconds)

    def _settle(self, decision: Decision) -> None:
        """Completes the pages that are in storage for every rank."""
        self.completed = min(decision.pages, self._advance(_THERE))
        whole = decision.pages >= len(self.outcomes) and not self.cut
        self.stop = self.stop or (Stop.NONE if whole else decision.stop)
        self._close(OperationState.DONE if whole else state_of(self.stop, self.completed), Stop.NONE)

    def _fail_when_quiet(self) -> None:
        if self.in_flight or self.lingers:
            self._work.append(Wake(LOOK_AGAIN_SECONDS))
            return
        if self.agrees:
            self._say_only(Stage.COMPLETED, 0, Stop.PAGE_LOST)
        self._close(OperationState.FAILED, Stop.NONE)

    def _let_go(self) -> None:
        """Its pages may be evicted again."""
        pages, self.pages = self.pages, NO_PAGES
        if len(pages):
            self._work.append(EndRead(pages))

    def _close(self, state: OperationState, stop: Stop) -> None:
        if self.closing:
            return
        self._let_go()
        self._end(state, stop)
