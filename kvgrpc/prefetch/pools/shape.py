"""The components of a page, and the place of its bytes in each layout. Pure arithmetic: a dtype is only a size."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from kvgrpc.errors import InvalidRequest

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}


class HostLayout(enum.Enum):
    """Axes of the host pool for each component, outermost first (L layers, P pages, T tokens of a page).

    LAYER_FIRST: L P T; the device's own order, a page lies in L pieces. PAGE_FIRST: P T L; a page is one piece, and so
    is a token. PAGE_FIRST_DIRECT: P L T; a page is one piece, and so is a layer of it.
    """

    LAYER_FIRST = "layer_first"
    PAGE_FIRST = "page_first"
    PAGE_FIRST_DIRECT = "page_first_direct"


@dataclass(frozen=True, slots=True)
class Component:
    """One part of a page, the same size in each layer: "k", "v", "latent", "indexer", "state".

    ``layer_bytes`` is its size in one layer of one page.
    """

    name: str
    layer_bytes: int


@dataclass(frozen=True, slots=True)
class PageShape:
    """The make of a page. All components of a page are copied, stored and present together, or none is.

    ``heads`` of the model's ``heads_total``: those of this rank, where each token of each component has one after the
    other; 0: unknown, or there are none. They change no byte: with them pages can be had from other tensor-parallel
    sizes.
    """

    layers: int
    page_tokens: int
    components: tuple[Component, ...]
    dtype: str = "bfloat16"
    kind: str = "mha"
    heads: int = field(default=0, compare=False)
    heads_total: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise InvalidRequest.of("shape.layers", self.layers, "at least 1")
        if self.page_tokens < 1:
            raise InvalidRequest.of("shape.page_tokens", self.page_tokens, "at least 1")
        if not self.components:
            raise InvalidRequest.of("shape.components", self.components, "at least one")
        names = [component.name for component in self.components]
        if len(set(names)) != len(names):
            raise InvalidRequest.of("shape.components", names, "named differently")
        for component in self.components:
            if component.layer_bytes < 1:
                raise InvalidRequest.of(f"shape.components.{component.name}", component.layer_bytes, "at least 1 byte")
        self._check_heads()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, over all layers and components."""
        return self.layers * sum(component.layer_bytes for component in self.components)

    def with_heads(self, heads: int) -> PageShape:
        """The shape of a page at a rank that has so many heads."""
        components = (replace(each, layer_bytes=each.layer_bytes // self.heads * heads) for each in self.components)
        return replace(self, components=tuple(components), heads=heads)

    def _check_heads(self) -> None:
        if self.heads_total == 0:
            return
        if not 1 <= self.heads <= self.heads_total:
            raise InvalidRequest.of("shape.heads", self.heads, f"1 to {self.heads_total}, the heads_total of the model")
        for each in self.components:
            if each.layer_bytes % (self.page_tokens * self.heads):
                rule = f"a multiple of {self.page_tokens} tokens and {self.heads} heads"
                raise InvalidRequest.of(f"shape.components.{each.name}", each.layer_bytes, rule)

    @classmethod
    def mha(
        cls, layers: int, page_tokens: int, heads: int, head_dim: int, dtype: str = "bfloat16", heads_total: int = 0
    ) -> PageShape:
        """Keys and values, ``[page_tokens, heads, head_dim]`` each. Raises InvalidRequest.

        ``heads_total``: KV heads of the model, of which this rank has its share in their order; 0: unknown, and no
        pages are had from engines of another tensor-parallel size.
        """
        nbytes = page_tokens * _at_least_one("heads", heads) * _at_least_one("head_dim", head_dim) * dtype_bytes(dtype)
        components = Component("k", nbytes), Component("v", nbytes)
        return cls(layers, page_tokens, components, dtype, "mha", heads, heads_total)

    @classmethod
    def mla(
        cls, layers: int, page_tokens: int, latent_dim: int, dtype: str = "bfloat16", indexer_bytes: int = 0
    ) -> PageShape:
        """One latent, ``[page_tokens, latent_dim]``; ``indexer_bytes`` of a sidecar for each token and layer, if
        any."""
        latent = Component("latent", page_tokens * _at_least_one("latent_dim", latent_dim) * dtype_bytes(dtype))
        sidecar = (Component("indexer", page_tokens * indexer_bytes),) if indexer_bytes else ()
        return cls(layers, page_tokens, (latent, *sidecar), dtype, "mla")


def dtype_bytes(dtype: str) -> int:
    """Raises InvalidRequest for a dtype that no KV cache has."""
    if dtype not in DTYPE_BYTES:
        raise InvalidRequest.of("dtype", dtype, f"one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class ComponentBlock:
    """The memory of one component in a host pool: bytes from its start.

    Layer ``l`` of page ``p`` begins at ``p * page_stride + l * layer_stride``, and is ``rows`` pieces of ``row_bytes``,
    ``row_stride`` apart.
    """

    component: Component
    nbytes: int
    page_stride: int
    layer_stride: int
    rows: int
    row_bytes: int
    row_stride: int


def block_of(component: Component, shape: PageShape, layout: HostLayout, pages: int) -> ComponentBlock:
    """The place of a component's bytes."""
    layer, layers = component.layer_bytes, shape.layers
    whole = pages * layers * layer
    if layout is HostLayout.LAYER_FIRST:
        return ComponentBlock(component, whole, layer, pages * layer, 1, layer, layer)
    if layout is HostLayout.PAGE_FIRST and layer % shape.page_tokens == 0:
        token = layer // shape.page_tokens
        return ComponentBlock(component, whole, layers * layer, token, shape.page_tokens, token, layers * token)
    # State that does not divide into tokens has no order of tokens either.
    return ComponentBlock(component, whole, layers * layer, layer, 1, layer, layer)


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise InvalidRequest.of(f"shape.{name}", value, "at least 1")
    return value
