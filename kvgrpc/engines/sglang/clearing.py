"""Clearing a store for SGLang, whose scheduler waits for it. Imports nothing of SGLang."""

from __future__ import annotations

import logging
import threading

from kvgrpc.errors import InvalidRequest
from kvgrpc.observability.logging import RateLimited
from kvgrpc.prefetch.storage.base import StorageBackend, StorageDown

logger = logging.getLogger(__name__)
_QUIET_SECONDS = 30.0


class Clearing:
    """One clear at a time: it holds the caller for ``seconds``, and goes on in a thread where more is left then.

    While it is ``under_way`` its owner takes the store for empty and writes nothing to it: pages that have to go, of a
    model whose weights were changed, are found by nobody. So it is until the store says that all are gone, or ``stop``.
    """

    def __init__(self, seconds: float = 2.0, pause: float = 0.25) -> None:
        self._seconds = seconds
        self._pause = pause
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._lines = RateLimited(logger, lines=1, seconds=_QUIET_SECONDS)
        self.under_way = False

    def clear(self, backend: StorageBackend) -> bool:
        """True: all pages are gone. False: the rest goes on. Raises InvalidRequest where it cannot be cleared."""
        with self._lock:
            # A thread that could not start, or that an error ended, leaves the store to the next call.
            if self.under_way and self._thread is not None and self._thread.is_alive():
                return False
            is_left_over, self.under_way = self.under_way, True
        try:
            backend.clear(timeout=self._seconds)
        except StorageDown as error:
            logger.warning("kvgrpc: the storage counts as empty while the rest of it is cleared: %s", error.message)
            self._start(backend)
            return False
        except BaseException:
            self.under_way = is_left_over
            raise
        self.under_way = False
        return True

    def stop(self) -> bool:
        """Ends the thread after its call of the store; False where that hangs."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(self._seconds + 0.5)
        return self._thread is None or not self._thread.is_alive()

    def _start(self, backend: StorageBackend) -> None:
        thread = threading.Thread(target=self._go_on, args=(backend,), name="kvgrpc-clear", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.error("kvgrpc: the storage counts as empty until it is cleared once more: %s", error)
        else:
            self._thread = thread

    def _go_on(self, backend: StorageBackend) -> None:
        while not self._stopped.wait(self._pause):
            try:
                backend.clear(timeout=self._seconds)
            except (StorageDown, InvalidRequest) as error:
                self._lines.warning("clear", f"kvgrpc: the storage is still being cleared: {error.message}")
                continue
            with self._lock:
                self.under_way = False
            logger.info("kvgrpc: the storage is cleared, and is used again")
            return
