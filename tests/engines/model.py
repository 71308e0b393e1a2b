"""A tiny Llama with random weights, and what transformers' greedy decoding makes of a prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 256
# How far apart the two best logits must be, in parts of the spread: then another token is a wrong KV cache.
SURE = 1e-3


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    heads: int
    kv_heads: int


TINY = Size(layers=2, hidden=64, heads=4, kv_heads=2)  # 2 KiB of KV cache a token
WIDE = Size(layers=8, hidden=256, heads=8, kv_heads=8)  # 32 KiB: 4 MiB for 128 tokens


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    tokens: list[int]


class Reference:
    """The model, written to ``folder``/model for engines to load."""

    def __init__(self, folder: Path, size: Size = TINY, seed: int = 0) -> None:
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=size.hidden,
            intermediate_size=2 * size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            head_dim=64,
            vocab_size=VOCABULARY,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
            initializer_range=0.3 if size.hidden <= 64 else 0.1,
        )
        self._model = LlamaForCausalLM(config).float().eval()
        self._draw = random.Random(seed)
        self.path = folder / "model"
        self._model.save_pretrained(self.path)

    def renamed(self, name: str) -> Path:
        """The same in a folder of another name, which is where it is from now on."""
        self.path = self.path.rename(self.path.with_name(name))
        return self.path

    def case(self, length: int, new_tokens: int = 8, prefix: list[int] | None = None) -> Case:
        """A random prompt of ``length`` tokens that begins with ``prefix``, and its greedy continuation."""
        while True:
            start = list(prefix or [])
            prompt = start + [self._draw.randrange(3, VOCABULARY) for _ in range(length - len(start))]
            tokens = self._continue(prompt, new_tokens)
            if tokens is not None:
                return Case(prompt, tokens)

    @torch.no_grad()
    def _continue(self, prompt: list[int], new_tokens: int) -> list[int] | None:
        """None when a token was won by too little."""
        inputs, cache, tokens = torch.tensor([prompt]), None, []
        for _ in range(new_tokens):
            out = self._model(inputs, past_key_values=cache, use_cache=True)
            logits, cache = out.logits[0, -1], out.past_key_values
            best = logits.topk(2).values
            if best[0] - best[1] <= SURE * (logits.max() - logits.min()):
                return None
            inputs = logits.argmax().view(1, 1)
            tokens.append(int(inputs))
        return tokens
