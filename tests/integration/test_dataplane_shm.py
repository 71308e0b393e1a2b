"""Shared memory between real processes: contents, death, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvgrpc.dataplane.base import MemoryRange, Outcome
from kvgrpc.dataplane.shm.plane import ShmDataPlane
from kvgrpc.errors import PeerUnreachable
from tests.support.dataplane_process import PlaneProcess, digest, noise, u64, view
from tests.support.faults.dataplane import wait
from tests.support.waiting import wait_until

MIB = 1 << 20
NBYTES = 64 * MIB


@pytest.fixture(scope="module")
def plane() -> Iterator[ShmDataPlane]:
    plane = ShmDataPlane()
    yield plane
    plane.close(1.0)


@pytest.fixture(scope="module")
def source(plane: ShmDataPlane) -> int:
    block = plane.allocate(NBYTES)
    plane.register([MemoryRange(block, NBYTES)])
    view(block, NBYTES)[:] = noise(NBYTES, 1)
    return block


@pytest.fixture
def peer() -> Iterator[PlaneProcess]:
    with PlaneProcess("shm", NBYTES) as process:
        yield process


def test_contents_arrive_whole_and_fragmented(plane: ShmDataPlane, source: int, peer: PlaneProcess) -> None:
    attached = plane.attach(peer.address)
    result = wait(plane.submit(attached, *u64(source, peer.block, NBYTES)))
    assert (result.outcome, result.nbytes) == (Outcome.DONE, NBYTES)
    assert peer.digest(0, NBYTES) == digest(view(source, NBYTES))

    order = np.random.default_rng(2).permutation(10_000).astype(np.uint64)
    offsets = np.arange(10_000, dtype=np.uint64) * np.uint64(4096)
    columns = offsets + np.uint64(source), order * np.uint64(4096) + np.uint64(peer.block)
    assert wait(plane.submit(attached, *columns, np.full(10_000, 4096, dtype=np.uint64))).outcome is Outcome.DONE
    expected = np.empty((10_000, 4096), dtype=np.uint8)
    expected[order] = view(source, 10_000 * 4096).reshape(10_000, 4096)
    assert peer.digest(0, 10_000 * 4096) == digest(expected)


def test_two_peers_at_once(plane: ShmDataPlane, source: int, peer: PlaneProcess) -> None:
    with PlaneProcess("shm", NBYTES) as other:
        running = [plane.submit(plane.attach(each.address), *u64(source, each.block, NBYTES)) for each in (peer, other)]
        polls = 0
        while None in [transfer.poll() for transfer in running]:
            polls += 1
        assert polls >= 3, "slices of both in turn"
        assert peer.digest(0, NBYTES) == other.digest(0, NBYTES) == digest(view(source, NBYTES))


def test_a_peer_killed_during_a_write_harms_nobody(plane: ShmDataPlane, source: int, peer: PlaneProcess) -> None:
    attached = plane.attach(peer.address)
    transfer = plane.submit(attached, *u64(source, peer.block, NBYTES))
    assert transfer.poll() is None
    peer.kill()
    assert wait(transfer).outcome is Outcome.DONE, "its memory is still mapped here"
    with pytest.raises(PeerUnreachable, match="gone"):
        plane.attach(peer.address)


def test_a_stopped_peer_receives_all_the_same(plane: ShmDataPlane, source: int, peer: PlaneProcess) -> None:
    peer.signal(signal.SIGSTOP)
    assert wait(plane.submit(plane.attach(peer.address), *u64(source, peer.block, MIB))).outcome is Outcome.DONE
    peer.signal(signal.SIGCONT)
    assert peer.digest(0, MIB) == digest(view(source, MIB))


def test_nothing_is_left_of_killed_processes(plane: ShmDataPlane, source: int, peer: PlaneProcess) -> None:
    before = {fields[4] for fields in mapped()}
    attached = plane.attach(peer.address)
    inodes = {os.stat(f"/proc/{peer.process.pid}/fd/{name}").st_ino for name in memfds(peer.process.pid)}
    assert inodes
    peer.kill()
    assert not [name for name in os.listdir("/dev/shm") if "kvgrpc" in name]
    plane.detach(attached)
    del attached
    gc.collect()
    # The last mapping goes, and with it the memory, once the thread that touches new memory has ended too.
    wait_until(lambda: not [fields for fields in mapped() if int(fields[4]) in inodes])
    assert {fields[4] for fields in mapped()} <= before, "only what this process had before"


def mapped() -> list[list[str]]:
    """The lines of this process's shared memory of ours; column 4 is the inode."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split() for line in lines if "memfd:kvgrpc" in line]


def memfds(pid: int) -> list[str]:
    names = os.listdir(f"/proc/{pid}/fd")
    return [name for name in names if os.readlink(f"/proc/{pid}/fd/{name}").startswith("/memfd:kvgrpc")]
