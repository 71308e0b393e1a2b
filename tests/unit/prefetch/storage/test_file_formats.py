"""Files prove themselves whole; their names lead nowhere else."""

from __future__ import annotations

import itertools
import random
from pathlib import PurePosixPath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.prefetch.storage.base import views
from kvgrpc.prefetch.storage.file.formats import HEADER_BYTES, Header, OwnFormat, SglangFormat
from kvgrpc.prefetch.storage.file.io import checksum, checksum_of

KEYS = st.text(min_size=1, max_size=200).filter(lambda key: not any("\ud800" <= each <= "\udfff" for each in key))


@given(KEYS, st.integers(0, 2**40), st.integers(0, 2**64 - 1))
def test_a_header_is_read_as_it_was_written(key: str, nbytes: int, check: int) -> None:
    header = Header(key, nbytes, check)
    assert len(header.encode()) == HEADER_BYTES
    assert Header.decode(header.encode()) == header


@given(st.integers(0, 300), st.integers(1, 255))
def test_a_header_with_any_byte_changed_is_none(place: int, change: int) -> None:
    block = bytearray(Header("some-key", 65536, 12345).encode())
    end = len(block.rstrip(b"\0"))
    block[min(place, end - 1)] ^= change
    assert Header.decode(block) is None


@pytest.mark.parametrize("block", [b"", b"\0" * HEADER_BYTES, b"kvgrpc\0\1", b"\xff" * HEADER_BYTES])
def test_what_is_no_header_is_none(block: bytes) -> None:
    assert Header.decode(block) is None
    assert Header.decode(Header("k", 1, 0).encode()[:-1]) is None


@given(KEYS)
def test_no_key_leads_out_of_the_folder(key: str) -> None:
    for form in (OwnFormat(), SglangFormat()):
        path = form.path(key)
        if path is not None:
            assert ".." not in PurePosixPath(path).parts and not PurePosixPath(path).is_absolute()
            assert "\0" not in path and form.is_page(PurePosixPath(path).name)


@pytest.mark.parametrize("key", ["a/b", "../a", "..", ".", "a\0", ".hidden", "x" * 252])
def test_sglangs_format_has_no_file_for_what_is_no_name(key: str) -> None:
    assert SglangFormat().path(key) is None


@given(st.binary(min_size=1, max_size=20_000), st.lists(st.integers(0, 20_000), max_size=5))
def test_a_checksum_does_not_depend_on_how_the_bytes_are_cut(data: bytes, cuts: list[int]) -> None:
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [memoryview(data)[start:end] for start, end in itertools.pairwise(bounds)]
    assert checksum(pieces) == checksum([memoryview(data)]) != 0


BUFFERS = st.tuples(st.sampled_from([4096, 8192, 100]), st.sampled_from([0, 8, 4096, 5000]))


@given(st.lists(BUFFERS, min_size=1, max_size=8), st.integers(0, 2**32))
def test_a_checksum_of_memory_is_that_of_its_bytes(buffers: list[tuple[int, int]], seed: int) -> None:
    """With any gaps between the buffers, in any order."""
    noise = random.Random(seed)
    memory = np.frombuffer(noise.randbytes(sum(nbytes + gap for nbytes, gap in buffers)), np.uint8)
    page, at = [], int(memory.ctypes.data)
    for nbytes, gap in buffers:
        page.append((at, nbytes))
        at += nbytes + gap
    if noise.random() < 0.3:
        noise.shuffle(page)
    assert checksum_of(tuple(page)) == checksum([memoryview(b"".join(views(tuple(page))))])


@pytest.mark.parametrize("layers", [1, 2, 64])
def test_buffers_at_even_distances_have_the_checksum_of_their_bytes(layers: int) -> None:
    memory = np.random.default_rng(layers).integers(0, 256, 2 * layers * 3 * 8192, dtype=np.uint8)
    address = int(memory.ctypes.data)
    keys = [(address + layer * 3 * 8192, 8192) for layer in range(layers)]
    page = (*keys, *((at + layers * 3 * 8192, nbytes) for at, nbytes in keys))
    assert checksum_of(page) == checksum(views(page)) == checksum([memoryview(b"".join(views(page)))])


@pytest.mark.parametrize("harm", ["lost", "moved", "flipped", "stale"])
def test_a_checksum_notices_blocks_that_a_crash_harmed(harm: str) -> None:
    rng = random.Random(7)
    for _ in range(30):
        data = bytearray(rng.randbytes(16 * HEADER_BYTES))
        before = checksum([memoryview(data)])
        one, other = (place * HEADER_BYTES for place in rng.sample(range(16), 2))
        if harm == "lost":
            data[one : one + HEADER_BYTES] = bytes(HEADER_BYTES)
        elif harm == "stale":
            data[one : one + HEADER_BYTES] = rng.randbytes(HEADER_BYTES)
        elif harm == "flipped":
            data[one + rng.randrange(HEADER_BYTES)] ^= 1 << rng.randrange(8)
        else:
            first, second = bytes(data[one : one + HEADER_BYTES]), bytes(data[other : other + HEADER_BYTES])
            data[one : one + HEADER_BYTES], data[other : other + HEADER_BYTES] = second, first
        assert checksum([memoryview(data)]) != before
