"""The class that vLLM loads: its scheduler and its workers each make one."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvgrpc.engines.compatibility import VLLM, check
from kvgrpc.engines.vllm.groups import groups_of
from kvgrpc.engines.vllm.handoffs import Handoffs
from kvgrpc.engines.vllm.limits import check_supported, features_of
from kvgrpc.engines.vllm.reached import reached
from kvgrpc.engines.vllm.scheduler import Scheduler
from kvgrpc.engines.vllm.stats import TransferMetrics, TransferStats

if TYPE_CHECKING:
    import torch

    from kvgrpc.engines.vllm.worker import Worker


class KvGrpcConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands KV caches over from engines with kv_role kv_producer to engines with kv_role kv_consumer; kv_both is both.

    Raises FeatureDisabled, whose text says what to do, for a configuration that it was not made for.
    """

    if hasattr(KVConnectorBase_V1, "_cache_hit_source"):  # since 0.32
        _cache_hit_source = type(KVConnectorBase_V1._cache_hit_source)("p2p")

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        check(VLLM, *features_of(vllm_config, kv_cache_config))
        transfer = vllm_config.kv_transfer_config
        self._scheduler = Scheduler(
            transfer.is_kv_producer,
            groups_of(kv_cache_config, vllm_config.parallel_config.decode_context_parallel_size),
            transfer.is_kv_consumer,
            reached(vllm_config, os.environ) if transfer.is_kv_producer else None,
        )
        self._worker: Worker | None = None
        if role is KVConnectorRole.SCHEDULER and vllm_config.kv_events_config is not None:
            # vLLM's scheduler makes its publisher after this. Only where events are published are they loaded.
            from kvgrpc.engines.vllm.events import publish_with_kvgrpc

            publish_with_kvgrpc(vllm_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Blocks of one layer lie together, and in them heads: what vLLM's own connectors ask for too."""
        return None if vllm_config.model_config.use_mla else "LBHNC"

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return False

    # In the scheduler.

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduler.tokens_elsewhere(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.on_blocks(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Handoffs:
        return self._scheduler.take()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.on_finished(request, block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.on_output(
            connector_output.invalid_block_ids or (),
            connector_output.failed_recving or (),
            connector_output.finished_recving or (),
        )

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Opens the rank. Here and not above, because what a fork inherits of gRPC does not work."""
        from kvgrpc.engines.vllm.worker import Worker

        self._worker = Worker(self._vllm_config, self._kv_cache_config, kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.take_on(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request whose pages are still to come is not computed."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Pages are sent when the whole prompt is computed."""

    def wait_for_save(self) -> None:
        """vLLM keeps the pages until they were sent."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return (None, None) if self._worker is None else self._worker.finished(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving = self._worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.take_failed_pages()

    def get_kv_connector_stats(self) -> TransferStats | None:
        """Of a worker, or of the scheduler."""
        return self._scheduler.take_stats() if self._worker is None else self._worker.take_stats()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # In the API server.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TransferMetrics:
        return TransferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# MultiConnector finds the statistics of its connectors by their names alone.
with contextlib.suppress(ValueError):
    KVConnectorFactory.register_connector("KvGrpcConnector", "kvgrpc.engines.vllm", "KvGrpcConnector")
