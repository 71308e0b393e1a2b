"""The engines' own replay over ZMQ ROUTER, asked as their consumers ask it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from kvgrpc.events import ZmqEventPublisher
from kvgrpc.events.live import router as routing
from kvgrpc.model import RankId, RankRef
from tests.support.waiting import wait_until

END = b"\xff" * 8
SEED, TOPIC = "seed", "topic"
Reply = tuple[list[tuple[int, bytes]], list[bytes]]


def raw(number: int, size: int = 0) -> bytes:
    return msgspec.msgpack.encode([float(number), [{"type": "Padding", "bytes": bytes(size)}], 0])


@contextmanager
def publisher(**settings: Any) -> Iterator[ZmqEventPublisher]:
    settings = {
        "endpoint": None,
        "replay_endpoint": "tcp://127.0.0.1:0",
        "clear_first": False,
        "topic": "kv",
    } | settings
    opened = ZmqEventPublisher(rank=RankRef(RankId("engine"), 7), **settings)
    try:
        yield opened
    finally:
        opened.shutdown(2)


def binds(endpoint: str) -> bool:
    try:
        with publisher(replay_endpoint=endpoint) as opened:
            return opened.stream.replay_endpoint == endpoint
    except OSError:
        return False


def publish(opened: ZmqEventPublisher, *payloads: bytes) -> None:
    for payload in payloads:
        assert opened.publish_raw(payload)
    wait_until(lambda: opened.counts.unsent == 0)


@contextmanager
def client(opened: ZmqEventPublisher, kind: int = zmq.DEALER, hwm: int = 0) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.set(zmq.RCVTIMEO, 20_000)
        socket.set(zmq.RCVHWM, hwm)
        socket.set(zmq.LINGER, 0)
        socket.connect(opened.stream.replay_endpoint)
        yield socket
        socket.close(linger=0)


def ask(socket: zmq.Socket[bytes], first: int) -> None:
    socket.send_multipart([b"", first.to_bytes(8, "big")])


def replies(socket: zmq.Socket[bytes], shape: str) -> Reply:
    """Batches by their sequence, and the frames of the end, each message of exactly this shape."""
    batches: list[tuple[int, bytes]] = []
    while True:
        frames = socket.recv_multipart()
        assert frames[0] == b""
        if frames[-2] == END:
            return batches, frames
        assert len(frames) == (3 if shape == SEED else 4)
        assert shape == SEED or frames[1] == b"kv"
        batches.append((int.from_bytes(frames[-2], "big"), frames[-1]))


@pytest.mark.parametrize(
    ("settings", "shape", "end"),
    [
        ({}, TOPIC, [b"", b"", END, b""]),
        ({"encoding": "array"}, SEED, [b"", END, b""]),
        ({"encoding": "array", "replay_shape": "topic"}, TOPIC, [b"", b"", END, b""]),
        ({"replay_shape": "seed"}, SEED, [b"", END, b""]),
    ],
    ids=str,
)
def test_a_replay_is_every_batch_and_the_end_mark(settings: dict[str, str], shape: str, end: list[bytes]) -> None:
    with publisher(**settings) as opened, client(opened) as socket:
        publish(opened, *map(raw, range(3_000)))
        ask(socket, 1)
        assert replies(socket, shape) == ([(number, raw(number)) for number in range(1, 3_000)], end)


def test_a_request_may_come_without_its_delimiter() -> None:
    with publisher() as opened, client(opened) as socket:
        publish(opened, raw(0), raw(1))
        socket.send((1).to_bytes(8, "big"))
        assert replies(socket, TOPIC)[0] == [(1, raw(1))]


def test_a_strict_client_gets_the_first_batch_of_its_answer() -> None:
    """The rest of it may be taken for the answer to its next request: that is REQ, and not to be mended here."""
    with publisher() as opened:
        publish(opened, raw(0), raw(1))
        for number in range(2):
            with client(opened, zmq.REQ) as socket:
                socket.send(number.to_bytes(8, "big"))
                assert socket.recv_multipart() == [b"kv", number.to_bytes(8, "big"), raw(number)]


@pytest.mark.parametrize(
    ("settings", "before"), [({"replay_shape": "seed"}, []), ({}, [b"kv"])], ids=["two_frames", "three_frames"]
)
def test_a_subscriber_fills_a_gap_by_the_calls_of_vllms_example(settings: dict[str, str], before: list[bytes]) -> None:
    """SUB beside one REQ, which sends eight bytes when a number was passed over, and takes what a poll finds. The
    answer begins with what is missing; its frames are those of ``replay_shape`` less the delimiter."""
    with (
        publisher(endpoint="tcp://127.0.0.1:0", **settings) as opened,
        client(opened, zmq.REQ) as replay,
        zmq.Context() as context,
        context.socket(zmq.SUB) as sub,
    ):
        sub.set(zmq.RCVTIMEO, 20_000)
        sub.set(zmq.LINGER, 0)
        sub.subscribe(b"kv")
        sub.connect(opened.stream.pub_endpoint)
        while not sub.poll(20):
            publish(opened, raw(0))
        publish(opened, raw(1), raw(2))
        heard = [sub.recv_multipart()]
        while heard[-1][2] != raw(2):
            heard.append(sub.recv_multipart())
        # The one before the last is what the network lost.
        last, missing, now = (int.from_bytes(frames[1], "big") for frames in heard[-3:])
        assert (missing, now) == (last + 1, last + 2)
        replay.send((last + 1).to_bytes(8, "big"))
        assert replay.poll(20_000)
        assert replay.recv_multipart() == [*before, missing.to_bytes(8, "big"), raw(1)]


@pytest.mark.parametrize(
    "request_frames",
    [[b""], [b"", b""], [b"", b"1"], [b"", b"x" * 9], [b"no delimiter", bytes(8)], [b"", bytes(8), b""], [b"x"] * 5],
    ids=str,
)
def test_a_malformed_request_is_answered_with_the_end_at_once(
    request_frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with publisher() as opened, client(opened) as socket:
        publish(opened, raw(0))
        socket.send_multipart(request_frames)
        assert replies(socket, TOPIC) == ([], [b"", b"", END, b""])
        assert "nothing is replayed" in caplog.text
        ask(socket, 0)
        assert replies(socket, TOPIC)[0] == [(0, raw(0))]


def test_a_client_of_malformed_requests_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with publisher() as opened, client(opened) as socket:
        for _ in range(200):
            socket.send_multipart([b"", b"nonsense of one who knows no sequence"])
        for _ in range(200):
            assert replies(socket, TOPIC)[0] == []
    # Five, and where the ten seconds pass meanwhile five more and a count.
    assert 0 < len(caplog.records) <= 11


def test_what_is_not_kept_any_more_is_the_end_at_once_and_not_a_part_of_it(caplog: pytest.LogCaptureFixture) -> None:
    with publisher(buffer_steps=2) as opened, client(opened) as socket:
        publish(opened, *map(raw, range(5)))
        ask(socket, 0)
        assert replies(socket, TOPIC)[0] == []
        assert "the oldest that is kept is 3" in caplog.text
        ask(socket, 3)
        assert [number for number, _ in replies(socket, TOPIC)[0]] == [3, 4]


@pytest.mark.parametrize("first", [2, 3, 2**63, 2**64 - 1])
def test_what_nobody_published_is_the_end(first: int) -> None:
    with publisher() as opened, client(opened) as socket:
        publish(opened, raw(0), raw(1))
        ask(socket, first)
        assert replies(socket, TOPIC)[0] == []


def test_a_hole_is_left_out_and_the_clear_after_it_is_not() -> None:
    with publisher() as opened, client(opened) as socket:
        publish(opened, raw(0), b"no batch", raw(2))
        ask(socket, 0)
        batches = dict(replies(socket, TOPIC)[0])
        assert 1 not in batches
        assert any(b"AllBlocksCleared" in payload for payload in batches.values())
        assert raw(2) in batches.values()


def test_a_slow_client_gets_everything_and_holds_up_nobody() -> None:
    """The engines' ROUTER drops what exceeds its high-water mark, and sends the end nevertheless."""
    with publisher() as opened, client(opened, hwm=1) as slow, client(opened) as quick:
        publish(opened, *(raw(number, 10_000) for number in range(5_000)))
        ask(slow, 0)
        slow.poll(20_000)
        ask(quick, 4_000)
        assert [number for number, _ in replies(quick, TOPIC)[0]] == list(range(4_000, 5_000))
        assert [number for number, _ in replies(slow, TOPIC)[0]] == list(range(5_000))


