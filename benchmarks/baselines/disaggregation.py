"""The seeds' hand-off: managers that exchange one ZMQ multipart message per request and per status.

Decode pushes its buffers once and then one message per request. Prefill queues chunks; one thread takes them, writes
layer by layer through a thread pool, one blocking write per contiguous group, then the aux item, and pushes one status.

Where the original stops, loses a room or is slower than it need be, this one does not: groups are found with numpy,
the status is set before the chunk is queued, a room nobody asked for and a failed write fail that room instead of the
thread, the pool exists before the threads do, ports are bound without a race, no control message is held back by a
high-water mark, and where the seed's pool would have no threads (below four cores) the transfer thread writes the
layers itself, which is also the fastest there.
"""

from __future__ import annotations

import concurrent.futures
import enum
import os
import queue
import struct
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zmq

from benchmarks.baselines.bootstrap import PrefillAddress, register_prefill, resolve_prefill
from benchmarks.baselines.engines import Engine

IndexArray = npt.NDArray[np.int64]
HOST = "127.0.0.1"
REGISTER_BUFFERS = b"None"
STOP = b"stop"


class Poll(enum.IntEnum):
    """How far a room is; the numbers are the engines'."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory of one rank: the address of each layer, bytes of one page, and the aux items."""

    layers: tuple[int, ...]
    page_bytes: int
    aux_address: int
    aux_item_bytes: int


@dataclass(slots=True)
class PeerBuffers:
    """What decode told about its memory."""

    layers: tuple[int, ...]
    aux_address: int


@dataclass(slots=True)
class TransferRequest:
    """What decode wants of one room."""

    room: int
    endpoint: str
    session_id: str
    pages: IndexArray
    aux_index: int


@dataclass(slots=True)
class Chunk:
    """Pages that prefill has ready for one room."""

    room: int
    pages: IndexArray
    where: slice
    is_last: bool
    aux_index: int | None


class Manager:
    """What both roles share: the status of every room, and a socket that takes control messages."""

    def __init__(self, engine: Engine, buffers: Buffers) -> None:
        self.engine = engine
        self.buffers = buffers
        self.status: dict[int, Poll] = {}
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.inbox.set_hwm(0)
        self.port = self.inbox.bind_to_random_port(f"tcp://{HOST}")
        self.outboxes: dict[str, zmq.Socket[bytes]] = {}
        self.outbox_locks: dict[str, threading.Lock] = {}
        self._connecting = threading.Lock()
        self._threads: list[threading.Thread] = []

    def outbox(self, endpoint: str) -> tuple[zmq.Socket[bytes], threading.Lock]:
        """The socket to a peer, and the lock to hold while it is used."""
        with self._connecting:
            if endpoint not in self.outboxes:
                socket = self.context.socket(zmq.PUSH)
                socket.set_hwm(0)
                socket.connect(f"tcp://{endpoint}")
                self.outboxes[endpoint] = socket
                self.outbox_locks[endpoint] = threading.Lock()
            return self.outboxes[endpoint], self.outbox_locks[endpoint]

    def raise_status(self, room: int, status: Poll) -> None:
        """A handle that is made after the peer's message must not take the room back."""
        self.status[room] = max(self.status.get(room, status), status)

    def close(self) -> None:
        stop = self.context.socket(zmq.PUSH)
        stop.connect(f"tcp://{HOST}:{self.port}")
        stop.send(STOP)
        for thread in self._threads:
            thread.join(5.0)
        for socket in (stop, self.inbox, *self.outboxes.values()):
            socket.close(linger=0)
        self.context.term()
        self.engine.close()

    def _start(self, *targets: threading.Thread) -> None:
        self._threads.extend(targets)
        for thread in targets:
            thread.start()


class PrefillManager(Manager):
    """Takes requests and buffers from decode, writes pages, says when a room is done."""

    def __init__(self, engine: Engine, buffers: Buffers, bootstrap: str) -> None:
        super().__init__(engine, buffers)
        self._requests: dict[int, TransferRequest] = {}
        self._peers: dict[str, PeerBuffers] = {}
        self._chunks: queue.Queue[Chunk] = queue.Queue()
        threads = min((os.cpu_count() or 1) // 4, 16)
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, "seed-layer") if threads else None
        self._closing = threading.Event()
        self._start(
            threading.Thread(target=self._bootstrap_thread, name="seed-prefill-inbox", daemon=True),
            threading.Thread(target=self._transfer_thread, name="seed-transfer", daemon=True),
        )
        register_prefill(bootstrap, PrefillAddress(HOST, self.port))

    def enqueue(self, chunk: Chunk) -> None:
        self.status[chunk.room] = Poll.WAITING_FOR_INPUT
        self._chunks.put(chunk)

    def close(self) -> None:
        self._closing.set()
        super().close()
        if self._pool is not None:
            self._pool.shutdown()

    def _bootstrap_thread(self) -> None:
        while True:
            message = self.inbox.recv_multipart()
            if message[0] == STOP:
                return
            if message[0] == REGISTER_BUFFERS:
                self._peers[message[3].decode("ascii")] = PeerBuffers(
                    struct.unpack(f"{len(message[4]) // 8}Q", message[4]), struct.unpack("Q", message[5])[0]
                )
                continue
            room = int(message[0].decode("ascii"))
            self._requests[room] = TransferRequest(
                room=room,
                endpoint=f"{message[1].decode('ascii')}:{message[2].decode('ascii')}",
                session_id=message[3].decode("ascii"),
                pages=np.frombuffer(message[4], dtype=np.int64),
                aux_index=int(message[5].decode("ascii")),
            )
            self.status[room] = Poll.WAITING_FOR_INPUT

    def _transfer_thread(self) -> None:
        while not self._closing.is_set():
            try:
                chunk = self._chunks.get(timeout=0.01)
            except queue.Empty:
                continue
            request = self._requests.get(chunk.room)
            if request is None:
                self.status[chunk.room] = Poll.FAILED
                continue
            done = self._write_pages(request, chunk)
            if done and not chunk.is_last:
                continue
            if done:
                done = self._write_aux(request, chunk)
            self.status[chunk.room] = Poll.SUCCESS if done else Poll.FAILED
            self._push_status(request)
            self._requests.pop(chunk.room, None)

    def _write_pages(self, request: TransferRequest, chunk: Chunk) -> bool:
        destinations = request.pages[chunk.where]
        if len(destinations) != len(chunk.pages):
            return False
        groups = contiguous_groups(chunk.pages, destinations)
        page_bytes = self.buffers.page_bytes
        session_id, transfer_sync = request.session_id, self.engine.transfer_sync

        def write_layer(source: int, destination: int) -> bool:
            for source_page, destination_page, pages in groups:
                if transfer_sync(
                    session_id,
                    source + source_page * page_bytes,
                    destination + destination_page * page_bytes,
                    pages * page_bytes,
                ):
                    return False
            return True

        layers = list(zip(self.buffers.layers, self._peers[session_id].layers, strict=True))
        if self._pool is None or len(layers) == 1:
            return all(write_layer(*layer) for layer in layers)
        futures = [self._pool.submit(write_layer, source, destination) for source, destination in layers]
        concurrent.futures.wait(futures)  # One wake-up of this thread; as_completed is one for each layer.
        return all(future.result() for future in futures)

    def _write_aux(self, request: TransferRequest, chunk: Chunk) -> bool:
        nbytes = self.buffers.aux_item_bytes
        source = self.buffers.aux_address + (chunk.aux_index or 0) * nbytes
        destination = self._peers[request.session_id].aux_address + request.aux_index * nbytes
        return self.engine.transfer_sync(request.session_id, source, destination, nbytes) == 0

    def _push_status(self, request: TransferRequest) -> None:
        socket, _ = self.outbox(request.endpoint)  # Only this thread pushes: no lock, as in the seed.
        socket.send_multipart([b"%d" % request.room, b"%d" % self.status[request.room]])


