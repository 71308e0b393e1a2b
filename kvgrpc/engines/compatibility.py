"""Finds what an adapter stands on in its engine: by looking, never by the version alone.

Nobody looks before somebody asks for kvgrpc: beside an engine that uses nothing of ours it is not in the way. Imports
no engine by itself.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from kvgrpc.errors import FeatureDisabled

HAND_OFFS, EVENTS, STORAGE, ORDERS = "hand-offs", "KV events", "storage tier", "prefetch by routers"
STAGES, STATES = "pipeline stages of prefill", "models with states"
DECODE_STAGES, ALL_STAGES = "pipeline stages of decode", "pipeline stages"
TENSOR_PARALLEL, REPLICAS = "tensor parallelism", "dp ranks"
WINDOWS, LATENTS, DRAFTS = "sliding windows", "latents (MLA)", "speculative decoding"
_OF_BOTH = (HAND_OFFS, TENSOR_PARALLEL, REPLICAS, STATES, WINDOWS, LATENTS, DRAFTS, EVENTS, STORAGE, ORDERS)

_SGLANG, _VLLM = "sglang.srt", "vllm.distributed.kv_transfer.kv_connector.v1"
_PEERS = f"{_SGLANG}.disaggregation.base.conn"
_TREE = f"{_SGLANG}.mem_cache.unified_radix_cache.UnifiedRadixCache"
_CORE = f"{_SGLANG}.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface"
_SCHEDULER_OF_STAGES = f"{_SGLANG}.managers.scheduler_pp_mixin.SchedulerPPMixin"
_RECEIVER = f"{_SGLANG}.managers.scheduler_components.request_receiver.SchedulerRequestReceiver"
_CONTROLLER = f"{_SGLANG}.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_CONNECTOR = f"{_VLLM}.base.KVConnectorBase_V1"
_SPECS = "vllm.v1.kv_cache_interface"
_OFFLOAD = "vllm.v1.kv_offload"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that has an adapter.

    ``tried``: of each version that was run the features that were; the last has all. ``needs``: of each feature the
    names that it uses, and of each name the parameters or fields without which it does not work; others may come and
    go.
    """

    title: str
    package: str
    tried: Mapping[str, Collection[str]]
    instead: str
    needs: Mapping[str, Mapping[str, str]]

    @property
    def newest(self) -> str:
        return list(self.tried)[-1]


