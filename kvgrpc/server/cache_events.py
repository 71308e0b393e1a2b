"""KV events of the host and storage tiers: what the hierarchical cache stores and drops, for whoever follows the
rank."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvgrpc.events import BlockRemoved, BlockStored, EventPublisher, KVEventBatch
from kvgrpc.hashing import sglang_event_hash
from kvgrpc.prefetch.cache import CacheListener
from kvgrpc.prefetch.controller.operation import Operation
from kvgrpc.prefetch.model import OperationKind, PageOutcome, Tier

# SGLang's words for the tiers. The device's own events are the engine's.
MEDIUMS = {Tier.HOST: "CPU_PINNED", Tier.STORAGE: "DISK"}


def tier_events(publisher: EventPublisher, page_tokens: int) -> CacheListener:
    """Tells of the host tier. Called on the cache's threads; it only appends."""

    def tell(tier: Tier, what: str, hashes: Sequence[str], before: str) -> None:
        medium = MEDIUMS.get(tier)
        if medium is None:
            return
        names = _names(hashes)
        if what == "stored":
            parent = _names([before])[0] if before else None
            event: BlockStored | BlockRemoved = BlockStored(names, parent, [], page_tokens, medium=medium)
        else:
            event = BlockRemoved(names, medium=medium)
        publisher.publish(KVEventBatch(time.time(), [event]))

    return tell


def storage_events(publisher: EventPublisher, page_tokens: int, operation: Operation) -> None:
    """Tells of the pages that an ended backup wrote, a run of them as one event."""
    if operation.kind is not OperationKind.BACKUP or not operation.ended:
        return
    events: list[BlockStored] = []
    hashes = operation.hashes
    start = 0
    outcomes = [*operation.outcomes, PageOutcome.PENDING]
    for index, outcome in enumerate(outcomes):
        if outcome is PageOutcome.OK:
            continue
        if index > start:
            parent = _names([hashes[start - 1]])[0] if start else None
            run = _names(hashes[start:index])
            events.append(BlockStored(run, parent, [], page_tokens, medium=MEDIUMS[Tier.STORAGE]))
        start = index + 1
    if events:
        publisher.publish(KVEventBatch(time.time(), [*events]))


def _names(hashes: Sequence[str]) -> list[int | bytes]:
    return [sglang_event_hash(bytes.fromhex(each)) for each in hashes]
