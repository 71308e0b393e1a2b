"""Which pages a folder holds and when each was last used, so that the oldest can make room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

BLOCK = 4096
TOUCH_SECONDS = 60.0


class Usage:
    """Least recently used first. Thread-safe; times are Unix seconds, names are paths under the root."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._pages: OrderedDict[str, _Page] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __len__(self) -> int:
        return len(self._pages)

    def reserve(self, name: str, nbytes: int, now: float) -> list[str] | None:
        """Counts a page that will be written; the names that have to go for it. None: larger than all there is."""
        size = _blocks(nbytes)
        with self._lock:
            if self.capacity is not None and size > self.capacity:
                return None
            self._drop(name)
            gone = []
            while self.capacity is not None and self._nbytes + size > self.capacity and self._pages:
                oldest = next(iter(self._pages))
                self._drop(oldest)
                gone.append(oldest)
            self._put(name, size, now, now)
            return gone

    def used(self, name: str, nbytes: int, now: float) -> bool:
        """Notes a read; whether the file's own time should be brought up to date (other processes go by that)."""
        with self._lock:
            page = self._pages.pop(name, None)
            touched = page.touched if page else 0.0
            stale = now - touched > TOUCH_SECONDS
            if page:
                self._nbytes -= page.size
            self._put(name, _blocks(nbytes), now, now if stale else touched)
            return stale

    def remove(self, name: str) -> None:
        with self._lock:
            self._drop(name)

    def replace(self, found: Mapping[str, tuple[int, float]], began: float) -> None:
        """What a scan found: name -> (bytes, modification time). What we used since it ``began`` counts beside it."""
        with self._lock:
            known = self._pages
            self._pages, self._nbytes = OrderedDict(), 0
            pages = {name: _Page(_blocks(nbytes), time, time) for name, (nbytes, time) in found.items()}
            for name, page in known.items():
                if name in pages:
                    pages[name].used = max(page.used, pages[name].used)
                elif page.used >= began:
                    pages[name] = page
            for name in sorted(pages, key=lambda name: pages[name].used):
                self._put(name, pages[name].size, pages[name].used, pages[name].touched)

    def excess(self) -> list[str]:
        """Names that have to go so that what is there fits; they are counted no more."""
        gone = []
        with self._lock:
            while self.capacity is not None and self._nbytes > self.capacity:
                oldest = next(iter(self._pages))
                self._drop(oldest)
                gone.append(oldest)
        return gone

    def _put(self, name: str, size: int, used: float, touched: float) -> None:
        self._pages[name] = _Page(size, used, touched)
        self._nbytes += size

    def _drop(self, name: str) -> None:
        page = self._pages.pop(name, None)
        if page:
            self._nbytes -= page.size


class _Page:
    __slots__ = ("size", "touched", "used")

    def __init__(self, size: int, used: float, touched: float) -> None:
        self.size, self.used, self.touched = size, used, touched


def _blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK
