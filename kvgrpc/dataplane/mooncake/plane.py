"""Moves bytes with Mooncake's TransferEngine: RDMA where the machine has host channel adapters, else TCP.

The engine is used through single submitted writes only (window.py). Addresses are checked before it sees them, because
four refused writes close all connections to a peer. A peer is contacted on a thread of its own, and probed first: first
contact with a process that hangs blocks every transfer of the engine.

No authentication: whoever reaches the two ports of an engine may write to all registered memory, and one malformed
message ends the process. Keep ports 15000-17000 inside an isolated network.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvgrpc import forks
from kvgrpc.dataplane.base import EndedTransfer, MemoryRange, Outcome, Peer, Result, Transfer, U64Array
from kvgrpc.dataplane.mooncake.connections import (
    UnsentBytes,
    arriving,
    local_addresses,
    read_table,
    unheld,
)
from kvgrpc.dataplane.mooncake.start import StartedEngine, adopt_engine, start_engine
from kvgrpc.dataplane.mooncake.window import NO_HANDLE, Limits, PeerQueue, Submitter
from kvgrpc.dataplane.ranges import RangeTable, arrays, first_outside, merged
from kvgrpc.dataplane.shm.process import ProcessIdentity, own_identity, socket_inodes
from kvgrpc.dataplane.shm.segments import check_available, populate
from kvgrpc.net import joined, split_with_port

logger = logging.getLogger(__name__)

MAX_RANGES = 1024
MAX_NAMES = 65_536
ANSWER_SECONDS = 3.0
# Peers that are contacted at once, a thread each, which one that hangs holds for a minute.
MAX_CONTACTS = 256
# Over TCP four writes move at a time (25 us each, and 1 us for each KiB), 16 keep them busy. RDMA: estimated.
IN_FLIGHT = {"tcp": Limits(16, 256, 64 << 20, first_bytes=4 << 20), "rdma": Limits(1024, 1024, 1 << 30)}
# So many writes keep TCP busy for more than a millisecond, however small, and each poll takes time from the engine.
_MANY_WRITES = 200
_OVERLAP = -7
_SESSION = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}")


class MooncakeDataPlane:
    """See DataPlane. ``transport``: "tcp" or "rdma"; ``session``: Mooncake's name of this engine, host:port."""

    name = "mooncake"
    quick_bytes = 0  # a write may have to connect first

    def __init__(self, host: str = "127.0.0.1", device: str = "") -> None:
        """Starts an engine; see start_engine for the arguments and the errors."""
        self._use(start_engine(_transfer_engine, host, device), owned=True)

    @classmethod
    def of(cls, engine: Any, host: str) -> MooncakeDataPlane:
        """The plane of an engine that the caller initialised and will destroy, and that peers reach at ``host``.

        Memory that the caller registered with the engine must be registered here too before the plane uses it. close()
        leaves the engine alone, and returns True only when no peer is connected any more. The settings that start.py
        makes for an engine of our own are the caller's to make. Raises ValueError for an object that is no
        TransferEngine; an engine that was not initialised ends the process.
        """
        plane = cls.__new__(cls)
        plane._use(adopt_engine(engine, host), owned=False)
        return plane

    def _use(self, started: StartedEngine, owned: bool) -> None:
        self.transport = started.transport
        self.session = started.session
        self._data_ports = started.data_ports
        self._owned = owned
        self._engine: Any = started.engine
        self._submitter = Submitter(started.engine)
        self._lock = threading.Lock()
        self._identity = own_identity()
        self._addresses = local_addresses()
        self._registered: list[int] = []
        self._own = RangeTable(())
        self._blocks: list[mmap.mmap] = []
        self._queues: weakref.WeakValueDictionary[str, PeerQueue] = weakref.WeakValueDictionary()
        self._contacting: set[str] = set()
        self._to_contact: dict[str, _Peer] = {}
        self._incarnation = secrets.token_hex(8)
        self._names: dict[str, tuple[str, int]] = {}
        self._peer_ports: frozenset[int] = frozenset()
        self._closed: bool | None = None
        self._closing = threading.Lock()
        # What the first close found: nothing ran any more, the engine is gone, and over what it had bytes to send.
        self._drained = self._gone = False
        self._sending: set[str] | None = None
        if owned:
            forks.listens(self, {*self._data_ports, int(split_with_port(self.session)[1])})
            this = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _leak(this()))

    def allocate(self, nbytes: int, location: str = "cpu:0") -> int:
        """See DataPlane: anonymous memory; not registered yet. Device memory: allocate it yourself and register it."""
        if nbytes < 1 or not location.startswith("cpu"):
            raise ValueError(f"{nbytes} bytes of {location!r}: this plane allocates 1 byte or more of 'cpu:…' memory")
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        check_available(size)
        try:
            block = mmap.mmap(-1, size + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no {nbytes} bytes of memory: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(block, dtype=np.uint8)
        address = int(memory.ctypes.data)
        if not populate(address, size):
            memory[: size : mmap.PAGESIZE] = 0
        with self._lock:
            self._check_open()
            self._blocks.append(block)
        return address

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        """See DataPlane: any own memory; at most 1,024 ranges after merging."""
        with self._lock:
            self._check_open()
            by_location: dict[str, list[tuple[int, int]]] = {}
            for memory in ranges:
                if not self._own.contains(memory.address, memory.nbytes):
                    by_location.setdefault(memory.location, []).append((memory.address, memory.nbytes))
            new = {pair: location for location, pairs in by_location.items() for pair in merged(pairs)}
            table = RangeTable([*self._own.ranges, *new])
            if len(table.ranges) > MAX_RANGES:
                raise ValueError(f"{len(table.ranges)} ranges, {MAX_RANGES} are the most: register few large ones")
            for location in by_location:
                self._register([pair for pair in new if new[pair] == location], location)
            self._own = table

    @property
    def endpoints(self) -> tuple[str, ...]:
        """See DialledByPeers: of the session, and of the sockets that take bytes over TCP."""
        host, port = split_with_port(self.session)
        ports = sorted({int(port), *self._data_ports})
        return tuple(joined(host, each) for each in ports)

    def address(self) -> bytes:
        """See DataPlane: JSON with the process, its IP addresses, the session, and the registered ranges."""
        ports, ranges = tuple(sorted(self._data_ports)), self._own.ranges
        who = (self._identity, self._incarnation, self._addresses)
        return msgspec.json.encode(_Address(*who, self.session, self.transport, ports, ranges))

    def attach(self, address: bytes) -> Peer:
        """See DataPlane: first contact goes on in the background; without an answer in 3 s submissions are refused.

        So they are where MAX_CONTACTS others do not answer either and this one has no turn within 3 s. Time in which
        this process was held, or submitted nothing, counts as a second at most.
        """
        decoded = _decode(address)
        if decoded.transport != self.transport:
            both = f"the peer moves bytes over {decoded.transport}, this side over {self.transport}"
            raise ValueError(f"{both}: open both planes with the same device (KVGRPC_DEVICE)")
        with self._lock:
            self._check_open()
            name = self._name(decoded)
            queue = self._queues.get(name)
            if queue is None:
                queue = PeerQueue(name, IN_FLIGHT[self.transport], UnsentBytes(frozenset(decoded.data_ports)))
                self._queues[name] = queue
            self._peer_ports |= frozenset(decoded.data_ports)
            forks.dials(self, [(forks.ANY_HOST, port) for port in self._peer_ports])
        peer = _Peer(queue, decoded)
        self._contact(peer)
        return peer

    @property
    def poll_interval(self) -> float:
        """See DataPlane."""
        many = self.transport == "tcp" and self._submitter.fewest_in_flight() >= _MANY_WRITES
        return 0.0008 if many else 0.0002

    @property
    def gathers_slices(self) -> bool:
        """See DataPlane: over TCP a write takes 25 us, however short. Over RDMA it was not measured."""
        return self.transport == "tcp"

    @property
    def limits_of_a_peer(self) -> tuple[int, int]:
        """See Bounded; at least ``FEWEST`` writes, whatever their bytes."""
        limits = IN_FLIGHT[self.transport]
        return limits.most_writes, limits.nbytes

    def in_flight(self) -> tuple[int, int]:
        """See Bounded."""
        with self._lock:
            queues = list(self._queues.values())
        return sum(queue.in_flight for queue in queues), sum(queue.bytes_in_flight for queue in queues)

    def detach(self, peer: Peer) -> None:
        """See DataPlane. Mooncake keeps its connections to the peer until the peer or this engine ends."""
        if isinstance(peer, _Peer):
            peer.detached = True
            with self._lock:
                if self._to_contact.get(peer.queue.session) is peer:
                    del self._to_contact[peer.queue.session]

    def submit(self, peer: Peer, source: U64Array, destination: U64Array, nbytes: U64Array) -> Transfer:
        """See DataPlane. A write that fails closes the connection it used (all bytes of it are out before it polls
        FAILED_SRC_FREE); the other connections of the peer stay, and carry nothing of it.
        """
        try:
            attached, columns = self._checked(peer, *arrays(source, destination, nbytes))
            self._contact(attached)
            return self._submitter.submit(attached.queue, columns)
        except (ValueError, TypeError, OverflowError) as error:
            return EndedTransfer(Result(Outcome.REJECTED, str(error)))

    def connections_from(self, address: bytes) -> frozenset[str]:
        """See DataPlane; connections.py says what can be told. Reads the kernel's table twice, 6 to 24 us of CPU for
        each socket of the host.
        """
        return self.connections_from_each([address])[0]

    def connections_from_each(self, addresses: Sequence[bytes]) -> list[frozenset[str]]:
        """See BatchedConnections."""
        ports = self._data_ports
        if not ports:
            return [frozenset() for _ in addresses]
        peers = [_peer_at(address) for address in addresses]
        before = read_table(ports)
        unsure = [peer is not None and _may_be_ending(peer) for peer in peers]
        after = read_table(ports)
        found = []
        for peer, was_unsure in zip(peers, unsure, strict=True):
            ending = was_unsure or (peer is not None and _may_be_ending(peer))
            linger = unheld(before, after, ending, ports, self._addresses_of(peer) if peer else None)
            found.append(frozenset(each.name for each in linger))
        return found

    @property
    def closed(self) -> bool:
        """See TellsClosed."""
        return self._closed is True

    def close(self, deadline: float) -> bool:
        """See DataPlane; a later call looks again at what an earlier one found left. Destroying an engine holds the GIL
        for up to a second: it waits for its threads.
        """
        end = time.monotonic() + deadline
        if not self._closing.acquire(timeout=max(0.0, deadline)):
            return False
        try:
            if not self._closed:
                self._closed = self._close(end, end - min(1.0, deadline / 2))
            return self._closed
        finally:
            self._closing.release()

    def _close(self, end: float, drained_by: float) -> bool:
        with self._lock:
            first, self._closed = self._closed is None, False
        if first:
            self._drained = self._submitter.drain(drained_by)
            held = socket_inodes(os.getpid())
            self._sending = None if held is None else self._still_sending(held)
        self._gone = self._gone or (self._destroy(end) if self._owned else self._hand_back())
        outcome = Outcome.FAILED_SRC_FREE if self._gone else Outcome.FAILED_UNKNOWN
        self._submitter.abandon(outcome, "the data plane was closed")
        if not self._gone or not self._all_sent(end):
            return False
        self._blocks.clear()
        return True

    def _all_sent(self, end: float) -> bool:
        """Waits for what the engine closed and has not sent yet. Another plane's: what a process still holds, and what
        was not there before the engine went too, where that could be told.
        """
        while (left := self._still_sending()) is None or (left if self._sending is None else self._sending & left):
            if time.monotonic() >= end:
                return False
            time.sleep(0.002)
        return True

    def _checked(
        self, peer: Peer, source: U64Array, destination: U64Array, nbytes: U64Array
    ) -> tuple[_Peer, tuple[U64Array, U64Array, U64Array]]:
        if os.getpid() != self._identity.pid:
            raise ValueError("this process was forked: Mooncake works only in the process that started it; use spawn")
        self._check_open()
        if not isinstance(peer, _Peer) or peer.detached:
            raise ValueError("not an attached peer of this data plane")
        if outside := first_outside(self._own.find(source, nbytes), source, nbytes):
            raise ValueError(f"source of {outside} is in no registered range")
        if outside := first_outside(peer.table.find(destination, nbytes), destination, nbytes):
            raise ValueError(f"destination of {outside} is in no range that the peer registered")
        return peer, (source, destination, nbytes)

    def _name(self, address: _Address) -> str:
        """Returns what the engine shall call that peer: its session, with one more zero before the port for each
        incarnation.

        The engine keeps what it learnt of a session for ever. A process that came up on the port of another would be
        written to at the other's data port, which fails for ever. The caller holds the lock.
        """
        port = split_with_port(address.session)[1]
        incarnation, zeros = self._names.pop(address.session, (address.incarnation, 0))
        zeros += incarnation != address.incarnation
        self._names[address.session] = (address.incarnation, zeros)
        if len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]
        return f"{address.session.removesuffix(port)}{'0' * zeros}{port}"

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ValueError("the data plane is closed")

    def _register(self, pairs: list[tuple[int, int]], location: str) -> None:
        """One call for our own engine; one by one where the owner of the engine may have registered some already."""
        for group in [pairs] if self._owned else [[pair] for pair in pairs]:
            addresses, sizes = [address for address, _ in group], [nbytes for _, nbytes in group]
            code = self._engine.batch_register_memory(addresses, sizes, location)
            if code == 0:
                self._registered += addresses
            elif code != _OVERLAP or self._owned:
                raise ValueError(f"Mooncake does not register {len(group)} ranges of {location} (error {code})")

    def _contact(self, peer: _Peer) -> None:
        """Opens the peer unless it is open, again after a refusal. A probe that hangs is never repeated meanwhile."""
        queue = peer.queue
        if queue.ready:
            return
        with self._lock:
            session = queue.session
            contacted = queue.ready or session in self._contacting or session in self._to_contact
            if contacted or self._closed is not None:
                return
            queue.await_answer(ANSWER_SECONDS, self._submitter.clock())
            self._to_contact[session] = peer
            self._contact_next()

    def _contact_next(self) -> None:
        """Of those that wait for it, if there may be one more. The caller holds the lock."""
        while self._to_contact and len(self._contacting) < MAX_CONTACTS and self._closed is None:
            peer = self._to_contact.pop(next(iter(self._to_contact)))
            queue = peer.queue
            queue.await_answer(ANSWER_SECONDS, self._submitter.clock())
            arguments = (self._engine, queue, self._own.ranges[:1], peer.table.ranges[:1])
            thread = threading.Thread(target=self._open, args=arguments, name="kvgrpc-mooncake-contact", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system has none left: the next submission asks again
                queue.refused = f"no thread for the first contact with {queue.session}: {error}"
            else:
                self._contacting.add(queue.session)
                return

    def _open(self, engine: Any, queue: PeerQueue, *ranges: tuple[tuple[int, int], ...]) -> None:
        try:
            refused = _first_contact(engine, queue.session, *ranges if self.transport == "tcp" else ((), ()))
        except Exception as error:
            logger.exception("first contact with %s failed", queue.session)
            refused = f"first contact with {queue.session} failed: {error}"
        finally:
            del engine
        with self._lock:
            self._contacting.discard(queue.session)
            queue.ready, queue.refused = not refused, refused
            self._contact_next()

    def _addresses_of(self, peer: _Address) -> frozenset[str]:
        """From where the peer may connect: not over our loopback when it lives in another network namespace."""
        here = (peer.process.boot, peer.process.network) == (self._identity.boot, self._identity.network)
        return frozenset(peer.addresses) - (frozenset() if here else {"127.0.0.1", "::1"})

    def _still_sending(self, held: frozenset[int] = frozenset()) -> set[str] | None:
        """Connections to data ports of peers over which bytes could still leave, and that no process has, or one with
        these sockets; None: that cannot be told now."""
        ports = self._peer_ports
        try:
            table = read_table(ports) if ports else []
        except OSError:
            return None
        return {
            each.name
            for each in table
            if each.remote[1] in ports and each.sends and (each.inode == 0 or each.inode in held)
        }

    def _destroy(self, end: float) -> bool:
        """Drops the last reference to the engine and looks whether its port is gone."""
        port = int(split_with_port(self.session)[1])
        with self._submitter.lock:
            last = [self._engine]  # None where an earlier close took it
            self._engine = self._submitter.engine = None
        thread = threading.Thread(target=last.clear, name="kvgrpc-mooncake-close", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is about to end, or the system has none left
            last.clear()
        else:
            thread.join(max(end - time.monotonic(), 0.1))
        while (alive := _listens(port)) and time.monotonic() < end:
            time.sleep(0.002)
        return not alive

    def _hand_back(self) -> bool:
        """Unregisters what was registered here. True only when nothing of ours runs and nobody is connected."""
        if self._engine is not None:
            self._engine.batch_unregister_memory(self._registered)
            self._engine = None
        try:
            return self._drained and not arriving(read_table(self._data_ports), self._data_ports, None)
        except OSError:
            return False


class _Address(msgspec.Struct, frozen=True, tag="mooncake", tag_field="plane"):
    """``ranges``: (address, bytes) that may be written; ``addresses``: IP addresses from which the peer may connect."""

    process: ProcessIdentity
    incarnation: str
    addresses: tuple[str, ...]
    session: str
    transport: str
    data_ports: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]


class _Peer:
    def __init__(self, queue: PeerQueue, address: _Address) -> None:
        self.queue = queue
        self.table = RangeTable(address.ranges)
        self.detached = False


def _transfer_engine() -> type[Any]:
    from mooncake.engine import TransferEngine

    return TransferEngine  # type: ignore[no-any-return]


def _decode(address: bytes) -> _Address:
    """Raises ValueError for nonsense."""
    try:
        decoded = msgspec.json.decode(address, type=_Address)
        RangeTable(decoded.ranges)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"not an address of data plane 'mooncake': {error}") from error
    if not _SESSION.fullmatch(decoded.session):
        raise ValueError(f"not an address of data plane 'mooncake': session {decoded.session[:64]!r}")
    return decoded


