"""Files prove themselves whole; their names lead nowhere else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from kvgrpc.prefetch.storage.file.formats import (
    BLOCK_SUMS,
    HEADER_BYTES,
    NO_SUM,
    XXH3,
    Header,
    OwnFormat,
    SglangFormat,
)
from kvgrpc.prefetch.storage.file.io import block_sums, header, is_right, xxh3
from tests.support import old_pages

KEYS = st.text(min_size=1, max_size=200).filter(lambda key: not any("\ud800" <= each <= "\udfff" for each in key))


@given(KEYS, st.integers(0, 2**40), st.sampled_from([XXH3, BLOCK_SUMS, NO_SUM]), st.integers(0, 2**64 - 1))
def test_a_header_is_read_as_it_was_written(key: str, nbytes: int, algorithm: str, check: int) -> None:
    written = Header(key, nbytes, algorithm, check)
    assert len(written.encode()) == HEADER_BYTES
    assert Header.decode(written.encode()) == written


def test_a_header_has_these_bytes() -> None:
    """Magic and layout, bytes of payload, algorithm, checksum, bytes of key, key, XXH3-128: files outlive versions."""
    there = header("some-key", [memoryview(old_pages.PAGE)]).encode()
    assert there.startswith(b"kvgrpc\0\2" + (10_000).to_bytes(8, "little") + b"xxh3-64\0")
    assert there.rstrip(b"\0").hex() == (
        "6b766772706300021027000000000000787868332d36340023b683794d75ea0908000000736f6d652d6b65790fd04ec2"
        "55494db1f964fb6cb40b652d"
    )


def test_headers_from_before_they_named_an_algorithm_are_read() -> None:
    found = Header.decode(old_pages.CHECKED)
    assert found == Header(old_pages.KEY, len(old_pages.PAGE), BLOCK_SUMS, 155460449863761304)
    assert is_right(found, [memoryview(old_pages.PAGE)])
    assert not is_right(found, [memoryview(old_pages.PAGE.replace(b"\7", b"\6", 1))])
    assert Header.decode(old_pages.UNCHECKED) == Header(old_pages.KEY, 5, NO_SUM, 0)


def test_a_header_with_an_algorithm_that_we_do_not_have_is_none() -> None:
    text = Header("some-key", 5, XXH3, 12345).encode().rstrip(b"\0")[:-16].replace(b"xxh3-64", b"xxh9-64")
    block = (text + xxh3_128_digest(text)).ljust(HEADER_BYTES, b"\0")
    assert Header.decode(block) is None
    known = text.replace(b"xxh9-64", b"xxh3-64")
    block = (known + xxh3_128_digest(known)).ljust(HEADER_BYTES, b"\0")
    assert Header.decode(block) == Header("some-key", 5, XXH3, 12345), "or this test changes something else"


@given(st.integers(0, 300), st.integers(1, 255))
def test_a_header_with_any_byte_changed_is_none(place: int, change: int) -> None:
    block = bytearray(Header("some-key", 65536, XXH3, 12345).encode())
    end = len(block.rstrip(b"\0"))
    block[min(place, end - 1)] ^= change
    assert Header.decode(block) is None


@pytest.mark.parametrize("block", [b"", b"\0" * HEADER_BYTES, b"kvgrpc\0\1", b"\xff" * HEADER_BYTES])
def test_what_is_no_header_is_none(block: bytes) -> None:
    assert Header.decode(block) is None
    assert Header.decode(Header("k", 1, NO_SUM, 0).encode()[:-1]) is None


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


SUMS = pytest.mark.parametrize("of", [xxh3, block_sums])
Sum = Callable[[Sequence[memoryview]], int]


@SUMS
@given(data=st.binary(min_size=1, max_size=20_000), cuts=st.lists(st.integers(0, 20_000), max_size=5))
def test_a_checksum_does_not_depend_on_how_the_bytes_are_cut(of: Sum, data: bytes, cuts: list[int]) -> None:
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [memoryview(data)[start:end] for start, end in itertools.pairwise(bounds)]
    assert of(pieces) == of([memoryview(data)])


@SUMS
@pytest.mark.parametrize("harm", ["lost", "moved", "flipped", "stale"])
def test_a_checksum_notices_blocks_that_a_crash_harmed(of: Sum, harm: str) -> None:
    rng = random.Random(7)
    for _ in range(30):
        data = bytearray(rng.randbytes(16 * HEADER_BYTES))
        before = of([memoryview(data)])
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
        assert of([memoryview(data)]) != before
