"""Which connections could still bring a peer's bytes, from tables as the kernel writes them."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvgrpc.dataplane.mooncake import connections, plane
from kvgrpc.dataplane.mooncake.connections import (
    CLOSE_WAIT,
    ESTABLISHED,
    FIN_WAIT1,
    FIN_WAIT2,
    LAST_ACK,
    LISTEN,
    SYN_RECV,
    SYN_SENT,
    TIME_WAIT,
    Connection,
    UnsentBytes,
    _local_of_trie,
    arriving,
    parse,
    read_table,
    unheld,
)

# Captured on a machine where two processes (sockets 500 and 600) are connected to our data port 15764 = 0x3D94 (dual
# stack: our end is in tcp6), a killed process left a connection (inode 0), the other end of 0x9605 is gone, one waits
# in the accept queue, and 203.0.113.9 is another host.
TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:3E70 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 15636 1 0000 100 0 0 10 0
   1: 0100007F:9600 0100007F:3D94 01 00000000:00000000 00:00000000 00000000     0        0 500 1 0000 20 4 30 10 -1
   2: 0100007F:9602 0100007F:3D94 01 000F0000:00000000 01:00000014 00000000     0        0 600 2 0000 20 4 30 10 -1
   3: 0100007F:9604 0100007F:3D94 04 000F0000:00000000 01:00000014 00000000     0        0 0 2 0000 20 4 30 10 -1
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when
   0: 00000000000000000000000000000000:3D94 00000000000000000000000000000000:0000 0A 00000000:00000000 00:0 0 0 0 15638
   1: 0000000000000000FFFF00000100007F:3D94 0000000000000000FFFF00000100007F:9600 01 00000000:00000000 00:0 0 0 0 700 1
   2: 0000000000000000FFFF00000100007F:3D94 0000000000000000FFFF00000100007F:9602 01 00000000:00400000 00:0 0 0 0 701 1
   3: 0000000000000000FFFF00000100007F:3D94 0000000000000000FFFF00000100007F:9604 08 00000000:00400001 00:0 0 0 0 702 1
   4: 0000000000000000FFFF00000100007F:3D94 0000000000000000FFFF00000100007F:9605 08 00000000:00400001 00:0 0 0 0 704 1
   5: 0000000000000000FFFF0000020200C0:3D94 0000000000000000FFFF0000097100CB:C001 01 00000000:00000010 00:0 0 0 0 0 1
   6: 0000000000000000FFFF00000100007F:3D94 0000000000000000FFFF00000100007F:9700 06 00000000:00000000 00:0 0 0 0 0 1
   7: 000080FE00000000FF00FC000100FEFF:3D94 000080FE00000000FF00FC000100FEFF:9701 01 00000000:00000000 00:0 0 0 0 703 1
"""
PORTS = frozenset({15764})
TABLE = parse(TCP) + parse(TCP6)


HERE = frozenset({"127.0.0.1", "::1", "192.0.2.2"})


def left(
    addresses: frozenset[str] | None = HERE,
    unsure: bool = False,
    tables: Sequence[list[Connection]] = (TABLE, TABLE),
) -> set[int]:
    """Remote ports of what lingers."""
    before, after = tables
    return {each.remote[1] for each in unheld(before, after, unsure, PORTS, addresses)}


def test_rows_are_read_with_their_numbers_and_ipv4_in_ipv6_as_ipv4() -> None:
    row = parse(TCP6)[2]
    assert row == Connection(("127.0.0.1", 15764), ("127.0.0.1", 0x9602), ESTABLISHED, 0, 0x400000, 701)
    assert row.name == "127.0.0.1:38402>127.0.0.1:15764"
    assert parse(TCP6)[7].local == ("fe80::fc:ff:fffe:1", 15764)


def test_only_rows_with_a_wanted_port_are_read() -> None:
    assert [each.inode for each in parse(TCP, PORTS)] == [500, 600, 0]
    assert parse(TCP, frozenset()) == []


@pytest.mark.parametrize("text", ["", "nonsense", "a b c d e f g h i j k", "0: 01:02 zz 0A 0:0 0 0 0 0 1", TCP[:300]])
def test_nonsense_is_skipped(text: str) -> None:
    assert all(isinstance(each, Connection) for each in parse(text))


def test_from_another_host_its_addresses_decide() -> None:
    assert [each.remote[1] for each in arriving(TABLE, PORTS, frozenset({"203.0.113.9"}))] == [0xC001]
    assert arriving(TABLE, PORTS, frozenset({"203.0.113.10"})) == []
    assert arriving(TABLE, frozenset({1}), None) == []


def test_connections_that_a_living_process_of_this_host_holds_do_not_linger() -> None:
    assert left() == {0x9604, 0x9605}, "its holder was killed; its other end is gone"


def test_an_unknown_peer_may_be_behind_any_connection_that_nobody_here_holds() -> None:
    assert left(None) == {0x9604, 0x9605, 0xC001, 0x9701}


def test_of_another_host_every_connection_counts() -> None:
    assert left(frozenset({"203.0.113.9"})) == {0xC001}


