"""liveness.detect: from the death or the stop of one side to the moment at which the engine of the other reads Failed.

The baseline is a bare socket between two processes: what the kernel alone says of a death, and a read that gives up
after kvgrpc's own idle timeout.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import time
from importlib.util import find_spec
from typing import Any

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Worker

PREFILL_DIES, DECODE_DIES, PREFILL_STOPS = "liveness.detect", "liveness.detect.decode", "liveness.detect.stopped"
# What is measured, whether prefill is the side that ends, and by which signal.
KINDS = (
    (PREFILL_DIES, True, signal.SIGKILL),
    (DECODE_DIES, False, signal.SIGKILL),
    (PREFILL_STOPS, True, signal.SIGSTOP),
)
PAGES, PAGE_BYTES = 16, 4_096
IDLE_SECONDS = 3.0
NAP_SECONDS = 0.000_1
_ROOMS = itertools.count(1)


def benchmarks(plan: Plan) -> list[Benchmark]:
    targets = {PREFILL_DIES: 1_000.0, DECODE_DIES: 2_000.0, PREFILL_STOPS: 3_500.0}
    metrics = tuple(Metric(name, "ms", "lower", "a bare socket", Target(value=targets[name])) for name, *_ in KINDS)
    missing = "" if find_spec("mooncake") else "install kvgrpc[mooncake-cpu]"
    return [Benchmark(metrics, lambda: _Pair(Ours), lambda: _Pair(Bare), missing, warm_ups=0)]


class _Pair:
    """Fresh processes for each death."""

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._peak = 0

    def turn(self) -> Figures:
        figures = {}
        for name, prefill_ends, number in KINDS:
            prefill, decode = Worker("liveness-prefill"), Worker("liveness-decode")
            try:
                pair = self._kind(prefill, decode)
                ending, watching = (prefill, decode) if prefill_ends else (decode, prefill)
                seen = pair.watch(watching)
                began = time.monotonic()
                os.kill(ending.pid, number)
                figures[name] = (seen.result(60.0) - began) * 1000
                os.kill(ending.pid, signal.SIGKILL)
                self._peak = max(self._peak, watching.peak_rss())
            finally:
                prefill.close()
                decode.close()
        return figures

    def peak_rss(self) -> int:
        return self._peak

    def close(self) -> None: ...


class Ours:
    """One room with pages on its way: prefill has begun to write, and its engine computes the rest."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        room = next(_ROOMS)
        address = prefill.call(_open_rank, "PREFILL")
        decode.call(_open_rank, "DECODE")
        decode.call(_receive, address, room)
        prefill.call(_send, room)

    def watch(self, worker: Worker) -> Any:
        return worker.begin(_moment_of_failure)


class Bare:
    """One TCP connection."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        port = prefill.call(_listen)
        decode.call(_connect, port)
        prefill.call(_accept)

    def watch(self, worker: Worker) -> Any:
        return worker.begin(_moment_of_silence)


def _open_rank(desk: Desk, role: str) -> str:
    import numpy as np

    from kvgrpc.server import Pool, RankConfig, Role, open_rank

    desk.items["memory"] = memory = np.zeros((PAGES, PAGE_BYTES), np.uint8)
    pools = (Pool.from_arrays([memory], page_tokens=16),)
    registry = "embedded" if role == "PREFILL" else ""
    desk.items["rank"] = rank = open_rank(
        RankConfig(engine=role.lower(), role=Role[role], pools=pools, registry=registry)
    )
    return str(rank.address)


def _receive(desk: Desk, address: str, room: int) -> None:
    from kvgrpc.server import KVPoll, KVReceiver

    desk.items["end"] = receiver = KVReceiver(desk.items["rank"].transfer, address, room)
    assert receiver.wait(30.0, until=KVPoll.WaitingForInput) is KVPoll.WaitingForInput
    receiver.init([0, 1, 2])


def _send(desk: Desk, room: int) -> None:
    from kvgrpc.server import KVPoll, KVSender

    desk.items["end"] = sender = KVSender(desk.items["rank"].transfer, room=room)
    sender.init(3)
    sender.send([0, 1])
    assert sender.wait(30.0, until=KVPoll.Transferring) is KVPoll.Transferring


def _moment_of_failure(desk: Desk) -> float:
    """Of the clock that all processes of a host share."""
    end = desk.items["end"]
    while not end.ended:
        time.sleep(NAP_SECONDS)
    assert end.failure.reason.name in ("PEER_LOST", "TRANSFER_FAILED"), end.failure
    return time.monotonic()


def _listen(desk: Desk) -> int:
    desk.items["listener"] = listener = socket.create_server(("127.0.0.1", 0))
    return int(listener.getsockname()[1])


def _connect(desk: Desk, port: int) -> None:
    desk.items["socket"] = socket.create_connection(("127.0.0.1", port), 30.0)


def _accept(desk: Desk) -> None:
    desk.items["socket"] = desk.items["listener"].accept()[0]


def _moment_of_silence(desk: Desk) -> float:
    desk.items["socket"].settimeout(IDLE_SECONDS)
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        assert desk.items["socket"].recv(1) == b""
    return time.monotonic()
