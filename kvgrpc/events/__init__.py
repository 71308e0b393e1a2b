"""KV-cache events of one engine: published live over ZMQ, kept in a journal, replayed over gRPC.

Importing it loads neither zmq nor grpc; ``ZmqEventPublisher`` and ``EventServicer`` load theirs when first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvgrpc.events.base import EventPublisher, NullEventPublisher
from kvgrpc.events.codec import Dialect, Encoding, decode_batch
from kvgrpc.events.config import EventsConfig
from kvgrpc.events.factory import EventPublisherFactory, open_publisher
from kvgrpc.events.log.stream import EventStream
from kvgrpc.events.model import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    TierBlocksCleared,
    UnknownEvent,
)
from kvgrpc.events.publisher import JournalingPublisher, PublisherCounts
from kvgrpc.events.stream_owner import owns_event_stream

if TYPE_CHECKING:
    from kvgrpc.events.live.pub import ZmqEventPublisher
    from kvgrpc.events.servicer import EventServicer

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Dialect",
    "Encoding",
    "EventPublisher",
    "EventPublisherFactory",
    "EventServicer",
    "EventStream",
    "EventsConfig",
    "JournalingPublisher",
    "KVEventBatch",
    "NullEventPublisher",
    "PublisherCounts",
    "TierBlocksCleared",
    "UnknownEvent",
    "ZmqEventPublisher",
    "decode_batch",
    "open_publisher",
    "owns_event_stream",
]

_LOADED_WHEN_NAMED = {"ZmqEventPublisher": "kvgrpc.events.live.pub", "EventServicer": "kvgrpc.events.servicer"}


def __getattr__(name: str) -> Any:
    if name in _LOADED_WHEN_NAMED:
        return getattr(importlib.import_module(_LOADED_WHEN_NAMED[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
