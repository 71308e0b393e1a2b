"""Finds the bytes that two pools share: the layers that both have, and the place of heads in their pages. Pure.

The order of the axes decides how many runs there are: with the head outermost a range of heads is one run a page and
region, with tokens before it one for each token.
"""

from __future__ import annotations

from dataclasses import replace

from kvgrpc.model import Pool, Region
from kvgrpc.transfer.layout.translation import HEAD, TOKEN, translated


def head_rows(pool: Pool) -> int | None:
    """The number of rows of all heads in a page and region, by the ``axes`` ("token,head,dim") of a pool: one for each
    token where tokens come before heads; None where that cannot be told."""
    axes = [axis.strip() for axis in pool.axes.split(",")]
    if HEAD not in axes or not pool.head_count:
        return None
    before = axes[: axes.index(HEAD)]
    if before not in ([], [TOKEN]):
        return None
    return pool.page_tokens if before else 1


def sliceable(source: Pool, destination: Pool) -> bool:
    """True if both keep their heads alike, so that a range of them is the same runs of bytes on both sides."""
    return source.axes == destination.axes and head_rows(source) is not None and head_rows(destination) is not None


def shared_layers(source: Pool, destination: Pool) -> tuple[Pool, Pool]:
    """Both pools, cut down to the layers that both have: the two sides may have different pipeline stages."""
    ours, theirs = set(source.layers), set(destination.layers)
    if ours == theirs:
        return source, destination
    both = ours & theirs
    first, second = ([region for region in pool.regions if region.layer in both] for pool in (source, destination))
    return replace(source, regions=tuple(first)), replace(destination, regions=tuple(second))


def runs(source: Pool, destination: Pool) -> tuple[list[Region], list[Region]]:
    """The bytes of the heads that both pools hold, on either side: region by region, run by run.

    Whole regions where both hold the same heads in the same order. Raises ValueError for heads that cannot be told
    apart.
    """
    same_heads = (source.head_start, source.head_count) == (destination.head_start, destination.head_count)
    if source.axes == destination.axes and same_heads:
        return list(source.regions), list(destination.regions)
    if not sliceable(source, destination):
        return translated(source, destination)
    first = max(source.head_start, destination.head_start)
    last = min(source.head_start + source.head_count, destination.head_start + destination.head_count)
    return _runs(source, first, last), _runs(destination, first, last)


def _runs(pool: Pool, first: int, last: int) -> list[Region]:
    rows = head_rows(pool)
    if rows is None or last <= first:
        raise ValueError(f"pool {pool.name!r} does not say where its heads {first} to {last - 1} lie")
    start, count = first - pool.head_start, last - first
    return [
        region._replace(address=region.address + row * size + start * size // pool.head_count, page_bytes=nbytes)
        for region in pool.regions
        for size in [region.page_bytes // rows]
        for nbytes in [count * size // pool.head_count]
        for row in range(rows)
    ]
