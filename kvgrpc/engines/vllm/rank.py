"""vLLM's description of a worker process as the configuration of a kvgrpc rank."""

from __future__ import annotations

import logging
import math
import re
import uuid
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from kvgrpc.engines.addresses import bracketed, engine_name, loopback_for
from kvgrpc.engines.identity import MODEL_NAME, dtype_name, identity
from kvgrpc.engines.vllm.groups import Group, groups_of, spec_of_layer, specs_of
from kvgrpc.engines.vllm.limits import UNTRIED
from kvgrpc.engines.vllm_plugin import LISTEN
from kvgrpc.errors import FeatureDisabled, InvalidRequest
from kvgrpc.events.config import keys_of
from kvgrpc.model import Layout, ModelIdentity, Pool, PoolKind, Region, Role
from kvgrpc.net import split
from kvgrpc.server import RankConfig, settings
from kvgrpc.transfer.layout.token_shares import axes_of_shares

logger = logging.getLogger("vllm." + __name__)
BOOTSTRAP_PORT, EVENTS_LISTEN, NAME_OF_MODEL = "bootstrap_port", "events_listen", "model_name"
_ROLES = {
    "kv_producer": (Role.PREFILL,),
    "kv_consumer": (Role.DECODE,),
    "kv_both": (Role.PREFILL, Role.DECODE),
}
# vllm/v1/attention/backends: what forward() makes of its cache.
_CONTENT = {
    "FLASH_ATTN": "head,token,kv,dim",
    "TRITON_ATTN": "head,token,kv,dim",
}
BY_TOKENS = "head,kv,token,dim"
# A part of a layer's name.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class WorkerProcess:
    """The place of a worker: role, rank and addresses, from vLLM's configuration and ours over it. ``stage``: of the
    pipeline; one of several has some of the model's layers. ``context``: which of prefill's context parallel ranks,
    all of which have all of a prompt.

    ``role``: which of the two ranks of a worker with kv_role kv_both; else what the kv_role says.
    ``host`` is what the rank binds: VLLM_HOST_IP, or loopback where nobody has said that others may come.
    ``bootstrap`` is "host:port" of the engine's own registry, "" at decode; ``external`` that of one for all engines.
    Replicas of a dense model (--data-parallel-size) are engines of their own for vLLM: each has the next port.
    ``events_listen``: "host:port" where the scheduler's process serves KV events; "": vLLM publishes them itself.
    ``events``: keys of EventsConfig that vLLM's configuration does not admit.
    ``model_name``: what the operator calls the model, "" for its own name.
    """

    def __init__(
        self,
        config: Any,
        tp_rank: int,
        environment: Mapping[str, str],
        role: Role | None = None,
        stage: int = 0,
        context: int = 0,
    ) -> None:
        transfer, parallel = config.kv_transfer_config, config.parallel_config
        extra = dict(transfer.kv_connector_extra_config)
        port = extra.pop(BOOTSTRAP_PORT, environment.get("VLLM_MOONCAKE_BOOTSTRAP_PORT", "8998"))
        self.events_listen = str(extra.pop(EVENTS_LISTEN, environment.get(LISTEN, "")))
        extra.pop(UNTRIED, None)  # limits.py looks at them
        self.model_name = str(extra.pop(NAME_OF_MODEL, environment.get(MODEL_NAME, "")))
        self.configured = settings(extra, environment)
        self.events = self._events()
        self.roles = _ROLES[transfer.kv_role]
        self.role = role or self.roles[0]
        self.tp, self.tp_size = tp_rank, parallel.tensor_parallel_size
        self.pp, self.pp_size = stage, parallel.pipeline_parallel_size
        self.cp, self.cp_size = context, parallel.prefill_context_parallel_size
        self.host = environment.get("VLLM_HOST_IP") or "127.0.0.1"
        self.external = str(self.configured.pop("registry", ""))
        # vLLM says data_parallel_size 1 by now, and rank 0; the index stays.
        replica = int(getattr(parallel, "data_parallel_index", 0) or 0)
        head = parallel.master_addr if parallel.nnodes > 1 else self.host
        self.bootstrap = f"{bracketed(loopback_for(head))}:{_port(port) + replica}" if self.role is Role.PREFILL else ""
        self.serves_registry = self.role is Role.PREFILL and not self.external and tp_rank == stage == context == 0

    @property
    def name(self) -> str:
        """Of the engine: as requests name prefill, which must be found; decode is looked for by people only."""
        return engine_name(self.bootstrap or f"{self.host}-decode")

    def _events(self) -> dict[str, Any]:
        if not self.events_listen:
            return {}
        # They are the scheduler's, who has the publisher, and not this worker's.
        return keys_of(self.configured.pop("events", None))


