"""The device pool: the engine's KV tensors, seen as bytes of pages, and who owns which page."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvgrpc.errors import InvalidRequest
from kvgrpc.prefetch.pools.pages import PageTable
from kvgrpc.prefetch.pools.shape import PageShape


class DevicePool:
    """``pages`` pages on one device. ``tensors[layer, component]`` is contiguous and holds them page after page.

    The tensors are the engine's, in whatever dtype and shape, for example ``[pages * page_tokens, heads, head_dim]``;
    copies see ``rows(layer, component)``, uint8 ``[pages, layer_bytes]`` of the same memory. ``table`` says who owns
    what; an engine with an allocator of its own leaves it alone and passes page numbers to the copies.
    """

    def __init__(self, shape: PageShape, pages: int, tensors: Mapping[tuple[int, str], Tensor]) -> None:
        self.shape = shape
        self.pages = pages
        self.table = PageTable(pages, "device pool")
        self._rows: dict[tuple[int, str], Tensor] = {}
        for layer in range(shape.layers):
            for component in shape.components:
                name = (layer, component.name)
                if name not in tensors:
                    raise InvalidRequest.of("tensors", f"none for layer {layer}, {component.name}", "one for each")
                tensor = tensors[name]
                nbytes = tensor.numel() * tensor.element_size()
                if not tensor.is_contiguous() or nbytes != pages * component.layer_bytes:
                    rule = f"contiguous, {pages} pages of {component.layer_bytes} bytes"
                    raise InvalidRequest.of(f"tensors[{layer}, {component.name}]", f"{tuple(tensor.shape)}", rule)
                self._rows[name] = tensor.view(torch.uint8).view(pages, component.layer_bytes)
        self.device = next(iter(self._rows.values())).device

    @classmethod
    def allocate(cls, shape: PageShape, pages: int, device: str = "cpu") -> DevicePool:
        """A pool with zeroed memory of its own."""
        tensors = {
            (layer, component.name): torch.zeros(pages * component.layer_bytes, dtype=torch.uint8, device=device)
            for layer in range(shape.layers)
            for component in shape.components
        }
        return cls(shape, pages, tensors)

    def rows(self, layer: int, component: str) -> Tensor:
        """The live bytes of one component of one layer, a row for each page."""
        return self._rows[layer, component]
