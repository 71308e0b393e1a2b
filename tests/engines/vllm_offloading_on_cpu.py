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
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        if self.config.canonical_layout:
            self._validate_canonical_refs(kv_caches)
            return CanonicalMemcpy(kv_caches, region, self.blocks_per_chunk)
        return Memcpy(kv_caches, region, self.blocks_per_chunk)


class Memcpy(OffloadingWorker):
    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._region, self._blocks = region, blocks_per_chunk
        views = self._host_views(kv_caches, region)
        caches = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in kv_caches.tensors]
        self._pairs = list(zip(caches, views, strict=True))
        self._finished: list[TransferResult] = []

    def _host_views(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> list[torch.Tensor]:
        return [
            self._by_block(region.create_next_worker_view(each.page_size_bytes * self._blocks))
            for each in kv_caches.tensors
        ]

    def _by_block(self, view: torch.Tensor) -> torch.Tensor:
        """Chunk, block, bytes."""
        return view.unflatten(1, (self._blocks, -1))

    def _places(self, device: GPULoadStoreSpec, host: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Blocks of the device; and in the host's memory the chunk of each, and its place there. The first block of a
        group of layers may be in the middle of its chunk. All groups have the same memory, and blocks of their own."""
        places, chunks = list[int](), list[int]()
        left = [int(chunk) for chunk in host.block_ids]
        for size, first in zip(device.group_sizes, device.block_indices, strict=True):
            behind = [int(first) % self._blocks + number for number in range(size)]
            places += [each % self._blocks for each in behind]
            chunks += [left[each // self._blocks] for each in behind]
            left = left[behind[-1] // self._blocks + 1 :] if behind else left
        return torch.as_tensor(device.block_ids), torch.tensor(chunks), torch.tensor(places)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        blocks, chunks, places = self._places(src_spec, dst_spec)
        for cache, host in self._pairs:
            host[chunks, places] = cache[blocks]
        return self._done(job_id, src_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False) -> bool:
        blocks, chunks, places = self._places(dst_spec, src_spec)
        for cache, host in self._pairs:
            cache[blocks] = host[chunks, places]
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
        size = len(spec.block_ids) * sum(host.shape[2] for _, host in self._pairs)
        self._finished.append(TransferResult(job_id, True, size, time.get_clock_info("monotonic").resolution))
        return True


class CanonicalMemcpy(Memcpy):
    """Into chunks that are the same whatever the number of workers: run by run, as vLLM's mappings say."""

    def _host_views(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> list[torch.Tensor]:
        self._refs = [ref for refs in kv_caches.group_data_refs for ref in refs]
        sizes = [0] * len(kv_caches.tensors)
        for ref in self._refs:
            assert ref.mapping is not None
            sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
        return [self._by_block(region.create_next_canonical_view(size * self._blocks)) for size in sizes]

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        blocks, chunks, places = self._places(src_spec, dst_spec)
        numbers = chunks * self._blocks + places
        for ref in self._refs:
            its = torch.tensor([ref.mapping.is_writer(int(number)) for number in numbers], dtype=torch.bool)
            self._copy(ref, blocks[its], chunks[its], places[its], store=True)
        return self._done(job_id, src_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False) -> bool:
        for ref in self._refs:
            self._copy(ref, *self._places(dst_spec, src_spec), store=False)
        return self._done(job_id, dst_spec)

    def _copy(self, ref: Any, blocks: torch.Tensor, chunks: torch.Tensor, places: torch.Tensor, store: bool) -> None:
        cache, host = self._pairs[ref.tensor_idx]
        for run in ref.mapping.runs:
            for number in range(run.num_fragments):
                at = run.local_offset + number * run.local_stride
                there = run.canonical_offset + number * run.canonical_stride
                here, away = slice(at, at + run.fragment_size), slice(there, there + run.fragment_size)
                if store:
                    host[chunks, places, away] = cache[blocks, here]
                else:
                    cache[blocks, here] = host[chunks, places, away]
