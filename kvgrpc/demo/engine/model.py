"""A small Llama in plain torch over a paged KV pool: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Parameters bear the names of transformers' LlamaForCausalLM, so that a test can load them there and compare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from kvgrpc.demo.engine.config import ModelConfig


class LayerCache(Protocol):
    """The KV cache of one sequence in one layer."""

    def append(self, start: int, keys: Tensor, values: Tensor) -> None:
        """Stores float32 [tokens, kv_heads, head_dim] at positions ``start`` and after."""

    def read(self, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions 0 to ``length``, each float32 [length, kv_heads, head_dim]."""


class Llama(nn.Module):
    """The model. Not trained: its weights are drawn from ``config.seed``, the same in every process."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RmsNorm(config.hidden, config.norm_epsilon)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        _draw_weights(self, config)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start: int, caches: Sequence[LayerCache], last: int = -1) -> Tensor:
        """Appends int64 [tokens] at position ``start`` of a sequence; logits [vocabulary] that follow tokens[last]."""
        hidden = self.embed_tokens(tokens)
        rotation = _rotation(self.config, start, len(tokens))
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, start, rotation, cache)
        logits: Tensor = self.lm_head(self.norm(hidden[last]))
        return logits


class Layer(nn.Module):
    """Attention and feed-forward, each on the normalised input and added to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden, config.norm_epsilon)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden, config.norm_epsilon)
        self.mlp = SwiGlu(config)

    def forward(self, hidden: Tensor, start: int, rotation: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), start, rotation, cache)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class SelfAttention(nn.Module):
    """Grouped-query attention: several query heads share one head of the cache."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def forward(self, hidden: Tensor, start: int, rotation: tuple[Tensor, Tensor], cache: LayerCache) -> Tensor:
        count, end = len(hidden), start + len(hidden)
        queries = _rotate(self.q_proj(hidden).view(count, self.heads, self.head_dim), rotation)
        keys = _rotate(self.k_proj(hidden).view(count, self.kv_heads, self.head_dim), rotation)
        cache.append(start, keys, self.v_proj(hidden).view(count, self.kv_heads, self.head_dim))
        keys, values = cache.read(end)
        # [kv_heads, group * tokens, head_dim]: the query heads of one group are rows of one product.
        queries = queries.view(count, self.kv_heads, -1, self.head_dim).permute(1, 2, 0, 3)
        scores = queries.reshape(self.kv_heads, -1, self.head_dim) @ keys.permute(1, 2, 0)
        scores = (scores / math.sqrt(self.head_dim)).view(self.kv_heads, -1, count, end)
        scores[..., start:].masked_fill_(_future(count), -math.inf)
        mixed = scores.softmax(-1).view(self.kv_heads, -1, end) @ values.transpose(0, 1)
        mixed = mixed.view(self.heads, count, self.head_dim).transpose(0, 1)
        output: Tensor = self.o_proj(mixed.reshape(count, -1))
        return output


class SwiGlu(nn.Module):
    """The feed-forward part."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class RmsNorm(nn.Module):
    """Divides by the root of the mean square, then scales."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * (hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.epsilon))


def _draw_weights(model: Llama, config: ModelConfig) -> None:
    generator = torch.Generator().manual_seed(config.seed)
    with torch.no_grad():
        model.embed_tokens.weight.normal_(0, 1, generator=generator)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0, config.spread / math.sqrt(module.in_features), generator=generator)


def _rotation(config: ModelConfig, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [count, 1, head_dim], of positions ``start`` and after."""
    frequency = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    angle = torch.outer(torch.arange(start, start + count, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos()[:, None], angle.sin()[:, None]


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


def _future(count: int) -> Tensor:
    """True where a column's token comes after the row's, [count, count]."""
    return torch.ones(count, count, dtype=torch.bool).triu(1)
