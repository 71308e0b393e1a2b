"""The words of the hierarchical cache as plain values: tiers, operations, why one ended, what became of a page."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvgrpc.errors import Failure
from kvgrpc.fields import bounded, seconds, violations
from kvgrpc.model import Tier, raise_if

Pages = npt.NDArray[np.int64]
"""Numbers of pages of one pool."""


class OperationKind(enum.IntEnum):
    """PREFETCH: storage to host. BACKUP: host to storage."""

    PREFETCH = 1
    BACKUP = 2


class OperationState(enum.IntEnum):
    """The numbers of the proto. An operation ends in exactly one of the states from DONE on, and stays there.

    DONE: every agreed page is in place. PARTIAL: a leading part of them. DECLINED: nothing was begun, see the stop.
    CANCELLED, EXPIRED: ended early by a caller or by its time, with what was in place by then. FAILED: see the failure.
    """

    QUEUED = 1
    QUERYING = 2
    AGREEING = 3
    TRANSFERRING = 4
    ENDING = 5
    DONE = 6
    PARTIAL = 7
    DECLINED = 8
    CANCELLED = 9
    EXPIRED = 10
    FAILED = 11

    @property
    def ended(self) -> bool:
        return self >= OperationState.DONE


class Stop(enum.IntEnum):
    """Why an operation was declined, or ended before its last page."""

    NONE = 0
    TOO_SHORT = 1
    BELOW_THRESHOLD = 2
    CAPACITY = 3
    RATE_LIMITED = 4
    BACKEND_DOWN = 5
    RANK_ABSENT = 6
    COVERED = 7
    DEADLINE = 8
    CANCELLED = 9
    PAGE_LOST = 10
    SHUT_DOWN = 11
    NOT_PRESENT = 12


class PageOutcome(enum.IntEnum):
    """The outcome of one page of an operation."""

    PENDING = 0
    OK = 1
    MISSING = 2
    FAILED = 3
    TIMEOUT = 4
    SKIPPED = 5


class Released(Protocol):
    """Says when a backend has let go of a page: a ``threading.Event``."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class PageStatus(enum.Enum):
    """The outcome of one page of a batch."""

    OK = "ok"
    MISSING = "missing"
    FAILED = "failed"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class PageResult:
    """The end of one page of a read or a write; the pages beside it have their own.

    Attributes:
        status: OK: all bytes are in place. MISSING (reads only): there is no complete page of this size under the key.
            FAILED: the backend said why. TIMEOUT: it did not end in time, or was not begun.
        detail: FAILED and TIMEOUT in words, for logs and for people.
        retryable: whether the same call may succeed later; False where it never will.
        released: None: the backend touches the page's buffers no more. Otherwise it still may, and this event is set
            once it does not: until then nobody may use the buffers again.

    After any status but OK, a read may have changed some bytes of the buffers.
    """

    status: PageStatus
    detail: str = ""
    retryable: bool = False
    released: Released | None = None

    @property
    def ok(self) -> bool:
        return self.status is PageStatus.OK

    @property
    def quiescent(self) -> bool:
        """True if the page's buffers may be used again now."""
        return self.released is None or self.released.is_set()