def rank_config(place: WorkerProcess, pools: Sequence[Pool], model: ModelIdentity) -> RankConfig:
    """The rank to open: KVGRPC_… and kv_connector_extra_config over what vLLM says, but not over memory and place."""
    configured = dict(place.configured)
    if place.role is not place.roles[0]:  # the worker's other rank has those ports
        host = split(str(configured.get("listen", f"{bracketed(place.host)}:0")))[0]
        configured = {**configured, "listen": f"{bracketed(host)}:0", "admin_listen": (), "metrics_listen": ""}
    defaults: dict[str, Any] = {
        "engine": place.name,
        "listen": f"{bracketed(place.host)}:0",
        "data_plane": "mooncake",
    }
    facts: dict[str, Any] = {
        "role": place.role,
        "layout": Layout(pp=place.pp_size, cp=place.cp_size, tp=place.tp_size),
        "pp": place.pp,
        "cp": place.cp,
        "tp": place.tp,
        "pools": tuple(pools),
        "model": model,
        # Decode is dialled by nobody, and its requests name their registry.
        "registry": (place.external or place.bootstrap) if place.role is Role.PREFILL else "",
        "bootstrap_allow": (*configured.pop("bootstrap_allow", ()), *_host(place.external)),
    }
    return RankConfig(**{**defaults, **configured, **facts})


def pools_of(caches: Mapping[str, torch.Tensor], config: Any, kv_cache_config: Any, tp_rank: int) -> tuple[Pool, ...]:
    """A pool for each group of layers, without regions where a pipeline stage has none of them. Several may have the
    same memory: each block is one group's at a time.

    Raises FeatureDisabled for a cache whose blocks are not dense, each layer by itself.
    """
    found = []
    for group in groups_of(kv_cache_config, config.parallel_config.decode_context_parallel_size):
        held = {name: caches[name] for name in kv_cache_config.kv_cache_groups[group.index].layer_names}
        for name, cache in held.items():
            _check_dense(name, cache, kv_cache_config.num_blocks, padded=group.has_state)
        if group.has_state:
            found.append(_states(group, held, config, kv_cache_config))
        else:
            found.append(_pool(group, held, config, kv_cache_config, tp_rank))
    return tuple(found)


