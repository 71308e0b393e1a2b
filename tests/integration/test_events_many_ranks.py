"""Sixteen dp ranks on one host, as engines at full load publish: what comes live, and that nothing is lost unsaid.

Run as a script this file is some of the ranks, in one process.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvgrpc.events import BlockStored, JournalingPublisher, KVEventBatch, decode_batch, open_publisher
from kvgrpc.events.log.journal import DroppedRange
from kvgrpc.model import RankId, RankRef, new_epoch

ROOT = Path(__file__).parents[2]
RANKS, PROCESSES = 16, 4
SECONDS = 60.0
# About 30 KB, the largest that engines send on average.
BLOCKS, BLOCK_TOKENS = 350, 16
JOURNAL_BYTES, QUEUED = 64 * 2**20, 500
# The library; of a rank a journal, a full queue, and the state of all blocks (325 bytes each, docs/publish-events.md).
MOST_BYTES = 150 * 2**20 + RANKS // PROCESSES * (JOURNAL_BYTES + QUEUED * 32 * 1024 + 400 * BLOCKS * 325)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("rate", "batches"), [(200, 400), (1_000, 400), (0, 400)], ids=["200/s", "1000/s", "burst"])
def test_no_batch_is_lost_unsaid_at_any_rate(rate: int, batches: int, tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, __file__, json.dumps([first, RANKS // PROCESSES, str(tmp_path), rate, batches])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        for first in range(0, RANKS, RANKS // PROCESSES)
    ]
    try:
        heard: list[list[int]] = [[] for _ in range(RANKS)]
        sockets, poller = [], zmq.Poller()
        for process in started:
            assert line_of(process) == "ready"
        with zmq.Context() as context:
            for dp in range(RANKS):
                socket = context.socket(zmq.SUB)
                socket.set(zmq.RCVHWM, 0)
                socket.subscribe(b"")
                socket.connect(endpoint(str(tmp_path)) + (f"_dp{dp}" if dp else ""))
                sockets.append(socket)
                poller.register(socket, zmq.POLLIN)
            for process in started:
                assert process.stdin is not None
                process.stdin.write(b"go\n")
            reports: list[dict[str, Any]] = []
            deadline = time.monotonic() + SECONDS * 2
            while len(reports) < PROCESSES or poller.poll(200):
                assert time.monotonic() < deadline
                for ready, _ in poller.poll(50):
                    _, number, _ = ready.recv_multipart()
                    heard[sockets.index(ready)].append(int.from_bytes(number, "big"))
                for process in started:
                    if process.stdout is not None and select.select([process.stdout], [], [], 0)[0]:
                        line = process.stdout.readline()
                        if line:
                            reports.append(json.loads(line))
            for socket in sockets:
                socket.close(linger=0)
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=20)
    accepted = sum(report["accepted"] for report in reports)
    slowest = max(report["publish_p99_us"] for report in reports)
    said = f"{accepted} of {RANKS * batches} batches, {accepted / max(r['seconds'] for r in reports):.0f} batches/s"
    live = sum(map(len, heard))
    print(f"\nrate {rate or 'as fast as possible'}: {said}, heard live {live}, publish p99 {slowest:.0f} us,")
    print(f"peak RSS of a process of {RANKS // PROCESSES} ranks {max(r['rss'] for r in reports) / 2**20:.0f} MiB")
    # From the first that a subscriber heard on, nothing is missing live but what was told as a hole.
    missing = sum(numbers[-1] - numbers[0] + 1 - len(numbers) for numbers in heard if numbers)
    assert missing <= sum(report["dropped"] for report in reports)
    assert all(numbers == sorted(set(numbers)) for numbers in heard)
    for report in reports:
        assert report["rss"] < MOST_BYTES
        assert report["accepted"] + report["dropped"] == batches * RANKS // PROCESSES
        # Every number is a batch or told as a hole, and what is told to be cached is what was taken.
        assert report["untold"] == 0


def endpoint(folder: str) -> str:
    return f"ipc://{folder}/events"


def line_of(process: subprocess.Popen[bytes]) -> Any:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], SECONDS)[0], f"no line in {SECONDS:g} s"
    return json.loads(process.stdout.readline())


def publish(first: int, count: int, folder: str, rate: int, batches: int) -> None:
    publishers = [
        open_publisher(
            {"endpoint": endpoint(folder), "journal_bytes": JOURNAL_BYTES, "max_queue_size": QUEUED},
            RankRef(RankId("engine", dp=dp), new_epoch()),
        )
        for dp in range(first, first + count)
    ]
    print(json.dumps("ready"), flush=True)
    sys.stdin.readline()
    tokens = [number % 150_000 for number in range(BLOCKS * BLOCK_TOKENS)]
    took, accepted, began = [], 0, time.perf_counter()
    for number in range(batches):
        for publisher in publishers:
            hashes = list(range(number * BLOCKS, (number + 1) * BLOCKS))
            batch = KVEventBatch(0.0, [BlockStored(hashes, None, tokens, BLOCK_TOKENS, None, "GPU")])
            before = time.perf_counter()
            accepted += publisher.publish(batch)
            took.append(time.perf_counter() - before)
        if rate:
            time.sleep(max(0.0, began + (number + 1) / rate - time.perf_counter()))  # the rate of the publisher
    seconds = time.perf_counter() - began
    dropped = untold = 0
    for publisher in publishers:
        assert isinstance(publisher, JournalingPublisher)
        while publisher.counts.unsent:
            time.sleep(0.01)
        dropped += publisher.counts.dropped
        untold += numbers_untold(publisher)
    rss = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    report = {
        "accepted": accepted,
        "dropped": dropped,
        "untold": untold,
        "seconds": seconds,
        "publish_p99_us": sorted(took)[int(len(took) * 0.99)] * 1e6,
        "rss": rss,
    }
    print(json.dumps(report), flush=True)
    sys.stdin.readline()


def numbers_untold(publisher: JournalingPublisher) -> int:
    """Sequences of the journal that are neither a batch nor told as a hole."""
    journal, told = publisher.stream.journal, 0
    cursor = oldest = journal.oldest_sequence
    while part := journal.read(cursor):
        told += part.last - cursor + 1
        if not isinstance(part, DroppedRange):
            decode_batch(part.payloads[0])
        cursor = part.last + 1
    return publisher.stream.next_sequence - oldest - told


if __name__ == "__main__":
    publish(*json.loads(sys.argv[1]))
