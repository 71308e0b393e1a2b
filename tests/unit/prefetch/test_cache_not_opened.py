"""A cache that cannot be opened leaves nothing behind: an engine may try again for as long as its storage is away."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import RankId, RankRef
from kvgrpc.prefetch.config import PrefetchConfig
from kvgrpc.prefetch.manager import PrefetchManager
from kvgrpc.prefetch.storage.base import MemoryRange
from kvgrpc.prefetch.storage.flat import FlatBackend
from tests.support.controller_rig import SHAPE
from tests.support.faults.storage import MemoryStore


class TakesNoMemory(FlatBackend):
    """Refuses the host pool."""

    def register(self, memory: Sequence[MemoryRange]) -> None:
        raise OSError("no memory is registered here")


def host_pools() -> int:
    """Descriptors of host pools that this process has open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was the one that lists them
            found.append(os.readlink(descriptor))
    return sum("kvgrpc-host-pool" in each for each in found)


@pytest.mark.parametrize(
    ("storage", "error"),
    [
        ({"storage": "file", "storage_config": {"pth": "/x"}}, InvalidRequest),
        ({"storage": TakesNoMemory("refuses", MemoryStore())}, OSError),
    ],
    ids=["storage that cannot be opened", "storage that refuses the pool"],
)
def test_its_host_memory_is_given_back(storage: dict[str, Any], error: type[Exception]) -> None:
    before = host_pools()
    with pytest.raises(error):
        PrefetchManager(PrefetchConfig(model="m", shape=SHAPE, host_pages=8, **storage), RankRef(RankId("E"), 1))
    assert host_pools() == before
