"""The forms of a page in a file: our own, which proves itself complete, or SGLang's, which is bytes only."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import msgspec
from xxhash import xxh3_128_digest

# A block: the payload behind it stays aligned for O_DIRECT.
HEADER_BYTES = 4096
# Magic, bytes of payload, algorithm of its checksum, checksum, bytes of key; then the key, and XXH3-128 of all that.
_MAGIC, _FIXED = b"kvgrpc\x00\x02", struct.Struct("<8sQ8sQI")
# As it was before headers named an algorithm: block sums, 0 where none was taken; and BLAKE2b-128 of all that.
_MAGIC_1, _FIXED_1 = b"kvgrpc\x00\x01", struct.Struct("<8sQQI")
_DIGEST_BYTES = 16

XXH3, BLOCK_SUMS, NO_SUM = "xxh3-64", "blocks", ""
_ALGORITHMS = {name.encode().ljust(8, b"\0"): name for name in (XXH3, BLOCK_SUMS, NO_SUM)}
_CODES = {name: code for code, name in _ALGORITHMS.items()}


class Header(msgspec.Struct, frozen=True):
    """The first block of a file. ``algorithm``: of the checksum."""

    key: str
    nbytes: int
    algorithm: str
    checksum: int

    def encode(self) -> bytes:
        key = self.key.encode("utf-8")
        text = _FIXED.pack(_MAGIC, self.nbytes, _CODES[self.algorithm], self.checksum, len(key)) + key
        return (text + xxh3_128_digest(text)).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, block: bytes | bytearray | memoryview) -> Header | None:
        """None for anything but a whole header of ours with an algorithm that we have."""
        if len(block) < HEADER_BYTES:
            return None
        magic, nbytes, code, checksum, length = _FIXED.unpack_from(block)
        start, algorithm = _FIXED.size, _ALGORITHMS.get(code)
        digest: Callable[[bytes], bytes] = xxh3_128_digest
        if magic == _MAGIC_1:
            magic, nbytes, checksum, length = _FIXED_1.unpack_from(block)
            start, algorithm, digest = _FIXED_1.size, BLOCK_SUMS if checksum else NO_SUM, _digest_1
        elif magic != _MAGIC or algorithm is None:
            return None
        end = start + length
        text = bytes(block[: end + _DIGEST_BYTES])
        if end + _DIGEST_BYTES > HEADER_BYTES or text[end:] != digest(text[:end]):
            return None
        return cls(text[start:end].decode("utf-8"), nbytes, algorithm, checksum)


class Format(Protocol):
    """``header_bytes``: what precedes the payload. ``folders``: where pages and unfinished files lie, empty or ending
    with a slash."""

    header_bytes: ClassVar[int]
    folders: ClassVar[Sequence[str]]

    def path(self, key: str) -> str | None:
        """Relative to the root and always inside it; None for a key that has no file name."""

    def is_page(self, name: str) -> bool:
        """True if a file of this name can be a page."""

    def key_of(self, name: str, start: bytes) -> str | None:
        """The key of a page, of its path and its first ``header_bytes``; None when they do not tell."""


class OwnFormat:
    """``ab/cdef….kv``: names are digests of keys, so any key is one and none leads out of the folder."""

    header_bytes: ClassVar[int] = HEADER_BYTES
    folders: ClassVar[Sequence[str]] = ["", *(f"{number:02x}/" for number in range(256))]

    def path(self, key: str) -> str:
        name = hashlib.blake2b(key.encode("utf-8"), digest_size=16).hexdigest()
        return f"{name[:2]}/{name[2:]}.kv"

    def is_page(self, name: str) -> bool:
        return name.endswith(".kv")

    def key_of(self, name: str, start: bytes) -> str | None:
        header = Header.decode(start)
        return None if header is None else header.key


class SglangFormat:
    """``<key>.bin`` in one folder, as SGLang 0.5.23's backend ``file`` has them: nothing proves them whole."""

    header_bytes: ClassVar[int] = 0
    folders: ClassVar[Sequence[str]] = [""]
    _SUFFIX = ".bin"

    def path(self, key: str) -> str | None:
        name = key + self._SUFFIX
        if "/" in key or "\0" in key or key.startswith(".") or len(name.encode("utf-8")) > 255:
            return None
        return name

    def is_page(self, name: str) -> bool:
        return name.endswith(self._SUFFIX) and not name.startswith(".")

    def key_of(self, name: str, start: bytes) -> str | None:
        return name.removesuffix(self._SUFFIX)


def _digest_1(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
