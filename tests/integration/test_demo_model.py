"""The demo's engine computes what it should: the only test module that imports torch."""

from __future__ import annotations

import dataclasses
import math

import pytest

pytest.importorskip("torch")

import torch

from kvgrpc.dataplane import open_plane
from kvgrpc.demo.engine.config import EngineConfig, ModelConfig
from kvgrpc.demo.engine.engine import DemoEngine, Run
from kvgrpc.demo.engine.model import Llama
from kvgrpc.demo.engine.page_allocator import OutOfPages
from kvgrpc.demo.engine.paging import OwnMemory
from kvgrpc.demo.prompts import ANSWER_TOKENS, built_in

CONFIG = EngineConfig()
LONG = tuple(built_in()[3].tokens)
ANSWER = ANSWER_TOKENS


@pytest.fixture(scope="module")
def single() -> DemoEngine:
    """The engine that stands for the single process."""
    return DemoEngine(CONFIG, OwnMemory())


def answer(engine: DemoEngine, run: Run, token: int, count: int = ANSWER) -> list[int]:
    """The answer that begins with ``token``."""
    tokens = [token]
    while len(tokens) < count:
        tokens.append(engine.compute_token(run, tokens[-1]))
    return tokens


def prefilled(engine: DemoEngine, run: Run) -> int:
    """Computes the whole prompt; the first token of the answer."""
    token = -1
    while not run.prompt_computed:
        token = engine.compute_chunk(run)
        engine.keep(run)
    return token


def in_one_process(engine: DemoEngine, prompt: tuple[int, ...], count: int = ANSWER) -> tuple[list[int], str]:
    """Answer, and digest of the prompt's KV cache."""
    run = engine.admit(prompt, count)
    token = -1
    while not run.prompt_computed:
        token = engine.compute_chunk(run)
    digest = engine.memory.digest(run.pages, len(prompt))
    tokens = answer(engine, run, token, count)
    engine.release(run)
    return tokens, digest


def hand_over(prefill: DemoEngine, source: Run, decode: DemoEngine, destination: Run) -> None:
    """What kvgrpc does: every page that decode does not have, in every region."""
    last = CONFIG.pages_for(len(source.prompt))
    for mine, theirs in zip(prefill.memory.pool.regions, decode.memory.pool.regions, strict=True):
        from_region = prefill.memory.region(mine.layer, mine.component)
        to_region = decode.memory.region(theirs.layer, theirs.component)
        to_region[destination.pages[destination.reused : last]] = from_region[source.pages[destination.reused : last]]
    decode.received(destination)
    decode.keep(destination)


def served(prefill: DemoEngine, decode: DemoEngine, prompt: tuple[int, ...]) -> tuple[list[int], str]:
    """As ``in_one_process``, by prefill and decode with their prefix caches."""
    source = prefill.admit_to_compute(prompt)
    token = prefilled(prefill, source)
    destination = decode.admit_to_receive(prompt, ANSWER)
    hand_over(prefill, source, decode, destination)
    prefill.release(source)
    digest = decode.memory.digest(destination.pages, len(prompt))
    tokens = answer(decode, destination, token)
    decode.release(destination)
    return tokens, digest


