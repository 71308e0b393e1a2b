"""Log records of kvgrpc: one logger per module below "kvgrpc", quiet until a program configures it.

A library does not configure logging; ``configure`` is for our own programs (``kvgrpc serve``, ``kvgrpc demo``).
"""

from __future__ import annotations

import logging

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s [%(threadName)s] %(message)s"


def configure(level: str | int = "INFO") -> None:
    """Sends records from ``level`` on to stderr. Call it once, from a program's main."""
    logging.basicConfig(level=level, format=FORMAT, datefmt="%Y-%m-%dT%H:%M:%S")
    drop_poller_noise()


def drop_poller_noise() -> None:
    """Hides one harmless record of grpc.aio. Repeating it changes nothing.

    Several loops of a process share one completion-queue poller; a loop that wakes after another one has read the
    queue's socket reports BlockingIOError from PollerCompletionQueue, and nothing is lost by it.
    """
    asyncio_logger = logging.getLogger("asyncio")
    if not any(isinstance(present, _PollerNoise) for present in asyncio_logger.filters):
        asyncio_logger.addFilter(_PollerNoise())


class _PollerNoise(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (isinstance(error, BlockingIOError) and "PollerCompletionQueue" in record.getMessage())
