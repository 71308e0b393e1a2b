"""vLLM's groups of layers, each with block numbers of its own, as pools of a rank: which there are, and which blocks of
a request a hand-off names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, RSWASpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

KV = "kv"
# Where a request has no block, because none of its next tokens will look there: vLLM's null block.
_NONE = 0


@dataclass(frozen=True, slots=True)
class Group:
    """``index``: its place among vLLM's groups. ``pool``: what we call its pool. ``has_window``: its layers see the
    last tokens alone, and vLLM gives blocks that no token will see any more to others.
    """

    index: int
    pool: str
    block_tokens: int
    has_window: bool

    def pages(self, tokens: int) -> int:
        """Returns how many blocks so many tokens have, those without one counted."""
        return -(-tokens // self.block_tokens)

    def blocks_of(self, blocks: Sequence[Sequence[int]], first: int, stop: int) -> tuple[int, ...]:
        """Blocks of a request, given for each of vLLM's groups, that hold its tokens [first, stop)."""
        own = blocks[self.index][first // self.block_tokens : self.pages(stop)]
        return tuple(block for block in own if block != _NONE)


def groups_of(kv_cache_config: Any) -> tuple[Group, ...]:
    """In the order of the pools: layers that see all tokens come first, since positions are those of the first pool.

    Their names are the same on both sides, whose models are.
    """
    groups = list(enumerate(kv_cache_config.kv_cache_groups))
    groups.sort(key=lambda numbered: has_window(numbered[1].kv_cache_spec))
    return tuple(
        Group(index, _name(place, group.kv_cache_spec), group.kv_cache_spec.block_size, has_window(group.kv_cache_spec))
        for place, (index, group) in enumerate(groups)
    )


def is_served(spec: Any) -> bool:
    """True if a request's state in layers of that kind is its blocks, and those are for all tokens or for a window."""
    specs = specs_of(spec)
    full = all(isinstance(each, FullAttentionSpec) and not isinstance(each, RSWASpec) for each in specs)
    return full or all(type(each) is SlidingWindowSpec for each in specs)


def has_window(spec: Any) -> bool:
    return any(isinstance(each, SlidingWindowSpec) for each in specs_of(spec))


def specs_of(spec: Any) -> Sequence[Any]:
    """vLLM's description of each layer of a group, or the one that all its layers have."""
    return tuple(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def count_of(pages: Mapping[str, Sequence[int]]) -> int:
    """Blocks in all pools."""
    return sum(map(len, pages.values()))


def _name(place: int, spec: Any) -> str:
    return KV if place == 0 else f"{'swa' if has_window(spec) else KV}-{place}"
