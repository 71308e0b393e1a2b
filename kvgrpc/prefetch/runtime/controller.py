"""The controller between host and storage: it runs the operations of ``protocol/``, and does what they ask for.

An engine with its own radix cache uses it alone, with ``CompletionQueue`` or a keeper of its own;
``kvgrpc.prefetch.tree.cache.TieredCache`` puts a prefix tree and device copies around it.

Whatever happens to an operation is a step of it, under one lock and on the thread that learns it: steps are short and
wait for nothing. The work that a step asks for is done by one thread, in order; what storage does (look-ups, reads,
writes) by threads of their own, which no vote, hand-over or cancel waits for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from kvgrpc.errors import Failure, FeatureDisabled, InvalidRequest, KvGrpcError
from kvgrpc.observability import metrics
from kvgrpc.prefetch.model import (
    OperationKind,
    OperationRow,
    PrefetchLimits,
    Stop,
    StopPolicy,
)
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages, as_pages
from kvgrpc.prefetch.protocol.backup import Backup, IsWriter, every_page
from kvgrpc.prefetch.protocol.book import OperationBook
from kvgrpc.prefetch.protocol.operation import (
    End,
    EndRead,
    Keep,
    Operation,
    Release,
    Reserve,
    Say,
    Wake,
    Work,
)
from kvgrpc.prefetch.protocol.order import MAX_PAGES, Order
from kvgrpc.prefetch.protocol.prefetch import HostShare, Prefetch
from kvgrpc.prefetch.protocol.votes import Agreement, AloneAgreement, Decision
from kvgrpc.prefetch.runtime.storage_threads import StorageThreads, StorageWork
from kvgrpc.prefetch.storage.base import FindsByPrompt, HasDearBatches, StorageBackend, Unregisters, source_behind
from kvgrpc.prefetch.threads.queue_threads import QueueThreads
from kvgrpc.prefetch.threads.timers import Alarms
from kvgrpc.prefetch.tree.keeper import CompletionQueue, Keeper

_log = logging.getLogger(__name__)
T = TypeVar("T")
_Todo = tuple[Operation, Work]
# An alarm that is due later than this is dropped with its operation, so that it does not keep its pages' hashes.
_KEPT_SECONDS = 1.0
# For each part of one that cannot be opened.
_UNDO_SECONDS = 1.0


class CacheController:
    """Moves pages between one host pool and one storage backend. Thread-safe; no call waits but ``reset`` and
    ``close``.

    ``key_of`` makes the storage key of a page hash and an extra key (``kvgrpc.prefetch.storage.keys``). The host pool
    and the backend are the caller's, who closes them after this. ``storage`` None: prefetches are declined, backups
    refused.
    """

    def __init__(
        self,
        host: HostPool,
        storage: StorageBackend | None,
        key_of: Callable[[str, str], str],
        *,
        keeper: Keeper | None = None,
        agreement: Agreement | None = None,
        limits: PrefetchLimits | None = None,
        writes: IsWriter = every_page,
    ) -> None:
        self.host = host
        self.storage = storage
        self.limits = limits or PrefetchLimits()
        self._reading = _limits_of_reads(self.limits, storage, host.shape.page_bytes)
        # Not ``or``: a keeper may have a length, and be empty.
        self.keeper = CompletionQueue(host.table) if keeper is None else keeper
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self.book = OperationBook(self.limits, self._lock, time.monotonic)
        self._key_of = key_of
        self._is_writer = writes
        self._agreement = AloneAgreement() if agreement is None else agreement
        self._share = HostShare(max(1, int(host.pages * self.limits.occupancy)))
        self._closed = False
        self._registered = storage is not None
        self._wakes: dict[Operation, list[Callable[[], None]]] = {}
        self._threads: StorageThreads | None = None
        with contextlib.ExitStack() as opened:
            if storage is not None:
                storage.register(host.ranges)
                opened.callback(self._unregister)
            self._alarms = Alarms("prefetch-alarms")
            opened.callback(self._alarms.stop, _UNDO_SECONDS)
            if storage is not None:
                self._threads = StorageThreads(
                    host, storage, self.keeper, key_of, self.limits, self._step, self._stumbled
                )
                opened.callback(self._threads.stop, _UNDO_SECONDS)
            self._doer: QueueThreads[_Todo] = QueueThreads("cache-control", self._do_all, self._undone)
            opened.pop_all()

    @property
    def healthy(self) -> bool:
        """All of its threads live."""
        parts = (self._threads, self._doer, self._alarms)
        return not self._closed and all(part is None or part.healthy for part in parts)

    @property
    def occupied(self) -> int:
        """Host pages that prefetches hold which have not ended."""
        return self._share.held

    @property
    def capacity(self) -> int:
        """Host pages that prefetches may hold at a time; past it they are declined."""
        return 0 if self.storage is None else self._share.pages

    # What callers ask for.

    def prefetch(
        self,
        hashes: Sequence[str],
        *,
        request_id: str = "",
        operation_id: str = "",
        priority: int = 0,
        tenant: str = "",
        extra_key: str = "",
        timeout: float | None = None,
        engines: Sequence[str] = (),
    ) -> Operation:
        """Begins to bring the leading pages of ``hashes`` from storage; never waits, and always answers.

        A repeated ``request_id`` gives the operation that it began. All ranks of a replica use one ``operation_id``;
        empty: a new one. ``extra_key``: the one that the hashes began with; storage has their pages under it.
        ``timeout``: seconds until it ends with what it has. ``engines``: whose host caches pages may come from; none
        named: whichever there are. Raises InvalidRequest, RequestIdReused, TooManyRequests, FeatureDisabled (engines
        where no pages of others are taken); declines are states of the operation.
        """
        order = Order(
            kind=OperationKind.PREFETCH,
            hashes=tuple(hashes),
            request_id=request_id,
            priority=priority,
            tenant=tenant,
            extra_key=extra_key,
            timeout=timeout,
            engines=tuple(engines),
        )
        return self.start_prefetch(replace(order, operation_id=operation_id) if operation_id else order)

    def start_prefetch(self, order: Order) -> Operation:
        """Does the same with an order that is made already."""
        self._check(order)
        if order.engines and not isinstance(self.storage, FindsByPrompt):
            raise FeatureDisabled(
                "this cache takes no pages of other engines",
                metadata={"feature": "pull", "howToEnable": "give RankConfig a PullConfig"},
            )
        operation = Prefetch(
            order,
            self._reading,
            self.host.shape.page_bytes,
            time.monotonic(),
            "none" if self.storage is None else self.storage.name,
            threading.Event(),
            page_tokens=self.host.shape.page_tokens,
            share=self._share,
        )
        kept = self.book.add(operation)
        if kept is operation:
            without = functools.partial(operation.decline, Stop.BACKEND_DOWN)
            self._step(operation, without if self.storage is None else operation.begin, at_once=True)
        return kept

    def poll(self, operation: Operation, policy: StopPolicy | None = None) -> OperationRow | None:
        """For a scheduler that holds a request back for its prefetch: None while it should wait, then the end.

        The policy says how long; once it says stop, the operation is cut: one that looks up or agrees ends at once,
        the pages of another come after the batch that is on its way. A batch that hangs is waited for half a second:
        then the row is of an operation that is ENDING, its prefix usable, and its other pages storage's for a while.
        The time of ``StopPolicy.TIMEOUT`` begins with the first look that found it unfinished.
        """
        if operation.ended or operation.settled:
            return self.book.row(operation)
        policy = policy or self.limits.stop_policy
        now = time.monotonic()
        if operation.blocked_since is None:
            operation.blocked_since = now
        if policy is StopPolicy.BEST_EFFORT or (
            policy is StopPolicy.TIMEOUT and now - operation.blocked_since >= self.time_allowed(len(operation.hashes))
        ):
            self.terminate(operation, Stop.DEADLINE if policy is StopPolicy.TIMEOUT else Stop.CANCELLED)
        return self.book.row(operation) if operation.ended or operation.settled else None

    def time_allowed(self, pages: int) -> float:
        """Seconds that ``StopPolicy.TIMEOUT`` waits for so many pages, SGLang's formula."""
        tokens = pages * self.host.shape.page_tokens
        return self.limits.timeout_base + tokens / 1024 * self.limits.timeout_per_ki_tokens

    def terminate(self, operation: Operation, stop: Stop = Stop.CANCELLED) -> None:
        """Cuts an operation short. Its pages are quiescent, and its prefix usable, once it ``ended``; wait for that."""
        self._step(operation, functools.partial(operation.terminate, stop, time.monotonic()))

    def write_storage(
        self,
        hashes: Sequence[str],
        pages: Sequence[int] | Pages,
        *,
        request_id: str = "",
        priority: int = 0,
        tenant: str = "",
        extra_key: str = "",
        timeout: float | None = None,
    ) -> Operation:
        """Begins to write PRESENT host pages to storage; ``pages[i]`` holds ``hashes[i]``. They are read-locked until
        its end, which says what became of each. ``extra_key``: as for ``prefetch``, which finds them under the same one
        only. Raises as ``prefetch``, PageStateInvalid, FeatureDisabled (no storage).
        """
        order = Order(
            kind=OperationKind.BACKUP,
            hashes=tuple(hashes),
            request_id=request_id,
            priority=priority,
            tenant=tenant,
            extra_key=extra_key,
            timeout=timeout,
        )
        self._check(order)
        if len(pages) != len(hashes):
            raise InvalidRequest.of("pages", f"{len(pages)} pages for {len(hashes)} hashes", "as many as hashes")
        locked = as_pages(pages)
        self.host.table.read(locked)
        return self.start_backup(order, locked)

    def start_backup(
        self, order: Order, locked: Pages, *, agrees: bool = False, failure: Failure | None = None
    ) -> Operation:
        """Does the same with leading pages of the order's hashes that the caller has read-locked already.

        One that ``agrees`` begins once all ranks of the replica have said how many they have: none is an answer, too.
        ``failure``: why this rank has none.
        """
        try:
            self._check(order)
            if self.storage is None:
                raise no_storage()
            operation = Backup(
                order,
                self.limits,
                self.host.shape.page_bytes,
                time.monotonic(),
                self.storage.name,
                threading.Event(),
                pages=locked,
                failure=failure,
                agrees=agrees,
                is_writer=self._is_writer,
            )
            kept = self.book.add(operation)
        except BaseException:
            self.host.table.end_read(locked)
            raise
        if kept is operation:
            self._step(operation, operation.begin)
        else:
            self.host.table.end_read(locked)
        return kept

    def count_in_storage(
        self, hashes: Sequence[str], timeout: float, extra_key: str = "", *, behind: Sequence[str] = ()
    ) -> int:
        """Leading pages that storage has, ``behind`` those before them in their prompt; blocks for at most ``timeout``
        seconds. Raises StorageDown."""
        if self.storage is None or not hashes:
            return 0
        keys = [self._key_of(each, extra_key) for each in hashes]
        return source_behind(self.storage, (*behind, *hashes), len(behind)).count_leading(keys, timeout)

    def present_in_storage(self, hashes: Sequence[str], timeout: float) -> int:
        """The number of them that storage has, in whatever order, by keys without an extra key; blocks as
        ``count_in_storage``."""
        return self._in_parts(hashes, timeout, lambda storage, keys, left: sum(storage.contains(keys, left)))

    def delete_from_storage(self, hashes: Sequence[str], timeout: float, extra_key: str = "") -> int:
        """The number of them that were there and are gone; keys and waits as in ``present_in_storage``."""
        return self._in_parts(hashes, timeout, lambda storage, keys, left: storage.delete(keys, left), extra_key)

    def _in_parts(
        self,
        hashes: Sequence[str],
        timeout: float,
        ask: Callable[[StorageBackend, list[str], float], int],
        extra_key: str = "",
    ) -> int:
        """The sum of what storage answers about as many pages at a time as it takes."""
        end, found = time.monotonic() + timeout, 0
        for first in range(0, 0 if self.storage is None else len(hashes), MAX_PAGES):
            assert self.storage is not None
            keys = [self._key_of(each, extra_key) for each in hashes[first : first + MAX_PAGES]]
            found += ask(self.storage, keys, max(0.0, end - time.monotonic()))
        return found

    # Its end.

    def wait_idle(self, timeout: float) -> bool:
        """Waits until no operation is open."""
        with self._idle:
            return self._idle.wait_for(lambda: not self.book.open(), timeout)

    def reset(self, timeout: float = 10.0) -> bool:
        """Ends every operation and forgets those that ended. The threads stay; False when something still moves
        pages. Those that wait for the leading rank's last word wait for most of the time, then end with nothing."""
        for operation in self.book.open():
            self.terminate(operation, Stop.SHUT_DOWN)
        idle = self.wait_idle(timeout * 0.7)
        if not idle:
            for operation in self.book.open():
                self._step(operation, operation.give_up)
            idle = self.wait_idle(timeout * 0.3)
        self.book.forget_ended()
        return idle

    def close(self, timeout: float = 10.0) -> bool:
        """Ends every operation and every thread, within about ``timeout`` seconds; False when something was left
        behind.

        Then host memory and backend must stay; a later call ends it once the backend lets go. Repeats are harmless.
        """
        end = time.monotonic() + timeout
        self._closed = True
        if not self.reset(timeout * 0.7):
            # Its threads are what settles the pages that still move.
            return False
        stopped = self._stop_threads(end)
        if stopped:
            self._unregister()
        return stopped

    def _unregister(self) -> None:
        """Once: what lies there afterwards is somebody else's."""
        registered, self._registered = self._registered, False
        if registered and isinstance(self.storage, Unregisters):
            try:
                self.storage.unregister(self.host.ranges)
            except Exception as error:  # an entry point's may mean something else: what comes after closes, too
                _log.error("%s: unregister: %s", self.storage.name, error, exc_info=error)

    def _stop_threads(self, end: float) -> bool:
        def left() -> float:
            return max(0.1, end - time.monotonic())

        stopped = self._threads is None or self._threads.stop(left())
        # What was begun meanwhile, by whoever was just past the check.
        for operation in self.book.open():
            stopped = self._step(operation, operation.shut_down) is True and stopped
        if not stopped:
            # A later call comes on from here: until then somebody does what the threads that are left ask for.
            return False
        stopped = self._doer.stop(left())
        for todo in self._doer.clear():
            self._do(*todo)
        return self._alarms.stop(left()) and stopped

    def _check(self, order: Order) -> None:
        """Raises InvalidRequest, FeatureDisabled."""
        if self._closed:
            raise FeatureDisabled(
                "the cache controller was closed",
                metadata={"feature": "prefetch", "howToEnable": "open the rank again"},
            )
        order.check()

    # Steps of operations, and the work that they ask for.

    def _step(self, operation: Operation, step: Callable[[], T], *, at_once: bool = False) -> T | None:
        """Something happened to an operation: what the step answers, None where it failed.

        ``at_once``: this thread does the work of an operation that nobody else knows, so that whoever is declined hears
        it."""
        answer: T | None = None
        here: list[Work] = []
        with self._lock:
            try:
                answer = step()
            except Exception as error:
                self._trip(operation, error)
            work = operation.take_work()
            while work:
                each = work.pop(0)
                if at_once and isinstance(each, End | Wake):
                    here.append(each)
                elif (refusal := self._hand_out(operation, each, here)) is not None:
                    self._trip(operation, refusal)
                    work += operation.take_work()
            changed, operation.changed = operation.changed, False
        if changed and not operation.ended:
            self.book.tell(operation)
        for each in here:
            self._do(operation, each)
        return answer

    def _trip(self, operation: Operation, error: Exception) -> None:
        _log.error("operation %s: %s", operation.operation_id, error, exc_info=error)
        operation.on_error(error)

    def _hand_out(self, operation: Operation, work: Work, here: list[Work]) -> KvGrpcError | None:
        """Puts it where it is done; the error of a queue that takes no more. Under the lock: it is done in order."""
        order = operation.order
        if isinstance(work, StorageWork):
            assert self._threads is not None
            try:
                self._threads.put(operation, work)
            except KvGrpcError as error:
                return error
            return None
        try:
            # Never full: an operation has a few of these at a time, and operations are bounded.
            self._doer.put((operation, work), order.priority, order.tenant, again=True)
        except KvGrpcError:
            here.append(work)  # the thread has ended: it is closed
        return None

    def _do_all(self, todos: list[_Todo]) -> None:
        for operation, work in todos:
            self._do(operation, work)

    def _undone(self, todos: list[_Todo], error: Exception) -> None:
        self._stumbled([operation for operation, _ in todos], error)

    def _stumbled(self, operations: list[Operation], error: Exception) -> None:
        """A thread met a bug of ours or of a backend."""
        for operation in operations:
            self._step(operation, functools.partial(operation.on_error, error))

    def _do(self, operation: Operation, work: Work) -> None:
        if isinstance(work, Release):
            self.host.table.release(work.pages)
        elif isinstance(work, EndRead):
            self.host.table.end_read(work.pages)
        elif isinstance(work, Say):
            self._vote(operation, work)
        elif isinstance(work, Wake):
            self._wake(operation, work.seconds)
        elif isinstance(work, End):
            self._end(operation, work)
        elif isinstance(work, Reserve) and isinstance(operation, Prefetch):
            room = self.keeper.reserve(work.count, work.behind)
            self._step(operation, functools.partial(operation.on_room, room))
        elif isinstance(work, Keep) and isinstance(operation, Prefetch):
            self._hand_to_keeper(operation, work)

    def _vote(self, operation: Operation, work: Say) -> None:
        def decided(decision: Decision) -> None:
            if work.answered:
                self._step(operation, functools.partial(operation.on_decided, decision))

        self._agreement.vote(work.vote, work.seconds, decided)

    def _wake(self, operation: Operation, seconds: float) -> None:
        def tick() -> None:
            self._step(operation, functools.partial(operation.tick, time.monotonic()))

        drop = self._alarms.after(seconds, tick)
        if seconds > _KEPT_SECONDS:
            with self._lock:
                if not operation.ended:
                    self._wakes.setdefault(operation, []).append(drop)
                    return
            drop()

    def _hand_to_keeper(self, operation: Prefetch, work: Keep) -> None:
        self.host.table.commit(work.pages)
        try:
            found = self.keeper.keep(work.hashes, work.covered, work.pages, operation.order.extra_key)
        except Exception:
            # A keeper that raised took nothing.
            self.host.table.release(work.pages)
            raise
        self._step(operation, functools.partial(operation.on_kept, found))

    def _end(self, operation: Operation, work: End) -> None:
        with self._lock:
            wakes = self._wakes.pop(operation, [])
        for drop in wakes:
            drop()
        if self.book.end(operation, work.state, work.stop):
            metrics.CACHE_OPERATIONS.labels(operation.kind.name, work.state.name, operation.stop.name).inc()
        self._agreement.forget(operation.operation_id)
        operation.over.set()
        with self._idle:
            self._idle.notify_all()


def _limits_of_reads(limits: PrefetchLimits, storage: StorageBackend | None, page_bytes: int) -> PrefetchLimits:
    """Larger batches where that pays, unless ``batch_pages`` is another number than the default."""
    if not isinstance(storage, HasDearBatches) or limits.batch_pages != PrefetchLimits().batch_pages:
        return limits
    return replace(limits, batch_pages=max(limits.batch_pages, min(storage.batch_bytes // page_bytes, MAX_PAGES)))


def no_storage() -> FeatureDisabled:
    return FeatureDisabled(
        "this rank has no storage tier",
        metadata={"feature": "prefetch storage", "howToEnable": "give PrefetchConfig a storage backend"},
    )
