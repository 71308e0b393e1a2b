"""Writes ``clears.json``: a log with clears of one tier and events that cannot be read, and what a reader knows then.

    python tests/conformance/events/make_clears.py

Each step is a batch, what the cache holds after it (blocks of each medium and group, by hand), and whether blocks that
are held may be gone: an event came that may have been a removal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

Held = list[tuple[str, int, list[int]]]


def stored(medium: str, group: int, *hashes: int) -> list[Any]:
    return ["BlockStored", [*hashes], None, [], 0, None, medium, None, None, group]


def cleared(medium: object, **more: object) -> dict[str, object]:
    return {"type": "TierBlocksCleared", "medium": medium, **more}


ALL = {"type": "AllBlocksCleared"}
BROUGHT = {"type": "BlockStored", "block_hashes": "x"}
MOVED = {"type": "BlockMoved", "block_hashes": [1], "to": "CPU"}
THREE: Held = [("CPU", 0, [3]), ("GPU", 0, [1, 2]), ("GPU", 1, [4])]
STEPS: list[tuple[str, list[Any], Held, bool]] = [
    ("two tiers, two groups", [stored("GPU", 0, 1, 2, 2), stored("CPU", 0, 3), stored("gpu", 1, 4)], THREE, False),
    ("a clear of what holds nothing", [cleared("DISK")], THREE, False),
    ("a clear of one tier, all of its groups", [cleared("gpu")], [("CPU", 0, [3])], False),
    ("copies went with it", [stored("GPU", 0, 2), ["BlockRemoved", [2], "GPU"]], [("CPU", 0, [3])], False),
    ("as an array", [stored("GPU", 0, 5), ["TierBlocksCleared", "GPU", None, 7]], [("CPU", 0, [3])], False),
    ("of an owner, with keys that nobody knows", [cleared("CPU", ownership="kvcr", reason="reset")], [], False),
    ("without a name it is none", [stored("GPU", 0, 6), cleared(None)], [("GPU", 0, [6])], True),
    ("what comes later changes no doubt", [stored("GPU", 0, 7), cleared("CPU")], [("GPU", 0, [6, 7])], True),
    ("a clear of everything ends it", [ALL], [], False),
    ("another kind may be a removal", [stored("GPU", 0, 1), MOVED], [("GPU", 0, [1])], True),
    ("before a clear of everything it is none", [MOVED, ALL, stored("GPU", 0, 1)], [("GPU", 0, [1])], False),
    (
        "what would only bring some takes nothing",
        [BROUGHT],
        [("GPU", 0, [1])],
        False,
    ),
    ("a removal that cannot be read", [["BlockRemoved", [1], 7]], [("GPU", 0, [1])], True),
    ("a clear of one tier is no end of it", [cleared("GPU")], [], True),
    ("nor what has no name", [ALL, 7], [], True),
    ("behind a clear of everything it counts", [ALL, stored("GPU", 0, 1), {"type": 5}], [("GPU", 0, [1])], True),
]


def main() -> None:
    steps = [
        {
            "name": name,
            "payload": msgspec.msgpack.encode([time, events, 0]).hex(),
            "held": [{"medium": medium, "group": group, "blocks": blocks} for medium, group, blocks in held],
            "doubtful": doubtful,
        }
        for time, (name, events, held, doubtful) in enumerate(STEPS)
    ]
    Path(__file__).with_name("clears.json").write_text(json.dumps(steps, indent=1) + "\n")


if __name__ == "__main__":
    main()
