"""Orders to SGLang's schedulers about their prefix tree, and the queue where it waits. Pure but for a lock.

The tree belongs to the scheduler's thread, and every rank of a replica must change its own in the same step: orders are
taken there as requests are, and travel with them to the other ranks, so they are plain values that pickle.
"""

from __future__ import annotations

import enum
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvgrpc.errors import TooManyRequests
from kvgrpc.prefetch.model import OperationState, Stop

MAX_ORDERS = 1024
MAX_TOKENS = 1 << 22
"""Of all orders that wait."""
ORDERS_OF_A_STEP = 16
TOKENS_OF_A_STEP = 1 << 16
"""Requests wait for what a step does with the tree: so much, or one order."""
_RETRY_SECONDS = 0.5


class OrderKind(enum.Enum):
    """The kind of an order. CUT, UNPIN name the order that they end; the others have tokens."""

    LOOK = "look"
    PREFETCH = "prefetch"
    BACKUP = "backup"
    CUT = "cut"
    PIN = "pin"
    UNPIN = "unpin"


@dataclass(frozen=True, slots=True)
class CacheOrder:
    """One order. ``tokens``: the whole prompt, 8 bytes each; ``number`` names it at every rank."""

    kind: OrderKind
    number: str
    tokens: bytes = b""
    extra_key: str | None = None
    cache_salt: str | None = None
    stop: Stop = Stop.CANCELLED

    @property
    def token_count(self) -> int:
        return len(self.tokens) // 8

    @property
    def prompt(self) -> array[int]:
        found = array("q")
        found.frombytes(self.tokens)
        return found


@dataclass(frozen=True, slots=True)
class Told:
    """A rank's words about an order. Counts are tokens of the prompt, from its first on.

    ``device``; ``near`` on device or host; ``hit`` behind those in storage; ``done`` in place, or in storage for a
    backup. ``state``: None where the order is no operation. ``error``: why it did not work at all.
    """

    number: str
    state: OperationState | None = None
    stop: Stop = Stop.NONE
    device: int = 0
    near: int = 0
    hit: int = 0
    done: int = 0
    error: str = ""


class OrderQueue:
    """Questions that wait for the scheduler's next step: orders that are no operations. Thread-safe; nobody waits.

    ``wake``: called after each new order, for a scheduler that sleeps when it is idle.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self.wake = wake
        self._lock = threading.Lock()
        self._waiting: deque[CacheOrder] = deque()
        self._tokens = 0
        self._taken_at = time.monotonic()
        # When the scheduler last came by, or the first one began to wait for it.
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waited(self) -> float:
        """Seconds for which orders have waited and the scheduler has not come by."""
        with self._lock:
            return time.monotonic() - self._since if self._waiting else 0.0

    @property
    def since_taken(self) -> float:
        """Seconds since the scheduler last came by."""
        return time.monotonic() - self._taken_at

    def put(self, order: CacheOrder) -> None:
        """Raises TooManyRequests."""
        with self._lock:
            tokens = self._tokens + order.token_count
            if len(self._waiting) >= MAX_ORDERS:
                raise _full(len(self._waiting) + 1, MAX_ORDERS, "orders that wait for the engine's scheduler")
            if self._waiting and tokens > MAX_TOKENS:
                raise _full(tokens, MAX_TOKENS, "tokens of orders that wait for the engine's scheduler")
            self._tokens = tokens
            if not self._waiting:
                self._since = time.monotonic()
            self._waiting.append(order)
        self.wake()

    def withdraw(self, number: str) -> bool:
        """True if the order still waited: nobody will do it then."""
        with self._lock:
            for order in self._waiting:
                if order.number == number:
                    self._waiting.remove(order)
                    self._tokens -= order.token_count
                    return True
        return False

    def take(self) -> list[CacheOrder]:
        """Those of one step, in the order in which they came. Called in each step, whether or not there are any."""
        with self._lock:
            taken: list[CacheOrder] = []
            tokens = 0
            while self._waiting and len(taken) < ORDERS_OF_A_STEP:
                size = self._waiting[0].token_count
                if taken and tokens + size > TOKENS_OF_A_STEP:
                    break
                tokens += size
                taken.append(self._waiting.popleft())
            self._tokens -= tokens
            self._since = self._taken_at = time.monotonic()
        return taken


def _full(value: int, limit: int, scope: str) -> TooManyRequests:
    return TooManyRequests(
        f"{scope}: {value}, at most {limit}",
        metadata={"limit": limit, "value": value, "scope": scope},
        retry_after=_RETRY_SECONDS,
    )
