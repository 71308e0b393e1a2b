"""vLLM's chunks as engines of another kind have them: where keys and values lie in one, and the names of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvgrpc.engines.vllm.rank import BY_TOKENS, attention_backend, cpu_content, layer_numbers
from kvgrpc.hashing import Tokens, storage_seed
from kvgrpc.prefetch.pools.shape import DTYPE_BYTES
from kvgrpc.pull.common import DTYPES, PageAxes
from kvgrpc.pull.names import NotedNames

# A chunk, by vLLM's layout and attention backend: vllm/v1/attention/backends, what forward() makes of it.
_ORDERS = {
    ("LBHNC", "CPU_ATTN"): ("layer", "block", "head", "kv", "token"),
    ("LBHNC", "FLASH_ATTN"): ("layer", "block", "head", "token", "kv"),
    ("LBHNC", "TRITON_ATTN"): ("layer", "block", "head", "token", "kv"),
    ("LBNHC", "FLASH_ATTN"): ("layer", "block", "token", "head", "kv"),
    ("LBNHC", "TRITON_ATTN"): ("layer", "block", "token", "head", "kv"),
}


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """Of a worker: its only attention backend ("": there are several, or one for CPUs that packs keys), and of each
    layer its heads, elements of a head, tokens of a kernel's block and bytes of an element."""

    backend: str
    layers: tuple[tuple[int, int, int, int], ...]


def attention_facts(worker: Any) -> AttentionFacts | None:
    """Of the worker in whose process this is called. None where a layer has no cache of keys and values by heads."""
    config = getattr(worker, "vllm_config", None)
    found = getattr(getattr(config, "compilation_config", None), "static_forward_context", {}).values()
    layers = [each for each in found if hasattr(each, "attn_backend")]
    sizes = [_layer_facts(each) for each in layers]
    if not all(sizes):
        return None
    backend = attention_backend(config)
    if backend == "CPU_ATTN" and cpu_content(_cache_of(layers[0])) != BY_TOKENS:
        backend = ""
    return AttentionFacts(backend, tuple(each for each in sizes if each))


def axes_of(spec: Any, config: Any, workers: Sequence[AttentionFacts | None], chunk_bytes: int) -> PageAxes | None:
    """None for chunks that are not blocks of each layer, all of one size and with all heads, in an order that is
    known. ``spec``: of the offloading; ``config``: vLLM's; ``workers``: all of the engine."""
    its, first = spec.config, workers[0] if workers else None
    if first is None or set(workers) != {first} or not _is_whole(its):
        return None
    order = _ORDERS.get((its.kv_cache_layout or "", first.backend))
    dtype = str(its.model.dtype).removeprefix("torch.")
    if order is None or dtype not in DTYPES or config.model_config.use_mla or len(set(first.layers)) != 1:
        return None
    group, names = its.groups[0], list(its.groups[0].layer_names)
    if len(its.groups) != 1 or list(layer_numbers(names, 1)) != list(range(len(names))):
        return None
    _, head_size, tokens, element_bytes = first.layers[0]
    if len(names) != len(first.layers) or tokens != group.tokens_per_block:
        return None
    if element_bytes != DTYPE_BYTES[dtype]:  # quantised, whatever the configuration calls it
        return None
    heads, blocks = config.model_config.get_total_num_kv_heads(), its.cache.blocks_per_chunk
    axes = PageAxes(order, len(names), tokens, heads, head_size * element_bytes, blocks)
    return axes if axes.nbytes == chunk_bytes else None  # else something else lies in a chunk too


def _is_whole(its: Any) -> bool:
    """True if a block of a chunk is of all workers: with the canonical layout their heads lie beside each other."""
    size = its.parallel.world_size
    return bool(size == 1 or (its.canonical_layout and size == its.parallel.tp_size))


def _layer_facts(layer: Any) -> tuple[int, int, int, int] | None:
    cache = _cache_of(layer)
    if not hasattr(layer, "num_kv_heads") or not hasattr(cache, "element_size") or cache.dim() != 4:
        return None
    return int(layer.num_kv_heads), int(layer.head_size), int(cache.shape[2]), int(cache.element_size())


def _cache_of(layer: Any) -> Any:
    cache: Any = getattr(layer, "kv_cache", None)
    return cache[0] if isinstance(cache, (list, tuple)) and cache else cache


def note_request(names: NotedNames, request: Any, blocks_of_page: int) -> None:
    """The prompt of a vLLM request, where tokens are all that its hashes cover, with its salt."""
    if request is None or request.lora_request or request.mm_features or request.prompt_embeds is not None:
        return
    own = request.block_hashes[blocks_of_page - 1 :: blocks_of_page]
    if request.prompt_token_ids is not None:
        note_prompt(names, own, request.prompt_token_ids, request.cache_salt)


def note_prompt(names: NotedNames, own: Sequence[bytes], tokens: Tokens, cache_salt: str | None) -> None:
    """vLLM has no empty salt; one of SGLang's is a salt."""
    names.note(own, tokens, storage_seed(None, cache_salt or None))
