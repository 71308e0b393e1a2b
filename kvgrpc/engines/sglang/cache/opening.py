"""Opens PrefetchService beside the scheduler of a replica's leading rank, and pulls beside those of all its ranks.
Imports SGLang's settings of this process."""

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
from kvgrpc.net import joined, split
from kvgrpc.prefetch.model import Namespace, PrefetchLimits, StopPolicy
from kvgrpc.pull.model import PullConfig
from kvgrpc.server import CacheServer, RankConfig, open_cache, settings
from kvgrpc.server.cache.server import Pulls

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

    return open_cache(_config(tree, listen), cache_of, _pulls(tree))


def serve_pulls(tree: Any, listen: str) -> CacheServer | None:
    """The same at another rank of the replica, which holds other heads of each page: it lends and takes them, and takes
    no orders. None where pulls are off."""
    pulls = _pulls(tree)
    return None if pulls is None else open_cache(_config(tree, listen), None, pulls)


def _pulls(tree: Any) -> Pulls | None:
    storage = _storage(tree)
    if storage is None or storage.pull is None:
        return None
    model = process_model_config()
    try:
        heads = model.get_total_num_kv_heads()
    except (ValueError, RuntimeError):  # SGLang knows no single number, as of layers with unequal heads
        heads = 0
    return storage.pulls(model.model_path, heads)


def _config(tree: Any, listen: str) -> RankConfig:
    parallel, serving, storage = get_parallel(), get_serving(), _storage(tree)
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
    # One row a replica, whose other ranks are reached through the leading one: but each lends its own heads of a page.
    pull = None if storage is None else storage.pull
    tp, tps = (0, 1) if pull is None else (parallel.attn_tp_rank, parallel.attn_tp_size)
    if tp:  # the ports that an operator names are the leading rank's
        host = split(configured.get("advertise") or "")[0]
        configured |= {"admin_listen": (), "metrics_listen": "", **({"advertise": host} if host else {})}
    facts = {
        "role": Role.UNIFIED,
        "pools": (),
        "layout": Layout(dp=dps, tp=tps),
        "dp": dp,
        "tp": tp,
        "listen": joined(split(listen)[0], 0) if tp else for_rank(listen, dp),
        "pull": _for_rank(pull, dp * tps + tp),
        "model": identity(model.model_path, model.revision, "auto", model.dtype, mla, os.environ.get(MODEL_NAME, "")),
    }
    return RankConfig(**{**defaults, **configured, **facts})


def _for_rank(pull: PullConfig | None, rank: int) -> PullConfig | None:
    """Each rank of a machine lends at a port of its own."""
    return replace(pull, listen=for_rank(pull.listen, rank)) if pull is not None and pull.listen else pull


def _storage(tree: Any) -> KvGrpcStorage | None:
    storage = tree.cache_controller.storage_backend if tree.enable_storage else None
    return storage if isinstance(storage, KvGrpcStorage) else None


def _stored(tree: Any) -> StoredPages | None:
    storage = _storage(tree)
    return None if storage is None else storage.stored


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
