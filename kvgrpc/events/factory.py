"""Makes the publisher that a configuration names, for the rank that should have one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import ClassVar

import msgspec

from kvgrpc.events.base import EventPublisher, NullEventPublisher
from kvgrpc.events.codec import RANK_FIELDS
from kvgrpc.events.config import EventsConfig
from kvgrpc.events.log.batch_queue import QueuedClear
from kvgrpc.events.model import KVEventBatch
from kvgrpc.events.publisher import JournalingPublisher
from kvgrpc.events.stream_owner import owns_event_stream
from kvgrpc.model import RankRef

# They say which publisher, or what the engine's cache writes, and are not for a publisher.
NOT_FOR_PUBLISHERS = ("enable_kv_cache_events", "publisher", "format", "max_watches")

PublisherClass = Callable[..., EventPublisher]


def open_publisher(config: object, rank: RankRef) -> EventPublisher:
    """The publisher of one rank: journal and Watch (``stream``), and the live transport that ``config`` names.

    ``config``: whatever ``EventsConfig.parse`` takes. Where events are off, and for ranks that do not publish (pp, cp
    or tp above 0), it takes everything and does nothing. Raises ValueError for a wrong configuration on every rank
    alike, OSError when an endpoint cannot be bound.
    """
    settings = EventsConfig.parse(config)
    if not settings.enable_kv_cache_events:
        return NullEventPublisher(rank.rank.dp)
    constructor = EventPublisherFactory.constructor(settings.publisher)
    if not owns_event_stream(rank.rank):
        return NullEventPublisher(rank.rank.dp)
    if settings.publisher == "null":
        return JournalingPublisher(rank, settings)
    if settings.publisher == "zmq":
        return _construct(constructor, settings, rank.rank.dp, rank=rank)
    custom = _construct(constructor, settings, rank.rank.dp)
    # An engine's own class has no stream.
    if getattr(custom, "stream", None) is not None:
        return custom
    return JournalingPublisher(rank, settings, _Forwarding(custom, rank.rank.dp))


class EventPublisherFactory:
    """Publishers by name, as in the engines: "null", "zmq", and what ``register_publisher`` adds."""

    _constructors: ClassVar[dict[str, PublisherClass]] = {}

    @classmethod
    def register_publisher(cls, name: str, constructor: PublisherClass) -> None:
        """Adds one. It gets the rank as ``attn_dp_rank`` or ``data_parallel_rank``, whichever it names, and the keys of
        the configuration that it names (all, if it takes any). Raises KeyError for a name that is taken."""
        if name in cls._constructors:
            raise KeyError(f"publisher {name!r} is registered already")
        cls._constructors[name] = constructor

    @classmethod
    def constructor(cls, name: str) -> PublisherClass:
        """Raises ValueError for an unknown name."""
        try:
            return cls._constructors[name]
        except KeyError:
            known = ", ".join(sorted(cls._constructors))
            raise ValueError(f"events: unknown publisher {name!r}; known are {known}") from None

    @classmethod
    def create(cls, config: object, data_parallel_rank: int = 0, *, attn_dp_rank: int | None = None) -> EventPublisher:
        """The named publisher alone, as the engines' factory makes it: no gate, and a journal only with "zmq".

        The rank has vLLM's name or SGLang's.
        """
        settings, dp = EventsConfig.parse(config), data_parallel_rank if attn_dp_rank is None else attn_dp_rank
        if not settings.enable_kv_cache_events:
            return NullEventPublisher(dp)
        return _construct(cls.constructor(settings.publisher), settings, dp)


class _Forwarding:
    """Hands batches to a publisher that somebody else wrote, on our thread, so that it cannot hold up an engine."""

    endpoint = ""

    def __init__(self, publisher: EventPublisher, rank: int) -> None:
        self._publisher = publisher
        self._rank = rank

    def send(self, sequence: int, payload: bytes, batch: object) -> None:
        if isinstance(batch, bytes):
            self._publisher.publish_raw(payload)
        elif batch is QueuedClear.CLEAR:
            # Engines' own publishers take no bytes: what it is made of is written again as it was.
            moment, events, *_ = msgspec.msgpack.decode(payload)
            self._publisher.publish(KVEventBatch(moment, events, self._rank))
        else:
            self._publisher.publish(batch)

    def close(self, deadline: float) -> None:
        # The engines' own publishers take no deadline.
        self._publisher.shutdown()


def _construct(
    constructor: PublisherClass, settings: EventsConfig, data_parallel_rank: int, **more: object
) -> EventPublisher:
    parameters = inspect.signature(constructor).parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    takes_any = len(named) < len(parameters)
    arguments = {
        key: value
        for key, value in msgspec.structs.asdict(settings).items()
        if key not in NOT_FOR_PUBLISHERS and (takes_any or key in named)
    }
    # One name, also where a publisher knows both.
    rank_names = [name for name in RANK_FIELDS if name in named][-1:] or (["data_parallel_rank"] if takes_any else [])
    return constructor(**arguments, **dict.fromkeys(rank_names, data_parallel_rank), **more)


def _zmq_publisher(**arguments: object) -> EventPublisher:
    # Loads zmq only where it is used.
    from kvgrpc.events.live.pub import ZmqEventPublisher

    return ZmqEventPublisher(**arguments)  # type: ignore[arg-type]  # checked by EventsConfig


EventPublisherFactory.register_publisher("null", NullEventPublisher)
EventPublisherFactory.register_publisher("zmq", _zmq_publisher)