def test_a_replay_that_the_log_overtakes_ends_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with publisher(buffer_steps=2_500) as opened, client(opened, hwm=1) as slow:
        publish(opened, *(raw(number, 50_000) for number in range(2_500)))
        ask(slow, 0)
        slow.poll(20_000)
        publish(opened, *(raw(number) for number in range(2_500)))
        numbers = [number for number, _ in replies(slow, TOPIC)[0]]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) < 2_500
        assert "the log overtook it" in caplog.text


def test_a_client_that_takes_nothing_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(routing, "STUCK_SECONDS", 0.05)
    with publisher() as opened, client(opened, hwm=1) as stuck:
        publish(opened, *(raw(number, 50_000) for number in range(3_000)))
        ask(stuck, 0)
        wait_until(lambda: "took nothing" in caplog.text)
        router = opened._router
        assert router is not None
        wait_until(lambda: not router._replays)


def test_a_client_that_leaves_is_forgotten() -> None:
    with publisher() as opened:
        publish(opened, *(raw(number, 50_000) for number in range(3_000)))
        with client(opened, hwm=1) as leaving:
            ask(leaving, 0)
            leaving.poll(20_000)
        router = opened._router
        assert router is not None
        wait_until(lambda: not router._replays)
        assert opened.healthy


def test_replays_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_REPLAYS", 1)
    with publisher() as opened, client(opened, hwm=1) as first, client(opened) as second:
        publish(opened, *(raw(number, 50_000) for number in range(3_000)))
        ask(first, 0)
        first.poll(20_000)
        ask(second, 0)
        assert replies(second, TOPIC)[0] == []


