"""One prefetch or backup from its start to its end: its state, its pages, what became of each. No thread of its own."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvgrpc.errors import Failure
from kvgrpc.prefetch.model import OperationKind, OperationRow, OperationState, PageOutcome, Stop
from kvgrpc.prefetch.pools.pages import Pages

_NO_PAGES: Pages = np.empty(0, dtype=np.int64)


def _nothing() -> None:
    """It has no deadline."""


@dataclass(eq=False)
class Operation:
    """What the controller knows of an operation. Its lock guards every field; callers read ``row`` and wait.

    ``hashes`` are the hexadecimal page hashes of the whole request; the pages from ``covered`` on are its own, and
    ``pages`` (host) and ``outcomes`` begin there. The pages belong to the operation until ``ended``; only then were all
    reads and writes of them over.

    Of a backup: ``agrees``: all ranks of the replica make it together. ``others``: indices of pages that another rank
    writes and that storage did not have yet at the last look; ``others_since``: when they were first looked for.
    """

    kind: OperationKind
    hashes: tuple[str, ...]
    request_id: str = ""
    priority: int = 0
    tenant: str = ""
    extra_key: str = ""
    deadline: float = 0.0
    timeout: float | None = None
    operation_id: str = field(default_factory=lambda: uuid.uuid4().hex)
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
    pages: Pages = field(default_factory=lambda: _NO_PAGES)
    outcomes: list[PageOutcome] = field(default_factory=list)
    next_page: int = 0
    in_flight: int = 0
    finishing: bool = False
    cut: bool = False
    blocked_since: float | None = None
    began: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)
    forget_deadline: Callable[[], None] = _nothing
    lingering: dict[int, list[threading.Event]] = field(default_factory=dict)
    agrees: bool = False
    others: list[int] = field(default_factory=list)
    others_since: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether it is in its last state: its pages are quiescent then."""
        return self.state.ended

    @property
    def lingers(self) -> bool:
        """Whether a backend may still read or write one of its pages."""
        return any(not event.is_set() for events in self.lingering.values() for event in events)

    def wait(self, timeout: float) -> bool:
        """Waits until it has ended and everybody was told so, for any thread but a controller's own."""
        return self.over.wait(timeout)

    def prefix(self) -> int:
        """Leading pages, of the whole request, that are in place."""
        done = next((i for i, outcome in enumerate(self.outcomes) if outcome is not PageOutcome.OK), len(self.outcomes))
        return self.covered + done

    def same_order(self, other: Operation) -> bool:
        """Whether both were asked for the same."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("hashes", "priority", "tenant", "extra_key", "timeout")
        )

    def row(self, *, with_pages: bool = True) -> OperationRow:
        now = self.ended_at or time.monotonic()
        return OperationRow(
            self.operation_id,
            self.request_id,
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
            self.priority,
            self.tenant,
            self.ended,
            time.monotonic() - self.began,
            now - self.began,
            tuple(self.outcomes) if with_pages else (),
            self.failure,
        )
