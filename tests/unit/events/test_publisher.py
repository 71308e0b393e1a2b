"""What an engine may rely on: publishing neither blocks nor raises, and every number is accounted for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from kvgrpc.events import EventsConfig, JournalingPublisher, decode_batch
from kvgrpc.events import publisher as publishing
from kvgrpc.events.log.journal import MAX_BATCH_BYTES, Batches, DroppedRange
from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from kvgrpc.model import RankId, RankRef
from tests.support.waiting import wait_until

RANK = RankRef(RankId("engine", dp=1), 7)


class Live:
    """A live transport that remembers, and waits or fails when told to."""

    endpoint = "test://live"

    def __init__(self) -> None:
        self.sent: list[tuple[int, bytes]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failing = False
        self.closed_within: float | None = None

    def send(self, sequence: int, payload: bytes, batch: object) -> None:
        self.gate.wait(10)
        if self.failing:
            raise OSError("no way")
        self.sent.append((sequence, payload))

    def close(self, deadline: float) -> None:
        self.closed_within = deadline


@contextmanager
def publisher(live: Live | None = None, **settings: Any) -> Iterator[JournalingPublisher]:
    opened = JournalingPublisher(RANK, EventsConfig.parse({"clear_first": False} | settings), live)
    try:
        yield opened
    finally:
        opened.shutdown(1)


BATCH_OF_BLOCKS = KVEventBatch(0.0, [BlockStored(list(range(1000)), None, [], 16)])


def removed(number: int) -> KVEventBatch:
    return KVEventBatch(float(number), [BlockRemoved([number])])


def told(opened: JournalingPublisher) -> list[object]:
    """Everything published so far: payloads decoded, holes as they are."""
    stream = opened.stream
    wait_until(lambda: opened.counts.unsent == 0)
    parts: list[object] = []
    cursor = stream.state().oldest_sequence
    while part := stream.journal.read(cursor):
        parts += [decode_batch(payload) for payload in part.payloads] if isinstance(part, Batches) else [part]
        cursor = part.last + 1
    assert cursor == stream.next_sequence
    return parts


def is_clear(batch: object) -> bool:
    return isinstance(batch, KVEventBatch) and batch.events == [AllBlocksCleared()] and batch.data_parallel_rank == 1


def test_batches_are_live_and_in_the_journal_with_the_same_bytes() -> None:
    live = Live()
    with publisher(live) as opened:
        assert all(opened.publish(removed(number)) for number in range(3))
        assert opened.publish_raw(msgspec.msgpack.encode(removed(3)))
        assert told(opened) == [KVEventBatch(float(n), [BlockRemoved([n])], 1) for n in range(3)] + [removed(3)]
        part = opened.stream.journal.read(0)
        assert isinstance(part, Batches)
        assert live.sent == list(enumerate(part.payloads))
        assert opened.counts.published == 4


def test_the_callers_batch_is_not_changed() -> None:
    with publisher() as opened:
        batch = removed(0)
        opened.publish(batch)
        assert told(opened)[0] != batch
        assert batch == removed(0)


def test_raw_bytes_are_copied_from_a_buffer() -> None:
    with publisher(live := Live()) as opened:
        live.gate.clear()
        opened.publish(removed(0))
        payload = msgspec.msgpack.encode(removed(1))
        buffer = bytearray(payload)
        opened.publish_raw(buffer)
        buffer[:] = b"second"
        live.gate.set()
        wait_until(lambda: opened.counts.unsent == 0)
        assert live.sent[1] == (1, payload)


def released_view() -> memoryview:
    view = memoryview(b"x")
    view.release()
    return view


@pytest.mark.parametrize(
    "nonsense",
    [None, 7, object(), "text", released_view(), KVEventBatch(1.0, [BlockRemoved([2**64])])],
    ids=["None", "7", "object", "text", "a released view", "a hash too large"],
)
def test_what_cannot_be_encoded_is_a_hole_and_a_clear(nonsense: object) -> None:
    with publisher() as opened:
        assert opened.publish(nonsense)
        assert opened.publish_raw(nonsense)  # type: ignore[arg-type]
        opened.publish(removed(1))
        parts = told(opened)
        assert [part for part in parts if isinstance(part, DroppedRange)] == [
            DroppedRange(0, 0, "encode"),
            DroppedRange(1, 1, "encode"),
        ]
        assert any(is_clear(part) for part in parts[2:])
        assert any(part == KVEventBatch(1.0, [BlockRemoved([1])], 1) for part in parts)
        assert opened.healthy
        assert opened.stream.state().dropped_batches == opened.counts.dropped == 2


def test_raw_bytes_that_are_no_batch_never_go_live() -> None:
    with publisher(live := Live()) as opened:
        opened.publish_raw(b"\xc1\xff")
        hole, clear = told(opened)
        assert hole == DroppedRange(0, 0, "not_a_batch")
        assert is_clear(clear)
        assert [sequence for sequence, _ in live.sent] == [1]


@pytest.mark.parametrize("encoding", ["array", "map"])
def test_the_first_batch_of_a_log_clears_though_nothing_is_published(encoding: str) -> None:
    with publisher(live := Live(), clear_first=True, encoding=encoding) as opened:
        wait_until(lambda: live.sent)
        opened.publish(removed(0))
        first, second = told(opened)
        assert is_clear(first)
        assert second == KVEventBatch(0.0, [BlockRemoved([0])], 1)
        assert live.sent[0][1][10:12] == (b"\x91\x91" if encoding == "array" else b"\x91\x81")


def test_a_fenced_publisher_stops_at_once_and_says_so() -> None:
    with publisher(live := Live()) as opened:
        live.gate.clear()
        for number in range(100):
            opened.publish(removed(number))
        opened.fence()
        live.gate.set()
        wait_until(lambda: opened.stream.ended)
        assert len(live.sent) <= 1
        assert not opened.publish(removed(0))
        assert not opened.healthy
        opened.shutdown(5)
        assert not opened.healthy
        assert live.closed_within == 0.0


def test_a_batch_that_no_client_could_receive_is_a_hole_and_a_clear() -> None:
    with publisher() as opened:
        opened.publish_raw(msgspec.msgpack.encode([1.0, [b"x" * MAX_BATCH_BYTES], 0]))
        hole, clear = told(opened)
        assert hole == DroppedRange(0, 0, "too_large")
        assert is_clear(clear)


def test_a_full_queue_is_a_hole_and_a_clear_and_blocks_nobody() -> None:
    live = Live()
    with publisher(live, max_queue_size=4) as opened:
        live.gate.clear()
        began = time.monotonic()
        taken = [opened.publish(removed(number)) for number in range(10)]
        assert time.monotonic() - began < 5  # the gate opens after 10 s by itself
        assert taken == [True] * 4 + [False] * 6
        live.gate.set()
        parts = told(opened)
        assert parts[4] == DroppedRange(4, 9, "queue_full")
        assert is_clear(parts[5])
        assert opened.publish(removed(10))
        assert told(opened)[-1] == KVEventBatch(10.0, [BlockRemoved([10])], 1)
        assert opened.counts.dropped == 6
        assert [sequence for sequence, _ in live.sent] == [0, 1, 2, 3, 10, 11]


def test_publish_waits_neither_for_a_snapshot_that_is_encoded_nor_for_the_state() -> None:
    with publisher() as opened:
        assert opened.publish(BATCH_OF_BLOCKS)
        wait_until(lambda: opened.counts.unsent == 0)
        recorder = opened.stream.recorder
        assert recorder is not None
        snapshot = recorder.snapshot(0)
        engine = threading.Thread(target=lambda: [opened.publish(removed(number)) for number in range(1000)])
        # As long as a reader encodes a part, and another one cuts.
        with snapshot._lock, recorder._lock:
            engine.start()
            engine.join(20)
            assert not engine.is_alive()
        wait_until(lambda: opened.counts.unsent == 0)
        assert opened.stream.next_sequence == 1001
        assert snapshot.part(0)[1] and snapshot.next_sequence == 1
        assert recorder.snapshot(1001).copies == 0


def test_what_the_live_transport_refuses_is_in_the_journal() -> None:
    live = Live()
    live.failing = True
    with publisher(live) as opened:
        opened.publish(removed(0))
        assert told(opened) == [KVEventBatch(0.0, [BlockRemoved([0])], 1)]
        assert (opened.counts.failed_sends, opened.healthy) == (1, True)


def test_a_failed_pass_loses_what_it_held_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with publisher(live := Live()) as opened:
        live.gate.clear()
        for number in range(3):
            opened.publish(removed(number))
        extend = opened._journal.extend

        def fail_once(entries: Any) -> None:
            monkeypatch.setattr(opened._journal, "extend", extend)
            raise MemoryError

        monkeypatch.setattr(opened._journal, "extend", fail_once)
        live.gate.set()
        opened.publish(removed(3))
        parts = told(opened)
        assert isinstance(parts[0], DroppedRange)
        assert any(is_clear(part) for part in parts)
        wait_until(lambda: opened.healthy)


def test_a_transport_that_hangs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with publisher(live := Live()) as opened:
        live.gate.clear()
        opened.publish(removed(0))
        wait_until(lambda: opened.healthy)
        monkeypatch.setattr(publishing, "STUCK_SECONDS", 0.01)
        wait_until(lambda: not opened.healthy)
        monkeypatch.undo()
        live.gate.set()
        wait_until(lambda: opened.counts.published == 1)
        assert opened.healthy


def test_after_shutdown_batches_are_refused_and_counted() -> None:
    with publisher(live := Live()) as opened:
        opened.publish(removed(0))
        opened.shutdown(1)
        opened.shutdown(1)
        assert not opened.publish(removed(1))
        assert not opened.publish_raw(b"x")
        assert opened.counts.refused == 2
        assert (len(live.sent), opened.stream.next_sequence, opened.stream.ended) == (1, 1, True)
        assert live.closed_within is not None
        assert 0 <= live.closed_within <= 1


def test_shutdown_sends_what_waits() -> None:
    with publisher(live := Live()) as opened:
        live.gate.clear()
        for number in range(1_000):
            opened.publish(removed(number))
        opened.publish(None)
        threading.Timer(0.05, live.gate.set).start()
        opened.shutdown(5)
        assert [sequence for sequence, _ in live.sent] == [*range(1_000), 1_001]
        assert is_clear(decode_batch(live.sent[-1][1]))


def test_shutdown_ends_at_its_deadline_though_the_transport_hangs() -> None:
    with publisher(live := Live()) as opened:
        live.gate.clear()
        opened.publish(removed(0))
        began = time.monotonic()
        opened.shutdown(0.1)
        assert time.monotonic() - began < 5
        assert opened.counts.unsent == 1
        live.gate.set()


def test_listeners_hear_of_batches_and_of_the_end() -> None:
    with publisher() as opened:
        heard = threading.Event()
        forget = opened.stream.listen(heard.set)
        opened.publish(removed(0))
        assert heard.wait(5)
        heard.clear()
        opened.shutdown(1)
        assert heard.wait(5)
        forget()
        assert opened.stream._listeners == ()


def test_a_forked_child_publishes_nothing_and_exits_cleanly() -> None:
    with publisher() as opened:
        child = os.fork()
        if child == 0:
            accepted = opened.publish(removed(0))
            opened.shutdown(1)
            os._exit(1 if accepted else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert opened.publish(removed(1))


def test_importing_the_package_loads_neither_zmq_nor_grpc() -> None:
    script = "import sys, kvgrpc.events as e; e.open_publisher; print({'zmq', 'grpc'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout.strip() == "set()"
