"""The general plug-in: events of an engine that has no connector of ours. All but the last test start no engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored, EventPublisher, EventPublisherFactory, KVEventBatch

from kvgrpc.client import SyncClient
from kvgrpc.client.watch import Payloads
from kvgrpc.engines import vllm_plugin
from kvgrpc.engines.vllm import events
from kvgrpc.engines.vllm.events import KvGrpcPublisher
from kvgrpc.errors import FeatureDisabled
from kvgrpc.server import EventServer
from kvgrpc.v1 import event_service_pb2
from tests.engines.engine import LOCAL
from tests.engines.model import Reference
from tests.engines.vllm_engine import BLOCK, VllmEngine, vllm_arguments
from tests.support.ports import free_port

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
        replayed = replay_until_stored(client, "replicas", RANK)
    assert len(replayed) == 1


def replay_until_stored(client: SyncClient, engine: str, dp: int) -> list[bytes]:
    """All batches; they are published behind vLLM's back."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        parts = client.watch(mode=event_service_pb2.WATCH_MODE_REPLAY, engine=engine, dp=dp)
        replayed = [payload for part in parts if isinstance(part, Payloads) for payload in part.payloads]
        if any(b"BlockStored" in payload for payload in replayed):
            return replayed
    raise AssertionError("no block was stored")


def test_vllm_is_told_where_the_events_are(publisher: EventPublisher, ports: tuple[int, int]) -> None:
    """For its own table of sources, which names the publisher by vLLM's word for the same bytes."""
    config = publisher.get_publisher_config()
    assert config is not None
    assert (config.publisher, config.topic, config.enable_kv_cache_events) == ("zmq", "kv", True)
    assert config.endpoint.endswith(f":{ports[0] + RANK}")


def test_a_publisher_that_cannot_be_made_or_ended_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, ports: tuple[int, int]
) -> None:
    def refuse(**_: object) -> None:
        raise ValueError("no such field")

    with monkeypatch.context() as patched:
        patched.setattr(events, "KVEventsConfig", refuse)
        with pytest.raises(ValueError, match="no such field"):
            made(ports)
    close = EventServer.close

    def close_late(server: EventServer) -> None:
        close(server)
        raise TimeoutError("the loop is busy")

    monkeypatch.setattr(EventServer, "close", close_late)
    publisher = made(ports)  # at the same ports
    with pytest.raises(TimeoutError):
        publisher.shutdown()
    assert not [each for each in threading.enumerate() if each.name.startswith("kvgrpc-events")]


def made(ports: tuple[int, int]) -> KvGrpcPublisher:
    serving = events.Serving("E", f"{LOCAL}:{ports[1]}", {}, {})
    return KvGrpcPublisher(RANK, serving, endpoint=f"tcp://*:{ports[0]}", topic="kv")


def test_without_the_variable_vllms_publisher_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(EventPublisherFactory._registry)
    monkeypatch.delenv("KVGRPC_EVENTS_LISTEN", raising=False)
    vllm_plugin.register()
    assert EventPublisherFactory._registry == before


def test_a_vllm_without_what_the_publisher_needs_ends_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.99.0")
    monkeypatch.setattr("vllm.distributed.kv_events.EventPublisher.publish", lambda self: None)
    monkeypatch.setenv("KVGRPC_EVENTS_LISTEN", f"{LOCAL}:0")
    with pytest.raises(FeatureDisabled, match=r"vLLM 0\.99\.0: .*publish has no events; install vllm=="):
        vllm_plugin.register()


@pytest.mark.timeout(900)
def test_a_real_engine_loads_it_and_its_blocks_are_replayed(folder: Path, reference: Reference) -> None:
    listen = f"{LOCAL}:{free_port()}"
    events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{free_port()}", "topic": "kv"}
    arguments = {**vllm_arguments(reference.path, 1), "kv_events_config": events}
    engine = VllmEngine("alone", folder, arguments, {"KVGRPC_EVENTS_LISTEN": listen, "KVGRPC_ENGINE": "alone"})
    try:
        engine.wait_ready()
        case = reference.case(4 * BLOCK)
        assert engine.generate(case.prompt, len(case.tokens)).result() == case.tokens
        with SyncClient(listen) as client:
            first = replay_until_stored(client, "alone", 0)[0]
        assert b"AllBlocksCleared" in first
    finally:
        engine.close()
