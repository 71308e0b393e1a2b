"""A prefix tree over two pools: which pages of which prefix are on the device and on the host, and who goes first.
Pure.

A node is a run of pages that one prompt needs in order; prompts that part inside a run split it there. What is on the
device is closed upwards: a node is there only if its parent is. Page numbers are the caller's; the tree takes and frees
none, it says which ones are no longer needed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvgrpc.errors import InvalidRequest

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


@dataclass(eq=False, slots=True)
class Node:
    """Pages ``hashes`` behind those of ``parent``. ``device`` and ``host`` are their page numbers there, or None.

    ``hits`` counts the matches that used it, ``locks`` those who need it to stay. ``pinned_until`` is in the caller's
    seconds. ``writing``: the host pages are on their way. ``device_children``, ``host_children``: how many are there.
    ``device_entry``, ``host_entry``: its last numbers in the eviction queues.
    """

    hashes: list[str]
    parent: Node | None
    extra_key: str = ""
    priority: int = 0
    device: list[int] | None = None
    host: list[int] | None = None
    children: dict[str, Node] = field(default_factory=dict)
    hits: int = 0
    locks: int = 0
    used: int = 0
    pinned_until: float = 0.0
    writing: bool = False
    device_children: int = 0
    host_children: int = 0
    device_entry: int = 0
    host_entry: int = 0

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def before(self) -> str:
        """The hash of the page before its first; empty where it begins a prompt."""
        return self.parent.hashes[-1] if self.parent is not None and self.parent.hashes else ""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The longest cached prefix: ``device`` pages from the front, then ``host`` pages. ``nodes`` hold them, in
    order."""

    nodes: tuple[Node, ...]
    device: tuple[int, ...]
    host: tuple[int, ...]

    @property
    def pages(self) -> int:
        return len(self.device) + len(self.host)

    @property
    def last(self) -> Node | None:
        return self.nodes[-1] if self.nodes else None


