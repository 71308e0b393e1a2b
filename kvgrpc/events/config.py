"""The events part of an engine's configuration: the keys of the engines' own ``kv_events_config``, and ours."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kvgrpc.errors import InvalidRequest
from kvgrpc.events.codec import Dialect, Encoding
from kvgrpc.events.log.journal import KEPT_BATCHES, KEPT_BYTES, KEPT_SECONDS, JournalLimits
from kvgrpc.fields import Count
from kvgrpc.settings import read


class ReplayShape(enum.Enum):
    """The frames of a ROUTER reply after the identity."""

    SEED = "seed"
    """Delimiter, sequence, payload."""
    TOPIC = "topic"
    """Delimiter, topic, sequence, payload."""


class EventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a rank's KV-cache events: off, kept, or published live."""

    enable_kv_cache_events: bool = True
    """False: the rank publishes nothing, whatever else is set."""
    publisher: str = "zmq"
    """Name of the live transport: "zmq", "null" (journal and Watch only), or a registered one."""
    endpoint: str | None = "tcp://*:5557"
    """ZMQ PUB; dp is added to the port, or appended to the name of ipc and inproc. None: no PUB."""
    replay_endpoint: str | None = None
    """ZMQ ROUTER for the engines' own replay, with dp added as in ``endpoint``; None: off. For "zmq" only."""
    replay_shape: ReplayShape | None = None
    """Frames of its replies: "topic" as both engines send today, "seed" without it. None: "topic" with maps, "seed"
    with arrays."""
    buffer_steps: Annotated[int, msgspec.Meta(ge=0)] = KEPT_BATCHES
    """Batches kept for replay."""
    hwm: Count = 100_000
    """Messages that PUB queues for one slow subscriber before it drops."""
    max_queue_size: Count = 100_000
    """Batches that wait to be sent; what is published beyond them is dropped, and told."""
    topic: str = ""
    """First frame of PUB."""
    bind: bool | None = None
    """Whether PUB binds; None: wildcard addresses, port 0, ipc and inproc do, other addresses connect to a proxy; while
    nobody listens there, the log says so once."""
    dialect: Dialect = Dialect.VLLM
    """Whose events our own batches look like; an engine's batches go as they are."""
    encoding: Encoding = Encoding.MAP
    """"map" as both engines send today; "array" for consumers from before June 2026."""
    format: Literal["default", "dynamo"] = "default"
    """SGLang's key: which hashes its cache puts into events. It is for the engine, and changes nothing here."""
    clear_first: bool = True
    """The first batch of a log says AllBlocksCleared, for consumers that know nothing of logs."""
    max_watches: Count = 4096
    """Readers that Watch serves at once; one costs about 30 KB, and 1 MiB where it does not read."""
    snapshots: bool = True
    """Whether the present state is kept, for snapshots and digests: about 350 bytes for each block that is cached."""
    journal_bytes: Count = KEPT_BYTES
    """Bytes kept for replay."""
    journal_age: Annotated[float, msgspec.Meta(gt=0)] = KEPT_SECONDS
    """Seconds that a batch is kept for replay."""

    @classmethod
    def parse(cls, value: object) -> EventsConfig:
        """Reads None or "" (disabled), a JSON string, a mapping, or an object with these attributes.

        Raises ValueError that names the key for an unknown key or a wrong value.
        """
        if isinstance(value, cls):
            return value
        if value is None or value == "":
            return cls(enable_kv_cache_events=False)
        settings = _settings(value)
        try:
            return read(cls, settings, "events.")
        except InvalidRequest as error:
            raise ValueError(error.message) from None

    @property
    def journal_limits(self) -> JournalLimits:
        return JournalLimits(self.buffer_steps, self.journal_bytes, self.journal_age)

    @property
    def shape_of_replay(self) -> ReplayShape:
        if self.replay_shape is not None:
            return self.replay_shape
        return ReplayShape.TOPIC if self.encoding is Encoding.MAP else ReplayShape.SEED


def keys_of(value: object) -> dict[str, Any]:
    """The keys of an events configuration in any of its forms (JSON, a mapping, a configuration object), none where it
    is None or empty. Raises InvalidRequest for what is no object.
    """
    try:
        return dict(_settings(value)) if value else {}
    except ValueError as error:
        raise InvalidRequest.of("events", value, f"a JSON object ({error})") from None


def _settings(value: object) -> Mapping[Any, Any]:
    if isinstance(value, str | bytes):
        value = _parse_json(value)
    if isinstance(value, Mapping):
        return value
    if isinstance(value, type):
        raise ValueError(f"events: an object, not the class {value.__name__}")
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):
        dumped: Mapping[str, Any] = value.model_dump()
        return dumped
    if hasattr(value, "__dict__"):
        return {name: setting for name, setting in vars(value).items() if not name.startswith("_")}
    raise ValueError(f"events: a JSON object, a mapping or a configuration object, not {type(value).__name__}")


def _parse_json(text: str | bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"events: not JSON: {error}") from None
