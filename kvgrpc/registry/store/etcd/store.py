"""The store that several registries share: each reads all rows from its own view, and writes by transactions."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Iterable, Sequence

from kvgrpc.errors import StoreUnavailable
from kvgrpc.model import RankRef
from kvgrpc.registry.acceptance import MAX_ENGINES, Acceptance
from kvgrpc.registry.model import DEFAULT_TTL, Lease, RankRow
from kvgrpc.registry.store.base import OnChange
from kvgrpc.registry.store.etcd import transactions
from kvgrpc.registry.store.etcd.client import EtcdClient
from kvgrpc.registry.store.etcd.housekeeping import Housekeeping
from kvgrpc.registry.store.etcd.keys import INDEX_BITS, EtcdKeys, etcd_lease
from kvgrpc.registry.store.etcd.renewal import Renewal
from kvgrpc.registry.store.etcd.transactions import NO_FENCE
from kvgrpc.registry.store.etcd.v1 import etcd_pb2 as pb
from kvgrpc.registry.store.etcd.view import EtcdView
from kvgrpc.registry.table import EngineTable
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.security import ClientSecurity
from kvgrpc.rpc.shares import accounts_of_this_call

DEFAULT_PREFIX = "/kvgrpc/registry/"
MAX_ROWS = 1 << 20
# How long a registration may be decided anew because others changed the same engine meanwhile.
WRITE_SECONDS = 5.0
_FIRST_READ_SECONDS = 3.0
_CATCH_UP_SECONDS = 0.05
_NOT_CURRENT_SECONDS = 1.0

_log = logging.getLogger(__name__)


class EtcdStore:
    """See ``Store``. ``endpoints``: members of the cluster, "host:port".

    A row lives on a lease of etcd, one for each request that brought rows, so it outlives every registry and etcd
    itself, and ends when its rank stops to renew it at any of them. What a transaction decides on is compared by it:
    the fence of each rank, and the shape of each engine.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        ttl: float = DEFAULT_TTL,
        prefix: str = DEFAULT_PREFIX,
        security: ClientSecurity | None = None,
    ) -> None:
        self.ttl = ttl
        self._endpoints = tuple(endpoints)
        self._security = security
        self._keys = EtcdKeys(prefix)
        self._on_change: OnChange | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reshaping = asyncio.Lock()

    @property
    def registry_id(self) -> str:
        return self._view.registry_id

    @property
    def table(self) -> EngineTable:
        return self._view.table

    @property
    def warming_up_for(self) -> float:
        return 0.0 if self._view.current else _NOT_CURRENT_SECONDS

    @property
    def healthy(self) -> bool:
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    def rows_by_owner(self) -> dict[tuple[str, str], int]:
        return self._view.owners.rows()

    async def start(self, on_change: OnChange) -> None:
        """Begins to follow etcd; an etcd that is away is waited for in the background."""
        self._on_change = on_change
        self._client = EtcdClient(self._endpoints, self._security)
        self._renewal = Renewal(self._client)
        self._view = EtcdView(self._client, self._keys, self._tell, MAX_ROWS)
        self._acceptance = Acceptance(
            self._view.table,
            lambda rank: self._view.fences.get(rank, NO_FENCE).epoch,
            lambda engine: self.ttl,
            lambda: self.ttl,
            MAX_ROWS,
            MAX_ENGINES,
        )
        housekeeping = Housekeeping(self._client, self._keys, self._view)
        self._tasks = [
            background(self._view.follow(), "etcd-follow"),
            background(housekeeping.run(), "etcd-housekeeping"),
        ]
        await self._view.moved(_FIRST_READ_SECONDS)

    async def close(self) -> None:
        if self._tasks:
            while not all(task.done() for task in self._tasks):
                for task in self._tasks:
                    task.cancel()  # again, where it was taken for that of a call whose channel was left
                await asyncio.wait(self._tasks, timeout=0.1)
            await self._renewal.close()
            await self._client.close()

    async def register(self, rows: Sequence[RankRow]) -> Sequence[Lease]:
        loop = asyncio.get_running_loop()
        end = loop.time() + WRITE_SECONDS
        running: set[int] = set()
        while True:
            self._check_current()
            self._acceptance.check(rows)
            new = [row for row in rows if not self._is_there(row)]
            if new:
                with self._view.owners.room_for(new):
                    running |= await self._put(new)
            elif not (ended := await self._renewal.renew(self._leases_of(rows) - running)) and self._are_there(rows):
                return [Lease(row.ref, self._lease_of(row)) for row in rows]
            elif ended:
                # Their rows are about to go.
                await self._view.moved(_CATCH_UP_SECONDS)
            if loop.time() > end:
                raise self._unavailable("others change the same engines all the time")

    async def keep_alive(self, lease_ids: Sequence[int]) -> list[int]:
        self._check_current()
        known = [lease_id for lease_id in lease_ids if self._view.knows_lease(lease_id)]
        ended = await self._renewal.renew(map(etcd_lease, known))
        return [
            lease_id for lease_id in lease_ids if etcd_lease(lease_id) in ended or not self._view.knows_lease(lease_id)
        ]

    async def deregister(self, refs: Iterable[RankRef]) -> int:
        self._check_current()
        different = list(dict.fromkeys(refs))  # etcd takes a key once in a transaction
        end = asyncio.get_running_loop().time() + WRITE_SECONDS
        removed = 0
        for first in range(0, len(different), transactions.ROWS_PER_TRANSACTION):
            removed += await self._remove(different[first : first + transactions.ROWS_PER_TRANSACTION], end)
        return removed

    async def _put(self, rows: Sequence[RankRow]) -> set[int]:
        """Puts all rows on one lease, which it returns, or none: then others were quicker, and it is decided anew."""
        if transactions.reshapes(self._view, rows):
            async with self._reshaping:
                # One at a time: of the many ranks of a new engine only the first brings its shape.
                if engines := transactions.reshapes(self._view, rows):
                    return await self._put_on_lease(rows, engines)
        return await self._put_on_lease(rows, ())

    async def _put_on_lease(self, rows: Sequence[RankRow], engines: Sequence[str]) -> set[int]:
        # Whoever names a lease renews it, and no scope is asked for: so nobody can guess one.
        lease = secrets.randbits(62 - INDEX_BITS) << INDEX_BITS or 1 << INDEX_BITS
        await self._client.grant(lease, math.ceil(self.ttl))
        try:
            revision = await self._write(rows, engines, lease)
        except _Refused:
            await self._client.revoke(lease)
            await self._view.moved(_CATCH_UP_SECONDS)
            return set()
        if not await self._view.reached(revision, WRITE_SECONDS):
            raise self._unavailable("it does not say what changes")
        return {lease}

    async def _write(self, rows: Sequence[RankRow], engines: Sequence[str], lease: int) -> int:
        """The revision of the last transaction. What was put before a refusal ends with the lease."""
        shapes: dict[str, int] = {}
        for engine in engines:
            group = [row for row in rows if row.ref.rank.engine == engine]
            shapes[engine] = await self._transact(transactions.reshaping(self._keys, self._view, engine, group))
        revision = 0
        for chunk in transactions.chunks(rows):
            request = transactions.registration(self._keys, self._view, chunk, lease, shapes, _owner_of_this_call())
            revision = await self._transact(request)
        return revision

    async def _remove(self, refs: Sequence[RankRef], end: float) -> int:
        """Removes those that are there, until ``end``, and returns how many. One that another replica removed or that
        registered anew meanwhile is no longer there, and costs the others nothing."""
        while rows := self._rows_of(refs):
            revisions = [self._view.fences.get(row.ref.rank, NO_FENCE).revision for row in rows]
            try:
                revision = await self._transact(transactions.removal(self._keys, rows, revisions))
            except _Refused:
                if asyncio.get_running_loop().time() > end:
                    raise self._unavailable("others change the same engines all the time") from None
                await self._view.moved(_CATCH_UP_SECONDS)
            else:
                await self._view.reached(revision, WRITE_SECONDS)
                return len(rows)
        return 0

    async def _transact(self, request: pb.TxnRequest) -> int:
        """The revision that it made. Raises _Refused when what it was decided on has changed."""
        response = await self._client.transact(request)
        if not response.succeeded:
            raise _Refused
        return response.header.revision

    def _is_there(self, row: RankRow) -> bool:
        known = self._view.table.leased(row.ref.rank)
        # One that somebody copied without its lease could never be renewed.
        return known is not None and known.row == row and etcd_lease(known.lease_id) != 0

    def _are_there(self, rows: Sequence[RankRow]) -> bool:
        return all(map(self._is_there, rows))

    def _lease_of(self, row: RankRow) -> int:
        known = self._view.table.leased(row.ref.rank)
        assert known is not None
        return known.lease_id

    def _rows_of(self, refs: Sequence[RankRef]) -> list[RankRow]:
        found = [self._view.table.leased(ref.rank) for ref in refs]
        return [leased.row for leased, ref in zip(found, refs, strict=True) if leased and leased.row.ref == ref]

    def _leases_of(self, rows: Sequence[RankRow]) -> set[int]:
        return {etcd_lease(self._lease_of(row)) for row in rows}

    def _check_current(self) -> None:
        if not self._view.current:
            raise self._unavailable("it is not reached at this moment")

    def _unavailable(self, why: str) -> StoreUnavailable:
        return self._client.unavailable(self._client.address, why)

    def _tell(self) -> None:
        changes = self._view.table.take_changes()
        if changes and self._on_change is not None:
            self._on_change(changes)


def _owner_of_this_call() -> tuple[str, str]:
    """Its caller, and the host that it comes from where that is not the caller's name."""
    accounts = accounts_of_this_call(connections=False)
    return (accounts[0][0] if accounts else "", accounts[1][1] if len(accounts) > 1 else "")


class _Refused(Exception):
    """A transaction whose comparisons did not hold."""
