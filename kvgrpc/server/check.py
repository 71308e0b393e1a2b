"""What a RankConfig must be before anything is opened. Every refusal names the field, its value and the rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, SupportsIndex

from kvgrpc import dataplane
from kvgrpc.errors import InvalidRequest, Violation
from kvgrpc.events.config import EventsConfig
from kvgrpc.model import Layout, ModelIdentity, Pool, PoolKind, RankRef, Region, Role, check_pools, check_rank, raise_if
from kvgrpc.net import (
    AddressPolicy,
    advertised,
    check_advertised,
    check_listen,
    is_wildcard,
    replicas,
    split,
)
from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.rpc.options import MAX_MESSAGE_BYTES
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity
from kvgrpc.server.config import RankConfig
from kvgrpc.transfer.aux import AuxBuffer
from kvgrpc.transfer.protocol.types import Bounds, Timing
from kvgrpc.transfer.runtime.gather import BLOCK_BYTES
from kvgrpc.transfer.wire import smallest_frame

# Below it the names and pools of an ordinary Hello would not fit.
SMALLEST_FRAME_BYTES = 64 * 1024
LONGEST_TIMEOUT_SECONDS = 86_400.0
# Below it a peer that is busy for a moment would be taken for one that hangs.
SHORTEST_SILENCE_SECONDS = 5.0
SHORTEST_TICK_SECONDS, LONGEST_TICK_SECONDS = 0.001, 10.0
SHORTEST_SWITCH_SECONDS, LONGEST_SWITCH_SECONDS = 0.000_01, 1.0
SHORTEST_LEASE_SECONDS, LONGEST_LEASE_SECONDS = 1.0, 600.0

_KINDS: tuple[tuple[str, type, str], ...] = (
    ("engine", str, "text"),
    ("role", Role, 'Role.PREFILL or Role.DECODE (kvgrpc.server.settings reads "prefill" and "decode")'),
    ("layout", Layout, "a kvgrpc.model.Layout"),
    ("model", ModelIdentity, "a kvgrpc.model.ModelIdentity"),
    *((name, SupportsIndex, "a whole number") for name in ("dp", "pp", "cp", "tp", "max_frame_bytes", "gather_bytes")),
    *((name, str, "text") for name in ("device", "listen", "advertise", "registry", "metrics_listen")),
    *((name, bool, "True or False") for name in ("engine_selects_dp", "refusal_proves_death", "verify", "tracing")),
    ("server_security", ServerSecurity, "a kvgrpc.rpc.security.ServerSecurity"),
    ("client_security", ClientSecurity, "a kvgrpc.rpc.security.ClientSecurity"),
    ("timing", Timing, "a kvgrpc.transfer.protocol.types.Timing"),
    ("bounds", Bounds, "a kvgrpc.transfer.protocol.types.Bounds"),
    ("call_limits", CallLimits, "a kvgrpc.server.CallLimits"),
)
_LISTS: tuple[tuple[str, type, str], ...] = (
    ("pools", Pool, "kvgrpc.model.Pool"),
    ("aux", AuxBuffer, "kvgrpc.server.AuxBuffer"),
    ("bootstrap_allow", str, "text"),
    ("admin_listen", str, "text"),
)
_POOL_KINDS: tuple[tuple[str, type, str], ...] = (
    *((name, str, "text") for name in ("name", "dtype", "axes", "location")),
    *(
        (name, SupportsIndex, "a whole number")
        for name in ("page_tokens", "pages", "heads_total", "head_start", "head_count")
    ),
    ("kind", PoolKind, "a kvgrpc.model.PoolKind"),
    ("regions", tuple, "a tuple of kvgrpc.model.Region"),
)
_REGION_KINDS: tuple[tuple[str, type, str], ...] = (
    ("component", str, "text"),
    *((name, SupportsIndex, "a whole number") for name in ("layer", "address", "page_stride_bytes", "page_bytes")),
)


def check(config: RankConfig) -> None:
    """Raises InvalidRequest for what cannot be right, AddressNotAllowed for a wildcard that would be advertised."""
    raise_if([*_wrong_kinds(config), *_wrong_lists(config)])
    raise_if(list(_wrong_pool_kinds(config)))
    raise_if(list(_out_of_range(config)))
    check_rank(RankRef(config.rank, epoch=1), config.layout)
    check_pools(config.pools)
    _check_addresses(config)
    try:
        EventsConfig.parse(config.events)
    except RecursionError:
        raise events_refused(config, ValueError("events: nested too deeply")) from None
    except ValueError as error:
        raise events_refused(config, error) from error


def check_lease_ttl(seconds: object) -> None:
    """Raises InvalidRequest for a lease that is too short to be renewed, or that lives longer than anyone waits."""
    raise_if(list(_wrong_lease_ttl(seconds)))


def check_call_limits(limits: object) -> None:
    """Raises InvalidRequest for a value that is no CallLimits (None means the defaults) and for a limit below 1."""
    if limits is not None and not isinstance(limits, CallLimits):
        raise InvalidRequest.of("call_limits", limits, "a kvgrpc.server.CallLimits")
    raise_if(list(_wrong_limits(limits or CallLimits())))


def events_refused(config: RankConfig, error: ValueError) -> InvalidRequest:
    """The InvalidRequest for what the events' own configuration raises as ValueError, as engines' tests expect it."""
    rule = str(error)
    return InvalidRequest(rule, metadata={"field": "events", "value": str(config.events)[:200], "rule": rule})


def _wrong_kinds(config: RankConfig) -> Iterator[Violation]:
    yield from _of_kinds(config, _KINDS, "")
    flat = config.engine_rank
    if flat is not None and (not isinstance(flat, SupportsIndex) or isinstance(flat, bool)):
        yield Violation("engine_rank", "a whole number, or None", flat)
    plane = config.data_plane
    if plane not in dataplane.NAMES if isinstance(plane, str) else not hasattr(plane, "register"):
        names = " or ".join(repr(name) for name in dataplane.NAMES)
        yield Violation("data_plane", f"{names}, or a data plane that was opened before", plane)


def _of_kinds(holder: object, kinds: tuple[tuple[str, type, str], ...], path: str) -> Iterator[Violation]:
    for name, kind, rule in kinds:
        value = getattr(holder, name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            # What stands where security should be may hold a token.
            yield Violation(path + name, rule, type(value) if name.endswith("_security") else value)


def _wrong_lists(config: RankConfig) -> Iterator[Violation]:
    for name, kind, rule in _LISTS:
        items = getattr(config, name)
        if not isinstance(items, (tuple, list)):
            yield Violation(name, f"a tuple of {rule}", items)
            continue
        if name == "pools" and not items:
            yield Violation(name, "at least one", items)
        for index, item in enumerate(items):
            if not isinstance(item, kind):
                yield Violation(f"{name}[{index}]", rule, item)


def _wrong_pool_kinds(config: RankConfig) -> Iterator[Violation]:
    for index, pool in enumerate(config.pools):
        yield from _of_kinds(pool, _POOL_KINDS, f"pools[{index}].")
        for number, region in enumerate(pool.regions if isinstance(pool.regions, tuple) else ()):
            path = f"pools[{index}].regions[{number}]"
            if not isinstance(region, Region):
                yield Violation(path, "a kvgrpc.model.Region", region)
            else:
                yield from _of_kinds(region, _REGION_KINDS, f"{path}.")


def _out_of_range(config: RankConfig) -> Iterator[Violation]:
    aux_bytes = sum(buffer.item_bytes for buffer in config.aux if _is_count(buffer.item_bytes))
    if not SMALLEST_FRAME_BYTES <= config.max_frame_bytes <= MAX_MESSAGE_BYTES:
        rule = f"{SMALLEST_FRAME_BYTES} to {MAX_MESSAGE_BYTES} bytes"
        yield Violation("max_frame_bytes", rule, config.max_frame_bytes)
    elif config.max_frame_bytes < smallest_frame(aux_bytes):
        rule = f"at least {smallest_frame(aux_bytes)} bytes, because a room ends with {aux_bytes} bytes of aux"
        yield Violation("max_frame_bytes", rule, config.max_frame_bytes)
    if config.pull is not None and config.prefetch is None:
        yield Violation("pull", "None where there is no prefetch: pulls move pages of that cache", config.pull)
    if config.engine_rank is not None and any((config.dp, config.pp, config.cp, config.tp)):
        yield Violation("engine_rank", "None where dp, pp, cp or tp are given", config.engine_rank)
    for name in ("start_timeout", "resolve_timeout"):
        if not _is_positive(seconds := getattr(config, name)) or seconds > LONGEST_TIMEOUT_SECONDS:
            yield Violation(name, f"a number of seconds above 0, at most {LONGEST_TIMEOUT_SECONDS:g}", seconds)
    if config.verify and (elsewhere := [pool.location for pool in config.pools if not pool.location.startswith("cpu")]):
        yield Violation("verify", "False where a pool is not in the memory of the CPU", ", ".join(elsewhere))
    if config.gather_bytes and config.gather_bytes < BLOCK_BYTES:
        yield Violation("gather_bytes", f"0, or at least {BLOCK_BYTES}, a decode rank's share", config.gather_bytes)
    yield from _wrong_lease_ttl(config.lease_ttl)
    yield from _wrong_switches(config)
    yield from _wrong_timing(config.timing)
    yield from _wrong_silence(config)
    for each in fields(Bounds):
        if not _is_count(value := getattr(config.bounds, each.name)):
            yield Violation(f"bounds.{each.name}", "a whole number, at least 1", value)
    yield from _wrong_limits(config.call_limits)
    for index, buffer in enumerate(config.aux):
        for each in fields(AuxBuffer):
            if not _is_count(value := getattr(buffer, each.name)):
                yield Violation(f"aux[{index}].{each.name}", "a whole number, at least 1", value)


def _wrong_limits(limits: CallLimits) -> Iterator[Violation]:
    for each in fields(CallLimits):
        if not _is_count(value := getattr(limits, each.name)):
            yield Violation(f"call_limits.{each.name}", "a whole number, at least 1", value)


def _wrong_timing(timing: Timing) -> Iterator[Violation]:
    """A tick that is no whole number never comes, and times travel as milliseconds of 32 bits."""
    tick = timing.tick_seconds
    if not _is_positive(tick) or not SHORTEST_TICK_SECONDS <= tick <= LONGEST_TICK_SECONDS:
        rule = f"{SHORTEST_TICK_SECONDS:g} to {LONGEST_TICK_SECONDS:g} seconds"
        yield Violation("timing.tick_seconds", rule, timing.tick_seconds)
        return
    most = int(LONGEST_TIMEOUT_SECONDS / timing.tick_seconds)
    for each in fields(Timing):
        value = getattr(timing, each.name)
        if each.name != "tick_seconds" and not (_is_count(value) and value <= most):
            yield Violation(f"timing.{each.name}", f"a whole number of ticks, 1 to {most} (a day)", value)
        elif each.name == "idle_timeout" and _is_count(timing.heartbeat) and value <= timing.heartbeat:
            yield Violation("timing.idle_timeout", f"above timing.heartbeat = {timing.heartbeat}", value)


def _wrong_silence(config: RankConfig) -> Iterator[Violation]:
    seconds: Any = config.silent_timeout
    if seconds == 0 and not isinstance(seconds, bool):
        return
    if not _is_positive(seconds) or not SHORTEST_SILENCE_SECONDS <= seconds <= LONGEST_TIMEOUT_SECONDS:
        rule = f"0 (timing.idle_timeout), or {SHORTEST_SILENCE_SECONDS:g} to {LONGEST_TIMEOUT_SECONDS:g} seconds"
        yield Violation("silent_timeout", rule, seconds)


def _wrong_lease_ttl(seconds: Any) -> Iterator[Violation]:
    if not _is_positive(seconds) or not SHORTEST_LEASE_SECONDS <= seconds <= LONGEST_LEASE_SECONDS:
        yield Violation("lease_ttl", f"{SHORTEST_LEASE_SECONDS:g} to {LONGEST_LEASE_SECONDS:g} seconds", seconds)


def _wrong_switches(config: RankConfig) -> Iterator[Violation]:
    interval = config.switch_interval
    if interval != 0 or isinstance(interval, bool):
        fits = _is_positive(interval) and SHORTEST_SWITCH_SECONDS <= interval <= LONGEST_SWITCH_SECONDS
        if not fits:
            rule = f"0 (as it is), or {SHORTEST_SWITCH_SECONDS:g} to {LONGEST_SWITCH_SECONDS:g} seconds"
            yield Violation("switch_interval", rule, interval)
    if not isinstance(config.poll_gives_way, bool):
        yield Violation("poll_gives_way", "True or False", config.poll_gives_way)


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, (SupportsIndex, float)) and not isinstance(value, bool)
    return is_number and bool(0 < value < math.inf)


def _is_count(value: Any) -> bool:
    return isinstance(value, SupportsIndex) and _is_positive(value)


def _check_addresses(config: RankConfig) -> None:
    check_listen(config.listen, unix=False)
    for index, address in enumerate(config.admin_listen):
        check_listen(address, f"admin_listen[{index}]")
    if config.metrics_listen:
        check_listen(config.metrics_listen, "metrics_listen", unix=False)
    if not config.advertise and is_wildcard(split(config.listen)[0]):
        rule = f"the host that peers dial, because listen is the wildcard {config.listen}"
        raise_if([Violation("advertise", rule, config.advertise)])
    if config.advertise:
        # Any port but 0 will do: the one to be bound is not known yet.
        check_advertised(advertised("any:1", config.advertise), field="advertise", peer_is_local=True)
    if config.registry not in ("", "embedded"):
        try:
            replicas(config.registry)
        except InvalidRequest:
            rule = '"host:port" (replicas with commas between them), "embedded" or empty'
            raise_if([Violation("registry", rule, config.registry)])
    AddressPolicy(config.bootstrap_allow)
