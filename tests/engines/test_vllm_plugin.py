"""The general plug-in: events of an engine that has no connector of ours. No engine is started."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import metadata

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored, EventPublisher, EventPublisherFactory, KVEventBatch

from kvgrpc.client import SyncClient
from kvgrpc.client.watch import Payloads
from kvgrpc.engines import vllm_plugin
from kvgrpc.engines.vllm.events import KvGrpcPublisher
from kvgrpc.errors import FeatureDisabled
from kvgrpc.v1 import event_service_pb2
from tests.engines.engine import LOCAL, free_port

RANK = 1  # a second replica, whose ports are the next ones


@pytest.fixture
def ports() -> tuple[int, int]:
    """Of the events and of their replay, as the configuration of all replicas has them."""
    return free_port() - RANK, free_port() - RANK


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch, ports: tuple[int, int]) -> Iterator[EventPublisher]:
    """What vLLM's scheduler gets of an ordinary configuration."""
    monkeypatch.setitem(EventPublisherFactory._registry, "zmq", EventPublisherFactory._registry["zmq"])
    monkeypatch.setenv("KVGRPC_EVENTS_LISTEN", f"{LOCAL}:{ports[1]}")
    monkeypatch.setenv("KVGRPC_ENGINE", "replicas")
    monkeypatch.setenv("KVGRPC_EVENTS", '{"clear_first": false}')
    vllm_plugin.register()
    vllm_plugin.register()  # vLLM may
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://*:{ports[0]}", topic="kv")
    made = EventPublisherFactory.create(config, RANK)
    yield made
    made.shutdown()


def test_vllms_zmq_publisher_is_ours_and_replays_what_vllm_publishes(
    publisher: EventPublisher, ports: tuple[int, int]
) -> None:
    assert isinstance(publisher, KvGrpcPublisher)
    stored = BlockStored([b"a" * 32], None, [1, 2], 2, None, "GPU", None)
    publisher.publish(KVEventBatch(ts=1.0, events=[stored]))
    with SyncClient(f"{LOCAL}:{ports[1] + RANK}") as client:
        end = time.monotonic() + 20
        replayed: list[bytes] = []
        while not replayed:  # it is published behind vLLM's back
            assert time.monotonic() < end
            parts = client.watch(mode=event_service_pb2.WATCH_MODE_REPLAY, engine="replicas", dp=RANK)
            replayed = [payload for part in parts if isinstance(part, Payloads) for payload in part.payloads]
    assert len(replayed) == 1 and b"BlockStored" in replayed[0]


def test_vllm_is_told_where_the_events_are(publisher: EventPublisher, ports: tuple[int, int]) -> None:
    """For its own table of sources, which names the publisher by vLLM's word for the same bytes."""
    config = publisher.get_publisher_config()
    assert config is not None
    assert (config.publisher, config.topic, config.enable_kv_cache_events) == ("zmq", "kv", True)
    assert config.endpoint.endswith(f":{ports[0] + RANK}")


def test_without_the_variable_vllms_publisher_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(EventPublisherFactory._registry)
    monkeypatch.delenv("KVGRPC_EVENTS_LISTEN", raising=False)
    vllm_plugin.register()
    assert EventPublisherFactory._registry == before


def test_another_vllm_ends_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.99.0")
    monkeypatch.setenv("KVGRPC_EVENTS_LISTEN", f"{LOCAL}:0")
    with pytest.raises(FeatureDisabled, match=r"version 0\.99\.0; install vllm=="):
        vllm_plugin.register()
