"""The file in which an index keeps what it knew."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from kvgrpc.events.following.saved import SavedCache, SavedCut, pack, unpack
from kvgrpc.rpc.within import within

T = TypeVar("T")

_log = logging.getLogger(__name__)


class SavedIndex:
    """One file. What its file system does not answer in time is given up, with a line in the log."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        # A close does not wait for the thread of a save that it cancelled: both write the same new file.
        self._one = threading.Lock()

    async def read(self, seconds: float) -> dict[tuple[str, int], SavedCache]:
        """Returns what was written last; nothing where there is no such file, or one that cannot be believed."""
        try:
            return await within(seconds, _on_a_thread(self._read))
        except asyncio.TimeoutError:
            _log.warning("%s is not read after %g s: all snapshots are taken anew", self._path, seconds)
            return {}

    async def write(self, cut: SavedCut, seconds: float) -> None:
        """Takes the place of what was there in one step, or says in the log why not."""
        try:
            await within(seconds, _on_a_thread(lambda: self._write(cut)))
        except asyncio.TimeoutError:
            _log.warning("the index is still being saved to %s after %g s", self._path, seconds)

    def _read(self) -> dict[tuple[str, int], SavedCache]:
        try:
            return unpack(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except Exception as error:  # whatever lies there, the index starts
            _log.warning("%s is no saved index, all snapshots are taken anew: %r", self._path, error)
            return {}

    def _write(self, cut: SavedCut) -> None:
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            with self._one, open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.writelines(pack(cut))
                file.flush()
                os.fsync(file.fileno())
                os.replace(new, self._path)
        except OSError as error:
            _log.warning("the index is not saved to %s: %s", self._path, error)


def _on_a_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """On one that nobody waits for, not the process's end either: a file system may hang for ever."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # it is told to whoever waits
            outcome.set_exception(error)

    threading.Thread(target=run, name="kvgrpc-saved-index", daemon=True).start()
    return asyncio.wrap_future(outcome)
