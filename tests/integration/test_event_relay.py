"""A publisher as engines bring it, PUB and ROUTER and nothing else, followed through a relay."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from socket import AF_INET, AF_INET6
from typing import Any

import msgspec
import pytest
import zmq

from kvgrpc.cli.main import main
from kvgrpc.client import EventFollower
from kvgrpc.errors import InvalidRequest
from kvgrpc.events.live import relay as live_relay
from kvgrpc.server import EventRelay, IndexServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(60)
END = b"\xff" * 8
NAME = "engine-within"


class EnginePublisher:
    """PUB and ROUTER of one engine: what is ``kept``, from ``oldest`` on, can be asked for. ``name``: over inproc."""

    def __init__(self, port: int = 0, replay_port: int = 0, *, host: str = "127.0.0.1", name: str = "") -> None:
        self.context = zmq.Context.instance() if name else zmq.Context()
        self.pub, self._router = self.context.socket(zmq.XPUB), self.context.socket(zmq.ROUTER)
        for socket in (self.pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, int(host == "[::1]"))
        if name:
            self.endpoint, self.replay = f"inproc://{name}", f"inproc://{name}-replay"
            self.pub.bind(self.endpoint)
            self._router.bind(self.replay)
        else:
            self.port = _bind(self.pub, host, port)
            self.replay_port = _bind(self._router, host, replay_port)
            self.endpoint, self.replay = f"tcp://{host}:{self.port}", f"tcp://{host}:{self.replay_port}"
        self.kept: list[bytes] = []
        self.oldest = 0
        self._closing = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def store(self, *blocks: int, live: bool = True) -> None:
        """One batch with a stored event, by PUB unless it shall be lost there."""
        event: dict[str, object] = {"type": "BlockStored", "block_hashes": list(blocks), "parent_block_hash": None}
        event.update({"token_ids": [1] * len(blocks), "block_size": 1, "lora_id": None, "medium": "GPU"})
        self.kept.append(msgspec.msgpack.encode([time.time(), [event], 0]))
        if live:
            self.pub.send_multipart((b"kv", (len(self.kept) - 1).to_bytes(8, "big"), self.kept[-1]))

    def await_subscriber(self) -> None:
        assert self.pub.poll(30_000), "nobody subscribed"

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self._free(self.pub, self.endpoint)
        if self.context is not zmq.Context.instance():
            self.context.term()

    def _serve(self) -> None:
        while not self._closing:
            if self._router.poll(50):
                who, _, asked = self._router.recv_multipart()
                first = max(int.from_bytes(asked, "big"), self.oldest)
                for sequence, payload in list(enumerate(self.kept))[first:]:
                    self._router.send_multipart((who, b"", b"kv", sequence.to_bytes(8, "big"), payload))
                self._router.send_multipart((who, b"", b"", END, b""))
        self._free(self._router, self.replay)

    def _free(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        if endpoint.startswith("inproc:"):
            socket.unbind(endpoint)  # closing it would give the name back a little later
        socket.close()


def _bind(socket: zmq.Socket[bytes], host: str, port: int) -> int:
    if not port:
        return int(socket.bind_to_random_port(f"tcp://{host}"))
    socket.bind(f"tcp://{host}:{port}")
    return port


@contextlib.contextmanager
def relayed(engine: EnginePublisher, *, replay: bool = True) -> Iterator[EventRelay]:
    router = engine.replay if replay else ""
    relay = EventRelay("127.0.0.1:0", engine.endpoint, "sglang-1", topic="kv", replay=router).open()
    try:
        yield relay
    finally:
        relay.close()


@pytest.fixture
def engine() -> Iterator[EnginePublisher]:
    engine = EnginePublisher()
    yield engine
    if not engine.context.closed:
        engine.close()


@pytest.fixture
def engine_within() -> Iterator[EnginePublisher]:
    engine = EnginePublisher(name=NAME)
    yield engine
    if not engine.pub.closed:
        engine.close()


async def blocks(relay: EventRelay, wanted: int, seconds: float = 15.0) -> int:
    """How many blocks a follower shows, once it shows ``wanted``, or after that time."""
    end = time.monotonic() + seconds
    async with EventFollower(relay.address) as follower:
        await follower.until_current()
        while follower.blocks.get("GPU", 0) != wanted and time.monotonic() < end:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(follower.changed(), 0.1)
        return follower.blocks.get("GPU", 0)


async def test_what_was_published_before_the_relay_came_is_asked_for(engine: EnginePublisher) -> None:
    engine.store(1, 2, 3)
    engine.store(4)
    with relayed(engine) as relay:
        assert await blocks(relay, 4) == 4


async def test_what_pub_lost_is_asked_for(engine: EnginePublisher) -> None:
    engine.store(1)
    with relayed(engine) as relay:
        assert await blocks(relay, 1) == 1
        engine.store(2, live=False)
        engine.store(3, 4)
        engine.store(5, live=False)  # the last one, after which PUB says nothing
        assert await blocks(relay, 5) == 5


async def test_without_a_router_what_pub_lost_empties_the_cache(engine: EnginePublisher) -> None:
    with relayed(engine, replay=False) as relay:
        for block in range(1, 100):  # until its SUB has found PUB
            engine.store(block)
            if await blocks(relay, 2, 0.3) == 2:
                break
        engine.store(1000, live=False)
        engine.store(1001)
        assert await blocks(relay, 1) == 1


async def test_a_publisher_of_the_same_process_is_followed_over_one_connection(
    engine_within: EnginePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq says nothing of a connection over inproc: it must not be taken for one that never came about."""
    monkeypatch.setattr(live_relay, "CONNECT_SECONDS", 0.2)
    with relayed(engine_within, replay=False) as relay:
        await asyncio.to_thread(engine_within.await_subscriber)
        assert engine_within.pub.recv() == b"\x01kv"
        for block in range(1, 6):
            engine_within.store(block)
            # A while in which it must not subscribe anew, five times its patience in all.
            assert not await asyncio.to_thread(engine_within.pub.poll, 200)
        assert await blocks(relay, 5) == 5


