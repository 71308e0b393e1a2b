"""Shared memory within one process: the same bytes as a numpy copy, and every refusal with its reason."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrpc.dataplane.base import MemoryRange, Outcome, Result, Transfer, U64Array
from kvgrpc.dataplane.shm import plane as shm
from kvgrpc.dataplane.shm import segments
from kvgrpc.dataplane.shm.copying import SLICE_BYTES
from kvgrpc.dataplane.shm.plane import ShmDataPlane
from kvgrpc.errors import FeatureDisabled, PeerUnreachable
from tests.support.faults.dataplane import wait
from tests.support.waiting import wait_until

BLOCK = 1 << 16


class Plane(ShmDataPlane):
    """Two blocks of 64 KiB, and a peer that is the plane itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [self.allocate(BLOCK) for _ in range(2)]
        self.views = [view(block, BLOCK) for block in self.blocks]
        self.peer = self.attach(self.address())

    def write(self, *rows: tuple[int, int, int]) -> Transfer:
        """Rows: own address, peer's address, bytes."""
        return self.submit(self.peer, *u64(*rows))


@pytest.fixture
def plane() -> Iterator[Plane]:
    plane = Plane()
    yield plane
    plane.close(1.0)


@pytest.fixture(scope="module")
def shared() -> Iterator[Plane]:
    plane = Plane()
    yield plane
    plane.close(1.0)


