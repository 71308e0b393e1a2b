"""Rows in the memory of the registry's own process: gone with it, and back within one keepalive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvgrpc.model import RankId, RankRef
from kvgrpc.observability import metrics
from kvgrpc.observability.logging import RateLimited
from kvgrpc.registry.acceptance import MAX_ENGINES, MAX_ROWS, Acceptance
from kvgrpc.registry.clock import TICK_SECONDS, RunningClock
from kvgrpc.registry.engine import LeasedRow
from kvgrpc.registry.model import DEFAULT_TTL, Absence, Lease, RankRow
from kvgrpc.registry.owners import Owners
from kvgrpc.registry.store.base import OnChange
from kvgrpc.registry.table import EngineTable
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.shares import Account
from kvgrpc.rpc.turns import next_turn

_log = logging.getLogger(__name__)

# Rows that one call removes because their leases ran out: 5 ms of the loop. One caller may let 32,768 run out at once.
EXPIRED_AT_ONCE = 512
# When the rows of others, that ran out in the same moment, are gone: they go turn by turn.
_REST_GONE_SECONDS = 0.05


class MemoryRegistry:
    """Soft state: what it knows is what ranks told it within the last ``ttl`` seconds. No clock or I/O of its own.

    ``clock`` gives seconds that never go back, ``wall_clock`` Unix seconds, for people. ``registry_id`` and
    ``lease_ids``, which never end, must differ from run to run, so that leases of an earlier run are unknown. Not
    thread-safe. The cost of a call grows with its rows or leases, never with what the registry holds.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        registry_id: str,
        lease_ids: Iterator[int],
        ttl: float = DEFAULT_TTL,
        max_rows: int = MAX_ROWS,
        max_engines: int = MAX_ENGINES,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._wall_clock = wall_clock
        self.registry_id = registry_id
        self.ttl = ttl
        self._clock = clock
        self._started = clock()
        self._lease_ids = lease_ids
        self._table = EngineTable()
        # One TTL for all leases, so the order of renewal is the order of expiry.
        self._leases: OrderedDict[int, LeasedRow] = OrderedDict()
        # The largest epoch of ranks that are gone: an older incarnation that wakes up later stays fenced.
        self._fences: OrderedDict[RankId, int] = OrderedDict()
        self._max_fences = max_rows
        self._ran_out: list[RankRef] = []
        self._owners = Owners(self._table, max_rows, max_engines)
        self._acceptance = Acceptance(
            self._table,
            lambda rank: self._fences.get(rank, 0),
            lambda engine: engine.last_renewal + self.ttl - self._clock(),
            self._first_lease_ends_in,
            max_rows,
            max_engines,
        )

    @property
    def table(self) -> EngineTable:
        """The rows whose leases run, and for some turns more those of many whose leases ran out together."""
        self.expire()
        return self._table

    @property
    def rows(self) -> int:
        return self._table.rows

    def rows_by_owner(self) -> dict[tuple[str, str], int]:
        """See ``Store.rows_by_owner``."""
        return self._owners.rows()

    @property
    def warming_up_for(self) -> float:
        """Seconds left of the one TTL after the start in which ranks that are there may not have come back yet."""
        return max(self._started + self.ttl - self._clock(), 0.0)

    def register(self, rows: Sequence[RankRow]) -> tuple[Lease, ...]:
        """See ``Store.register``."""
        self.expire()
        self._acceptance.check(rows)
        with self._owners.room_for(rows) as accounts:
            self._remove_replaced(rows)
            return tuple(self._take(row, accounts) for row in rows)

    def keep_alive(self, lease_ids: Iterable[int]) -> list[int]:
        """See ``Store.keep_alive``."""
        self.expire()
        now = self._clock()
        unknown = []
        for lease_id in lease_ids:
            leased = self._leases.get(lease_id)
            if leased is None:
                unknown.append(lease_id)
            else:
                self._renew(leased, now)
        return unknown

    def deregister(self, refs: Iterable[RankRef]) -> int:
        """See ``Store.deregister``."""
        self.expire()
        removed = 0
        for ref in refs:
            leased = self._table.leased(ref.rank)
            if leased is not None and leased.row.ref.epoch == ref.epoch:
                self._remove(leased)
                self._note_departure(leased, Absence.DEREGISTERED)
                removed += 1
        return removed

    def expire(self) -> tuple[RankRef, ...]:
        """Removes the rows whose leases ran out, EXPIRED_AT_ONCE of them at most, and returns them. Every other method
        begins with it."""
        now = self._clock()
        expired = list[RankRef]()
        while self._leases and len(expired) < EXPIRED_AT_ONCE:
            leased = next(iter(self._leases.values()))
            if leased.expires_at > now:
                break
            self._remove(leased)
            self._note_departure(leased, Absence.LEASE_RAN_OUT)
            expired.append(leased.row.ref)
        self._ran_out += expired
        return tuple(expired)

    def take_ran_out(self) -> list[RankRef]:
        """The rows whose leases ran out since this was called last, whichever call found them so."""
        ran_out, self._ran_out = self._ran_out, []
        return ran_out

    def _first_lease_ends_in(self) -> float:
        """Seconds; nobody who is refused for want of room needs to wait longer than that before it asks again."""
        first = next(iter(self._leases.values()), None)
        return self.ttl if first is None else max(first.expires_at - self._clock(), _REST_GONE_SECONDS)

    def _remove_replaced(self, rows: Sequence[RankRow]) -> None:
        for row in rows:
            leased = self._table.leased(row.ref.rank)
            if leased is not None and leased.row.ref.epoch < row.ref.epoch:
                self._remove(leased)

    def _take(self, row: RankRow, accounts: tuple[Account, ...]) -> Lease:
        now = self._clock()
        leased = self._table.leased(row.ref.rank)
        if leased is None:
            self._owners.add(row.ref.rank, accounts)
            leased = self._table.add(row, self._new_lease_id(), now + self.ttl)
            self._leases[leased.lease_id] = leased
            self._fences.pop(row.ref.rank, None)
        self._renew(leased, now)
        return Lease(row.ref, leased.lease_id)

    def _new_lease_id(self) -> int:
        return next(lease_id for lease_id in self._lease_ids if lease_id not in self._leases)

    def _renew(self, leased: LeasedRow, now: float) -> None:
        leased.expires_at = now + self.ttl
        leased.engine.last_renewal = now
        self._leases.move_to_end(leased.lease_id)

    def _remove(self, leased: LeasedRow) -> None:
        self._owners.remove(leased.row.ref.rank)
        self._table.remove(leased)
        del self._leases[leased.lease_id]
        self._fence(leased.row.ref)

    def _note_departure(self, leased: LeasedRow, absence: Absence) -> None:
        self._table.departures.note(leased.row.ref, absence, self._wall_clock())

    def _fence(self, ref: RankRef) -> None:
        self._fences[ref.rank] = ref.epoch
        self._fences.move_to_end(ref.rank)
        if len(self._fences) > self._max_fences:
            self._fences.popitem(last=False)


