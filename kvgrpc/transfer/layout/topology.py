"""Debts between ranks: pure functions of two layouts and two shapes, which both sides compute and compare at Hello.

Tensor-parallel sizes may differ where one divides the other. With heads (MHA, GQA) a decode rank gets its heads from
every prefill rank that holds some of them; of prefill ranks that hold copies the first one sends. Without heads (MLA,
and state) every rank holds all of it, and one prefill rank sends; where decode's ranks share out the tokens, it sends
each its own. Context parallelism of prefill alone: cp 0 sends. Whoever owes nothing is told about each room all the
same, so that its sender ends. Pipeline stages may differ where one size divides the other and the stages of one lie
within those of the other; the last one sends aux, because it computes the first token. dp replicas are independent
caches: any serves any.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvgrpc.errors import InvalidRequest, ParallelLayoutMismatch
from kvgrpc.model import MAX_ENGINE_RANKS, UNKNOWN_MODEL, Attention, Layout, ModelIdentity, Pool, RankId
from kvgrpc.transfer.layout.heads import parts_of_page, shared, shared_layers, sliceable
from kvgrpc.transfer.layout.token_shares import shares_as_heads
from kvgrpc.transfer.layout.translation import translates

Coordinates = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape that must match the other side's: ``pools``, addresses or not, and the bytes of each aux item."""

    rank: RankId
    layout: Layout
    pools: tuple[Pool, ...]
    aux_item_bytes: tuple[int, ...]
    data_plane: str
    model: ModelIdentity = UNKNOWN_MODEL


@dataclass(frozen=True, slots=True)
class Part:
    """The debt of one prefill rank to one decode rank: global layers (none: it owes nothing), heads (0: they do not
    apply), and aux.
    """

    layer_start: int
    layer_count: int
    head_start: int
    head_count: int
    aux: bool

    @property
    def empty(self) -> bool:
        """It owes nothing: another rank sends the same bytes."""
        return not self.layer_count


NOTHING = Part(0, 0, 0, 0, False)
# Of prefill's pages in one of decode's: more tokens than any engine has in a page.
MOST_PARTS = 4_096


class Heads(NamedTuple):
    """Heads from ``start`` to ``stop`` (exclusive) of ``total``. Total 0: heads do not apply."""

    start: int
    stop: int
    total: int

    def overlap(self, other: Heads) -> Heads:
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Heads(start, max(start, stop), self.total)


