"""The names that vLLM gives the chunks of a prompt, for callers who have its tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import OffloadKey, make_offload_key

from kvgrpc.errors import FeatureDisabled, InvalidRequest
from kvgrpc.hashing import BLOCK_HASH_ALGORITHMS, VLLM_HASH_SEED, each_block_hash

# Of one group: vLLM stores little of windows but the end of each prompt, so that many are looked for in vain.
_PAGES_OF_A_LOOK = 256


class ChunkNames:
    """Of an engine with one group of layers that see the whole prompt, and any with sliding windows beside it.

    A page is the chunk of the former; of each of the latter a request needs the last chunks of what it takes, as many
    as ``windows`` says: its group, and how many. ``config``: vLLM's, where it is known. Raises FeatureDisabled.
    """

    def __init__(self, spec: Any, config: Any = None) -> None:
        groups, cache = spec.config.groups, spec.config.cache
        whole = [each for each in groups if each.sliding_window_size_in_chunks is None]
        self.windows = tuple(
            (each.group_id, each.sliding_window_size_in_chunks) for each in groups if each not in whole
        )
        if len(whole) != 1:
            _refuse(f"{len(whole)} groups of layers that see the whole prompt")
        if len({each.tokens_per_block for each in groups}) != 1:
            _refuse("groups of layers with blocks of other sizes")
        if self.windows and getattr(getattr(config, "model_config", None), "has_inner_state", False):
            _refuse("layers that keep a state")
        if self.windows and getattr(config, "speculative_config", None) is not None:
            _refuse("sliding windows and drafts")
        self.page_tokens: int = whole[0].tokens_per_block * cache.blocks_per_chunk
        self._group: int = whole[0].group_id
        self._hash_tokens: int = cache.tokens_per_hash
        self.hashes_of_page = self.page_tokens // self._hash_tokens

    def keys(self, hashes: Sequence[str]) -> list[OffloadKey]:
        """Of the layers that see the whole prompt."""
        return [self.key(each, self._group) for each in hashes]

    def key(self, page_hash: str, group: int) -> OffloadKey:
        return make_offload_key(bytes.fromhex(page_hash), group)

    def usable(
        self, hashes: Sequence[str], pages: int, first: int, present: Callable[[Sequence[OffloadKey]], Sequence[bool]]
    ) -> int:
        """Returns how many leading pages a request finds, of ``pages`` whose own chunks are there and ``first`` that it
        has: no more than those before whose end all windows have theirs. ``present``: which of the keys are there."""
        known: dict[tuple[int, int], bool] = {}

        def is_there(group: int, page: int) -> bool:
            if (group, page) not in known:
                part = range(max(first, page + 1 - _PAGES_OF_A_LOOK), page + 1)
                keys = [self.key(hashes[each], group) for each in part]
                known.update(zip(((group, each) for each in part), present(keys), strict=True))
            return known[group, page]

        while pages > first:
            needed = ((group, page) for group, window in self.windows for page in _last(pages, window, first))
            gap = next((page for group, page in needed if not is_there(group, page)), None)
            if gap is None:
                break
            pages = gap
        return pages

    def hash_tokens(self, tokens: Sequence[int], extra_key: str | None, cache_salt: str | None) -> list[bytes]:
        """The hash at the end of each full chunk. Raises InvalidRequest, FeatureDisabled."""
        if extra_key:
            raise InvalidRequest.of("pages.extra_key", extra_key, "none beside tokens: give the adapter's page_hashes")
        seed = os.environ.get("PYTHONHASHSEED") or VLLM_HASH_SEED
        hashes = each_block_hash(
            tokens, self._hash_tokens, hash_seed=seed, algorithm=_algorithm(seed), cache_salt=cache_salt or ""
        )
        return list(hashes)[self.hashes_of_page - 1 :: self.hashes_of_page]


def _last(pages: int, window: int, first: int) -> range:
    """Back from the last of these pages to where its window begins."""
    return range(pages - 1, max(first, pages - window) - 1, -1)


def _refuse(what: str) -> NoReturn:
    remedy = "a model whose layers are of full attention, or of that and sliding windows"
    raise FeatureDisabled(
        f"orders for a cache with {what} are not built; use {remedy}",
        metadata={"feature": "PrefetchService in vLLM", "howToEnable": remedy},
    )


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
