"""Prompts as a case of ``hashes.json`` tells them, and what engines' own classes and ours make of them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvgrpc.client import sglang_hashes, vllm_hashes

Case = dict[str, Any]
_NAMES = ["", "a", "adapter", "tenant-7", "ü", "lora", "cache_salt", "x" * 300]


def random_case(rng: random.Random, engine: str) -> Case:
    """A prompt with LoRA, salt, empty strings, images, as that engine knows them."""
    size = rng.choice((1, 2, 4, 16))
    largest = rng.choice((23, 300, 200_000, 2**32 - 1))
    tokens = [rng.randint(0, largest) for _ in range(rng.randrange(6 * size + 2))]
    case: Case = {"tokens": tokens, "size": size}
    if rng.random() < 0.5:
        case["cache_salt"] = rng.choice(_NAMES)
    return case | (_of_vllm if engine == "vllm" else _of_sglang)(rng, len(tokens))


def engine_version(engine: str) -> str:
    from importlib.metadata import version

    return version(engine)


def numbers_of(engine: str) -> Callable[[Case], list[int]]:
    """What that engine's own classes name the blocks of a prompt in events, unsigned."""
    return _vllm_numbers if engine == "vllm" else _sglang_numbers


def our_numbers(engine: str, case: Case) -> list[int]:
    """The same by kvgrpc."""
    more = {name: value for name, value in case.items() if name not in ("tokens", "size")}
    if engine == "vllm":
        for name in ("lora", "multimodal"):
            if name in more:
                more[name] = _tuples(more[name])
        return vllm_hashes(case["tokens"], case["size"], **more)
    return sglang_hashes(case["tokens"], case["size"], **more)


def _of_vllm(rng: random.Random, tokens: int) -> Case:
    case: Case = {"algorithm": rng.choice(("sha256", "sha256_cbor"))}
    if rng.random() < 0.6:
        case["hash_seed"] = rng.choice(("0", "1", "a longer seed"))
    if rng.random() < 0.5:
        case["lora"] = [rng.choice(_NAMES), rng.choice(["/adapters/one", "organization/adapter", "adapter"])]
    if rng.random() < 0.3:
        case["lookahead"] = rng.choice((1, 3))
    if rng.random() < 0.5:
        items: list[list[Any]] = []
        at = rng.randrange(5)
        while at < tokens and len(items) < 5:
            length = rng.randint(1, 9)
            items.append([rng.choice(("image", "f" * 64)), at, length])
            at += length + rng.randrange(4)
        case["multimodal"] = items
    return case


def _of_sglang(rng: random.Random, tokens: int) -> Case:
    case: Case = {"bigram": rng.random() < 0.3, "dynamo": rng.random() < 0.3}
    if rng.random() < 0.5:
        case["extra_key"] = rng.choice(_NAMES)
    if rng.random() < 0.5:
        case["lora_id"] = f"{rng.getrandbits(128):032x}"
    return case


def _vllm_numbers(case: Case) -> list[int]:
    import os

    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    function = get_hash_fn_by_name(case["algorithm"])
    before = os.environ.pop("PYTHONHASHSEED", None)
    try:
        if "hash_seed" in case:
            os.environ["PYTHONHASHSEED"] = case["hash_seed"]
        kv_cache_utils.init_none_hash(function)
    finally:
        os.environ.pop("PYTHONHASHSEED", None)
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before
    lora = case.get("lora")
    request = Request(
        request_id="request",
        prompt_token_ids=list(case["tokens"]),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=[
            MultiModalFeatureSpec(
                data=None, modality="image", identifier=_fresh(name), mm_position=PlaceholderRange(offset, length)
            )
            for name, offset, length in case.get("multimodal", [])
        ],
        lora_request=LoRARequest(_fresh(lora[0]), 1, _fresh(lora[1])) if lora else None,
        cache_salt=_fresh(case["cache_salt"]) if "cache_salt" in case else None,
        block_hasher=kv_cache_utils.get_request_block_hasher(case["size"], function, case.get("lookahead", 0)),
    )
    return [int(kv_cache_utils.maybe_convert_block_hash(each)) for each in request.block_hashes]


def _sglang_numbers(case: Case) -> list[int]:
    from sglang.srt.mem_cache.events import KVCacheEventRecorder, KvEventLoraNames
    from sglang.srt.mem_cache.radix_cache import RadixKey

    size, names = case["size"], KvEventLoraNames()
    extra_key, lora_id = case.get("extra_key"), case.get("lora_id")
    if lora_id is not None:  # as Req does
        extra_key = (extra_key or "") + lora_id
        names.register(SimpleNamespace(extra_key=extra_key, lora_id=lora_id), "adapter")
    recorder = KVCacheEventRecorder(
        enabled=True, page_size=size, dynamo_format=case.get("dynamo", False), lora_names=names
    )
    bigram = case.get("bigram", False)
    whole = max(0, len(case["tokens"]) - bigram) // size * size
    tokens = array("q", case["tokens"][: whole + bigram if whole else 0])
    root = SimpleNamespace(key=RadixKey(array("q")), parent=None, hash_value=[], event_hash_value=None)
    key = RadixKey(tokens, extra_key, bigram, cache_salt=case.get("cache_salt"))
    node = SimpleNamespace(key=key, parent=root, hash_value=None, event_hash_value=None)
    if not whole:
        return []
    recorder.record_store(node)
    return [number & (2**64 - 1) for event in recorder.take() for number in event.block_hashes]


def _fresh(text: str) -> str:
    """Another object: what an engine decodes is none of ours, and pickle tells them apart."""
    return text.encode().decode()


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
