"""The end of ranks: one end for all steps of a close, and a close for those that are open when the process ends."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

# What every step gets, even when the time is over, so that what needs no waiting is done.
_LEAST_SECONDS = 0.1
# For all ranks of the process together, and how much later than that one may be.
EXIT_SECONDS, _LATE_SECONDS = 3.0, 1.0

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ClosingTime:
    """``seconds`` from now on, which steps divide among them."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    def left(self, share: float = 1.0) -> float:
        """Seconds left until that share of the whole time is over, at least 0.1."""
        return max(_LEAST_SECONDS, self._began + self.seconds * share - time.monotonic())


async def aside(function: Callable[..., T], *arguments: object) -> T:
    """A step that blocks, on another thread; here where the process ends and none can be had. It has its own bound."""
    call = partial(function, *arguments)
    try:
        running = asyncio.get_running_loop().run_in_executor(None, call)
    except RuntimeError:
        return call()
    return await running


async def opened_aside(make: Callable[..., T], *arguments: object, close: Callable[[Any], object]) -> T:
    """Returns what ``make`` opens on another thread. Once nobody waits for it any more, it is closed there when it
    comes."""
    opening = asyncio.get_running_loop().run_in_executor(None, partial(make, *arguments))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(partial(_close_opened, close))
        raise


def _close_opened(close: Callable[[Any], object], opening: asyncio.Future[Any]) -> None:
    if opening.cancelled() or opening.exception() is not None or opening.result() is None:
        return
    logger.warning("%s was opened too late, and is closed", type(opening.result()).__name__)
    asyncio.get_running_loop().run_in_executor(None, close, opening.result())


class ClosesAtExit(Protocol):
    """An opened rank."""

    def _close_at_exit(self, seconds: float) -> concurrent.futures.Future[Any]: ...


def close_at_exit(rank: ClosesAtExit) -> None:
    """From now on, until ``forget``. A data plane whose threads run while the interpreter goes aborts the process."""
    _open.add(rank)


def forget(rank: ClosesAtExit) -> None:
    _open.discard(rank)


def _close_all() -> None:
    ranks = list(_open)
    if not ranks:
        return
    logger.info("%d ranks are open at the end of the process, and are closed", len(ranks))
    try:
        _close_within(ranks)
    finally:  # where warnings are errors the first one raises
        for rank in ranks:
            text = f"{rank!r} was not closed before the end of the process"
            warnings.warn(text, ResourceWarning, source=rank, stacklevel=2)


def _close_within(ranks: Sequence[ClosesAtExit]) -> None:
    try:
        closing = [rank._close_at_exit(EXIT_SECONDS) for rank in ranks]
    except RuntimeError as error:
        logger.warning("ranks that were open at the end of the process could not be closed: %s", error)
        return
    _, late = concurrent.futures.wait(closing, EXIT_SECONDS + _LATE_SECONDS)
    if late:
        logger.warning("%d ranks were not closed within %g s of the process's end", len(late), EXIT_SECONDS)


_open: weakref.WeakSet[ClosesAtExit] = weakref.WeakSet()
# At import: what the engine registers after that comes before it, and finds its ranks open.
atexit.register(_close_all)
os.register_at_fork(after_in_child=_open.clear)
