"""A configuration that cannot be right is refused before anything is opened, by field, value and rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvgrpc.dataplane.shm.plane import ShmDataPlane
from kvgrpc.errors import AddressNotAllowed, InvalidRequest
from kvgrpc.model import Layout, Pool, PoolKind, Region, Role
from kvgrpc.server import AuxBuffer, CallLimits, IndexServer, RankConfig, RegistryServer, open_rank, settings
from kvgrpc.server.check import check
from kvgrpc.transfer.protocol.types import Bounds, Timing

POOL = Pool("kv", PoolKind.KV, 16, 8, "float32", (Region(0, "kv", 4096, 4096, 4096),))


OVERLAPPING = (Region(0, "kv", 4096, 4096, 4096), Region(1, "kv", 4096 + 7 * 4096, 4096, 4096))


class Tensor:
    """An array where a number belongs."""

    def data_ptr(self) -> int:
        return 4096


def config(**changes: Any) -> RankConfig:
    settings = {"engine": "P", "role": Role.PREFILL, "pools": (POOL,), "data_plane": "shm", **changes}
    return RankConfig(**settings)


@pytest.mark.parametrize(
    "right",
    [
        {},
        {"data_plane": ShmDataPlane()},
        {"aux": (AuxBuffer(4096, 64, 4),), "pools": [POOL]},
        {"listen": "[::1]:0", "admin_listen": ("unix:/run/a", "127.0.0.1:0")},
        {"listen": "0.0.0.0:0", "advertise": "fd00::5"},
        {"advertise": "[fd00::5]:9001", "registry": "registry-a:8998"},
        {"advertise": "host-a", "registry": "embedded", "bootstrap_allow": ("10.0.0.0/8", "host-b")},
        {"lease_ttl": 1, "start_timeout": 0.5, "max_frame_bytes": 64 * 1024},
        {"max_frame_bytes": 16 * 1024 * 1024, "events": {"publisher": "null"}},
        {"layout": Layout(dp=2, tp=4), "engine_rank": 7},
    ],
)
def test_what_can_be_right_passes(right: dict[str, Any]) -> None:
    check(config(**right))


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("role", {"role": "prefill"}),
    ("role", {"role": 1}),
    ("engine", {"engine": 5}),
    ("rank.rank.engine", {"engine": "a b"}),
    ("dp", {"dp": "1"}),
    ("rank.rank.tp", {"tp": 1}),
    ("rank.rank.tp", {"tp": -1}),
    ("engine_rank", {"engine_rank": 1}),
    ("engine_rank", {"engine_rank": -1, "layout": Layout(tp=2)}),
    ("engine_rank", {"engine_rank": "1", "layout": Layout(tp=2)}),
    ("engine_rank", {"engine_rank": 1, "tp": 1, "layout": Layout(tp=2)}),
    ("engine_rank", {"engine_rank": 0, "layout": Layout(tp=0)}),
    ("layout", {"layout": (1, 1, 1, 1)}),
    ("layout.tp", {"layout": Layout(tp=0)}),
    ("pools", {"pools": ()}),
    ("pools", {"pools": POOL}),
    ("pools[0]", {"pools": ("kv",)}),
    ("pools[0].pages", {"pools": (replace(POOL, pages="8"),)}),  # type: ignore[arg-type]
    ("pools[0].kind", {"pools": (replace(POOL, kind=1),)}),  # type: ignore[arg-type]
    ("pools[0].regions", {"pools": (replace(POOL, regions=()),)}),
    ("pools[0].regions[0]", {"pools": (replace(POOL, regions=((0, "kv", 1, 2, 2),)),)}),  # type: ignore[arg-type]
    ("pools[0].regions[0].address", {"pools": (replace(POOL, regions=(Region(0, "kv", 0, 8, 8),)),)}),
    ("pools[0].regions[0].address", {"pools": (replace(POOL, regions=(Region(0, "kv", Tensor(), 8, 8),)),)}),  # type: ignore[arg-type]
    ("pools[0].regions[0].layer", {"pools": (replace(POOL, regions=(Region(-1, "kv", 4096, 8, 8),)),)}),
    ("pools[0].regions[0].layer", {"pools": (replace(POOL, regions=(Region("0", "kv", 4096, 8, 8),)),)}),  # type: ignore[arg-type]
    ("pools[0].regions[1]", {"pools": (replace(POOL, regions=(*POOL.regions, *POOL.regions)),)}),
    ("pools[0].regions[0].address", {"pools": (replace(POOL, regions=OVERLAPPING),)}),
    ("pools[0].heads_total", {"pools": (replace(POOL, heads_total="2"),)}),  # type: ignore[arg-type]
    ("pools[0].heads_total", {"pools": (replace(POOL, heads_total=-2),)}),
    ("pools[1].name", {"pools": (POOL, POOL)}),
    ("refusal_proves_death", {"refusal_proves_death": "no"}),
    ("gather_bytes", {"gather_bytes": "much"}),
    ("gather_bytes", {"gather_bytes": (4 << 20) - 1}),
    ("gather_bytes", {"gather_bytes": -1}),
    ("verify", {"verify": "yes"}),
    ("verify", {"verify": True, "pools": (replace(POOL, location="cuda:0"),)}),
    ("engine_selects_dp", {"engine_selects_dp": 1}),
    ("call_limits.unary", {"call_limits": CallLimits(unary=0)}),
    ("start_timeout", {"start_timeout": 1e308}),
    ("events", {"events": "[" * 100_000}),
    ("aux", {"aux": AuxBuffer(4096, 64, 4)}),
    ("aux[0]", {"aux": ((4096, 64, 4),)}),
    ("aux[0].item_bytes", {"aux": (AuxBuffer(4096, 0, 4),)}),
    ("aux[0].items", {"aux": (AuxBuffer(4096, 64, 1.5),)}),  # type: ignore[arg-type]
    ("data_plane", {"data_plane": "moonshine"}),
    ("data_plane", {"data_plane": None}),
    ("device", {"device": None}),
    ("listen", {"listen": "127.0.0.1"}),
    ("listen", {"listen": "unix:/run/p0.sock"}),
    ("listen", {"listen": "127.0.0.1:70000"}),
    ("admin_listen", {"admin_listen": "unix:/run/p0.sock"}),
    ("admin_listen[0]", {"admin_listen": ("nonsense",)}),
    ("advertise", {"listen": "0.0.0.0:0"}),
    ("advertise", {"listen": "[::]:0"}),
    ("advertise", {"advertise": "a b"}),
    ("advertise", {"advertise": "host:port"}),
    ("registry", {"registry": "host:"}),
    ("registry", {"registry": None}),
    ("bootstrap_allow", {"bootstrap_allow": "10.0.0.0/8"}),
    ("bootstrap_allow", {"bootstrap_allow": ("http://x",)}),
    ("events", {"events": {"nonsense": 1}}),
    ("events", {"events": "{"}),
    ("server_security", {"server_security": None}),
    ("client_security", {"client_security": "token"}),
    ("start_timeout", {"start_timeout": "soon"}),
    ("start_timeout", {"start_timeout": float("nan")}),
    ("resolve_timeout", {"resolve_timeout": 0}),
    ("lease_ttl", {"lease_ttl": -1}),
    ("lease_ttl", {"lease_ttl": 601}),
    ("lease_ttl", {"lease_ttl": "10"}),
    ("switch_interval", {"switch_interval": -1}),
    ("switch_interval", {"switch_interval": 1e-6}),
    ("switch_interval", {"switch_interval": True}),
    ("switch_interval", {"switch_interval": "fast"}),
    ("poll_gives_way", {"poll_gives_way": 1}),
    ("timing", {"timing": None}),
    ("timing.idle_timeout", {"timing": Timing(idle_timeout=0)}),
    ("timing.idle_timeout", {"timing": Timing(idle_timeout=3, heartbeat=3)}),
    ("timing.room_deadline", {"timing": Timing(room_deadline=10.5)}),  # type: ignore[arg-type]
    ("timing.room_deadline", {"timing": Timing(room_deadline=43_000_000)}),
    ("timing.tick_seconds", {"timing": Timing(tick_seconds=11.0)}),
    ("timing.tick_seconds", {"timing": Timing(tick_seconds=0.0001)}),
    ("timing.tick_seconds", {"timing": Timing(tick_seconds=-0.1)}),
    ("bounds.rooms", {"bounds": Bounds(rooms=0)}),
    ("max_frame_bytes", {"max_frame_bytes": 1}),
    ("max_frame_bytes", {"max_frame_bytes": 64 * 1024 - 1}),
    ("max_frame_bytes", {"max_frame_bytes": 16 * 1024 * 1024 + 1}),
    ("max_frame_bytes", {"max_frame_bytes": 1e6}),
]


@pytest.mark.parametrize("registry", ["", "embedded"])
@pytest.mark.parametrize(("field", "wrong"), WRONG, ids=[f"{name}-{i}" for i, (name, _) in enumerate(WRONG)])
def test_what_cannot_is_named_with_its_value_and_the_rule(field: str, wrong: dict[str, Any], registry: str) -> None:
    """The same with and without a registry."""
    with pytest.raises(InvalidRequest) as refused:
        open_rank(config(**{"registry": registry, **wrong}))
    metadata = refused.value.metadata
    assert metadata["field"] == field
    assert metadata["rule"] and metadata["value"] is not None
    assert field in refused.value.message


def test_servers_without_an_engine_refuse_limits_that_are_none() -> None:
    for limits in (CallLimits(streams=0), {"streams": 5}):
        for make in (
            lambda limits=limits: RegistryServer(["127.0.0.1:0"], call_limits=limits),
            lambda limits=limits: IndexServer(["127.0.0.1:0"], sources=["127.0.0.1:1"], call_limits=limits),
        ):
            with pytest.raises(InvalidRequest) as refused:
                make()
            assert refused.value.metadata["field"].startswith("call_limits")


def test_the_value_is_the_one_that_was_given() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(config(max_frame_bytes=1))
    assert refused.value.metadata == {
        "field": "max_frame_bytes",
        "value": "1",
        "rule": "a whole number of bytes, 65536 to 16777216",
    }
    assert refused.value.message == "max_frame_bytes: must be a whole number of bytes, 65536 to 16777216, not 1"


def test_what_may_be_a_token_is_not_shown() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(config(client_security={"token": "s3cret"}))
    assert "s3cret" not in f"{refused.value} {refused.value.metadata}"
    with pytest.raises(InvalidRequest) as refused:
        settings({"tokn": "s3cret"}, {})
    assert "s3cret" not in f"{refused.value} {refused.value.metadata}"


def test_a_wildcard_is_not_advertised() -> None:
    with pytest.raises(AddressNotAllowed) as refused:
        check(config(advertise="0.0.0.0"))
    assert refused.value.metadata["configKey"] == "advertise"


def test_a_registry_alone_is_checked_too() -> None:
    with pytest.raises(InvalidRequest) as refused:
        RegistryServer(["127.0.0.1:0"], lease_ttl=-1)
    assert refused.value.metadata["field"] == "lease_ttl"


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("listen", {"listen": ["127.0.0.1:port"]}),
        ("metrics_listen", {"metrics_listen": "127.0.0.1:port"}),
        ("metrics_listen", {"metrics_listen": "unix:/tmp/metrics"}),
    ],
)
def test_so_are_its_addresses_before_anything_is_bound(field: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        RegistryServer(**{"listen": ["127.0.0.1:0"], **wrong})
    assert refused.value.metadata["field"] == field
