"""vLLM's chunks as engines of another kind have them: where keys and values lie in a block, as vLLM's own parts say."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvgrpc.engines.vllm.offload import common
from kvgrpc.engines.vllm.offload.common import AttentionFacts, attention_facts, axes_of, note_request
from kvgrpc.hashing import each_block_hash, page_hashes, storage_seed
from kvgrpc.pull.common import PageAxes
from kvgrpc.pull.names import NotedNames

LAYERS, HEADS, TOKENS, DIM = 3, 2, 16, 8
Split = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def split_content(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention and Triton: keys and values of a token and head beside each other."""
    keys, values = block.split(DIM, dim=-1)
    return keys, values


def split_rows(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU's: the content of a head read as twice as many rows."""
    keys, values = block.reshape(HEADS, 2 * TOKENS, DIM).chunk(2, dim=1)
    return keys, values


BACKENDS: list[tuple[str, str, Split]] = [
    ("LBHNC", "CPU_ATTN", split_rows),
    ("LBHNC", "FLASH_ATTN", split_content),
    ("LBNHC", "FLASH_ATTN", split_content),
    ("LBHNC", "TRITON_ATTN", split_content),
    ("LBNHC", "TRITON_ATTN", split_content),
]


@pytest.fixture(autouse=True)
def by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for CPUs, of which no build is here, keeps tokens one after the other."""
    monkeypatch.setattr(common, "cpu_content", lambda _: "head,kv,token,dim")


def test_a_kernel_for_cpus_that_packs_keys_has_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert axes("LBHNC", "CPU_ATTN") is not None
    monkeypatch.setattr(common, "cpu_content", lambda _: "head,kv,vec")
    assert axes("LBHNC", "CPU_ATTN") is None


def block_of(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A block of one layer: head, token, content as vLLM's code sees it; and its memory."""
    order = [axis - 1 for axis in KVCacheLayout[layout].layer_view_order if axis]  # without the block
    sizes = (HEADS, TOKENS, 2 * DIM)
    memory = torch.randn([sizes[axis] for axis in order])
    return memory.permute([order.index(axis) for axis in range(3)]), memory


def worker(backend: str, heads: int, names: Sequence[str]) -> Any:
    """What the adapter looks at of a worker."""
    layer = SimpleNamespace(
        attn_backend=SimpleNamespace(get_name=lambda: backend),
        num_kv_heads=heads,
        head_size=DIM,
        kv_cache=torch.empty(5, heads, TOKENS, 2 * DIM),
    )
    layers = dict.fromkeys(names, layer)
    compilation = SimpleNamespace(static_forward_context=layers)
    return SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation))


