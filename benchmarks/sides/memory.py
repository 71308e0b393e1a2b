"""The memory of one side: pages whose content says where they came from, so that every byte can be checked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
POISON = np.uint64(0xA5A5A5A5A5A5A5A5)
MIX = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Shape:
    """Regions of pages, and items of one aux buffer; sizes in bytes, multiples of 8."""

    regions: int
    pages: int
    page_bytes: int
    aux_items: int
    aux_item_bytes: int = 64

    @property
    def region_bytes(self) -> int:
        return self.pages * self.page_bytes


class Memory:
    """Pages as words by (region, page, word), aux items as words by (item, word)."""

    def __init__(self, shape: Shape, allocate: Callable[[int], int]) -> None:
        self.shape = shape
        self.regions = [allocate(shape.region_bytes) for _ in range(shape.regions)]
        self.aux = allocate(shape.aux_items * shape.aux_item_bytes)
        self._views = [_words(address, shape.region_bytes).reshape(shape.pages, -1) for address in self.regions]
        self._aux = _words(self.aux, shape.aux_items * shape.aux_item_bytes).reshape(shape.aux_items, -1)
        self._content = np.arange(shape.page_bytes // 8, dtype=np.uint64) * np.uint64(MIX)

    def fill(self, generation: int, pages: Numbers) -> None:
        """Makes every page differ from every other, and from the same page of another generation."""
        for region, view in enumerate(self._views):
            for page in np.unique(pages).tolist():
                np.add(self._content, self._key(generation, region, page), out=view[page])
        self._aux[:] = self._aux_content(generation)

    def poison(self, pages: Numbers) -> None:
        """So that what a former turn left cannot pass for what this one brought."""
        for view in self._views:
            for page in np.unique(pages).tolist():
                view[page] = POISON
        self._aux[:] = POISON

    def check(self, generation: int, source: Numbers, destination: Numbers) -> None:
        """Raises AssertionError unless page ``destination[i]`` holds the peer's ``source[i]``; a later pair wins."""
        last = dict(zip(destination.tolist(), source.tolist(), strict=True))
        expected = np.empty_like(self._content)
        for region, view in enumerate(self._views):
            for here, there in last.items():
                np.add(self._content, self._key(generation, region, there), out=expected)
                if not np.array_equal(view[here], expected):
                    raise AssertionError(f"region {region}, page {here}: not the bytes of the peer's page {there}")

    def check_aux(self, generation: int, items: int) -> None:
        """Raises AssertionError unless the first ``items`` aux items are those of the peer."""
        wrong = np.flatnonzero((self._aux != self._aux_content(generation)).any(axis=1)[:items])
        if len(wrong):
            raise AssertionError(f"aux items {wrong[:5].tolist()} (of {len(wrong)}) are not the peer's")

    def forget(self) -> None:
        """Drops the views, before the memory goes."""
        self._views = []
        self._aux = np.empty((0, 0), dtype=np.uint64)

    def _key(self, generation: int, region: int, page: int) -> np.uint64:
        key: np.uint64 = np.uint64(((generation << 48) + (region << 32) + page) * MIX % 2**64)
        return key

    def _aux_content(self, generation: int) -> Words:
        items = np.arange(self.shape.aux_items, dtype=np.uint64)[:, None]
        words = np.arange(self.shape.aux_item_bytes // 8, dtype=np.uint64)[None, :]
        content: Words = items * np.uint64(MIX) + words + np.uint64(generation << 48)
        return content


def _words(address: int, nbytes: int) -> Words:
    return np.ctypeslib.as_array((ctypes.c_uint64 * (nbytes // 8)).from_address(address))
