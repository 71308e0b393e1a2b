"""Who owes what: one pure function of both shapes that both sides compute and compare at Hello.

Equal layouts only, for now: every prefill rank owes exactly the decode rank of the same coordinates (cp 0 where
prefill alone has context parallelism). Anything else is refused with every field that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgrpc.errors import ParallelLayoutMismatch
from kvgrpc.model import Layout, Pool, RankId

MAX_AUX_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """All of a rank that the other side must fit: ``pools`` with or without addresses, bytes of each aux item."""

    rank: RankId
    layout: Layout
    pools: tuple[Pool, ...]
    aux_item_bytes: tuple[int, ...]
    data_plane: str


@dataclass(frozen=True, slots=True)
class Part:
    """What one prefill rank owes one decode rank: global layers, heads (0: they do not apply), and aux."""

    layer_start: int
    layer_count: int
    head_start: int
    head_count: int
    aux: bool


def owed_part(prefill: Shape, decode: Shape) -> Part:
    """What ``prefill`` owes ``decode``. Raises ParallelLayoutMismatch naming every field in which they differ."""
    differences = _layout_differences(prefill, decode)
    differences.update(_pool_differences(prefill.pools, decode.pools))
    if prefill.aux_item_bytes != decode.aux_item_bytes:
        differences["aux_item_bytes"] = (list(prefill.aux_item_bytes), list(decode.aux_item_bytes))
    if prefill.data_plane != decode.data_plane:
        differences["data_plane"] = (prefill.data_plane, decode.data_plane)
    if differences:
        raise mismatch(differences)
    return wanted_part(decode)


def wanted_part(decode: Shape) -> Part:
    """What a decode rank expects of the one prefill rank that owes it."""
    layers = [region.layer for pool in decode.pools for region in pool.regions]
    first = decode.pools[0]
    return Part(
        min(layers), max(layers) - min(layers) + 1, first.head_start, first.head_count, bool(decode.aux_item_bytes)
    )


def prefill_coordinates(decode: RankId, prefill: Layout, decode_layout: Layout, dp: int) -> tuple[int, int, int, int]:
    """(dp, pp, cp, tp) of the prefill rank that owes this decode rank. Raises ParallelLayoutMismatch."""
    differences = _size_differences(prefill, decode_layout)
    if dp >= prefill.dp:
        differences["prefill_dp_rank"] = (f"below {prefill.dp}", dp)
    if differences:
        raise mismatch(differences)
    return dp, decode.pp, decode.cp if prefill.cp == decode_layout.cp else 0, decode.tp


def mismatch(differences: dict[str, tuple[object, object]]) -> ParallelLayoutMismatch:
    """The error of differing fields: prefill's value first, decode's second."""
    text = ", ".join(f"{field}: prefill {one}, decode {other}" for field, (one, other) in differences.items())
    metadata: dict[str, object] = {"mismatchedFields": ",".join(differences)}
    metadata.update({field: f"{one} != {other}" for field, (one, other) in differences.items()})
    return ParallelLayoutMismatch(f"prefill and decode do not fit: {text}", metadata=metadata)


def _size_differences(prefill: Layout, decode: Layout) -> dict[str, tuple[object, object]]:
    differences: dict[str, tuple[object, object]] = {}
    if prefill.pp != decode.pp:
        differences["layout.pp"] = (prefill.pp, decode.pp)
    if prefill.tp != decode.tp:
        differences["layout.tp"] = (prefill.tp, decode.tp)
    if prefill.cp != decode.cp and decode.cp != 1:
        differences["layout.cp"] = (prefill.cp, decode.cp)
    return differences


def _layout_differences(prefill: Shape, decode: Shape) -> dict[str, tuple[object, object]]:
    differences = _size_differences(prefill.layout, decode.layout)
    if not differences:
        expected = prefill_coordinates(decode.rank, prefill.layout, decode.layout, prefill.rank.dp)
        actual = (prefill.rank.dp, prefill.rank.pp, prefill.rank.cp, prefill.rank.tp)
        if actual != expected:
            differences["rank"] = (actual, expected)
    return differences


_POOL_FIELDS = ("name", "kind", "page_tokens", "dtype", "axes", "heads_total", "head_start", "head_count")


def _pool_differences(prefill: Sequence[Pool], decode: Sequence[Pool]) -> dict[str, tuple[object, object]]:
    if len(prefill) != len(decode):
        return {"pools": ([pool.name for pool in prefill], [pool.name for pool in decode])}
    differences: dict[str, tuple[object, object]] = {}
    for index, (ours, theirs) in enumerate(zip(prefill, decode, strict=True)):
        for field in _POOL_FIELDS:
            one, other = getattr(ours, field), getattr(theirs, field)
            if one != other:
                differences[f"pools[{index}].{field}"] = (one, other)
        differences.update(_region_differences(f"pools[{index}]", ours, theirs))
    return differences


def _region_differences(where: str, prefill: Pool, decode: Pool) -> dict[str, tuple[object, object]]:
    if len(prefill.regions) != len(decode.regions):
        return {f"{where}.regions": (len(prefill.regions), len(decode.regions))}
    for number, (ours, theirs) in enumerate(zip(prefill.regions, decode.regions, strict=True)):
        for field in ("layer", "component", "page_bytes"):
            one, other = getattr(ours, field), getattr(theirs, field)
            if one != other:
                return {f"{where}.regions[{number}].{field}": (one, other)}
    return {}
