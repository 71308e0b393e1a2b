"""vLLM's groups of layers, each with block numbers of its own, as pools of a rank: which there are, and which blocks of
a request a hand-off names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

# The first pool, whatever its layers keep.
KV = "kv"
# Kinds of layers of which a hand-off with tokens equal was seen. Others are for who asks for them by name.
_TRIED = frozenset({"GDN_ATTN", "MAMBA2", "SHORT_CONV", "ChunkedLocalAttentionSpec"})
_FULL = (FullAttentionSpec, MLAAttentionSpec)
_WINDOWS = (SlidingWindowSpec, SlidingWindowMLASpec, ChunkedLocalAttentionSpec)
# Where a request has no block, because none of its next tokens will look there: vLLM's null block.
_NONE = 0


@dataclass(frozen=True, slots=True)
class Group:
    """``index``: its place among vLLM's groups. ``pool``: what we call its pool. ``has_window``: its layers see the
    last tokens alone, and vLLM gives blocks that no token will see any more to others. ``has_state``: they keep
    no tokens but one state, which each token changes: the block of a request's last tokens is that state.
    """

    index: int
    pool: str
    block_tokens: int
    has_window: bool
    has_state: bool = False

    @property
    def moves_on(self) -> bool:
        """True if what its blocks hold is good for the next token alone, and not for those before it."""
        return self.has_window or self.has_state

    def pages(self, tokens: int) -> int:
        """Returns how many blocks so many tokens have, those without one counted."""
        return -(-tokens // self.block_tokens)

    def pages_held(self, first: int, stop: int) -> int:
        """Returns how many of its pages a request has no need of that asks for tokens [first, stop): those before the
        first, and of a state, of which there is one, the only one if it asks for nothing.
        """
        if self.has_state:
            return int(0 < stop <= first)
        return first // self.block_tokens if first < stop else self.pages(stop)

    def blocks_of(self, blocks: Sequence[Sequence[int]], first: int, stop: int) -> tuple[int, ...]:
        """Blocks of a request, given for each of vLLM's groups, that hold its tokens [first, stop), or its state behind
        the last of them.
        """
        begin = max(self.pages(stop) - 1, 0) if self.has_state else first // self.block_tokens
        own = blocks[self.index][begin : self.pages(stop)]
        return tuple(block for block in own if block != _NONE)


def groups_of(kv_cache_config: Any, dcp_size: int = 1) -> tuple[Group, ...]:
    """In the order of the pools: layers that see all tokens come first, since positions are those of the first pool;
    states come last. ``dcp_size``: decode context parallel (DCP) ranks, each with a part of a block's tokens.

    Their names are the same on both sides, whose models are.
    """
    groups = list(enumerate(kv_cache_config.kv_cache_groups))
    groups.sort(key=lambda numbered: (has_state(numbered[1].kv_cache_spec), has_window(numbered[1].kv_cache_spec)))
    return tuple(
        Group(index, _name(place, spec), spec.block_size * dcp_size, has_window(spec), has_state(spec))
        for place, (index, spec) in enumerate((index, group.kv_cache_spec) for index, group in groups)
    )


def is_served(spec: Any) -> bool:
    """True if its blocks are all that layers of that kind keep of a request: all tokens, a window, or a state."""
    specs = specs_of(spec)
    full = all(isinstance(each, FullAttentionSpec) and not isinstance(each, RSWASpec) for each in specs)
    window = all(type(each) in _WINDOWS and not getattr(each, "prefix_replay_tokens", 0) for each in specs)
    return full or window or all(type(each) is MambaSpec for each in specs)


def has_window(spec: Any) -> bool:
    """True for layers that see the last tokens alone: so many, or those of the chunk that the next one is in."""
    return any(isinstance(each, _WINDOWS) for each in specs_of(spec))


def has_state(spec: Any) -> bool:
    return any(isinstance(each, MambaSpec) for each in specs_of(spec))


def has_latents_alone(specs: Sequence[Any]) -> bool:
    """True for one group of layers that keep each token, of which vLLM deals some to each DCP rank."""
    return len(specs) == 1 and all(
        type(each) is MLAAttentionSpec and getattr(each, "tokens_per_state", 1) == 1 for each in specs_of(specs[0])
    )


def untried_kinds(kv_cache_config: Any) -> set[str]:
    """By vLLM's own names: MAMBA2, SHORT_CONV, ... of states, ChunkedLocalAttentionSpec, ... of windows,
    SinkFullAttentionSpec, ... of layers that see all tokens in a way of their own; INDEXER, of caches in which a
    layer looks for the tokens that it attends to, and COMPRESSED, of those that keep one of several tokens, or several
    of one.
    """
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in specs_of(group.kv_cache_spec)]
    states = {str(getattr(each.mamba_type, "name", each.mamba_type)) for each in specs if isinstance(each, MambaSpec)}
    windows = {type(each).__name__ for each in specs if isinstance(each, _WINDOWS[1:])}
    full = {type(each).__name__ for each in specs if isinstance(each, FullAttentionSpec) and type(each) not in _FULL}
    attention = [spec for spec in specs if isinstance(spec, (FullAttentionSpec, *_WINDOWS))]
    sparse = {"INDEXER" for spec in attention if getattr(getattr(spec, "cache_role", None), "name", "") == "INDEXER"}
    packed = {"COMPRESSED" for spec in attention if getattr(spec, "tokens_per_state", 1) != 1}
    return (states | windows | full | sparse | packed) - _TRIED


def specs_of(spec: Any) -> Sequence[Any]:
    """vLLM's description of each layer of a group, or the one that all its layers have."""
    return tuple(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def spec_of_layer(spec: Any, layer: str) -> Any:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def count_of(pages: Mapping[str, Sequence[int]]) -> int:
    """Blocks in all pools."""
    return sum(map(len, pages.values()))


def _name(place: int, spec: Any) -> str:
    kind = "state" if has_state(spec) else "swa" if has_window(spec) else KV
    return KV if place == 0 else f"{kind}-{place}"