SGLANG = Engine(
    title="SGLang",
    package="sglang",
    tried={
        "0.5.21": (HAND_OFFS,),
        "0.5.22": (HAND_OFFS, TENSOR_PARALLEL, WINDOWS, LATENTS, EVENTS, STORAGE),
        "0.5.23": (*_OF_BOTH, STAGES, DECODE_STAGES),
    },
    instead="use another transfer backend",
    needs={
        HAND_OFFS: {
            f"{_SGLANG}.plugins.hook_registry.HookRegistry.register": "target hook hook_type",
            f"{_SGLANG}.arg_groups.choices.add_disagg_transfer_backend_choices": "",
            f"{_SGLANG}.disaggregation.utils.get_kv_class": "transfer_backend class_type",
            f"{_SGLANG}.disaggregation.utils.TransferBackend": "FAKE MOONCAKE",
            f"{_SGLANG}.disaggregation.utils.DisaggregationMode": "PREFILL DECODE",
            f"{_SGLANG}.disaggregation.common.conn.KVTransferError": "bootstrap_room failure_reason",
            f"{_SGLANG}.disaggregation.decode.DecodeTransferQueue.__init__": "self",
            f"{_SGLANG}.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue": "self req",
            f"{_SGLANG}.disaggregation.prefill.PrefillBootstrapQueue.create_sender": "self req",
            f"{_SGLANG}.managers.io_struct.GenerateReqInput.__getitem__": "self",
            f"{_SGLANG}.managers.io_struct.GenerateReqInput.regenerate_rid": "self",
            f"{_PEERS}.KVArgs": (
                "page_size kv_data_ptrs kv_data_lens kv_item_lens aux_data_ptrs aux_data_lens aux_item_lens "
                "state_types state_data_ptrs state_data_lens state_item_lens kv_cache_dtype_str gpu_id"
            ),
            f"{_PEERS}.KVTransferMetric": "transfer_total_bytes",
            f"{_PEERS}.BaseKVManager.__init__": "args disaggregation_mode server_args is_mla_backend",
            f"{_PEERS}.BaseKVSender.__init__": "mgr bootstrap_addr bootstrap_room",
            f"{_PEERS}.BaseKVSender.init": "num_kv_indices aux_index",
            f"{_PEERS}.BaseKVSender.send": "kv_indices state_indices",
            f"{_PEERS}.BaseKVSender.should_send_kv_chunk": "num_pages last_chunk",
            f"{_PEERS}.BaseKVReceiver.__init__": "mgr bootstrap_addr bootstrap_room",
            f"{_PEERS}.BaseKVReceiver.init": "prefill_dp_rank",
            f"{_PEERS}.BaseKVReceiver.send_metadata": "kv_indices aux_index state_indices decode_prefix_len",
            f"{_PEERS}.BaseKVBootstrapServer.__init__": "host port",
            f"{_SGLANG}.environ.envs": (
                "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE "
                "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
            ),
            **dict.fromkeys(
                (
                    f"{_SGLANG}.runtime_context.{name}"
                    for name in (
                        *("get_device", "get_disagg", "get_exec", "get_memory"),
                        *("get_parallel", "get_serving", "get_spec"),
                    )
                ),
                "",
            ),
            f"{_SGLANG}.runtime_context.process_model_config": "",
        },
        TENSOR_PARALLEL: {f"{_SGLANG}.runtime_context.get_parallel": ""},
        REPLICAS: {f"{_SGLANG}.runtime_context.get_parallel": ""},
        STAGES: {
            f"{_SGLANG}.disaggregation.pp_consensus_store.PPConsensusStore.__init__": "pp_size pp_rank pp_group",
            f"{_SGLANG}.disaggregation.pp_consensus_store.PPConsensusStore": "collect pop",
        },
        DECODE_STAGES: {
            f"{_SCHEDULER_OF_STAGES}._pp_pd_get_decode_transferred_ids": "self",
            f"{_SCHEDULER_OF_STAGES}.process_decode_transfer_queue": "self release_rids",
            f"{_SCHEDULER_OF_STAGES}.get_rids": "self req_queue is_send",
            f"{_SCHEDULER_OF_STAGES}._pp_recv_pyobj_from_prev_stage": "self",
            f"{_SGLANG}.disaggregation.decode.DecodeTransferQueue.resolve_deferred_releases": "self",
            f"{_SGLANG}.disaggregation.decode.DecodePreallocQueue.pop_preallocated": "pp_good_rids pp_bad_rids",
        },
        STATES: {
            f"{_SGLANG}.configs.mamba_utils.mamba2_state_dtype": "config",
            f"{_SGLANG}.configs.mamba_utils.Mamba2StateDType": "conv temporal",
            f"{_SGLANG}.utils.cpu_has_amx_support": "",
        },
        WINDOWS: {
            f"{_PEERS}.StateType": "SWA",
            f"{_PEERS}.KVArgs": "swa_kv_cache_layout",
            f"{_SGLANG}.disaggregation.utils.setup_state_kv_args": "kv_args token_to_kv_pool",
        },
        LATENTS: {f"{_PEERS}.BaseKVManager.__init__": "is_mla_backend"},
        DRAFTS: {f"{_PEERS}.KVArgs": "num_draft_entries"},
        EVENTS: {
            f"{_SGLANG}.disaggregation.kv_events.EventPublisherFactory.register_publisher": "name",
            f"{_SGLANG}.disaggregation.kv_events.EventPublisher.publish": "events",
        },
        STORAGE: {
            f"{_SGLANG}.mem_cache.hicache_storage.HiCacheStorage.register_mem_pool_host": "mem_pool_host",
            f"{_SGLANG}.mem_cache.hicache_storage.HiCacheStorage.batch_exists": "keys",
            f"{_SGLANG}.mem_cache.hicache_storage.HiCacheStorage.batch_get_v1": "keys host_indices",
            f"{_SGLANG}.mem_cache.hicache_storage.HiCacheStorage.batch_set_v1": "keys host_indices",
            f"{_SGLANG}.mem_cache.hicache_storage.HiCacheStorage.batch_get_v2": "transfers",
            f"{_SGLANG}.mem_cache.hicache_storage.PoolHitPolicy": "",
            f"{_SGLANG}.mem_cache.hicache_storage.PoolTransferResult": "",
        },
        ORDERS: {
            f"{_SGLANG}.plugins.hook_registry.HookRegistry.register": "target hook hook_type",
            f"{_SGLANG}.managers.scheduler.Scheduler.init_request_receiver": "self",
            f"{_SGLANG}.managers.scheduler.Scheduler.process_input_requests": "self recv_reqs",
            f"{_RECEIVER}._broadcast_reqs_across_ranks": "self recv_reqs local_reqs",
            f"{_TREE}.check_hicache_events": "self",
            f"{_TREE}.reset": "self",
            f"{_TREE}.match_prefix": "params",
            f"{_TREE}.prefetch_from_storage": (
                "request last_host_node_id new_input_tokens last_hash prefix_keys matched_prefix_tokens extra_key "
                "cache_salt"
            ),
            f"{_TREE}.check_prefetch_progress": "request",
            f"{_TREE}.release_aborted_request": "request",
            f"{_TREE}.write_backup_storage": "node_id",
            f"{_TREE}.inc_host_lock_ref": "node_id",
            f"{_TREE}.dec_host_lock_ref": "node_id params",
            f"{_TREE}.get_last_hash_value": "node_id",
            f"{_TREE}.is_backuped": "node_id",
            f"{_TREE}.is_root": "node_id",
            f"{_SGLANG}.mem_cache.base_prefix_cache.CacheRequestHandle": "rid attempt_id",
            f"{_SGLANG}.mem_cache.base_prefix_cache.MatchPrefixParams": "key",
            f"{_SGLANG}.mem_cache.base_prefix_cache.MatchResult": "device_prefix_len host_hit_length last_host_node",
            f"{_SGLANG}.mem_cache.radix_cache.RadixKey.__init__": "token_ids extra_key cache_salt",
            f"{_CORE}.collect_path_info": "",
            f"{_CONTROLLER}._page_backup": "self operation",
        },
    },
)
VLLM = Engine(
    title="vLLM",
    package="vllm",
    tried={
        "0.31.0": (HAND_OFFS, STORAGE),
        "0.32.0": (HAND_OFFS, REPLICAS, WINDOWS, LATENTS, EVENTS, STORAGE),
        "0.33.0": (*_OF_BOTH, ALL_STAGES),
    },
    instead="use another kv_connector",
    needs={
        HAND_OFFS: {
            f"{_CONNECTOR}.__init__": "vllm_config role kv_cache_config",
            f"{_CONNECTOR}.get_required_kvcache_layout": "vllm_config",
            f"{_CONNECTOR}.on_new_request": "request",
            f"{_CONNECTOR}.get_num_new_matched_tokens": "request num_computed_tokens",
            f"{_CONNECTOR}.update_state_after_alloc": "request blocks num_external_tokens",
            f"{_CONNECTOR}.build_connector_meta": "scheduler_output",
            f"{_CONNECTOR}.request_finished": "request block_ids",
            f"{_VLLM}.base.SupportsHMA.request_finished_all_groups": "request block_ids",
            f"{_VLLM}.base.KVConnectorTransferResults": "failed_recving",
            f"{_CONNECTOR}.register_kv_caches": "kv_caches",
            f"{_CONNECTOR}.start_load_kv": "forward_context",
            f"{_CONNECTOR}.get_finished": "finished_req_ids",
            f"{_CONNECTOR}.get_transfer_results": "finished_req_ids",
            f"{_CONNECTOR}.get_block_ids_with_load_errors": "",
            f"{_CONNECTOR}.get_kv_connector_stats": "",
            f"{_CONNECTOR}.build_kv_connector_stats": "data",
            f"{_CONNECTOR}.build_prom_metrics": "vllm_config metric_types labelnames per_engine_labelvalues",
            f"{_CONNECTOR}.shutdown": "",
            f"{_VLLM}.metrics.KVConnectorPromMetrics": "observe",
            f"{_VLLM}.metrics.KVConnectorStats": "aggregate reduce is_empty reset",
            "vllm.v1.metrics.utils.create_metric_per_engine": "",
            f"{_SPECS}.KVCacheConfig": "num_blocks kv_cache_groups kv_cache_layout",
            f"{_SPECS}.FullAttentionSpec": "num_kv_heads",
            f"{_SPECS}.MambaSpec": "",
            f"{_SPECS}.MLAAttentionSpec": "",
            f"{_SPECS}.RSWASpec": "",
            f"{_SPECS}.ChunkedLocalAttentionSpec": "",
            f"{_SPECS}.SlidingWindowMLASpec": "",
            f"{_SPECS}.SlidingWindowSpec": "",
            f"{_SPECS}.UniformTypeKVCacheSpecs": "kv_cache_specs",
            "vllm.distributed.parallel_state.get_pcp_group": "",
            "vllm.v1.core.kv_cache_manager.KVCacheBlocks": "get_block_ids",
            "vllm.v1.request.RequestStatus": "FINISHED_LENGTH_CAPPED FINISHED_STOPPED",
            "vllm.v1.request.Request": "get_skip_reading_prefix_cache",
        },
        TENSOR_PARALLEL: {
            "vllm.config.ParallelConfig": "tensor_parallel_size",
            "vllm.distributed.parallel_state.get_tensor_model_parallel_rank": "",
        },
        REPLICAS: {"vllm.config.ParallelConfig": "data_parallel_size data_parallel_index"},
        ALL_STAGES: {
            "vllm.config.ParallelConfig": "pipeline_parallel_size",
            "vllm.distributed.parallel_state.get_pp_group": "",
        },
        STATES: {
            f"{_SPECS}.MambaSpec": "shapes dtypes mamba_type",
            "vllm.model_executor.layers.mamba.mamba_utils.get_conv_state_layout": "",
        },
        WINDOWS: {f"{_SPECS}.SlidingWindowSpec": "", f"{_SPECS}.ChunkedLocalAttentionSpec": ""},
        LATENTS: {"vllm.config.ModelConfig": "use_mla"},
        DRAFTS: {"vllm.config.SpeculativeConfig": "method"},
        EVENTS: {
            "vllm.distributed.kv_events.EventPublisherFactory": "_registry",
            "vllm.distributed.kv_events.EventPublisher.publish": "events",
            "vllm.config.KVEventsConfig": "enable_kv_cache_events publisher endpoint",
        },
        STORAGE: {
            f"{_OFFLOAD}.base.Locality": "",
            f"{_OFFLOAD}.base.LookupResult": "HIT MISS RETRY",
            f"{_OFFLOAD}.base.Medium": "STORAGE",
            f"{_OFFLOAD}.base.RequestOffloadingContext": "",
            f"{_OFFLOAD}.base.get_offload_block_hash": "",
            f"{_OFFLOAD}.base.get_offload_group_idx": "",
            f"{_OFFLOAD}.file_mapper.FileMapper.from_offloading_spec": "parallel_agnostic",
            f"{_OFFLOAD}.tiering.async_lookup.AsyncLookupManager": "lookup flush cleanup mark_miss shutdown",
            f"{_OFFLOAD}.tiering.base.SecondaryTierManager.__init__": (
                "offloading_spec primary_kv_view tier_type backpressure_detector"
            ),
            f"{_OFFLOAD}.tiering.base.SecondaryTierManager.lookup": "key req_context",
            f"{_OFFLOAD}.tiering.base.TransferJob": "job_id keys chunk_ids is_promotion submit_time",
            f"{_OFFLOAD}.tiering.base.JobResult": "job_id success successful_keys transfer_time transfer_bytes",
        },
        ORDERS: {
            f"{_OFFLOAD}.base.TierFilter": "allows",
            f"{_OFFLOAD}.base.ReqContext": "load_tier_filter set_offload_key_position get_state",
            f"{_OFFLOAD}.base.make_offload_key": "block_hash group_idx",
            f"{_OFFLOAD}.tiering.base.ParentManager": "on_new_request lookup create_store_job on_request_finished",
            f"{_OFFLOAD}.tiering.base.SecondaryTierManager": "serve_external_requests tolerates_off_thread_polling",
            "vllm.v1.engine.EngineCoreRequestType": "WAKEUP",
            "vllm.utils.hashing.sha256": "",
        },
    },
)
ENGINES: Mapping[str, Engine] = {engine.package: engine for engine in (SGLANG, VLLM)}

