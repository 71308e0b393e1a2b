"""Writes ``places.json``: a log with more tiers and groups than a cache may have, and what its state comes to.

    python tests/conformance/events/make_places.py

After each batch: how many tiers and groups hold blocks, how many blocks are in all of them, and the sum of their mixed
hashes modulo 2^64.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from kvgrpc.events.codec import decode_batch
from kvgrpc.events.log.digest import MASK, MAX_MEDIUM_BYTES, MAX_PLACES
from kvgrpc.events.log.snapshot import CacheState

LONGEST = "ß" * (MAX_MEDIUM_BYTES // 2)
CLEARED = ["AllBlocksCleared"]


def stored(medium: str, group: int, *hashes: int) -> list[Any]:
    return ["BlockStored", [*hashes], None, [], 0, None, medium, None, None, group]


def removed(medium: str, group: int, *hashes: int) -> list[Any]:
    return ["BlockRemoved", [*hashes], medium, group]


LOG = [
    [CLEARED],
    [stored("GPU", group, 7) for group in range(MAX_PLACES - 1)],
    # One more fits, and the one after it is passed over; what has no hashes takes no place.
    [stored("TAPE", 0), stored("CPU", 0, 1), stored("DISK", 0, 2)],
    [removed("DISK", 0, 2), stored("GPU", 5, 9), stored("cpu", 0, 1)],
    # The last copy frees the place, the one before it does not.
    [removed("CPU", 0, 1), stored("DISK", 0, 2)],
    [removed("GPU", 3, 7, 8), stored("DISK", 0, 2, 3), stored("TAPE", 0, 4)],
    [CLEARED, stored(LONGEST + "s", 0, 1), stored("x" * (MAX_MEDIUM_BYTES + 1), 0, 2)],
    [stored(LONGEST, 0, 1), stored("x" * MAX_MEDIUM_BYTES, 0, 2)],
    [removed(LONGEST, 0, 1), removed("X" * MAX_MEDIUM_BYTES, 0, 2)],
]


def main() -> None:
    state, payloads, states = CacheState(), [], []
    for time, events in enumerate(LOG):
        payload = msgspec.msgpack.encode([time, events, 0])
        payloads.append(payload.hex())
        state.apply(decode_batch(payload).events)
        tiers = state.digest().tiers
        blocks, mixed = sum(tier.blocks for tier in tiers), sum(tier.mixed_hashes for tier in tiers) & MASK
        states.append({"places": len(tiers), "blocks": blocks, "mixed_hashes": str(mixed)})
    text = json.dumps({"payloads": payloads, "states": states}, indent=1)
    Path(__file__).with_name("places.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
