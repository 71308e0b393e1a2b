"""The KV cache of the toy engine: K and V of each layer, page by page, and an aux row for each request."""

from __future__ import annotations

import torch

from kvgrpc.server import AuxBuffer, Pool

LAYERS, PAGES, PAGE_TOKENS, HEADS, HEAD_DIM = 4, 64, 16, 2, 32
AUX_ROWS = 8


class Memory:
    """``cache[layer, "k"]``: float16[PAGES, PAGE_TOKENS, HEADS, HEAD_DIM]; ``aux``: int64[AUX_ROWS, 1]."""

    def __init__(self) -> None:
        shape = (PAGES, PAGE_TOKENS, HEADS, HEAD_DIM)
        parts = [(layer, part) for layer in range(LAYERS) for part in "kv"]
        self.cache = {part: torch.zeros(shape, dtype=torch.float16) for part in parts}
        self.aux = torch.zeros((AUX_ROWS, 1), dtype=torch.int64)

    @property
    def pool(self) -> Pool:
        return Pool.from_arrays(self.cache, page_tokens=PAGE_TOKENS)

    @property
    def aux_buffers(self) -> tuple[AuxBuffer, ...]:
        return AuxBuffer.from_arrays([self.aux])

    def compute(self, page: int, value: float) -> None:
        """What a model would: this engine's K is the value, its V the negative, a little more in each layer."""
        for (layer, part), tensor in self.cache.items():
            tensor[page] = (value + layer / 8) * (1 if part == "k" else -1)

    def holds(self, page: int, value: float) -> bool:
        return all(
            bool((tensor[page] == (value + layer / 8) * (1 if part == "k" else -1)).all())
            for (layer, part), tensor in self.cache.items()
        )
