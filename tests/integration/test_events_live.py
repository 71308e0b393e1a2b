"""Live events on real PUB sockets, and that replay has the same bytes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import zmq

from kvgrpc.events import BlockRemoved, BlockStored, EventServicer, KVEventBatch, ZmqEventPublisher, decode_batch
from kvgrpc.events.live import listening
from kvgrpc.events.wire import stream_to_pb
from kvgrpc.model import RankId, RankRef
from kvgrpc.observability.metrics import REGISTRY
from kvgrpc.v1 import event_service_pb2 as pb
from kvgrpc.v1.event_service_pb2_grpc import EventServiceStub, add_EventServiceServicer_to_server
from tests.support.waiting import wait_until

Frames = tuple[bytes, bytes, bytes]


@contextmanager
def publisher(endpoint: str = "tcp://127.0.0.1:0", dp: int = 0, **settings: Any) -> Iterator[ZmqEventPublisher]:
    settings = {"clear_first": False} | settings
    opened = ZmqEventPublisher(rank=RankRef(RankId("engine", dp=dp), 7), endpoint=endpoint, **settings)
    try:
        yield opened
    finally:
        opened.shutdown(1)


@contextmanager
def subscriber(endpoint: str, *, bind: bool = False, ipv6: bool = False) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context.instance() if endpoint.startswith("inproc") else zmq.Context()
    with context.socket(zmq.SUB) as sub:
        sub.set(zmq.IPV6, int(ipv6))
        sub.set(zmq.RCVHWM, 0)
        sub.set(zmq.RECONNECT_IVL, 10)
        sub.subscribe(b"")
        if bind:
            sub.bind(endpoint)
        else:
            sub.connect(endpoint)
        yield sub
        sub.close(linger=0)
    if context is not zmq.Context.instance():
        context.term()


@contextmanager
def stuck_subscriber(opened: ZmqEventPublisher) -> Iterator[None]:
    """One that subscribed and then does not read."""
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.set(zmq.RCVHWM, 1)
        sub.subscribe(b"")
        sub.connect(opened.stream.pub_endpoint)
        publish_until_heard(opened, sub)
        yield
        sub.close(linger=0)


def batch(number: int) -> KVEventBatch:
    stored = BlockStored([number, 2**64 - 1 - number], number or None, list(range(32)), 16, None, "GPU")
    return KVEventBatch(float(number), [stored, BlockRemoved([-number], "CPU")])


def raw(size: int) -> bytes:
    return msgspec.msgpack.encode([1.0, [{"type": "Padding", "bytes": bytes(size)}], 0])


def publish_until_heard(opened: ZmqEventPublisher, sub: zmq.Socket[bytes]) -> None:
    """A subscription takes its time, and nobody is told when it is there."""
    deadline = time.monotonic() + 10
    while not sub.poll(5):
        assert time.monotonic() < deadline, "nothing was heard in 10 s"
        opened.publish(KVEventBatch(0.0, []))


def receive(sub: zmq.Socket[bytes], last: int) -> list[Frames]:
    """What comes, up to the batch with the sequence ``last``."""
    received: list[Frames] = []
    while not received or int.from_bytes(received[-1][1], "big") < last:
        assert sub.poll(5_000), "5 s without a batch"
        frames = sub.recv_multipart()
        assert len(frames) == 3
        received.append((frames[0], frames[1], frames[2]))
    return received


@asynccontextmanager
async def replaying(opened: ZmqEventPublisher) -> AsyncIterator[Any]:
    server = grpc.aio.server()
    add_EventServiceServicer_to_server(EventServicer([opened.stream]), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield EventServiceStub(channel)
    await server.stop(0)


async def replay(opened: ZmqEventPublisher) -> dict[int, bytes]:
    """Every batch by its sequence, as a subscriber gets it that comes now."""
    batches: dict[int, bytes] = {}
    async with replaying(opened) as stub:
        async for message in stub.Watch(pb.WatchRequest(mode=pb.WATCH_MODE_REPLAY), timeout=30):
            batches |= dict(enumerate(message.raw.payloads, message.raw.first_sequence))
    return batches


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
@pytest.mark.parametrize("encoding", ["array", "map"])
async def test_a_late_subscriber_replays_byte_for_byte_what_was_live(dialect: str, encoding: str) -> None:
    form = {"dialect": dialect, "encoding": encoding}
    with publisher(topic="kv@pod", dp=3, **form) as opened, subscriber(opened.stream.pub_endpoint) as sub:
        publish_until_heard(opened, sub)
        for number in range(2_000):
            opened.publish(batch(number))
        live = receive(sub, opened.stream.next_sequence - 1)
        replayed = await replay(opened)
    first = int.from_bytes(live[0][1], "big")
    assert live == [
        (b"kv@pod", sequence.to_bytes(8, "big"), replayed[sequence]) for sequence in range(first, first + len(live))
    ]
    assert sorted(replayed) == list(range(first + len(live)))
    last = decode_batch(live[-1][2])
    assert last.data_parallel_rank == 3
    assert len(last.events) == (1 if form == {"dialect": "sglang", "encoding": "array"} else 2)


async def test_a_late_subscriber_tails_without_a_gap() -> None:
    with publisher("inproc://tail") as opened:
        for number in range(250):
            opened.publish(batch(number))
        seen: list[float] = []
        async with replaying(opened) as stub:
            async for message in stub.Watch(pb.WatchRequest(mode=pb.WATCH_MODE_TAIL), timeout=30):
                if message.WhichOneof("kind") == "begin":
                    publishing = asyncio.create_task(asyncio.to_thread(publish_more, opened, range(250, 501)))
                seen += [decode_batch(payload).ts for payload in message.raw.payloads]
                if seen and seen[-1] == 500:
                    break
            await publishing
    assert seen == [float(number) for number in range(501)]


def publish_more(opened: ZmqEventPublisher, numbers: Iterable[int]) -> None:
    for number in numbers:
        opened.publish(batch(number))


def test_a_free_port_is_bound_and_told() -> None:
    with publisher("tcp://*:0", dp=3) as opened, publisher("tcp://127.0.0.1:*") as other:
        for stream in (opened.stream, other.stream):
            assert int(stream.pub_endpoint.rpartition(":")[2]) > 0
        assert opened.stream.pub_endpoint != other.stream.pub_endpoint


def test_an_ipv6_address_is_bound() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this host has no IPv6 loopback")
    with publisher("tcp://[::1]:0") as opened, subscriber(opened.stream.pub_endpoint, ipv6=True) as sub:
        publish_until_heard(opened, sub)


def test_ipc_and_inproc_have_one_name_for_each_dp(tmp_path: Path) -> None:
    for scheme in (f"ipc://{tmp_path}/events", "inproc://events"):
        with publisher(scheme, dp=2) as opened:
            assert opened.stream.pub_endpoint == f"{scheme}_dp2"
            with subscriber(f"{scheme}_dp2") as sub:
                publish_until_heard(opened, sub)


def test_a_concrete_address_is_a_proxy_that_is_connected_to() -> None:
    with subscriber("tcp://127.0.0.1:*", bind=True) as proxy:
        port = bytes(proxy.getsockopt(zmq.LAST_ENDPOINT)).rpartition(b":")[2].decode()
        with publisher(f"tcp://127.0.0.1:{port}") as opened:
            assert opened.stream.pub_endpoint == ""
            publish_until_heard(opened, proxy)


def test_a_concrete_address_at_which_nobody_listens_is_said_once_and_so_is_who_comes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(listening, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr("kvgrpc.events.publisher.IDLE_SECONDS", 0.05)  # it looks between its turns
    caplog.set_level(logging.INFO, "kvgrpc.events.live.listening")
    unheard = functools.partial(REGISTRY.get_sample_value, "kvgrpc_events_unheard")
    before = unheard() or 0.0
    address = f"ipc://{tmp_path}/proxy"  # a port might be another's meanwhile
    with publisher(address, bind=False) as opened:
        wait_until(lambda: said(caplog) == ["nobody listens"])
        assert unheard() == before + 1
        told = stream_to_pb(opened.stream.state())
        assert (told.pub_endpoint, told.connects_to, told.HasField("listened_at")) == ("", address, True)
        assert not told.listened_at
        for _ in range(2):
            with subscriber(address, bind=True) as proxy:
                publish_until_heard(opened, proxy)
                wait_until(lambda: unheard() == before)
                assert stream_to_pb(opened.stream.state()).listened_at
            wait_until(lambda: unheard() == before + 1)
        assert said(caplog) == ["nobody listens", "is listened at"] * 2 + ["nobody listens"]
    assert unheard() == before


def test_a_front_without_a_backend_which_hangs_up_on_everybody_is_nobody_that_listens(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr("kvgrpc.events.publisher.IDLE_SECONDS", 0.05)  # it looks between its turns
    with socket.create_server(("127.0.0.1", 0)) as front:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    front.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        with publisher(f"tcp://127.0.0.1:{front.getsockname()[1]}", bind=False):
            wait_until(lambda: said(caplog) == ["nobody listens"])
        front.shutdown(socket.SHUT_RDWR)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [words for line in caplog.messages for words in ("nobody listens", "is listened at") if words in line]


def test_a_subscriber_that_does_not_read_holds_up_nobody() -> None:
    with publisher(hwm=10) as opened, stuck_subscriber(opened):
        for _ in range(200):
            assert opened.publish_raw(raw(100_000))
        wait_until(lambda: opened.counts.unsent == 0)
        assert opened.counts.published == opened.stream.next_sequence


def test_shutdown_returns_when_the_subscribers_have_everything() -> None:
    with publisher() as opened, subscriber(opened.stream.pub_endpoint) as sub:
        publish_until_heard(opened, sub)
        for _ in range(500):
            opened.publish_raw(raw(20_000))
        last = opened.stream.next_sequence - 1
        opened.shutdown(10)
        # Nothing is sent any more: what is read now had been delivered.
        assert int.from_bytes(receive(sub, last)[-1][1], "big") == last


def test_shutdown_gives_up_on_a_subscriber_that_does_not_read() -> None:
    with publisher() as opened, stuck_subscriber(opened):
        for _ in range(500):
            opened.publish_raw(raw(100_000))
        wait_until(lambda: opened.counts.unsent == 0)
        began = time.monotonic()
        opened.shutdown(0.3)
        assert 0.2 < time.monotonic() - began < 8  # in vain it would be until the subscriber reads: for ever
    with publisher() as next_one:
        began = time.monotonic()
        next_one.shutdown(15)
        assert time.monotonic() - began < 8


def test_an_endpoint_is_free_again_after_shutdown() -> None:
    with publisher() as first:
        endpoint = first.stream.pub_endpoint
    with publisher(endpoint, bind=True) as second:
        assert second.stream.pub_endpoint == endpoint
