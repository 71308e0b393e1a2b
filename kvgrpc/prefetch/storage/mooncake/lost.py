"""Pages that the Store says it has and cannot give."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

_MOST = 100_000


class Lost:
    """Remembers keys for ``seconds``, the newest 100,000. Thread-safe.

    An owner that was killed stays known to the master until client_ttl is over, and every read from it costs a second.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._until: OrderedDict[str, float] = OrderedDict()

    def add(self, key: str) -> None:
        with self._lock:
            self._until[key] = time.monotonic() + self._seconds
            self._until.move_to_end(key)
            while len(self._until) > _MOST:
                self._until.popitem(last=False)

    def __contains__(self, key: str) -> bool:
        if not self._until:
            return False
        with self._lock:
            until = self._until.get(key)
            if until is not None and until < time.monotonic():
                del self._until[key]
                return False
            return until is not None
