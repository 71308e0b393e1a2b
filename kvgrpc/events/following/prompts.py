"""A request's tokens as the hashes that an index is asked for: what engines' events carry for its blocks. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvgrpc import hashing
from kvgrpc.events.log.digest import hash_key
from kvgrpc.hashing import Tokens


def sglang_hashes(tokens: Tokens, page_tokens: int, *, cache_salt: str = "", bigram: bool = False) -> list[int]:
    """Unsigned 64-bit hashes of the whole pages of a prompt, as SGLang's events name them (``format: default``).

    ``bigram``: the engine drafts with EAGLE. Not those of an engine with ``format: dynamo`` or of a request with a LoRA
    adapter, which SGLang hashes once more: take them from the engine.
    """
    return list(each_sglang_hash(tokens, page_tokens, cache_salt=cache_salt, bigram=bigram))


def each_sglang_hash(tokens: Tokens, page_tokens: int, *, cache_salt: str = "", bigram: bool = False) -> Iterator[int]:
    """As ``sglang_hashes``, one by one."""
    # Only whole pages are cached; a pair needs one more token.
    pages = (len(tokens) - bigram) // page_tokens if len(tokens) and page_tokens > 0 else 0
    whole = tokens[: pages * page_tokens + bigram] if pages > 0 else []
    for one in hashing.each_page_hash(whole, page_tokens, after=hashing.event_seed(cache_salt), bigram=bigram):
        yield hash_key(hashing.sglang_event_hash(one))


def vllm_hashes(
    tokens: Tokens,
    block_size: int,
    *,
    hash_seed: str,
    algorithm: str = "sha256",
    lora_name: str = "",
    cache_salt: str = "",
) -> list[int]:
    """Unsigned 64-bit hashes of the full blocks of a text-only prompt, as vLLM's events name them.

    ``hash_seed``: the engine's PYTHONHASHSEED; ``algorithm``: its ``--prefix-caching-hash-algo``.
    """
    hashes = hashing.each_block_hash(
        tokens, block_size, hash_seed=hash_seed, algorithm=algorithm, lora_name=lora_name, cache_salt=cache_salt
    )
    return list(map(hashing.vllm_event_hash, hashes))
