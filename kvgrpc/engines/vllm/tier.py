"""vLLM's offloading over kvgrpc's storage backends: a secondary tier behind vLLM's own cache in host memory.

vLLM makes it in its scheduler's process, of a class that its configuration names; docs/engines/vllm.md, section
Offloading. It calls under a lock of its own and must not wait: questions and transfers run on threads of the tier.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

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
from kvgrpc.engines.vllm.offload.sources import engines_of
from kvgrpc.errors import InvalidRequest, StorageFailed
from kvgrpc.observability.logging import RateLimited
from kvgrpc.prefetch.model import Released
from kvgrpc.prefetch.storage import open_backend
from kvgrpc.prefetch.storage.base import (
    MemoryRange,
    PageBuffers,
    PageResult,
    PageSource,
    StorageBackend,
    StorageDown,
    failed,
)
from kvgrpc.prefetch.storage.keys import KeyMode, Keys, PageIdentity
from kvgrpc.pull.taking.peers import PeersBackend

logger = logging.getLogger("vllm." + __name__)
_THREADS = 2
_CLOSE_SECONDS = 5.0
_QUIET_SECONDS = 30.0
_POLL_SECONDS = 0.5
# Memory of closed tiers whose stores hang: as long as somebody has a view of it, vLLM does not unmap it.
_STILL_USED: list[object] = []


def keep_mapped(memory: memoryview) -> None:
    """vLLM's host cache outlives its end."""
    _STILL_USED.append(memory.obj)


