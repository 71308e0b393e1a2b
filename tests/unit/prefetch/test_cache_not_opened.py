"""A cache that cannot be opened leaves nothing behind: an engine may try again for as long as its storage is away."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import RankId, RankRef
from kvgrpc.prefetch.config import PrefetchConfig
from kvgrpc.prefetch.manager import PrefetchManager
from kvgrpc.prefetch.model import PrefetchLimits
from kvgrpc.prefetch.storage.base import MemoryRange
from kvgrpc.prefetch.storage.flat import FlatBackend
from tests.support.controller_rig import SHAPE
from tests.support.faults.storage import FaultyBackend, MemoryStore, memory_backend


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


class TellsNobody(FaultyBackend):
    """Breaks its promise where somebody wants to hear of the pages that it drops."""

    def on_removed(self, removed: Any) -> Any:
        raise OSError("nobody is told here")


def own_threads() -> set[threading.Thread]:
    """Those of kvgrpc but of its log, one of which comes and goes with what earlier tests wrote."""
    found = [each for each in threading.enumerate() if each.name.startswith("kvgrpc-")]
    return {each for each in found if not each.name.startswith("kvgrpc-log")}


def open_cache(storage: Any) -> PrefetchManager:
    config = PrefetchConfig(
        model="m",
        shape=SHAPE,
        host_pages=8,
        storage=storage,
        listener=lambda *_: None,
        limits=PrefetchLimits(readers=2),
    )
    return PrefetchManager(config, RankRef(RankId("E"), 1))


def test_storage_that_will_not_tell_of_its_pages_leaves_no_thread() -> None:
    storage = TellsNobody(memory_backend())
    threads, pools = own_threads(), host_pools()
    with pytest.raises(OSError, match="nobody"):
        open_cache(storage)
    assert (own_threads(), host_pools()) == (threads, pools)


def test_a_process_that_can_have_no_more_threads_keeps_none_of_those_that_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever of them it is that cannot begin."""
    storage = FaultyBackend(memory_backend())
    threads, pools, start, refused = own_threads(), host_pools(), threading.Thread.start, 0
    for may_begin in range(20):
        began: list[threading.Thread] = []

        def begin(thread: threading.Thread, began: list[threading.Thread] = began, most: int = may_begin) -> None:
            if len(began) == most:
                raise RuntimeError("can't start new thread")
            began.append(thread)
            start(thread)

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", begin)
            try:
                opened = open_cache(storage)
            except RuntimeError:
                refused += 1
                assert (own_threads(), host_pools()) == (threads, pools)
                continue
        assert opened.close() and refused == may_begin > 5
        return
