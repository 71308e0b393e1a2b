"""Knows the free pages of a pool, and how many users each of the others has. Pure; one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class OutOfPages(Exception):
    """So many pages are not free; nothing was taken."""


class PageAllocator:
    """Page numbers 0 to ``pages`` - 1. A page is free when nobody uses it; it may have many users (a shared prefix)."""

    def __init__(self, pages: int) -> None:
        self._free = deque(range(pages))
        self._users = [0] * pages

    @property
    def free(self) -> int:
        """Pages that nobody uses."""
        return len(self._free)

    def users(self, page: int) -> int:
        """Returns how often a page was taken or shared and not yet released."""
        return self._users[page]

    def take(self, count: int) -> list[int]:
        """So many free pages, each with one user, longest free first. Raises OutOfPages and takes none."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {len(self._users)} free")
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more user for each page, which must have one already."""
        for page in pages:
            if self._users[page] == 0:
                raise ValueError(f"page {page} is free, nobody can share it")
            self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One user less for each page; without any it is free."""
        for page in pages:
            if self._users[page] == 0:
                raise ValueError(f"page {page} is free already")
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)
