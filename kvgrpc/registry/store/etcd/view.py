"""One registry's knowledge of the rows in etcd: read once, then followed."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import grpc

from kvgrpc.errors import KvGrpcError
from kvgrpc.model import RankId
from kvgrpc.observability import metrics
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.registry import wire
from kvgrpc.registry.model import Absence, RankRow, engine_differences
from kvgrpc.registry.owners import Owners
from kvgrpc.registry.store.etcd.client import CALL_SECONDS, EtcdClient, WatchCall
from kvgrpc.registry.store.etcd.keys import EtcdKeys, after, lease_id
from kvgrpc.registry.store.etcd.transactions import NO_FENCE, Fence, naming
from kvgrpc.registry.store.etcd.v1 import etcd_pb2 as pb
from kvgrpc.registry.table import EngineTable
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.shares import Account
from kvgrpc.rpc.within import within
from kvgrpc.v1 import registry_service_pb2

PROGRESS_SECONDS = 1.0
IDLE_TIMEOUT_SECONDS = 3.0
_PAUSE_SECONDS = 0.2

_log = logging.getLogger(__name__)


class EtcdView:
    """A table of rows that follows etcd, with the fences and shapes beside them. Belongs to one event loop.

    ``current``: it follows now. What it knew stands while it does not.
    """

    def __init__(self, client: EtcdClient, keys: EtcdKeys, on_change: Callable[[], None], max_rows: int) -> None:
        self.table = EngineTable()
        self.fences: dict[RankId, Fence] = {}
        self.shapes: dict[str, int] = {}
        self.registry_id = ""
        self.revision = 0
        self.current = False
        self._client = client
        self._keys = keys
        self._on_change = on_change
        self._cluster = 0
        # How many rows each has: one, but where somebody copied rows, whose numbers are alike or are none.
        self._leases = Counter[int]()
        self.owners = Owners(self.table, max_rows)
        self.pools = wire.PoolCache()
        self._moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._away = False
        self._lines = RateLimited(_log)

    def knows_lease(self, lease: int) -> bool:
        return lease in self._leases

    async def follow(self) -> None:
        """For ever: through broken streams, compactions, and an etcd that lost its data."""
        while True:
            try:
                await self._follow_once()
            except KvGrpcError as error:
                self._say_it_is_away(error)
            except Exception:
                self._lines.exception("following", "following etcd failed")
            self.current = False
            await asyncio.sleep(_PAUSE_SECONDS)

    async def reached(self, revision: int, seconds: float) -> bool:
        """Waits until everything up to the revision is in the table; False after so many seconds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.revision < revision:
            if end <= loop.time():
                return False
            await asyncio.wait([self._moved], timeout=end - loop.time())
        return True

    async def moved(self, seconds: float) -> None:
        """Waits for the next change, or so many seconds."""
        await asyncio.wait([self._moved], timeout=seconds)

    async def _follow_once(self) -> None:
        if not self.revision:
            await self._load()
        if not self.registry_id:
            await self._client.transact(naming(self._keys, secrets.token_hex(8)))
        channel, call = self._client.channel, self._client.watch()
        try:
            await self._watch(channel, call)
        finally:
            call.cancel()

    async def _load(self) -> None:
        """Takes all that is there now in the place of what was known."""
        header, found = await self._client.read(self._keys.prefix)
        before, self.fences, self.shapes = self.fences, {}, {}
        there = {key_value.key: key_value for key_value in found}

        def removed_at(rank: RankId) -> int:
            """The revision in which its fence was written again for the same epoch, as a removal does; 0: in none."""
            fence, known = there.get(self._keys.fence(rank)), before.get(rank, NO_FENCE)
            is_rewritten = fence is not None and fence.mod_revision > known.revision
            return fence.mod_revision if fence and is_rewritten and int(fence.value) == known.epoch else 0

        # Of the table: rows that somebody copied without their leases share one of ours.
        known = self.table.list_engines(None, "", self.table.engines, rows=True)
        ranks = [row.ref.rank for engine in known for row in engine.rows]
        gone = [rank for rank in ranks if self._keys.row(rank) not in there]
        puts = [pb.Event(type=pb.Event.PUT, kv=key_value) for key_value in found]
        self._apply([*puts, *(self._gone(rank, removed_at(rank)) for rank in gone)])
        self._cluster = header.cluster_id
        self._move(header.revision)

    async def _watch(self, channel: grpc.aio.Channel, call: WatchCall) -> None:
        with self._client.errors(channel):
            start = pb.WatchCreateRequest(
                key=self._keys.prefix,
                range_end=after(self._keys.prefix),
                start_revision=self.revision + 1,
                fragment=True,
            )
            await call.write(pb.WatchRequest(create_request=start))
            created = await within(CALL_SECONDS, call.read())
        if not isinstance(created, pb.WatchResponse) or not created.created:
            raise self._client.unavailable(self._client.address, "it did not begin a watch")
        if created.header.cluster_id != self._cluster or created.header.revision < self.revision:
            _log.warning("etcd lost its data, or is another one: everything is read again")
            self.revision = 0
            return
        asking = background(self._ask_for_progress(call), "etcd-progress")
        try:
            self.current = not created.canceled
            self._say_it_is_back()
            await self._read_events(channel, call, created)
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    async def _read_events(self, channel: grpc.aio.Channel, call: WatchCall, created: pb.WatchResponse) -> None:
        events: list[pb.Event] = []
        response = created
        while not response.canceled:
            events += response.events
            if events and not response.fragment:
                self._apply(events)
                self._move(events[-1].kv.mod_revision)
                events = []
            with self._client.errors(channel):
                read = await within(IDLE_TIMEOUT_SECONDS, call.read())
            if not isinstance(read, pb.WatchResponse):
                raise self._client.unavailable(self._client.address, "it ended the watch")
            response = read
        _log.warning("etcd ended a watch (%s): everything is read again", response.cancel_reason or "compacted")
        self.revision = 0

    async def _ask_for_progress(self, call: WatchCall) -> None:
        """So that a member which hangs is noticed: an answer comes even when nothing changes."""
        while not call.done():
            await asyncio.sleep(PROGRESS_SECONDS)
            try:
                await call.write(pb.WatchRequest(progress_request=pb.WatchProgressRequest()))
            except (asyncio.InvalidStateError, Exception):
                return

    def _apply(self, events: Sequence[pb.Event]) -> None:
        """Applies what is gone or replaced first: an engine that changed its shape must not be there in both."""
        rows: dict[RankId, _Stored | _Gone] = {}
        # A lease that ends only removes; who removes rows otherwise writes something beside it.
        written = {event.kv.mod_revision for event in events if event.type == pb.Event.PUT}
        for event in events:
            try:
                self._read(event, rows, ran_out=event.kv.mod_revision not in written)
            except Exception as error:  # written by somebody else
                _log.error("what stands at %r cannot be read, and is left out: %s", event.kv.key, error)
        for rank, found in rows.items():
            self._remove(rank, found)
        for found in rows.values():
            if isinstance(found, _Stored):
                self._add(*found)
        metrics.REGISTRY_ROWS.set(self.table.rows)
        self._on_change()

    def _read(self, event: pb.Event, rows: dict[RankId, _Stored | _Gone], *, ran_out: bool) -> None:
        """A row goes to ``rows``, everything else is taken at once."""
        key, put, revision = event.kv.key, event.type == pb.Event.PUT, event.kv.mod_revision
        if key.startswith(self._keys.rows):
            rank = self._keys.rank_of(key)
            rows[rank] = self._row(event.kv) if put else _Gone(ran_out)
        elif key.startswith(self._keys.fences):
            rank = self._keys.rank_of(key)
            if put:
                self.fences[rank] = Fence(int(event.kv.value), revision)
            else:
                self.fences.pop(rank, None)
        elif key.startswith(self._keys.shapes):
            if put:
                self.shapes[self._keys.engine_of(key)] = revision
            else:
                self.shapes.pop(self._keys.engine_of(key), None)
        elif key == self._keys.id and put:
            self.registry_id = event.kv.value.decode(errors="replace")

    def _row(self, key_value: pb.KeyValue) -> _Stored:
        stored = pb.StoredRow.FromString(key_value.value)
        row = wire.row_from_pb(registry_service_pb2.RankRow.FromString(stored.row), self.pools)
        owner = (stored.caller, stored.host) if stored.host else (stored.caller,) if stored.caller else ()
        return _Stored(row, lease_id(key_value.lease, stored.index), tuple(owner[: n + 1] for n in range(len(owner))))

    def _remove(self, rank: RankId, found: _Stored | _Gone) -> None:
        known = self.table.leased(rank)
        if known is None:
            return
        self._leases[known.lease_id] -= 1
        if not self._leases[known.lease_id]:
            del self._leases[known.lease_id]
        if isinstance(found, _Stored) and found.row == known.row:
            known.lease_id = found.lease
            self._leases[known.lease_id] += 1
        else:
            self.owners.remove(rank)
            self.table.remove(known)
            if isinstance(found, _Gone):
                metrics.REGISTRY_EXPIRED.inc(found.ran_out)
                absence = Absence.LEASE_RAN_OUT if found.ran_out else Absence.DEREGISTERED
                self.table.departures.note(known.row.ref, absence, time.time())

    def _add(self, row: RankRow, lease: int, owner: tuple[Account, ...]) -> None:
        if self.table.leased(row.ref.rank) is not None:
            return
        engine = self.table.engine(row.ref.rank.engine)
        shape = engine.shape if engine is not None else None
        if shape is not None and engine_differences(shape.role, shape.layout, shape.model, row):
            _log.error("%s has another shape than its engine, and is left out", row.ref)
            return
        self.owners.add(row.ref.rank, owner)
        self.table.add(row, lease, expires_at=float("inf"))
        self._leases[lease] += 1

    def _say_it_is_away(self, error: KvGrpcError) -> None:
        """Once for each time, the start included: a registry without its store serves, and refuses every write."""
        if not self._away:
            why = one_line(error.message)
            self._lines.warning("etcd", f"what changes is not heard of until etcd answers again: {why}")
        self._away = True

    def _say_it_is_back(self) -> None:
        if self._away and self.current:
            self._away = False
            self._lines.say(logging.INFO, "etcd", f"etcd answers again, at {self._client.address}")

    def _gone(self, rank: RankId, revision: int) -> pb.Event:
        return pb.Event(type=pb.Event.DELETE, kv=pb.KeyValue(key=self._keys.row(rank), mod_revision=revision))

    def _move(self, revision: int) -> None:
        self.revision = revision
        moved, self._moved = self._moved, asyncio.get_running_loop().create_future()
        moved.set_result(None)


class _Gone(NamedTuple):
    """Nothing stands there any more. ``ran_out``: its lease did; else somebody removed it."""

    ran_out: bool


class _Stored(NamedTuple):
    """The value at a row's key."""

    row: RankRow
    lease: int
    owner: tuple[Account, ...]
