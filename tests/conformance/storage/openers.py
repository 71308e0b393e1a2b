"""The backends that run the suite, each freshly opened."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvgrpc.prefetch.storage import open_backend
from kvgrpc.prefetch.storage.base import StorageBackend
from tests.faults.storage import FaultyBackend, memory_backend

Opener = Callable[[pytest.TempPathFactory], StorageBackend]

OPENERS: dict[str, Opener] = {
    "memory": lambda folders: memory_backend(),
    "without a fault": lambda folders: FaultyBackend(memory_backend()),
    "file": lambda folders: open_backend("file", {"path": str(folders.mktemp("file"))}),
    "file past the page cache": lambda folders: open_backend(
        "file", {"path": str(folders.mktemp("direct")), "direct": True, "sync": True, "max_bytes": "64MB"}
    ),
}
