"""An index of many large caches, loaded once: how long it takes, what it weighs, and how soon a restart answers.

``python -m benchmarks.large_index [--engines 64] [--blocks 1000000] [--python]`` after ``make native``. One process
serves made-up snapshots of all engines over real Watch streams (``clients/rust/index/examples/fleet.rs``), so a machine
needs memory for the index alone. A restart goes on from what the first run saved.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.rows.native_index import Program, fleet, in_python, native, standing
from kvgrpc.client import SyncClient
from kvgrpc.v1 import index_service_pb2 as pb
from tests.support.waiting import wait_until

LOAD_SECONDS, END_SECONDS, SAY_SECONDS, LOOK_SECONDS = 900.0, 60.0, 10.0, 0.05


def until_all(address: str, engines: int, *, answers_only: bool = False) -> None:
    """Waits until all caches are exact; with ``answers_only`` until all are told, be it from a file."""
    began = said = time.monotonic()

    def all_of_them() -> bool:
        nonlocal said
        time.sleep(LOOK_SECONDS)
        told, exact = standing(client)
        if time.monotonic() - said > SAY_SECONDS:
            said = time.monotonic()
            print(f"... {told} of {engines} caches told and {exact} exact after {said - began:.0f} s", flush=True)
        return (told if answers_only else exact) == engines

    with SyncClient(address) as client:
        wait_until(all_of_them, LOAD_SECONDS)


def blocks_known(address: str) -> int:
    with SyncClient(address) as client:
        return sum(held.blocks for source in client.list_sources() for held in source.blocks)


def asked(address: str) -> float:
    """The slowest of a hundred questions, in milliseconds."""
    request = pb.ScoreRequest(max_scores=8)
    request.prompts.add().block_hashes.values.extend(range(512))
    slowest = 0.0
    with SyncClient(address) as client:
        for _ in range(100):
            began = time.monotonic()
            client.score(request)
            slowest = max(slowest, time.monotonic() - began)
    return slowest * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--python", action="store_true", help="kvgrpc serve index in place of kvgrpc-index")
    options = parser.parse_args()
    start = in_python if options.python else native
    made = fleet(options.blocks, 0, "chains", engines=options.engines)
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "index"
        began = time.monotonic()
        index: Program = start(made.address, "--saved", str(saved))
        until_all(index.address, options.engines)
        loaded = time.monotonic() - began
        known = blocks_known(index.address)
        taken = f"{loaded:.1f} s, {index.cpu():.1f} of CPU"
        weights = f"{index.rss() / 2**20:.0f} MiB (the fleet {made.rss() / 2**20:.0f})"
        print(f"{options.engines} caches, {known} blocks: {taken}, {weights}", flush=True)
        print(f"the slowest of 100 questions {asked(index.address):.2f} ms", flush=True)
        began = time.monotonic()
        index.end(END_SECONDS)
        print(f"saved in {time.monotonic() - began:.1f} s: {saved.stat().st_size / 2**20:.0f} MiB", flush=True)
        began = time.monotonic()
        index = start(made.address, "--saved", str(saved))
        until_all(index.address, options.engines, answers_only=True)
        print(f"a restart answers for all after {time.monotonic() - began:.1f} s", flush=True)
        until_all(index.address, options.engines)
        with SyncClient(index.address) as client:
            snapshots = sum(source.snapshots for source in client.list_sources())
        exact = time.monotonic() - began
        print(f"it is exact after {exact:.1f} s, {snapshots} snapshots, {index.rss() / 2**20:.0f} MiB", flush=True)
        index.close()
    made.close()


if __name__ == "__main__":
    main()