def view(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def u64(*rows: tuple[int, int, int]) -> tuple[U64Array, U64Array, U64Array]:
    columns = np.array(rows, dtype=np.uint64).reshape(-1, 3)
    return columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy()


def changed(address: bytes, **fields: object) -> bytes:
    decoded = msgspec.json.decode(address)
    for name, value in fields.items():
        decoded["process" if name in decoded["process"] else name] = (
            {**decoded["process"], name: value} if name in decoded["process"] else value
        )
    return msgspec.json.encode(decoded)


@given(st.lists(st.tuples(st.integers(0, BLOCK - 300), st.integers(0, 300)), max_size=200))
@settings(deadline=None, max_examples=50)
def test_what_arrives_is_what_a_numpy_copy_gives(shared: Plane, rows: list[tuple[int, int]]) -> None:
    source, target = shared.views
    source[:] = np.random.default_rng(len(rows)).integers(1, 255, BLOCK, dtype=np.uint8)
    target[:] = 0
    expected = np.zeros_like(target)
    placed = [(start, 320 * number, nbytes) for number, (start, nbytes) in enumerate(rows)]
    for start, where, nbytes in placed:
        expected[where : where + nbytes] = source[start : start + nbytes]
    result = wait(shared.write(*((shared.blocks[0] + s, shared.blocks[1] + d, n) for s, d, n in placed)))
    assert result == Result(Outcome.DONE, "", sum(nbytes for _, nbytes in rows))
    assert (target == expected).all()


def test_allocated_memory_is_zeroed_page_aligned_and_never_adjacent() -> None:
    plane = ShmDataPlane()
    blocks = sorted(plane.allocate(8192) for _ in range(8))
    assert all(block % 4096 == 0 and not view(block, 8192).any() for block in blocks)
    assert all(later - block > 8192 for block, later in itertools.pairwise(blocks))
    plane.close(1.0)


def test_a_descriptor_outside_is_rejected_and_nothing_of_the_submission_is_written(plane: Plane) -> None:
    source, target = plane.blocks
    plane.views[0][:] = 7
    for bad in [(source, target + BLOCK, 1), (source, target - 1, 2), (source, target + 8, BLOCK - 7), (source, 8, 4)]:
        result = wait(plane.write((source, target, 16), bad))
        assert result.outcome is Outcome.REJECTED
        assert "descriptor 1" in result.detail and "peer's memory" in result.detail
    result = wait(plane.write((source, target, 16), (source + BLOCK, target, 1)))
    assert result.outcome is Outcome.REJECTED
    assert "plane.allocate()" in result.detail
    assert not plane.views[1].any()
    assert wait(plane.write((source, target, 16))).outcome is Outcome.DONE


def test_columns_that_do_not_fit_are_rejected_not_raised(plane: Plane) -> None:
    one, two = u64((plane.blocks[0], plane.blocks[1], 1)), u64((1, 1, 1), (2, 2, 2))
    assert wait(plane.submit(plane.peer, one[0], two[1], one[2])).outcome is Outcome.REJECTED
    assert wait(plane.submit(object(), *one)).outcome is Outcome.REJECTED


def test_an_empty_submission_is_done(plane: Plane) -> None:
    assert wait(plane.write()) == Result(Outcome.DONE)
    assert wait(plane.write((plane.blocks[0], plane.blocks[1] + BLOCK, 0))) == Result(Outcome.DONE)


def test_a_long_copy_takes_several_polls_and_stops_between_them() -> None:
    plane = ShmDataPlane()
    total = 4 * SLICE_BYTES
    source, target = plane.allocate(total), plane.allocate(total)
    view(source, total)[:] = 9
    transfer = plane.submit(plane.attach(plane.address()), *u64((source, target, total)))
    assert transfer.poll() is None
    transfer.stop()
    result = transfer.poll()
    assert result is not None and result.outcome is Outcome.REJECTED
    assert 0 < result.nbytes <= 2 * SLICE_BYTES
    arrived = view(target, total)
    # What the second thread copied behind a gap, on a machine that let the first one wait, is in place and not counted.
    assert arrived[: result.nbytes].all()
    assert result.nbytes <= np.count_nonzero(arrived) <= 2 * SLICE_BYTES
    assert transfer.poll() is result
    plane.close(1.0)


def test_stop_after_the_end_changes_nothing(plane: Plane) -> None:
    transfer = plane.write((plane.blocks[0], plane.blocks[1], 16))
    result = wait(transfer)
    transfer.stop()
    assert transfer.poll() is result


def test_registering_only_checks(plane: Plane) -> None:
    plane.register([MemoryRange(plane.blocks[0] + 5, 100), MemoryRange(plane.blocks[1], BLOCK)])
    own = np.zeros(64, dtype=np.uint8)
    with pytest.raises(ValueError, match=r"plane\.allocate"):
        plane.register([MemoryRange(int(own.ctypes.data), 64)])
    with pytest.raises(ValueError, match="mooncake"):
        plane.register([MemoryRange(plane.blocks[0], 16, "cuda:0")])


def test_allocation_refuses_what_it_cannot_give(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    for nbytes, location in [(0, "cpu:0"), (-1, "cpu:0"), (16, "cuda:1")]:
        with pytest.raises(ValueError):
            plane.allocate(nbytes, location)
    with pytest.raises(MemoryError):
        plane.allocate(1 << 60)
    monkeypatch.setattr(shm, "MAX_SEGMENTS", 2)
    with pytest.raises(ValueError, match="few large"):
        plane.allocate(16)


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"\xff\x00", b"{}", b"[]", b"null", b'{"plane":"shm"}', b'{"plane":"mooncake"}', b"x" * 70_000],
)
def test_nonsense_is_no_address(plane: Plane, nonsense: bytes) -> None:
    with pytest.raises(ValueError, match="address"):
        plane.attach(nonsense)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"boot": "another"}, ValueError, "another host.*use 'mooncake'"),
        ({"pids": "pid:[1]"}, ValueError, "pid namespace"),
        ({"start": 1}, PeerUnreachable, "gone"),
        ({"pid": 2**22 + 1}, PeerUnreachable, "gone"),
        ({"token": "0" * 32}, PeerUnreachable, "used again"),
        ({"segments": [[4096, 100, 0]]}, PeerUnreachable, "memory"),
        ({"segments": [[4096, 100, 65_000]]}, PeerUnreachable, "memory is gone"),
        ({"segments": [[4096, 0, 3]]}, ValueError, "not an address"),
    ],
)
def test_an_address_that_cannot_be_reached_says_why(
    plane: Plane, fields: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        plane.attach(changed(plane.address(), **fields))


def test_a_peer_that_claims_more_than_its_segment_is_refused(plane: Plane) -> None:
    (first, nbytes, descriptor), *_ = msgspec.json.decode(plane.address())["segments"]
    with pytest.raises(ValueError, match="shorter"):
        plane.attach(changed(plane.address(), segments=[[first, nbytes + 8192, descriptor]]))


def test_a_segment_that_could_shrink_is_refused(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.memfd_create(f"kvgrpc-{'a' * 32}-0")
    os.ftruncate(descriptor, 4096)
    with pytest.raises(ValueError, match="could become so"):
        plane.attach(changed(plane.address(), token="a" * 32, segments=[[1 << 30, 4096, descriptor]]))
    os.close(descriptor)


def test_a_detached_peer_takes_nothing_more_and_its_memory_is_unmapped(plane: Plane) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(f"kvgrpc-{plane._token}")

    assert mappings() == 4
    plane.detach(plane.peer)
    assert wait(plane.write((plane.blocks[0], plane.blocks[1], 1))).outcome is Outcome.REJECTED
    del plane.peer
    gc.collect()
    # The thread that touches the memory of a new peer knows it too, for as long as its round takes.
    wait_until(lambda: mappings() == 2)


def test_closing_ends_everything_and_leaves_no_memory_behind() -> None:
    plane = Plane()
    transfer = plane.write((plane.blocks[0], plane.blocks[1], BLOCK))
    late, peer = u64((plane.blocks[0], plane.blocks[1], 1)), plane.peer
    assert plane.close(1.0) and plane.close(1.0)
    assert wait(transfer).outcome is Outcome.REJECTED
    assert wait(plane.submit(peer, *late)).outcome is Outcome.REJECTED
    with pytest.raises(ValueError, match="closed"):
        plane.allocate(16)
    del plane.peer, peer, transfer
    gc.collect()
    # The thread that touches the memory of a new peer may still be at it.
    wait_until(lambda: f"kvgrpc-{plane._token}" not in Path("/proc/self/maps").read_text())


def test_the_address_is_small() -> None:
    plane = ShmDataPlane()
    for _ in range(shm.MAX_SEGMENTS):
        plane.allocate(4096)
    assert len(plane.address()) < 16 << 10
    plane.close(1.0)


def test_without_memfd_the_feature_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(FeatureDisabled, match="Linux"):
        ShmDataPlane()


def test_old_kernels_touch_memory_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "populate", lambda address, nbytes: False)
    segment = segments.create("test", 10_000)
    assert not view(segment.address, 10_000).any()
    segment.free()


def test_a_peer_is_attached_without_a_thread_that_touches_its_memory(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It only saves the first copies time; its rooms failed for want of it."""

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    plane.views[0][:10] = 7
    plane.peer = plane.attach(plane.address())
    assert wait(plane.write((plane.blocks[0], plane.blocks[1], 10))).outcome is Outcome.DONE
    assert (plane.views[1][:10] == 7).all()
