"""KV events of the host and storage tiers: what the hierarchical cache stores and drops, for whoever follows the
rank."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from kvgrpc.events import BlockRemoved, BlockStored, EventPublisher, KVEventBatch
from kvgrpc.hashing import sglang_event_hash
from kvgrpc.model import Tier
from kvgrpc.prefetch.model import OperationKind, PageOutcome
from kvgrpc.prefetch.protocol.operation import Operation

# SGLang's words for the tiers. The device's own events are the engine's.
MEDIUMS = {Tier.HOST: "CPU_PINNED", Tier.STORAGE: "DISK"}
_REMEMBERED = 65_536
# A purge may drop millions of pages; a frame of events is not to grow with it.
_PAGES_OF_AN_EVENT = 65_536


class TierEvents:
    """Tells of both tiers. Called on the cache's threads; it only appends."""

    def __init__(self, publisher: EventPublisher, page_tokens: int) -> None:
        self._publisher = publisher
        self._page_tokens = page_tokens
        self._lock = threading.Lock()
        # What storage dropped lately, and when: a backup tells of its pages at its end, and some may be gone by then.
        self._dropped: OrderedDict[str, float] = OrderedDict()

    def tell(self, tier: Tier, what: str, hashes: Sequence[str], before: str) -> None:
        """A CacheListener."""
        medium = MEDIUMS.get(tier)
        if medium is None:
            return
        if what == "stored":
            self._publish(self._stored(hashes, before, medium))
            return
        for first in range(0, len(hashes), _PAGES_OF_AN_EVENT):
            part = hashes[first : first + _PAGES_OF_AN_EVENT]
            with self._lock:  # over both: what is asked for and told must not fall in between
                if tier is Tier.STORAGE:
                    self._remember(part)
                self._publish(BlockRemoved(_names(part), medium=medium))

    def backup_ended(self, operation: Operation) -> None:
        """Tells of the pages that a backup wrote, a run of them as one event; for each change of an operation."""
        if operation.kind is not OperationKind.BACKUP or not operation.ended:
            return
        events: list[BlockStored | BlockRemoved] = []
        hashes, start = operation.hashes, 0
        for index, outcome in enumerate([*operation.outcomes, PageOutcome.PENDING]):
            if outcome is PageOutcome.OK:
                continue
            if index > start:
                before = hashes[start - 1] if start else ""
                events.append(self._stored(hashes[start:index], before, MEDIUMS[Tier.STORAGE]))
            start = index + 1
        with self._lock:
            if gone := self._dropped_since(operation):
                events.append(BlockRemoved(_names(gone), medium=MEDIUMS[Tier.STORAGE]))
            self._publish(*events)

    def _stored(self, hashes: Sequence[str], before: str, medium: str) -> BlockStored:
        return BlockStored(
            _names(hashes), _names([before])[0] if before else None, [], self._page_tokens, medium=medium
        )

    def _publish(self, *events: BlockStored | BlockRemoved) -> None:
        if events:
            self._publisher.publish(KVEventBatch(time.time(), [*events]))

    def _remember(self, hashes: Sequence[str]) -> None:
        now = time.monotonic()
        for each in hashes:
            self._dropped[each] = now
            self._dropped.move_to_end(each)
        while len(self._dropped) > _REMEMBERED:
            self._dropped.popitem(last=False)

    def _dropped_since(self, operation: Operation) -> list[str]:
        return [
            each
            for each, outcome in zip(operation.hashes, operation.outcomes, strict=False)
            if outcome is PageOutcome.OK and self._dropped.get(each, 0.0) >= operation.began
        ]


def _names(hashes: Sequence[str]) -> list[int | bytes]:
    return [sglang_event_hash(bytes.fromhex(each)) for each in hashes]
