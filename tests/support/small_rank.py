"""Configuration of a prefill of a few pages, on a data plane that the test has."""

from __future__ import annotations

from typing import Any

from kvgrpc.model import Pool, PoolKind, Region, Role
from kvgrpc.server import RankConfig

PAGES, PAGE_BYTES = 8, 4096


def small_rank(plane: Any, **changes: Any) -> RankConfig:
    address = plane.allocate(PAGES * PAGE_BYTES)
    pool = Pool("kv", PoolKind.KV, 16, PAGES, "float32", (Region(0, "kv", address, PAGE_BYTES, PAGE_BYTES),))
    settings = {"engine": "P", "role": Role.PREFILL, "pools": (pool,), "data_plane": plane, **changes}
    return RankConfig(**settings)
