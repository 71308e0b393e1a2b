"""Which nodes of a prefix tree go next from one tier, without a look at all the others. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgrpc.prefetch.tree.prefix_tree import Node

_Entry = tuple[tuple[float, ...], int, "Node"]
_FEW = 64


class EvictionQueue:
    """The ends of the tree in one tier, what is worth least first: an end is a node without children there.

    An entry is good while its number is the node's last one; the tree calls ``put`` whenever a node may have become an
    end, or is worth something else. What is locked or being written is put again when that is over. So a call costs
    what goes, not what stays.
    """

    def __init__(self, *, device: bool) -> None:
        self._device = device
        self._heap: list[_Entry] = []
        self._pinned: list[_Entry] = []
        self._number = 0
        self._most = _FEW

    def put(self, node: Node) -> None:
        if self._is_end(node, 0) and not node.locks and not node.writing:
            self._push(self._heap, self._worth(node), node)

    def victims(
        self, count: int, now: float, wanted: Callable[[Node], bool] | None, split: Callable[[Node, int], object]
    ) -> list[Node]:
        """Nodes of ``count`` pages, fewer if there are not so many, ends before their parents. They stay in the queue:
        the caller drops them from the tier, or not. ``split(node, n)`` leaves the node without its first n pages."""
        while self._pinned and self._pinned[0][0][0] <= now:
            _, number, node = heapq.heappop(self._pinned)
            if self._number_of(node) == number:
                self.put(node)
        chosen: list[Node] = []
        gone: Counter[Node] = Counter()
        again: list[_Entry] = []
        pages = 0
        while self._heap and pages < count:
            entry = heapq.heappop(self._heap)
            _, number, node = entry
            if self._number_of(node) != number or not self._is_end(node, gone[node]) or node.locks or node.writing:
                continue
            if node.pinned_until > now:
                self._push(self._pinned, (node.pinned_until,), node)
                continue
            again.append(entry)
            if wanted is not None and not wanted(node):
                continue
            if len(node) > count - pages:
                split(node, len(node) - (count - pages))
            chosen.append(node)
            pages += len(node)
            # An end that goes lets the one before it go.
            parent = node.parent
            assert parent is not None
            gone[parent] += 1
            if self._is_end(parent, gone[parent]):
                self._push(self._heap, self._worth(parent), parent)
        for entry in again:
            heapq.heappush(self._heap, entry)
        return chosen

    def _is_end(self, node: Node, gone: int) -> bool:
        if self._device:
            return node.device is not None and node.device_children == gone
        return node.host is not None and node.host_children == gone

    def _worth(self, node: Node) -> tuple[float, ...]:
        """On the host those come first that the device does not need any more."""
        worth = (-node.priority, node.used)
        return worth if self._device else (node.device is not None, *worth)

    def _number_of(self, node: Node) -> int:
        return node.device_entry if self._device else node.host_entry

    def _push(self, heap: list[_Entry], worth: tuple[float, ...], node: Node) -> None:
        self._number += 1
        if self._device:
            node.device_entry = self._number
        else:
            node.host_entry = self._number
        heapq.heappush(heap, (worth, self._number, node))
        if len(heap) > self._most:
            # Entries of before the last uses of their nodes.
            for each in (self._heap, self._pinned):
                each[:] = [entry for entry in each if self._number_of(entry[2]) == entry[1]]
                heapq.heapify(each)
            self._most = 2 * max(len(self._heap), len(self._pinned)) + _FEW


__all__ = ["EvictionQueue"]
