"""Opens PrefetchService beside the scheduler of a replica's leading rank. Imports SGLang's settings of this process."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving, process_model_config
from sglang.srt.utils.network import get_local_ip_auto

from kvgrpc.engines.addresses import engine_name, for_rank, is_wildcard, loopback_for
from kvgrpc.engines.identity import MODEL_NAME, identity
from kvgrpc.engines.sglang.cache.served import SglangCache
from kvgrpc.engines.sglang.cache.stored import StoredPages
from kvgrpc.engines.sglang.hicache import KvGrpcStorage
from kvgrpc.errors import FeatureDisabled
from kvgrpc.model import Layout, RankRef, Role
from kvgrpc.net import split
from kvgrpc.prefetch.model import Namespace, PrefetchLimits, StopPolicy
from kvgrpc.server import CacheServer, RankConfig, open_cache, settings

if TYPE_CHECKING:
    from kvgrpc.engines.sglang.cache.hooks import Desk


def check_serves(tree: Any) -> None:
    """Raises FeatureDisabled for a cache that takes no orders, with what to do."""
    parallel = get_parallel()
    if not isinstance(tree, UnifiedRadixCache) or tree.cache_controller is None:
        raise _refused("a cache without a host tier", "start with --enable-hierarchical-cache")
    if tree.host_memory_mode != "cache":
        # Its host pages belong to one request each, and there is none yet.
        mode = tree.host_memory_mode
        raise _refused(f"--hicache-host-memory-mode {mode}", "use --hicache-host-memory-mode cache")
    if parallel.pp_size > 1:
        raise _refused(f"--pp-size {parallel.pp_size}", "use --pp-size 1")


def is_leading() -> bool:
    """True if this scheduler takes requests from outside for its replica."""
    parallel = get_parallel()
    return bool(parallel.pp_rank == parallel.attn_tp_rank == parallel.attn_cp_rank == 0)


def serve(desk: Desk, tree: Any, listen: str) -> CacheServer:
    """Blocks until the port is bound. Raises InvalidRequest, AddressNotAllowed."""

    def cache_of(rank: RankRef) -> SglangCache:
        controller = tree.cache_controller
        desk.cache = SglangCache(
            rank,
            _namespace(tree),
            _limits(tree),
            desk.questions,
            desk.count,
            lambda: _stored(tree),
            page_bytes=controller.mem_pool_host.size_per_token * tree.page_size,
            write_policy=str(controller.write_policy),
            bigram=bool(tree.tree_core.is_eagle),
        )
        return desk.cache

    storage = tree.cache_controller.storage_backend if tree.enable_storage else None
    ours = storage if isinstance(storage, KvGrpcStorage) else None
    config = replace(_config(tree, listen), pull=None if ours is None else ours.pull)
    return open_cache(config, cache_of, None if ours is None else ours.pulls(process_model_config().model_path))


def _config(tree: Any, listen: str) -> RankConfig:
    parallel, serving = get_parallel(), get_serving()
    dp = parallel.attn_dp_rank if parallel.attn_dp_size > 1 else parallel.dp_rank or 0
    dps = parallel.attn_dp_size if parallel.attn_dp_size > 1 else parallel.dp_size
    advertise = get_local_ip_auto(loopback_for(serving.host)) if is_wildcard(split(listen)[0]) else ""
    model = process_model_config()
    mla = bool(getattr(tree.cache_controller.mem_pool_host, "mla", False))
    defaults = {"engine": engine_name(f"{advertise or serving.host}-{serving.port}"), "advertise": advertise}
    configured = settings()
    engine = configured.get("engine")
    if engine and get_disagg().disaggregation_mode in ("prefill", "decode"):
        # The registry knows an engine by one role, and that name is its hand-offs'.
        configured["engine"] = f"{engine}-cache"
    facts = {
        "role": Role.UNIFIED,
        "pools": (),
        # One row a replica: its other ranks are reached through the leading one alone.
        "layout": Layout(dp=dps),
        "dp": dp,
        "listen": for_rank(listen, dp),
        "model": identity(model.model_path, model.revision, "auto", model.dtype, mla, os.environ.get(MODEL_NAME, "")),
    }
    return RankConfig(**{**defaults, **configured, **facts})


def _stored(tree: Any) -> StoredPages | None:
    storage = tree.cache_controller.storage_backend if tree.enable_storage else None
    return storage.stored if isinstance(storage, KvGrpcStorage) else None


def _limits(tree: Any) -> PrefetchLimits:
    return PrefetchLimits(
        threshold_tokens=tree.prefetch_threshold,
        operations=1024,
        remembered=1024,
        stop_policy=StopPolicy(tree.prefetch_stop_policy),
    )


def _namespace(tree: Any) -> Namespace:
    parallel, pool = get_parallel(), tree.cache_controller.mem_pool_host
    kv = getattr(pool, "anchor_entry", None)
    host = pool if kv is None else kv.host_pool
    config = tree.cache_controller.storage_config if tree.enable_storage else None
    return Namespace(
        model=(getattr(config, "model_name", None) or "") if config is not None else "",
        dtype=str(getattr(host, "dtype", "")).removeprefix("torch."),
        layout=str(getattr(host, "layout", "")),
        page_tokens=tree.page_size,
        tp_rank=parallel.attn_tp_rank,
        tp_size=parallel.attn_tp_size,
    )


def _refused(what: str, remedy: str) -> FeatureDisabled:
    return FeatureDisabled(
        f"KVGRPC_CACHE_LISTEN: kvgrpc takes no orders for {what}: {remedy}",
        metadata={"feature": what, "howToEnable": remedy},
    )
