"""Publishers in processes of their own: one stream for each dp, a drained exit, a new log after a kill.

Run as a script this file is the process under test.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import zmq

from kvgrpc.events import AllBlocksCleared, BlockRemoved, EventServicer, KVEventBatch, decode_batch, open_publisher
from kvgrpc.model import Layout, RankId, RankRef, new_epoch
from kvgrpc.rpc.interceptors import interceptors_of
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import event_service_pb2 as pb
from kvgrpc.v1.event_service_pb2_grpc import EventServiceStub, add_EventServiceServicer_to_server

ROOT = Path(__file__).parents[2]
LAYOUTS = [Layout(*sizes) for sizes in itertools.product((1, 2), repeat=4)]
SECONDS = 20.0


@contextmanager
def process(role: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """This file as a script; its standard input ends it."""
    started = subprocess.Popen(
        [sys.executable, __file__, role, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # What lies in a buffer would be invisible to select.
        bufsize=0,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate(timeout=SECONDS)


def line_of(started: subprocess.Popen[bytes]) -> Any:
    assert started.stdout is not None
    assert select.select([started.stdout], [], [], SECONDS)[0], f"no line in {SECONDS:g} s"
    return json.loads(started.stdout.readline())


def test_exactly_one_stream_for_each_dp_in_every_layout(tmp_path: Path) -> None:
    configs = [{"endpoint": f"ipc://{tmp_path}/{number}", "topic": "kv"} for number in range(len(LAYOUTS))]
    expected = {
        (number, dp): configs[number]["endpoint"] + (f"_dp{dp}" if dp else "")
        for number, layout in enumerate(LAYOUTS)
        for dp in range(layout.dp)
    }
    heard = streams_of(list(zip(LAYOUTS, configs, strict=True)), expected)
    assert {f"ipc://{path}" for path in heard.sockets} == set(expected.values())


def test_dp_ranks_take_the_ports_after_the_base() -> None:
    base = free_ports(4)
    expected = {(0, dp): f"tcp://127.0.0.1:{base + dp}" for dp in range(2)}
    config = {"endpoint": f"tcp://127.0.0.1:{base}", "bind": True}
    streams_of([(Layout(2, 2, 2, 2), config)], expected, silent=[f"tcp://127.0.0.1:{base + n}" for n in (2, 3)])


def test_a_normal_exit_delivers_what_was_published() -> None:
    with process("exit") as leaving, subscriber(line_of(leaving), hwm=1) as sub:
        assert sub.poll(int(SECONDS * 1000))
        say(leaving, "go")
        assert line_of(leaving) == "leaving"
        with pytest.raises(subprocess.TimeoutExpired):
            leaving.wait(0.3)
        last: Sequence[Any] = []
        while AllBlocksCleared() not in last:
            assert sub.poll(int(SECONDS * 1000)), "the last batch is lost"
            last = decode_batch(sub.recv_multipart()[2]).events
        assert leaving.wait(SECONDS) == 0


async def test_after_a_kill_there_is_a_new_log_and_the_old_cursor_is_refused() -> None:
    with process("serve") as killed:
        begin, *rest = await watch(line_of(killed), mode="WATCH_MODE_REPLAY")
        old = begin.begin.stream.log_id
        assert sum(len(message.raw.payloads) for message in rest) == 11
        killed.kill()
    with process("serve") as successor:
        address = line_of(successor)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch(address, mode="WATCH_MODE_TAIL", log_id=old, from_sequence=10)
        error = error_from(caught.value)
        current = (await watch(address, mode="WATCH_MODE_REPLAY"))[0].begin.stream.log_id
    assert error.reason.name == "STALE_LOG"
    assert error.metadata == {"requestLog": old, "currentLog": current}
    assert current != old


class Heard:
    """What was heard of all streams: sequences, ranks and hashes, each without a repetition."""

    def __init__(self) -> None:
        self.sequences: dict[tuple[int, int], list[int]] = {}
        self.hashes: set[int | bytes] = set()
        self.sockets: set[str] = set()

    def add(self, stream: tuple[int, int], frames: list[bytes]) -> None:
        _, sequence, payload = frames
        batch = decode_batch(payload)
        (event,) = batch.events
        if isinstance(event, AllBlocksCleared):
            # The first of a log.
            assert (sequence, batch.data_parallel_rank) == (bytes(8), stream[1])
            return
        assert isinstance(event, BlockRemoved)
        assert batch.data_parallel_rank == stream[1]
        assert self.hashes.isdisjoint(event.block_hashes), "a block was announced twice"
        self.hashes |= set(event.block_hashes)
        known = self.sequences.setdefault(stream, [])
        number = int.from_bytes(sequence, "big")
        assert not known or number == known[-1] + 1
        known.append(number)


def streams_of(
    engines: list[tuple[Layout, dict[str, Any]]], expected: dict[tuple[int, int], str], silent: list[str] | None = None
) -> Heard:
    """Starts all ranks of all engines and listens, until each expected stream was heard a few times."""
    heard = Heard()
    plan = [[[layout.dp, layout.pp, layout.cp, layout.tp], config] for layout, config in engines]
    ranks = sum(layout.ranks for layout, _ in engines)
    with process("ranks", json.dumps(plan)) as running, zmq.Context() as context:
        sockets = {connect(context, endpoint): stream for stream, endpoint in expected.items()}
        elsewhere = [connect(context, endpoint) for endpoint in silent or []]
        bound = [line_of(running) for _ in range(ranks)]
        assert {(number, dp): endpoint for number, dp, endpoint in bound if endpoint} == expected
        assert sum(bool(endpoint) for _, _, endpoint in bound) == len(expected)
        heard.sockets = {
            str(path) for _, _, endpoint in bound if endpoint.startswith("ipc://") for path in _siblings(endpoint)
        }
        poller = zmq.Poller()
        for sub in sockets:
            poller.register(sub, zmq.POLLIN)
        deadline = time.monotonic() + SECONDS
        while len(heard.sequences) < len(expected) or min(map(len, heard.sequences.values())) < 3:
            assert time.monotonic() < deadline, f"heard only {heard.sequences.keys()}"
            for sub, _ in poller.poll(100):
                heard.add(sockets[sub], sub.recv_multipart())
        assert not any(sub.poll(0) for sub in elsewhere)
        for sub in (*sockets, *elsewhere):
            sub.close(linger=0)
    return heard


def _siblings(endpoint: str) -> list[Path]:
    return [path for path in Path(endpoint.removeprefix("ipc://")).parent.iterdir() if path.is_socket()]


def connect(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, hwm: int = 1000) -> zmq.Socket[bytes]:
    sub = context.socket(zmq.SUB)
    sub.set(zmq.RECONNECT_IVL, 10)
    sub.set(zmq.RCVHWM, hwm)
    sub.subscribe(b"")
    sub.connect(endpoint)
    return sub


@contextmanager
def subscriber(endpoint: str, hwm: int) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context:
        sub = connect(context, endpoint, hwm)
        try:
            yield sub
        finally:
            sub.close(linger=0)


def free_ports(count: int) -> int:
    """The first of so many free ports in a row, below those that the system hands out."""
    while True:
        base = random.randrange(20_000, 30_000)
        try:
            for port in range(base, base + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return base


def say(started: subprocess.Popen[bytes], word: str) -> None:
    assert started.stdin is not None
    started.stdin.write(word.encode() + b"\n")


async def watch(address: str, **fields: Any) -> list[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        return [
            message async for message in EventServiceStub(channel).Watch(pb.WatchRequest(**fields), timeout=SECONDS)
        ]


def run_ranks(plan: str) -> None:
    """Forks one process for each rank, before any of them has a thread or a socket."""
    for number, (sizes, config) in enumerate(json.loads(plan)):
        for dp, pp, cp, tp in itertools.product(*map(range, sizes)):
            if os.fork() == 0:
                run_rank(number, RankId("engine", dp, pp, cp, tp), config)
                os._exit(0)
    wait_for_input(SECONDS)


def run_rank(number: int, rank: RankId, config: dict[str, Any]) -> None:
    """Publishes what each replica of a dp rank would, until the standard input ends."""
    publisher = open_publisher(config, RankRef(rank, new_epoch()))
    endpoint = publisher.stream.state().pub_endpoint if publisher.stream else ""
    os.write(1, json.dumps([number, rank.dp, endpoint]).encode() + b"\n")
    for count in itertools.count():
        publisher.publish(KVEventBatch(time.time(), [BlockRemoved([(number << 40) + (rank.dp << 32) + count])]))
        if wait_for_input(0.02):
            break
    publisher.shutdown(0.1)


def run_exit() -> None:
    """Publishes more than sockets hold, and ends without a word to its publisher."""
    publisher = open_publisher({"endpoint": "tcp://127.0.0.1:0"}, RankRef(RankId("engine"), 1))
    assert publisher.stream is not None
    tell(publisher.stream.state().pub_endpoint)
    while not wait_for_input(0.005):
        publisher.publish(KVEventBatch(0.0, []))
    for _ in range(300):
        publisher.publish(KVEventBatch(0.0, [BlockRemoved([b"x" * 100_000])]))
    publisher.publish(KVEventBatch(0.0, [AllBlocksCleared()]))
    tell("leaving")


async def run_serve() -> None:
    publisher = open_publisher({"endpoint": "tcp://127.0.0.1:0"}, RankRef(RankId("engine"), new_epoch()))
    assert publisher.stream is not None
    for number in range(10):
        publisher.publish(KVEventBatch(0.0, [BlockRemoved([number])]))
    server = grpc.aio.server(interceptors=interceptors_of(ServerSecurity()))
    add_EventServiceServicer_to_server(EventServicer([publisher.stream]), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tell(f"127.0.0.1:{port}")
    await server.wait_for_termination()


def tell(word: str) -> None:
    print(json.dumps(word), flush=True)


def wait_for_input(seconds: float) -> bool:
    """Whether standard input said something, or ended."""
    return bool(select.select([0], [], [], seconds)[0])


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "serve":
        asyncio.run(run_serve())
    else:
        run_ranks(*arguments) if role == "ranks" else run_exit()