class KvGrpcTier(SecondaryTierManager):
    """Chunks of vLLM's host cache, each a page of the store with all that the workers of the engine hold of it.

    A store that is down, or a chunk that is lost, is a miss; the log says why, once in 30 s. Chunks of a call that
    timed out are given back to vLLM when the store uses them no more.
    """

    medium = Medium.STORAGE
    # Of this process: orders for an engine's cache look for them.
    opened: ClassVar[weakref.WeakSet[KvGrpcTier]] = weakref.WeakSet()

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        storage: str = "",
        storage_config: Mapping[str, object] | None = None,
        timeout: float = 10.0,
        peers: bool = False,
        locality: str | None = None,
        backpressure_detector: Any = None,
        **unknown: Any,
    ) -> None:
        """``storage``, ``storage_config``: as docs/storage.md has them; ``timeout``: seconds for one job's chunks.
        ``peers``: other engines are asked first, by the ``pull`` of the engine's KvGrpcOrders; then storage may be "".

        Raises InvalidRequest, FeatureDisabled: vLLM then does not start.
        """
        check(VLLM, STORAGE)
        for name, value in unknown.items():
            raise InvalidRequest.of(
                name, value, "one of storage, storage_config, timeout, peers, locality, backpressure"
            )
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        self._timeout = timeout
        self._keys = Keys(KeyMode.KVGRPC, identity_of(offloading_spec, self.block_size_bytes))
        self.address = np.asarray(primary_kv_view).ctypes.data
        if not storage and not peers:
            raise InvalidRequest.of("storage", storage, "a storage backend, or none and peers")
        stored = open_backend(storage, storage_config) if storage else None
        self._stores = stored is not None
        self.peers = PeersBackend(stored, owns_storage=True) if peers else None
        self.backend: StorageBackend = self.peers if stored is None or self.peers is not None else stored  # type: ignore[assignment]
        try:
            self.backend.register([MemoryRange(self.address, primary_kv_view.nbytes)])
            self._lookups = Lookups(tier_type, self._contained)
        except BaseException:
            if not self.backend.close(_CLOSE_SECONDS):
                keep_mapped(primary_kv_view)
            raise
        self._readers = ThreadPoolExecutor(_THREADS, "kvgrpc-tier-read")
        self._writers = ThreadPoolExecutor(_THREADS, "kvgrpc-tier-write")
        self._closing = threading.Event()
        self._running: dict[int, tuple[Future[list[bool]], TransferJob]] = {}
        # A store that is down is asked for every request.
        self._lines = RateLimited(logger, lines=1, seconds=_QUIET_SECONDS)
        self.opened.add(self)

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
        if self._stores:
            self._submit(self._writers, self.backend.write, job_metadata)
        else:
            stored: Future[list[bool]] = Future()
            stored.set_result([True] * len(job_metadata.keys))
            self._running[job_metadata.job_id] = stored, job_metadata

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._readers, partial(self._read, job_metadata), job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        done = [number for number, (future, _) in self._running.items() if future.done()]
        return [self._result(*self._running.pop(number)) for number in done]

    def has_pending_work(self) -> bool:
        return bool(self._running)

    def drain_jobs(self) -> None:
        """Jobs have their time; then those that have not begun are given up, and those that run have it once more.

        Raises StorageFailed where the store uses chunks even then. vLLM, which calls it to empty the host and holds its
        engine meanwhile, then empties nothing, for these chunks would be given to others while they are written.
        """
        wait(self._left(), self._timeout)
        given_up = [job for future, job in self._running.values() if future.cancel()]
        if given_up:
            lost = f"{len(given_up)} jobs of {_chunks_of(given_up)} chunks were given up before they began"
            logger.warning("kvgrpc: tier %s is slow: %s, for vLLM empties its host cache", self.tier_type, lost)
        _, hung = wait(self._left(), self._timeout + _POLL_SECONDS)
        if hung:
            jobs = [job for future, job in self._running.values() if future in hung]
            seconds = 2 * self._timeout + _POLL_SECONDS
            what = f"after {seconds:g} s {len(jobs)} jobs still use {_chunks_of(jobs)} chunks of vLLM's host cache"
            text = f"{what}, so it cannot be emptied now: see to the store {self.backend.name}, then try again"
            logger.error("kvgrpc: tier %s hangs: %s", self.tier_type, text)
            raise StorageFailed(text, metadata={"backend": self.backend.name, "status": "TIMEOUT"})

    def shutdown(self) -> None:
        """Within _CLOSE_SECONDS, whatever the store does. Jobs that run have half of it to end as they should; memory
        that a hung store may still write to stays mapped.
        """
        deadline = time.monotonic() + _CLOSE_SECONDS
        self._closing.set()
        self.opened.discard(self)
        asking = threading.Thread(target=self._lookups.shutdown, name="kvgrpc-tier-close", daemon=True)
        asking.start()
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=False, cancel_futures=True)
        _, hung = wait([future for future, _ in self._running.values()], _CLOSE_SECONDS / 2)
        closed = self.backend.close(max(0.0, deadline - time.monotonic()))
        asking.join(max(0.0, deadline - time.monotonic()))
        if not closed:
            keep_mapped(self._primary_kv_view)
        if hung or not closed or asking.is_alive():
            left = f"{len(hung)} jobs{' and a question' if asking.is_alive() else ''}"
            memory = "" if closed else ", and vLLM's host cache stays mapped: the store may still use it"
            what = f"the store still hangs after {_CLOSE_SECONDS:g} s, with {left} under way{memory}"
            logger.error("kvgrpc: tier %s is closed: %s", self.tier_type, what)

    def purge(self, dry_run: bool, timeout: float) -> int | None:
        """Drops what the store has of this engine and of those that share its chunks; how many. Blocks.

        ``dry_run``: nothing goes; None where the store cannot count.
        """
        assert self._keys.prefix is not None
        count = self.backend.count if dry_run else self.backend.clear
        return count(self._keys.prefix, timeout)

    def count_behind(self, prompt: Sequence[OffloadKey], first: int) -> int:
        """Chunks that other engines or the store have behind the ``first`` leading ones of a prompt. Blocks."""
        return self._source(_hexes(prompt), first).count_leading(self._names(prompt[first:]), self._timeout)

    def present_in_store(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Returns which of these chunks the store has; none of one that is down. Blocks."""
        return self._stored(self._names(keys), alone=False)

    # On the tier's own threads.

    def _contained(self, keys: Sequence[OffloadKey], context: ReqContext) -> list[bool]:
        """Returns which chunks other engines or the store hold."""
        if self._closing.is_set():
            return [False] * len(keys)
        names, near = self._names(keys), 0
        if self.peers is not None:
            prompt, only = prompt_of(context), engines_of(context)
            stretch = next(stretches(prompt, keys), None)
            if stretch is not None and stretch.start == 0:
                near = self._source(_hexes(prompt), stretch.first, only).count_leading(
                    names[: stretch.length], self._timeout
                )
        return [True] * near + self._stored(names[near:], alone=not near)

    def _stored(self, names: Sequence[str], alone: bool) -> list[bool]:
        """Returns which chunks the store has. Raises StorageDown if these are ``alone``; else others are there."""
        if not names:
            return []
        try:
            return self.backend.contains(names, self._timeout)
        except StorageDown as error:
            if alone:
                raise
            self._complain(str(error))
            return [False] * len(names)

    def _read(
        self, job: TransferJob, names: Sequence[str], pages: Sequence[PageBuffers], timeout: float
    ) -> list[PageResult]:
        if self.peers is None:
            return self.backend.read(names, pages, timeout)
        prompt, only, end = prompt_of(job.req_context), engines_of(job.req_context), time.monotonic() + timeout
        results, hashes = list[PageResult](), _hexes(prompt)
        for stretch in stretches(prompt, list(job.keys)):
            part = slice(stretch.start, stretch.start + stretch.length)
            left = max(0.001, end - time.monotonic())
            try:
                results += self._source(hashes, stretch.first, only).read(names[part], pages[part], left)
            except Exception as error:  # chunks of the calls before it may be in use yet
                results += [failed(f"{type(error).__name__}: {error}")] * stretch.length
        return results

    def _source(self, prompt: Sequence[str], first: int, only: Collection[str] | None = None) -> PageSource:
        return self.backend if self.peers is None else self.peers.behind(prompt, first, only)

    def _submit(self, pool: ThreadPoolExecutor, call: Callable[..., list[PageResult]], job: TransferJob) -> None:
        self._running[job.job_id] = pool.submit(self._run, call, job), job

    def _run(self, call: Callable[..., list[PageResult]], job: TransferJob) -> list[bool]:
        """Returns only when the store uses the chunks no more, for vLLM gives them to others, or the tier closes."""
        names, size = self._names(job.keys), self.block_size_bytes
        pages: list[PageBuffers] = [((self.address + int(chunk) * size, size),) for chunk in job.chunk_ids]
        results = call(names, pages, self._timeout)
        for result in results:
            if result.released is not None:
                self._wait_for(result.released)
        if len(results) != len(names):
            raise StorageFailed(
                f"the store answered {len(results)} results for {len(names)} chunks",
                metadata={"backend": self.backend.name, "status": "FAILED"},
            )
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

    def _left(self) -> list[Future[list[bool]]]:
        return [future for future, _ in self._running.values() if not future.done()]

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
        hashes = zip(keys, _hexes(keys), strict=True)
        return [self._keys.of(each, f"kv{get_offload_group_idx(key)}") for key, each in hashes]

    def _complain(self, what: str) -> None:
        self._lines.warning(self.tier_type, f"kvgrpc: tier {self.tier_type}: {what}")


def _chunks_of(jobs: Iterable[TransferJob]) -> int:
    return sum(len(job.keys) for job in jobs)


def _hexes(keys: Collection[OffloadKey]) -> list[str]:
    return [get_offload_block_hash(key).hex() for key in keys]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Keys of a call, from ``start`` on, that follow each other in their prompt from ``first`` on."""

    start: int
    length: int
    first: int


def prompt_of(context: ReqContext) -> list[OffloadKey]:
    """All chunks of a request's prompt from the first on, as vLLM noted them; none where it did not.

    A holder of chunks is asked by the whole prompt: what is behind another beginning has other bytes.
    """
    noted = list(getattr(context, "_offload_key_positions", {}).items())
    ends = sorted((end, key) for key, end in noted)
    step = ends[0][0] if ends else 0
    whole = [end for end, _ in ends] == [step * number for number in range(1, len(ends) + 1)]
    return [key for _, key in ends] if whole else []


def stretches(prompt: Sequence[OffloadKey], keys: Sequence[OffloadKey]) -> Iterator[Stretch]:
    """All keys, in order; those that are not of the prompt are behind its end, each by itself."""
    if not prompt:
        yield Stretch(0, len(keys), 0)
        return
    places = {key: place for place, key in enumerate(prompt)}
    found = [places.get(key, len(prompt)) for key in keys]
    start = 0
    for number in range(1, len(keys) + 1):
        if number == len(keys) or found[number] != found[number - 1] + 1 or found[number] >= len(prompt):
            yield Stretch(start, number - start, found[start])
            start = number


class Lookups(AsyncLookupManager):
    """vLLM's own way to ask a slow store, with our question."""

    def __init__(self, tier_type: str, contained: Callable[[Sequence[OffloadKey], ReqContext], list[bool]]) -> None:
        self._contained = contained  # before the thread, which asks
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> list[bool]:
        return self._contained(keys, req_context)


def identity_of(spec: Any, chunk_bytes: int) -> PageIdentity:
    """Returns what a chunk's bytes depend on besides its hash: what vLLM's own tier of files tells apart, its size, and
    the order of its bytes.

    A chunk holds the parts of all workers, one after the other, so that another number of them has other bytes: vLLM's
    own tiers leave that out for head-sharded models, and would load heads into the place of others. With vLLM's
    ``canonical_layout`` a chunk is the same whatever the number of workers, and its format names its order.
    """
    config = spec.config
    mapper = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=True)
    order: dict[str, Any] = {}
    if not config.canonical_layout:
        copies = 1 if config.replicated_layout else config.parallel.world_size
        order = {"kv_cache_layout": config.kv_cache_layout, "workers": copies}
    return PageIdentity(
        model=config.model.name,
        dtype=str(config.model.dtype).removeprefix("torch."),
        layout=json.dumps({**mapper.get_run_config(), "chunk_bytes": chunk_bytes, **order}, sort_keys=True),
        page_size=config.cache.tokens_per_hash * spec.blocks_per_chunk,
    )
