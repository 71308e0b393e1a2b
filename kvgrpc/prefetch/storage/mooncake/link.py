"""Keeps a process that talks to the Store alive, and carries calls to it; whatever happens there, every call ends.

A master that does not answer makes the client block for seconds a call, and now and then it never recovers. So a
process that meets one is killed; a new one is started as soon as the master's port answers.
"""

from __future__ import annotations

import collections
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from kvgrpc.dataplane.mooncake.environment import DEFAULTS, for_a_process_of_ours
from kvgrpc.net import split_with_port
from kvgrpc.observability.logging import RateLimited
from kvgrpc.prefetch.storage.base import StorageDown
from kvgrpc.prefetch.storage.mooncake.messages import MASTER_DOWN, Area, Call, Gone, Reply, Start, Wire
from kvgrpc.prefetch.storage.mooncake.windows import SharedFile

logger = logging.getLogger(__name__)

STUCK_SECONDS = 10.0
_RETRY_SECONDS = 0.5
_MOST_RETRY_SECONDS = 30.0
_START_SECONDS = 20.0
_CONNECT_SECONDS = 1.0
_SEND_SECONDS = 1
_REAP_SECONDS = 10.0
_LOG_SECONDS = 60.0
# A hung owner's transfer ends (-800) well before the process would count as stuck.
_ENVIRONMENT = {**DEFAULTS, "MC_TCP_PROGRESS_TIMEOUT_SEC": "2", "MC_TRANSFER_TIMEOUT": "5"}


class NotShared(Exception):
    """A call names an area that is not shared any more."""


class Pending:
    """A call on its way. ``ended``: the process has answered, or is dead, and touches no memory of the call, which is
    in ``areas``."""

    def __init__(self, deadline: float, areas: frozenset[int] = frozenset()) -> None:
        self.ended = threading.Event()
        self.deadline = deadline
        self.areas = areas
        self.reply: Reply | None = None
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []

    def wait(self) -> Reply | None:
        """Until the deadline. None: no answer, and ``ended`` says whether there still will be one."""
        self.ended.wait(max(0.0, self.deadline - time.monotonic()))
        return self.reply

    def then(self, action: Callable[[], None]) -> None:
        """Runs ``action`` when the call has ended, perhaps now."""
        with self._lock:
            if not self.ended.is_set():
                self._then.append(action)
                return
        action()

    def end(self, reply: Reply | None) -> None:
        with self._lock:
            self.reply = reply
            self.ended.set()
        for action in self._then:
            action()


