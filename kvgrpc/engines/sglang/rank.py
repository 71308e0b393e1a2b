"""SGLang's description of a scheduler process as the configuration of a kvgrpc rank. Imports nothing of SGLang."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvgrpc.dataplane.base import DataPlane
from kvgrpc.engines.addresses import bracketed, engine_name, is_wildcard
from kvgrpc.engines.sglang.deadlines import deadlines
from kvgrpc.model import UNKNOWN_MODEL, Layout, ModelIdentity, Pool, PoolKind, Region, Role
from kvgrpc.net import split
from kvgrpc.server import AuxBuffer, RankConfig, settings
from kvgrpc.transfer.layout.token_shares import axes_of_shares
from kvgrpc.transfer.layout.topology import heads_of

SLIDING_WINDOW, STATE_A_REQUEST = "swa", "mamba"
_ALL_LAYERS = "all layers of a page"


@dataclass(frozen=True, slots=True)
class SchedulerProcess:
    """The place of a scheduler process: sizes and ranks of its engine, and how it is reached.

    ``host`` is what SGLang's HTTP server binds; ``local_ip`` is what others dial when that is a wildcard.
    ``bootstrap`` is "host:port" of the engine's own registry, ``device`` of its tensors ("cpu", "cuda").
    ``engine_selects_dp``: its dp controller gives requests to other dp ranks than room % dp.
    ``kv_heads``: of the whole model; 0: MLA, each rank holds all. ``page_layout``: SGLang's word for the order
    of tokens and heads in a page. ``pp`` and ``first_layer``: its pipeline stage, and where that begins in the model.
    ``cp``: which of prefill's context parallel ranks, all of which have all pages; those that have some layers each are
    stages. ``dcp`` of ``dcp_size``: which of the decode context parallel (DCP) ranks, to which the tokens of a page
    number are dealt out.
    ``has_all_heads``: of keys and values, whatever its tensor-parallel size.
    ``state_dtype`` and ``state_axes``: torch's names for what a state a request is made of, and a word for the order of
    its bytes; "" where the model has none.
    """

    role: Role
    layout: Layout
    dp: int
    tp: int
    host: str
    local_ip: str
    port: int
    bootstrap: str
    device: str
    engine_selects_dp: bool = False
    model: ModelIdentity = UNKNOWN_MODEL
    kv_heads: int = 0
    page_layout: str = "nhd"
    pp: int = 0
    first_layer: int = 0
    cp: int = 0
    dcp: int = 0
    dcp_size: int = 1
    has_all_heads: bool = False
    has_unified_memory: bool = False
    state_dtype: str = ""
    state_axes: str = ""


def rank_config(kv_args: Any, place: SchedulerProcess, plane: DataPlane | None = None) -> RankConfig:
    """The rank to open: KVGRPC_… of the environment over what SGLang says, but never over its memory and coordinates.

    ``plane``: a data plane that shares SGLang's Mooncake engine. Raises InvalidRequest for a setting that cannot be.
    """
    host, advertise = reachable(place)
    configured = settings()
    defaults: dict[str, Any] = {
        "engine": engine_name(f"{advertise}-{place.port}"),
        "listen": f"{bracketed(host)}:0",
        "advertise": "" if advertise == host else advertise,
        "device": getattr(kv_args, "ib_device", None) or "",
        "data_plane": plane or "mooncake",
    }
    registry = configured.pop("registry", "") or place.bootstrap
    facts: dict[str, Any] = {
        "role": place.role,
        "layout": place.layout,
        "dp": place.dp,
        "pp": place.pp,
        "cp": place.cp,
        "tp": place.tp,
        "pools": pools(kv_args, place),
        "model": place.model,
        "aux": aux_buffers(kv_args.aux_data_ptrs, kv_args.aux_data_lens, kv_args.aux_item_lens),
        # Decode is dialled by nobody, and its requests name their registry.
        "registry": registry if place.role is Role.PREFILL else "",
        "engine_selects_dp": place.engine_selects_dp,
        "timing": deadlines(place.role, configured, os.environ),
        "bootstrap_allow": (*configured.pop("bootstrap_allow", ()), *_host(external_registry())),
    }
    return RankConfig(**{**defaults, **configured, **facts})


def external_registry() -> str:
    """ "host:port" of the registry that KVGRPC_REGISTRY names; "" where each prefill engine serves its own."""
    return str(settings().get("registry", ""))


def reachable(place: SchedulerProcess) -> tuple[str, str]:
    """Returns which address to bind, and which one to give to peers."""
    return place.host, place.local_ip if is_wildcard(place.host) else place.host


def _host(address: str) -> tuple[str, ...]:
    return (split(address)[0],) if address else ()


def pools(kv_args: Any, place: SchedulerProcess) -> tuple[Pool, ...]:
    """The KV cache, and what SGLang keeps beside it, each in pages of other numbers: that of layers with a sliding
    window, and states of other kinds as SGLang describes them.
    """
    kv = Entries(kv_args.kv_data_ptrs, kv_args.kv_data_lens, kv_args.kv_item_lens)
    if place.has_unified_memory:
        return _unified_pools(kv, kv_args, place)
    drafts = getattr(kv_args, "num_draft_entries", 0)
    names = regions_of(len(kv.items), drafts, place.kv_heads, place.first_layer)
    layout = getattr(kv_args, "kv_layout", None) or place.page_layout
    found = [_pool("kv", kv, _numbered(names, layers_told(kv_args)), layout, place.kv_heads, kv_args, place)]
    for state, name in enumerate(state_names(kv_args)):
        own = _entries_of(kv_args, state)
        layers = layers_told(kv_args, state)
        if is_plain_window(kv_args, state):
            # Heads of another number or size than the model's others: then only equal sizes fit.
            heads = place.kv_heads if set(own.items) == set(kv.items) else 0
            own_names = _numbered(regions_of(len(own.items), 0, place.kv_heads), layers)
            found.append(_pool(name, own, own_names, kv_args.swa_kv_cache_layout, heads, kv_args, place))
        else:
            is_request = kind_of(kv_args.state_types[state]) == STATE_A_REQUEST
            dtype, axes = (place.state_dtype, place.state_axes) if is_request else ("", "")
            own_names = states_of(len(own.items), layers, place.first_layer)
            found.append(_states(name, own, own_names, dtype or _cache_dtype(kv_args, place), axes, kv_args, place))
    return tuple(found)


def sent_page_bytes(kv_args: Any, pools: Sequence[Pool], place: SchedulerProcess) -> dict[str, int]:
    """By pool, the bytes of a page in all layers that a rank of prefill sends: of one that has all heads, those that
    the equal rank of decode wants."""
    names = state_names(kv_args)
    sizes = map(sum, (kv_args.kv_item_lens, *(kv_args.state_item_lens if names else ())))
    totals = {pool.name: pool.heads_total for pool in pools if place.has_all_heads}
    found: dict[str, int] = {}
    for name, size in zip(("kv", *names), sizes, strict=True):
        total = totals.get(name, 0)
        wanted = heads_of(total, place.layout.tp, place.tp)
        found[name] = size * (wanted.stop - wanted.start) // total if total else size
    return found


def _unified_pools(kv: Entries, kv_args: Any, place: SchedulerProcess) -> tuple[Pool, ...]:
    """Of one entry each, whose bytes both sides have in the same order if their pages are as large."""
    found = [_pool("kv", kv, [(place.first_layer, "kv")], _ALL_LAYERS, 0, kv_args, place)]
    for state, name in enumerate(state_names(kv_args)):
        own = _entries_of(kv_args, state)
        if is_plain_window(kv_args, state):
            found.append(_pool(name, own, [(place.first_layer, "kv")], _ALL_LAYERS, 0, kv_args, place))
        else:
            axes = f"{place.state_axes},{_ALL_LAYERS}"
            dtype = place.state_dtype or _cache_dtype(kv_args, place)
            found.append(_states(name, own, [(place.first_layer, "state")], dtype, axes, kv_args, place))
    return tuple(found)


def _entries_of(kv_args: Any, state: int) -> Entries:
    return Entries(*(getattr(kv_args, f"state_{what}")[state] for what in ("data_ptrs", "data_lens", "item_lens")))


def layers_told(kv_args: Any, state: int | None = None) -> Sequence[int]:
    """The layer of the whole model that each entry is of, of the KV cache or of a ``state``, by SGLang's pools; empty
    where they do not say."""
    items = kv_args.kv_item_lens if state is None else kv_args.state_item_lens[state]
    of_states = getattr(kv_args, "state_layer_ids", ())
    told = getattr(kv_args, "kv_layer_ids", ()) if state is None else of_states[state] if of_states else ()
    return told if len(told) == len(items) else ()


def _numbered(names: list[tuple[int, str]], layers: Sequence[int]) -> list[tuple[int, str]]:
    return _told_apart((layer, part) for layer, (_, part) in zip(layers, names, strict=True)) if layers else names


def states_of(entries: int, layers: Sequence[int], first: int = 0) -> list[tuple[int, str]]:
    """Layer and component of each entry: what a layer keeps first, second and so on; the entry itself, counted from
    ``first``, where ``layers`` does not say whose it is."""
    return _told_apart((layer, "state") for layer in layers or range(first, first + entries))


def _told_apart(parts: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    """Of what a layer has twice, as keys and values of drafts beside latents, the second is called "latent-1"."""
    seen: Counter[tuple[int, str]] = Counter()
    found = []
    for layer, part in parts:
        again = seen[layer, part]
        seen[layer, part] += 1
        found.append((layer, f"{part}-{again}" if again else part))
    return found


def state_names(kv_args: Any) -> tuple[str, ...]:
    """The names of SGLang's pools besides the KV cache, in its order, which both sides share; a kind may come twice."""
    kinds = [kind_of(state) for state in getattr(kv_args, "state_types", ())]
    return tuple(kind if kind not in kinds[:at] else f"{kind}-{at}" for at, kind in enumerate(kinds))


