"""A rank of a replica in a process of its own, for tests that kill and stop it: ``TP FOLDER LISTEN LEADER SHAPE``.

Takes orders as lines of JSON, answers each with one; ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvgrpc.model import Layout
from kvgrpc.prefetch.model import OperationKind
from kvgrpc.prefetch.protocol.votes import Stage
from kvgrpc.prefetch.storage import open_backend
from tests.support.cache_serving import LIMITS, REPLICATED, SHAPE, CacheRank, hashes_of, open_cache_rank, prompt
from tests.support.faults.storage import Fault, FaultyBackend

RANKS = 3
AGREEMENT_SECONDS = 2.0
DOUBT_SECONDS = 12.0


class Orders:
    """Each public method is an order; its answer is what can be said in JSON."""

    def __init__(self, rank: CacheRank, storage: FaultyBackend) -> None:
        self._rank = rank
        self._storage = storage
        self._gate = threading.Event()
        self._book = rank.manager.controller.book

    def store(self, first: int, pages: int) -> dict[str, Any]:
        """Storage has the prompt, the host has not."""
        operation = self._rank.back_up(self._filled(first, pages))
        assert operation.wait(20)
        self._rank.evict()
        return {"state": operation.state.name}

    def write(self, first: int, pages: int) -> dict[str, Any]:
        """This rank writes its share of the prompt; answers when that has begun."""
        return {"name": self._rank.back_up(self._filled(first, pages)).operation_id}

    def fill(self, first: int, pages: int) -> dict[str, Any]:
        """The host has the prompt."""
        self._filled(first, pages)
        return {}

    def back_up(self, first: int, pages: int) -> dict[str, Any]:
        """For all ranks, as a remote client's StartBackup."""
        return {"name": self._rank.start(OperationKind.BACKUP, hashes_of(prompt(pages, first))).operation_id}

    def stored(self, first: int, pages: int) -> dict[str, Any]:
        """How much of the prompt storage has for this rank."""
        hashes = hashes_of(prompt(pages, first))
        return {"pages": self._rank.manager.controller.count_in_storage(hashes, 10.0)}

    def outcomes(self, name: str) -> dict[str, Any]:
        """How many of an operation's pages ended in which way."""
        row = self._book.row(self._book.get(name))
        return {"state": row.state.name, **Counter(each.name for each in row.outcomes)}

    def _filled(self, first: int, pages: int) -> list[str]:
        hashes = hashes_of(prompt(pages, first))
        self._rank.fill(hashes)
        return hashes

    def slow(self, call: str, seconds: float) -> dict[str, Any]:
        """Each such call of storage takes so long; 0 ends that."""
        self._storage.fault = lambda which, key: Fault(delay=seconds) if seconds and which == call else None
        return {}

    def hold(self, call: str) -> dict[str, Any]:
        """Each such call of storage waits until ``let_go``."""
        self._gate = gate = threading.Event()

        def fault(which: str, key: str) -> Fault | None:
            if which == call:
                gate.wait(30.0)
            return None

        self._storage.fault = fault
        return {}

    def let_go(self) -> dict[str, Any]:
        self._storage.fault = lambda which, key: None
        self._gate.set()
        return {}

    def start(self, first: int, pages: int) -> dict[str, Any]:
        """For all ranks, as a remote client's StartPrefetch."""
        return {"name": self._rank.start(OperationKind.PREFETCH, hashes_of(prompt(pages, first))).operation_id}

    def prefetch(self, name: str, first: int, pages: int) -> dict[str, Any]:
        """As this rank's own scheduler."""
        self._rank.manager.controller.prefetch(hashes_of(prompt(pages, first)), operation_id=name)
        return {}

    def state(self, name: str) -> dict[str, Any]:
        known = {operation.operation_id: operation for operation in self._book.all()}
        return {"state": known[name].state.name if name in known else ""}

    def last_votes(self, name: str) -> dict[str, Any]:
        """How many ranks have told this leader how many pages arrived."""
        assert self._rank.manager.leader is not None
        ballot = self._rank.manager.leader._core._ballots.get((name, Stage.COMPLETED))
        return {"votes": 0 if ballot is None else len(ballot.votes)}

    def wait(self, name: str) -> dict[str, Any]:
        """Its end; what it brought has its own bytes, and leaves the host again."""
        operation = self._book.get(name)
        began = time.monotonic()
        ended = operation.wait(40.0)
        row = self._book.row(operation)
        if ended and row.completed and row.kind is OperationKind.PREFETCH:
            self._rank.assert_bytes(operation.hashes[: row.completed])
        self._rank.evict()
        waited = time.monotonic() - began
        return {"state": row.state.name, "stop": row.stop.name, "completed": row.completed, "waited": waited}

    def info(self) -> dict[str, Any]:
        manager = self._rank.manager
        leader = manager.leader
        return {
            "live": manager.agreeing_ranks(),
            "ballots": 0 if leader is None else leader._core.open_ballots,
            "open": len(self._book.open()),
            "reserved": manager.host.table.counts()["reserved"],
            "occupied": manager.controller.occupied,
            "healthy": manager.healthy,
        }


def main() -> None:
    tp, folder, listen, leader, shape = int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:6]
    storage = FaultyBackend(open_backend("file", {"path": str(folder)}))
    rank = open_cache_rank(
        folder,
        storage=storage,
        layout=Layout(tp=RANKS),
        tp=tp,
        listen=listen,
        leader=leader,
        shape=REPLICATED if shape == "mla" else SHAPE,
        limits=replace(LIMITS, agreement_timeout=AGREEMENT_SECONDS, doubt_timeout=DOUBT_SECONDS),
    )
    orders = Orders(rank, storage)
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
    storage.close(5.0)


if __name__ == "__main__":
    main()
