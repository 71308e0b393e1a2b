"""Writes ``checkpoints.json``: a log, and the publisher's digests of it at the checkpoints that a follower keeps.

    python tests/conformance/events/make_checkpoints.py

Batches of both encodings and dialects, with copies, several tiers and groups, removals of what is not there, clears and
events that nobody knows; the same in each run.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from kvgrpc.events.codec import BatchEncoder, Dialect, Encoding, decode_batch
from kvgrpc.events.log.digest import CHECKPOINT_BATCHES
from kvgrpc.events.log.snapshot import CacheState
from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored, Event, KVEventBatch, UnknownEvent

BATCHES = 200
HASHES = [1, -2, 2**63, -(2**63), bytes(range(32)), *range(100, 112)]
MEDIA = [None, "GPU", "gpu", "CPU_PINNED", "straße"]


def main() -> None:
    rng, state, payloads, digests = random.Random(7), CacheState(), [], {}
    encoders = [BatchEncoder(dialect, encoding, 0) for dialect in Dialect for encoding in Encoding]
    for sequence in range(BATCHES):
        events: list[Event] = (
            [AllBlocksCleared()] if sequence in (0, 150) else [event(rng) for _ in range(rng.randrange(4))]
        )
        payload = rng.choice(encoders).encode(KVEventBatch(float(sequence), events))
        payloads.append(payload.hex())
        # As it is read: arrays leave out what they cannot say.
        state.apply(decode_batch(payload).events)
        state.next_sequence = sequence + 1
        if state.next_sequence % CHECKPOINT_BATCHES == 0 or state.next_sequence == BATCHES:
            digests[str(state.next_sequence)] = [
                {"medium": t.medium, "group": t.group, "blocks": t.blocks, "mixed_hashes": str(t.mixed_hashes)}
                for t in state.digest().tiers
            ]
    text = json.dumps({"payloads": payloads, "digests": digests}, indent=1)
    Path(__file__).with_name("checkpoints.json").write_text(text + "\n")


def event(rng: random.Random) -> Event:
    hashes = rng.choices(HASHES, k=rng.randrange(1, 5))
    medium, group = rng.choice(MEDIA), rng.choice([None, None, None, 0, 1, 2**32 - 1])
    kind = rng.random()
    if kind < 0.6:
        return BlockStored(hashes, None, [], 16, medium=medium, group_idx=group)
    if kind < 0.95:
        return BlockRemoved(hashes, medium, group)
    return UnknownEvent("BlockMoved", b"\x91\xaaBlockMoved")


if __name__ == "__main__":
    main()
