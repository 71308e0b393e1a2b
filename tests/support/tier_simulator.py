"""What three tiers come to, computed page by page without a tree, a pool, a thread or a byte.

Least recently used ends go first; of the host those that are not on the device too. Storage keeps everything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

Page = Hashable


@dataclass(eq=False)
class _Known:
    page: Page
    parent: _Known | None
    device: bool = False
    host: bool = False
    children: dict[Page, _Known] = field(default_factory=dict)


@dataclass
class Hits:
    """Pages of all requests, by where they were found; ``prefetched`` of the host's had come from storage for it."""

    device: int = 0
    host: int = 0
    prefetched: int = 0
    computed: int = 0


class TierSimulator:
    """Tiers of so many pages; a request is the list of its pages, each of which names all that lie before it."""

    def __init__(self, device_pages: int, host_pages: int) -> None:
        self.hits = Hits()
        self._host_pages = host_pages
        self._room = {"device": device_pages, "host": host_pages}
        self._pages: dict[Page, _Known] = {}
        # Of each tier, least recently used first, and of one path the last page first.
        self._by_use: dict[str, OrderedDict[_Known, None]] = {"device": OrderedDict(), "host": OrderedDict()}
        self._storage: set[Page] = set()

    def request(self, pages: Sequence[Page]) -> None:
        """Prefetches what storage has, loads what the host has, computes the rest and writes it through."""
        self.hits.prefetched += self._prefetch(pages)
        known = self._leading(pages)
        self._touch(known)
        on_device = sum(each.device for each in known)
        self._take("device", len(pages) - on_device, {each.page for each in known})
        self._put("device", known)
        self.hits.device += on_device
        self.hits.host += len(known) - on_device
        self.hits.computed += len(pages) - len(known)
        path = self._insert(pages)
        self._take("host", sum(not each.host for each in path), set(pages))
        self._put("device", path)
        self._put("host", path)
        self._storage.update(pages)

    def _prefetch(self, pages: Sequence[Page]) -> int:
        prefix = self._leading(pages)
        covered, wanted = len(prefix), 0
        while covered + wanted < len(pages) and pages[covered + wanted] in self._storage:
            wanted += 1
        # What comes stands behind the prefix, which stays; so fewer come where the host has no room for both.
        wanted = min(wanted, self._host_pages - sum(each.host for each in prefix))
        self._take("host", wanted, {each.page for each in prefix})
        self._put("host", self._insert(pages[: covered + wanted])[covered:])
        return wanted

    def _leading(self, pages: Sequence[Page]) -> list[_Known]:
        found: list[_Known] = []
        for page in pages:
            known = self._pages.get(page)
            if known is None or not (known.host or (known.device and all(each.device for each in found))):
                break
            found.append(known)
        return found

    def _touch(self, path: Sequence[_Known]) -> None:
        for each in reversed(path):
            for by_use in self._by_use.values():
                if each in by_use:
                    by_use.move_to_end(each)

    def _put(self, tier: str, path: Sequence[_Known]) -> None:
        for each in reversed(path):
            setattr(each, tier, True)
            self._by_use[tier][each] = None

    def _insert(self, pages: Sequence[Page]) -> list[_Known]:
        path: list[_Known] = []
        for page in pages:
            parent = path[-1] if path else None
            if page not in self._pages:
                self._pages[page] = _Known(page, parent)
                if parent is not None:
                    parent.children[page] = self._pages[page]
            path.append(self._pages[page])
        self._touch(path)
        return path

    def _take(self, tier: str, wanted: int, kept: set[Page]) -> None:
        def is_end(each: _Known) -> bool:
            there = getattr(each, tier) and each.page not in kept
            return there and not any(getattr(child, tier) for child in each.children.values())

        by_use = self._by_use[tier]
        while wanted > self._room[tier]:
            ends = (each for each in by_use if is_end(each))
            victim = next((each for each in ends if tier == "device" or not each.device), None)
            victim = victim or next(each for each in by_use if is_end(each))
            setattr(victim, tier, False)
            del by_use[victim]
            self._room[tier] += 1
            self._forget(victim)
        self._room[tier] -= wanted

    def _forget(self, known: _Known | None) -> None:
        while known is not None and not (known.device or known.host or known.children):
            del self._pages[known.page]
            if known.parent is not None:
                del known.parent.children[known.page]
            known = known.parent
