"""Rounds over all pages of a folder, for which one call may have too little time: a repeat goes on where it stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator

from kvgrpc.prefetch.storage.file.folder import Folder

REMEMBERED_SECONDS = 300.0
"""A round that nobody went on with for so long begins anew: a page that came meanwhile may lie behind it."""
_MOST_REMEMBERED = 16


class Rounds:
    """Each round has a name, and none that is remembered is walked by two. Thread-safe."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._stopped: dict[str, tuple[float, Generator[str, None, None]]] = {}

    def go_on(self, which: str) -> Generator[str, None, None]:
        """Names of pages: those that the round did not come to before it stopped, else all."""
        self._forget(time.monotonic() - REMEMBERED_SECONDS, _MOST_REMEMBERED)
        with self._lock:
            _, names = self._stopped.pop(which, (0.0, None))
        return self._folder.names() if names is None else names

    def stop(self, which: str, names: Generator[str, None, None]) -> None:
        """Remembers where it stopped."""
        with self._lock:
            other = self._stopped.pop(which, None)
            self._stopped[which] = time.monotonic(), names
        if other is not None:
            other[1].close()
        self._forget(0.0, _MOST_REMEMBERED)

    def close(self) -> None:
        self._forget(time.monotonic(), 0)

    def _forget(self, before: float, most: int) -> None:
        """Those that stopped before then, and the oldest but so many; their folders are open until then."""
        closed = []
        with self._lock:
            while self._stopped:
                which, (stopped, names) = next(iter(self._stopped.items()))
                if stopped >= before and len(self._stopped) <= most:
                    break
                del self._stopped[which]
                closed.append(names)
        for names in closed:
            names.close()
