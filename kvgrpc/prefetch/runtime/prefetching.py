"""The way of a prefetch, step by step: look up, agree, reserve, agree, read in batches, agree, hand over.

Each step runs on a worker thread of the controller and ends by putting the next one. Host pages are reserved once it is
known what comes, and belong to the operation until nothing reads or writes them any more.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvgrpc.errors import Failure, KvGrpcError, StorageFailed
from kvgrpc.prefetch.model import OperationState, PageOutcome, PrefetchLimits, Short, Stop
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages
from kvgrpc.prefetch.protocol.book import OperationBook
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.votes import Agreement, Decision, Stage, Vote
from kvgrpc.prefetch.storage.base import FindsByPrompt, PageResult, PageSource, PageStatus, StorageBackend
from kvgrpc.prefetch.threads.timers import Alarms
from kvgrpc.prefetch.threads.worker import Worker
from kvgrpc.prefetch.tree.keeper import Keeper

Step = tuple[Operation, Callable[[], None]]

_OUTCOMES = {
    PageStatus.OK: PageOutcome.OK,
    PageStatus.MISSING: PageOutcome.MISSING,
    PageStatus.FAILED: PageOutcome.FAILED,
    PageStatus.TIMEOUT: PageOutcome.TIMEOUT,
}
_LOOK_AGAIN_SECONDS = 0.05
_TRIES_FOR_ROOM = 3  # a keeper may say that fewer lack than do, once
_NONE: Pages = np.empty(0, dtype=np.int64)


class Prefetcher:
    """Brings pages from storage to the host. ``start`` only appends; everything else happens on its threads."""

    def __init__(
        self,
        book: OperationBook,
        host: HostPool,
        storage: StorageBackend,
        key_of: Callable[[str, str], str],
        keeper: Keeper,
        agreement: Agreement,
        limits: PrefetchLimits,
        alarms: Alarms,
    ) -> None:
        self._book = book
        self._host = host
        self._storage = storage
        self._key_of = key_of
        self._keeper = keeper
        self._agreement = agreement
        self._limits = limits
        self._alarms = alarms
        self._occupied = 0
        self._queries: Worker[Step] = Worker("prefetch-query", self._step, self._step_failed)
        self._reads: Worker[Step] = Worker("prefetch-read", self._step, self._step_failed, threads=limits.readers)

    @property
    def occupied(self) -> int:
        """Host pages that prefetches hold which have not ended, and pages that a backend has not let go of."""
        return self._occupied

    @property
    def healthy(self) -> bool:
        return self._queries.healthy and self._reads.healthy

    @property
    def waiting(self) -> int:
        """Steps that wait for a thread."""
        return self._queries.waiting + self._reads.waiting

    def capacity(self) -> int:
        """Host pages that prefetches may hold at a time."""
        return max(1, int(self._host.pages * self._limits.occupancy))

    def start(self, operation: Operation) -> None:
        """Begins an operation that the book has, or declines it at once. Never waits."""
        tokens = len(operation.hashes) * self._host.shape.page_tokens
        if tokens < max(self._limits.threshold_tokens, self._host.shape.page_tokens):
            self._end(operation, OperationState.DECLINED, Stop.TOO_SHORT)
        elif self._occupied >= self.capacity():
            self._end(operation, OperationState.DECLINED, Stop.RATE_LIMITED)
        else:
            left = max(0.0, operation.deadline - time.monotonic())
            operation.forget_deadline = self._alarms.after(left, partial(self._expire, operation))
            self._put(self._queries, operation, self._query)

    def terminate(self, operation: Operation, stop: Stop = Stop.CANCELLED) -> None:
        """Stops it after the batches that are on their way; what is in place by then stays usable."""
        with self._book.lock:
            if operation.state.ended or operation.cut:
                return
            operation.cut = True
            operation.stop = operation.stop or stop
            begun = operation.state is OperationState.TRANSFERRING
            before = operation.state in (OperationState.QUEUED, OperationState.QUERYING, OperationState.AGREEING)
            if begun:
                operation.state = OperationState.ENDING
            idle = begun and operation.in_flight == 0
        self._book.changed(operation)
        if idle or before:
            # A rank that stops early says so to the others: they get nothing from it.
            self._put(self._queries, operation, self._finish_when_quiet if idle else self._leave)

    def give_up(self, operation: Operation) -> None:
        """Ends one that waits for the other ranks' word on its last step, without it: this rank is closed or reset."""
        if operation.finishing:
            absent = Decision(operation.operation_id, Stage.COMPLETED, 0, Stop.RANK_ABSENT)
            self._put(self._queries, operation, partial(self._hand_over_now, absent))

    def stop(self, timeout: float) -> bool:
        """Ends the threads; False when one was left behind. The operations have ended before, but for those that were
        begun meanwhile and end with this."""
        end = time.monotonic() + timeout
        queries = self._queries.stop(timeout)
        stopped = self._reads.stop(max(0.0, end - time.monotonic())) and queries
        for operation, _ in [*self._queries.clear(), *self._reads.clear()]:
            with self._book.lock:
                operation.cut = True
                quiet = operation.in_flight == 0 and not operation.lingers
            stopped = stopped and quiet
            if quiet:
                self._end(operation, OperationState.CANCELLED, Stop.SHUT_DOWN)
        return stopped

    # The steps.

    def _query(self, operation: Operation) -> None:
        with self._book.lock:
            if operation.cut or operation.state is not OperationState.QUEUED:
                return
            operation.state = OperationState.QUERYING
        self._book.changed(operation)
        operation.covered = min(self._keeper.leading(operation.hashes), len(operation.hashes))
        operation.completed = operation.covered
        hit, stop, failure = self._count(operation)
        with self._book.lock:
            if operation.cut:
                return
            operation.hit = hit
            operation.failure = failure
            operation.state = OperationState.AGREEING
        self._book.changed(operation)
        stop = stop or (Stop.COVERED if operation.covered == len(operation.hashes) else Stop.BELOW_THRESHOLD)
        self._vote(operation, Stage.HITS, operation.covered + hit, stop, self._reserve)

    def _count(self, operation: Operation) -> tuple[int, Stop, Failure | None]:
        """Leading pages in storage behind what is covered; one call for each batch, as long as all of it is there."""
        keys = [self._key_of(each, operation.extra_key) for each in operation.hashes[operation.covered :]]
        hit = 0
        for start in range(0, len(keys), self._limits.batch_pages):
            batch = keys[start : start + self._limits.batch_pages]
            seconds = min(self._limits.storage_timeout, operation.deadline - time.monotonic())
            if seconds <= 0 or operation.cut:
                return hit, Stop.DEADLINE, None
            try:
                found = self._source(operation, start).count_leading(batch, seconds)
            except Exception as error:
                return hit, Stop.BACKEND_DOWN, _failure_of(error, self._storage.name)
            hit += found
            if found < len(batch):
                break
        return hit, Stop.NONE, None

    def _reserve(self, operation: Operation, decision: Decision) -> None:
        """Room for what all ranks have, or for as much of it as is worth the while."""
        if self._gone(operation):
            return
        with self._book.lock:
            operation.agreed = max(decision.pages, operation.covered)
        wanted = decision.pages - operation.covered
        least = max(1, -(-self._limits.threshold_tokens // self._host.shape.page_tokens))
        if decision.stop is Stop.RANK_ABSENT or wanted < min(least, len(operation.hashes)):
            self._withdraw(operation, decision.stop or Stop.BELOW_THRESHOLD)
            return
        room, stop = self._room(wanted, least, operation.hashes[: operation.covered])
        if not len(room):
            self._withdraw(operation, stop)
            return
        with self._book.lock:
            operation.pages = room
            self._occupied += len(room)
        self._vote(operation, Stage.RESERVED, operation.covered + len(room), stop, self._begin_reading)

    def _room(self, wanted: int, least: int, behind: Sequence[str]) -> tuple[Pages, Stop]:
        """Host pages, as many as there are up to ``wanted``, and why they are fewer; none where less than ``least``."""
        with self._book.lock:
            share, others = self.capacity() - self._occupied, self._occupied > 0
        stop = Stop.NONE
        if share < wanted:
            # Alone it would have the whole share: what lacks is what the others hold, as long as they hold it.
            wanted, stop = share, Stop.RATE_LIMITED if others else Stop.CAPACITY
        for _ in range(_TRIES_FOR_ROOM):
            if wanted < least:
                break
            pages = self._keeper.reserve(wanted, behind)
            if not isinstance(pages, Short):
                return pages, stop
            wanted, stop = wanted - max(1, pages.missing), Stop.CAPACITY
        return _NONE.copy(), stop

    def _withdraw(self, operation: Operation, stop: Stop) -> None:
        """This rank reads nothing: it has what it has, and the others hear so for the steps that are left."""
        if stop is not Stop.RANK_ABSENT:
            self._say_covered(operation, stop)
        self._end(operation, OperationState.DECLINED, stop)

    def _say_covered(self, operation: Operation, stop: Stop) -> None:
        for stage in (Stage.RESERVED, Stage.COMPLETED):
            vote = Vote(operation.operation_id, stage, operation.covered, stop)
            self._agreement.vote(vote, self._limits.agreement_timeout, _heard)

    def _begin_reading(self, operation: Operation, decision: Decision) -> None:
        if self._gone(operation):
            return
        count = decision.pages - operation.covered
        if count < 1:
            self._end(operation, OperationState.DECLINED, decision.stop or Stop.CAPACITY)
            return
        with self._book.lock:
            operation.agreed = decision.pages
            self._give_back(operation, count)
            operation.outcomes = [PageOutcome.PENDING] * count
            operation.state = OperationState.TRANSFERRING
            starts = min(self._limits.readers, -(-count // self._limits.batch_pages))
        self._book.changed(operation)
        for _ in range(starts):
            self._put(self._reads, operation, self._read_batch)

    def _read_batch(self, operation: Operation) -> None:
        with self._book.lock:
            first = operation.next_page
            if operation.cut or operation.state is not OperationState.TRANSFERRING or first >= len(operation.pages):
                batch = _NONE
            else:
                batch = operation.pages[first : first + self._limits.batch_pages]
                operation.next_page += len(batch)
                operation.in_flight += 1
        if not len(batch):
            self._finish_when_quiet(operation)
            return
        try:
            self._read(operation, first, batch)
        finally:
            with self._book.lock:
                operation.in_flight -= 1
                operation.completed = operation.prefix()
                more = operation.next_page < len(operation.pages) and not operation.cut
        self._book.changed(operation)
        if more:
            self._put(self._reads, operation, self._read_batch)
        else:
            self._finish_when_quiet(operation)

    def _read(self, operation: Operation, first: int, batch: Pages) -> None:
        """Reads one batch; pages that may come at another try are asked for again, the others end the operation."""
        hashes = operation.hashes[operation.covered + first :][: len(batch)]
        keys = [self._key_of(each, operation.extra_key) for each in hashes]
        buffers = [self._host.page_buffers(int(page)) for page in batch]
        wanted = list(range(len(batch)))
        for attempt in range(self._limits.attempts):
            seconds = min(self._limits.storage_timeout, operation.deadline - time.monotonic())
            if seconds <= 0 or (attempt and operation.cut):
                break
            source = self._source(operation, first + wanted[0])
            results = self._call(source, wanted, keys, buffers, seconds)
            again = []
            for index, result in zip(wanted, results, strict=True):
                self._note(operation, first + index, int(batch[index]), result)
                if not result.ok and result.retryable and result.quiescent:
                    again.append(index)
            if not again:
                break
            wanted = again
            with self._book.lock:
                operation.retries += len(again)
        with self._book.lock:
            ours = operation.outcomes[first : first + len(batch)]
            if any(outcome not in (PageOutcome.OK, PageOutcome.PENDING) for outcome in ours):
                operation.cut = True
                # A read had no more time than the operation.
                over = time.monotonic() >= operation.deadline
                operation.stop = operation.stop or (Stop.DEADLINE if over else Stop.PAGE_LOST)

    def _source(self, operation: Operation, first: int) -> PageSource:
        """Where the pages from ``hashes[covered + first]`` on are read."""
        if isinstance(self._storage, FindsByPrompt):
            return self._storage.behind(operation.hashes[: operation.covered + first])
        return self._storage

    def _call(
        self,
        source: PageSource,
        wanted: Sequence[int],
        keys: Sequence[str],
        buffers: Sequence[tuple[tuple[int, int], ...]],
        seconds: float,
    ) -> list[PageResult]:
        try:
            results = source.read([keys[i] for i in wanted], [buffers[i] for i in wanted], seconds)
        except Exception as error:
            # A backend promises not to; one that breaks it has ended its reads with it.
            return [PageResult(PageStatus.FAILED, f"{type(error).__name__}: {error}", True)] * len(wanted)
        if len(results) != len(wanted):
            text = f"{self._storage.name} answered {len(results)} of {len(wanted)} pages"
            return [PageResult(PageStatus.FAILED, text)] * len(wanted)
        return results

    def _note(self, operation: Operation, index: int, page: int, result: PageResult) -> None:
        """What came of one page. Its bytes are in place before anybody can see that it completed."""
        with self._book.lock:
            operation.outcomes[index] = _OUTCOMES[result.status]
            if result.ok:
                operation.nbytes += self._host.shape.page_bytes
            else:
                operation.failure = operation.failure or Failure.of(
                    StorageFailed(
                        f"{self._storage.name}: page {operation.covered + index}: "
                        f"{result.detail or result.status.value}",
                        metadata={"backend": self._storage.name, "status": result.status.name},
                    )
                )
            if result.released is not None and not result.quiescent:
                # Nobody may have these bytes until the backend lets go of them.
                keep = operation.lingering.setdefault(page, [])
                keep.append(result.released)

    def _finish_when_quiet(self, operation: Operation) -> None:
        with self._book.lock:
            quiet = operation.in_flight == 0 and not operation.finishing
            quiet = quiet and (operation.cut or operation.next_page >= len(operation.pages))
            if not quiet or operation.state not in (OperationState.TRANSFERRING, OperationState.ENDING):
                return
            operation.finishing = True
            operation.state = OperationState.ENDING
        self._book.changed(operation)
        self._vote(operation, Stage.COMPLETED, operation.prefix(), operation.stop, self._hand_over)

    def _leave(self, operation: Operation) -> None:
        """Cut before its first read: the other ranks hear that nothing comes from here."""
        with self._book.lock:
            if operation.state.ended or operation.state is OperationState.TRANSFERRING:
                return
        self._agreement.vote(
            Vote(operation.operation_id, Stage.HITS, operation.covered, operation.stop),
            self._limits.agreement_timeout,
            _heard,
        )
        self._say_covered(operation, operation.stop)
        self._end(operation, _state_of(operation.stop, 0), operation.stop)

    def _hand_over(self, operation: Operation, decision: Decision) -> None:
        """The agreed prefix is the keeper's, the rest goes back; both only once no backend holds any of it."""
        self._hand_over_now(decision, operation)

    def _hand_over_now(self, decision: Decision, operation: Operation) -> None:
        with self._book.lock:
            if operation.state.ended:
                return
            if operation.lingers:
                self._alarms.after(
                    _LOOK_AGAIN_SECONDS,
                    lambda: self._put(self._queries, operation, partial(self._hand_over_now, decision)),
                )
                return
            operation.lingering.clear()
            completed = min(decision.pages, operation.prefix())
            completed = max(operation.covered, completed)
            self._give_back(operation, completed - operation.covered)
            pages, operation.pages = operation.pages, _NONE
            self._occupied -= len(pages)
        found = self._keep(operation, completed, pages) if len(pages) else completed
        self._completed(operation, found)
        stop = operation.stop or (Stop.PAGE_LOST if found < completed else decision.stop)
        whole = found == operation.agreed and not operation.cut
        state = OperationState.DONE if whole else _state_of(stop, max(0, found - operation.covered))
        self._over(operation, state, Stop.NONE if whole else stop)

    def _keep(self, operation: Operation, completed: int, pages: Pages) -> int:
        """How many leading pages of the request are found once the keeper has these."""
        self._host.table.commit(pages)
        try:
            found = self._keeper.keep(operation.hashes[:completed], operation.covered, pages, operation.extra_key)
        except Exception:
            # A keeper that raised took nothing.
            self._host.table.release(pages)
            self._completed(operation, operation.covered)
            raise
        try:
            return min(operator.index(found), completed)
        except TypeError:
            # It has the pages, and nobody knows of how many it says so.
            self._completed(operation, operation.covered)
            raise TypeError(f"the keeper's keep answered {found!r}, not a number of pages") from None

    def _completed(self, operation: Operation, pages: int) -> None:
        """So many leading pages are in place; those behind them that were read came in vain."""
        with self._book.lock:
            operation.completed = pages
            count = max(0, pages - operation.covered)
            operation.outcomes[count:] = [
                PageOutcome.SKIPPED if outcome is PageOutcome.OK else outcome for outcome in operation.outcomes[count:]
            ]

    # What the steps share.

    def _vote(
        self,
        operation: Operation,
        stage: Stage,
        pages: int,
        stop: Stop,
        then: Callable[[Operation, Decision], None],
    ) -> None:
        def decided(decision: Decision) -> None:
            if threading.current_thread() is here:
                then(operation, decision)
            else:
                self._put(self._queries, operation, lambda each: then(each, decision))

        here = threading.current_thread()
        vote = Vote(operation.operation_id, stage, pages, stop)
        self._agreement.vote(vote, self._limits.agreement_timeout, decided)

    def _gone(self, operation: Operation) -> bool:
        return operation.state.ended or (operation.cut and operation.state is not OperationState.TRANSFERRING)

    def _expire(self, operation: Operation) -> None:
        self.terminate(operation, Stop.DEADLINE)

    def _give_back(self, operation: Operation, keep: int) -> None:
        """Releases its pages behind the first ``keep``; under the book's lock."""
        rest = operation.pages[keep:]
        operation.pages = operation.pages[:keep]
        if len(rest):
            self._occupied -= len(rest)
            self._host.table.release(rest)

    def _end(
        self, operation: Operation, state: OperationState, stop: Stop = Stop.NONE, failure: Failure | None = None
    ) -> None:
        with self._book.lock:
            self._give_back(operation, 0)
        self._over(operation, state, stop, failure)

    def _over(
        self, operation: Operation, state: OperationState, stop: Stop = Stop.NONE, failure: Failure | None = None
    ) -> None:
        """Nothing here knows it any more but the book."""
        operation.forget_deadline()
        self._book.end(operation, state, stop, failure)
        self._agreement.forget(operation.operation_id)

    def _put(self, worker: Worker[Step], operation: Operation, step: Callable[[Operation], None]) -> None:
        try:
            worker.put((operation, lambda: step(operation)), operation.priority, operation.tenant)
        except KvGrpcError as error:
            self._fail(operation, error)

    def _step(self, items: list[Step]) -> None:
        for _, step in items:
            step()

    def _step_failed(self, items: list[Step], error: Exception) -> None:
        for operation, _ in items:
            self._fail(operation, error)

    def _fail(self, operation: Operation, error: Exception) -> None:
        """A bug of ours or of a backend ends this operation; pages that are still read stay reserved until they are
        not."""
        with self._book.lock:
            if operation.state.ended:
                return
            operation.failure = operation.failure or _failure_of(error, self._storage.name)
            reading = operation.state in (OperationState.TRANSFERRING, OperationState.ENDING)
            reading = reading and not operation.finishing
            operation.cut = operation.cut or reading
        if reading:
            self._finish_when_quiet(operation)
        elif operation.lingers:
            self._alarms.after(_LOOK_AGAIN_SECONDS, lambda: self._fail(operation, error))
        else:
            self._end(operation, OperationState.FAILED, Stop.NONE, operation.failure)


def _state_of(stop: Stop, pages: int) -> OperationState:
    """How an operation ended that did not bring all that was agreed."""
    if stop in (Stop.CANCELLED, Stop.SHUT_DOWN):
        return OperationState.CANCELLED
    if stop is Stop.DEADLINE:
        return OperationState.EXPIRED
    return OperationState.PARTIAL if pages else OperationState.FAILED


def _failure_of(error: Exception, backend: str) -> Failure:
    if isinstance(error, KvGrpcError):
        return Failure.of(error)
    text = f"{backend}: {type(error).__name__}: {error}"
    return Failure.of(StorageFailed(text, metadata={"backend": backend, "status": "FAILED"}))


def _heard(decision: Decision) -> None:
    """Whoever said that it takes no part needs no answer."""
