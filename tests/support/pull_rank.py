"""A rank with a cache that lends and takes, in a process of its own: ``ENGINE REGISTRY PLANE LISTEN LENDS NAMESPACE``.

LISTEN and LENDS are where it serves and where its pages are lent, NAMESPACE that of a network, or "".

Takes orders as lines of JSON, answers each with one; ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvgrpc.prefetch.model import OperationKind
from kvgrpc.prefetch.pools.shape import PageShape
from kvgrpc.pull.model import PullConfig, PullDirection
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.server import ClientSecurity, ServerSecurity
from tests.support import cache_serving
from tests.support.cache_serving import LIMITS, PAGE_TOKENS, CacheRank, hashes_of, open_cache_rank, prompt
from tests.support.link import enter

# Pages large enough that a pull of many takes a while.
PAGE = PageShape.mha(layers=8, page_tokens=PAGE_TOKENS, heads=8, head_dim=256, dtype="float16")
HOST_PAGES = 2048
STALL_SECONDS = 2.0


class Orders:
    """Each public method is an order; its answer is what can be said in JSON."""

    def __init__(self, rank: CacheRank) -> None:
        self._rank = rank
        self._occupied: dict[str, list[int]] = {}

    def fill(self, first: int, pages: int) -> dict[str, Any]:
        """The host has the prompt; where there is no room for it, it has nothing else any more."""
        if self._rank.manager.host.table.counts()["free"] < pages:
            self._rank.evict()
        self._rank.fill(hashes_of(prompt(pages, first)))
        return {}

    def knows(self) -> dict[str, Any]:
        """How many ranks it would ask."""
        return {"holders": len(self._peer._holders.candidates())}

    def pull(self, first: int, pages: int, keep: bool = False) -> dict[str, Any]:
        """The prompt, as a scheduler orders it; what came has the right bytes. ``keep``: and is lent to others."""
        hashes = hashes_of(prompt(pages, first))
        before = self._rank.manager.controller.keeper.leading(hashes)
        began = time.monotonic()
        operation = self._rank.start(OperationKind.PREFETCH, hashes)
        assert operation.wait(60.0)
        took = time.monotonic() - began
        row = self._rank.manager.controller.book.row(operation)
        self._rank.assert_bytes(hashes[: row.completed])
        reserved = self._rank.manager.host.table.counts()["reserved"]
        if not keep:
            self._rank.evict()
        came = max(0, row.completed - before)
        return {"state": row.state.name, "completed": row.completed, "came": came, "took": took, "reserved": reserved}

    def evict(self) -> dict[str, Any]:
        """The host has nothing any more."""
        return {"evicted": self._rank.evict()}

    def drain(self) -> dict[str, Any]:
        """It leaves: what is on its way has no time left."""
        LoopThread.shared().run(self._rank.rank.drain(0.0), 30.0)
        return {}

    def occupy(self, direction: str) -> dict[str, Any]:
        """Every staging page of a direction is somebody's."""
        self._occupied[direction] = getattr(self._peer._staging, direction).take(1 << 20)
        return {"pages": len(self._occupied[direction])}

    def free(self, direction: str) -> dict[str, Any]:
        getattr(self._peer._staging, direction).give_back(self._occupied.pop(direction))
        return {}

    def lent(self) -> dict[str, Any]:
        """Staging pages that are out, of either direction, and pages of the cache that somebody reads."""
        staging = self._peer._lender._staging
        read = self._rank.manager.host.table.counts()["read"]
        return {"lending": staging.lending.taken, "landing": staging.landing.taken, "read": read}

    def gave(self) -> dict[str, Any]:
        """Pages that it lent and that were written since it was opened, and rooms of which some were not."""
        lent = [row for row in self._peer.book.rows() if row.direction is PullDirection.LENT]
        return {"pages": sum(row.done for row in lent), "failed": sum(row.failure is not None for row in lent)}

    def awaited(self) -> dict[str, Any]:
        """Ranks that it lost and dials all the same."""
        return {"ranks": len(self._peer._landings.managers[0]._resolver._awaited)}

    @property
    def _peer(self) -> Any:
        return self._rank.rank._parts.cache_peer


def main() -> None:
    engine, registry, plane, listen, lends, namespace = sys.argv[1:]
    if namespace:
        enter(namespace)
    cache_serving.SHAPE = PAGE
    rank = open_cache_rank(
        Path(),
        storage=None,
        plane_name=plane,
        engine=engine,
        registry=registry,
        listen=listen,
        server_security=ServerSecurity(insecure=True),
        client_security=ClientSecurity(insecure=True),
        shape=PAGE,
        host_pages=HOST_PAGES,
        limits=replace(LIMITS, batch_pages=64, storage_timeout=20.0, occupancy=1.0),
        pull=PullConfig(staging_pages=256, stall_timeout=STALL_SECONDS, listen=lends),
    )
    orders = Orders(rank)
    print(json.dumps({"address": rank.address}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            print(json.dumps(getattr(orders, order.pop("do"))(**order)), flush=True)
        except BaseException:
            # The rank's own threads would keep the process, and who waits for the answer, for long.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    rank.close()


if __name__ == "__main__":
    main()
