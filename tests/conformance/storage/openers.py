"""The backends that run the suite, each freshly opened."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvgrpc.prefetch.storage.base import StorageBackend
from tests.faults.storage import FaultyBackend, memory_backend

Opener = Callable[[pytest.TempPathFactory], StorageBackend]

OPENERS: dict[str, Opener] = {
    "memory": lambda folders: memory_backend(),
    "without a fault": lambda folders: FaultyBackend(memory_backend()),
}