def heads_of(total: int, tp_size: int, tp: int) -> Heads:
    """The heads of one tensor-parallel rank: an equal share, or a copy where there are fewer heads than ranks."""
    if not total:
        return Heads(0, 0, 0)
    start = tp * total // tp_size
    return Heads(start, start + max(total // tp_size, 1), total)


def prefill_ranks(decode: RankId, decode_layout: Layout, prefill: Layout, dp: int) -> list[Coordinates]:
    """(dp, pp, cp, tp) of every prefill rank that this decode rank names its rooms to; the one that sends aux is first.

    ``dp``: which replica of prefill computed the prompt. Raises ParallelLayoutMismatch, and InvalidRequest for more of
    them than an engine has ranks.
    """
    differences = _size_differences(prefill, decode_layout)
    if dp >= prefill.dp:
        differences["prefill_dp_rank"] = (f"below {prefill.dp}", dp)
    if differences:
        raise mismatch(differences)
    cps = range(decode.cp, decode.cp + 1) if prefill.cp == decode_layout.cp else range(prefill.cp)
    tps = _group(decode.tp, decode_layout.tp, prefill.tp)
    pps = stages_of(decode.pp, decode_layout.pp, prefill.pp)
    if (ranks := len(pps) * len(cps) * len(tps)) > MAX_ENGINE_RANKS:
        raise InvalidRequest.of(
            "layout", ranks, f"small enough for {MAX_ENGINE_RANKS} prefill ranks of one decode rank"
        )
    return [(dp, pp, cp, tp) for pp, cp, tp in itertools.product(reversed(pps), cps, tps)]


def stages_of(pp: int, decode_size: int, prefill_size: int) -> range:
    """The prefill stages that hold the layers of a decode stage, in order."""
    return _group(pp, decode_size, prefill_size)


def layers_of_pools(pools: Sequence[Pool]) -> tuple[int, ...]:
    """Of which layers a rank keeps something in any pool, each once, in order; of some layers a model keeps nothing."""
    return tuple(sorted({layer for each in pools for layer in each.layers}))


def check_layers(decode: Sequence[Pool], stages: Sequence[Sequence[int] | None]) -> None:
    """Checks that the layers of these stages are those of a decode rank, each once. Raises ParallelLayoutMismatch."""
    wanted = layers_of_pools(decode)
    if sorted(layer for stage in stages for layer in stage or ()) != [*wanted]:
        text = "; ".join("unknown" if stage is None else _layers_text(stage) for stage in stages)
        raise mismatch({"layers": (text, _layers_text(wanted))})


def decode_ranks_of(prefill: Layout, decode: Layout) -> int:
    """Returns how many ranks of one decode replica name a room to one prefill rank."""
    return max(decode.tp // prefill.tp, 1) * max(decode.pp // prefill.pp, 1)


def place_of(decode: RankId, prefill: Layout, decode_layout: Layout) -> int:
    """Returns which of the decode ranks that name a room to one prefill rank this one is, from 0."""
    shares = max(decode_layout.tp // prefill.tp, 1)
    return decode.pp % max(decode_layout.pp // prefill.pp, 1) * shares + decode.tp % shares


def wanted_part(
    decode: Shape,
    prefill: Coordinates | None = None,
    prefill_layout: Layout | None = None,
    prefill_layers: Sequence[int] | None = None,
) -> Part:
    """The part that a decode rank expects of one prefill rank; without a layout, of one with the layout of its own.

    ``prefill_layers``: that rank's layers, in order; None: all layers of the decode rank.
    """
    layout, rank = prefill_layout or decode.layout, decode.rank
    _, pp, cp, tp = prefill or (rank.dp, rank.pp, rank.cp, rank.tp)
    tps = _group(rank.tp, decode.layout.tp, layout.tp)
    pool = decode.pools[0]
    if cp and layout.cp != decode.layout.cp:
        return NOTHING
    aux = bool(decode.aux_item_bytes) and tp == tps[0] and pp == stages_of(rank.pp, decode.layout.pp, layout.pp)[-1]
    layers = layers_of_pools(decode.pools)
    first, last = layers[0], layers[-1]
    if prefill_layers is not None:
        first, last = max(first, prefill_layers[0]), min(last, prefill_layers[-1])
    count = last - first + 1
    if count < 1:
        return NOTHING  # prefill says what does not fit
    if layout.tp == decode.layout.tp:
        return Part(first, count, pool.head_start, pool.head_count, aux)
    heads = _sent_heads(pool, tp, tps, layout.tp)
    if heads is None:
        return NOTHING
    return Part(first, count, heads.start, heads.stop - heads.start, aux)


def owed_part(prefill: Shape, decode: Shape) -> Part:
    """Returns what ``prefill`` owes ``decode``. Raises ParallelLayoutMismatch naming every field in which they
    differ."""
    differences = _layout_differences(prefill, decode)
    same_tp = prefill.layout.tp == decode.layout.tp
    remedy = ""
    if not same_tp:
        shares = _share_differences(prefill, decode)
        remedy = _ONE_TP_SIZE if shares else ""
        differences.update(shares)
        differences.update(_unsent_differences(prefill, decode))
    differences.update(_pool_differences(prefill, decode, same_tp, _is_mla(prefill.model, decode.model)))
    if decode.aux_item_bytes and prefill.aux_item_bytes != decode.aux_item_bytes:
        differences["aux_item_bytes"] = (list(prefill.aux_item_bytes), list(decode.aux_item_bytes))
    if prefill.data_plane != decode.data_plane:
        differences["data_plane"] = (prefill.data_plane, decode.data_plane)
    differences.update(prefill.model.differences(decode.model))
    if differences:
        raise mismatch(differences, remedy)
    rank = prefill.rank
    layers = layers_of_pools(prefill.pools)
    return wanted_part(decode, (rank.dp, rank.pp, rank.cp, rank.tp), prefill.layout, layers)


def parts_of_pages(prefill: Sequence[Pool], decode: Sequence[Pool]) -> int:
    """Returns how many of prefill's pages fill one of decode's, in pools that fit: of the first pool."""
    return parts_of_page(*shared(prefill[0], decode[0])) or 1


def mismatch(differences: dict[str, tuple[object, object]], remedy: str = "") -> ParallelLayoutMismatch:
    """The error of differing fields: prefill's value first, decode's second. ``remedy``: what helps, where the values
    do not say so."""
    text = ", ".join(f"{field}: prefill {one}, decode {other}" for field, (one, other) in differences.items())
    metadata: dict[str, object] = {"mismatchedFields": ",".join(differences)}
    metadata.update({field: f"{one} != {other}" for field, (one, other) in differences.items()})
    text += f". {remedy}" if remedy else ""
    return ParallelLayoutMismatch(f"prefill and decode do not fit: {text}", metadata=metadata)


# Below: one thing each.


def _group(at: int, decode_size: int, prefill_size: int) -> range:
    """Along one axis, the prefill ranks that hold what a decode rank holds, or copies of it."""
    if prefill_size >= decode_size:
        share = prefill_size // decode_size
        return range(at * share, (at + 1) * share)
    found = at // (decode_size // prefill_size)
    return range(found, found + 1)


def _sent_heads(pool: Pool, tp: int, tps: range, prefill_size: int) -> Heads | None:
    """The heads of decode's pool that this rank of the group sends; None: another one sends all that it has."""
    if not pool.heads_total:
        return Heads(0, 0, 0) if tp == tps[0] else None
    own = Heads(pool.head_start, pool.head_start + pool.head_count, pool.heads_total)
    mine = heads_of(pool.heads_total, prefill_size, tp)
    if tp != tps[0] and heads_of(pool.heads_total, prefill_size, tp - 1) == mine:
        return None
    found = own.overlap(mine)
    return found if found.stop > found.start else None


def _size_differences(prefill: Layout, decode: Layout) -> dict[str, tuple[object, object]]:
    differences: dict[str, tuple[object, object]] = {}
    if prefill.pp % decode.pp and decode.pp % prefill.pp:
        differences["layout.pp"] = (prefill.pp, decode.pp)
    if prefill.tp % decode.tp and decode.tp % prefill.tp:
        differences["layout.tp"] = (prefill.tp, decode.tp)
    if prefill.cp != decode.cp and decode.cp != 1:
        differences["layout.cp"] = (prefill.cp, decode.cp)
    return differences


def _layout_differences(prefill: Shape, decode: Shape) -> dict[str, tuple[object, object]]:
    differences = _size_differences(prefill.layout, decode.layout)
    if not differences:
        expected = prefill_ranks(decode.rank, decode.layout, prefill.layout, prefill.rank.dp)
        actual = (prefill.rank.dp, prefill.rank.pp, prefill.rank.cp, prefill.rank.tp)
        if actual not in expected:
            differences["rank"] = (actual, expected[0])
    return differences


_ONE_TP_SIZE = (
    "Between tensor-parallel sizes that differ, each rank has to hold its equal share of the heads: give both engines "
    "one tensor-parallel size"
)
_POOL_FIELDS = ("name", "kind", "page_tokens", "dtype", "axes", "heads_total")


def _share_differences(prefill: Shape, decode: Shape) -> dict[str, tuple[object, object]]:
    """With other sizes a rank must hold the heads that its coordinates say: what the other side expects of it."""
    differences: dict[str, tuple[object, object]] = {}
    for shape in (prefill, decode):
        for index, pool in enumerate(shape.pools):
            heads = heads_of(pool.heads_total, shape.layout.tp, shape.rank.tp)
            if pool.heads_total and (pool.head_start, pool.head_count) != (heads.start, heads.stop - heads.start):
                held = _held_heads(prefill, index), _held_heads(decode, index)
                differences[f"pools[{index}].head_count"] = held
    return differences


def _held_heads(shape: Shape, index: int) -> str:
    """Says "8 from 0 on, where tp 1 of 2 is to have 4 from 4 on", the latter only where it has others."""
    if index >= len(shape.pools):
        return "none"
    pool, size, tp = shape.pools[index], shape.layout.tp, shape.rank.tp
    share = heads_of(pool.heads_total, size, tp)
    held = f"{pool.head_count} from {pool.head_start} on"
    if (pool.head_start, pool.head_count) == (share.start, share.stop - share.start):
        return f"{held} at tp {tp} of {size}"
    return f"{held}, where tp {tp} of {size} is to have {share.stop - share.start} from {share.start} on"


def _unsent_differences(prefill: Shape, decode: Shape) -> dict[str, tuple[object, object]]:
    """The first pool says whether a rank of the group sends: where it is a copy there, it must be one in each pool."""
    size, tp = prefill.layout.tp, prefill.rank.tp
    tps = _group(decode.rank.tp, decode.layout.tp, size)
    owed = [pool.name for pool in decode.pools if tp in tps and _sent_heads(pool, tp, tps, size) is not None]
    if not owed or owed[0] == decode.pools[0].name:
        return {}
    index = next(number for number, pool in enumerate(decode.pools) if pool.name == owed[0])
    total, first = decode.pools[index].heads_total, decode.pools[0].heads_total
    return {f"pools[{index}].heads_total": (total, f"copies in tp {size} as pools[0] with its {first} heads has")}


def _is_mla(*models: ModelIdentity) -> bool:
    return any(model.attention is Attention.MLA for model in models)


def _pool_differences(
    prefill_shape: Shape, decode_shape: Shape, same_tp: bool, mla: bool
) -> dict[str, tuple[object, object]]:
    prefill, decode = prefill_shape.pools, decode_shape.pools
    same_stages = prefill_shape.layout.pp == decode_shape.layout.pp
    prefill_is_outer = prefill_shape.layout.pp < decode_shape.layout.pp
    if len(prefill) != len(decode):
        return {"pools": ([pool.name for pool in prefill], [pool.name for pool in decode])}
    layers = layers_of_pools(decode if prefill_is_outer else prefill)
    differences: dict[str, tuple[object, object]] = {}
    for index, (ours, theirs) in enumerate(zip(prefill, decode, strict=True)):
        if not same_stages:
            stage, outer = (theirs, ours) if prefill_is_outer else (ours, theirs)
            if set(stage.layers) != {layer for layer in outer.layers if layers[0] <= layer <= layers[-1]}:
                differences[f"pools[{index}].layers"] = (_layers_text(ours.layers), _layers_text(theirs.layers))
                continue
            ours, theirs = shared_layers(ours, theirs)
        differences.update(_differences_of_one(index, ours, theirs, same_tp, mla))
    return differences


def _differences_of_one(
    index: int, prefill: Pool, decode: Pool, same_tp: bool, mla: bool
) -> dict[str, tuple[object, object]]:
    """Of pools that have the same layers, or shall have them."""
    where = f"pools[{index}]"
    ours, theirs = shares_as_heads(prefill, decode)
    has_shares = ours is not prefill
    # Without heads these are a share of the tokens, which has to be the same between any sizes.
    same_heads = not has_shares and (same_tp or not theirs.heads_total) and not _has_heads_of(ours, theirs)
    are_empty = not ours.regions and not theirs.regions
    translated = not sliceable(ours, theirs) and translates(ours, theirs)
    parts = _parts(index, ours, theirs)
    differences: dict[str, tuple[object, object]] = {}
    for name in (*_POOL_FIELDS, "head_start", "head_count") if same_heads else _POOL_FIELDS:
        one, other = getattr(ours, name), getattr(theirs, name)
        allowed = (translated and name == "axes") or (parts > 1 and name == "page_tokens")
        allowed = allowed or (are_empty and name in ("dtype", "axes"))
        if one != other and not allowed:
            differences[f"{where}.{name}"] = (one, other)
    if has_shares and not mla:
        # Of other pools without heads, those that do not say how many they have, a head may come before the tokens.
        differences[f"{where}.axes"] = (prefill.axes, "shares of tokens: model.attention must be MLA")
    if not same_tp and not theirs.heads_total and not mla:
        differences[f"{where}.heads_total"] = (0, "above 0, or model.attention MLA: layout.tp differs")
    if translated or are_empty:
        return differences
    if ours.head_count != theirs.head_count and not sliceable(ours, theirs):
        differences[f"{where}.axes"] = (ours.axes, f"{theirs.axes}: must say where heads are")
    return differences | _region_differences(where, ours, theirs, parts)


def _has_heads_of(prefill: Pool, decode: Pool) -> bool:
    """True if prefill's rank has all heads of the model, and so any that decode's may have."""
    total = decode.heads_total
    has_all = (prefill.head_start, prefill.head_count) == (0, total)
    return has_all and decode.head_count > 0 and decode.head_start + decode.head_count <= total


def _parts(index: int, prefill: Pool, decode: Pool) -> int:
    """Returns how many of prefill's pages fill one of decode's; 1 too where they are not to. Of the first pool alone,
    whose positions are the prompt's: a window of another begins anywhere in a page."""
    parts = 1 if index else parts_of_page(prefill, decode) or 1
    return parts if parts <= MOST_PARTS and parts * decode.pages < 2**32 else 1


def _region_differences(where: str, prefill: Pool, decode: Pool, parts: int) -> dict[str, tuple[object, object]]:
    if len(prefill.regions) != len(decode.regions):
        return {f"{where}.regions": (len(prefill.regions), len(decode.regions))}
    our_heads, their_heads = max(prefill.head_count, 1), max(decode.head_count, 1)
    if our_heads == their_heads and parts == 1 and prefill.regions == decode.regions:
        return {}
    for number, (ours, theirs) in enumerate(zip(prefill.regions, decode.regions, strict=True)):
        if ours.layer != theirs.layer:
            return {f"{where}.regions[{number}].layer": (ours.layer, theirs.layer)}
        if ours.component != theirs.component:
            return {f"{where}.regions[{number}].component": (ours.component, theirs.component)}
        # Bytes of a page for each head, crosswise so that nothing is divided.
        if ours.page_bytes * parts * their_heads != theirs.page_bytes * our_heads:
            return {f"{where}.regions[{number}].page_bytes": (ours.page_bytes, theirs.page_bytes)}
    return {}


def _layers_text(held: Sequence[int]) -> str:
    if not held:
        return "none"
    layers = sorted(set(held))
    begins = [at for at, layer in enumerate(layers) if at == 0 or layer != layers[at - 1] + 1]
    runs = [layers[begin:end] for begin, end in zip(begins, [*begins[1:], len(layers)], strict=True)]
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