_log = logging.getLogger(__name__)
_warned: set[str] = set()


def check(engine: Engine, *features: str) -> None:
    """Somebody asks for these features. Warns of those that were never run with this version, once of each, in one
    line, and goes on; of a version that was never run at all once.

    Raises FeatureDisabled, whose text has the missing thing, the version and what to do, where it cannot be served.
    """
    for feature in features:
        gone = next(missing(engine.needs[feature]), None)
        if gone is not None:
            raise refusal(engine, gone)
    new = [feature for feature in features if not is_tried(engine, feature) and feature not in _warned]
    if new and (is_tried(engine) or not _warned):
        _log.warning("kvgrpc: %s", untried(engine, new))
    _warned.update(new)


def refusal(engine: Engine, gone: str) -> FeatureDisabled:
    remedy = f"install {engine.package}=={engine.newest} or a kvgrpc made for yours, or {engine.instead}"
    return FeatureDisabled(
        f"kvgrpc cannot serve this {engine.title} {version_of(engine)}: {gone}; {remedy}",
        metadata={"feature": engine.package, "howToEnable": remedy},
    )


def untried(engine: Engine, features: Sequence[str]) -> str:
    version, there = f"{engine.title} {version_of(engine)}", "all names that it needs are there, so it goes on"
    if not is_tried(engine):
        return f"{version} was never tried with this kvgrpc, which was with {', '.join(engine.tried)}; {there}"
    return f"{', '.join(features)}: never run with {version}, but with {engine.newest}; {there}"