def test_while_a_process_is_ending_its_sockets_prove_nothing() -> None:
    assert {0x9600, 0x9602} <= left(unsure=True)


@pytest.mark.parametrize("answers", [[True, False], [False, True]])
def test_a_process_may_have_been_ending_before_or_after_the_tables_were_read(
    answers: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, ending = object(), iter(answers)
    looking = plane.MooncakeDataPlane.__new__(plane.MooncakeDataPlane)
    looking._data_ports = PORTS
    monkeypatch.setattr(plane, "_peer_at", lambda address: peer)
    monkeypatch.setattr(looking, "_addresses_of", lambda peer: HERE)
    monkeypatch.setattr(plane, "read_table", lambda ports: TABLE)
    monkeypatch.setattr(plane, "_may_be_ending", lambda peer: next(ending))
    (found,) = looking.connections_from_each([b"of the peer"])
    assert len(found) == len(left(unsure=True)) > len(left())


def test_a_socket_that_changes_while_we_look_counts() -> None:
    later = [each if each.inode != 600 else Connection(each.local, each.remote, FIN_WAIT1, 9, 0, 0) for each in TABLE]
    sooner = [
        each if each.inode != 500 else Connection(each.local, each.remote, ESTABLISHED, 0, 0, 9) for each in TABLE
    ]
    assert {0x9600, 0x9602} <= left(tables=(sooner, later))


@pytest.mark.parametrize(
    ("state", "inode", "delivers"),
    [
        (ESTABLISHED, 7, True),
        (ESTABLISHED, 0, True),  # waits to be accepted
        (CLOSE_WAIT, 0, True),
        (SYN_RECV, 0, True),
        (FIN_WAIT1, 7, True),  # shut down for writing, still read
        (FIN_WAIT1, 0, False),  # closed here: what comes is thrown away
        (FIN_WAIT2, 0, False),
        (LAST_ACK, 0, False),
        (LISTEN, 7, False),
        (SYN_SENT, 7, False),
        (TIME_WAIT, 0, False),
    ],
)
def test_only_a_connection_that_we_read_delivers(state: int, inode: int, delivers: bool) -> None:
    assert Connection(("127.0.0.1", 1), ("127.0.0.1", 2), state, 0, 0, inode).delivers is delivers


def test_addresses_of_this_host_come_from_the_routing_table() -> None:
    trie = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
           |-- 127.0.0.0
              /8 host LOCAL
           |-- 127.0.0.1
              /32 host LOCAL
           |-- 192.0.2.2
              /32 host LOCAL
        |-- 192.0.2.255
           /32 link BROADCAST
"""
    assert _local_of_trie(trie) == ["127.0.0.1", "192.0.2.2"]


def test_the_kernel_of_this_machine_writes_tables_that_can_be_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(b"not read yet")
        port = frozenset({server.getsockname()[1]})
        rows = {(each.local, each.remote): each for each in read_table(port)}
        waiting = rows[server.getsockname(), client.getsockname()]
        assert rows[client.getsockname(), server.getsockname()].inode == os.fstat(client.fileno()).st_ino
        assert (waiting.state, waiting.inode, waiting.unread) == (ESTABLISHED, 0, 12)
        assert arriving(rows.values(), port, None) == [waiting]


def test_a_table_that_cannot_be_read_is_none_without_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no file descriptor left a dead peer had no connections, and its pages came back while bytes arrived."""

    def none_left(*_: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    def no_ipv6(name: str) -> Any:
        if name.endswith("tcp6"):
            raise FileNotFoundError(name)
        return open(name)

    monkeypatch.setattr(connections, "open", none_left, raising=False)
    with pytest.raises(OSError, match="Too many"):
        read_table()
    assert UnsentBytes(PORTS)(0.0), "may have some left"
    monkeypatch.setattr(connections, "open", no_ipv6, raising=False)
    assert isinstance(read_table(), list)


def test_an_engine_counts_as_there_while_nobody_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a free file descriptor it counted as gone: its memory would have been given back under it."""
    monkeypatch.setattr(plane, "socket_inodes", lambda pid: None)
    monkeypatch.setattr(plane, "read_table", lambda ports: [])
    assert plane._listens(15_000)
    monkeypatch.setattr(plane, "socket_inodes", lambda pid: frozenset())
    assert not plane._listens(15_000)


def test_bytes_of_a_write_that_failed_right_after_a_look_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the 10 ms in which it does not look again for what was known before."""
    rows: list[Connection] = []
    looks = []

    def table(ports: frozenset[int]) -> list[Connection]:
        looks.append(ports)
        return rows

    monkeypatch.setattr(connections, "read_table", table)
    monkeypatch.setattr(connections, "_LOOK_AGAIN_SECONDS", 600.0)
    unsent, first = UnsentBytes(PORTS), time.monotonic()
    assert not unsent(first) and not unsent(first) and len(looks) == 1
    rows.append(Connection(("127.0.0.1", 38402), ("127.0.0.1", 15764), FIN_WAIT1, 4 * 2**20, 0, 0))
    assert unsent(time.monotonic()), "the engine closed its connection after the look"
