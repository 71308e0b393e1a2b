"""Pages of other tensor-parallel sizes land in memory of their own, and the sizes are few."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvgrpc.errors import TooManyRequests
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.server.cache.landings import MOST_SIZES, Landings


def test_engines_of_ever_other_sizes_take_no_memory_without_end() -> None:
    taken: list[int] = []

    def take(holder: Any) -> Any:
        taken.append(holder.tp_size)
        return SimpleNamespace(pool=SimpleNamespace(pages=4), use=lambda: ())

    def receive(memory: Any, most: int) -> Any:
        return SimpleNamespace(start=lambda: None, draining=False)

    staging = cast(Any, SimpleNamespace(landing=SimpleNamespace(size=4), use=lambda: ()))
    landings = Landings(staging, take, receive, LoopThread.shared())
    sizes = [2**power for power in range(MOST_SIZES)]
    try:
        for size in sizes:
            landings.of(cast(Any, SimpleNamespace(engine="E", tp_size=size, common=False)))
        with pytest.raises(TooManyRequests):
            landings.of(cast(Any, SimpleNamespace(engine="F", tp_size=1024, common=False)))
        for size in sizes:
            landings.of(cast(Any, SimpleNamespace(engine="E", tp_size=size, common=False)))
        assert taken == sizes
    finally:
        landings.forget()
