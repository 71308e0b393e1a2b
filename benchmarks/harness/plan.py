"""How big the work is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of every row. The defaults are those of docs/performance.md; ``quick`` only shows that everything runs.

    ``against``: what hand-offs are compared with, the seeds' protocol or SGLang's own classes.
    """

    against: Literal["seed", "sglang"] = "seed"
    rooms_in_flight: int = 20_000
    sequential_rooms: int = 200
    control_rooms: int = 1_000
    busy_rooms: int = 300
    timed_inits: int = 4_096
    contacts: int = 3
    regions: int = 64
    page_bytes: int = 32 * KIB
    pairs: tuple[int, ...] = (8, 32)
    pair_rooms: int = 2_000
    few_rooms: tuple[int, ...] = (10, 100, 1_000, 10_000)
    room_pages: tuple[int, ...] = (1, 100, 10_000, 100_000)
    idle_seconds: float = 2.0
    concurrent_rooms: int = 64
    concurrent_pages: int = 32
    concurrent_regions: int = 16
    slice_pages: int = 128
    bulk_bytes: int = 256 * MIB
    bulk_repeats: int = 3
    prefetch_pages: int = 1_000
    controller_pages: int = 64_000
    pull_pages: tuple[int, ...] = (1, 100, 10_000)
    pull_tokens: tuple[int, ...] = (128, 512, 2_048, 8_000)
    publishes: int = 4_000
    replay_batches: int = 10_000
    trace_requests: int | None = None
    index_blocks: int = 1_000_000
    index_queries: int = 300
    index_batches: int = 20_000
    native_index_blocks: int = 100_000
    native_index_seconds: float = 5.0
    snapshot_blocks: int = 1_000_000
    registry_ranks: int = 10_000
    registry_watchers: int = 1_000


FULL = Plan()
QUICK = Plan(
    rooms_in_flight=200,
    sequential_rooms=5,
    control_rooms=20,
    busy_rooms=10,
    timed_inits=64,
    contacts=1,
    regions=4,
    pairs=(2,),
    pair_rooms=20,
    few_rooms=(2,),
    room_pages=(1, 3),
    idle_seconds=0.2,
    concurrent_rooms=4,
    concurrent_pages=4,
    concurrent_regions=2,
    slice_pages=4,
    bulk_bytes=2 * MIB,
    bulk_repeats=1,
    prefetch_pages=8,
    controller_pages=300,
    pull_pages=(4,),
    pull_tokens=(40,),
    publishes=100,
    snapshot_blocks=6_400,
    replay_batches=50,
    trace_requests=100,
    index_blocks=8_192,
    index_queries=16,
    index_batches=200,
    native_index_blocks=2_048,
    native_index_seconds=0.5,
    registry_ranks=80,
    registry_watchers=20,
)
