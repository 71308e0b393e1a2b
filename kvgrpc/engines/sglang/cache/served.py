"""SGLang's cache as PrefetchService serves it: orders go to the scheduler's thread, what it tells comes back here."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvgrpc.engines.sglang.cache.orders import MAX_TOKENS, CacheOrder, OrderKind, OrderQueue, Told
from kvgrpc.engines.sglang.cache.prompts import KnownPrompts, PromptTokens
from kvgrpc.engines.sglang.cache.stored import StoredPages
from kvgrpc.errors import (
    Failure,
    FeatureDisabled,
    OperationNotFound,
    PeerUnreachable,
    StorageFailed,
    TooManyRequests,
)
from kvgrpc.model import RankRef, Role, Tier
from kvgrpc.prefetch.agreement.leader import LeaderAgreement
from kvgrpc.prefetch.model import (
    CacheFacts,
    Namespace,
    OperationKind,
    PrefetchLimits,
    Purged,
    Stop,
    TierUse,
)
from kvgrpc.prefetch.orders import EngineOrders
from kvgrpc.prefetch.protocol.book import OperationBook
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.order import Order

MAX_PINS = 1024
_STUCK_SECONDS = 60.0
_STEP_SECONDS = 5.0
_RETRY_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class TreeCounts:
    """Tokens of SGLang's pools at one moment."""

    device: int
    device_free: int
    device_evictable: int
    device_protected: int
    host: int
    host_free: int
    host_pinned: int
    occupied: int
    capacity: int


