"""One agent of NIXL with its plug-in POSIX: moves one page at a time, and can be ended for good."""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kvgrpc.prefetch.storage.file.io import Vectored

_MODULE = "nixl._api"
_NAME = "kvgrpc"
_PLUGIN = "POSIX"
_MOST_PIECES = 1024
# AIO: its queue ends when the kernel is done with it; io_uring and POSIX AIO took 2 to 3 times as long for a page.
_OPTIONS = {"use_aio": "true", "ios_pool_size": str(2 * _MOST_PIECES)}
_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3


@dataclass(frozen=True, slots=True)
class NixlFailed:
    """Why a page was not moved."""

    why: str
    timed_out: bool


class Agent:
    """For one thread at a time."""

    def __init__(self) -> None:
        """Raises what NIXL raises."""
        self._nixl: Any = _open()

    @property
    def usable(self) -> bool:
        return self._nixl is not None

    def move(self, operation: str, descriptor: int, pieces: Sequence[memoryview], timeout: float) -> NixlFailed | None:
        """``operation``: "READ" or "WRITE", between the pieces and the start of a file; None when all was moved.

        After a failure the agent is ended and nothing touches the pieces any more.
        """
        deadline = time.monotonic() + timeout
        try:
            self._move(operation, descriptor, _ranges(pieces), deadline)
            return None
        except Exception as error:  # NIXL's share no class
            failed = NixlFailed(f"{type(error).__name__}: {error}", isinstance(error, TimeoutError))
        self.close()
        return failed

    def close(self) -> None:
        """Waits for what is under way in the kernel. Repeats are harmless."""
        if self._nixl is not None:
            # What NIXL allocated ends with this object, which nothing else refers to.
            self._nixl.agent = None
            self._nixl = None

    def _move(self, operation: str, descriptor: int, ranges: Sequence[tuple[int, int]], deadline: float) -> None:
        """Memory and file are registered for the moment: it takes 70 us, as memory that nobody registered has to."""
        agent, on = self._nixl, [_PLUGIN]
        memory = agent.register_memory([(address, nbytes, 0, "") for address, nbytes in ranges], "DRAM", backends=on)
        total = sum(nbytes for _, nbytes in ranges)
        file = agent.register_memory([(0, total, descriptor, "")], "FILE", backends=on)
        offset = 0
        for first in range(0, len(ranges), _MOST_PIECES):
            some = ranges[first : first + _MOST_PIECES]
            places = []
            for _, nbytes in some:
                places.append((offset, nbytes, descriptor))
                offset += nbytes
            self._transfer(operation, [(address, nbytes, 0) for address, nbytes in some], places, deadline)
        agent.deregister_memory(file, backends=on)
        agent.deregister_memory(memory, backends=on)

    def _transfer(
        self, operation: str, memory: list[tuple[int, int, int]], places: list[tuple[int, int, int]], deadline: float
    ) -> None:
        agent = self._nixl
        handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs(memory, "DRAM"),
            agent.get_xfer_descs(places, "FILE"),
            _NAME,
            backends=[_PLUGIN],
        )
        try:
            state, pause = agent.transfer(handle), 0.0
            while state == "PROC":
                if time.monotonic() > deadline:
                    raise TimeoutError("it was under way for longer than transfer_timeout")
                time.sleep(pause)
                pause = min(max(2 * pause, _FIRST_PAUSE), _LONGEST_PAUSE)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"NIXL says {state}")
        finally:
            with contextlib.suppress(Exception):  # of one that is under way; it ends with the agent
                handle.release()


def _open() -> Any:
    nixl = _import()
    agent = nixl.nixl_agent(_NAME, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend(_PLUGIN, _OPTIONS)
    return agent


def _import() -> ModuleType:
    """NIXL's import sends its log to stdout, and changes how all loggers treat their own errors: neither is for us."""
    if (known := sys.modules.get(_MODULE)) is not None:
        return known
    raise_exceptions = logging.raiseExceptions
    found = importlib.import_module(_MODULE)
    logging.raiseExceptions = raise_exceptions
    log = logging.getLogger("nixl")
    log.handlers, log.propagate = [], True
    if log.level == logging.INFO:
        log.setLevel(logging.WARNING)  # two lines for each agent otherwise
    return found


def _ranges(pieces: Sequence[memoryview]) -> list[tuple[int, int]]:
    return [(int(np.frombuffer(piece, dtype=np.uint8).ctypes.data), len(piece)) for piece in pieces]


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
        """Moves as Mover says."""
        if self._moved("READ", descriptor, pieces):
            return sum(map(len, pieces))
        return self._plain.read(descriptor, pieces)

    def write(self, descriptor: int, pieces: Sequence[memoryview]) -> None:
        """Moves as Mover says."""
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
