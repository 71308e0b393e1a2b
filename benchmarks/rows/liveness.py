"""liveness.detect: from the death, stop or cut of one side to the moment at which the other's engine reads Failed.

One prefill rank and ten decode ranks, and a room between each two: a turn gives ten times of each kind. A row is the
slowest of the ten, and ``.p50`` their median. All times of all turns together, which are fifty of five rounds, are
printed as p50, p90, largest and how many, as in docs/lab/hand-offs.md. The baseline is a bare socket
between two processes: what the kernel alone says of a death, and a read that gives up when kvgrpc does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from benchmarks.harness.plan import Plan
from benchmarks.harness.rounds import Benchmark, Figures
from benchmarks.harness.table import Metric, Target
from benchmarks.harness.worker import Desk, Worker
from tests.support import link

KILLED, DECODE_KILLED = "liveness.detect", "liveness.detect.decode"
STOPPED, DECODE_STOPPED = "liveness.detect.stopped", "liveness.detect.decode_stopped"
CUT, DECODE_CUT = "liveness.detect.cut", "liveness.detect.decode_cut"
# By what is measured at the side that lives: whether prefill is the one that ends, and by which signal.
SIGNALS = {
    KILLED: (True, signal.SIGKILL),
    DECODE_KILLED: (False, signal.SIGKILL),
    STOPPED: (True, signal.SIGSTOP),
    DECODE_STOPPED: (False, signal.SIGSTOP),
}
TARGETS = {KILLED: 1_000.0, DECODE_KILLED: 2_000.0, STOPPED: 4_500.0, DECODE_STOPPED: 4_500.0}
CUT_TARGETS = {CUT: 4_500.0, DECODE_CUT: 4_500.0}
DECODES = 10
PAGES, PAGE_BYTES = 16, 4_096
IDLE_SECONDS = 4.0
NAP_SECONDS = 0.000_1
LOOPBACK = "127.0.0.1"
_ROOMS = itertools.count(1)


def benchmarks(plan: Plan) -> list[Benchmark]:
    return [
        Benchmark(_metrics(TARGETS), lambda: Signalled(Ours), lambda: Signalled(Bare), warm_ups=0),
        Benchmark(_metrics(CUT_TARGETS), lambda: _Cut(Ours), lambda: _Cut(Bare), link.missing(), warm_ups=0),
    ]


def _metrics(targets: Mapping[str, float]) -> tuple[Metric, ...]:
    rows = ((name, value, suffix) for name, value in targets.items() for suffix in ("", ".p50"))
    return tuple(Metric(name + suffix, "ms", "lower", "a bare socket", Target(value=ms)) for name, ms, suffix in rows)


class _Watched(Protocol):
    def watch(self, worker: Worker) -> Any:
        """Begins to wait for the other side's end; the moments at which it was known."""


class _Turns:
    """Fresh processes for each end. ``kind``: makes the pair from prefill, decode, and the hosts of both."""

    def __init__(self, kind: Callable[[Worker, Worker, str, str], _Watched]) -> None:
        self._kind = kind
        self._peak = 0
        self._took: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def _pair(self, *hosts: str, namespace: str = "") -> Any:
        prefill, decode = Worker("liveness-prefill"), Worker("liveness-decode")
        try:
            if namespace:
                prefill.call(_enter, namespace)
            yield prefill, decode, self._kind(prefill, decode, *hosts)
            self._peak = max(self._peak, *(worker.peak_rss() for worker in (prefill, decode) if worker.pid))
        finally:
            for worker in (prefill, decode):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGKILL)
                worker.close()

    def peak_rss(self) -> int:
        return self._peak

    def close(self) -> None:
        """Prints what was measured of ours: the baseline is one socket, so its row says all of it."""
        for name, took in self._took.items() if self._kind is Ours else ():
            spread = np.percentile(took, [50, 90, 100])
            print(f"| `{name}` | {' | '.join(f'{one:,.0f}' for one in spread)} | {len(took)} |", flush=True)

    def figures(self, name: str, began: float, moments: list[float]) -> Figures:
        took = [(moment - began) * 1000 for moment in moments]
        self._took.setdefault(name, []).extend(took)
        return {name: max(took), f"{name}.p50": statistics.median(took)}


class Signalled(_Turns):
    def turn(self) -> Figures:
        figures: dict[str, float] = {}
        for name, (prefill_ends, number) in SIGNALS.items():
            with self._pair(LOOPBACK, LOOPBACK) as (prefill, decode, pair):
                ending, watching = (prefill, decode) if prefill_ends else (decode, prefill)
                seen = pair.watch(watching)
                began = time.monotonic()
                os.kill(ending.pid, number)
                figures |= self.figures(name, began, seen.result(60.0))
        return figures


