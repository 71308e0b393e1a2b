"""The names that vLLM gives the chunks of a prompt, for callers who have its tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import OffloadKey, make_offload_key

from kvgrpc.errors import FeatureDisabled, InvalidRequest
from kvgrpc.hashing import BLOCK_HASH_ALGORITHMS, VLLM_HASH_SEED, each_block_hash


class ChunkNames:
    """Of an engine with one group of layers, which all see the whole prompt. Raises FeatureDisabled for another."""

    def __init__(self, spec: Any) -> None:
        groups, cache = spec.config.groups, spec.config.cache
        if len(groups) != 1 or groups[0].sliding_window_size_in_chunks is not None:
            remedy = "a model whose layers are all of full attention"
            raise FeatureDisabled(
                f"orders for a cache with {len(groups)} groups of layers are not built; use {remedy}",
                metadata={"feature": "PrefetchService in vLLM", "howToEnable": remedy},
            )
        self.page_tokens: int = groups[0].tokens_per_block * cache.blocks_per_chunk
        self._group: int = groups[0].group_id
        self._hash_tokens: int = cache.tokens_per_hash
        self.hashes_of_page = self.page_tokens // self._hash_tokens

    def keys(self, hashes: Sequence[str]) -> list[OffloadKey]:
        return [make_offload_key(bytes.fromhex(each), self._group) for each in hashes]

    def hash_tokens(self, tokens: Sequence[int], extra_key: str | None, cache_salt: str | None) -> list[bytes]:
        """The hash at the end of each full chunk. Raises InvalidRequest, FeatureDisabled."""
        if extra_key:
            raise InvalidRequest.of("pages.extra_key", extra_key, "none beside tokens: give the adapter's page_hashes")
        seed = os.environ.get("PYTHONHASHSEED") or VLLM_HASH_SEED
        hashes = each_block_hash(
            tokens, self._hash_tokens, hash_seed=seed, algorithm=_algorithm(seed), cache_salt=cache_salt or ""
        )
        return list(hashes)[self.hashes_of_page - 1 :: self.hashes_of_page]


def _algorithm(seed: str) -> str:
    """That of this process, by what it begins with. Raises FeatureDisabled where only the engine can compute it."""
    for algorithm in BLOCK_HASH_ALGORITHMS:
        if getattr(hashing, algorithm)(seed) == kv_cache_utils.NONE_HASH:
            return algorithm
    remedy = "--prefix-caching-hash-algo sha256 or sha256_cbor, or page_hashes in the place of tokens"
    raise FeatureDisabled(
        f"this engine's hashes begin with a number of its own; use {remedy}",
        metadata={"feature": "hashes of tokens", "howToEnable": remedy},
    )