def _peer_at(address: bytes) -> _Address | None:
    """None, any peer: no address, or nonsense."""
    try:
        return _decode(address) if address else None
    except ValueError:
        return None


def _first_contact(
    engine: Any, session: str, own: tuple[tuple[int, int], ...], peer: tuple[tuple[int, int], ...]
) -> str:
    """Blocks for up to a minute; why there is no contact, or nothing. An empty write makes the engine open the peer."""
    if (code := engine.send_probe(session)) != 0:
        return f"{session} does not answer Mooncake's probe (error {code})"
    if own and peer:
        handle = engine.transfer_submit_write(session, own[0][0], peer[0][0], 0)
        if handle in NO_HANDLE:
            return f"Mooncake cannot open {session}"
        while (status := engine.transfer_check_status(handle)) == 0:
            time.sleep(0.000_1)
        return "" if status == 1 else f"the first, empty write to {session} failed"
    return ""


def _may_be_ending(peer: _Address) -> bool:
    """A process gives up its list of files before it closes them; one whose list cannot be seen may be doing so."""
    process = peer.process
    if process.boot != own_identity().boot:
        return False
    return not process.visible or (process.alive and not socket_inodes(process.pid))


def _listens(port: int) -> bool:
    """True too where it cannot be told now, as without a free file descriptor: it is asked again."""
    held = socket_inodes(os.getpid())
    try:
        table = read_table(frozenset({port}))
    except OSError:
        return True
    return held is None or any(each.local[1] == port and each.inode in held for each in table)


def _leak(plane: MooncakeDataPlane | None) -> None:
    """In a forked child the engine has no threads: destroying it there would hang the child at its exit."""
    if plane is not None and plane._engine is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(plane._engine))
