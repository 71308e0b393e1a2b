"""The end of the tier under a store that hangs. test_vllm_offloading.py has real engines."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_block_hash
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvgrpc.engines.vllm import tier as module
from kvgrpc.engines.vllm.tier import KvGrpcTier
from kvgrpc.engines.vllm.worker import Worker
from kvgrpc.errors import StorageFailed
from kvgrpc.prefetch.storage.base import OK, MemoryRange, PageBuffers, PageResult, timed_out
from kvgrpc.prefetch.storage.keys import PageIdentity
from tests.support.waiting import wait_until

KEY = b"0" * 32 + b"\0\0\0\0"
CHUNKS, CHUNK_BYTES = 4, 4096


class Hung:
    """A store whose calls time out, and which uses their buffers until ``released``."""

    name = "hung"

    def __init__(self) -> None:
        self.released = threading.Event()
        self.asked = threading.Event()

    def register(self, memory: Sequence[MemoryRange]) -> None: ...

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        self.asked.set()
        self.released.wait(timeout)
        return [False] * len(keys)

    def write(self, keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        return [timed_out("it hangs", self.released) for _ in keys]

    def close(self, timeout: float) -> bool:
        return self.released.wait(timeout)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Hung:
    hung = Hung()
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 2.0)
    monkeypatch.setattr(module, "open_backend", lambda *_: hung)
    monkeypatch.setattr(
        module, "identity_of", lambda *_: PageIdentity(model="m", dtype="float16", layout="l", page_size=16)
    )
    return hung


def tier_over(memory: mmap.mmap, timeout: float = 30.0, peers: bool = False) -> tuple[KvGrpcTier, memoryview]:
    chunks: Any = np.frombuffer(memory, np.uint8).reshape(CHUNKS, CHUNK_BYTES)
    view = memoryview(chunks)
    made: Any = KvGrpcTier(SimpleNamespace(), view, "KvGrpcTier", "file", timeout=timeout, peers=peers)
    made.submit_store(TransferJob(1, [KEY], np.array([2]), False, ReqContext(req_id="r")))
    return made, view


def close_within(tier: KvGrpcTier, seconds: float) -> float:
    """How long it took; the thread is left where it takes longer."""
    began, closing = time.monotonic(), threading.Thread(target=tier.shutdown, daemon=True)
    closing.start()
    closing.join(seconds)
    assert not closing.is_alive(), f"shutdown takes longer than {seconds:g} s"
    return time.monotonic() - began


def test_a_store_that_hangs_does_not_hold_the_engines_end_and_keeps_the_memory_that_it_uses(
    store: Hung, caplog: pytest.LogCaptureFixture
) -> None:
    memory = mmap.mmap(-1, CHUNKS * CHUNK_BYTES)
    tier, view = tier_over(memory)
    tier.lookup(KEY, ReqContext(req_id="r"))
    tier.on_schedule_end(None)
    assert store.asked.wait(5.0)
    try:
        close_within(tier, 6.0)
        assert "still hangs" in caplog.text
        view.release()  # as vLLM's primary tier does next
        with pytest.raises(BufferError):  # which vLLM takes for: somebody still writes there
            memory.close()
    finally:
        store.released.set()
        module._STILL_USED.clear()


def test_a_store_that_answers_is_closed_without_a_word(store: Hung, caplog: pytest.LogCaptureFixture) -> None:
    memory = mmap.mmap(-1, CHUNKS * CHUNK_BYTES)
    tier, _ = tier_over(memory)
    store.released.set()
    assert close_within(tier, 6.0) < 1.0
    assert [line for line in caplog.records if line.levelno >= logging.ERROR] == [] and not module._STILL_USED


def test_a_store_that_never_answers_does_not_hold_an_engine_that_empties_its_host(
    store: Hung, caplog: pytest.LogCaptureFixture
) -> None:
    """Two jobs run, one has not begun. vLLM hears that chunks are in use, and not that they are free."""
    tier, _ = tier_over(mmap.mmap(-1, CHUNKS * CHUNK_BYTES), timeout=0.5)
    for number in (2, 3):
        tier.submit_store(TransferJob(number, [KEY], np.array([number]), False, ReqContext(req_id="r")))
    failed: list[BaseException] = []

    def drain() -> None:
        with pytest.raises(StorageFailed, match="2 jobs still use 2 chunks") as refused:
            tier.drain_jobs()
        failed.append(refused.value)

    draining = threading.Thread(target=drain, daemon=True)
    try:
        draining.start()
        draining.join(10.0)
        assert not draining.is_alive() and len(failed) == 1
        assert "1 jobs of 1 chunks were given up" in caplog.text and "tier KvGrpcTier hangs" in caplog.text
        assert [(each.job_id, each.success) for each in tier.get_finished_jobs()] == [(3, False)]
        assert tier.has_pending_work()
    finally:
        store.released.set()
    tier.drain_jobs()
    assert sorted(each.job_id for each in tier.get_finished_jobs()) == [1, 2] and not tier.has_pending_work()
    tier.shutdown()


def test_a_tier_that_cannot_be_made_closes_its_store(store: Hung, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[float] = []

    def refuse(memory: Sequence[MemoryRange]) -> None:
        raise OSError("no memory is registered here")

    def close(timeout: float) -> bool:
        closed.append(timeout)
        return True

    monkeypatch.setattr(store, "register", refuse)
    monkeypatch.setattr(store, "close", close)
    with pytest.raises(OSError, match="registered"):
        tier_over(mmap.mmap(-1, CHUNKS * CHUNK_BYTES))
    assert len(closed) == 1


@pytest.mark.parametrize("answered", [0, 2])
def test_a_store_that_answers_too_few_or_too_many_results_brought_nothing(
    store: Hung, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answered: int
) -> None:
    monkeypatch.setattr(store, "write", lambda *_: [OK] * answered)
    store.released.set()
    tier, _ = tier_over(mmap.mmap(-1, CHUNKS * CHUNK_BYTES))
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    assert not result.success and not result.successful_keys
    assert f"{answered} results for 1 chunks" in caplog.text
    tier.shutdown()


def test_chunks_of_a_call_that_timed_out_are_kept_where_a_later_call_of_the_job_goes_wrong(
    store: Hung, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose chunks do not follow each other makes several. vLLM gives its chunks to others when it ends."""
    calls: list[Sequence[str]] = []
    both = threading.Event()

    def read(keys: Sequence[str], pages: Sequence[PageBuffers], timeout: float) -> list[PageResult]:
        calls.append(keys)
        if len(calls) == 1:
            return [timed_out("it hangs", store.released)]
        both.set()
        raise OSError("the store is broken")

    monkeypatch.setattr(store, "read", read, raising=False)
    made: Any = tier_over(mmap.mmap(-1, CHUNKS * CHUNK_BYTES), peers=True)[0]
    prompt, context = [bytes([number]) * 32 + b"\0\0\0\0" for number in range(3)], ReqContext(req_id="r")
    for number, key in enumerate(prompt, start=1):
        context.set_offload_key_position(key, number * 16)
    results: list[JobResult] = []

    def over(number: int) -> bool:
        results.extend(each for each in made.get_finished_jobs() if each.job_id == number)
        return bool(results)

    try:
        made.submit_load(TransferJob(7, [prompt[0], prompt[2]], np.array([0, 1]), True, context))
        assert both.wait(10.0)
        time.sleep(0.5)  # a while in which it must not end: the store may still write to the first chunk
        assert not over(7)
    finally:
        store.released.set()
    wait_until(lambda: over(7))
    assert [(each.success, each.successful_keys) for each in results] == [(False, None)]
    made.shutdown()


def test_the_names_of_a_jobs_chunks_are_made_beside_the_engines_thread(
    store: Hung, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def of_key(key: OffloadKey) -> Any:
        threads.append(threading.current_thread().name)
        return get_offload_block_hash(key)

    monkeypatch.setattr(module, "get_offload_block_hash", of_key)
    store.released.set()
    tier, _ = tier_over(mmap.mmap(-1, CHUNKS * CHUNK_BYTES))
    tier.drain_jobs()
    assert len(threads) == 1 and threads[0].startswith("kvgrpc-tier-write")
    tier.shutdown()


def test_a_worker_closes_each_of_its_ranks_though_one_cannot_be_closed() -> None:
    closed: list[str] = []

    def close(name: str) -> None:
        closed.append(name)
        if name == "prefill":
            raise TimeoutError("the loop is busy")

    worker: Any = object.__new__(Worker)
    ranks = [SimpleNamespace(close=lambda seconds, name=name: close(name)) for name in ("prefill", "decode")]
    vars(worker).update(_ranks=ranks, _bootstrap=SimpleNamespace(close=lambda: close("bootstrap")))
    with pytest.raises(TimeoutError):
        worker.close()
    assert closed == ["prefill", "decode", "bootstrap"]
