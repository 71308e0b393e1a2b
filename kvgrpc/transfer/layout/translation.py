"""Pages that hold the same keys and values in another order, as two engines do: which pieces go where. Pure.

A piece is what lies together on both sides: the bytes of one head of one token where nothing more does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvgrpc.model import Pool, Region

KV, TOKEN, HEAD, DIM = "kv", "token", "head", "dim"
_PARTS = {"k": ("k",), "v": ("v",), "kv": ("k", "v")}


class Runs(NamedTuple):
    """Pieces of a page, on either side. ``parts``: how many pages of the source fill one of the destination's, and
    ``steps``: of each piece, how far it is there from one of them to the next."""

    source: list[Region]
    destination: list[Region]
    parts: int = 1
    steps: Sequence[int] = ()


class _Part(NamedTuple):
    """Keys, or values, of one layer: where in a page of a region, and bytes from one token and head to the next."""

    region: Region
    offset: int
    token_stride: int
    head_stride: int
    dim_bytes: int


def translates(source: Pool, destination: Pool) -> bool:
    """True if both pools say enough of their axes, and hold the same layers with heads of the same size."""
    ours, theirs = _parts(source), _parts(destination)
    return bool(ours) and {key: part.dim_bytes for key, part in ours.items()} == {
        key: part.dim_bytes for key, part in theirs.items()
    }


def number_of_pieces(source: Pool, destination: Pool) -> int:
    """Returns how many ``translated`` makes, which may be millions."""
    ours, theirs = _parts(source), _parts(destination)
    heads = _shared_heads(source, destination)
    return len(heads) * sum(1 if _is_one_piece(ours[key], theirs[key]) else source.page_tokens for key in ours)


def translated(source: Pool, destination: Pool, parts: int = 1) -> Runs:
    """The heads that both pools hold, piece by piece, on either side. Raises ValueError where they do not translate."""
    if not translates(source, destination):
        raise ValueError(f"pool {source.name!r}: axes {source.axes!r} do not translate to {destination.axes!r}")
    ours, theirs = _parts(source), _parts(destination)
    heads = _shared_heads(source, destination)
    sources: list[Region] = []
    destinations: list[Region] = []
    steps: list[int] = []
    for key in sorted(ours):
        one, other = ours[key], theirs[key]
        for head in heads:
            at = one.offset + (head - source.head_start) * one.head_stride
            to = other.offset + (head - destination.head_start) * other.head_stride
            count, nbytes = source.page_tokens, one.dim_bytes
            if _is_one_piece(one, other):
                count, nbytes = 1, count * nbytes
            for token in range(count):
                sources.append(_piece(one.region, at + token * one.token_stride, nbytes))
                destinations.append(_piece(other.region, to + token * other.token_stride, nbytes))
                steps.append(source.page_tokens * other.token_stride)
    return Runs(sources, destinations, parts, steps if parts > 1 else ())


def _shared_heads(source: Pool, destination: Pool) -> range:
    ours, theirs = (range(pool.head_start, pool.head_start + pool.head_count) for pool in (source, destination))
    return range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))


def _is_one_piece(ours: _Part, theirs: _Part) -> bool:
    """True if the tokens of a head follow each other on both sides."""
    return ours.token_stride == theirs.token_stride == ours.dim_bytes


def _piece(region: Region, offset: int, nbytes: int) -> Region:
    return region._replace(address=region.address + offset, page_bytes=nbytes)


def _parts(pool: Pool) -> Mapping[tuple[int, str], _Part]:
    """By layer and "k" or "v"; empty for a pool that does not say where they are."""
    axes = [axis.strip() for axis in pool.axes.split(",")]
    sizes = {KV: 2, TOKEN: pool.page_tokens, HEAD: pool.head_count}
    says = axes[-1] == DIM and set(axes[:-1]) - {KV} == {TOKEN, HEAD} and len(set(axes)) == len(axes)
    if not says or not all(sizes.values()):
        return {}
    found = {}
    for region in pool.regions:
        parts = _PARTS.get(region.component, ())
        dim_bytes, rest = divmod(region.page_bytes, math.prod(sizes[axis] for axis in axes[:-1]))
        if rest or not dim_bytes or len(parts) != (2 if KV in axes else 1):
            return {}
        strides, stride = {KV: 0}, dim_bytes
        for axis in reversed(axes[:-1]):
            strides[axis] = stride
            stride *= sizes[axis]
        for number, part in enumerate(parts):
            offset = number * strides[KV]
            found[region.layer, part] = _Part(region, offset, strides[TOKEN], strides[HEAD], dim_bytes)
    return found
