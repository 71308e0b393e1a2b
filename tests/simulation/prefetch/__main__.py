"""``python -m tests.simulation.prefetch WORLDS [FIRST]``: runs that many, and prints what must never be done."""

from __future__ import annotations

import sys

from tests.simulation.prefetch.world import run_seed


def main(worlds: int, first: int = 0) -> int:
    failed = 0
    for seed in range(first, first + worlds):
        if violations := run_seed(seed).violations:
            failed += 1
            print(f"seed {seed}:", *violations[:5], sep="\n  ")
    print(f"{failed} of {worlds} worlds failed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
