"""All ways of copying copy the same bytes; memory that is not there is an error, not the end of the process."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgrpc.dataplane.shm import copying
from kvgrpc.dataplane.shm.copying import SLICE_BYTES, Copier, Pieces


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def pieces_of(source: np.ndarray, target: np.ndarray, rows: list[tuple[int, int, int]]) -> Pieces:
    s, t, n = (np.array(column, dtype=np.uint64) for column in zip(*rows, strict=True))
    return Pieces(s + np.uint64(address(source)), t + np.uint64(address(target)), n)


def copy_all(pieces: Pieces, step: Callable[[Pieces, int], int]) -> int:
    following = calls = 0
    while following < pieces.count:
        now = step(pieces, following)
        assert now > following
        following, calls = now, calls + 1
    return calls


def way_of(way: str) -> Callable[[Pieces, int], int]:
    """One way of a copier, which would copy all that is left."""
    copier = Copier()
    call = getattr(copier, way)
    return call if way in ("_hold", "copy") else lambda pieces, first: call(pieces, first, pieces.count)


@pytest.mark.parametrize("way", ["_hold", "_loop", "_call"])
@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 100)), min_size=1, max_size=30), st.randoms())
@settings(deadline=None, max_examples=30)
def test_every_way_copies_what_numpy_copies(way: str, rows: list[tuple[int, int]], random: object) -> None:
    source = np.arange(1000, dtype=np.uint8)
    target, expected = np.zeros(4000, dtype=np.uint8), np.zeros(4000, dtype=np.uint8)
    placed = [(start, 120 * number, nbytes) for number, (start, nbytes) in enumerate(rows)]
    for start, where, nbytes in placed:
        expected[where : where + nbytes] = source[start : start + nbytes]
    copy_all(pieces_of(source, target, placed), way_of(way))
    assert (target == expected).all()


@pytest.mark.parametrize("vectored", [False, True])
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 50)), max_size=40))
@settings(deadline=None, max_examples=50)
def test_pieces_that_follow_each_other_on_both_sides_are_copied_as_one(
    vectored: bool, rows: list[tuple[int, int, int]]
) -> None:
    """Gaps of 0 to 3 bytes before each of them, on either side."""
    source = np.random.default_rng(3).integers(0, 255, 3000, dtype=np.uint8)
    target, expected = np.zeros(3000, dtype=np.uint8), np.zeros(3000, dtype=np.uint8)
    at, to, placed = 0, 0, list[tuple[int, int, int]]()
    for skip, gap, nbytes in rows:
        at, to = at + skip, to + gap
        placed.append((at, to, nbytes))
        expected[to : to + nbytes] = source[at : at + nbytes]
        at, to = at + nbytes, to + nbytes
    columns = np.array(placed, np.uint64).reshape(-1, 3).T + np.array(
        [[address(source)], [address(target)], [0]], np.uint64
    )
    with pytest.MonkeyPatch.context() as patched:
        if not vectored:
            patched.setattr(copying, "_can_write_to_itself", lambda: False)
        Copier(helped=False).copy_whole(*columns)
    assert (target == expected).all()
    assert len(copying.joined(*columns)[0]) == sum(n == 0 or bool(skip or gap) for n, (skip, gap, _) in enumerate(rows))


@pytest.mark.parametrize("way", ["_loop", "_call"])
def test_more_pieces_than_one_system_call_takes(way: str) -> None:
    source = np.random.default_rng(0).integers(0, 255, 3000 * 16, dtype=np.uint8)
    target = np.zeros_like(source)
    rows = [(16 * n, 16 * (2999 - n), 16) for n in range(3000)]
    copy_all(pieces_of(source, target, rows), way_of(way))
    assert (target.reshape(-1, 16)[::-1] == source.reshape(-1, 16)).all()


@pytest.mark.parametrize("contended", [False, True])
def test_one_step_copies_a_slice_not_the_whole(contended: bool) -> None:
    source, copier = np.ones(5 * SLICE_BYTES, dtype=np.uint8), Copier()
    target = np.zeros_like(source)
    copier._contended = contended
    pieces = pieces_of(source, target, [(0, 0, len(source))])
    following = copier.copy(pieces, 0)
    assert 0 < pieces.done(following) <= 2 * SLICE_BYTES
    assert copy_all(pieces, copier.copy) >= 3
    assert target.all()


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("piece_bytes", [4 << 10, 32 << 10, 300_000, 6 << 20])
def test_large_copies_of_one_or_two_threads_are_whole(
    cores: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgrpc.dataplane.shm.copying.os.sched_getaffinity", lambda pid: set(range(cores)))
    source = np.random.default_rng(1).integers(0, 255, 41_000_000, dtype=np.uint8)
    target = np.zeros_like(source)
    starts = range(0, len(source), piece_bytes)
    rows = [
        (start, start, min(piece_bytes, len(source) - start)) for start in np.random.default_rng(2).permutation(starts)
    ]
    copier = Copier()
    copy_all(pieces_of(source, target, rows), copier.copy)
    copier.close()
    assert (target == source).all()


@pytest.mark.parametrize("half", [0, 1])
def test_memory_that_is_not_there_stops_both_halves_before_it(half: int) -> None:
    block = mmap.mmap(-1, 8 << 20)
    base = address(np.frombuffer(block, dtype=np.uint8))
    hole = half << 22
    assert copying._libc.mprotect(ctypes.c_void_p(base + hole), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    source = np.ones(8 << 20, dtype=np.uint8)
    offsets = np.arange(0, 8 << 20, 4096, dtype=np.uint64)
    pieces = Pieces(offsets + np.uint64(address(source)), offsets + np.uint64(base), np.full(2048, 4096, np.uint64))
    copier, following = Copier(), 0
    with pytest.raises(OSError, match="Bad address"):
        while following < pieces.count:
            following = copier.copy(pieces, following)
    assert pieces.done(following) <= hole


def test_memory_that_is_not_there_is_an_error_after_what_is_there_was_copied() -> None:
    block = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    hole = address(np.frombuffer(block, dtype=np.uint8)) + mmap.PAGESIZE
    assert copying._libc.mprotect(ctypes.c_void_p(hole), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    source = np.ones(64, dtype=np.uint8)
    target = np.zeros(64, dtype=np.uint8)
    at = np.array([address(target), hole], dtype=np.uint64)
    pieces = Pieces(np.full(2, address(source), dtype=np.uint64), at, np.full(2, 64, dtype=np.uint64))
    copier = Copier()
    assert copier._call(pieces, 0, 2) == 1
    assert target.all()
    with pytest.raises(OSError, match="Bad address"):
        copier._call(pieces, 1, 2)


def test_without_the_system_call_the_loop_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: object) -> int:
        raise PermissionError("seccomp")

    monkeypatch.setattr(copying, "_write", forbidden)
    copier = Copier()
    source, target = np.arange(20 << 14, dtype=np.uint64), np.zeros(20 << 14, dtype=np.uint64)
    rows = [(n * 512, n * 512, 512) for n in range(source.nbytes // 512)]
    copy_all(pieces_of(source, target, rows), copier.copy)
    assert (source == target).all()


def test_it_notices_when_the_interpreter_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = Copier()
    source, target = np.ones(1 << 20, dtype=np.uint8), np.zeros(1 << 20, dtype=np.uint8)
    pieces = pieces_of(source, target, [(0, 0, 1 << 20)])
    wall = iter([0, 10**7] * 10)
    monkeypatch.setattr("kvgrpc.dataplane.shm.copying.time.perf_counter_ns", lambda: next(wall))
    monkeypatch.setattr(copier, "_loop", lambda pieces, first, last: 1)
    copier.copy(pieces, 0)
    assert copier._contended
    monkeypatch.setattr("kvgrpc.dataplane.shm.copying.time.perf_counter_ns", lambda: 0)
    copier.copy(pieces, 0)
    assert not copier._contended
    assert target.all()


def test_without_a_second_thread_one_copies_and_nothing_is_copied_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that nobody had begun ended as unknown, and its pages stayed held for good."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    copier = Copier()
    assert copier._second is not None
    executor = copier._second
    source, target = np.ones(8 << 20, dtype=np.uint8), np.zeros(8 << 20, dtype=np.uint8)
    pieces = pieces_of(source, target, [(n << 20, n << 20, 1 << 20) for n in range(8)])
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", no_thread)
        copy_all(pieces, copier.copy)
    assert target.all()
    assert executor._work_queue.qsize() <= 1  # what ends its threads
    copier.close()


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
