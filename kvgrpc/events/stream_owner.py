"""Names the rank that publishes the events of an independent KV cache."""

from __future__ import annotations

from kvgrpc.model import RankId


def owns_event_stream(rank: RankId) -> bool:
    """True if it is the one rank of its dp that publishes."""
    return rank.leads
