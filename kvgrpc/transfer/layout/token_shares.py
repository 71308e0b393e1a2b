"""Tokens dealt out to ranks: with decode context parallelism each of N ranks keeps every Nth token of a prompt. Pure.

Seen as rows of N tokens, of which a rank keeps one at the same place of each, these are the heads of a page: whoever
has all tokens has all N heads. So the plan for heads, and for pages of other sizes, serves it.
"""

from __future__ import annotations

import re
from dataclasses import replace

from kvgrpc.model import Pool

_OVER = re.compile(r"tokens over (\d{1,9})")
_AXES = "token,head,dim"
# Of a pool without heads that has all tokens of a page one after another; "" says so of latents alone.
_ALL_TOKENS = ("", "token,dim", "head,token,dim", "token,head,dim")
# Engines' words for latents: without axes the first alone, for "kv" may be keys and values then.
_LATENTS = ("latent", "kv")


def axes_of_shares(size: int) -> str:
    """The ``axes`` of a pool that keeps the tokens whose number in the prompt is its ``head_start`` modulo ``size``.
    All ranks of an engine have the same."""
    return f"tokens over {size}"


def shares_of(axes: str) -> int:
    """Among how many ranks the tokens of a pool with these ``axes`` are dealt out; 1: each has all."""
    found = _OVER.fullmatch(axes)
    return int(found[1]) if found else 1


def shares_as_heads(source: Pool, destination: Pool) -> tuple[Pool, Pool]:
    """Both pools with shares of tokens as heads, where the source has all tokens and the destination a share of them;
    else as they are: two shares are only compared."""
    found = _OVER.fullmatch(destination.axes)
    if found is None or source.axes not in _ALL_TOKENS:
        return source, destination
    size, rank = int(found[1]), destination.head_start
    if not rank < size or not _fits(source, 1, size) or not _fits(destination, size, size):
        return source, destination
    return _with_heads(source, size, 0, size), _with_heads(destination, size, rank, 1)


def _fits(pool: Pool, tokens_of_a_row: int, size: int) -> bool:
    """True if its pages are whole rows of latents of ``size`` tokens, of which it has one in ``tokens_of_a_row``."""
    if pool.heads_total or not pool.page_tokens or pool.page_tokens % size:
        return False
    rows = pool.page_tokens // tokens_of_a_row
    words = _LATENTS if pool.axes else _LATENTS[:1]
    has_one_a_layer = len(set(pool.layers)) == len(pool.regions)
    return has_one_a_layer and all(
        region.page_bytes % rows == 0 and region.component in words for region in pool.regions
    )


def _with_heads(pool: Pool, size: int, start: int, count: int) -> Pool:
    return replace(
        pool,
        page_tokens=pool.page_tokens // size,
        regions=[region._replace(component=_LATENTS[0]) for region in pool.regions],
        axes=_AXES,
        heads_total=size,
        head_start=start,
        head_count=count,
    )
