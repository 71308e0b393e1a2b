"""An engine in a process of its own that caches what the requests of a trace leave behind, and tells it."""

from __future__ import annotations

import time
from typing import Any

from tests.support.prefix_cache import PrefixCache
from tests.support.rank_host import RankHost, RankProcess

PREFILL_TOKENS_PER_SECOND = 100_000.0


class TracedHost(RankHost):
    """A rank whose cache is that of a prefix cache with these tiers."""

    def __init__(self, engine: str, role: str, settings: dict[str, Any]) -> None:
        self._cache = PrefixCache(settings.pop("device_blocks"), settings.pop("host_blocks"))
        super().__init__(engine, role, settings)
        self.rank.load.say(prefill_tokens_per_second=PREFILL_TOKENS_PER_SECOND, waiting_tokens=0)

    def request(self, blocks: list[int]) -> None:
        """Prefills a request with these blocks."""
        from kvgrpc.events import KVEventBatch

        happened = self._cache.request(blocks)
        if happened:
            self.rank.events.publish(KVEventBatch(time.time(), happened))


class TracedEngine(RankProcess):
    """``TracedHost`` as a process."""

    def __init__(self, engine: str, registry: str, device_blocks: int = 4_000, host_blocks: int = 8_000) -> None:
        super().__init__(
            engine,
            "PREFILL",
            registry=registry,
            events={"publisher": "null"},
            device_blocks=device_blocks,
            host_blocks=host_blocks,
        )

    def opened(self) -> TracedEngine:
        super().opened()
        return self

    def _kind(self) -> type[RankHost]:
        return TracedHost