class PrefixTree:
    """Not thread-safe; nothing in it waits. Times are whatever clock the caller has."""

    def __init__(self) -> None:
        self._root = Node([], None)
        self._clock = 0
        self._device_pages: Counter[str] = Counter()
        self._host_pages: Counter[str] = Counter()
        self._pinned: dict[Node, None] = {}
        self._device_ends = EvictionQueue(device=True)
        self._host_ends = EvictionQueue(device=False)
        # Pages of nodes that are not locked: no more of them can go.
        self._idle_device = 0
        self._idle_host = 0

    @property
    def root(self) -> Node:
        """Of no page; the parent of the first nodes."""
        return self._root

    def device_pages(self, extra_key: str | None = None) -> int:
        """Device pages that the tree knows, of one extra key or of all."""
        return self._device_pages.total() if extra_key is None else self._device_pages[extra_key]

    def host_pages(self, extra_key: str | None = None) -> int:
        """Host pages that the tree knows, those on their way included."""
        return self._host_pages.total() if extra_key is None else self._host_pages[extra_key]

    def pinned_pages(self, now: float) -> int:
        """Pages that are pinned. Costs what was pinned, not what is there."""
        self._pinned = {node: None for node in self._pinned if node.pinned_until > now}
        return sum(map(len, self._pinned))

    def most_victims(self, now: float, *, device: bool) -> int:
        """No more pages than these can go from a tier; fewer where some lie before pinned ones, or the caller does not
        want them to go. Costs what was pinned, not what is there."""
        self.pinned_pages(now)
        pinned = [each.device if device else each.host for each in self._pinned if not each.locks]
        return (self._idle_device if device else self._idle_host) - sum(len(pages or ()) for pages in pinned)

    def nodes(self) -> Iterator[Node]:
        """All of them, parents before children."""
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def match(self, hashes: Sequence[str], *, touch: bool = True, split: bool = True) -> CachedPrefix:
        """The cached prefix of a prompt. ``touch`` counts it as a use (recency, hits) and splits the node it ends in;
        without ``split`` all of that node counts as used."""
        path = self._path(hashes, split=touch and split)
        device: list[int] = []
        host: list[int] = []
        nodes: list[Node] = []
        for node, length in path:
            if node.device is not None and not host:
                device.extend(node.device[:length])
            elif node.host is not None and not node.writing:
                host.extend(node.host[:length])
            else:
                break
            nodes.append(node)
        if touch:
            self._clock += 1
            for node in nodes:
                node.used = self._clock
                node.hits += 1
                self._may_go(node)
        return CachedPrefix(tuple(nodes), tuple(device), tuple(host))

    def leading(self, hashes: Sequence[str]) -> tuple[int, int]:
        """(pages on the device, pages on device or host) from the front; changes nothing."""
        found = self.match(hashes, touch=False)
        return len(found.device), found.pages

    def insert_device(
        self, hashes: Sequence[str], pages: Sequence[int], *, extra_key: str = "", priority: int = 0
    ) -> list[int]:
        """``pages[i]`` of the device holds ``hashes[i]``, from the prompt's first page on. The tree keeps those that it
        did not have; returned are the others, which the caller frees (unless they are the very pages it has)."""
        _same_length(hashes, pages)
        spare: list[int] = []
        done = 0
        for node in self._grow(hashes, extra_key, priority):
            part = list(pages[done : done + len(node)])
            if node.device is None:
                self.set_device(node, part)
            else:
                spare.extend(new for new, old in zip(part, node.device, strict=True) if new != old)
            done += len(node)
        return spare

    def insert_host(
        self, hashes: Sequence[str], start: int, pages: Sequence[int], *, extra_key: str = "", priority: int = 0
    ) -> list[int]:
        """Host pages of ``hashes[start:]``. What lies before must be cached; else nothing is kept. Returned: the
        spare."""
        _same_length(hashes[start:], pages)
        if self.match(hashes[:start], touch=False).pages < start:
            return list(pages)
        spare: list[int] = []
        done = 0
        for node in self._grow(hashes, extra_key, priority, cut=start):
            first, done = done, done + len(node)
            if first < start:
                continue
            part = list(pages[first - start : done - start])
            if node.host is None:
                self.set_host(node, part)
            else:
                spare.extend(part)
        return spare

    def set_host(self, node: Node, pages: Sequence[int] | None, *, writing: bool = False) -> None:
        """Host pages of a node that is on the device; None takes them away (a copy that failed)."""
        had, node.host = node.host, None if pages is None else list(pages)
        node.writing = writing and pages is not None
        more = len(node.host or ()) - len(had or ())
        _add_pages(self._host_pages, node.extra_key, more)
        self._idle_host += 0 if node.locks else more
        if node.host is not None:
            _same_length(node.hashes, node.host)
        if node.parent is not None:
            node.parent.host_children += (node.host is not None) - (had is not None)
            self._host_ends.put(node.parent)
        self._may_go(node)

    def written(self, node: Node) -> None:
        """The host pages have arrived."""
        node.writing = False
        self._may_go(node)

    def set_device(self, node: Node, pages: Sequence[int] | None) -> None:
        """Says which device pages the node has, none for None."""
        had, node.device = node.device, None if pages is None else list(pages)
        more = len(node.device or ()) - len(had or ())
        _add_pages(self._device_pages, node.extra_key, more)
        self._idle_device += 0 if node.locks else more
        if node.device is not None:
            _same_length(node.hashes, node.device)
        if node.parent is not None:
            node.parent.device_children += (node.device is not None) - (had is not None)
            self._device_ends.put(node.parent)
        self._may_go(node)

    def lock(self, node: Node | None) -> None:
        """Keeps the prefix that ends with the node, in the tiers where it is."""
        while node is not None and node is not self._root:
            if not node.locks:
                self._idle_device -= len(node.device or ())
                self._idle_host -= len(node.host or ())
            node.locks += 1
            node = node.parent

    def lock_prefix(self, hashes: Sequence[str]) -> Node | None:
        """Locks what is cached of a prompt, and no page behind it; ``unlock`` takes what it returns. Not a use."""
        path = self._path(hashes, split=True)
        last = path[-1][0] if path else None
        self.lock(last)
        return last

    def unlock(self, node: Node | None) -> None:
        """Raises InvalidRequest for one that is not locked."""
        while node is not None and node is not self._root:
            if node.locks < 1:
                raise InvalidRequest.of("node", node.hashes[-1][:16], "locked")
            node.locks -= 1
            if not node.locks:
                self._idle_device += len(node.device or ())
                self._idle_host += len(node.host or ())
            self._may_go(node)
            node = node.parent

    def pin(self, hashes: Sequence[str], until: float) -> int:
        """Keeps what is cached of a prefix from eviction until then; how many pages."""
        found = self.match(hashes)
        for node in found.nodes:
            node.pinned_until = until
            if until:
                self._pinned[node] = None
            else:
                self._pinned.pop(node, None)
        return found.pages

    def device_victims(self, count: int, now: float, wanted: Callable[[Node], bool] | None = None) -> list[Node]:
        """Nodes, ends before their parents, whose device pages are worth least: ``count`` pages, fewer if there are not
        so many; a run that is longer than needed is split, and its end goes. Least priority first (the larger number),
        then least recently used."""
        return self._device_ends.victims(count, now, wanted, self._split)

    def host_victims(self, count: int, now: float, wanted: Callable[[Node], bool] | None = None) -> list[Node]:
        """Nodes whose host pages are worth least, like ``device_victims``; first what the device needs no more."""
        return self._host_ends.victims(count, now, wanted, self._split)

    def drop_device(self, node: Node) -> list[int]:
        """Takes a node off the device; its pages. A node that is nowhere else is gone."""
        pages = node.device or []
        self.set_device(node, None)
        self._remove_if_nowhere(node)
        return pages

    def drop_host(self, node: Node) -> list[int]:
        """Takes a node off the host; its pages. A node that is nowhere else is gone."""
        pages = node.host or []
        self.set_host(node, None)
        self._remove_if_nowhere(node)
        return pages

    def _may_go(self, node: Node) -> None:
        self._device_ends.put(node)
        self._host_ends.put(node)

    def _remove_if_nowhere(self, node: Node) -> None:
        while node.parent is not None and not node.children and node.device is None and node.host is None:
            parent = node.parent
            del parent.children[node.hashes[0]]
            node.parent = None
            self._pinned.pop(node, None)
            node = parent

    def _path(self, hashes: Sequence[str], *, split: bool) -> list[tuple[Node, int]]:
        """(node, how many of its pages match) along the prompt."""
        path = []
        node, done = self._root, 0
        while done < len(hashes):
            child = node.children.get(hashes[done])
            if child is None:
                break
            # A hash covers everything before it: where the last one is equal, all are.
            length = _common(child.hashes, hashes[done : done + len(child)])
            if length < len(child) and split:
                child = self._split(child, length)
            path.append((child, length))
            done += length
            if length < len(child):
                break
            node = child
        return path

    def _grow(self, hashes: Sequence[str], extra_key: str, priority: int, cut: int = 0) -> Iterator[Node]:
        """Nodes that are exactly ``hashes``, those that were missing made; a border lies at ``cut``."""
        if cut:
            self._path(hashes[:cut], split=True)
        path = self._path(hashes, split=True)
        self._clock += 1
        node, done = self._root, 0
        for node, length in path:
            node.used = self._clock
            node.priority = min(node.priority, priority)
            self._may_go(node)
            done += length
            yield node
        if done < len(hashes):
            parts = [hashes[done:cut], hashes[max(cut, done) :]] if done < cut else [hashes[done:]]
            for part in parts:
                child = Node(list(part), node, extra_key, priority, used=self._clock)
                node.children[child.hashes[0]] = child
                node = child
                yield child

    def _split(self, node: Node, length: int) -> Node:
        """The front part, new, in the node's place; the node itself stays the back part, so locks and copies on their
        way hold on to what they meant."""
        assert node.parent is not None
        front = Node(
            node.hashes[:length],
            node.parent,
            node.extra_key,
            node.priority,
            None if node.device is None else node.device[:length],
            None if node.host is None else node.host[:length],
            {node.hashes[length]: node},
            node.hits,
            node.locks,
            node.used,
            node.pinned_until,
            node.writing,
            device_children=int(node.device is not None),
            host_children=int(node.host is not None),
        )
        node.parent.children[front.hashes[0]] = front
        if node in self._pinned:
            self._pinned[front] = None
        node.parent = front
        node.hashes = node.hashes[length:]
        node.device = None if node.device is None else node.device[length:]
        node.host = None if node.host is None else node.host[length:]
        return front


def _common(ours: Sequence[str], theirs: Sequence[str]) -> int:
    # A page's hash is of all before it too: where one is equal, those before it are.
    low, high = 0, min(len(ours), len(theirs))
    if high and ours[high - 1] == theirs[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if ours[middle] == theirs[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _add_pages(counts: Counter[str], extra_key: str, pages: int) -> None:
    """Keys of which nothing is there any more are forgotten."""
    counts[extra_key] += pages
    if not counts[extra_key]:
        del counts[extra_key]


def _same_length(hashes: Sequence[str], pages: Sequence[int]) -> None:
    if len(hashes) != len(pages):
        raise InvalidRequest.of("pages", f"{len(pages)} pages for {len(hashes)} hashes", "as many as hashes")