class StopPolicy(enum.Enum):
    """When a local scheduler stops waiting for a prefetch: at its first look, never, or after a time by size."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class WritePolicy(enum.Enum):
    """When device pages are copied to the host: when they are evicted, at their first use, or once they were used
    often."""

    WRITE_BACK = "write_back"
    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"


@dataclass(frozen=True, slots=True)
class NotEnoughPages:
    """A pool's answer when so many pages are not free: nothing was taken, ``missing`` more would do."""

    missing: int

    def __bool__(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class OperationRow:
    """One operation as it was at one moment. ``revision`` grows with each change of any operation of the controller.

    Counts are pages: ``asked`` by the caller, ``covered`` at the front that were on the host or device already,
    ``hit`` in storage behind those on this rank, ``agreed`` by all ranks, ``completed`` the prefix that is in place.
    Of pages that a prefetch brought: ``used`` by a request since, ``wasted`` by leaving the host before one came.
    """

    operation_id: str
    request_id: str
    kind: OperationKind
    state: OperationState
    stop: Stop
    revision: int
    asked: int
    covered: int
    hit: int
    agreed: int
    completed: int
    nbytes: int
    retries: int
    priority: int
    tenant: str
    quiescent: bool
    age_seconds: float
    took_seconds: float
    outcomes: tuple[PageOutcome, ...] = ()
    failure: Failure | None = None
    used: int = 0
    wasted: int = 0


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """Facts of GetCacheInfo beside tiers and operations.

    ``storage``: name of the backend, "" for none; ``storage_detail``: why it is not healthy. ``occupied`` of
    ``capacity`` host pages are held by prefetches. ``agreeing_ranks``: of the replica, that take part now.
    """

    storage: str = ""
    storage_healthy: bool = True
    storage_detail: str = ""
    write_policy: str = ""
    stop_policy: str = ""
    occupied: int = 0
    capacity: int = 0
    agreeing_ranks: int = 1


@dataclass(frozen=True, slots=True)
class Purged:
    """The result of a purge, or of one that is only tried.

    Attributes:
        near: pages of device and host that went, by tier.
        storage: pages of storage that went; None: it cannot count what would go.
        kept: pages that stay on device and host because they are in use or pinned.
        known_only: of storage those pages alone that device and host knew: its keys tell no extra key.
    """

    near: dict[Tier, int]
    storage: int | None
    kept: int
    known_only: bool


Number = Annotated[int, Meta(ge=1, le=1 << 20)]
Seconds = Annotated[float, seconds(3600)]


@dataclass(frozen=True, slots=True)
class PrefetchLimits:
    """Bounds and defaults of a controller, in the words of the engines' settings."""

    threshold_tokens: Annotated[int, Meta(ge=0)] = 256
    """A prefetch of fewer tokens is not worth its cost; at least one page counts."""
    batch_pages: Number = 128
    """Pages of one call of the storage backend."""
    storage_timeout: Seconds = 5.0
    """Seconds that one such call may take."""
    attempts: Number = 2
    """How often a page that failed is tried, the first time included."""
    readers: Number = 2
    """Threads that read from storage."""
    writers: Number = 1
    """Threads that write to it."""
    occupancy: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Share of the host pool that prefetches which have not ended may hold."""
    operations: Number = 4096
    """Operations that have not ended; one more is refused."""
    remembered: Number = 4096
    """Ended operations that can still be asked for."""
    stop_policy: StopPolicy = StopPolicy.TIMEOUT
    """What ends a prefetch that is not done: ``TIMEOUT`` waits ``timeout_base`` and ``timeout_per_ki_tokens`` from the
    first look that found it unfinished."""
    timeout_base: Annotated[float, bounded(least=0, most=3600, unit="seconds")] = 1.0
    """Seconds, whatever its size."""
    timeout_per_ki_tokens: Annotated[float, bounded(least=0, most=3600, unit="seconds")] = 0.25
    """Seconds for each 1,024 tokens."""
    operation_timeout: Seconds = 30.0
    """Seconds that an operation may take that came without a limit of its own."""
    agreement_timeout: Seconds = 5.0
    """Seconds that all ranks may take to say what they have."""
    doubt_timeout: Seconds = 60.0
    """Seconds, of those that this rank is awake, that it waits for the leading rank's word after it said its last
    number. Equal at all ranks. They end alike whichever of them sleep for less."""

    def __post_init__(self) -> None:
        raise_if(list(violations(self, "prefetch.limits.")))


@dataclass(frozen=True, slots=True)
class Namespace:
    """Values that must be equal for a page to be usable: pages of two namespaces never meet, whatever their hashes."""

    model: str
    dtype: str
    layout: str
    page_tokens: int
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    replicated: bool = False
    """True where every tensor-parallel rank holds the same bytes (MLA): one of them writes, each reads."""


@dataclass(frozen=True, slots=True)
class TierUse:
    """Pages of one tier: all, held in some way, reserved by operations, and bytes of one page."""

    tier: Tier
    pages: int
    used: int
    reserved: int
    page_bytes: int
    details: dict[str, int] = field(default_factory=dict)
