"""Host memory for pages that an engine wrote through, lent to peers: for engines that evict their own pages untold."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvgrpc.prefetch.storage.base import PageBuffers


class ExportedPages:
    """The last ``pages`` pages that were offered, by their hash, which covers all that lies before them. Thread-safe.

    A HostCache for a Lender. What comes drops what was used longest ago; a page that is read at that moment stays.
    """

    def __init__(self, pages: int, page_bytes: int) -> None:
        """Takes the memory. Raises MemoryError, OSError."""
        self.page_bytes = page_bytes
        self.pages = pages
        self._memory = mmap.mmap(-1, pages * page_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._lock = threading.Lock()
        self._free = list(range(pages))
        self._known: OrderedDict[str, int] = OrderedDict()
        # Page numbers whose bytes are read or written now, and by how many.
        self._busy: dict[int, int] = {}
        # Of those, the ones that are free afterwards: what they hold was cleared.
        self._cleared: set[int] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._known)

    def offer(self, hashes: Sequence[str], pages: Sequence[PageBuffers]) -> None:
        """Copies them; those that are here already become the newest. The engine may use its pages again afterwards.

        Pages of another size are left out, and so are those for which there is no room at this moment.
        """
        for page_hash, buffers in zip(hashes, pages, strict=True):
            if sum(nbytes for _, nbytes in buffers) != self.page_bytes:
                continue
            page = self._take(page_hash)
            if page is None:
                continue
            to = self._address + page * self.page_bytes
            for address, nbytes in buffers:
                ctypes.memmove(to, address, nbytes)
                to += nbytes
            with self._lock:
                if page_hash in self._known:  # somebody else offered the same meanwhile
                    self._cleared.add(page)
                elif page not in self._cleared:
                    self._known[page_hash] = page
                self._end(page)

    def count(self, hashes: Sequence[str]) -> int:
        with self._lock:
            return self._leading(hashes)

    @contextlib.contextmanager
    def reading(self, hashes: Sequence[str], first: int = 0) -> Iterator[Sequence[int]]:
        with self._lock:
            wanted = hashes[first:]
            names = wanted[: self._leading(wanted)]
            pages = [self._known[name] for name in names]
            for name, page in zip(names, pages, strict=True):
                self._known.move_to_end(name)
                self._busy[page] = self._busy.get(page, 0) + 1
        try:
            yield pages
        finally:
            with self._lock:
                for page in pages:
                    self._end(page)

    def buffers(self, page: int) -> PageBuffers:
        return ((self._address + page * self.page_bytes, self.page_bytes),)

    def clear(self) -> None:
        """Forgets all pages, those too that are read or filled at this moment: of a model whose weights were changed,
        or when the engine's storage is cleared."""
        with self._lock:
            self._free.extend(page for page in self._known.values() if page not in self._busy)
            self._known.clear()
            self._cleared.update(self._busy)

    def close(self) -> None:
        """Forgets all pages and takes no further ones; the memory stays for whoever reads it at this moment."""
        with self._lock:
            self._closed = True
        self.clear()

    def _leading(self, hashes: Sequence[str]) -> int:
        return next((n for n, name in enumerate(hashes) if name not in self._known), len(hashes))

    def _end(self, page: int) -> None:
        """One reads or fills it no more. Under the lock."""
        self._busy[page] -= 1
        if not self._busy[page]:
            del self._busy[page]
            if page in self._cleared:
                self._cleared.remove(page)
                self._free.append(page)

    def _take(self, page_hash: str) -> int | None:
        """A page to be filled; None where it is here already, every page is read or filled, or after ``close``."""
        with self._lock:
            if self._closed:
                return None
            if page_hash in self._known:
                self._known.move_to_end(page_hash)
                return None
            if not self._free:
                oldest = next((name for name, page in self._known.items() if page not in self._busy), None)
                if oldest is None:
                    return None
                self._free.append(self._known.pop(oldest))
            page = self._free.pop()
            self._busy[page] = 1
            return page
