"""The sizes of the demo engine: one model, one page size, one chunk size, known to every process of the demo."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the Llama. Weights are random from ``seed``, float32; no two processes ever exchange them.

    ``spread`` is the standard deviation of a linear layer's output for inputs of variance 1. Above 1 attention is
    sharp and the network amplifies small differences, so that a wrong page anywhere changes the tokens.
    """

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 640
    vocabulary: int = 1024
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    spread: float = 2.0
    seed: int = 20_250_604


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine. A page holds ``page_tokens`` tokens; a prompt is computed ``chunk_tokens`` at a time.

    Chunks start at multiples of ``chunk_tokens``, also after a prefix hit, and the last is computed at full size: so a
    token after the same tokens has the same KV cache to the bit, wherever and after whatever else it is computed.
    """

    model: ModelConfig = ModelConfig()
    page_tokens: int = 16
    chunk_tokens: int = 256
    pages: int = 256

    @property
    def chunk_pages(self) -> int:
        return self.chunk_tokens // self.page_tokens

    @property
    def capacity(self) -> int:
        """Tokens of the longest prompt and answer together; one page is the engine's own."""
        return (self.pages - 1) * self.page_tokens

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)


PREFILL = EngineConfig()
# Decode keeps several prompts at once while it generates.
DECODE = EngineConfig(pages=512)
