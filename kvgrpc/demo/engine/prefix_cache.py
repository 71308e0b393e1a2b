"""A tree of full pages keyed by a hash chain finds the pages of a prefix; the least recently used leaf goes first.

Every change is an event: whoever reads them all knows exactly what is cached. Pure; one thread.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvgrpc.demo.engine.page_allocator import PageAllocator
from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored

CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


def page_hash(parent: int | None, tokens: Sequence[int]) -> int:
    """The name of a full page: a signed 64-bit hash of all tokens up to its end, the same in every process."""
    prefix = b"" if parent is None else struct.pack("<q", parent)
    digest = hashlib.blake2b(prefix + struct.pack(f"<{len(tokens)}I", *tokens), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def page_hashes(tokens: Sequence[int], page_tokens: int) -> list[int]:
    """The chain of all full pages of a prompt."""
    chain: list[int] = []
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        chain.append(page_hash(chain[-1] if chain else None, tokens[start : start + page_tokens]))
    return chain


class PrefixCache:
    """Keeps full pages after their request has ended, as one more user of each, until their space is wanted."""

    def __init__(self, pages: PageAllocator, page_tokens: int) -> None:
        self._pages = pages
        self._page_tokens = page_tokens
        self._nodes: OrderedDict[int, _Node] = OrderedDict()  # least recently used first
        self._events: list[CacheEvent] = []

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def idle(self) -> int:
        """Pages that only the cache uses."""
        return sum(self._pages.users(node.page) == 1 for node in self._nodes.values())

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest cached prefix, with one user more each: the caller's, who releases them."""
        chain = page_hashes(tokens, self._page_tokens)
        found = [self._nodes[name].page for name in chain[: self._known(chain)]]
        self._pages.share(found)
        return found

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Keeps the full pages of ``tokens``, which lie in ``pages``; what is cached already stays as it is."""
        chain = page_hashes(tokens, self._page_tokens)
        known = self._known(chain)
        if known == len(chain):
            return
        parents = [None, *chain]
        for number in range(known, len(chain)):
            self._add(chain[number], pages[number], parents[number])
        self._events.append(
            BlockStored(
                block_hashes=[*chain[known:]],
                parent_block_hash=parents[known],
                token_ids=list(tokens[known * self._page_tokens : len(chain) * self._page_tokens]),
                block_size=self._page_tokens,
                lora_id=None,
            )
        )

    def evict(self, count: int) -> int:
        """Drops leaves that only the cache uses, least recently used first, until ``count`` pages are free of it."""
        removed: list[int] = []
        while len(removed) < count:
            name = next((name for name, node in self._nodes.items() if self._evictable(node)), None)
            if name is None:
                break
            self._drop(name)
            removed.append(name)
        if removed:
            self._events.append(BlockRemoved(block_hashes=[*removed]))
        return len(removed)

    def clear(self) -> None:
        """Drops everything, also what others still use (they keep their pages); says so even when it was empty."""
        self._pages.release(node.page for node in self._nodes.values())
        self._nodes.clear()
        self._events.append(AllBlocksCleared())

    def hashes(self) -> list[int]:
        """The names of all pages that are cached, sorted."""
        return sorted(self._nodes)

    def take_events(self) -> list[CacheEvent]:
        """Returns what happened since the call before, in order."""
        events, self._events = self._events, []
        return events

    def _known(self, chain: Sequence[int]) -> int:
        """Returns how many pages of a chain are cached. They were used now: the leaf first, so that it is evicted
        first."""
        known = next((number for number, name in enumerate(chain) if name not in self._nodes), len(chain))
        for name in reversed(chain[:known]):
            self._nodes.move_to_end(name)
        return known

    def _add(self, name: int, page: int, parent: int | None) -> None:
        self._pages.share([page])
        self._nodes[name] = _Node(page, parent)
        if parent is not None:
            self._nodes[parent].children += 1
            self._nodes.move_to_end(parent)

    def _drop(self, name: int) -> None:
        node = self._nodes.pop(name)
        self._pages.release([node.page])
        if node.parent is not None:
            self._nodes[node.parent].children -= 1

    def _evictable(self, node: _Node) -> bool:
        return node.children == 0 and self._pages.users(node.page) == 1


@dataclass(slots=True)
class _Node:
    page: int
    parent: int | None
    children: int = 0
