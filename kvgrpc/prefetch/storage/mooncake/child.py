"""The process that talks to the Store: ``python -m kvgrpc.prefetch.storage.mooncake.child DESCRIPTOR``.

The Store's library ends its process when it is called at the wrong moment, blocks for seconds when its master is gone,
and takes no time-out. Here that harms nobody: the engine's process kills this one, and nothing touches its memory then.
"""

from __future__ import annotations

import mmap
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvgrpc.net import split_with_port
from kvgrpc.prefetch.storage.mooncake.messages import (
    EXISTS,
    EXPIRED,
    INVALID,
    LEASE_ENDED,
    NOT_READY,
    TRANSFER_FAILED,
    Area,
    Call,
    Gone,
    Reply,
    Start,
    Wire,
)

_POLL_SECONDS = 0.005
_OTHERS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Mapped:
    """An area of the parent's memory, as it lies here."""

    memory: mmap.mmap
    address: int


class Child:
    """Answers calls in a few threads until the parent is gone."""

    def __init__(self, wire: Wire, store: Any, threads: int) -> None:
        self._wire = wire
        self._store = store
        self._areas: dict[int, _Mapped] = {}
        self._calls: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._writing = threading.Lock()
        self._do: dict[str, Callable[[Call], tuple[list[int], list[int]]]] = {
            "exist": self._exist,
            "get": self._get,
            "put": self._put,
            "remove": lambda call: (self._store.batch_remove(call.keys, True), []),
            "clear": lambda call: ([self._store.remove_by_regex(call.keys[0], True)], []),
        }
        for number in range(threads):
            threading.Thread(target=self._work, name=f"store-{number}", daemon=True).start()

    def serve(self) -> None:
        decoder = msgspec.msgpack.Decoder(Area | Call | Gone)
        while (message := self._wire.receive(decoder)) is not None:
            if isinstance(message, Area):
                self._map(message)
            elif isinstance(message, Gone):
                self._unmap(message.number)
            else:
                self._calls.put(message)

    def _map(self, area: Area) -> None:
        """Memory that cannot be mapped is not used: calls that name it get INVALID."""
        try:
            descriptor = os.open(f"/proc/{area.pid}/fd/{area.file}", os.O_RDWR | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if (status.st_dev, status.st_ino) != area.inode:
                    raise OSError(f"descriptor {area.file} is another file's by now")
                memory = mmap.mmap(descriptor, area.nbytes, flags=mmap.MAP_SHARED, offset=area.offset)
            finally:
                os.close(descriptor)
        except OSError as error:
            print(f"area {area.number} cannot be mapped: {error}", file=sys.stderr, flush=True)
            return
        address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        code = self._store.register_buffer(address, area.nbytes)
        if code != 0:
            print(f"area {area.number} cannot be registered: {code}", file=sys.stderr, flush=True)
            return
        self._areas[area.number] = _Mapped(memory, address)

    def _unmap(self, number: int) -> None:
        """Memory that the library does not let go of stays mapped: it may still be told to move bytes there."""
        area = self._areas.get(number)
        if area is None:
            return
        code = self._store.unregister_buffer(area.address)
        if code != 0:
            print(f"area {number} cannot be unregistered: {code}", file=sys.stderr, flush=True)
            return
        del self._areas[number]
        area.memory.close()

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            if time.monotonic() > call.deadline:
                reply = Reply(call.number, [EXPIRED] * len(call.keys), [0] * len(call.keys))
            else:
                try:
                    codes, sizes = self._do[call.what](call)
                    reply = Reply(call.number, list(codes), sizes or [0] * len(codes))
                except Exception as error:
                    reply = Reply(call.number, error=f"{type(error).__name__}: {error}")
            with self._writing:
                try:
                    self._wire.send(reply)
                except OSError:
                    os._exit(0)

    def _exist(self, call: Call) -> tuple[list[int], list[int]]:
        return self._store.batch_is_exist(call.keys), []

    def _get(self, call: Call) -> tuple[list[int], list[int]]:
        codes = self._moved(self._store.batch_get_into_multi_buffers, call, range(len(call.keys)))
        # A page whose owner is gone takes a second, in which the leases of the pages beside it may end.
        late = [number for number, code in enumerate(codes) if code == LEASE_ENDED and time.monotonic() < call.deadline]
        for number, code in zip(late, self._moved(self._store.batch_get_into_multi_buffers, call, late), strict=True):
            codes[number] = code
        # A buffer of another size than the object is reported as a failed transfer, or as invalid.
        doubtful = [number for number, code in enumerate(codes) if code in (INVALID, TRANSFER_FAILED)]
        sizes = [0] * len(codes)
        for number in doubtful:
            sizes[number] = max(0, self._store.get_size(call.keys[number]))
        return codes, sizes

    def _put(self, call: Call) -> tuple[list[int], list[int]]:
        """The Store says 0 to a put of what is there, whatever its size: so look first."""
        codes, sizes = [0] * len(call.keys), [0] * len(call.keys)
        new = []
        for number, there in enumerate(self._store.batch_is_exist(call.keys)):
            if there < 0:
                codes[number] = there
            elif there:
                codes[number], sizes[number] = EXISTS, max(0, self._store.get_size(call.keys[number]))
            else:
                new.append(number)
        for number, code in zip(new, self._moved(self._store.batch_put_from_multi_buffers, call, new), strict=True):
            codes[number] = code
        for number in self._incomplete(call, [number for number in new if codes[number] == 0]):
            codes[number] = NOT_READY
        return codes, sizes

    def _incomplete(self, call: Call, numbers: list[int]) -> list[int]:
        """Returns those that are still missing. The Store also says 0 while another client is writing the same key."""
        until = min(call.deadline, time.monotonic() + _OTHERS_SECONDS)
        while numbers:
            there = self._store.batch_is_exist([call.keys[number] for number in numbers])
            numbers = [number for number, code in zip(numbers, there, strict=True) if code == 0]
            if time.monotonic() + _POLL_SECONDS > until:
                break
            if numbers:
                time.sleep(_POLL_SECONDS)
        return numbers

    def _moved(self, move: Callable[..., list[int]], call: Call, numbers: range | list[int]) -> list[int]:
        """Codes of moving the pages ``numbers``; INVALID for those in memory that is not here.

        A key that comes twice in a batch is read into one of its buffers only, and reported as read into both: so each
        round has every key once.
        """
        codes = dict.fromkeys(numbers, INVALID)
        left = [number for number in numbers if all(area in self._areas for area, _, _ in call.buffers[number])]
        while left:
            once = {call.keys[number]: number for number in reversed(left)}
            now = sorted(once.values())
            left = [number for number in left if once[call.keys[number]] != number]
            addresses = [
                [self._areas[area].address + offset for area, offset, _ in call.buffers[number]] for number in now
            ]
            sizes = [[nbytes for _, _, nbytes in call.buffers[number]] for number in now]
            codes.update(zip(now, move([call.keys[number] for number in now], addresses, sizes), strict=True))
        return [codes[number] for number in numbers]


def set_up(start: Start) -> Any:
    """A client of the Store that is ready. Raises ImportError, OSError with what to do."""
    # Before a master that is gone, setup() would block for a minute and a half.
    host, port = split_with_port(start.master)
    socket.create_connection((host, int(port)), 2.0).close()
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(
        start.host,
        "P2PHANDSHAKE",
        start.segment_bytes,
        start.local_buffer_bytes,
        start.protocol,
        start.device,
        start.master,
    )
    if code != 0:
        raise OSError(f"setup returned {code}: is {start.host} an address of this machine, and {start.device!r} here?")
    return store


def main() -> None:
    wire = Wire(socket.socket(fileno=int(sys.argv[1])))
    start = wire.receive(msgspec.msgpack.Decoder(Start))
    if start is None:
        os._exit(0)
    try:
        store = set_up(start)
    except Exception as error:
        remedy = ": apt-get install libibverbs1 libnuma1 libcurl4" if isinstance(error, ImportError) else ""
        wire.send(Reply(0, error=f"{type(error).__name__}: {error}{remedy}"))
        os._exit(1)
    child = Child(wire, store, start.threads)
    wire.send(Reply(0))
    child.serve()
    # Not close(), which takes seconds: it would only tell the master what it sees by itself.
    os._exit(0)


if __name__ == "__main__":
    main()
