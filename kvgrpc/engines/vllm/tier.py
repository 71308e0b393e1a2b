"""vLLM's offloading over kvgrpc's storage backends: a secondary tier behind vLLM's own cache in host memory.

vLLM makes it in its scheduler's process, of a class that its configuration names; docs/engines/vllm.md, section
Offloading. It calls under a lock of its own and must not wait: questions and transfers run on threads of the tier.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvgrpc.engines.compatibility import STORAGE, VLLM, check
from kvgrpc.errors import InvalidRequest
from kvgrpc.observability.logging import RateLimited
from kvgrpc.prefetch.model import Released
from kvgrpc.prefetch.storage import open_backend
from kvgrpc.prefetch.storage.base import MemoryRange, PageBuffers, PageResult, StorageBackend
from kvgrpc.prefetch.storage.keys import KeyMode, Keys, PageIdentity

logger = logging.getLogger("vllm." + __name__)
_THREADS = 2
_CLOSE_SECONDS = 5.0
_QUIET_SECONDS = 30.0
_POLL_SECONDS = 0.5
# Memory of closed tiers whose stores hang: as long as somebody has a view of it, vLLM does not unmap it.
_STILL_USED: list[object] = []


class KvGrpcTier(SecondaryTierManager):
    """Chunks of vLLM's host cache, each a page of the store with all that the workers of the engine hold of it.

    A store that is down, or a chunk that is lost, is a miss; the log says why, once in 30 s. Chunks of a call that
    timed out are given back to vLLM when the store uses them no more.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        storage: str,
        storage_config: Mapping[str, object] | None = None,
        timeout: float = 10.0,
        locality: str | None = None,
        backpressure_detector: Any = None,
        **unknown: Any,
    ) -> None:
        """``storage``, ``storage_config``: as docs/storage.md has them; ``timeout``: seconds for one job's chunks.

        Raises InvalidRequest, FeatureDisabled: vLLM then does not start.
        """
        check(VLLM, STORAGE)
        for name, value in unknown.items():
            raise InvalidRequest.of(name, value, "one of storage, storage_config, timeout, locality, backpressure")
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        self._timeout = timeout
        self._keys = Keys(KeyMode.KVGRPC, identity_of(offloading_spec, self.block_size_bytes))
        self._address = np.asarray(primary_kv_view).ctypes.data
        self._backend: StorageBackend = open_backend(storage, storage_config)
        self._backend.register([MemoryRange(self._address, primary_kv_view.nbytes)])
        self._lookups = Lookups(tier_type, self.contained)
        self._readers = ThreadPoolExecutor(_THREADS, "kvgrpc-tier-read")
        self._writers = ThreadPoolExecutor(_THREADS, "kvgrpc-tier-write")
        self._closing = threading.Event()
        self._running: dict[int, tuple[Future[list[bool]], TransferJob]] = {}
        # A store that is down is asked for every request.
        self._lines = RateLimited(logger, lines=1, seconds=_QUIET_SECONDS)

    # Questions.

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    # Transfers.

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._writers, self._backend.write, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._readers, self._backend.read, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        done = [number for number, (future, _) in self._running.items() if future.done()]
        return [self._result(*self._running.pop(number)) for number in done]

    def has_pending_work(self) -> bool:
        return bool(self._running)

    def drain_jobs(self) -> None:
        wait([future for future, _ in self._running.values()])

    def shutdown(self) -> None:
        """Within _CLOSE_SECONDS, whatever the store does. Jobs that run have half of it to end as they should; memory
        that a hung store may still write to stays mapped.
        """
        deadline = time.monotonic() + _CLOSE_SECONDS
        self._closing.set()
        asking = threading.Thread(target=self._lookups.shutdown, name="kvgrpc-tier-close", daemon=True)
        asking.start()
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)
        _, hung = wait([future for future, _ in self._running.values()], _CLOSE_SECONDS / 2)
        closed = self._backend.close(max(0.0, deadline - time.monotonic()))
        asking.join(max(0.0, deadline - time.monotonic()))
        if not closed:
            _STILL_USED.append(self._primary_kv_view.obj)
        if hung or not closed or asking.is_alive():
            left = f"{len(hung)} jobs{' and a question' if asking.is_alive() else ''}"
            memory = "" if closed else ", and vLLM's host cache stays mapped: the store may still use it"
            what = f"the store still hangs after {_CLOSE_SECONDS:g} s, with {left} under way{memory}"
            logger.error("kvgrpc: tier %s is closed: %s", self.tier_type, what)

    # On the tier's own threads.

    def contained(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Which chunks the store holds."""
        if self._closing.is_set():
            return [False] * len(keys)
        return self._backend.contains(self._names(keys), self._timeout)

    def _submit(self, pool: ThreadPoolExecutor, call: Callable[..., list[PageResult]], job: TransferJob) -> None:
        names = self._names(job.keys)
        size = self.block_size_bytes
        pages: list[PageBuffers] = [((self._address + int(chunk) * size, size),) for chunk in job.chunk_ids]
        self._running[job.job_id] = pool.submit(self._run, call, names, pages), job

    def _run(self, call: Callable[..., list[PageResult]], names: list[str], pages: Sequence[PageBuffers]) -> list[bool]:
        """Returns only when the store uses the chunks no more, for vLLM gives them to others, or the tier closes."""
        results = call(names, pages, self._timeout)
        for result in results:
            if result.released is not None:
                self._wait_for(result.released)
        bad = next((result for result in results if result.detail), None)
        if bad is not None:
            self._complain(f"{names[results.index(bad)][-80:]}: {bad.detail}")
        return [result.ok for result in results]

    def _wait_for(self, released: Released) -> None:
        say_at = time.monotonic() + _QUIET_SECONDS
        while not released.wait(_POLL_SECONDS) and not self._closing.is_set():
            if time.monotonic() >= say_at:
                say_at += _QUIET_SECONDS
                logger.error("kvgrpc: the store still uses chunks of a call that timed out")

    def _result(self, future: Future[list[bool]], job: TransferJob) -> JobResult:
        keys = list(job.keys)
        if future.cancelled() or future.exception() is not None:
            self._complain("cancelled" if future.cancelled() else str(future.exception()))
            moved = [False] * len(keys)
        else:
            moved = future.result()
        there = [key for key, ok in zip(keys, moved, strict=True) if ok]
        if job.is_promotion:  # vLLM would ask for them again and again
            self._lookups.mark_miss([key for key, ok in zip(keys, moved, strict=True) if not ok])
        return JobResult(
            job_id=job.job_id,
            success=all(moved),
            successful_keys=tuple(there) if there and not all(moved) else None,
            transfer_time=time.monotonic() - job.submit_time,
            transfer_bytes=len(there) * self.block_size_bytes,
        )

    def _names(self, keys: Collection[OffloadKey]) -> list[str]:
        return [self._keys.of(get_offload_block_hash(key).hex(), f"kv{get_offload_group_idx(key)}") for key in keys]

    def _complain(self, what: str) -> None:
        self._lines.warning(self.tier_type, f"kvgrpc: tier {self.tier_type}: {what}")


class Lookups(AsyncLookupManager):
    """vLLM's own way to ask a slow store, with our question."""

    def __init__(self, tier_type: str, contained: Callable[[Sequence[OffloadKey]], list[bool]]) -> None:
        self._contained = contained  # before the thread, which asks
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> list[bool]:
        return self._contained(keys)


def identity_of(spec: Any, chunk_bytes: int) -> PageIdentity:
    """What a chunk's bytes depend on besides its hash: what vLLM's own tier of files tells apart, and its size.

    A chunk holds the parts of all workers, so that their sizes are in it, and no rank is.
    """
    config = spec.config
    mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True)
    return PageIdentity(
        model=config.model.name,
        dtype=str(config.model.dtype).removeprefix("torch."),
        layout=json.dumps({**mapper.get_run_config(), "chunk_bytes": chunk_bytes}, sort_keys=True),
        page_size=config.cache.tokens_per_hash * spec.blocks_per_chunk,
    )
