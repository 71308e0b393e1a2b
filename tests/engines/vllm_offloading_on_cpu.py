"""Lets vLLM's offloading run without a GPU: its copies between KV cache and host memory are memcpy here, on the spot.

Scheduler, tiers, connector and the region of host memory are vLLM's own.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class TieringOnCpu(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1 and not self.config.canonical_layout
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return Memcpy(kv_caches, region)


class Memcpy(OffloadingWorker):
    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pairs = [
            (
                each.tensor.view(torch.int8).view(-1, each.page_size_bytes),
                region.create_next_worker_view(each.page_size_bytes),
            )
            for each in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        for cache, host in self._pairs:
            host[torch.as_tensor(dst_spec.block_ids)] = cache[torch.as_tensor(src_spec.block_ids)]
        return self._done(job_id, src_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False) -> bool:
        for cache, host in self._pairs:
            cache[torch.as_tensor(dst_spec.block_ids)] = host[torch.as_tensor(src_spec.block_ids)]
        return self._done(job_id, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        self._pairs = []
        self._region.cleanup()

    def _done(self, job_id: int, spec: GPULoadStoreSpec) -> bool:
        size = len(spec.block_ids) * sum(host.shape[1] for _, host in self._pairs)
        self._finished.append(TransferResult(job_id, True, size, time.get_clock_info("monotonic").resolution))
        return True
