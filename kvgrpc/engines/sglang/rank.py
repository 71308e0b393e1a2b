"""SGLang's description of a scheduler process as the configuration of a kvgrpc rank. Imports nothing of SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvgrpc.dataplane.base import DataPlane
from kvgrpc.engines.addresses import bracketed, engine_name, is_wildcard
from kvgrpc.model import Layout, Pool, PoolKind, Region, Role
from kvgrpc.net import split
from kvgrpc.server import AuxBuffer, RankConfig, settings


@dataclass(frozen=True, slots=True)
class Place:
    """Where a scheduler process stands: sizes and ranks of its engine, and how it is reached.

    ``host`` is what SGLang's HTTP server binds; ``local_ip`` is what others dial when that is a wildcard.
    ``bootstrap`` is "host:port" of the engine's own registry, ``device`` of its tensors ("cpu", "cuda").
    ``engine_selects_dp``: its dp controller gives requests to other dp ranks than room % dp.
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


def rank_config(kv_args: Any, place: Place, plane: DataPlane | None = None) -> RankConfig:
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
        "tp": place.tp,
        "pools": (kv_pool(kv_args, place.device),),
        "aux": aux_buffers(kv_args.aux_data_ptrs, kv_args.aux_data_lens, kv_args.aux_item_lens),
        # Decode is dialled by nobody, and its requests name their registry.
        "registry": registry if place.role is Role.PREFILL else "",
        "engine_selects_dp": place.engine_selects_dp,
        "bootstrap_allow": (*configured.pop("bootstrap_allow", ()), *_host(external_registry())),
    }
    return RankConfig(**{**defaults, **configured, **facts})


def external_registry() -> str:
    """ "host:port" of the registry that KVGRPC_REGISTRY names; "" where each prefill engine serves its own."""
    return str(settings().get("registry", ""))


def reachable(place: Place) -> tuple[str, str]:
    """Which address to bind, and which one to give to peers."""
    return place.host, place.local_ip if is_wildcard(place.host) else place.host


def _host(address: str) -> tuple[str, ...]:
    return (split(address)[0],) if address else ()


def kv_pool(kv_args: Any, device: str) -> Pool:
    """The KV cache: one region an entry of ``kv_data_ptrs``, in SGLang's order, which both sides share.

    A page of SGLang is ``page_size`` tokens; an item of an entry is one page.
    """
    lengths, items = kv_args.kv_data_lens, kv_args.kv_item_lens
    return Pool(
        name="kv",
        kind=PoolKind.KV,
        page_tokens=kv_args.page_size,
        pages=min(length // item for length, item in zip(lengths, items, strict=True)),
        dtype=kv_args.kv_cache_dtype_str,
        regions=tuple(
            Region(entry, "kv", address, item, item)
            for entry, (address, item) in enumerate(zip(kv_args.kv_data_ptrs, items, strict=True))
        ),
        axes=getattr(kv_args, "kv_layout", None) or "",
        location=f"cuda:{kv_args.gpu_id}" if device == "cuda" else "cpu:0",
    )


def aux_buffers(addresses: Sequence[int], lengths: Sequence[int], items: Sequence[int]) -> tuple[AuxBuffer, ...]:
    """SGLang's metadata buffers in its order, which both sides share; a slot is a row of each."""
    return tuple(
        AuxBuffer(address, item, length // item)
        for address, length, item in zip(addresses, lengths, items, strict=True)
    )
