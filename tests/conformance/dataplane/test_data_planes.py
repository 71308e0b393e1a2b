"""What every data plane keeps, whatever carries its bytes: the suite that a new one passes. Real processes.

A plane of its own kind (who notices a death how, and when) is tested in tests/integration/test_dataplane_*.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvgrpc.dataplane
from kvgrpc.dataplane.base import DataPlane, MemoryRange, Outcome, Transfer
from kvgrpc.errors import FeatureDisabled, PeerUnreachable
from tests.support.dataplane_process import PlaneProcess, digest, noise, u64, view
from tests.support.faults.dataplane import wait

MIB = 1 << 20
NBYTES = 8 * MIB
SECONDS = 60.0


class Writer:
    """The plane under test, with a registered block full of noise."""

    def __init__(self, name: str) -> None:
        self.plane: DataPlane = kvgrpc.dataplane.open_plane(name)
        self.block = self.plane.allocate(NBYTES)
        self.plane.register([MemoryRange(self.block, NBYTES)])
        self.memory = view(self.block, NBYTES)
        self.memory[:] = noise(NBYTES, 1)

    def write(self, peer: PlaneProcess, source: int, destination: int, nbytes: int) -> Transfer:
        attached = self.plane.attach(peer.address)
        return self.plane.submit(attached, *u64(self.block + source, peer.block + destination, nbytes))


@pytest.fixture(scope="module", params=kvgrpc.dataplane.NAMES)
def writer(request: pytest.FixtureRequest) -> Iterator[Writer]:
    try:
        writer = Writer(request.param)
    except FeatureDisabled as missing:
        pytest.skip(str(missing))
    yield writer
    assert writer.plane.close(15.0), "nothing is left of what these tests did"


@pytest.fixture(scope="module")
def peer(writer: Writer) -> Iterator[PlaneProcess]:
    with PlaneProcess(writer.plane.name, NBYTES) as process:
        yield process


def test_done_means_in_place_in_one_piece_and_in_many(writer: Writer, peer: PlaneProcess) -> None:
    result = wait(writer.write(peer, 0, 0, NBYTES), SECONDS)
    assert (result.outcome, result.nbytes) == (Outcome.DONE, NBYTES)
    assert peer.digest(0, NBYTES) == digest(writer.memory)

    count, size = 1_000, 4096
    order = np.random.default_rng(2).permutation(count)
    starts = np.arange(count) * size
    columns = u64(starts + writer.block, order * size + peer.block, np.full(count, size))
    result = wait(writer.plane.submit(writer.plane.attach(peer.address), *columns), SECONDS)
    assert (result.outcome, result.nbytes) == (Outcome.DONE, count * size)
    expected = np.empty((count, size), np.uint8)
    expected[order] = writer.memory[: count * size].reshape(count, size)
    assert peer.digest(0, count * size) == digest(expected)


def test_nothing_at_all_is_done_too(writer: Writer, peer: PlaneProcess) -> None:
    attached = writer.plane.attach(peer.address)
    for columns in (u64([], [], []), u64([writer.block] * 2, [peer.block] * 2, [0, 0])):
        assert wait(writer.plane.submit(attached, *columns), SECONDS).outcome is Outcome.DONE


@pytest.mark.parametrize("wrong", ["source", "destination", "past the end"])
def test_a_descriptor_outside_is_rejected_whole_and_its_neighbours_are_not_sent(
    writer: Writer, peer: PlaneProcess, wrong: str
) -> None:
    before = peer.digest(0, NBYTES)
    bad = {
        "source": (16, peer.block),
        "destination": (writer.block, 16),
        "past the end": (writer.block, peer.block + NBYTES - 1),
    }[wrong]
    columns = u64([writer.block + MIB, bad[0]], [peer.block, bad[1]], [4096, 4096])
    result = wait(writer.plane.submit(writer.plane.attach(peer.address), *columns), SECONDS)
    assert (result.outcome, result.nbytes) == (Outcome.REJECTED, 0) and result.detail
    assert before == peer.digest(0, NBYTES), "nothing of it was sent"
    assert wait(writer.write(peer, 0, 0, 4096), SECONDS).outcome is Outcome.DONE, "others go on"


def test_a_result_stays(writer: Writer, peer: PlaneProcess) -> None:
    transfer = writer.write(peer, 0, 0, MIB)
    result = wait(transfer, SECONDS)
    transfer.stop()
    assert transfer.poll() == result == transfer.poll()


def test_a_stopped_submission_ends_and_says_what_is_certain(writer: Writer, peer: PlaneProcess) -> None:
    count = 20_000
    columns = u64(np.full(count, writer.block), np.full(count, peer.block), np.full(count, 4096))
    transfer = writer.plane.submit(writer.plane.attach(peer.address), *columns)
    transfer.poll()
    transfer.stop()
    result = wait(transfer, SECONDS)
    assert result.outcome in (Outcome.REJECTED, Outcome.DONE), "its peer lives: no byte is on its way"
    assert (result.nbytes == count * 4096) == (result.outcome is Outcome.DONE)


def test_a_peer_that_is_detached_gets_what_was_submitted_and_nothing_more(writer: Writer, peer: PlaneProcess) -> None:
    attached = writer.plane.attach(peer.address)
    columns = u64(writer.block, peer.block, NBYTES)
    transfer = writer.plane.submit(attached, *columns)
    transfer.poll()
    writer.plane.detach(attached)
    result = wait(transfer, SECONDS)
    assert (result.outcome, result.nbytes) == (Outcome.DONE, NBYTES)
    assert peer.digest(0, NBYTES) == digest(writer.memory)
    assert wait(writer.plane.submit(attached, *columns), SECONDS).outcome is Outcome.REJECTED


@pytest.mark.parametrize("nonsense", [b"", b"{}", b"\xff", b'{"plane":"another"}', b"\x00" * 70_000])
def test_nonsense_is_no_address(writer: Writer, nonsense: bytes) -> None:
    with pytest.raises(ValueError):
        writer.plane.attach(nonsense)


def test_a_peer_killed_during_a_write_ends_it_and_harms_no_other(writer: Writer, peer: PlaneProcess) -> None:
    with PlaneProcess(writer.plane.name, NBYTES) as mortal:
        assert wait(writer.write(mortal, 0, 0, 4096), SECONDS).outcome is Outcome.DONE
        dying, living = writer.write(mortal, 0, 0, NBYTES), writer.write(peer, 0, 0, NBYTES)
        dying.poll()
        mortal.kill()
        assert wait(living, SECONDS).outcome is Outcome.DONE
        wait(dying, SECONDS)  # any outcome, in time
        assert later(writer, mortal) in (None, Outcome.REJECTED, Outcome.FAILED_SRC_FREE)
    assert peer.digest(0, NBYTES) == digest(writer.memory)


def later(writer: Writer, gone: PlaneProcess) -> Outcome | None:
    """How a write to a peer that is gone ends; None: it cannot even be attached."""
    try:
        return wait(writer.write(gone, 0, 0, 4096), SECONDS).outcome
    except PeerUnreachable:
        return None


def test_memory_that_was_allocated_is_zeroed_aligned_and_apart(writer: Writer) -> None:
    blocks = sorted(writer.plane.allocate(4096) for _ in range(3))
    assert all(block % 4096 == 0 and not view(block, 4096).any() for block in blocks)
    assert all(second - first > 4096 for first, second in itertools.pairwise(blocks))
    writer.plane.register([MemoryRange(writer.block, NBYTES)])  # a repeat is harmless


def test_a_closed_plane_refuses_and_may_be_closed_again(peer: PlaneProcess, writer: Writer) -> None:
    other = Writer(writer.plane.name)
    attached = other.plane.attach(peer.address)
    transfer = other.plane.submit(attached, *u64(other.block, peer.block, NBYTES))
    assert other.plane.close(15.0)
    ended: Any = wait(transfer, SECONDS)
    assert ended.outcome in (Outcome.DONE, Outcome.REJECTED, Outcome.FAILED_SRC_FREE)
    assert other.plane.close(1.0)
