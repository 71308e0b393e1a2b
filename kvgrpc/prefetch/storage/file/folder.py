"""The folder of a file backend: pages appear in it whole, by rename, and disappear from it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from kvgrpc.prefetch.storage.file.formats import Format

_TEMPORARY = ".tmp"
_ABANDONED_SECONDS = 3600.0
_HOST = socket.gethostname().replace("-", "_")


class Folder:
    """Paths are relative to ``root``. Thread-safe, and may be shared with other processes and hosts."""

    def __init__(self, root: Path, form: Format) -> None:
        """Raises OSError when the folder cannot be made or written to."""
        self.root = str(root.absolute())
        self._form = form
        self._numbers = itertools.count()
        self._temporary = os.path.join(self.root, _TEMPORARY)
        os.makedirs(self._temporary, exist_ok=True)
        descriptor = self.create()
        os.close(descriptor[0])
        os.unlink(descriptor[1])

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def create(self, flags: int = 0) -> tuple[int, str]:
        """A new file that nobody looks for: (descriptor, path)."""
        path = os.path.join(self._temporary, f"{_HOST}-{os.getpid()}-{next(self._numbers)}")
        wanted = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags
        try:
            return os.open(path, wanted, 0o644), path
        except FileNotFoundError:  # somebody emptied the folder under us
            os.makedirs(self._temporary, exist_ok=True)
            return os.open(path, wanted, 0o644), path

    def publish(self, temporary: str, name: str) -> None:
        """Gives a finished file its name; whoever opens it sees all of it."""
        target = self.path(name)
        try:
            os.replace(temporary, target)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.replace(temporary, target)

    def remove(self, name: str) -> bool:
        """Whether it was there."""
        try:
            os.unlink(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def scan(self) -> Iterator[tuple[str, int, float]]:
        """(name, bytes, modification time) of every page."""
        for folder, prefix in self._folders():
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    if self._form.is_page(entry.name):
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            yield prefix + entry.name, status.st_size, status.st_mtime

    def clean(self) -> None:
        """Removes what writers left behind that were killed."""
        with os.scandir(self._temporary) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if _abandoned(entry.name, entry.stat(follow_symlinks=False).st_mtime):
                        os.unlink(entry.path)

    def _folders(self) -> Iterator[tuple[str, str]]:
        if not self._form.header_bytes:
            yield self.root, ""
            return
        with os.scandir(self.root) as entries:
            names = [entry.name for entry in entries if len(entry.name) == 2 and entry.is_dir(follow_symlinks=False)]
        for name in names:
            yield self.path(name), f"{name}/"


def _abandoned(name: str, modified: float) -> bool:
    """Whether the process that wrote it is gone; of another host, whether it has been still for an hour."""
    host, _, rest = name.partition("-")
    pid = rest.partition("-")[0]
    if host == _HOST and pid.isdigit():
        return not os.path.exists(f"/proc/{pid}")
    return time.time() - modified > _ABANDONED_SECONDS


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)
