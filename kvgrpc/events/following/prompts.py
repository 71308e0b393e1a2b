"""A request's tokens as the hashes that an index is asked for: what engines' events carry for its blocks. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

from kvgrpc import hashing
from kvgrpc.events.log.digest import hash_key
from kvgrpc.hashing import Tokens


def sglang_hashes(
    tokens: Tokens,
    page_tokens: int,
    *,
    cache_salt: str = "",
    bigram: bool = False,
    extra_key: str | None = None,
    lora_id: str | None = None,
    dynamo: bool = False,
) -> list[int]:
    """Unsigned 64-bit hashes of the whole pages of a prompt, as SGLang's events name them.

    ``bigram``: the engine drafts with EAGLE. ``extra_key`` and ``lora_id`` are the request's (``sglang_lora_id`` knows
    the second of adapters that ``--lora-paths`` names); ``dynamo``: its events have ``format: dynamo``. An empty salt
    is none, as in the engine's requests.
    """
    return list(
        each_sglang_hash(
            tokens,
            page_tokens,
            cache_salt=cache_salt,
            bigram=bigram,
            extra_key=extra_key,
            lora_id=lora_id,
            dynamo=dynamo,
        )
    )


def each_sglang_hash(
    tokens: Tokens,
    page_tokens: int,
    *,
    cache_salt: str = "",
    bigram: bool = False,
    extra_key: str | None = None,
    lora_id: str | None = None,
    dynamo: bool = False,
) -> Iterator[int]:
    """The hashes of ``sglang_hashes``, one by one."""
    # Only whole pages are cached; a pair needs one more token.
    pages = (len(tokens) - bigram) // page_tokens if len(tokens) and page_tokens > 0 else 0
    whole = tokens[: pages * page_tokens + bigram] if pages > 0 else []
    salt = cache_salt or None
    key = extra_key if lora_id is None else (extra_key or "") + lora_id
    if dynamo:
        namespace = hashing.event_namespace(key, salt)
    else:
        namespace = hashing.event_namespace(key if lora_id is not None else None)
    for one in hashing.each_page_hash(whole, page_tokens, after=hashing.event_seed(salt), bigram=bigram):
        yield hash_key(hashing.sglang_event_hash(one, namespace))


def sglang_lora_id(name: str, path: str) -> str:
    """The id that SGLang (0.5.23) gives to an adapter of ``--lora-paths``; what is loaded later has a random one."""
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{name}\0{path}").hex


def vllm_hashes(
    tokens: Tokens,
    block_size: int,
    *,
    hash_seed: str = hashing.VLLM_HASH_SEED,
    algorithm: str = "sha256",
    lora: tuple[str, str] | None = None,
    cache_salt: str = "",
    multimodal: Sequence[tuple[str, int, int]] = (),
    lookahead: int = 0,
) -> list[int]:
    """Unsigned 64-bit hashes of the full blocks of a prompt, as vLLM's events name them.

    ``hash_seed``: the engine's PYTHONHASHSEED where it is set; ``algorithm``: its ``--prefix-caching-hash-algo``;
    ``lora``: name and path of the adapter; ``multimodal``: identifier, first token and number of tokens of each image.
    """
    hashes = hashing.each_block_hash(
        tokens,
        block_size,
        hash_seed=hash_seed,
        algorithm=algorithm,
        lora=lora,
        cache_salt=cache_salt,
        multimodal=multimodal,
        lookahead=lookahead,
    )
    return list(map(hashing.vllm_event_hash, hashes))