class Contiguous:
    """A cache without pages: everything is in one piece, and every query sees what came before it."""

    def __init__(self) -> None:
        self.keys = self.values = torch.empty(0)

    def append(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert start == 0
        self.keys, self.values = keys, values

    def read(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[:length], self.values[:length]


def naive_logits(model: Llama, prompt: tuple[int, ...]) -> torch.Tensor:
    """The model by its definition: one head and one position after the other, no cache, no chunks."""
    config = model.config
    hidden = model.embed_tokens(torch.tensor(prompt))
    half = config.head_dim // 2
    frequency = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(half)]
    angle = torch.tensor([[position * f for f in frequency] for position in range(len(prompt))])

    def rotated(head: torch.Tensor) -> torch.Tensor:
        first, second = head[:, :half], head[:, half:]
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], 1)

    def normal(values: torch.Tensor) -> torch.Tensor:
        return values / (values.pow(2).mean(1, keepdim=True) + config.norm_epsilon).sqrt()

    def head_of(projection: torch.nn.Linear, values: torch.Tensor, number: int) -> torch.Tensor:
        return (values @ projection.weight.T)[:, number * config.head_dim : (number + 1) * config.head_dim]

    for layer in model.layers:
        attention, values, heads = layer.self_attn, normal(hidden), []
        for number in range(config.heads):
            group = number * config.kv_heads // config.heads
            query = rotated(head_of(attention.q_proj, values, number))
            key = rotated(head_of(attention.k_proj, values, group))
            value = head_of(attention.v_proj, values, group)
            rows = [
                (query[row] @ key[: row + 1].T / math.sqrt(config.head_dim)).softmax(0) @ value[: row + 1]
                for row in range(len(prompt))
            ]
            heads.append(torch.stack(rows))
        hidden = hidden + torch.cat(heads, 1) @ attention.o_proj.weight.T
        values, mlp = normal(hidden), layer.mlp
        gate = values @ mlp.gate_proj.weight.T
        hidden = hidden + (gate * gate.sigmoid() * (values @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    return normal(hidden) @ model.lm_head.weight.T


def test_paged_and_chunked_is_the_model_by_its_definition(single: DemoEngine) -> None:
    prompt = LONG[:270]
    with torch.inference_mode():
        naive = naive_logits(single.model, prompt)[-1]
    whole = single.model(torch.tensor(prompt), 0, [Contiguous() for _ in single.model.layers])
    run = single.admit(prompt)
    token = prefilled(single, run)
    single.release(run)
    torch.testing.assert_close(whole, naive, rtol=1e-3, atol=1e-3)
    assert token == int(naive.argmax()) == int(whole.argmax())


def test_handed_over_prompts_go_on_as_in_a_single_process_to_the_bit(single: DemoEngine) -> None:
    prefill, decode = DemoEngine(CONFIG, OwnMemory()), DemoEngine(CONFIG, OwnMemory())
    # Other page numbers than the single process has, and another order.
    prefill.take_pages(3)
    decode.pages.release(reversed(decode.take_pages(40)))
    prompts = [prompt.tokens for prompt in built_in()]
    # Decode has the beginning of one: page by page, also what came from a chunk that was not full.
    prompts.append(prompts[1][:700] + prompts[0])
    for prompt in prompts:
        assert served(prefill, decode, prompt) == in_one_process(single, prompt)


def test_a_prefix_hit_is_whole_chunks_at_prefill_and_pages_at_decode(single: DemoEngine) -> None:
    prompt = LONG[:600]
    engine = DemoEngine(CONFIG, OwnMemory())
    first = engine.admit_to_compute(prompt)
    prefilled(engine, first)
    again = engine.admit_to_compute(prompt)
    received = engine.admit_to_receive(prompt, 0)
    assert (first.reused, again.reused, received.reused) == (0, 32, 37)
    assert again.pages[:32] == first.pages[:32]
    assert prefilled(engine, again) == in_one_process(single, prompt, 1)[0][0]


def test_a_prompt_of_whole_chunks_that_is_all_cached_still_computes_its_last_chunk() -> None:
    engine = DemoEngine(CONFIG, OwnMemory())
    prompt = LONG[:512]
    token = prefilled(engine, engine.admit_to_compute(prompt))
    run = engine.admit_to_compute(prompt)
    assert run.reused == 16
    assert prefilled(engine, run) == token


def test_a_full_pool_evicts_what_is_only_cached_and_refuses_what_does_not_fit() -> None:
    engine = DemoEngine(dataclasses.replace(CONFIG, pages=41), OwnMemory())
    run = engine.admit_to_compute(LONG[:320])
    prefilled(engine, run)
    engine.release(run)
    assert (engine.pages.free, engine.cache.idle) == (20, 20)
    engine.release(engine.admit(LONG[320:800]))
    assert engine.cache.idle == 10
    with pytest.raises(OutOfPages):
        engine.admit(LONG[:641])
    assert engine.cache.idle == 10


def test_tokens_vary_and_depend_on_pages_everywhere_in_the_prompt(single: DemoEngine) -> None:
    """Otherwise equal tokens would prove little: one page that is its neighbour's changes the answer almost always.
    (The demo compares the bytes of all pages too.)
    """
    run = single.admit(LONG, ANSWER)
    token = prefilled(single, run)
    right = answer(single, run, token)
    assert len(set(right)) > ANSWER // 2
    tried = range(0, len(LONG) // CONFIG.page_tokens - 1, 15)
    changed = 0
    for number in tried:
        swapped = list(run.pages)
        swapped[number] = run.pages[number + 1]
        changed += answer(single, dataclasses.replace(run, pages=swapped, computed=len(LONG)), token) != right
    single.release(run)
    assert changed >= 0.9 * len(tried)


def test_the_pool_is_real_memory_of_a_data_plane() -> None:
    plane = open_plane("shm")
    try:
        engine = DemoEngine(dataclasses.replace(CONFIG, pages=40), plane)
        assert (
            in_one_process(engine, LONG[:100], 2)[0]
            == in_one_process(DemoEngine(CONFIG, OwnMemory()), LONG[:100], 2)[0]
        )
        pool = engine.memory.pool
        assert len({region.address for region in pool.regions}) == 2 * CONFIG.model.layers
        assert engine.memory.bytes_per_page == sum(region.page_bytes for region in pool.regions) == 65_536
        del engine
    finally:
        plane.close(1.0)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("tokens", [1, 37, 700])
def test_the_model_is_transformers_llama(tokens: int) -> None:
    transformers = pytest.importorskip("transformers")
    ours = Llama(ModelConfig())
    config = ours.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=False,
        )
    ).eval()
    weights = {
        name if name.startswith("lm_head") else f"model.{name}": value for name, value in ours.state_dict().items()
    }
    theirs.load_state_dict(weights, strict=True)
    prompt = torch.tensor(LONG[:tokens])
    mine = ours(prompt, 0, [Contiguous() for _ in ours.layers])
    with torch.inference_mode():
        reference = theirs(prompt[None]).logits[0, -1]
    torch.testing.assert_close(mine, reference, rtol=1e-3, atol=1e-3)
    assert int(mine.argmax()) == int(reference.argmax())
