"""Rows, pools and a registry with a clock that tests turn by hand."""

from __future__ import annotations

import itertools

from kvgrpc.model import Layout, ModelIdentity, Pool, PoolKind, RankId, RankRef, Region, Role
from kvgrpc.registry.model import Endpoints, RankRow
from kvgrpc.registry.store.memory import MemoryRegistry

TTL = 10.0


class HandClock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def registry(clock: HandClock, *, warm: bool = True, max_rows: int = 1_000, max_engines: int = 100) -> MemoryRegistry:
    made = MemoryRegistry(
        clock=clock,
        registry_id="r",
        lease_ids=itertools.count(1),
        ttl=TTL,
        max_rows=max_rows,
        max_engines=max_engines,
    )
    if warm:
        clock.now += TTL
    return made


def row(
    engine: str = "P",
    *,
    dp: int = 0,
    tp: int = 0,
    epoch: int = 1,
    layout: Layout | None = None,
    role: Role = Role.PREFILL,
    port: int = 1,
    pools: tuple[Pool, ...] = (),
    data_plane: str = "shm",
    model: ModelIdentity | None = None,
) -> RankRow:
    return RankRow(
        ref=RankRef(RankId(engine, dp=dp, tp=tp), epoch),
        role=role,
        endpoints=Endpoints(grpc=f"127.0.0.1:{port}"),
        layout=layout or Layout(),
        pools=pools,
        data_plane=data_plane,
        model=model or ModelIdentity(),
    )


def pool(name: str = "kv", *, page_tokens: int = 16, pages: int = 8, layers: int = 2, head_start: int = 0) -> Pool:
    return Pool(
        name=name,
        kind=PoolKind.KV,
        page_tokens=page_tokens,
        pages=pages,
        dtype="bfloat16",
        regions=tuple(Region(layer, "kv", 0, 4_096, 4_096) for layer in range(layers)),
        head_start=head_start,
    )


def ranks(layout: Layout, *, engine: str = "P", epoch: int = 1, role: Role = Role.PREFILL) -> list[RankRow]:
    """All rows of an engine that has only dp and tp."""
    return [
        row(engine, dp=dp, tp=tp, epoch=epoch, layout=layout, role=role)
        for dp in range(layout.dp)
        for tp in range(layout.tp)
    ]
