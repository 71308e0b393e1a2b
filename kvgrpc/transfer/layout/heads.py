"""Finds the bytes that two pools share: the layers that both have, and the place of heads in their pages. Pure.

The order of the axes decides how many runs there are: with the head outermost a range of heads is one run a page and
region, with tokens before it one for each token.
"""

from __future__ import annotations

import math
from dataclasses import replace

from kvgrpc.model import Pool, Region
from kvgrpc.transfer.layout.token_shares import shares_as_heads
from kvgrpc.transfer.layout.translation import HEAD, KV, TOKEN, Runs, number_of_pieces, translated, translates


def head_rows(pool: Pool) -> int | None:
    """The number of rows of all heads in a page and region, by the ``axes`` ("token,head,dim") of a pool: one for each
    token where tokens come before heads; None where that cannot be told."""
    axes = _axes(pool)
    if HEAD not in axes or not pool.head_count:
        return None
    before = axes[: axes.index(HEAD)]
    if before not in ([], [TOKEN]):
        return None
    return pool.page_tokens if before else 1


def sliceable(source: Pool, destination: Pool) -> bool:
    """True if both keep their heads alike, so that a range of them is the same runs of bytes on both sides."""
    return source.axes == destination.axes and head_rows(source) is not None and head_rows(destination) is not None


def shared(source: Pool, destination: Pool) -> tuple[Pool, Pool]:
    """Both pools as they are compared and planned: of the layers that both have, and with shares of tokens as heads."""
    return shares_as_heads(*shared_layers(source, destination))


def shared_layers(source: Pool, destination: Pool) -> tuple[Pool, Pool]:
    """Both pools, cut down to the layers that both have: the two sides may have different pipeline stages."""
    ours, theirs = set(source.layers), set(destination.layers)
    if ours == theirs:
        return source, destination
    both = ours & theirs
    first, second = ([region for region in pool.regions if region.layer in both] for pool in (source, destination))
    return replace(source, regions=tuple(first)), replace(destination, regions=tuple(second))


def parts_of_page(source: Pool, destination: Pool) -> int | None:
    """Returns how many pages of the source fill one of the destination's; None: no whole number, or the order of axes
    does not say what a part of a page is."""
    ours, theirs = source.page_tokens, destination.page_tokens
    if ours == theirs:
        return 1
    if not 0 < ours < theirs or theirs % ours:
        return None
    if source.axes == destination.axes:
        told = all(map(_are_rows_of_tokens, (source, destination)))
    else:
        told = translates(source, destination)
    return theirs // ours if told else None


def number_of_runs(source: Pool, destination: Pool) -> int:
    """Returns how many ``runs`` makes on either side, without making those of another order of axes."""
    if not _hold_the_same(source, destination) and not sliceable(source, destination):
        return number_of_pieces(source, destination)
    return len(runs(source, destination).source)


def runs(source: Pool, destination: Pool) -> Runs:
    """The bytes of the heads that both pools hold, on either side: region by region, run by run; where several pages of
    the source fill one of the destination's, of the first of them.

    Whole regions where both hold the same heads in the same order; none where neither has a layer of the pool. Raises
    ValueError for heads, and parts of pages, that cannot be told apart.
    """
    if not source.regions and not destination.regions:
        return Runs([], [])
    parts = parts_of_page(source, destination)
    if parts is None:
        raise ValueError(f"pool {source.name!r}: {source.page_tokens} tokens are no part of {destination.page_tokens}")
    same = _hold_the_same(source, destination)
    if same and parts == 1:
        return Runs(list(source.regions), list(destination.regions))
    if not same and not sliceable(source, destination):
        return translated(source, destination, parts)
    first = max(source.head_start, destination.head_start)
    last = min(source.head_start + source.head_count, destination.head_start + destination.head_count)
    if not same and last <= first:
        raise ValueError(f"pools {source.name!r} hold none of the same heads")
    if parts > 1 and (same or _has_heads_first(source)):
        theirs = _rows_of_tokens(destination, first, last, parts)
        return Runs(_rows_of_tokens(source, first, last, 1), theirs, parts, [row.page_bytes for row in theirs])
    rows = head_rows(source) or 1
    steps = [region.page_bytes // parts for region in destination.regions for _ in range(rows)] if parts > 1 else ()
    return Runs(_slices(source, first, last, rows, 1), _slices(destination, first, last, rows, parts), parts, steps)


def _hold_the_same(source: Pool, destination: Pool) -> bool:
    """True if both have the same heads in the same order."""
    ours, theirs = ((pool.axes, pool.head_start, pool.head_count) for pool in (source, destination))
    return ours == theirs


def _slices(pool: Pool, first: int, last: int, rows: int, parts: int) -> list[Region]:
    """These heads in each row of a page, or of the first of so many parts of it."""
    start, count = first - pool.head_start, last - first
    return [
        region._replace(address=region.address + row * size + start * size // pool.head_count, page_bytes=nbytes)
        for region in pool.regions
        for size in [region.page_bytes // (rows * parts)]
        for nbytes in [count * size // pool.head_count]
        for row in range(rows)
    ]


def _rows_of_tokens(pool: Pool, first: int, last: int, parts: int) -> list[Region]:
    """The first of so many parts of each row of a page's tokens; where heads are outermost, of the rows of these."""
    rows = _rows_before_tokens(pool)
    wanted = range(rows)
    if _has_heads_first(pool):
        of_head = rows // pool.head_count
        wanted = range((first - pool.head_start) * of_head, (last - pool.head_start) * of_head)
    return [
        region._replace(address=region.address + row * size, page_bytes=size // parts)
        for region in pool.regions
        for size in [region.page_bytes // rows]
        for row in wanted
    ]


def _has_heads_first(pool: Pool) -> bool:
    return bool(pool.head_count) and _axes(pool)[0] == HEAD


def _are_rows_of_tokens(pool: Pool) -> bool:
    """True if the axes say where a page's tokens are, and its bytes can be those. Of K and V in one region they have to
    say too where these are: an engine may keep K of all tokens of a head before V."""
    tokens, both = _rows_before_tokens(pool) * pool.page_tokens, KV in _axes(pool)
    return tokens > 0 and all(
        region.page_bytes % tokens == 0 and (region.component == KV) == both for region in pool.regions
    )


def _rows_before_tokens(pool: Pool) -> int:
    """The number of rows of all its tokens in a page and region: 1 where tokens are outermost; 0: it is not known."""
    axes, sizes = _axes(pool), {KV: 2, HEAD: pool.head_count}
    return math.prod(sizes.get(axis, 0) for axis in axes[: axes.index(TOKEN)]) if TOKEN in axes else 0


def _axes(pool: Pool) -> list[str]:
    return [axis.strip() for axis in pool.axes.split(",")]
