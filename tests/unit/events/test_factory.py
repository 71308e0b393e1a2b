"""Which publisher a rank gets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvgrpc.events import (
    EventPublisher,
    EventPublisherFactory,
    JournalingPublisher,
    KVEventBatch,
    NullEventPublisher,
    ZmqEventPublisher,
    open_publisher,
    owns_event_stream,
)
from kvgrpc.model import RankId, RankRef

Register = Callable[[str, Callable[..., EventPublisher]], None]


class Sglang(EventPublisher):
    """Written as for seed 000: takes the rank by its name, and no deadline."""

    def __init__(self, attn_dp_rank: int, topic: str = "") -> None:
        self.rank, self.topic = attn_dp_rank, topic
        self.published: list[object] = []
        self.closed = False

    def publish(self, batch: object) -> bool:
        self.published.append(batch)
        return True

    def shutdown(self) -> None:  # type: ignore[override]
        self.closed = True


class Vllm(Sglang):
    """Written as for seed 001: takes the rank by its name, and whatever else there is."""

    def __init__(self, data_parallel_rank: int, **settings: Any) -> None:
        super().__init__(data_parallel_rank)
        self.settings = settings


def rank(**coordinates: int) -> RankRef:
    return RankRef(RankId("engine", **coordinates), 1)


@pytest.fixture
def register() -> Iterator[Register]:
    before = dict(EventPublisherFactory._constructors)
    yield EventPublisherFactory.register_publisher
    EventPublisherFactory._constructors.clear()
    EventPublisherFactory._constructors.update(before)


@pytest.mark.parametrize("coordinate", ["pp", "cp", "tp"])
def test_only_the_first_rank_of_each_dp_publishes(coordinate: str) -> None:
    assert owns_event_stream(RankId("engine", dp=1))
    assert not owns_event_stream(RankId("engine", **{coordinate: 1}))
    gated = open_publisher({"endpoint": "tcp://*:0"}, rank(**{coordinate: 1}))
    assert isinstance(gated, NullEventPublisher)
    assert gated.publish(KVEventBatch(0.0, []))
    assert gated.publish_raw(b"x")
    assert gated.stream is None
    gated.shutdown()


@pytest.mark.parametrize("config", [None, "", {"enable_kv_cache_events": False, "publisher": "zmq"}])
def test_events_may_be_off(config: object) -> None:
    assert isinstance(open_publisher(config, rank()), NullEventPublisher)
    assert isinstance(EventPublisherFactory.create(config), NullEventPublisher)


def test_null_is_a_journal_without_live_events() -> None:
    full = {"publisher": "null", "endpoint": "tcp://*:5557", "buffer_steps": 10, "hwm": 10, "max_queue_size": 10}
    opened = open_publisher(full, rank(dp=2))
    assert type(opened) is JournalingPublisher
    assert (opened.stream.dp, opened.stream.state().pub_endpoint) == (2, "")
    opened.shutdown()
    assert isinstance(EventPublisherFactory.create(full), NullEventPublisher)


@pytest.mark.parametrize("endpoint", [None, "inproc://factory"])
def test_zmq_has_a_journal_with_or_without_an_endpoint(endpoint: str | None) -> None:
    opened = open_publisher({"endpoint": endpoint, "dialect": "sglang"}, rank(dp=1))
    assert isinstance(opened, ZmqEventPublisher)
    assert opened.stream.state().pub_endpoint == ("inproc://factory_dp1" if endpoint else "")
    opened.shutdown()


def test_the_engines_factory_makes_zmq_too() -> None:
    opened = EventPublisherFactory.create({"endpoint": "inproc://created", "topic": "t"}, 3)
    assert isinstance(opened, ZmqEventPublisher)
    assert (opened.stream.dp, opened.stream.topic) == (3, b"t")
    opened.shutdown()


@pytest.mark.parametrize("constructor", [Sglang, Vllm])
def test_a_registered_publisher_gets_the_rank_by_the_name_it_uses(register: Register, constructor: Any) -> None:
    register("mine", constructor)
    made = EventPublisherFactory.create({"publisher": "mine", "topic": "kv"}, 5)
    assert isinstance(made, constructor)
    assert made.rank == 5
    assert (made.settings["topic"] if isinstance(made, Vllm) else made.topic) == "kv"


def test_a_registered_publisher_is_live_beside_our_journal(register: Register) -> None:
    made: list[Sglang] = []
    register("mine", lambda attn_dp_rank: made.append(Sglang(attn_dp_rank)) or made[0])  # type: ignore[func-returns-value]
    opened = open_publisher({"publisher": "mine", "clear_first": False}, rank(dp=1))
    batch = KVEventBatch(0.0, [])
    opened.publish(batch)
    opened.publish(None)
    deadline = time.monotonic() + 5
    while len(made[0].published) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert opened.stream is not None
    assert opened.stream.next_sequence == 3
    assert made[0].published[0] is batch
    opened.shutdown()
    assert made[0].closed


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_a_clear_that_we_make_reaches_a_registered_publisher_in_the_configured_encoding(
    register: Register, encoding: str
) -> None:
    made: list[Sglang] = []
    register("mine", lambda attn_dp_rank: made.append(Sglang(attn_dp_rank)) or made[0])  # type: ignore[func-returns-value]
    opened = open_publisher({"publisher": "mine", "encoding": encoding}, rank(dp=1))
    opened.publish(KVEventBatch(0.0, []))
    deadline = time.monotonic() + 20
    while len(made[0].published) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert opened.stream is not None
    (journalled, _) = opened.stream.journal.read(0, None).payloads  # type: ignore[union-attr]
    # An engine's class encodes what it was handed as it is.
    assert msgspec.msgpack.encode(made[0].published[0]) == journalled
    assert (b"\x91\xb0AllBlocksCleared" in journalled) == (encoding == "array")
    opened.shutdown()


def test_an_unknown_publisher_is_refused_on_every_rank() -> None:
    for tp in (0, 1):
        with pytest.raises(ValueError, match="carrier-pigeon"):
            open_publisher({"publisher": "carrier-pigeon"}, rank(tp=tp))
    with pytest.raises(ValueError, match="carrier-pigeon"):
        EventPublisherFactory.create({"publisher": "carrier-pigeon"})


@pytest.mark.parametrize("name", ["null", "zmq"])
def test_a_name_is_taken_once(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        EventPublisherFactory.register_publisher(name, NullEventPublisher)


@pytest.mark.parametrize("name", ["attn_dp_rank", "data_parallel_rank"])
def test_the_rank_comes_under_either_engines_name(name: str) -> None:
    rank: dict[str, Any] = {name: 3}
    for opened in (
        EventPublisherFactory.create({"endpoint": None}, **rank),
        ZmqEventPublisher(endpoint=None, **rank),
    ):
        assert opened.stream is not None
        assert opened.stream.dp == 3
        opened.shutdown()


def test_a_router_beside_pub_cannot_have_its_address() -> None:
    with pytest.raises(ValueError, match="replay_endpoint"):
        open_publisher({"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5557"}, rank())


def test_an_endpoint_that_is_taken_is_an_error_at_opening() -> None:
    first = open_publisher({"endpoint": "tcp://127.0.0.1:0"}, rank())
    assert first.stream is not None
    with pytest.raises(OSError, match="in use"):
        open_publisher({"endpoint": first.stream.state().pub_endpoint, "bind": True}, rank())
    first.shutdown()