def random_lease_ids() -> Iterator[int]:
    """Whoever names a lease renews it, and no scope is asked for: so nobody can guess one, not from its own either."""
    while True:
        yield secrets.randbits(62) + 1


class MemoryStore:
    """``MemoryRegistry`` as a ``Store``: with the clock of this process and a tick that lets leases run out."""

    def __init__(self, *, ttl: float = DEFAULT_TTL) -> None:
        self._clock = RunningClock()
        self.registry = MemoryRegistry(
            clock=self._clock, registry_id=secrets.token_hex(8), lease_ids=random_lease_ids(), ttl=ttl
        )
        self._on_change: OnChange | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._lines = RateLimited(_log)

    @property
    def registry_id(self) -> str:
        return self.registry.registry_id

    @property
    def ttl(self) -> float:
        return self.registry.ttl

    @property
    def table(self) -> EngineTable:
        return self.registry.table

    @property
    def warming_up_for(self) -> float:
        return self.registry.warming_up_for

    @property
    def healthy(self) -> bool:
        return self._ticking is not None and not self._ticking.done()

    async def start(self, on_change: OnChange) -> None:
        self._on_change = on_change
        self._ticking = background(self._tick(), "registry-clock")

    async def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([self._ticking])

    def rows_by_owner(self) -> dict[tuple[str, str], int]:
        return self.registry.rows_by_owner()

    async def register(self, rows: Sequence[RankRow]) -> Sequence[Lease]:
        try:
            return self.registry.register(rows)
        finally:
            self._tell()

    async def keep_alive(self, lease_ids: Sequence[int]) -> list[int]:
        return self.registry.keep_alive(lease_ids)

    async def deregister(self, refs: Iterable[RankRef]) -> int:
        removed = self.registry.deregister(refs)
        self._tell()
        return removed

    async def _tick(self) -> None:
        while True:
            self._clock.tick()
            while self._end_leases():
                self._tell()
                await next_turn()
                self._clock.tick()
            metrics.REGISTRY_ROWS.set(self.registry.rows)
            self._tell()
            await asyncio.sleep(TICK_SECONDS)

    def _end_leases(self) -> bool:
        """Those that ran out; True if there may be more."""
        more = len(self.registry.expire()) == EXPIRED_AT_ONCE
        ran_out = self.registry.take_ran_out()
        metrics.REGISTRY_EXPIRED.inc(len(ran_out))
        for ref in ran_out:
            self._lines.warning("leases", f"the lease of {ref} ran out: nobody renewed it for {self.ttl:g} s")
        return more

    def _tell(self) -> None:
        changes = self.registry.table.take_changes()
        if changes and self._on_change is not None:
            self._on_change(changes)