async def test_a_publisher_of_the_same_process_that_began_again_is_followed(engine_within: EnginePublisher) -> None:
    engine_within.store(1)
    engine_within.store(2)
    with relayed(engine_within) as relay:
        assert await blocks(relay, 2) == 2
        engine_within.close()
        again = EnginePublisher(name=NAME)
        try:
            again.store(7, live=False)
            assert await blocks(relay, 1) == 1
            await asyncio.to_thread(again.await_subscriber)
            again.store(8)
            assert await blocks(relay, 2) == 2
        finally:
            again.close()


async def test_a_name_that_resolves_later_is_found_then(
    engine: EnginePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a pod that starts again: libzmq says nothing at all of a name that does not resolve."""
    monkeypatch.setattr(live_relay, "CONNECT_SECONDS", 0.2)
    relay = EventRelay("127.0.0.1:0", "tcp://nobody.invalid:5557", "sglang-1", topic="kv").open()
    try:
        await asyncio.sleep(0.5)  # a first try and a second one that lead nowhere are the subject
        relay._relay._endpoint = f"tcp://127.0.0.1:{engine.port}"  # what the name means from now on
        await asyncio.to_thread(engine.await_subscriber)
        engine.store(1, 2)
        assert await blocks(relay, 2) == 2
    finally:
        relay.close()


async def test_what_nobody_has_any_more_empties_the_cache_rather_than_leave_it_wrong(engine: EnginePublisher) -> None:
    for block in range(1, 5):
        engine.store(block)
    engine.oldest = 2
    with relayed(engine) as relay:
        assert await blocks(relay, 2) == 2


async def test_a_publisher_that_begins_again_has_an_empty_cache(engine: EnginePublisher) -> None:
    engine.store(1, 2, 3)
    engine.store(4)
    with relayed(engine) as relay:
        assert await blocks(relay, 4) == 4
        engine.close()
        again = EnginePublisher(engine.port, engine.replay_port)
        try:
            for block in range(100, 200):  # until the relay's SUB has found the new PUB
                again.kept.clear()
                again.store(block)
                if await blocks(relay, 1, 0.3) == 1:
                    return
            raise AssertionError("the relay did not see that the publisher began again")
        finally:
            again.close()


@pytest.mark.parametrize("replay", [True, False], ids=["router", "pub_only"])
async def test_a_publisher_that_began_again_and_came_as_far_is_not_spliced_on(
    engine: EnginePublisher, replay: bool
) -> None:
    with relayed(engine, replay=replay) as relay:
        engine.await_subscriber()
        engine.store(1, 2, 3)
        assert await blocks(relay, 3) == 3
        engine.close()
        again = EnginePublisher(engine.port, engine.replay_port)
        try:
            again.store(4, live=False)
            again.await_subscriber()
            again.store(5)  # with the very number that came next in the old log
            wanted = 2 if replay else 1
            assert await blocks(relay, wanted) == wanted
        finally:
            again.close()


async def test_an_idle_publisher_that_began_again_is_noticed(engine: EnginePublisher) -> None:
    engine.store(1, 2, 3)
    with relayed(engine) as relay:
        assert await blocks(relay, 3) == 3
        engine.close()
        again = EnginePublisher(engine.port, engine.replay_port)
        try:
            again.store(4, live=False)
            again.store(5, 6, 7, 8, live=False)
            assert await blocks(relay, 5, 30) == 5
        finally:
            again.close()


async def test_the_cache_of_an_engine_that_stays_away_counts_as_empty(
    engine: EnginePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgrpc.events.live.relay.GONE_SECONDS", 1.0)
    monkeypatch.setattr("kvgrpc.events.live.relay.ANSWER_MS", 500)
    engine.store(1, 2, 3)
    with relayed(engine) as relay:
        engine.await_subscriber()
        assert await blocks(relay, 3) == 3
        engine.close()
        assert await blocks(relay, 0, 30) == 0


async def test_messages_that_are_no_batches_are_passed_over(engine: EnginePublisher) -> None:
    engine.store(1)
    with relayed(engine) as relay:
        assert await blocks(relay, 1) == 1
        for frames in ((b"kv",), (b"kv", b"x"), (b"kv", b"short", b"payload"), (b"kv", b"", b"", b"")):
            engine.pub.send_multipart(frames)
        engine.store(2)
        assert await blocks(relay, 2) == 2


async def test_an_engine_at_an_ipv6_address_is_followed() -> None:
    engine = EnginePublisher(host="[::1]")
    try:
        with relayed(engine) as relay:
            engine.store(1)
            assert await blocks(relay, 1) == 1
            await asyncio.to_thread(engine.await_subscriber)
    finally:
        engine.close()


@pytest.mark.parametrize(("families", "expected"), [("6", 1), ("46", 0), ("4", 0), ("", 0)])
def test_a_name_that_has_no_address_but_ipv6_is_reached_there(
    families: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(host: str, port: str) -> list[tuple[int, str]]:
        if not families:
            raise OSError("no such name")
        return [(AF_INET6 if each == "6" else AF_INET, host) for each in families]

    monkeypatch.setattr(live_relay, "getaddrinfo", found)
    subscriber: zmq.Socket[bytes]
    with zmq.Context.instance().socket(zmq.SUB) as subscriber:
        subscriber.set(zmq.LINGER, 0)
        live_relay._connect(subscriber, "tcp://localhost:1")
        assert subscriber.get(zmq.IPV6) == expected


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"endpoint": "nonsense"}, "endpoint"),
        ({"endpoint": "tcp://127.0.0.1:99999"}, "endpoint"),
        ({"endpoint": "tcp://*:5557"}, "endpoint"),
        ({"endpoint": "tcp://ü:5557"}, "endpoint"),
        ({"endpoint": "tcp://a b:5557"}, "endpoint"),
        ({"replay": "tcp://127.0.0.1:0"}, "replay"),
        ({"replay": "tcp://-a:5557"}, "replay"),
        ({"dp": 2**32}, "dp"),
    ],
    ids=str,
)
def test_what_nobody_can_connect_to_is_refused(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        EventRelay("127.0.0.1:0", **({"endpoint": "tcp://127.0.0.1:1", "engine": "sglang-1"} | asked))
    assert refused.value.metadata["field"] == field


def test_what_zmq_refuses_later_is_one_line_and_not_serving(caplog: pytest.LogCaptureFixture) -> None:
    relay = EventRelay("127.0.0.1:0", "ipc:///tmp/" + "x" * 200, "sglang-1").open()
    try:
        wait_until(lambda: not relay._server._listener.serving()["kvgrpc.v1.EventService"])
        time.sleep(2.5)  # it tries again each second, and says nothing more
    finally:
        relay.close()
    (line,) = [record for record in caplog.records if record.name == live_relay.__name__]
    assert "cannot connect to ipc:///tmp/xxx" in line.getMessage() and line.exc_info is None


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"rank\.engine"):
        EventRelay("127.0.0.1:0", "tcp://127.0.0.1:1", "no name")


@pytest.fixture
def kvgrpc(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints, which ends well."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        assert not ended.value.code, err
        return out

    return run


def test_the_command_reads_an_engine_s_own_publisher(engine: EnginePublisher, kvgrpc: Callable[..., str]) -> None:
    engine.store(1, 2)
    engine.store(3)
    where = ["-s", f"tcp://127.0.0.1:{engine.port}", "--replay", f"tcp://127.0.0.1:{engine.replay_port}"]
    lines = [json.loads(line) for line in kvgrpc("events", "replay", "--json", *where).splitlines()]
    assert [(line["sequence"], line["rank"]) for line in lines] == [(0, 0), (1, 0)]
    assert [event["block_hashes"] for line in lines for event in line["events"]] == [[1, 2], [3]]
    assert json.loads(kvgrpc("events", "follow", "--once", "--json", *where))["blocks"] == {"GPU": 3}
    assert "BlockStored" in kvgrpc("events", "snapshot", *where)
    assert json.loads(kvgrpc("events", "stats", "--json", *where))["batches"] == 2
    assert kvgrpc("events", "verify", *where).startswith("equal: 3 in GPU")


def test_tail_shows_what_an_engine_s_pub_says_and_needs_no_replay(engine: EnginePublisher) -> None:
    command = [sys.executable, "-m", "kvgrpc", "events", "tail", "--json", "-s", f"tcp://127.0.0.1:{engine.port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tail:
        try:
            engine.await_subscriber()
            engine.store(7, 8)
            assert tail.stdout is not None
            while not (line := json.loads(tail.stdout.readline()))["events"][0].get("block_hashes"):
                assert line["events"] == [{"type": "AllBlocksCleared"}]  # nobody knows what was before
            assert (line["rank"], line["events"][0]["block_hashes"]) == (0, [7, 8])
        finally:
            tail.kill()


def test_score_asks_an_index_that_follows_a_relay(engine: EnginePublisher, kvgrpc: Callable[..., str]) -> None:
    engine.store(1, 2, 3)
    with relayed(engine) as relay:
        index = IndexServer(["127.0.0.1:0"], sources=[relay.address]).open()
        try:
            asked = ["events", "score", "--json", "-s", index.address, "--hash", "1", "--hash", "2", "--hash", "9"]
            wait_until(lambda: json.loads(kvgrpc(*asked))["prompts"][0].get("scores"))
            scores = json.loads(kvgrpc(*asked))["prompts"][0]["scores"]
            assert (scores[0]["engine"], scores[0]["deviceBlocks"]) == ("sglang-1", 2)
        finally:
            index.close()


def test_a_unix_socket_is_a_rank_and_no_publisher(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["events", "stats", "-s", "unix:///nowhere/at-all"])
    assert ended.value.code not in (0, 2) and "/nowhere/at-all" in capsys.readouterr().err


def test_the_command_says_what_it_needs_of_an_engine_s_own_publisher(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["replay", "-s", "tcp://127.0.0.1:1"], ["tail", "-s", "127.0.0.1:1", "--topic", "kv"]):
        with pytest.raises(SystemExit) as ended:
            main(["events", *arguments])
        assert ended.value.code == 2 and "--replay" in capsys.readouterr().err
