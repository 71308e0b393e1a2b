"""The seeds' event publisher: a queue, one thread that encodes and publishes, and replay served between two batches.

Departures that only help it: the replay socket has no high-water mark (a ROUTER drops what exceeds it), and the ports
are chosen by the system.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)
STOP_TIMEOUT = 5.0


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One batch as the seeds send it."""

    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """One event as the seeds send it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class Publisher:
    """``publish`` may be called from any thread; everything else happens on the publisher's own."""

    def __init__(self, rank: int = 0, buffer_steps: int = 10_000, queue_size: int = 100_000, topic: str = "") -> None:
        self._rank = rank
        self._topic = topic.encode()
        self._queue: queue.Queue[Batch | None] = queue.Queue(queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(queue_size)
        self.endpoint = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self._router = self._context.socket(zmq.ROUTER)
        self._router.set_hwm(0)
        self.replay_endpoint = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread = threading.Thread(target=self._run, name="seed-publisher", daemon=True)
        self._thread.start()

    @property
    def published(self) -> int:
        """Batches that can be replayed."""
        return len(self._kept)

    def publish(self, batch: Batch) -> None:
        if batch.attn_dp_rank is None:
            batch.attn_dp_rank = self._rank
        self._queue.put(batch)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(STOP_TIMEOUT)
        self._pub.close(linger=0)
        self._router.close(linger=0)
        self._context.term()

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        sequence = 0
        while True:
            if self._router.poll(0):
                self._replay()
            try:
                batch = self._queue.get(timeout=0.1)
            except queue.Empty:
                continue
            if batch is None:
                return
            payload = encode(batch)
            self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))
            self._kept.append((sequence, payload))
            self._queue.task_done()
            sequence += 1

    def _replay(self) -> None:
        client, *_, first = self._router.recv_multipart()
        start = int.from_bytes(first, "big")
        for sequence, payload in self._kept:
            if sequence >= start:
                self._router.send_multipart((client, b"", sequence.to_bytes(8, "big"), payload))
        self._router.send_multipart((client, b"", END, b""))
