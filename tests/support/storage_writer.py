"""A process that writes pages into a folder until it is killed: ``BACKEND FOLDER SEED COUNT``.

Page n of seed s has the key ``s-n`` and bytes that follow from both. Says "began" before its first page.
"""

from __future__ import annotations

import sys

from kvgrpc.prefetch.storage import open_backend
from tests.support.storage_pages import Arena, content

PAGE_BYTES = 64 * 1024


def key(seed: int, number: int) -> str:
    return f"{seed}-{number}"


def bytes_of(seed: int, number: int) -> bytes:
    return content(seed * 100_000 + number, 2 * PAGE_BYTES)


def main() -> None:
    name, folder, seed, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    backend = open_backend(name, {"path": folder, "threads": 2})
    arena = Arena(4, PAGE_BYTES)
    print("began", flush=True)
    for first in range(0, count, 4):
        for place in range(4):
            arena.fill(place, seed * 100_000 + first + place)
        results = backend.write([key(seed, first + place) for place in range(4)], arena.pages(), 60.0)
        print(sum(result.ok for result in results), flush=True)


if __name__ == "__main__":
    main()