class SglangCache:
    """The ServedCache of a replica's leading rank; ``take``, ``told`` and ``came_of`` are for the scheduler's
    thread.

    ``count``: asks that thread for its counts. ``stored``: None where SGLang's third tier is no backend of kvgrpc's.
    """

    role: Role = Role.UNIFIED
    leader: LeaderAgreement | None = None
    pinnable: int | None = None

    def __init__(
        self,
        rank: RankRef,
        namespace: Namespace,
        limits: PrefetchLimits,
        questions: OrderQueue,
        count: Callable[[], concurrent.futures.Future[TreeCounts]],
        stored: Callable[[], StoredPages | None],
        *,
        page_bytes: int,
        write_policy: str,
        bigram: bool = False,
    ) -> None:
        self.rank = rank
        self.namespace = namespace
        self._questions = questions
        self._orders = EngineOrders(limits, namespace.page_tokens, questions.wake)
        self._orders.book.listen(self._ended)
        self._count = count
        self._stored = stored
        self._page_bytes = page_bytes
        self._write_policy = write_policy
        self._prompts = KnownPrompts(namespace.page_tokens, bigram=bigram)
        self._lock = threading.Lock()
        self._starting: dict[str, PromptTokens] = {}
        self._taken: dict[str, Operation] = {}
        self._cut: set[str] = set()
        # Who waits for an answer, by the number of the order: a prefix has one for all who pin it.
        self._asked: dict[str, list[concurrent.futures.Future[Told]]] = {}
        # Until when each prefix is pinned, by the number of its order. Under the lock.
        self._pins: dict[str, float] = {}
        self._counts: TreeCounts | None = None

    @property
    def healthy(self) -> bool:
        """True if the scheduler takes what it is asked."""
        now = time.monotonic()
        began = min((each.began for each in self.book.open() if each.operation_id not in self._taken), default=now)
        waited = max(self._questions.waited, min(now - began, self._questions.since_taken))
        return waited < _STUCK_SECONDS

    @property
    def waiting(self) -> int:
        """Operations that the scheduler has not taken."""
        return self._orders.waiting

    @property
    def limits(self) -> PrefetchLimits:
        return self._orders.limits

    @property
    def book(self) -> OperationBook:
        return self._orders.book

    def hash_tokens(
        self, tokens: Sequence[int], *, extra_key: str | None, cache_salt: str | None, bigram: bool
    ) -> list[bytes]:
        return self._prompts.hash(tokens, extra_key, cache_salt)

    def lookup(
        self, hashes: Sequence[str], timeout: float, *, extra_key: str = "", storage: bool = True
    ) -> tuple[int, int, int]:
        """Raises FeatureDisabled where the tokens are not known, PeerUnreachable where the scheduler takes no step."""
        end = time.monotonic() + timeout
        told = self._ask(OrderKind.LOOK, uuid.uuid4().hex, self._prompts.of(hashes), timeout)
        device, near = self._pages(told.device), self._pages(told.near)
        stored = self._stored() if storage else None
        if stored is None or near >= len(hashes):
            return device, near, near
        left = max(0.01, end - time.monotonic())
        return device, near, near + stored.leading_at_all_ranks(hashes[near:], left)

    def began(self, kind: OperationKind, request_id: str) -> Operation | None:
        return self._orders.began(kind, request_id)

    def start(self, order: Order) -> Operation:
        """Raises FeatureDisabled where the tokens are not known, and what ``EngineOrders.start`` raises."""
        if self.began(order.kind, order.request_id) is None:
            prompt = self._prompts.of(order.hashes)
            with self._lock:
                waiting = sum(len(each.tokens) for each in list(self._starting.values())) // 8
                if self._starting and waiting + len(prompt.tokens) // 8 > MAX_TOKENS:
                    raise _too_many(MAX_TOKENS, waiting, "tokens of orders that wait for the engine's scheduler")
                self._starting[order.operation_id] = prompt
        operation = None
        try:
            operation = self._orders.start(order)
        finally:
            if operation is None or operation.operation_id != order.operation_id:
                self._starting.pop(order.operation_id, None)
        return operation

    def terminate(self, operation: Operation) -> None:
        """A backup goes on: SGLang ends none."""
        self._orders.terminate(operation)

    def pin(self, hashes: Sequence[str], seconds: float) -> int:
        """Keeps the host's copies of leading pages, of all pins a quarter of the host pool at most. Blocks.

        Raises FeatureDisabled where the tokens are not known, TooManyRequests, PeerUnreachable where the scheduler
        takes no step.
        """
        number = f"pin-{hashes[-1]}"
        prompt = self._prompts.of(hashes) if seconds else None
        with self._lock:
            if prompt is None:
                if number in self._pins:
                    self._pins[number] = 0.0
                return 0
            if len(self._pins) >= MAX_PINS and number not in self._pins:
                raise _too_many(MAX_PINS, len(self._pins) + 1, "pins")
            # Before it is there: whoever asks and does not hear the answer leaves no pin without an end.
            until = self._pins[number] = time.monotonic() + seconds
        try:
            return self._pages(self._ask(OrderKind.PIN, number, prompt, _STEP_SECONDS).done)
        finally:
            with self._lock:  # its end may have come to the scheduler before it did, and would be none
                self._pins.setdefault(number, until)

    def use(self) -> list[TierUse]:
        """Raises PeerUnreachable where the scheduler takes no step, StorageFailed where its pools tell nothing."""
        counts = self._counts = self._wait(self._count(), _STEP_SECONDS)
        pages, page_bytes = self._pages, self._page_bytes
        device = {"evictable": pages(counts.device_evictable), "protected": pages(counts.device_protected)}
        host = {"pinned": pages(counts.host_pinned)}
        used, near = counts.device - counts.device_free, counts.host - counts.host_free
        found = [
            TierUse(Tier.DEVICE, pages(counts.device), pages(used), 0, page_bytes, device),
            TierUse(Tier.HOST, pages(counts.host), pages(near), pages(counts.occupied), page_bytes, host),
        ]
        stored = self._stored()
        return found if stored is None else [*found, stored.use()]

    def facts(self) -> CacheFacts:
        stored, counts = self._stored(), self._counts
        healthy, detail = (False, "") if stored is None else stored.healthy
        return CacheFacts(
            storage="" if stored is None else stored.name,
            storage_healthy=healthy,
            storage_detail=detail,
            write_policy=self._write_policy,
            stop_policy=self.limits.stop_policy.value,
            occupied=0 if counts is None else self._pages(counts.occupied),
            capacity=0 if counts is None else self._pages(counts.capacity),
            agreeing_ranks=self.namespace.tp_size,
        )

    def purge(self, tiers: Sequence[Tier], extra_key: str | None, *, dry_run: bool, timeout: float) -> Purged:
        """Of storage alone, and of all extra keys. Raises FeatureDisabled for anything else, StorageDown."""
        stored = self._stored()
        if set(tiers) != {Tier.STORAGE} or stored is None:
            remedy = "POST /flush_cache at the engine, which empties device and host"
            raise _cannot("SGLang drops pages of device and host all at once", "purge of device and host", remedy)
        if extra_key is not None:
            remedy = "leave extra_key out: all pages of this model go"
            raise _cannot("the names of SGLang's stored pages do not tell extra keys", "purge by extra key", remedy)
        return Purged({}, stored.purge(timeout, dry_run=dry_run), 0, known_only=False)

    def drain(self) -> None:
        self._orders.drain()

    def undrain(self) -> None:
        self._orders.undrain()

    # On the scheduler's thread.

    def take(self, most: int) -> list[CacheOrder]:
        """Orders of this step: what runs and is to end, pins that are over, and new ones of ``most`` tokens or one."""
        found = [*self._cuts(), *self._unpins()]
        tokens = 0
        while tokens < most and (operation := self._orders.take()) is not None:
            prompt = self._starting.get(operation.operation_id)
            self._taken[operation.operation_id] = operation
            if prompt is None or operation.ended:  # a caller has just ended it, and may have looked before it was there
                self._taken.pop(operation.operation_id, None)
                continue
            self._starting.pop(operation.operation_id, None)
            kind = OrderKind.PREFETCH if operation.kind is OperationKind.PREFETCH else OrderKind.BACKUP
            found.append(_order(kind, operation.operation_id, prompt))
            tokens += len(prompt.tokens) // 8
        return found

    def told(self, told: Told) -> None:
        """The answer about an order."""
        with self._lock:
            asked = self._asked.get(told.number)
            future = asked.pop(0) if asked else None
        if future is not None:
            future.set_result(told)
        operation = self._taken.get(told.number)
        if operation is None or told.state is None:
            return
        covered, completed = self._pages(told.near), self._pages(told.done)
        brought = completed if operation.kind is OperationKind.BACKUP else completed - covered
        news = {
            "covered": covered,
            "hit": self._pages(told.hit),
            "agreed": covered + self._pages(told.hit),
            "completed": completed,
            "nbytes": max(0, brought) * self._page_bytes,
        }
        if not told.state.ended:
            self._orders.tell(operation, state=told.state, **news)
            return
        self._orders.tell(operation, **news)
        self._orders.end(operation, told.state, told.stop, _failure(told.error))

    def came_of(self, number: str, used: int, lost: int) -> None:
        """Of the tokens that an order brought so many more were used, and are lost."""
        with contextlib.suppress(OperationNotFound):  # it is remembered for a while only
            operation = self.book.get(number)
            used, lost = operation.used + self._pages(used), operation.wasted + self._pages(lost)
            self._orders.tell(operation, used=used, wasted=lost)

    def _cuts(self) -> list[CacheOrder]:
        # At once: whoever ends one does so from another thread.
        taken = list(self._taken.values())
        late = [each for each in taken if each.operation_id not in self._cut]
        stops = [(each.operation_id, self._orders.stop_of(each)) for each in late]
        orders = [CacheOrder(OrderKind.CUT, number, stop=stop) for number, stop in stops if stop is not Stop.NONE]
        self._cut.update(order.number for order in orders)
        self._cut.intersection_update(self._taken)  # of one that ended meanwhile nobody hears again
        return orders

    def _unpins(self) -> list[CacheOrder]:
        if not self._pins:
            return []
        with self._lock:  # one that is renewed now stays, or has another end
            now = time.monotonic()
            over = [number for number, until in self._pins.items() if until <= now]
            for number in over:
                del self._pins[number]
        return [CacheOrder(OrderKind.UNPIN, number) for number in over]

    # Wherever it happens.

    def _ended(self, operation: Operation) -> None:
        if operation.ended:
            self._starting.pop(operation.operation_id, None)
            self._taken.pop(operation.operation_id, None)
            self._cut.discard(operation.operation_id)

    def _ask(self, kind: OrderKind, number: str, prompt: PromptTokens, seconds: float) -> Told:
        future: concurrent.futures.Future[Told] = concurrent.futures.Future()
        is_there = False
        with self._lock:
            self._asked.setdefault(number, []).append(future)
        try:
            self._questions.put(_order(kind, number, prompt))
            is_there = True
            told: Told = self._wait(future, seconds)
        finally:
            with self._lock:
                waiting = self._asked.get(number, [])
                if left := future in waiting:
                    waiting.remove(future)
                if not waiting:
                    self._asked.pop(number, None)
            if left and is_there:  # else the order under this number is somebody else's
                self._questions.withdraw(number)
        if told.error:
            raise StorageFailed(told.error, metadata={"backend": "sglang", "status": "FAILED"})
        return told

    def _wait(self, future: concurrent.futures.Future[Any], seconds: float) -> Any:
        try:
            return future.result(seconds)
        except (TimeoutError, concurrent.futures.TimeoutError):
            raise PeerUnreachable(
                f"the engine's scheduler took no step within {seconds:g} s",
                metadata={"address": str(self.rank)},
                retry_after=_RETRY_SECONDS,
            ) from None

    def _pages(self, tokens: int) -> int:
        return tokens // self.namespace.page_tokens


def _order(kind: OrderKind, number: str, prompt: PromptTokens) -> CacheOrder:
    return CacheOrder(kind, number, prompt.tokens, prompt.extra_key, prompt.cache_salt)


def _failure(error: str) -> Failure | None:
    return Failure.of(StorageFailed(error, metadata={"backend": "sglang", "status": "FAILED"})) if error else None


def _cannot(why: str, feature: str, remedy: str) -> FeatureDisabled:
    return FeatureDisabled(f"{why}: {remedy}", metadata={"feature": feature, "howToEnable": remedy})


def _too_many(limit: int, value: int, scope: str) -> TooManyRequests:
    return TooManyRequests(
        f"{scope}: {value}, at most {limit}",
        metadata={"limit": limit, "value": value, "scope": scope},
        retry_after=_RETRY_SECONDS,
    )
