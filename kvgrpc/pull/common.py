"""Pages as an engine of another kind can take them: an order of bytes that all know, and common names of the pages.

Engines put the axes of a page in orders of their own, and hash tokens in ways of their own. So a holder lends in one
order, whatever its own is, and pages are named by SGLang's chain of hashes, which whoever has the tokens can compute.
Pure but for ``to_common`` and ``from_common``, which copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvgrpc.prefetch.storage.keys import PageIdentity
from kvgrpc.pull.heads import HeadRows, PageHeads, Share, ranks_with

LAYOUT = "kvgrpc-common-1"
"""The layout of an identity begins so where the pages are in the common order, with the common names."""
ORDER = ("kv", "layer", "block", "token", "head")
# Quantised elements mean nothing without scales, which each engine keeps elsewhere.
DTYPES = frozenset({"float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class PageAxes:
    """A page of keys and values of ``heads`` of the model's heads. ``order``: its axes, outermost first; innermost are
    the ``head_bytes`` of one head of keys or of values, of one token in one layer. A page may be made of ``blocks`` of
    ``tokens`` each, one after the other; "block" may be left out where it is one."""

    order: tuple[str, ...]
    layers: int
    tokens: int
    heads: int
    head_bytes: int
    blocks: int = 1

    def __post_init__(self) -> None:
        left_out = {"block"} - set(self.order) if self.blocks == 1 else set()
        if sorted((*self.order, *left_out)) != sorted(ORDER):
            raise ValueError(f"{self.order} are not the axes {ORDER} of a page of {self.blocks} blocks")

    @property
    def nbytes(self) -> int:
        return 2 * self.layers * self.page_tokens * self.heads * self.head_bytes

    @property
    def page_tokens(self) -> int:
        return self.blocks * self.tokens

    @property
    def is_common(self) -> bool:
        """True if nothing has to be moved."""
        return self._all(self.order) == ORDER

    def identity(self, own: PageIdentity) -> PageIdentity:
        """Of the page in the common order, at a cache with this identity."""
        layout = f"{LAYOUT} layers={self.layers} heads={self.heads} head_bytes={self.head_bytes}"
        return PageIdentity(
            model=own.model,
            revision=own.revision,
            dtype=own.dtype,
            layout=layout,
            page_size=self.page_tokens,
            tp_rank=own.tp_rank,
            tp_size=own.tp_size,
        )

    def to_common(self, source: int, destination: int) -> None:
        """Copies a page from the address ``source``, in its own order, to ``destination``, in the common one."""
        self._page(destination, ORDER)[:] = self._page(source, self._all(self.order))

    def from_common(self, source: int, destination: int) -> None:
        """The other way."""
        self._page(destination, self._all(self.order))[:] = self._page(source, ORDER)

    def _all(self, order: tuple[str, ...]) -> tuple[str, ...]:
        """With "block" where it changes nothing."""
        if "block" in order:
            return order
        at = order.index("token")
        return (*order[:at], "block", *order[at:])

    def _page(self, address: int, order: Sequence[str]) -> npt.NDArray[np.void]:
        """A page that lies at an address in this order, with its axes in the common one."""
        sizes = {"kv": 2, "layer": self.layers, "block": self.blocks, "token": self.tokens, "head": self.heads}
        memory: Any = (ctypes.c_uint8 * self.nbytes).from_address(address)
        flat: npt.NDArray[np.void] = np.frombuffer(memory, np.dtype((np.void, self.head_bytes)))
        page: npt.NDArray[np.void] = flat.reshape([sizes[axis] for axis in order])
        in_order: npt.NDArray[np.void] = page.transpose([order.index(axis) for axis in ORDER])
        return in_order


class PageNames(Protocol):
    """An engine's own hashes of pages and the common ones. Thread-safe. Both answer for leading pages, as far as they
    know them."""

    def common(self, own: Sequence[str]) -> Sequence[str]: ...

    def own(self, common: Sequence[str]) -> Sequence[str]: ...


class SameNames:
    """Of an engine that names its pages by the common hashes."""

    def common(self, own: Sequence[str]) -> Sequence[str]:
        return own

    def own(self, common: Sequence[str]) -> Sequence[str]:
        return common


@dataclass(frozen=True, slots=True)
class CommonPages:
    """The pages of a cache as engines of another kind have them. ``model``: its name to those, where the cache's own
    identity has another; ``heads_total``: the model's heads, of which a rank may have some; 0: not told, so that
    engines of other tensor-parallel sizes are none of ours."""

    axes: PageAxes
    names: PageNames = field(default_factory=SameNames)
    model: str = ""
    heads_total: int = 0

    def identity(self, own: PageIdentity) -> PageIdentity:
        """Of these pages, at a cache with this identity."""
        found = self.axes.identity(own)
        return replace(found, model=self.model) if self.model else found

    def heads(self, own: PageIdentity) -> PageHeads:
        """The heads of such a page, which lie so in the common order."""
        axes = self.axes
        rows = HeadRows(2 * axes.layers * axes.page_tokens, axes.head_bytes)
        total = self.heads_total
        return PageHeads(total, 0, total, (rows,)).of_rank(own.tp_size, own.tp_rank)

    def shares(self, own: PageIdentity, tp_size: int) -> list[Share]:
        """The ranks of an engine of another kind and of this size that have such a page together; none where it divides
        the heads otherwise."""
        if not self.heads_total:
            return []
        heads = self.heads(own)
        return [self._share(own, heads.of_rank(tp_size, tp), tp_size, tp) for tp in ranks_with(heads, tp_size)]

    def _share(self, own: PageIdentity, theirs: PageHeads, tp_size: int, tp: int) -> Share:
        pages = replace(self, axes=replace(self.axes, heads=theirs.count))
        return Share(tp, pages.identity(replace(own, tp_rank=tp, tp_size=tp_size)), (theirs,))


def is_common(layout: str) -> bool:
    """True if an identity with this layout asks for pages in the common order."""
    return layout.startswith(f"{LAYOUT} ")


__all__ = ["DTYPES", "LAYOUT", "ORDER", "CommonPages", "PageAxes", "PageNames", "SameNames", "is_common"]
