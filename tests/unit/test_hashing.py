"""The names that engines give to pages: their own vectors, and the rules written down a second time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.errors import InvalidRequest
from kvgrpc.hashing import (
    Tokens,
    _cbor,
    each_block_hash,
    event_namespace,
    event_seed,
    page_hashes,
    sglang_event_hash,
    storage_seed,
    vllm_event_hash,
)
from tests.support.engine_hashes import our_numbers

HASHES = Path(__file__).parents[1] / "conformance" / "events" / "hashes.json"

# From SGLang 0.5.23's own C++ (the chain) and Python (the namespace).
FIRST = "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f"
SECOND = "c57b445f90651b9a650e516ab2238c965b21af35608a31c303e6d9e407f2915c"
TENANT = "1788ab758c62a241d83bbc10f0cb8b745cec48d7a3d2a78a2e84123d48ff4c99"
OF_TENANT = "a2692acc9ec0dd2ae22fe5f336c1b0fb57ffea009d9c3320c35754acd78a8f16"
BIGRAM = "ede8ef26a097f0fd889f9f39f6f5af921370630b164c4a4fa28eb716b2df9269"
WIDE = "66af2f218931e670270f1b4ea79f49befb670188f60c94856ed7a1743298f181"
# With vLLM's rules over the libraries that it uses: pickle, and cbor2 in canonical form.
VLLM = {
    "sha256": [
        "762b2e7e1520febd3a0aedb7358e8602facf3924440e18538fce057e23bae91d",
        "9e62b5a7ec298f33cb4c7d9e00b659874bb2432d23ad6879ad1746592a2b036b",
    ],
    "sha256_cbor": [
        "c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb",
        "24125b23e68883b5c2141db2959d48433fe6bde2f26bd914efad121d154ab2d6",
    ],
}

narrow = st.integers(0, 2**32 - 1)
prompts = st.lists(narrow, max_size=40) | st.lists(narrow | st.integers(0, 2**63 - 1), max_size=40)


def block_hashes(tokens: Tokens, block_size: int, **more: Any) -> list[bytes]:
    return list(each_block_hash(tokens, block_size, **{"hash_seed": "0", **more}))


def hexes(hashes: Sequence[bytes]) -> list[str]:
    return [one.hex() for one in hashes]


def test_sglang_names_pages_by_a_chain_of_sha256() -> None:
    assert hexes(page_hashes([1, 2, 3, 4], 2)) == [FIRST, SECOND]


def test_a_chain_is_continued_behind_its_last_hash() -> None:
    assert hexes(page_hashes([3, 4], 2, after=bytes.fromhex(FIRST))) == [SECOND]


def test_sglang_names_a_namespace_in_storage_by_its_seed() -> None:
    seed = storage_seed(None, "tenantA")
    assert seed.hex() == TENANT
    assert hexes(page_hashes([1, 2], 2, after=seed)) == [OF_TENANT]


def test_the_common_namespace_has_no_seed() -> None:
    assert storage_seed() == event_seed() == event_namespace() == b""


def test_an_empty_key_or_salt_is_a_namespace_of_its_own() -> None:
    seeds = [storage_seed(""), storage_seed(None, ""), storage_seed("", ""), event_seed(""), event_namespace("")]
    assert len({b"", *seeds}) == 6


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_s_own_classes_name_the_blocks_of_random_prompts_as_we_do(engine: str) -> None:
    """LoRA, salts, empty strings, images, drafters: ``hashes.json`` is written by the classes of the wheels."""
    cases = json.loads(HASHES.read_text())[engine]["cases"]
    assert len(cases) == 150
    for case in cases:
        hashes = case.pop("hashes")
        assert [f"{number:016x}" for number in our_numbers(engine, case)] == hashes, case


def test_namespaces_differ_by_every_part() -> None:
    seeds = {storage_seed("a"), storage_seed(None, "a"), storage_seed("a", "b"), storage_seed("ab"), event_seed("a")}
    assert len(seeds) == 5


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"multimodal": [("a", 0, 2), ("b", 1, 1)]}, r"multimodal\[1\]"),
        ({"multimodal": [("a", 0, 0)]}, r"multimodal\[0\]"),
        ({"lookahead": -1}, "lookahead"),
    ],
)
def test_what_no_prompt_of_vllm_has_is_refused(more: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        block_hashes([1, 2], 1, **more)


def test_eagle_reads_pairs() -> None:
    assert hexes(page_hashes([1, 2, 3], 2, bigram=True)) == [BIGRAM]


def test_a_page_with_a_wide_token_is_hashed_in_eight_bytes() -> None:
    assert hexes(page_hashes([1, 2**32], 2)) == [WIDE]


@given(prompts, st.integers(1, 20), st.booleans(), st.sampled_from([b"", bytes(32), event_seed("salt")]))
def test_page_hashes_follow_the_rules(tokens: list[int], page_tokens: int, bigram: bool, after: bytes) -> None:
    assert page_hashes(tokens, page_tokens, after=after, bigram=bigram) == by_the_rules(
        tokens, page_tokens, after, bigram
    )


def test_numpy_tokens_have_the_same_names() -> None:
    assert page_hashes(np.arange(100), 16) == page_hashes(range(100), 16)
    assert block_hashes(np.arange(100), 16) == block_hashes(range(100), 16)


@pytest.mark.parametrize("token", [-1, 2**63, 1.5, None, "1"])
def test_a_token_that_is_none_is_refused_by_its_place(token: object) -> None:
    with pytest.raises(InvalidRequest, match=r"tokens\[1\]: must be an integer of 0 to 2\^63-1"):
        page_hashes([7, token], 2)  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match=r"tokens\[1\]"):
        block_hashes([7, token], 2)  # type: ignore[list-item]


def test_a_page_holds_at_least_one_token() -> None:
    with pytest.raises(InvalidRequest, match="page_tokens"):
        page_hashes([1], 0)
    with pytest.raises(InvalidRequest, match="block_size"):
        block_hashes([1], 0)


def test_sglang_s_events_carry_the_first_eight_bytes_signed() -> None:
    assert sglang_event_hash(bytes.fromhex(FIRST)) == 0x34FB5C825DE7CA4A
    assert sglang_event_hash(bytes.fromhex(SECOND)) == 0xC57B445F90651B9A - 2**64


@pytest.mark.parametrize("algorithm", VLLM)
def test_vllm_names_blocks_by_its_configured_hash(algorithm: str) -> None:
    plain = VLLM[algorithm]
    assert hexes(block_hashes(range(1, 9), 4, algorithm=algorithm)) == plain
    of_tenant = block_hashes([1, 2, 300, 70000], 2, algorithm=algorithm, lora=("adapter", "/a"), cache_salt="tenantA")
    assert len({*hexes(of_tenant), *hexes(block_hashes([1, 2, 300, 70000], 2, algorithm=algorithm))}) == 4


def test_vllm_names_full_blocks_only() -> None:
    assert block_hashes([1, 2, 3], 2) == block_hashes([1, 2], 2)
    assert block_hashes([1], 2) == []


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="algorithm: must be one of sha256, sha256_cbor, not 'xxhash'"):
        block_hashes([1], 1, algorithm="xxhash")


def test_vllm_s_events_carry_the_last_eight_bytes_unsigned() -> None:
    assert vllm_event_hash(bytes(24) + b"\xff" * 8) == 2**64 - 1


def by_the_rules(tokens: list[int], page_tokens: int, after: bytes, bigram: bool) -> list[bytes]:
    """One token at a time, as the rules are told; shares nothing with what is tested."""
    count = max(0, len(tokens) - bigram)
    found = []
    for start in range(0, count, page_tokens):
        words: list[int] = []
        for position in range(start, min(start + page_tokens, count)):
            words += tokens[position : position + 2] if bigram else [tokens[position]]
        wide = any(word >= 2**32 for word in words)
        digest = hashlib.sha256(after)
        if wide:
            digest.update(b"\xff")
        for word in words:
            digest.update(word.to_bytes(8 if wide else 4, "little"))
        after = digest.digest()
        found.append(after)
    return found


@pytest.mark.parametrize("bigram", [False, True])
def test_a_longer_prompt_begins_with_the_names_of_a_shorter_one(bigram: bool) -> None:
    """Also where words need eight bytes, and where one page does and another does not."""
    wide, narrow_max = 2**40, 2**32 - 1
    prompt = [narrow_max, 1, 2, wide, 3, 4, narrow_max, 5, 6]
    names = page_hashes(prompt, 2, bigram=bigram)
    for pages in range(1, len(names)):
        shorter = prompt[: 2 * pages + bigram]
        assert page_hashes(shorter, 2, bigram=bigram) == names[:pages]
    # Alone the first page is narrow: beside a wide one it has the same name.
    assert page_hashes(prompt[: 2 + bigram], 2, bigram=bigram) == names[:1]


def test_an_event_of_vllm_carries_the_last_eight_bytes_of_a_hash() -> None:
    assert vllm_event_hash(bytes(range(32))) == 0x18191A1B1C1D1E1F


# RFC 8949, appendix A, and the edges between the lengths of a number.
CBOR = {
    **{0: "00", 23: "17", 24: "1818", 100: "1864", 255: "18ff", 256: "190100", 1000: "1903e8", 65535: "19ffff"},
    **{65536: "1a00010000", 1000000: "1a000f4240", 2**32 - 1: "1affffffff", 2**32: "1b0000000100000000"},
    **{1000000000000: "1b000000e8d4a51000", 2**64 - 1: "1bffffffffffffffff"},
}


@pytest.mark.parametrize("number", CBOR)
def test_numbers_in_canonical_cbor_take_the_fewest_bytes(number: int) -> None:
    assert _cbor(number).hex() == CBOR[number]
