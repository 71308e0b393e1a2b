"""Finds TCP connections that could still deliver bytes of a sender that gave up or died: read from the kernel's tables.

A killed process, or an engine that closed the connection of a failed write, leaves bytes in socket buffers; they arrive
as long as the connection exists here. What can be told, and what not:

- From this host (same network namespace) the other end of a connection is in the same table. While a living process
  holds it, it is in use and brings only what that process still controls; it does not count. Closed or orphaned, or
  gone from the table, it counts. A process that is just ending is not trusted: then all count.
- From another host only the remote address is known. Connections in use count too, and those of other processes there:
  what waits for them waits until that host closes them, longer than needed, never shorter. So ask about dead peers
  only; of a living one a plane promises that FAILED_SRC_FREE is said when all bytes have left its host.
- A peer behind address translation shows an address that it does not know itself, and is not found: do not run bulk
  transfers through NAT.
- A connection that we have closed delivers nothing more; one that waits to be accepted does.
- RDMA has no connections in these tables.
"""

from __future__ import annotations

import ipaddress
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Endpoint = tuple[str, int]

ESTABLISHED, SYN_SENT, SYN_RECV, FIN_WAIT1, FIN_WAIT2, TIME_WAIT = 1, 2, 3, 4, 5, 6
CLOSE, CLOSE_WAIT, LAST_ACK, LISTEN, CLOSING = 7, 8, 9, 10, 11
_CANNOT_RECEIVE = {LISTEN, SYN_SENT, TIME_WAIT, CLOSE}
_CLOSED_HERE = {FIN_WAIT1, FIN_WAIT2, LAST_ACK, CLOSING}
_LOOK_AGAIN_SECONDS = 0.01
_NOTHING_TO_SEND = {LISTEN, SYN_SENT, SYN_RECV, FIN_WAIT2, TIME_WAIT, CLOSE}


@dataclass(frozen=True, slots=True)
class Connection:
    """One row of /proc/net/tcp or tcp6. ``inode`` 0: no process holds this end. IPv4 in IPv6 reads as IPv4."""

    local: Endpoint
    remote: Endpoint
    state: int
    unsent: int
    unread: int
    inode: int

    @property
    def name(self) -> str:
        """Without the inode, which is 0 until the connection is accepted: a name must not change while it delivers."""
        return "{}:{}>{}:{}".format(*self.remote, *self.local)

    @property
    def delivers(self) -> bool:
        """True if bytes could still come out of it here."""
        return self.state not in _CANNOT_RECEIVE and not (self.inode == 0 and self.state in _CLOSED_HERE)

    @property
    def sends(self) -> bool:
        """True if bytes could still leave it."""
        return self.state not in _NOTHING_TO_SEND


def parse(text: str, ports: frozenset[int] | None = None) -> list[Connection]:
    """Rows of one table in which one of ``ports`` occurs, at either end (None: all). Rows that are none are skipped."""
    wanted = None if ports is None else {f"{port:04X}" for port in ports}
    rows = []
    for line in text.splitlines():
        fields = line.split(None, 10)
        if len(fields) < 10 or (wanted is not None and wanted.isdisjoint((fields[1][-4:], fields[2][-4:]))):
            continue
        try:
            unsent, _, unread = fields[4].partition(":")
            numbers = int(fields[3], 16), int(unsent, 16), int(unread, 16), int(fields[9])
            rows.append(Connection(_endpoint(fields[1]), _endpoint(fields[2]), *numbers))
        except ValueError:
            continue
    return rows


def read_table(ports: frozenset[int] | None = None) -> list[Connection]:
    """TCP sockets of this network namespace, listening ones too; 3 to 12 us of CPU for each socket of the host.

    Raises OSError, as where no file can be opened: what was not read is no table without connections.
    """
    rows = []
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/self/net/{name}") as table:
                rows += parse(table.read(), ports)
        except FileNotFoundError:  # no IPv6
            continue
    return rows


def local_addresses() -> tuple[str, ...]:
    """IP addresses of this host that others may see, loopback too; at most 64."""
    found = []
    try:
        with open("/proc/self/net/fib_trie") as trie:
            found += _local_of_trie(trie.read())
        with open("/proc/self/net/if_inet6") as interfaces:
            found += [str(ipaddress.IPv6Address(int(line.split()[0], 16))) for line in interfaces]
    except (OSError, ValueError, IndexError):
        pass
    return tuple(sorted(set(found)))[:64]


def unheld(
    before: Iterable[Connection],
    after: Sequence[Connection],
    unsure: bool,
    ports: frozenset[int],
    addresses: frozenset[str] | None,
) -> list[Connection]:
    """Connections to our ``ports`` from ``addresses`` (None: any) that still deliver and that no process here holds.

    ``before`` and ``after``: the table, read twice, because it is no snapshot. ``unsure``: the peer's process may be in
    the middle of closing its sockets, which then look held.
    """
    coming = arriving(after, ports, addresses)
    if unsure or not coming:
        return coming
    first, second = ({(each.local, each.remote): each.inode for each in table} for table in (before, after))

    def is_held(connection: Connection) -> bool:
        other_end = (connection.remote, connection.local)
        return second.get(other_end, 0) != 0 and second[other_end] == first.get(other_end)

    return [each for each in coming if not is_held(each)]


def arriving(table: Iterable[Connection], ports: frozenset[int], addresses: frozenset[str] | None) -> list[Connection]:
    """Connections to our ``ports`` that still deliver, from ``addresses`` (None: from anywhere)."""
    return [
        each
        for each in table
        if each.local[1] in ports and each.delivers and (addresses is None or each.remote[0] in addresses)
    ]


class UnsentBytes:
    """Bytes that connections which this process closed, to these ports of any host, still have to send.

    ``since`` (``time.monotonic``): what was closed before then counts for certain, however lately it looked. Else it
    looks at most every 10 ms.

    After a time-out of the engine there are up to 4 MB in each, which arrive when a stopped peer goes on. The kernel
    gives them up when the peer's host resets the connection, or after minutes without an answer.
    """

    def __init__(self, ports: frozenset[int]) -> None:
        self._ports = ports
        self._looked = -1.0
        self._left = False

    def __call__(self, since: float) -> bool:
        now = time.monotonic()
        if self._ports and (self._looked < since or now - self._looked > _LOOK_AGAIN_SECONDS):
            try:
                table = read_table(self._ports)
            except OSError:  # asked again at the next poll
                return True
            self._left = any(each.remote[1] in self._ports and each.inode == 0 and each.sends for each in table)
            self._looked = now  # when it began: what was closed meanwhile is seen by the next look
        return self._left


def _endpoint(text: str) -> Endpoint:
    """0100007F:1F90 -> ("127.0.0.1", 8080): words of 32 bits in the byte order of the machine."""
    address, _, port = text.partition(":")
    words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    parsed = ipaddress.ip_address(packed)
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped:
        parsed = parsed.ipv4_mapped
    return str(parsed), int(port, 16)


def _local_of_trie(text: str) -> list[str]:
    """Addresses marked "/32 host LOCAL" in /proc/net/fib_trie."""
    found, leaf = [], ""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 2 and fields[0] == "|--":
            leaf = fields[1]
        elif fields == ["/32", "host", "LOCAL"] and leaf:
            found.append(leaf)
    return found
