"""The hierarchical cache's controller between host and storage: prefetch, backup, and what became of them.

An engine with its own radix cache uses it alone, with ``CompletionQueue`` or a keeper of its own;
``kvgrpc.prefetch.tree.cache.TieredCache`` puts a prefix tree and device copies around it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvgrpc.errors import FeatureDisabled, InvalidRequest
from kvgrpc.prefetch.model import (
    OperationKind,
    OperationRow,
    OperationState,
    PrefetchLimits,
    Stop,
    StopPolicy,
)
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages, as_pages
from kvgrpc.prefetch.protocol.book import OperationBook
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.votes import Agreement, AloneAgreement
from kvgrpc.prefetch.runtime.backing_up import Backup, Writes, every_page
from kvgrpc.prefetch.runtime.prefetching import Prefetcher
from kvgrpc.prefetch.storage.base import StorageBackend, Unregisters
from kvgrpc.prefetch.threads.timers import Alarms
from kvgrpc.prefetch.tree.keeper import CompletionQueue, Keeper

_log = logging.getLogger(__name__)

MAX_PAGES = 65_536
"""Pages of one operation."""
MAX_PRIORITY = 1_000


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
        writes: Writes = every_page,
    ) -> None:
        self.host = host
        self.storage = storage
        self.limits = limits or PrefetchLimits()
        # Not ``or``: a keeper may have a length, and be empty.
        self.keeper = CompletionQueue(host.table) if keeper is None else keeper
        self.book = OperationBook(self.limits)
        self._key_of = key_of
        self._closed = False
        self._registered = storage is not None
        self._alarms = Alarms("prefetch-alarms")
        agreement = AloneAgreement() if agreement is None else agreement
        self._prefetcher: Prefetcher | None = None
        self._backup: Backup | None = None
        if storage is not None:
            storage.register(host.ranges)
            self._prefetcher = Prefetcher(
                self.book,
                host,
                storage,
                key_of,
                self.keeper,
                agreement,
                self.limits,
                self._alarms,
            )
            self._backup = Backup(self.book, host, storage, key_of, writes, agreement, self.limits, self._alarms)

    @property
    def healthy(self) -> bool:
        """All of its threads live."""
        parts = [part for part in (self._prefetcher, self._backup) if part is not None]
        return not self._closed and self._alarms.healthy and all(part.healthy for part in parts)

    @property
    def occupied(self) -> int:
        """Host pages that prefetches hold which have not ended."""
        return 0 if self._prefetcher is None else self._prefetcher.occupied

    @property
    def capacity(self) -> int:
        """Host pages that prefetches may hold at a time; past it they are declined."""
        return 0 if self._prefetcher is None else self._prefetcher.capacity()

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
    ) -> Operation:
        """Begins to bring the leading pages of ``hashes`` from storage; never waits, and always answers.

        A repeated ``request_id`` gives the operation that it began. All ranks of a replica use one ``operation_id``;
        empty: a new one. ``extra_key``: the one that the hashes began with; storage has their pages under it.
        ``timeout``: seconds until it ends with what it has. Raises InvalidRequest, RequestIdReused, TooManyRequests;
        declines are states of the operation.
        """
        operation = self.operation(
            OperationKind.PREFETCH,
            hashes,
            request_id=request_id,
            operation_id=operation_id,
            priority=priority,
            tenant=tenant,
            extra_key=extra_key,
            timeout=timeout,
        )
        kept = self.book.add(operation)
        if kept is operation:
            if self._prefetcher is None:
                self.book.end(operation, OperationState.DECLINED, Stop.BACKEND_DOWN)
            else:
                self._prefetcher.start(operation)
        return kept

    def poll(self, operation: Operation, policy: StopPolicy | None = None) -> OperationRow | None:
        """For a scheduler that holds a request back for its prefetch: None while it should wait, then the end.

        The policy says how long; once it says stop, the operation is cut, and its pages come after the batch that is on
        its way. The time of ``StopPolicy.TIMEOUT`` begins with the first look that found it unfinished.
        """
        if operation.ended:
            return self.book.row(operation)
        policy = policy or self.limits.stop_policy
        now = time.monotonic()
        if operation.blocked_since is None:
            operation.blocked_since = now
        if policy is StopPolicy.BEST_EFFORT or (
            policy is StopPolicy.TIMEOUT and now - operation.blocked_since >= self.time_allowed(len(operation.hashes))
        ):
            self.terminate(operation, Stop.DEADLINE if policy is StopPolicy.TIMEOUT else Stop.CANCELLED)
        return self.book.row(operation) if operation.ended else None

    def time_allowed(self, pages: int) -> float:
        """Seconds that ``StopPolicy.TIMEOUT`` waits for so many pages, SGLang's formula."""
        tokens = pages * self.host.shape.page_tokens
        return self.limits.timeout_base + tokens / 1024 * self.limits.timeout_per_ki_tokens

    def terminate(self, operation: Operation, stop: Stop = Stop.CANCELLED) -> None:
        """Cuts an operation short. Its pages are quiescent, and its prefix usable, once it ``ended``; wait for that."""
        if operation.kind is OperationKind.PREFETCH and self._prefetcher is not None:
            self._prefetcher.terminate(operation, stop)
        elif self._backup is not None:
            self._backup.terminate(operation, stop)

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
        operation = self.operation(
            OperationKind.BACKUP,
            hashes,
            request_id=request_id,
            priority=priority,
            tenant=tenant,
            extra_key=extra_key,
            timeout=timeout,
        )
        if len(pages) != len(hashes):
            raise InvalidRequest.of("pages", f"{len(pages)} pages for {len(hashes)} hashes", "as many as hashes")
        locked = as_pages(pages)
        self.host.table.read(locked)
        return self.start_backup(operation, locked)

    def start_backup(self, operation: Operation, locked: Pages) -> Operation:
        """The same with leading pages of the operation's hashes that the caller has read-locked already.

        One that ``agrees`` begins once all ranks of the replica have said how many they have: none is an answer, too.
        """
        try:
            if self._backup is None:
                raise no_storage()
            operation.pages = locked
            kept = self.book.add(operation)
        except BaseException:
            self.host.table.end_read(locked)
            raise
        if kept is not operation:
            self.host.table.end_read(locked)
        else:
            self._backup.start(operation)
        return kept

    def count_in_storage(self, hashes: Sequence[str], timeout: float, extra_key: str = "") -> int:
        """Leading pages that storage has; blocks for at most ``timeout`` seconds. Raises StorageDown."""
        if self.storage is None or not hashes:
            return 0
        return self.storage.count_leading([self._key_of(each, extra_key) for each in hashes], timeout)

    def present_in_storage(self, hashes: Sequence[str], timeout: float) -> int:
        """How many of them storage has, in whatever order, by keys without an extra key; blocks as
        ``count_in_storage``."""
        return self._in_parts(hashes, timeout, lambda storage, keys, left: sum(storage.contains(keys, left)))

    def delete_from_storage(self, hashes: Sequence[str], timeout: float, extra_key: str = "") -> int:
        """How many of them were there and are gone; as ``present_in_storage``."""
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

    def reset(self, timeout: float = 10.0) -> bool:
        """Ends every operation and forgets those that ended. The threads stay; False when something still moves
        pages. Those that wait for the leading rank's last word wait for most of the time, then end with nothing."""
        for operation in self.book.open():
            self.terminate(operation, Stop.SHUT_DOWN)
        idle = self.book.wait_idle(timeout * 0.7)
        if not idle:
            for operation in self.book.open():
                if operation.kind is OperationKind.BACKUP and self._backup is not None:
                    self._backup.give_up(operation)
                elif self._prefetcher is not None:
                    self._prefetcher.give_up(operation)
            idle = self.book.wait_idle(timeout * 0.3)
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
        stopped = True
        for part in (self._prefetcher, self._backup, self._alarms):
            if part is not None:
                stopped = part.stop(max(0.1, end - time.monotonic())) and stopped
        if stopped and self._registered:
            # Once: what lies there afterwards is somebody else's.
            self._registered = False
            if isinstance(self.storage, Unregisters):
                try:
                    self.storage.unregister(self.host.ranges)
                except Exception as error:  # an entry point's may mean something else: what comes after closes, too
                    _log.error("%s: unregister: %s", self.storage.name, error, exc_info=error)
        return stopped

    def operation(
        self,
        kind: OperationKind,
        hashes: Sequence[str],
        *,
        request_id: str = "",
        operation_id: str = "",
        priority: int = 0,
        tenant: str = "",
        extra_key: str = "",
        timeout: float | None = None,
    ) -> Operation:
        """One that is not begun. Raises InvalidRequest, FeatureDisabled."""
        if self._closed:
            raise FeatureDisabled(
                "the cache controller was closed",
                metadata={"feature": "prefetch", "howToEnable": "open the rank again"},
            )
        if not 1 <= len(hashes) <= MAX_PAGES:
            raise InvalidRequest.of("page_hashes", f"{len(hashes)} pages", f"1 to {MAX_PAGES} pages")
        if abs(priority) > MAX_PRIORITY:
            raise InvalidRequest.of("priority", priority, f"-{MAX_PRIORITY} to {MAX_PRIORITY}")
        if timeout is not None and not 0 < timeout <= 3600:
            raise InvalidRequest.of("timeout", timeout, "above 0, at most 3600 seconds")
        seconds = self.limits.operation_timeout if timeout is None else timeout
        operation = Operation(
            kind,
            tuple(hashes),
            request_id,
            priority,
            tenant,
            extra_key,
            deadline=time.monotonic() + seconds,
            timeout=timeout,
        )
        if operation_id:
            operation.operation_id = operation_id
        return operation


def no_storage() -> FeatureDisabled:
    return FeatureDisabled(
        "this rank has no storage tier",
        metadata={"feature": "prefetch storage", "howToEnable": "give PrefetchConfig a storage backend"},
    )
