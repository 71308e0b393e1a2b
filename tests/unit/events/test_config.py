"""The configuration takes what engines hand over, and says which key is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.events.codec import Dialect, Encoding
from kvgrpc.events.config import EventsConfig, ReplayShape, keys_of


@dataclass
class EngineConfig:
    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    topic: str = "kv"


@pytest.mark.parametrize(
    "value",
    [
        '{"topic": "kv"}',
        b'{"topic": "kv"}',
        {"topic": "kv"},
        EngineConfig(),
        SimpleNamespace(topic="kv", _private=1),
        EventsConfig(topic="kv"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_comes_in_every_form(value: object) -> None:
    assert EventsConfig.parse(value) == EventsConfig(topic="kv")


@pytest.mark.parametrize("value", [None, ""])
def test_no_configuration_is_no_events(value: object) -> None:
    assert not EventsConfig.parse(value).enable_kv_cache_events


def test_a_configuration_is_events_on_zmq() -> None:
    config = EventsConfig.parse({})
    assert (config.enable_kv_cache_events, config.publisher, config.endpoint) == (True, "zmq", "tcp://*:5557")


def test_all_keys_are_read() -> None:
    settings = {
        "enable_kv_cache_events": True,
        "publisher": "null",
        "endpoint": None,
        "replay_endpoint": "tcp://*:5558",
        "buffer_steps": 1,
        "hwm": 2,
        "max_queue_size": 3,
        "topic": "t",
        "bind": True,
        "dialect": "sglang",
        "encoding": "array",
        "replay_shape": "topic",
        "format": "dynamo",
        "clear_first": False,
        "snapshots": False,
        "max_watches": 6,
        "journal_bytes": 4,
        "journal_age": 5.0,
    }
    assert set(settings) == set(EventsConfig.__struct_fields__)
    config = EventsConfig.parse(settings)
    assert config.dialect is Dialect.SGLANG
    assert {name: getattr(config, name) for name in settings} == settings | {
        "dialect": Dialect.SGLANG,
        "encoding": Encoding.ARRAY,
        "replay_shape": ReplayShape.TOPIC,
    }


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"endpont": "tcp://*:1"}, "endpont"),
        (SimpleNamespace(endpont="tcp://*:1"), "endpont"),
        ({"reader_lag_batches": 100}, "reader_lag_batches"),
        ({"hwm": 0}, "hwm"),
        ({"hwm": "many"}, "hwm"),
        ({"max_queue_size": 0}, "max_queue_size"),
        ({"buffer_steps": -1}, "buffer_steps"),
        ({"journal_bytes": 0}, "journal_bytes"),
        ({"journal_age": 0}, "journal_age"),
        ({"dialect": "klingon"}, "klingon"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events"),
        ("{", "JSON"),
        ("[1]", "list"),
        (7, "int"),
        (EngineConfig, "class"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(value: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EventsConfig.parse(value)


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({}, "topic"),
        ({"encoding": "array"}, "seed"),
        ({"encoding": "array", "replay_shape": "topic"}, "topic"),
        ({"replay_shape": "seed"}, "seed"),
    ],
    ids=str,
)
def test_the_shape_of_a_replay_follows_the_encoding_unless_it_is_chosen(settings: object, shape: str) -> None:
    assert EventsConfig.parse(settings).shape_of_replay.value == shape


@pytest.mark.parametrize("value", [None, "", {}, "{}"], ids=str)
def test_no_keys_are_none(value: object) -> None:
    assert keys_of(value) == {}


@pytest.mark.parametrize("value", ['{"topic": "kv"}', {"topic": "kv"}, SimpleNamespace(topic="kv")], ids=str)
def test_keys_come_as_json_of_a_variable_or_as_a_table_of_a_file(value: object) -> None:
    assert keys_of(value) == {"topic": "kv"}


@pytest.mark.parametrize("value", ["{", "[1]", 7], ids=str)
def test_what_has_no_keys_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequest, match="events"):
        keys_of(value)
