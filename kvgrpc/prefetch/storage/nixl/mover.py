"""Moves pages between files and memory by NIXL; NIXL 1.5.1 was measured, docs/storage.md says what."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterator, Sequence

from kvgrpc.prefetch.storage.file.io import Vectored
from kvgrpc.prefetch.storage.nixl.agent import Agent

logger = logging.getLogger(__name__)


class NixlMover:
    """Lends each call an agent of its own.

    One that failed is ended, which waits until the kernel is done with the page, and replaced: so it may carry no other
    page meanwhile.
    """

    def __init__(self, timeout: float) -> None:
        """Raises what NIXL raises when it cannot start; ``timeout``: seconds for one page."""
        self._timeout = timeout
        self._lock = threading.Lock()
        self._idle: list[Agent] = [Agent()]
        self._closed = False
        self._plain = Vectored()

    def read(self, descriptor: int, pieces: Sequence[memoryview]) -> int:
        """As Mover says."""
        if self._moved("READ", descriptor, pieces):
            return sum(map(len, pieces))
        return self._plain.read(descriptor, pieces)

    def write(self, descriptor: int, pieces: Sequence[memoryview]) -> None:
        """As Mover says."""
        if not self._moved("WRITE", descriptor, pieces):
            self._plain.write(descriptor, pieces)

    def close(self) -> None:
        """Ends the agents; one that is lent ends when it comes back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for agent in idle:
            agent.close()

    def _moved(self, operation: str, descriptor: int, pieces: Sequence[memoryview]) -> bool:
        """False when NIXL failed. It has one code for a full disk, a short file and a broken one: who repeats the call
        without it learns which, or has the page. What hung is not repeated: raises TimeoutError.
        """
        with self._agent() as agent:
            failed = agent.move(operation, descriptor, pieces, self._timeout)
        if failed is None:
            return True
        if failed.timed_out:
            raise TimeoutError(errno.ETIMEDOUT, f"{os.strerror(errno.ETIMEDOUT)}: {failed.why}")
        logger.warning("storage 'nixl': %s of a page failed (%s), it is repeated without NIXL", operation, failed.why)
        return False

    @contextlib.contextmanager
    def _agent(self) -> Iterator[Agent]:
        with self._lock:
            agent = self._idle.pop() if self._idle else None
        agent = agent or self._new()
        yield agent
        with self._lock:
            keep = agent.usable and not self._closed
            if keep:
                self._idle.append(agent)
        if not keep:
            agent.close()

    def _new(self) -> Agent:
        try:
            return Agent()
        except Exception as error:
            raise OSError(errno.EAGAIN, f"NIXL cannot start another agent: {error}") from error
