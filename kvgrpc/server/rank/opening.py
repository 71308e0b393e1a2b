"""Opens what a rank stands on, its data plane and its events; what goes wrong there gets its typed form here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from kvgrpc.dataplane import open_plane
from kvgrpc.dataplane.base import DataPlane, MemoryRange
from kvgrpc.errors import AddressNotAllowed, InvalidRequest
from kvgrpc.events import EventPublisher, open_publisher
from kvgrpc.events.config import EventsConfig
from kvgrpc.model import Pool, RankRef
from kvgrpc.net import is_local, is_wildcard, joined, split
from kvgrpc.prefetch.manager import PrefetchManager
from kvgrpc.prefetch.storage import open_backend
from kvgrpc.pull.taking.peers import PeersBackend
from kvgrpc.server.cache.events import TierEvents
from kvgrpc.server.check import events_refused
from kvgrpc.server.config import RankConfig

_ANYWHERE, _ON_LOOPBACK = "tcp://*:5557", "tcp://127.0.0.1:5557"


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
        plane.register(_memory_of(config.pools))
    except BaseException as error:
        if plane is not config.data_plane:
            plane.close(1.0)
        if isinstance(error, ValueError):
            raise _refused("pools", plane.name, error) from error
        raise
    return plane


def _memory_of(pools: Sequence[Pool]) -> list[MemoryRange]:
    """The memory of all pools. Two may have all of one, and pages of other sizes in it."""
    sizes: dict[tuple[int, str], int] = {}
    for pool in pools:
        for region in pool.regions:
            place = region.address, pool.location
            sizes[place] = max(sizes.get(place, 0), pool.pages * region.page_stride_bytes)
    return [MemoryRange(address, nbytes, location) for (address, location), nbytes in sizes.items()]


def publisher_of(config: RankConfig, rank: RankRef) -> EventPublisher:
    """The events of a rank. Raises InvalidRequest for a wrong key, AddressNotAllowed for an endpoint that is taken,
    FeatureDisabled."""
    try:
        return open_publisher(_where_others_may_reach(config), rank)
    except ValueError as error:
        raise events_refused(config, error) from error
    except OSError as error:
        address = error.filename or EventsConfig.parse(config.events).endpoint
        raise AddressNotAllowed(
            f"events: cannot open {address}: {error.strerror or error}; port 0 takes a free one",
            metadata={"address": address, "configKey": "events"},
        ) from error


def peers_of(config: RankConfig) -> PeersBackend | None:
    """The other engines that a rank pulls from, in front of its storage; whoever opens it closes it.

    Raises InvalidRequest for what its storage cannot be, FeatureDisabled.
    """
    wanted = config.prefetch
    if wanted is None or config.pull is None:
        return None
    if isinstance(wanted.storage, str):
        return PeersBackend(open_backend(wanted.storage, wanted.storage_config), owns_storage=True)
    return PeersBackend(wanted.storage)


def cache_of(
    config: RankConfig, rank: RankRef, publisher: EventPublisher, peers: PeersBackend | None = None
) -> PrefetchManager | None:
    """The hierarchical cache of a rank, which tells its events to the rank's publisher. ``peers`` take the place of its
    storage, which they have behind them.

    Raises InvalidRequest for what its storage or device cannot be, FeatureDisabled.
    """
    wanted = config.prefetch
    if wanted is None:
        return None
    if peers is not None:
        backup = wanted.backup and wanted.storage is not None
        wanted = replace(wanted, storage=peers, storage_config=None, backup=backup)
    events = TierEvents(publisher, wanted.shape.page_tokens)
    if wanted.listener is None and publisher.stream is not None:
        wanted = replace(wanted, listener=events.tell)
    manager = PrefetchManager(wanted, rank, config.layout, config.role)
    if publisher.stream is not None:
        manager.controller.book.listen(events.backup_ended)
    return manager


def watch_limit(config: RankConfig) -> int:
    """Returns how many readers of events a rank serves at once."""
    return EventsConfig.parse(config.events).max_watches


def dialled_endpoint(endpoint: str, address: str) -> str:
    """Returns what subscribers dial: where PUB is bound to every address, the host that peers dial."""
    scheme, _, rest = endpoint.partition("://")
    host, port = split(rest)
    return f"tcp://{joined(split(address)[0], port)}" if scheme == "tcp" and is_wildcard(host) else endpoint


def _where_others_may_reach(config: RankConfig) -> EventsConfig:
    """PUB proves nobody. Beside a port that only this host reaches it stays there too, unless it was told otherwise."""
    events = EventsConfig.parse(config.events)
    if not is_local(config.listen) or events.endpoint != _ANYWHERE or _names_endpoint(config.events):
        return events
    return msgspec.structs.replace(events, endpoint=_ON_LOOPBACK, bind=True)


def _names_endpoint(events: object) -> bool:
    if isinstance(events, (str, bytes)):
        events = msgspec.json.decode(events) if events else {}
    return not isinstance(events, Mapping) or "endpoint" in events


def _refused(field: str, value: object, error: ValueError) -> InvalidRequest:
    """The plane's own message, which says what would be right."""
    rule = str(error)
    return InvalidRequest(f"{field}: {rule}", metadata={"field": field, "value": value, "rule": rule})