def test_one_bad_pass_ends_neither_the_thread_nor_the_next_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    with publisher() as opened, client(opened) as socket:
        publish(opened, raw(0))
        assert opened._router is not None
        begin = opened._router._begin

        def fail_once(frames: list[bytes]) -> None:
            monkeypatch.setattr(opened._router, "_begin", begin)
            raise MemoryError

        monkeypatch.setattr(opened._router, "_begin", fail_once)
        ask(socket, 0)
        wait_until(lambda: opened._router is not None and opened._router._begin is begin)
        ask(socket, 0)
        assert replies(socket, TOPIC)[0] == [(0, raw(0))]
        assert opened.healthy


def test_a_fenced_publisher_replays_no_more_and_frees_its_port() -> None:
    with publisher() as opened:
        endpoint = opened.stream.replay_endpoint
        opened.fence()
        wait_until(
            lambda: (
                opened._router is not None
                and opened._router._thread is not None
                and not opened._router._thread.is_alive()
            )
        )
        wait_until(lambda: binds(endpoint))  # ZMQ closes what was bound in a thread of its own


def test_an_endpoint_that_is_taken_leaves_no_socket_behind() -> None:
    with publisher() as first:
        with pytest.raises(OSError, match="in use"):
            ZmqEventPublisher(endpoint="inproc://left", replay_endpoint=first.stream.replay_endpoint)
        with publisher(endpoint="inproc://left", replay_endpoint=None) as second:
            assert second.stream.pub_endpoint == "inproc://left"


@pytest.mark.parametrize(
    ("endpoint", "warned"),
    [("tcp://*:0", True), ("tcp://0.0.0.0:0", True), ("tcp://127.0.0.1:0", False), ("inproc://quiet", False)],
)
@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_what_other_hosts_reach_is_warned_of_once(
    endpoint: str, warned: bool, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with publisher(**{"endpoint": None, "replay_endpoint": None, key: endpoint}):
        assert caplog.text.count("authenticates nobody") == int(warned)
