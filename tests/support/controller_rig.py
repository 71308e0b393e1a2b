"""A controller over storage that fails as a test says, and what its pages hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvgrpc.prefetch.model import NotEnoughPages, OperationState, PrefetchLimits
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.shape import PageShape
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.votes import Agreement
from kvgrpc.prefetch.runtime.controller import CacheController
from kvgrpc.prefetch.tree.keeper import CompletionQueue
from tests.support.faults.storage import Fault, FaultyBackend, memory_backend

SHAPE = PageShape.mha(2, 4, 1, 8, "float16")
LIMITS = PrefetchLimits(threshold_tokens=4, batch_pages=4, storage_timeout=0.3, readers=2)


def hashes(count: int, name: str = "a") -> list[str]:
    return [f"{name}{number:04d}" for number in range(count)]


def content(page_hash: str) -> Any:
    return np.random.default_rng(list(page_hash.encode())).integers(0, 256, SHAPE.page_bytes, dtype=np.uint8)


class Panic(BaseException):
    """As libraries in Rust raise it: no Exception."""


@dataclass
class Rig:
    """A controller over a backend whose faults a test decides."""

    limits: PrefetchLimits = LIMITS
    pages: int = 64
    writes: Callable[[str], bool] = lambda page_hash: True
    storage: FaultyBackend = field(default_factory=lambda: FaultyBackend(memory_backend()))
    agreement: Agreement | None = None

    def __post_init__(self) -> None:
        self.host = HostPool(SHAPE, self.pages)
        self.controller = CacheController(
            self.host,
            self.storage,
            lambda page_hash, extra_key: f"key-{page_hash}",
            agreement=self.agreement,
            limits=self.limits,
            writes=self.writes,
        )

    @property
    def queue(self) -> CompletionQueue:
        assert isinstance(self.controller.keeper, CompletionQueue)
        return self.controller.keeper

    def on_host(self, names: Sequence[str]) -> Any:
        pages = self.host.table.take(len(names))
        assert not isinstance(pages, NotEnoughPages)
        for page, name in zip(pages, names, strict=True):
            self.host.set_flat(int(page), content(name))
        self.host.table.commit(pages)
        return pages

    def stored(self, names: Sequence[str]) -> list[str]:
        """Storage has them and the host has not."""
        pages = self.on_host(names)
        operation = self.ended(self.controller.write_storage(names, pages))
        assert operation.state is OperationState.DONE
        self.host.table.release(pages)
        return list(names)

    def ended(self, operation: Operation) -> Operation:
        assert operation.wait(20), operation.state
        return operation

    def fault(self, call: str, faults: dict[str, Fault]) -> None:
        by_key = {f"key-{name}": fault for name, fault in faults.items()}
        self.storage.fault = lambda which, key: by_key.get(key) if which == call else None

    def once(self, call: str, name: str, fault: Fault) -> None:
        """The fault happens the first time only."""
        left = [fault]
        self.storage.fault = lambda which, key: left.pop() if which == call and key == f"key-{name}" and left else None

    def take(self) -> list[str]:
        """What landed, its bytes compared; the pages are freed."""
        found = []
        for landed in self.queue.take():
            for page, name in zip(landed.pages, landed.hashes[landed.covered :], strict=True):
                assert (self.host.flat(int(page)) == content(name)).all(), name
                found.append(name)
            self.host.table.release(landed.pages)
        return found

    def nothing_is_left(self) -> None:
        assert self.controller.occupied == 0
        assert not self.controller.book.open()
        assert self.host.table.counts() == {"free": self.pages, "reserved": 0, "present": 0, "read": 0}

    def close(self) -> None:
        self.storage.release()
        assert self.controller.close(20)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()
