"""A rank in a process of its own, steered by a test: open, send, receive, look, and be killed.

``RankProcess`` is the test's end. The child runs ``RankHost`` and answers one call after the other over a pipe; it dies
with the test. Times are CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.support import link
from tests.support.quick_start import process_of

LAYERS, PAGES, PAGE_BYTES, AUX_BYTES, AUX_ROWS = 4, 512, 4096, 64, 64
CALL_SECONDS = 50.0


class RankProcess:
    """A rank in a child process. ``call`` any public method of RankHost; ``kill``, ``stop``, ``go_on`` by signal.

    ``settings``: RankHost's, and ``namespace``, of the network that it lives in.
    """

    def __init__(self, engine: str, role: str, **settings: Any) -> None:
        settings.setdefault("check_pages", True)
        self._pipe, child = multiprocessing.Pipe()
        self._process = process_of(_serve, (child, self._kind(), engine, role, settings))
        self._process.start()
        child.close()
        self.address: str = ""
        self.ref = ""

    def _kind(self) -> type[RankHost]:
        return RankHost

    def opened(self) -> RankProcess:
        """Waits until the rank is open."""
        self.address, self.ref = self._answer()
        return self

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        self._pipe.send((method, arguments, named))
        return self._answer()

    def ask(self, method: str, *arguments: Any, **named: Any) -> None:
        """Sends a call whose answer ``answer`` takes later."""
        self._pipe.send((method, arguments, named))

    def answer(self) -> Any:
        return self._answer()

    def kill(self) -> float:
        """kill -9; the moment at which it was sent."""
        moment = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(5.0)
        return moment

    def stop(self) -> float:
        """SIGSTOP; the moment at which it was sent."""
        moment = time.monotonic()
        os.kill(self.pid, signal.SIGSTOP)
        return moment

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def end(self) -> None:
        if self._process.is_alive():
            os.kill(self.pid, signal.SIGCONT)
            self._process.kill()
        self._process.join(5.0)
        self._pipe.close()

    def _answer(self) -> Any:
        if not self._pipe.poll(CALL_SECONDS):
            raise TimeoutError(f"no answer of {self.pid} within {CALL_SECONDS:.0f} s")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise AssertionError(value)
        return value


class RankHost:
    """What the child does. Memory: LAYERS regions of PAGES pages of PAGE_BYTES bytes; one aux buffer.

    Not RankConfig's, of ``settings``: ``slow_seconds``, for how long the data plane does nothing, by submission;
    ``corrupts``, in which submissions a bit flips on its way; and
    ``own_memory``, the engine's own and not the data plane's, as real engines have it; and ``layers``, the first one
    and how many this rank has.
    """

    def __init__(self, engine: str, role: str, settings: dict[str, Any]) -> None:
        import kvgrpc.dataplane
        from kvgrpc.model import Layout, Pool, PoolKind, Region, Role
        from kvgrpc.server import AuxBuffer, RankConfig, open_rank
        from tests.support.faults.dataplane import Fault, FaultyDataPlane

        settings = dict(settings)
        name, slow = settings.pop("data_plane", "shm"), settings.pop("slow_seconds", {})
        corrupts = settings.pop("corrupts", ())
        page_bytes = settings.pop("page_bytes", PAGE_BYTES)
        aux_bytes = settings.pop("aux_bytes", AUX_BYTES)
        pool_changes = settings.pop("pool", {})
        own_memory = settings.pop("own_memory", False)
        first_layer, layers = settings.pop("layers", (0, LAYERS))
        plane: Any = name if own_memory else kvgrpc.dataplane.open_plane(name)
        size = layers * PAGES * page_bytes
        allocate = self._allocate if own_memory else plane.allocate
        address, aux = allocate(size), allocate(aux_bytes * AUX_ROWS)
        self.memory = _view(address, (layers, PAGES, page_bytes))
        self.aux = _view(aux, (AUX_ROWS, aux_bytes))
        regions = tuple(
            Region(first_layer + layer, "kv", address + layer * PAGES * page_bytes, page_bytes, page_bytes)
            for layer in range(layers)
        )
        pool = replace(Pool("kv", PoolKind.KV, 16, PAGES, "float32", regions), **pool_changes)
        if slow:
            plane = FaultyDataPlane(plane, lambda number, _: Fault(delay=slow.get(number, 0.0)))
        if corrupts:
            plane = FaultyDataPlane(plane, lambda number, _: Fault(corrupt=True) if number in corrupts else None)
        settings.setdefault("layout", Layout())
        config = RankConfig(
            engine=engine,
            role=Role[role],
            pools=(pool,),
            aux=(AuxBuffer(aux, aux_bytes, AUX_ROWS),),
            data_plane=plane,
            **settings,
        )
        self.rank = open_rank(config)
        self.senders: dict[tuple[int, int], Any] = {}
        self.receivers: dict[tuple[int, int], Any] = {}

    def hold(self, seconds: float) -> None:
        """One thread holds the interpreter, as a compiler or a C extension may; the libraries' own threads go on."""
        ctypes.PyDLL(None).usleep(round(seconds * 1e6))

    def session_states(self) -> list[str]:
        return sorted(row.state.name for row in self.rank.transfer.sessions())

    def reopen(self) -> str:
        """The same rank anew, on the same memory and address, as after an engine's sleep; its incarnation."""
        from kvgrpc.server import open_rank

        config = replace(self.rank.config, listen=self.rank.address)
        assert self.rank.close(5.0).drained
        self.rank = open_rank(config)
        return str(self.rank.ref)

    def fill(self, seed: int) -> None:
        """Every page gets bytes that say where they come from."""
        generator = np.random.default_rng(seed)
        self.memory[:] = generator.integers(0, 256, self.memory.shape, dtype=np.uint8)
        self.aux[:] = generator.integers(0, 256, self.aux.shape, dtype=np.uint8)

    def page_sums(self, pages: Sequence[int]) -> list[bytes]:
        """A digest of each page over all layers."""
        import hashlib

        return [hashlib.sha256(self.memory[:, page].tobytes()).digest() for page in pages]

    def aux_row(self, row: int) -> bytes:
        return bytes(self.aux[row])

    def send(
        self, room: int, pages: Sequence[int], aux_row: int = 0, attempt: int = 0, chunk: int = 0, last: bool = True
    ) -> None:
        from kvgrpc.transfer import KVSender

        sender = self.senders[room, attempt] = KVSender(self.rank.transfer, "", room, attempt)
        sender.init(len(pages) if last else len(pages) + 1, aux_row)
        size = chunk or max(1, len(pages))
        for start in range(0, max(1, len(pages)), size):
            part = pages[start : start + size]
            sender.send(np.array(part, np.int32), slice(start, start + len(part)))

    def send_rest(self, room: int, page: int, attempt: int = 0) -> None:
        self.senders[room, attempt].send([page])

    def receive(
        self,
        room: int,
        bootstrap: str,
        pages: Sequence[int] | None,
        aux_row: int = 0,
        attempt: int = 0,
        wait_first: bool = False,
        **more: Any,
    ) -> None:
        """Makes a receiver; gives it ``pages`` (if any) at once, or (wait_first) when it says WaitingForInput."""
        from kvgrpc.transfer import KVReceiver

        receiver = self.receivers[room, attempt] = KVReceiver(self.rank.transfer, bootstrap, room, attempt, **more)
        if wait_first:
            self._wait([receiver], {0, 2, 4}, 10.0)
        if pages is not None:
            receiver.init(np.array(pages, np.int32), aux_row)

    def give_pages(self, room: int, pages: Sequence[int], aux_row: int = 0) -> None:
        self.receivers[room, 0].init(np.array(pages, np.int32), aux_row)

    def receive_many(self, rooms: Sequence[int], bootstrap: str, pages_each: int) -> None:
        for number, room in enumerate(rooms):
            first = (number * pages_each) % (PAGES - pages_each)
            self.receive(room, bootstrap, range(first, first + pages_each), aux_row=number % AUX_ROWS)

    def send_many(self, rooms: Sequence[int], pages_each: int) -> None:
        for number, room in enumerate(rooms):
            first = (number * pages_each) % (PAGES - pages_each)
            self.send(room, range(first, first + pages_each), aux_row=number % AUX_ROWS)

    def wait(self, side: str, rooms: Sequence[int], polls: Sequence[int], seconds: float = 20.0) -> dict[int, Any]:
        """Waits until every room's poll is one of ``polls``; room -> (poll, reason, moment of the last change)."""
        handles = getattr(self, side)
        chosen = [handles[room, attempt] for room in rooms for attempt in (0,)]
        self._wait(chosen, set(polls), seconds)
        now = time.monotonic()
        return {handle.room: (int(handle.poll()), _reason(handle), now) for handle in chosen}

    def state(self, side: str, room: int, attempt: int = 0) -> tuple[int, str, bool]:
        """(poll, reason, release_safe)."""
        handle = getattr(self, side)[room, attempt]
        return int(handle.poll()), _reason(handle), handle.release_safe

    def failure_of(self, side: str, room: int, attempt: int = 0) -> tuple[str, str, dict[str, str]] | None:
        failure = getattr(self, side)[room, attempt].failure
        return None if failure is None else (failure.reason.name, failure.message, dict(failure.metadata))

    def wait_release(self, rooms: Sequence[int], seconds: float = 20.0) -> float:
        """Waits until the pages of all rooms may be reused; the moment."""
        deadline = time.monotonic() + seconds
        while not all(self.receivers[room, 0].release_safe for room in rooms):
            if time.monotonic() > deadline:
                raise TimeoutError("pages did not come back")
            time.sleep(0.002)
        return time.monotonic()

    def abort(self, side: str, room: int, attempt: int = 0) -> None:
        getattr(self, side)[room, attempt].abort()

    def longest_of(self, method: str, calls: Sequence[tuple[Any, ...]]) -> float:
        """Seconds of the longest of several calls that an engine's thread makes one after the other."""
        longest = 0.0
        for arguments in calls:
            began = time.monotonic()
            getattr(self, method)(*arguments)
            longest = max(longest, time.monotonic() - began)
        return longest

    def publish(self, payloads: Sequence[bytes]) -> None:
        """KV-cache events, as the bytes that go out."""
        for payload in payloads:
            self.rank.events.publish(payload)

    def fork(self) -> int:
        """A child that does nothing, as a worker of the engine's own that was begun late; its process."""
        child = os.fork()
        if not child:
            signal.alarm(120)  # at the latest with the test
            while True:
                signal.pause()
        return child

    def metrics_address(self) -> str:
        return self.rank.metrics_address

    def log_to(self, path: str) -> None:
        """What an operator reads of this process, from now on."""
        import logging

        logging.basicConfig(filename=path, level=logging.INFO, force=True)

    def trace(self) -> None:
        """From now on an SDK of OpenTelemetry keeps the spans of this process."""
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._spans, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        trace.set_tracer_provider(provider)

    def spans(self, count: int, seconds: float = 20.0) -> list[dict[str, Any]]:
        """The spans that ended, once there are so many."""
        deadline = time.monotonic() + seconds
        while len(found := self._spans.get_finished_spans()) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(found)} spans")
            time.sleep(0.005)
        return [
            {
                "name": span.name,
                "trace": f"{span.context.trace_id:032x}",
                "span": f"{span.context.span_id:016x}",
                "parent": "" if span.parent is None else f"{span.parent.span_id:016x}",
                "kind": span.kind.name,
                "attributes": dict(span.attributes or {}),
                "status": (span.status.status_code.name, span.status.description or ""),
                "moments": [span.start_time, *(event.timestamp for event in span.events), span.end_time],
                "events": [event.name for event in span.events],
            }
            for span in found
        ]

    def rooms_open(self) -> int:
        return len(self.rank.transfer.core.rooms)

    def peers(self) -> dict[str, str]:
        """The state of each session by the peer's incarnation."""
        return {str(pair.ref): pair.state.name for pair in tuple(self.rank.transfer.core.pairs.values())}

    def data_plane(self) -> str:
        return str(self.rank.transfer.plane.name)

    def open_writes(self) -> int:
        return int(self.rank.transfer.core.open_writes)

    def held_pages(self) -> int:
        return int(self.rank.transfer.held_pages)

    def registration(self) -> str:
        return self.rank.registration_state

    def healthy(self) -> bool:
        return self.rank.healthy

    def close(self, deadline: float = 5.0) -> tuple[bool, int, int]:
        closed = self.rank.close(deadline)
        self.rank.plane.close(deadline)
        return closed.drained, closed.open_rooms, closed.held_pages

    def _allocate(self, nbytes: int) -> int:
        self._owned = [*getattr(self, "_owned", []), np.zeros(nbytes, np.uint8)]
        return int(self._owned[-1].ctypes.data)

    @staticmethod
    def _wait(handles: Sequence[Any], polls: set[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not all(int(handle.poll()) in polls for handle in handles):
            if time.monotonic() > deadline:
                wrong = [handle for handle in handles if int(handle.poll()) not in polls]
                first = wrong[0]
                raise TimeoutError(
                    f"{len(wrong)} of {len(handles)} rooms, first {first.room}: {first.poll().name} {_reason(first)}"
                )
            time.sleep(0.001)


def _reason(handle: Any) -> str:
    return "" if handle.failure is None else str(handle.failure.reason.name)


def _view(address: int, shape: tuple[int, ...]) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * int(np.prod(shape))).from_address(address)).reshape(shape)


def _serve(pipe: Connection, kind: type[RankHost], engine: str, role: str, settings: dict[str, Any]) -> None:
    namespace = settings.pop("namespace", "")
    try:
        if namespace:
            link.enter(namespace)
        host = kind(engine, role, settings)
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        return
    pipe.send(("value", (host.rank.address, str(host.rank.ref))))
    while True:
        try:
            method, arguments, named = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("value", getattr(host, method)(*arguments, **named)))
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {error}"))