def axes(layout: str, backend: str, **changes: Any) -> PageAxes | None:
    """As the adapter finds them of an engine with one or more workers."""
    names = tuple(f"model.layers.{number}.self_attn.attn" for number in range(LAYERS))
    found = {"world_size": 1, "blocks": 1, "dtype": "float32", "mla": False, "heads": HEADS, "bytes": 0, **changes}
    size = found["world_size"]
    group = SimpleNamespace(layer_names=found.get("names", names), tokens_per_block=found.get("tokens", TOKENS))
    spec = SimpleNamespace(
        config=SimpleNamespace(
            parallel=SimpleNamespace(world_size=size, tp_size=found.get("tp_size", size)),
            cache=SimpleNamespace(blocks_per_chunk=found["blocks"]),
            groups=[group],
            kv_cache_layout=layout,
            canonical_layout=found.get("canonical", False),
            model=SimpleNamespace(dtype=found["dtype"]),
        )
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(use_mla=found["mla"], get_total_num_kv_heads=lambda: found["heads"])
    )
    facts = [attention_facts(worker(backend, HEADS // size, names)) for _ in range(size)]
    nbytes = LAYERS * HEADS * found["blocks"] * TOKENS * 2 * DIM * 4 + found["bytes"]
    return axes_of(spec, config, facts, nbytes)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(
    ("layout", "backend", "split"), BACKENDS, ids=lambda each: each if isinstance(each, str) else ""
)
def test_keys_and_values_of_every_backend_are_found_where_it_reads_them(
    layout: str, backend: str, split: Split, blocks: int
) -> None:
    """A chunk has the blocks of a layer, then those of the next."""
    found = axes(layout, backend, blocks=blocks)
    assert found is not None
    layers = [[block_of(layout) for _ in range(blocks)] for _ in range(LAYERS)]
    chunk = torch.cat([memory.reshape(-1) for its in layers for _, memory in its])
    common = torch.zeros_like(chunk)
    found.to_common(chunk.data_ptr(), common.data_ptr())
    by_head = [
        torch.stack([torch.cat([split(block)[kind] for block, _ in its], 1) for its in layers]) for kind in (0, 1)
    ]
    expected = torch.stack(by_head).transpose(2, 3)  # kv, layer, token, head
    assert torch.equal(common.view(2, LAYERS, blocks * TOKENS, HEADS, DIM), expected)
    assert ctypes.string_at(common.data_ptr(), 4 * DIM) == bytes(expected[0, 0, 0, 0].numpy().tobytes())


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 2},
        {"dtype": "fp8"},
        {"dtype": "bfloat16"},
        {"mla": True},
        {"heads": 2 * HEADS},
        {"tokens": 2 * TOKENS},
        {"bytes": 4096},
        {"names": ("model.layers.1.self_attn.attn", "model.layers.0.self_attn.attn", "model.layers.2.self_attn.attn")},
    ],
    ids=lambda changes: " ".join(map(str, *changes.items())) if "dtype" in changes else next(iter(changes)),
)
def test_chunks_that_are_made_of_something_else_are_for_vllm_alone(changes: dict[str, Any]) -> None:
    assert axes("LBHNC", "FLASH_ATTN", **changes) is None


def test_workers_whose_heads_lie_in_one_chunk_are_as_one() -> None:
    assert axes("LBHNC", "FLASH_ATTN", world_size=2, canonical=True) == axes("LBHNC", "FLASH_ATTN")
    assert axes("LBHNC", "FLASH_ATTN", world_size=2, canonical=True, tp_size=1) is None, (
        "stages have layers of their own"
    )


def test_an_order_that_nobody_looked_at_is_for_vllm_alone() -> None:
    assert axes("LBHNC", "FLASHINFER") is None
    assert axes("BLHNC", "FLASH_ATTN") is None
    assert attention_facts(SimpleNamespace()) == AttentionFacts("", ())
    assert axes_of(SimpleNamespace(config=None), None, [], 4096) is None


def request(tokens: list[int] | None, **changes: Any) -> Any:
    salt = changes.get("cache_salt") or ""
    hashes = list(each_block_hash(tokens or range(2 * TOKENS), TOKENS, cache_salt=salt))
    empty: dict[str, Any] = {"lora_request": None, "mm_features": [], "prompt_embeds": None, "cache_salt": None}
    return SimpleNamespace(**{"prompt_token_ids": tokens, "block_hashes": hashes, **empty, **changes})


def known(each: Any, tokens: list[int], salt: str | None = None) -> list[str]:
    names = NotedNames(TOKENS, 64)
    note_request(names, each, 1)
    whole = tokens[: len(tokens) // TOKENS * TOKENS]
    try:
        return names.own([name.hex() for name in page_hashes(whole, TOKENS, after=storage_seed(None, salt))])
    finally:
        names.close()


def test_a_prompt_of_tokens_alone_has_common_names() -> None:
    tokens = list(range(3 * TOKENS + 5))
    plain, salted = request(tokens), request(tokens, cache_salt="tenant")
    assert known(plain, tokens) == [each.hex() for each in plain.block_hashes]
    assert known(salted, tokens, "tenant") == [each.hex() for each in salted.block_hashes]
    assert known(salted, tokens) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_request": "adapter"},
        {"mm_features": ["image"]},
        {"prompt_embeds": "embeddings"},
        {"prompt_token_ids": None},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_prompt_of_more_than_tokens_has_none(changes: dict[str, Any]) -> None:
    tokens = list(range(3 * TOKENS))
    assert known(request(tokens, **changes), tokens) == []
    assert known(None, tokens) == []