class Link:
    """Thread-safe. ``detail``: why it is not ready; empty when it is."""

    def __init__(self, start: Start) -> None:
        self.detail = "not connected yet"
        self.master = start.master
        self._start = start
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._process: subprocess.Popen[bytes] | None = None
        self._wire: Wire | None = None
        self._areas: dict[int, Area] = {}
        self._area_number = 0
        self._pending: dict[int, Pending] = {}
        self._number = 0
        self._started = self._connected = False
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"kvgrpc-mooncake-{name}", daemon=True)
            for name, target in (("link", self._keep_alive), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def ready(self) -> bool:
        return not self.detail

    def wait_ready(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.ready or self._closed.is_set(), timeout) and self.ready

    def share(self, memory: SharedFile, nbytes: int) -> int:
        """Makes shared memory known to this and every later process; its number. ``offset`` is page aligned."""
        with self._sending:
            with self._lock:
                self._area_number += 1
                number = self._area_number
                area = Area(number, os.getpid(), memory.descriptor, memory.offset, nbytes, memory.file)
                self._areas[number] = area
            if self._wire is not None and self.ready:
                self._send(self._wire, area)
        return number

    def unshare(self, number: int) -> None:
        """No later call may name this area; it is unmapped once those that are on their way and name it have ended."""
        with self._lock:
            del self._areas[number]
            users = [pending for pending in self._pending.values() if number in pending.areas]
        self._unmap_after(users, number)

    def _unmap_after(self, users: list[Pending], number: int) -> None:
        if users:
            users.pop().then(lambda: self._unmap_after(users, number))
            return
        with self._sending:
            # A process that is started later never hears of it.
            if self._wire is not None and self.ready:
                self._send(self._wire, Gone(number))

    def call(
        self, what: str, keys: list[str], deadline: float, buffers: list[list[tuple[int, int, int]]] | None = None
    ) -> Pending:
        """Sends a call. Raises StorageDown when there is nobody to answer it, NotShared for buffers in an area that was
        unshared."""
        areas = frozenset(area for pieces in buffers or () for area, _, _ in pieces)
        pending = Pending(deadline, areas)
        with self._lock:
            if self.detail or self._wire is None:
                raise self.down()
            if not areas <= self._areas.keys():
                raise NotShared
            self._number += 1
            number, wire = self._number, self._wire
            self._pending[number] = pending
        with self._sending:
            self._send(wire, Call(number, what, keys, buffers or [], deadline))
        return pending

    def down(self) -> StorageDown:
        why = "it is closed" if self._closed.is_set() else self.detail or "the process that talks to it has ended"
        message = f"Mooncake Store at {self.master} does not answer: {why}"
        return StorageDown(message, self.master, retry_after=_RETRY_SECONDS)

    def close(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        self._closed.set()
        self._set_down("closed")
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _send(self, wire: Wire, message: msgspec.Struct) -> None:
        """A process that is gone is noticed by the thread that reads."""
        try:
            wire.send(message)
        except OSError:
            if wire is self._wire:
                self._set_down("the process that talks to it takes no calls")

    def _set_down(self, why: str) -> None:
        """Nobody calls from now on, and the process is ended: what it was doing is over."""
        with self._changed:
            self.detail = why
            process = self._process
            self._changed.notify_all()
        if process is not None:
            process.kill()

    def _keep_alive(self) -> None:
        pause, lines = _RETRY_SECONDS, RateLimited(logger, lines=1, seconds=_LOG_SECONDS)
        while not self._closed.is_set():
            self._started = self._connected = False
            try:
                why = self._run_one()
            except Exception as error:  # no process can be made just now, for one
                why = f"no process that talks to it ({type(error).__name__}: {error})"
            if self._closed.is_set():
                break
            self._set_down(why)
            lines.warning(why, f"storage 'mooncake': {self.master}: {why}")
            # A process that cannot start costs half a second of CPU each time; to ask a port costs nothing.
            pause = min(2 * pause, _MOST_RETRY_SECONDS) if self._started and not self._connected else _RETRY_SECONDS
            self._closed.wait(pause)

    def _run_one(self) -> str:
        """One process from start to end; why it is not there any more."""
        try:
            host, port = split_with_port(self.master)
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        except OSError as error:
            return f"no master there ({error})"
        process, end = _spawn()
        self._started = True
        lines: collections.deque[str] = collections.deque(maxlen=3)
        reader = threading.Thread(target=_read_lines, args=(process, lines), name="kvgrpc-mooncake-log", daemon=True)
        reader.start()
        wire = Wire(end)
        decoder = msgspec.msgpack.Decoder(Reply)
        try:
            with self._lock:
                self._process = process
            end.settimeout(_START_SECONDS)
            wire.send(self._start)
            first = wire.receive(decoder)
            if first is None or first.error:
                return first.error if first else f"the process did not start: {' / '.join(lines)}"
            end.settimeout(None)
            self._set_ready(wire)
            while (reply := wire.receive(decoder)) is not None:
                self._end(reply)
            return self.detail or f"the process that talks to it has ended: {' / '.join(lines)}"
        except OSError as error:
            return f"the process did not start: {error}"
        finally:
            self._end_all(process)
            wire.close()
            reader.join(_REAP_SECONDS)

    def _set_ready(self, wire: Wire) -> None:
        with self._sending:
            with self._lock:
                areas = list(self._areas.values())
            for area in areas:
                wire.send(area)
            with self._changed:
                self._wire = wire
                if not self._closed.is_set():
                    self.detail = ""
                self._changed.notify_all()
        self._connected = True
        logger.info("storage 'mooncake': connected to %s", self.master)

    def _end(self, reply: Reply) -> None:
        with self._lock:
            pending = self._pending.pop(reply.number, None)
        if pending is not None:
            pending.end(reply)
        if any(code in MASTER_DOWN for code in reply.codes):
            self._set_down("the master does not answer")

    def _end_all(self, process: subprocess.Popen[bytes]) -> None:
        """Only when the process is dead and reaped does nothing touch the memory of its calls."""
        process.kill()
        process.wait()
        with self._lock:
            self._wire = self._process = None
            left, self._pending = self._pending, {}
            self.detail = self.detail or "the process that talks to it has ended"
        for pending in left.values():
            pending.end(None)

    def _watch(self) -> None:
        """Ends a process in which a call hangs."""
        while not self._closed.wait(1.0):
            with self._lock:
                oldest = min((pending.deadline for pending in self._pending.values()), default=None)
            if oldest is not None and time.monotonic() > oldest + STUCK_SECONDS:
                self._set_down("a call hangs")


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvgrpc.prefetch.storage.mooncake.child", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env=for_a_process_of_ours(os.environ, _ENVIRONMENT),
            start_new_session=True,  # Ctrl-C in the terminal is for the engine alone
        )
    return process, ours


def _read_lines(process: subprocess.Popen[bytes], lines: collections.deque[str]) -> None:
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            lines.append(line.decode(errors="replace").strip())
            logger.debug("mooncake: %s", lines[-1])