def _pool(group: Group, caches: Mapping[str, torch.Tensor], config: Any, kv_cache_config: Any, tp_rank: int) -> Pool:
    """One region a layer; a page is a block of the scheduler."""
    blocks, spec = kv_cache_config.num_blocks, kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
    names: dict[int, str] = {}  # by address: some layers may share one cache
    for name, cache in caches.items():
        names.setdefault(cache.data_ptr(), name)
    numbers = layer_numbers(list(names.values()), config.parallel_config.pipeline_parallel_size)
    held = [caches[name] for name in names.values()]
    regions = (
        Region(number, "kv", cache.data_ptr(), cache.nbytes // blocks, cache.nbytes // blocks)
        for number, cache in zip(numbers, held, strict=True)
    )
    return Pool(
        name=group.pool,
        kind=PoolKind.KV,
        page_tokens=group.block_tokens,
        pages=blocks,
        # The model's type is that of its first pool, also in a stage that has no layer of it.
        dtype=dtype_name(config.cache_config.cache_dtype, held[0].dtype if held else specs_of(spec)[0].dtype),
        regions=tuple(sorted(regions)),
        axes=_axes(kv_cache_config.kv_cache_layout or "", config, caches, blocks),
        location=_location(held),
        **_heads(config, tp_rank, [each.num_kv_heads for each in specs_of(spec)]),
    )


def layer_numbers(names: Sequence[str], stages: int) -> Sequence[int]:
    """In the whole model, which vLLM's names of layers say ("model.layers.3.self_attn.attn"). Where they do not, their
    order in vLLM, which both sides share.

    Raises FeatureDisabled where that cannot be, because a pipeline stage has some of the layers.
    """
    found = [_NUMBER.findall(name) for name in names]
    numbers = [int(each[0]) for each in found if len(each) == 1]
    if len(set(numbers)) == len(names):
        return numbers
    if stages > 1:
        raise FeatureDisabled(
            f"kvgrpc does not serve pipeline parallelism with layers whose names do not number them: {names[0]}; "
            "use --pipeline-parallel-size 1",
            metadata={"feature": "pipeline parallelism", "howToEnable": "--pipeline-parallel-size 1"},
        )
    return range(len(names))


def _states(group: Group, caches: Mapping[str, torch.Tensor], config: Any, kv_cache_config: Any) -> Pool:
    """One region a layer. A page is the state of a request, and not what vLLM adds to make its block as large as those
    of other layers.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout  # heavy, and for these models alone

    its = kv_cache_config.kv_cache_groups[group.index].kv_cache_spec
    numbers = layer_numbers(list(caches), config.parallel_config.pipeline_parallel_size)
    regions = (
        Region(number, "state", cache.data_ptr(), _block_bytes(cache), _state_bytes(spec_of_layer(its, name)))
        for number, (name, cache) in zip(numbers, caches.items(), strict=True)
    )
    dtypes = {str(dtype).removeprefix("torch.") for spec in specs_of(its) for dtype in spec.dtypes}
    return Pool(
        name=group.pool,
        kind=PoolKind.STATE,
        page_tokens=0,  # a state is of as many tokens as there were
        pages=kv_cache_config.num_blocks,
        dtype=",".join(sorted(dtypes)),
        regions=tuple(sorted(regions)),
        axes=f"convolution:{get_conv_state_layout()}",
        location=_location(list(caches.values())),
    )


def bootstrap_address(text: str) -> str:
    """ "host:port" of a router's remote_bootstrap_addr, which is a URL."""
    return re.sub(r"^[a-z]+://", "", text.strip()).rstrip("/")


def model_of(config: Any, pool: Pool, place: WorkerProcess) -> ModelIdentity:
    """Returns what the engine runs, as the other side compares it."""
    model = config.model_config
    return identity(model.model, model.revision, pool.dtype, pool.dtype, model.use_mla, place.model_name)


def _axes(layout: str, config: Any, caches: Mapping[str, torch.Tensor], blocks: int) -> str:
    """vLLM's letters of a page (layer, block, head, token, content) in our words, where a page is one of its blocks;
    that its tokens are shared out, where they are.

    Where in the content keys and values are is known of some attention backends; of the others vLLM alone reads it.
    """
    shares = config.parallel_config.decode_context_parallel_size
    if shares > 1:
        return axes_of_shares(shares)
    cache = next(iter(caches.values()), None)
    if layout != "LBHNC" or cache is None or cache.shape[0] != blocks:  # a block is several of the kernel's
        return layout
    backend = attention_backend(config, caches)
    return cpu_content(cache) if backend == "CPU_ATTN" else _CONTENT.get(backend, "head,token,dim")


def cpu_content(cache: torch.Tensor) -> str:
    """Our words for the order of a block (heads, tokens, content) of a layer's ``cache``: keys of all tokens, then
    values, where each token has its own bytes; else the kernel's name and a checksum of a block as it packs it, which
    others have to have too. An order that is not known is nobody else's.

    A block is written where nobody looks, because vLLM's build of C++ decides it. Raises nothing.
    """
    try:
        from vllm import _custom_ops as kernels
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        tokens, size = cache.shape[2], cache.shape[3] // 2
        isa = str(_get_attn_isa(cache.dtype, tokens, size))
        block = torch.zeros((1, 1, 2 * tokens, size), dtype=cache.dtype)
        keys, values = block.chunk(2, dim=2)
        # A prime, which no power of two repeats, and small enough for each dtype.
        new = (torch.arange(tokens * size) % 251 + 1).to(cache.dtype).reshape(tokens, 1, size)
        kernels.cpu_attn_reshape_and_cache(new, -new, keys, values, torch.arange(tokens), isa)
    except Exception as error:
        logger.info("kvgrpc: where vLLM's CPU attention keeps a token is not known: %s", error)
        return f"head,kv,unknown-{uuid.uuid4().hex}"
    if torch.equal(keys[0, 0], new[:, 0]) and torch.equal(values[0, 0], -new[:, 0]):
        return BY_TOKENS
    return f"head,kv,{isa}-{zlib.crc32(block.view(torch.uint8).numpy().tobytes()):08x}"


def attention_backend(config: Any, of: Collection[str] | None = None) -> str:
    """The name of the only attention backend of these layers, without names of all that are here, "" where there are
    several, or none to ask."""
    layers = getattr(getattr(config, "compilation_config", None), "static_forward_context", {})
    asked = [layer for name, layer in layers.items() if of is None or name in of]
    names = {layer.attn_backend.get_name() for layer in asked if hasattr(layer, "attn_backend")}
    return names.pop() if len(names) == 1 else ""


def _heads(config: Any, tp_rank: int, of_layers: Sequence[int]) -> dict[str, int]:
    """Returns which KV heads the rank holds: an equal share, or copies where heads are fewer than ranks; none: MLA, and
    layers with heads of another number than the model says (``of_layers``), which only equal parallel sizes hand over.
    Of latents whose tokens are shared out: which share it has, as vLLM deals them to tensor-parallel ranks.
    """
    shares = config.parallel_config.decode_context_parallel_size
    if config.model_config.use_mla:
        return {"head_start": tp_rank % shares, "head_count": 1} if shares > 1 else {}
    total, tp = config.model_config.get_total_num_kv_heads(), config.parallel_config.tensor_parallel_size
    count = max(total // tp, 1)
    if set(of_layers) != {count}:
        return {}
    return {"heads_total": total, "head_start": tp_rank * total // tp, "head_count": count}


def _state_bytes(spec: Any) -> int:
    return sum(int(math.prod(shape) * dtype.itemsize) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))


def _location(caches: Sequence[torch.Tensor]) -> str:
    return f"cuda:{caches[0].device.index}" if caches and caches[0].is_cuda else "cpu:0"


def _block_bytes(cache: torch.Tensor) -> int:
    """From the beginning of one block to that of the next."""
    return int(cache.stride(0) * cache.element_size())


def _check_dense(name: str, cache: torch.Tensor, blocks: int, padded: bool) -> None:
    """``padded``: blocks may have bytes behind them that nobody uses."""
    if not isinstance(cache, torch.Tensor):  # a state in parts, as older versions had it
        raise FeatureDisabled(
            f"kvgrpc does not serve the state of {name}: this vLLM keeps its parts apart; use vllm==0.33.0",
            metadata={"feature": "KV cache layout", "howToEnable": "vllm==0.33.0"},
        )
    own = cache[0].numel()
    apart = cache.stride(0) < own if padded else cache.stride(0) != own
    if cache.shape[0] % blocks or apart or not _is_dense(cache[0]):
        raise FeatureDisabled(
            f"kvgrpc does not serve the KV cache of {name}, shape {tuple(cache.shape)}, strides {cache.stride()}: "
            f"its {blocks} blocks do not lie one behind the other; use another attention backend or kv_connector",
            metadata={"feature": "KV cache layout", "howToEnable": "another --attention-backend"},
        )


def _is_dense(block: torch.Tensor) -> bool:
    """True if the elements fill a stretch of memory, in whatever order of axes."""
    expected = 1
    for stride, size in sorted(zip(block.stride(), block.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _port(value: object) -> int:
    if not str(value).isdigit() or not 0 < int(str(value)) < 65536:
        raise InvalidRequest.of(BOOTSTRAP_PORT, value, "a port, 1 to 65535")
    return int(str(value))


def _host(address: str) -> tuple[str, ...]:
    return (split(address)[0],) if address else ()
