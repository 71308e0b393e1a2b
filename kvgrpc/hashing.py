"""How engines name cached pages: SGLang's chain of page hashes, vLLM's block hashes, and the numbers events carry.

Whoever has a request's tokens and knows an engine's settings can compute these names and ask who holds the pages.
Stdlib only. SGLang's chain is that of its ``hash_binding.cpp`` (0.5.23), vLLM's that of its ``kv_cache_utils.py``
and ``hashing.py`` (0.33).
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import sys
from array import array
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Protocol

from kvgrpc.errors import InvalidRequest

MAX_TOKEN = 2**63 - 1
_MAX_NARROW = 2**32 - 1
_WIDE_MARK = b"\xff"


class Tokens(Protocol):
    """A prompt's token ids: a list, a range, an array of integers (numpy's or ``array``)."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def __getitem__(self, at: slice, /) -> Any: ...


def page_hashes(tokens: Tokens, page_tokens: int, *, after: bytes = b"", bigram: bool = False) -> list[bytes]:
    """SGLang's page hashes (SHA-256, 32 bytes each), each over its page and the hash before it.

    ``after`` is the hash that the first page continues, or a seed (``storage_seed``, ``event_seed``); empty: none. With
    ``bigram`` (EAGLE) the tokens are read as n-1 overlapping pairs. A last page that is not full is hashed as it is:
    pass whole pages only where a cache holds nothing else. Raises InvalidRequest for a token outside 0 to 2^63-1.
    """
    return list(each_page_hash(tokens, page_tokens, after=after, bigram=bigram))


def each_page_hash(tokens: Tokens, page_tokens: int, *, after: bytes = b"", bigram: bool = False) -> Iterator[bytes]:
    """As ``page_hashes``, one by one, for whoever has other things to do between them."""
    if page_tokens < 1:
        raise InvalidRequest.of("page_tokens", page_tokens, "at least 1")
    for page in _pages(tokens, page_tokens, bigram):
        after = hashlib.sha256(after + page).digest()
        yield after


def storage_seed(extra_key: str | None = None, cache_salt: str | None = None) -> bytes:
    """What the page hashes of a namespace in SGLang's storage begin with; empty for the common namespace."""
    if not extra_key and not cache_salt:
        return b""
    named = b"sglang-cache-namespace-v1"
    for part in (extra_key, cache_salt):
        text = part.encode() if part is not None else b""
        named += b"\x00" if part is None else b"\x01" + struct.pack("<Q", len(text)) + text
    return hashlib.sha256(named).digest()


def event_seed(cache_salt: str | None = None) -> bytes:
    """What the hashes of a salt begin with in SGLang's events, which leave the extra key out; empty without a salt."""
    return hashlib.sha256(b"sglang-cache-salt-v1\0" + cache_salt.encode()).digest() if cache_salt else b""


def sglang_event_hash(page_hash: bytes) -> int:
    """The signed 64-bit number that SGLang's events carry for a page hash: its first eight bytes."""
    return int.from_bytes(page_hash[:8], "big", signed=True)


def each_block_hash(
    tokens: Tokens,
    block_size: int,
    *,
    hash_seed: str,
    algorithm: str = "sha256",
    lora_name: str | None = None,
    cache_salt: str | None = None,
) -> Iterator[bytes]:
    """vLLM's hashes (32 bytes each) of the full blocks of a text-only prompt, one by one.

    ``hash_seed`` is the PYTHONHASHSEED of the engine: without one its hashes are random in each process and nobody can
    compute them. ``algorithm`` is its ``--prefix-caching-hash-algo``: sha256 (the default) or sha256_cbor. The LoRA
    name is part of each block, the salt of the first. Raises InvalidRequest for what is none of these.
    """
    if block_size < 1:
        raise InvalidRequest.of("block_size", block_size, "at least 1")
    if algorithm not in _SERIALIZERS:
        raise InvalidRequest.of("algorithm", algorithm, f"one of {', '.join(_SERIALIZERS)}")
    _check_tokens(tokens)
    serialize = _SERIALIZERS[algorithm]
    parent = hashlib.sha256(serialize(hash_seed)).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        extra = tuple(key for key in (lora_name, cache_salt if start == 0 else None) if key) or None
        block = tuple(map(int, tokens[start : start + block_size]))
        parent = hashlib.sha256(serialize((parent, block, extra))).digest()
        yield parent


def vllm_event_hash(block_hash: bytes) -> int:
    """The unsigned 64-bit number that vLLM's events carry for a block hash: its last eight bytes."""
    return int.from_bytes(block_hash[-8:], "big")


def _pages(tokens: Tokens, page_tokens: int, bigram: bool) -> Iterator[bytes]:
    """What SGLang hashes of each page: 4 little-endian bytes a word, or a mark and 8 where one word needs them."""
    try:
        words = array("I", tokens)
    except (OverflowError, TypeError):
        yield from _wide_pages(tokens, page_tokens, bigram)
        return
    if bigram:
        words = _pairs(words)
        page_tokens *= 2
    if sys.byteorder == "big":
        words.byteswap()
    raw = memoryview(words.tobytes())
    for start in range(0, len(raw), page_tokens * words.itemsize):
        yield bytes(raw[start : start + page_tokens * words.itemsize])


def _pairs(words: array[int]) -> array[int]:
    pairs = array("I", bytes(2 * words.itemsize * max(0, len(words) - 1)))
    pairs[0::2], pairs[1::2] = words[:-1], words[1:]
    return pairs


def _wide_pages(tokens: Tokens, page_tokens: int, bigram: bool) -> Iterator[bytes]:
    _check_tokens(tokens)
    words = [int(token) for token in tokens]
    if bigram:
        words = [word for pair in pairwise(words) for word in pair]
        page_tokens *= 2
    for start in range(0, len(words), page_tokens):
        page = words[start : start + page_tokens]
        if max(page) > _MAX_NARROW:
            yield _WIDE_MARK + struct.pack(f"<{len(page)}Q", *page)
        else:
            yield struct.pack(f"<{len(page)}I", *page)


def _check_tokens(tokens: Tokens) -> None:
    for index, token in enumerate(tokens):
        # numpy's integers have __index__ too; a bool or a float is a mistake of the caller.
        if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= token <= MAX_TOKEN:
            raise InvalidRequest.of(f"tokens[{index}]", token, "an integer of 0 to 2^63-1")


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _cbor(value: object) -> bytes:
    """The canonical CBOR of what a block hash covers."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _cbor_head(0, value)
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _cbor_head(3, len(text)) + text
    if isinstance(value, tuple):
        return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))
    raise TypeError(f"{type(value).__name__} is no part of a block hash")


def _cbor_head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes((major << 5 | number,))
    for code, (size, layout) in enumerate(((1, ">B"), (2, ">H"), (4, ">I"), (8, ">Q")), start=24):
        if number < 1 << 8 * size:
            return bytes((major << 5 | code,)) + struct.pack(layout, number)
    raise OverflowError(number)


_SERIALIZERS: dict[str, Callable[[object], bytes]] = {"sha256": _pickled, "sha256_cbor": _cbor}
BLOCK_HASH_ALGORITHMS = tuple(_SERIALIZERS)
