"""Looks at all nodes of a prefix tree, a few at a time: the engine's calls come between."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvgrpc.model import Tier
from kvgrpc.prefetch.tree.prefix_tree import Node

NODES_AT_ONCE = 256
"""Nodes that are looked at without a pause, where all of them are."""

T = TypeVar("T")


def each_node(root: Node, lock: threading.RLock, pick: Callable[[Node], Sequence[T]]) -> list[T]:
    """All that ``pick`` gives of the nodes below ``root``, parents before children; the lock is free now and then."""
    picked: list[T] = []
    with lock:
        waiting = [(root, first) for first in root.children]
    while waiting:
        with lock:
            for _ in range(min(NODES_AT_ONCE, len(waiting))):
                parent, first = waiting.pop()
                # By its place: of a node that was split meanwhile the front is there now, and the rest behind it.
                node = parent.children.get(first)
                if node is not None:
                    picked.extend(pick(node))
                    waiting.extend((node, each) for each in node.children)
    return picked


def may_purge(node: Node, tier: Tier, extra_key: str | None, spared: Counter[Node], now: float) -> bool:
    """True if nothing in the tree keeps its pages in a tier: nobody needs them, and nothing there stands on them.

    With an ``extra_key``: if they are of that, too. ``spared``: children that do not count, of each node.
    """
    if extra_key is not None and node.extra_key != extra_key:
        return False
    if node.locks or node.writing or node.pinned_until > now:
        return False
    if tier is Tier.DEVICE:
        return node.device is not None and node.device_children == spared[node]
    return node.host is not None and node.host_children == spared[node]
