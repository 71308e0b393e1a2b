"""The file in which an index keeps what it knew."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from kvgrpc.events.following.saved import SavedCache, SavedCut, pack, unpack

_log = logging.getLogger(__name__)


class SavedIndex:
    """One file. Its calls block."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        # A close does not wait for the thread of a save that it cancelled: both write the same new file.
        self._one = threading.Lock()

    def read(self) -> dict[tuple[str, int], SavedCache]:
        """What was written last; nothing where there is no such file, or one that cannot be believed."""
        try:
            return unpack(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except Exception as error:  # whatever lies there, the index starts
            _log.warning("%s is no saved index, all snapshots are taken anew: %r", self._path, error)
            return {}

    def write(self, cut: SavedCut) -> None:
        """Takes the place of what was there in one step, or says in the log why not."""
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            with self._one, open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.writelines(pack(cut))
                file.flush()
                os.fsync(file.fileno())
                os.replace(new, self._path)
        except OSError as error:
            _log.warning("the index is not saved to %s: %s", self._path, error)
