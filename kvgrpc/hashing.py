"""Names of cached pages in engines: SGLang's chain of page hashes, vLLM's block hashes, and the numbers events carry.

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
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

from kvgrpc.errors import InvalidRequest

MAX_TOKEN = 2**63 - 1
# What vLLM begins with where PYTHONHASHSEED is not set, for the sha256 kinds.
VLLM_HASH_SEED = "vllm-none-hash"
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
    """The hashes of ``page_hashes``, one by one, for whoever has other things to do between them."""
    if page_tokens < 1:
        raise InvalidRequest.of("page_tokens", page_tokens, "at least 1")
    for page in _pages(tokens, page_tokens, bigram):
        after = hashlib.sha256(after + page).digest()
        yield after


def storage_seed(extra_key: str | None = None, cache_salt: str | None = None) -> bytes:
    """Returns what the page hashes of a namespace in SGLang's storage begin with; empty for the common namespace.

    An empty key or salt is one too: None says that there is none. SGLang's requests make None of an empty salt.
    """
    return _namespace_seed(b"sglang-cache-namespace-v1", extra_key, cache_salt)


def event_seed(cache_salt: str | None = None) -> bytes:
    """Returns what the page hashes of a salt begin with in SGLang's events; empty without a salt (an empty one is
    one)."""
    return b"" if cache_salt is None else hashlib.sha256(b"sglang-cache-salt-v1\0" + cache_salt.encode()).digest()


def event_namespace(extra_key: str | None = None, cache_salt: str | None = None) -> bytes:
    """Returns what SGLang (0.5.22 and newer) hashes into each number of its events: of a request with a LoRA adapter by
    its key alone, with ``format: dynamo`` by key and salt. Empty: nothing. For ``sglang_event_hash``.
    """
    return _namespace_seed(b"sglang-kv-event-namespace-v1", extra_key, cache_salt)


def sglang_event_hash(page_hash: bytes, namespace: bytes = b"") -> int:
    """The signed 64-bit number that SGLang's events carry for a page hash: its first eight bytes, hashed once more with
    the ``event_namespace`` where there is one."""
    first = page_hash[:8]
    return int.from_bytes((hashlib.sha256(namespace + first).digest() if namespace else first)[:8], "big", signed=True)


def each_block_hash(
    tokens: Tokens,
    block_size: int,
    *,
    hash_seed: str = VLLM_HASH_SEED,
    algorithm: str = "sha256",
    lora: tuple[str, str] | None = None,
    cache_salt: str = "",
    multimodal: Sequence[tuple[str, int, int]] = (),
    lookahead: int = 0,
) -> Iterator[bytes]:
    """vLLM's hashes (32 bytes each) of the full blocks of a prompt, one by one.

    ``hash_seed`` is the PYTHONHASHSEED of the engine, where it has one. ``algorithm`` is its
    ``--prefix-caching-hash-algo``: sha256 (the default) or sha256_cbor; xxhash begins with a random number in each
    process. ``lora`` is name and path of the adapter, part of each block; the salt is part of the first, an empty one
    is none. ``multimodal`` has identifier, first token and number of tokens of each image, in order; ``lookahead`` is
    how many tokens behind a block its hash covers (a drafter's). Prompts given as embeddings have no such hashes.
    Raises InvalidRequest for what is none of these.
    """
    _check_blocks(tokens, block_size, algorithm, multimodal, lookahead)
    serialize = _SERIALIZERS[algorithm]
    parent, first = hashlib.sha256(serialize(hash_seed)).digest(), 0
    for start in range(0, len(tokens) - lookahead - block_size + 1, block_size):
        end = start + block_size
        while first < len(multimodal) and multimodal[first][1] + multimodal[first][2] <= start:
            first += 1
        extra = _extra_keys(lora, "" if start else cache_salt, multimodal, first, start, end + lookahead)
        block = tuple(map(int, tokens[start : end + lookahead]))
        keys = (extra, *block[block_size:]) if lookahead else extra
        parent = hashlib.sha256(serialize((parent, block[:block_size], keys))).digest()
        yield parent


def vllm_event_hash(block_hash: bytes) -> int:
    """The unsigned 64-bit number that vLLM's events carry for a block hash: its last eight bytes."""
    return int.from_bytes(block_hash[-8:], "big")


def _namespace_seed(tag: bytes, extra_key: str | None, cache_salt: str | None) -> bytes:
    if extra_key is None and cache_salt is None:
        return b""
    for part in (extra_key, cache_salt):
        text = b"" if part is None else part.encode()
        tag += b"\x00" if part is None else b"\x01" + struct.pack("<Q", len(text)) + text
    return hashlib.sha256(tag).digest()


def _check_blocks(
    tokens: Tokens, block_size: int, algorithm: str, multimodal: Sequence[tuple[str, int, int]], lookahead: int
) -> None:
    if block_size < 1:
        raise InvalidRequest.of("block_size", block_size, "at least 1")
    if algorithm not in _SERIALIZERS:
        raise InvalidRequest.of("algorithm", algorithm, f"one of {', '.join(_SERIALIZERS)}")
    if lookahead < 0:
        raise InvalidRequest.of("lookahead", lookahead, "at least 0")
    end = 0
    for index, (_, offset, length) in enumerate(multimodal):
        if offset < end or length < 1:
            raise InvalidRequest.of(
                f"multimodal[{index}]", (offset, length), "in order, one behind the other, not empty"
            )
        end = offset + length
    _check_tokens(tokens)


def _extra_keys(
    lora: tuple[str, str] | None,
    cache_salt: str,
    multimodal: Sequence[tuple[str, int, int]],
    first: int,
    start: int,
    end: int,
) -> tuple[tuple[str | int, ...], ...] | None:
    """Returns what else vLLM hashes of a block. Each string is an object of its own, as in the engine: pickle writes
    one that it has written before as a reference."""
    keys: list[tuple[str | int, ...]] = []
    if lora is not None:
        keys.append(("lora", _copied(lora[0]), _copied(lora[1])))
    for index in range(first, len(multimodal)):
        identifier, offset, _ = multimodal[index]
        if offset >= end:
            break
        keys.append(("mm", _copied(identifier), offset - start))
    if cache_salt:
        keys.append(("cache_salt", _copied(cache_salt)))
    return tuple(keys) or None


def _copied(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


def _pages(tokens: Tokens, page_tokens: int, bigram: bool) -> Iterator[bytes]:
    """Yields what SGLang hashes of each page: 4 little-endian bytes a word, or a mark and 8 where one word needs
    them."""
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
        return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)
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
