"""Prefixes that requests hold, and the device pages that their loads bring: whose each is until it is the cache's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvgrpc.errors import InvalidRequest
from kvgrpc.prefetch.pools.pages import Pages, as_pages
from kvgrpc.prefetch.tree.prefix_tree import Node


@dataclass(eq=False, slots=True)
class PinnedPrefix:
    """A cached prefix that stays until ``TieredCache.release``: ``device`` pages from the front, then ``host``
    pages. The rest is the cache's own account of its loads."""

    device: tuple[int, ...]
    host: tuple[int, ...]
    node: Node | None
    loading: int = 0
    loaded: set[int] = field(default_factory=set)
    released: bool = False

    @property
    def pages(self) -> int:
        return len(self.device) + len(self.host)

    def check_open(self) -> None:
        """Raises InvalidRequest once it was released."""
        if self.released:
            raise InvalidRequest.of("held", "one that was released", "a match that is not over")


class LoadedPages:
    """Device pages that a load brings, or brought a second time: their request's until it is released, or until an
    insert makes them the cache's. Not thread-safe."""

    def __init__(self) -> None:
        self._held_by: dict[int, PinnedPrefix] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._held_by

    def begin(self, held: PinnedPrefix, pages: Pages) -> None:
        held.loading += 1
        held.loaded.update(pages.tolist())
        self._held_by.update(dict.fromkeys(pages.tolist(), held))

    def undo(self, held: PinnedPrefix, pages: Pages) -> None:
        """The load of these pages did not begin after all."""
        held.loading -= 1
        self.forget(held, pages)

    def forget(self, held: PinnedPrefix, pages: Pages) -> None:
        """The pages are no longer this request's."""
        for page in pages.tolist():
            if self._held_by.get(page) is held:
                del self._held_by[page]
            held.loaded.discard(page)

    def drop(self, pages: Iterable[int]) -> None:
        """The pages are no request's any more, whoever loaded them."""
        for page in self._held_by.keys() & set(pages):
            del self._held_by[page]

    def take_doubles(self, held: PinnedPrefix) -> Pages:
        """The pages that a request loaded although another had brought them, to be freed; none while a load of it is on
        its way."""
        if held.loading:
            return as_pages([])
        doubles = as_pages([page for page in held.loaded if self._held_by.get(page) is held])
        self.forget(held, doubles)
        return doubles

    def take_all(self) -> Pages:
        pages = as_pages(list(self._held_by))
        self._held_by.clear()
        return pages


def last_nodes(node: Node | None, pages: int) -> list[Node]:
    """Those of the last so many pages of the prefix that ends with ``node``, in order."""
    nodes: list[Node] = []
    while node is not None and pages > 0:
        nodes.append(node)
        pages -= len(node)
        node = node.parent
    return nodes[::-1]


def filled_in(nodes: Sequence[Node], device: Pages) -> Pages:
    """The device pages of all these nodes, in order: ``device`` are those of the ones that are not there yet."""
    parts: list[Pages] = []
    for node in nodes:
        if node.device is None:
            part, device = device[: len(node)], device[len(node) :]
        else:
            part = as_pages(node.device)
        parts.append(part)
    return np.concatenate(parts) if parts else device
