"""The state of a follower and the contents of its cache, as people and programs read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgrpc.client import SyncEventFollower


def held(blocks: Mapping[str, int]) -> str:
    """Blocks in each medium: "1 in CPU, 3 in GPU"."""
    return ", ".join(f"{count} in {medium}" for medium, count in blocks.items()) or "no blocks"


def standing_fields(follower: SyncEventFollower) -> dict[str, Any]:
    """For JSON, by the names that messages have there; 64-bit numbers are text."""
    fresh, (engine, dp) = follower.freshness, follower.cache
    return {
        "engine": engine,
        "dp": dp,
        "state": fresh.state.value,
        "logId": fresh.log_id,
        "nextSequence": str(fresh.next_sequence),
        "lagBatches": str(fresh.lag),
        "idleSeconds": fresh.idle_time,
        "whole": fresh.whole,
        "blocks": follower.blocks,
        "lastError": str(follower.last_error or ""),
    }
