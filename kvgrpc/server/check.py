"""Checks a RankConfig before anything is opened. Every refusal names the field, its value and the rule."""

from __future__ import annotations

from collections.abc import Iterator

from kvgrpc import dataplane
from kvgrpc.errors import InvalidRequest, Violation
from kvgrpc.events.config import EventsConfig
from kvgrpc.fields import is_right, kinds_of, rule_of, violations
from kvgrpc.model import RankRef, Role, check_pools, check_rank, raise_if
from kvgrpc.net import AddressPolicy, advertised, check_advertised, check_listen, is_wildcard, replicas, split
from kvgrpc.registry.model import labels_of
from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.server.config import LONGEST_TIMEOUT_SECONDS, LeaseSeconds, RankConfig
from kvgrpc.transfer.protocol.types import Timing
from kvgrpc.transfer.wire import smallest_frame


def check(config: RankConfig) -> None:
    """Raises InvalidRequest for what cannot be right, AddressNotAllowed for a wildcard that would be advertised.

    A role UNIFIED is a cache's, which has no pools (``open_cache``).
    """
    raise_if(list(violations(config)))
    raise_if(list(_contradictions(config)))
    check_rank(RankRef(config.rank, epoch=1), config.layout)
    if config.role is not Role.UNIFIED:
        check_pools(config.pools)
    check_settings(config)


def check_settings(config: RankConfig) -> None:
    """Checks what is known before an engine says what it is. Raises InvalidRequest, AddressNotAllowed."""
    raise_if([*_wrong_data_plane(config), *_wrong_ticks(config.timing)])
    _check_addresses(config)
    try:
        EventsConfig.parse(config.events)
    except RecursionError:
        raise events_refused(config, ValueError("events: nested too deeply")) from None
    except ValueError as error:
        raise events_refused(config, error) from error


def check_lease_ttl(seconds: object) -> None:
    """Raises InvalidRequest for a lease that is too short to be renewed, or that lives longer than anyone waits."""
    if not is_right(seconds, LeaseSeconds):
        raise InvalidRequest.of("lease_ttl", seconds, rule_of(LeaseSeconds))


def check_call_limits(limits: object) -> None:
    """Raises InvalidRequest for a value that is no CallLimits (None means the defaults) and for a limit below 1."""
    if limits is not None and not isinstance(limits, CallLimits):
        raise InvalidRequest.of("call_limits", limits, "a kvgrpc.server.CallLimits")
    raise_if(list(violations(limits or CallLimits(), "call_limits.")))


def events_refused(config: RankConfig, error: ValueError) -> InvalidRequest:
    """The InvalidRequest for what the events' own configuration raises as ValueError, as engines' tests expect it."""
    rule = str(error)
    return InvalidRequest(rule, metadata={"field": "events", "value": str(config.events)[:200], "rule": rule})


def _contradictions(config: RankConfig) -> Iterator[Violation]:
    """Yields what each field alone may be, and all together cannot."""
    if not config.pools and config.role is not Role.UNIFIED:
        yield Violation("pools", "at least one", config.pools)
    aux_bytes = sum(buffer.item_bytes for buffer in config.aux)
    if config.max_frame_bytes < smallest_frame(aux_bytes):
        rule = f"at least {smallest_frame(aux_bytes)} bytes, because a room ends with {aux_bytes} bytes of aux"
        yield Violation("max_frame_bytes", rule, config.max_frame_bytes)
    if config.pull is not None and config.prefetch is None and config.role is not Role.UNIFIED:
        yield Violation("pull", "None where there is no prefetch: pulls move pages of that cache", config.pull)
    if config.cache is not None and config.prefetch is not None:
        yield Violation("cache", "None where prefetch is given: a rank serves one cache", config.cache)
    if config.engine_rank is not None and any((config.dp, config.pp, config.cp, config.tp)):
        yield Violation("engine_rank", "None where dp, pp, cp or tp are given", config.engine_rank)
    if config.verify and (elsewhere := [pool.location for pool in config.pools if not pool.location.startswith("cpu")]):
        yield Violation("verify", "False where a pool is not in the memory of the CPU", ", ".join(elsewhere))


def _wrong_data_plane(config: RankConfig) -> Iterator[Violation]:
    plane = config.data_plane
    if plane not in dataplane.NAMES if isinstance(plane, str) else not hasattr(plane, "register"):
        names = " or ".join(repr(name) for name in dataplane.NAMES)
        yield Violation("data_plane", f"{names}, or a data plane that was opened before", plane)


def _wrong_ticks(timing: Timing) -> Iterator[Violation]:
    """Times travel as milliseconds of 32 bits."""
    most = int(LONGEST_TIMEOUT_SECONDS / timing.tick_seconds)
    for name in kinds_of(Timing):
        if (ticks := getattr(timing, name)) > most:
            yield Violation(f"timing.{name}", f"a whole number of ticks, 1 to {most} (a day)", ticks)
    if timing.idle_timeout <= timing.heartbeat:
        yield Violation("timing.idle_timeout", f"above timing.heartbeat = {timing.heartbeat}", timing.idle_timeout)


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
    labels_of(config.labels)
