"""What a prefix tree gives up next, found the slow way: by a look at every node. The oracle of its eviction queues."""

from __future__ import annotations

from collections.abc import Callable

from kvgrpc.prefetch.tree.prefix_tree import Node, PrefixTree


def device_victims(tree: PrefixTree, count: int, now: float) -> list[list[str]]:
    """The hashes of each run that goes, in order. Changes nothing."""
    return _scan(tree, count, now, lambda node: node.device is not None, lambda node: node.device is not None, set())


def host_victims(tree: PrefixTree, count: int, now: float) -> list[list[str]]:
    """The same for the host: first what the device does not need."""
    gone: set[Node] = set()
    found = _scan(
        tree, count, now, lambda node: node.host is not None and node.device is None, lambda n: n.host is not None, gone
    )
    missing = count - sum(map(len, found))
    if missing > 0:
        both: Callable[[Node], bool] = lambda node: node.host is not None and node.device is not None  # noqa: E731
        found += _scan(tree, missing, now, both, lambda node: node.host is not None, gone)
    return found


def _scan(
    tree: PrefixTree,
    count: int,
    now: float,
    there: Callable[[Node], bool],
    needs_parent: Callable[[Node], bool],
    gone: set[Node],
) -> list[list[str]]:
    found: list[list[str]] = []
    while count > 0:
        ends = [
            node
            for node in tree.nodes()
            if node not in gone
            and there(node)
            and not node.locks
            and not node.writing
            and node.pinned_until <= now
            and not any(needs_parent(child) and child not in gone for child in node.children.values())
        ]
        if not ends:
            break
        node = min(ends, key=lambda each: (-each.priority, each.used))
        gone.add(node)
        found.append(node.hashes[max(0, len(node) - count) :])
        count -= len(found[-1])
    return found


def chain(text: str) -> list[str]:
    """Hashes that cover what lies before them, as page hashes do."""
    return [text[: end + 1] for end in range(len(text))]