class DecodeManager(Manager):
    """Asks for rooms and hears how they ended."""

    def __init__(self, engine: Engine, buffers: Buffers) -> None:
        super().__init__(engine, buffers)
        self.prefills: dict[str, PrefillAddress] = {}
        self._start(threading.Thread(target=self._status_thread, name="seed-decode-inbox", daemon=True))

    def prefill_of(self, bootstrap: str) -> PrefillAddress:
        """Where the prefill of a bootstrap server listens; the first call also tells it our buffers."""
        if bootstrap not in self.prefills:
            address = resolve_prefill(bootstrap)
            self.prefills[bootstrap] = address
            self._tell_buffers(address)
        return self.prefills[bootstrap]

    def _tell_buffers(self, address: PrefillAddress) -> None:
        socket, lock = self.outbox(f"{address.host}:{address.port}")
        layers = self.buffers.layers
        with lock:
            socket.send_multipart(
                [
                    REGISTER_BUFFERS,
                    HOST.encode("ascii"),
                    b"%d" % self.port,
                    self.engine.session_id.encode("ascii"),
                    struct.pack(f"{len(layers)}Q", *layers),
                    struct.pack("Q", self.buffers.aux_address),
                ]
            )

    def _status_thread(self) -> None:
        while True:
            message = self.inbox.recv_multipart()
            if message[0] == STOP:
                return
            self.status[int(message[0])] = Poll(int(message[1]))


class Sender:
    """The prefill engine's handle of one room."""

    def __init__(self, manager: PrefillManager, bootstrap: str, room: int) -> None:
        self.manager = manager
        self.room = room
        self.aux_index: int | None = None
        manager.raise_status(room, Poll.BOOTSTRAPPING)

    def init(self, num_pages: int, aux_index: int | None = None) -> None:
        self.aux_index = aux_index

    def send(self, pages: IndexArray, index_slice: slice, is_last: bool) -> None:
        aux_index = self.aux_index if is_last else None
        self.manager.enqueue(Chunk(self.room, pages, index_slice, is_last, aux_index))

    def poll(self) -> Poll:
        return self.manager.status[self.room]

    def close(self) -> None:
        """Nothing: the seed keeps the status of every room for ever."""


class Receiver:
    """The decode engine's handle of one room."""

    def __init__(self, manager: DecodeManager, bootstrap: str, room: int) -> None:
        self.manager = manager
        self.room = room
        manager.raise_status(room, Poll.BOOTSTRAPPING)
        self.prefill = manager.prefill_of(bootstrap)
        manager.raise_status(room, Poll.WAITING_FOR_INPUT)

    def init(self, pages: IndexArray, aux_index: int) -> None:
        socket, lock = self.manager.outbox(f"{self.prefill.host}:{self.prefill.port}")
        with lock:
            socket.send_multipart(
                [
                    str(self.room).encode("ascii"),
                    HOST.encode("ascii"),
                    str(self.manager.port).encode("ascii"),
                    self.manager.engine.session_id.encode("ascii"),
                    pages.tobytes(),
                    str(aux_index).encode("ascii"),
                ]
            )

    def poll(self) -> Poll:
        return self.manager.status[self.room]

    def close(self) -> None:
        """Nothing: the seed keeps the status of every room for ever."""


def contiguous_groups(source: IndexArray, destination: IndexArray) -> list[tuple[int, int, int]]:
    """(first source page, first destination page, pages) of every run that is contiguous on both sides."""
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(destination) != 1)) + 1
    starts = np.concatenate(([0], breaks)) if len(source) else breaks
    lengths = np.diff(np.append(starts, len(source)))
    return list(zip(source[starts].tolist(), destination[starts].tolist(), lengths.tolist(), strict=True))
