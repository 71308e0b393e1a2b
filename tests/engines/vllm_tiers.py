"""vLLM's offloading without an engine: its own manager, tiers and host memory, ours among them, stepped as by one."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    get_offload_block_hash,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvgrpc.client import SyncClient
from kvgrpc.hashing import each_block_hash
from kvgrpc.v1 import prefetch_service_pb2 as pb
from tests.support.faults.storage import Fault, FaultyBackend
from tests.support.waiting import SECONDS

BLOCK, CHUNK_BYTES, CHUNKS = 4, 4096, 16


class Offloading:
    """vLLM's tiering manager over a folder, stepped by a thread as an engine core that is never idle."""

    def __init__(self, path: Path | None, **orders: Any) -> None:
        """``path``: None: no storage, other engines alone. ``polls`` False: vLLM's polling thread comes to no tier.
        ``windows``: in chunks, of a group of layers each, numbered from 1 on."""
        windows = orders.pop("windows", ())
        tier: dict[str, Any] = {"type": "KvGrpcTier", "module_path": "kvgrpc.engines.vllm.tier"}
        if path is not None:
            tier |= {"storage": "file", "storage_config": {"path": str(path), "max_bytes": "64MB"}}
        if "pull" in orders:
            tier["peers"] = True
        ours = {"type": "KvGrpcOrders", "module_path": "kvgrpc.engines.vllm.orders", "engine": "P0"}
        polling = {} if orders.pop("polls", True) else {"tier_poll_interval_s": 0}
        limits = {"threshold_tokens": BLOCK, **orders.pop("limits", {})}
        extra = {
            **polling,
            "cpu_bytes_to_use": CHUNKS * CHUNK_BYTES,
            "secondary_tiers": [
                tier,
                {**ours, "limits": limits, **orders},
            ],
        }
        config = OffloadingConfig(
            groups=tuple(
                OffloadingGroupConfig(BLOCK, (f"layer-{group}",), group, window)
                for group, window in enumerate([None, *windows])
            ),
            worker_kv_bytes_per_block=CHUNK_BYTES,
            enable_kv_cache_events=False,
            extra_config=extra,
            engine_id=uuid.uuid4().hex,
            model=OffloadingModelConfig("tiny", "float32"),
            cache=OffloadingCacheConfig(BLOCK, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        self.manager: Any = TieringOffloadingSpec(config).get_manager()
        self.tier = self.manager.secondary_tiers[1]
        self.address = self.tier._server.address
        self._memory = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        self._over = threading.Event()
        self._stepping = threading.Thread(target=self._step_on)
        self._stepping.start()

    def close(self) -> None:
        self.stop_stepping()
        self.manager.shutdown()

    def stop_stepping(self) -> None:
        """As an engine without a request, of which vLLM's polling thread is left."""
        self._over.set()
        self._stepping.join()

    def _step_on(self) -> None:
        while not self._over.wait(0.001):
            self.step()

    def step(self) -> None:
        with self.manager.lock:
            self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=[]))

    def compute(self, keys: Sequence[OffloadKey]) -> None:
        """A request that computed these chunks: they are in the host, and in the store when this returns."""
        context = ReqContext(req_id=uuid.uuid4().hex)
        with self.manager.lock:
            self.manager.on_new_request(context)
            made = self.manager.prepare_store(keys, context)
            assert made is not None
            for key, chunk in zip(made.keys_to_store, made.store_spec.chunk_ids, strict=True):
                self._memory[chunk] = bytes_of(key)
            self.manager.complete_store(keys, context)
            self.manager.on_request_finished(context)
        self.wait(lambda: not self.manager._jobs)

    def look_up(
        self, keys: Sequence[OffloadKey], first: int = 0, kv_hints: KvHintsEnvelope | None = None, **parameters: Any
    ) -> int:
        """As vLLM's scheduler for a request whose ``first`` chunks the device has: how many more came to the host.
        ``parameters``: its kv_transfer_params."""
        context = ReqContext(uuid.uuid4().hex, parameters or None, kv_hints)
        for number, key in enumerate(keys, start=1):
            context.set_offload_key_position(key, number * BLOCK)
        found = [LookupResult.RETRY]

        def came() -> bool:
            with self.manager.lock:
                found[:] = [self.manager.lookup(key, context) for key in keys[first:]]
            return LookupResult.RETRY not in found and LookupResult.HIT_PENDING not in found

        with self.manager.lock:
            self.manager.on_new_request(context)
        self.wait(came)
        with self.manager.lock:
            self.manager.on_request_finished(context)
        return next((n for n, each in enumerate(found) if each is not LookupResult.HIT), len(found))

    def empty_host(self) -> None:
        self.begin_emptying()
        self.end_emptying()

    def begin_emptying(self) -> None:
        """As beside a worker that copies to the host: it may write there until it has said that it is done."""
        with self.manager.lock:
            self.manager.reset_cache()

    def end_emptying(self) -> None:
        with self.manager.lock:
            self.manager.on_reset_flushed()

    def request(self, keys: Sequence[OffloadKey]) -> int:
        """A request that takes from the host what is there; how many leading chunks, with the right bytes."""
        context = ReqContext(req_id=uuid.uuid4().hex)
        with self.manager.lock:
            self.manager.on_new_request(context)
            there = [key for key in keys if self.manager.primary_tier.lookup(key, context) is LookupResult.HIT]
            if there:
                found = self.manager.prepare_load(there, context)
                for key, chunk in zip(there, found.chunk_ids, strict=True):
                    assert (self._memory[chunk] == bytes_of(key)).all()
                self.manager.complete_load(there, context)
            self.manager.on_request_finished(context)
        return len(there)

    def nothing_is_held(self) -> bool:
        with self.manager.lock:
            primary = self.manager.primary_tier
            used = primary._num_chunks - primary._get_num_free_chunks()
            return not self.manager._jobs and used == primary._num_evictable_cache_chunks

    def wait(self, condition: Any, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not come to it"
            time.sleep(0.005)


class SlowStore:
    """In the place of the store of the engine's tier: it says of the chunks ``late`` whether it has them once
    ``answers`` is set, and hands chunks over once ``hands_over`` is; ``reading``: somebody waits for that."""

    def __init__(self, engine: Offloading, late: Sequence[OffloadKey]) -> None:
        self.answers, self.hands_over, self.reading = threading.Event(), threading.Event(), threading.Event()
        self._late = [get_offload_block_hash(key).hex() for key in late]
        tier = engine.manager.secondary_tiers[0]
        tier.backend = FaultyBackend(tier.backend, self._hold)

    def let_go(self) -> None:
        self.answers.set()
        self.hands_over.set()

    def _hold(self, call: str, key: str) -> Fault | None:
        if call == "read":
            self.reading.set()
            assert self.hands_over.wait(SECONDS), "the test never let it hand over"
        elif call == "count" and any(each in key for each in self._late):
            assert self.answers.wait(SECONDS), "the test never let it answer"
        return None


def bytes_of(key: OffloadKey) -> Any:
    seed = int.from_bytes(key[:8] + key[-4:], "big")
    return np.random.default_rng(seed).integers(-128, 128, CHUNK_BYTES, dtype=np.int8)


def prompt(chunks: int, first: int = 0) -> list[int]:
    return list(range(first, first + chunks * BLOCK))


def keys_of(tokens: Sequence[int], group: int = 0) -> list[OffloadKey]:
    return [make_offload_key(each, group) for each in each_block_hash(tokens, BLOCK)]


@contextmanager
def offloading(path: Path | None, **orders: Any) -> Iterator[tuple[Offloading, SyncClient]]:
    kv_cache_utils.init_none_hash(hashing.sha256)
    opened = Offloading(path, **orders)
    try:
        with SyncClient(opened.address) as client:
            yield opened, client
    finally:
        opened.close()


def ended(client: SyncClient, operation: pb.CacheOperation) -> pb.CacheOperation:
    for message in client.watch_operations([operation.operation_id]):
        operation = message.operations[-1] if message.operations else operation
    assert operation.quiescent
    return operation


def row(client: SyncClient, operation: pb.CacheOperation) -> pb.CacheOperation:
    """As it is now."""
    (found,) = [each for each in client.list_operations() if each.operation_id == operation.operation_id]
    return found


def start(client: SyncClient, tokens: Sequence[int], timeout: float | None = None) -> pb.CacheOperation:
    return client.start_prefetch(pb.PromptPages(tokens=tokens), timeout=timeout)