def is_tried(engine: Engine, feature: str = HAND_OFFS) -> bool:
    """True if that was run with the engine's version that is here; no version was without hand-offs."""
    # Builds of the same release for other hardware: "0.33.0+cu130".
    return feature in engine.tried.get(version_of(engine).partition("+")[0], ())


def version_of(engine: Engine) -> str:
    try:
        return metadata.version(engine.package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def missing(needs: Mapping[str, str]) -> Iterator[str]:
    """Yields what of these an engine lacks, in words."""
    for name, words in needs.items():
        try:
            found = pkgutil.resolve_name(name)
        except Exception as error:  # an import runs the engine's own code
            own = isinstance(error, (ImportError, AttributeError))
            yield f"it has no {name}" if own else f"{name} cannot be loaded: {error!r}"
            continue
        lacks = [word for word in words.split() if not _knows(found, word)]
        if lacks:
            yield f"{name} has no {', '.join(lacks)}"


def _knows(found: object, word: str) -> bool:
    """True if it has a parameter, a field or a method of that name."""
    return word in _parameters(found) or hasattr(found, word) or _declares(found, word)


def _parameters(found: object) -> Sequence[str]:
    try:
        return tuple(inspect.signature(found).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ()


def _declares(found: object, word: str) -> bool:
    kinds = found.__mro__ if isinstance(found, type) else ()
    return any(word in vars(kind).get("__annotations__", {}) for kind in kinds)