class _Cut(_Turns):
    """Prefill lives in a network of its own, and both sides find out that the link is down."""

    def turn(self) -> Figures:
        made = link.Link()
        try:
            with self._pair(made.host, made.own, namespace=made.name) as (prefill, decode, pair):
                seen = {CUT: pair.watch(decode), DECODE_CUT: pair.watch(prefill)}
                began = time.monotonic()
                made.cut()
                figures = [self.figures(name, began, one.result(60.0)) for name, one in seen.items()]
        finally:
            made.remove()
        return {**figures[0], **figures[1]}


class Ours:
    """Rooms with pages on their way: prefill has begun to write, and its engine computes the rest."""

    def __init__(self, prefill: Worker, decode: Worker, prefill_host: str, decode_host: str) -> None:
        rooms = [next(_ROOMS) for _ in range(DECODES)]
        address = prefill.call(_open_ranks, "PREFILL", prefill_host, 1)
        decode.call(_open_ranks, "DECODE", decode_host, DECODES, prefill_host)
        decode.call(_receive, address, rooms)
        prefill.call(_send, rooms)

    def watch(self, worker: Worker) -> Any:
        return worker.begin(_moments_of_failure)


class Bare:
    """One TCP connection."""

    def __init__(self, prefill: Worker, decode: Worker, prefill_host: str, decode_host: str) -> None:
        port = prefill.call(_listen, prefill_host)
        decode.call(_connect, prefill_host, port)
        prefill.call(_accept)

    def watch(self, worker: Worker) -> Any:
        return worker.begin(_moments_of_silence)


def _enter(desk: Desk, namespace: str) -> None:
    link.enter(namespace)


def _open_ranks(desk: Desk, role: str, host: str, count: int, registry_host: str = "") -> str:
    """Over shared memory: what is measured is the session's."""
    from kvgrpc.dataplane import open_plane
    from kvgrpc.server import ClientSecurity, Pool, PoolKind, RankConfig, Region, Role, ServerSecurity, open_rank

    ranks = desk.items["ranks"] = []
    for number in range(count):
        plane = open_plane("shm")
        region = Region(0, "kv", plane.allocate(PAGES * PAGE_BYTES), PAGE_BYTES, PAGE_BYTES)
        config = RankConfig(
            engine=f"{role.lower()}{number}",
            role=Role[role],
            pools=(Pool("kv", PoolKind.KV, 16, PAGES, "uint8", (region,)),),
            data_plane=plane,
            listen=f"{host}:0",
            registry="embedded" if role == "PREFILL" else "",
            bootstrap_allow=(registry_host,) if registry_host else (),
            server_security=ServerSecurity(insecure=True),
            client_security=ClientSecurity(insecure=True),
        )
        ranks.append(open_rank(config))
    return str(ranks[0].address)


def _receive(desk: Desk, address: str, rooms: list[int]) -> None:
    from kvgrpc.server import KVPoll, KVReceiver

    ranks = desk.items["ranks"]
    ends = [KVReceiver(rank.transfer, address, room) for rank, room in zip(ranks, rooms, strict=True)]
    for receiver in ends:
        assert receiver.wait(30.0, until=KVPoll.WaitingForInput) is KVPoll.WaitingForInput
        receiver.init([0, 1, 2])
    desk.items["ends"] = ends


def _send(desk: Desk, rooms: list[int]) -> None:
    from kvgrpc.server import KVPoll, KVSender

    ends = desk.items["ends"] = [KVSender(desk.items["ranks"][0].transfer, room=room) for room in rooms]
    for sender in ends:
        sender.init(3)
        sender.send([0, 1])
    for sender in ends:
        assert sender.wait(30.0, until=KVPoll.Transferring) is KVPoll.Transferring


def _moments_of_failure(desk: Desk) -> list[float]:
    """Of the clock that all processes of a host share."""
    waiting, moments = list(desk.items["ends"]), []
    while waiting:
        time.sleep(NAP_SECONDS)
        for end in [end for end in waiting if end.ended]:
            assert end.failure.reason.name in ("PEER_LOST", "TRANSFER_FAILED"), end.failure
            moments.append(time.monotonic())
            waiting.remove(end)
    return moments


def _listen(desk: Desk, host: str) -> int:
    desk.items["listener"] = listener = socket.create_server((host, 0))
    return int(listener.getsockname()[1])


def _connect(desk: Desk, host: str, port: int) -> None:
    desk.items["socket"] = socket.create_connection((host, port), 30.0)


def _accept(desk: Desk) -> None:
    desk.items["socket"] = desk.items["listener"].accept()[0]


def _moments_of_silence(desk: Desk) -> list[float]:
    desk.items["socket"].settimeout(IDLE_SECONDS)
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        assert desk.items["socket"].recv(1) == b""
    return [time.monotonic()]
