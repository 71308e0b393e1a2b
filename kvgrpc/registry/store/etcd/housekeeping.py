"""Forgets what ranks and engines left behind that have been gone for an hour: their fences and shapes."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

from kvgrpc.errors import KvGrpcError
from kvgrpc.registry.store.etcd import transactions
from kvgrpc.registry.store.etcd.client import EtcdClient
from kvgrpc.registry.store.etcd.keys import EtcdKeys
from kvgrpc.registry.store.etcd.view import EtcdView

LOOK_SECONDS = 60.0
FORGET_SECONDS = 3_600.0
_KEYS_AT_A_TIME = 100

_log = logging.getLogger(__name__)


class Housekeeping:
    """Every registry does it: a key that another one removed before, or that was written again, is left alone."""

    def __init__(
        self, client: EtcdClient, keys: EtcdKeys, view: EtcdView, forget_seconds: float = FORGET_SECONDS
    ) -> None:
        self._client = client
        self._keys = keys
        self._view = view
        self._forget_seconds = forget_seconds
        self._idle_since: dict[bytes, float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look(asyncio.get_running_loop().time)
            except KvGrpcError as error:
                _log.info("what is left of ranks that are gone stays for now: %s", error.message)
            except Exception:
                _log.exception("forgetting ranks that are gone failed")

    async def look(self, clock: Callable[[], float]) -> int:
        """Removes the keys that have been idle for long enough; how many."""
        idle = self._idle()
        now = clock()
        self._idle_since = {key: self._idle_since.get(key, now) for key in idle}
        due = [key for key, since in self._idle_since.items() if now - since >= self._forget_seconds]
        removed = 0
        for first in range(0, len(due), _KEYS_AT_A_TIME):
            found = {key: idle[key] for key in itertools.islice(due, first, first + _KEYS_AT_A_TIME)}
            response = await self._client.transact(transactions.forgetting(found))
            removed += len(found) if response.succeeded else 0
        return removed

    def _idle(self) -> dict[bytes, int]:
        """Keys of ranks and engines that are not there, with the revisions that wrote them."""
        view, table = self._view, self._view.table
        fences = {
            self._keys.fence(rank): fence.revision for rank, fence in view.fences.items() if table.leased(rank) is None
        }
        shapes = {
            self._keys.shape(engine): revision
            for engine, revision in view.shapes.items()
            if table.engine(engine) is None
        }
        return fences | shapes