def kind_of(state: object) -> str:
    """SGLang's word for a kind of state."""
    return str(getattr(state, "value", state))


def is_plain_window(kv_args: Any, state: int) -> bool:
    """Pages of tokens, then heads. A version that does not say how it lays out windows (0.5.21) may have no heads."""
    layout = getattr(kv_args, "swa_kv_cache_layout", None)
    return kind_of(kv_args.state_types[state]) == SLIDING_WINDOW and bool(layout == "nhd")


def pages_of_pools(names: Sequence[str], kv: Any, states: Sequence[Any] | None) -> Any:
    """Page numbers as our ends take them: a list for the only pool, or one for each pool by its name.

    ``states``: SGLang's, one of each pool besides the KV cache, None where a request has nothing there; None with all
    pages of a prompt but the last. Some are one number in a list, some one in a list in a list.
    """
    if not names:
        return kv
    given = zip(names, states or (), strict=False)
    return {"kv": kv, **{name: np.asarray(() if own is None else own, np.int32).reshape(-1) for name, own in given}}


class Entries(NamedTuple):
    """SGLang's lists of one pool: K of each layer, then V of each. An item is one page: all heads of each token."""

    addresses: Sequence[int]
    lengths: Sequence[int]
    items: Sequence[int]


def _pool(
    name: str,
    entries: Entries,
    names: Sequence[tuple[int, str]],
    layout: str,
    total: int,
    kv_args: Any,
    place: SchedulerProcess,
) -> Pool:
    """One region an entry, in SGLang's order, which both sides share; a page is of ``page_size`` tokens of the rank."""
    tp, tps = (0, 1) if place.has_all_heads else (place.tp, place.layout.tp)
    return Pool(
        name=name,
        kind=PoolKind.KV,
        page_tokens=kv_args.page_size * place.dcp_size,
        pages=min(length // item for length, item in zip(entries.lengths, entries.items, strict=True)),
        dtype=_cache_dtype(kv_args, place),
        regions=tuple(
            Region(layer, component, address, item, item)
            for (layer, component), address, item in zip(names, entries.addresses, entries.items, strict=True)
        ),
        axes=_axes(layout, total) if place.dcp_size == 1 else axes_of_shares(place.dcp_size),
        heads_total=total,
        head_start=tp * total // tps if total else place.dcp,
        head_count=max(total // tps, 1) if total else int(place.dcp_size > 1),
        location=_location(kv_args, place),
    )


def _states(
    name: str,
    entries: Entries,
    names: Sequence[tuple[int, str]],
    dtype: str,
    axes: str,
    kv_args: Any,
    place: SchedulerProcess,
) -> Pool:
    """One region an entry that has memory. SGLang alone knows what an item is: a request's state, its row in a ring, or
    what is kept of a page of tokens.
    """
    held = [(named, *about) for named, about in zip(names, zip(*entries, strict=True), strict=True) if about[1]]
    return Pool(
        name=name,
        kind=PoolKind.STATE,
        page_tokens=0,
        pages=min(length // item for _, _, length, item in held),
        dtype=dtype,
        regions=tuple(Region(*named, address, item, item) for named, address, _, item in held),
        axes=axes,
        location=_location(kv_args, place),
    )


def _cache_dtype(kv_args: Any, place: SchedulerProcess) -> str:
    return place.model.cache_dtype or str(kv_args.kv_cache_dtype_str)


def _location(kv_args: Any, place: SchedulerProcess) -> str:
    return f"cuda:{kv_args.gpu_id}" if place.device == "cuda" else "cpu:0"


def regions_of(entries: int, drafts: int, heads: int, first: int = 0) -> list[tuple[int, str]]:
    """Layer and component of each entry. With heads: K of all layers, then V of all; then the same of a draft model.

    ``first``: the number in the whole model of the first layer that the stage has.
    """
    if not heads or (entries - drafts) % 2 or drafts % 2:
        return [(first + entry, "kv" if heads else "latent") for entry in range(entries)]
    layers, more = (entries - drafts) // 2, drafts // 2
    own, draft = range(first, first + layers), range(first + layers, first + layers + more)
    return [(layer, part) for numbers in (own, draft) for part in ("k", "v") for layer in numbers]


def _axes(layout: str, heads: int) -> str:
    """SGLang's name of a page layout in our words; others than "nhd" are only compared."""
    if layout != "nhd":
        return layout
    return "token,head,dim" if heads else ""


def aux_buffers(addresses: Sequence[int], lengths: Sequence[int], items: Sequence[int]) -> tuple[AuxBuffer, ...]:
    """SGLang's metadata buffers in its order, which both sides share; a slot is a row of each."""
    return tuple(
        AuxBuffer(address, item, length // item)
        for address, length, item in zip(addresses, lengths, items, strict=True)
    )
