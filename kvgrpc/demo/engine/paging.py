"""The memory of the KV cache: one region for each layer and component, addressed by page number.

The memory comes from a data plane, so that a peer can write into it; the model sees it as tensors.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvgrpc.demo.engine.config import EngineConfig
from kvgrpc.demo.engine.model import LayerCache
from kvgrpc.model import Pool, PoolKind, Region

COMPONENTS = ("k", "v")


class Memory(Protocol):
    """The source of pages: a data plane, or ``OwnMemory``."""

    def allocate(self, nbytes: int) -> int:
        """Zeroed memory, page aligned; its address."""


class OwnMemory:
    """Memory of this process alone, for an engine that hands nothing off."""

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []

    def allocate(self, nbytes: int) -> int:
        self._blocks.append(mmap.mmap(-1, nbytes))
        return ctypes.addressof(ctypes.c_char.from_buffer(self._blocks[-1]))


class PagedPool:
    """All pages of one engine, float32 [pages, page_tokens, kv_heads, head_dim] for k and for v of each layer.

    The memory belongs to the data plane and lives until its close(); no tensor of the pool may be used after that.
    """

    def __init__(self, config: EngineConfig, memory: Memory) -> None:
        self.config = config
        model = config.model
        self._shape = (config.pages, config.page_tokens, model.kv_heads, model.head_dim)
        self._page_bytes = config.page_tokens * model.kv_heads * model.head_dim * 4
        region_bytes = config.pages * self._page_bytes
        names = [(layer, component) for layer in range(model.layers) for component in COMPONENTS]
        # Called before a layer is read: while a load is on its way, its pages come layer by layer.
        self.before_layer: Callable[[int], None] | None = None
        self._memory = memory  # which may end with its last user
        # One allocation for all regions: a data plane registers few large blocks far faster than many.
        base = memory.allocate(len(names) * region_bytes)
        addresses = {name: base + number * region_bytes for number, name in enumerate(names)}
        self._tensors = {name: _tensor_at(address, self._shape) for name, address in addresses.items()}
        self.pool = Pool(
            name="kv",
            kind=PoolKind.KV,
            page_tokens=config.page_tokens,
            pages=config.pages,
            dtype="float32",
            axes="token,head,dim",
            heads_total=model.kv_heads,
            head_count=model.kv_heads,
            regions=tuple(
                Region(layer, component, address, self._page_bytes, self._page_bytes)
                for (layer, component), address in addresses.items()
            ),
        )

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page number stands for, in all regions together."""
        return len(self._tensors) * self._page_bytes

    def region(self, layer: int, component: str) -> Tensor:
        """The live tensor of one region."""
        return self._tensors[layer, component]

    def sequence(self, pages: Sequence[int]) -> list[LayerCache]:
        """For each layer, the cache of a sequence whose tokens lie in ``pages``, in order."""
        index = torch.tensor(pages, dtype=torch.int64)
        layers = range(self.config.model.layers)
        return [
            _PagedLayer(self.region(layer, "k"), self.region(layer, "v"), index, self._gate(layer)) for layer in layers
        ]

    def _gate(self, layer: int) -> Callable[[], None] | None:
        wait = self.before_layer
        return None if wait is None else lambda: wait(layer)

    def digest(self, pages: Sequence[int], tokens: int) -> str:
        """A hash of the first ``tokens`` tokens in ``pages``, over all regions: equal exactly when the bytes are."""
        total = hashlib.blake2b(digest_size=16)
        index = torch.tensor(pages, dtype=torch.int64)
        for region in self._tensors.values():
            total.update(region[index].flatten(0, 1)[:tokens].numpy().data)
        return total.hexdigest()


class _PagedLayer:
    """One layer of one sequence. Reads gather the pages into fresh memory: where they lie never changes a result."""

    def __init__(self, keys: Tensor, values: Tensor, pages: Tensor, gate: Callable[[], None] | None) -> None:
        self._keys, self._values, self._pages = keys, values, pages
        self._gate = gate

    def append(self, start: int, keys: Tensor, values: Tensor) -> None:
        page_tokens = self._keys.shape[1]
        position = torch.arange(start, start + len(keys))
        page, slot = self._pages[position // page_tokens], position % page_tokens
        self._keys[page, slot] = keys
        self._values[page, slot] = values

    def read(self, length: int) -> tuple[Tensor, Tensor]:
        if self._gate is not None:
            self._gate()
        pages = self._pages[: -(-length // self._keys.shape[1])]
        return self._keys[pages].flatten(0, 1)[:length], self._values[pages].flatten(0, 1)[:length]


def _tensor_at(address: int, shape: tuple[int, ...]) -> Tensor:
    count = int(np.prod(shape))
    memory = memoryview((ctypes.c_float * count).from_address(address)).cast("B")
    return torch.from_numpy(np.frombuffer(memory, dtype=np.float32)).view(shape)
