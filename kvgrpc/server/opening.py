"""Opens what a rank stands on, its data plane and its events; what goes wrong there gets its typed form here."""

from __future__ import annotations

from kvgrpc.dataplane import open_plane
from kvgrpc.dataplane.base import DataPlane, MemoryRange
from kvgrpc.errors import AddressNotAllowed, InvalidRequest
from kvgrpc.events import EventPublisher, open_publisher
from kvgrpc.events.config import EventsConfig
from kvgrpc.model import RankRef
from kvgrpc.net import split
from kvgrpc.prefetch.manager import PrefetchManager
from kvgrpc.server.check import events_refused
from kvgrpc.server.config import RankConfig


def plane_of(config: RankConfig) -> DataPlane:
    """The data plane of a checked configuration, with its pools registered; one that cannot take them is closed.

    Raises InvalidRequest for a device that is not there and for memory that the plane cannot move, FeatureDisabled.
    """
    plane = config.data_plane
    if isinstance(plane, str):
        host = split(config.advertise or config.listen)[0]
        try:
            plane = open_plane(plane, host=host, device=config.device)
        except ValueError as error:
            raise _refused("device", config.device, error) from error
    try:
        plane.register(
            [
                MemoryRange(region.address, pool.pages * region.page_stride_bytes, pool.location)
                for pool in config.pools
                for region in pool.regions
            ]
        )
    except BaseException as error:
        if plane is not config.data_plane:
            plane.close(1.0)
        if isinstance(error, ValueError):
            raise _refused("pools", plane.name, error) from error
        raise
    return plane


def publisher_of(config: RankConfig, rank: RankRef) -> EventPublisher:
    """The events of a rank. Raises InvalidRequest for a wrong key, AddressNotAllowed for an endpoint that is taken,
    FeatureDisabled."""
    try:
        return open_publisher(config.events, rank)
    except ValueError as error:
        raise events_refused(config, error) from error
    except OSError as error:
        address = error.filename or EventsConfig.parse(config.events).endpoint
        raise AddressNotAllowed(
            f"events: cannot open {address}: {error.strerror or error}; port 0 takes a free one",
            metadata={"address": address, "configKey": "events"},
        ) from error


def cache_of(config: RankConfig, rank: RankRef) -> PrefetchManager | None:
    """The hierarchical cache of a rank. Raises InvalidRequest for what its storage or device cannot be,
    FeatureDisabled."""
    return None if config.prefetch is None else PrefetchManager(config.prefetch, rank, config.layout)


def watch_limit(config: RankConfig) -> int:
    """How many readers of events a rank serves at once."""
    return EventsConfig.parse(config.events).max_watches


def _refused(field: str, value: object, error: ValueError) -> InvalidRequest:
    """The plane's own words, which say what would be right."""
    rule = str(error)
    return InvalidRequest(f"{field}: {rule}", metadata={"field": field, "value": value, "rule": rule})
