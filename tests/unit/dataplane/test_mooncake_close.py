"""A close that found something left is called again, and looks again (docs/operations.md, drain)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvgrpc.dataplane.mooncake import plane as mooncake
from kvgrpc.dataplane.mooncake.connections import ESTABLISHED, FIN_WAIT1, Connection
from kvgrpc.dataplane.mooncake.start import StartedEngine
from kvgrpc.dataplane.shm.process import socket_inodes

PEER = 15_001


class Kernel:
    """The connections that the host has; ``readable``: whether the table can be read."""

    def __init__(self) -> None:
        self.table: list[Connection] = []
        self.readable = True

    def read(self, ports: frozenset[int] | None = None) -> list[Connection]:
        if not self.readable:
            raise OSError("no file can be opened")
        return self.table


def to_peer(state: int, inode: int) -> Connection:
    return Connection(("10.0.0.1", 40_000), ("10.0.0.2", PEER), state, 4096, 0, inode)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(mooncake, "read_table", made.read)
    return made


@pytest.fixture
def inode() -> Iterator[int]:
    """Of a socket that this process holds."""
    before = socket_inodes(os.getpid()) or frozenset()
    with socket.socket():
        yield next(iter((socket_inodes(os.getpid()) or frozenset()) - before))


def plane_of(owned: bool) -> mooncake.MooncakeDataPlane:
    engine = SimpleNamespace(batch_unregister_memory=lambda addresses: 0)
    made = mooncake.MooncakeDataPlane.__new__(mooncake.MooncakeDataPlane)
    made._use(StartedEngine(engine, "127.0.0.1:1", "tcp", frozenset({PEER + 1})), owned=owned)
    made._peer_ports = frozenset({PEER})
    return made


def test_a_close_that_ran_out_of_time_looks_again(kernel: Kernel, inode: int) -> None:
    plane = plane_of(owned=True)
    kernel.table = [to_peer(ESTABLISHED, inode)]
    original = plane._destroy

    def destroy(end: float) -> bool:
        kernel.table = [to_peer(FIN_WAIT1, 0)]
        return original(end)

    plane._destroy = destroy  # type: ignore[method-assign]
    assert not plane.close(0.2), "a stopped peer has not taken all yet"
    assert not plane.close(0.05)
    kernel.table = []
    assert plane.close(0.2)
    kernel.table = [to_peer(FIN_WAIT1, 0)]
    assert plane.close(0.0), "what came later is another's"


def test_a_table_that_could_not_be_read_before_the_end_is_read_after_it(kernel: Kernel) -> None:
    plane = plane_of(owned=True)
    kernel.readable = False
    assert not plane.close(0.2)
    kernel.readable, kernel.table = True, [to_peer(FIN_WAIT1, 0)]
    assert not plane.close(0.05), "it may be ours"
    kernel.table = []
    assert plane.close(0.2)


def test_an_engine_of_somebody_else_is_looked_at_again(kernel: Kernel) -> None:
    plane = plane_of(owned=False)
    kernel.table = [Connection(("10.0.0.1", PEER + 1), ("10.0.0.2", 40_000), ESTABLISHED, 0, 0, 7)]
    assert not plane.close(0.1), "a peer is connected"
    kernel.table = []
    assert plane.close(0.1)
