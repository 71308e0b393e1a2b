"""The folder of a file backend: pages appear in it whole, by rename, and disappear from it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import socket
import stat
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

from kvgrpc.prefetch.storage.file.formats import Format

Names = Generator[str, None, None]
"""Names of the pages of one folder, which is open from the first to the last, or until ``close``. For one thread at a
time."""


def _pid_space() -> str:
    """The namespace of our pids; empty where no process can be looked at."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_TEMPORARY = ".tmp"
_ABANDONED_SECONDS = 3600.0
_HOST = socket.gethostname().replace("-", "_")
# In a container a process has its predecessor's pid, again and again: this tells their files apart.
_LIFE = secrets.token_hex(4)
# Containers of one network have one host name, and pids of their own: only those of our own namespace can be looked at.
_SPACE = _pid_space()
_BEGAN = time.time()
_numbers = itertools.count()


class Folder:
    """Paths are relative to ``root``. Thread-safe, and may be shared with other processes and hosts."""

    def __init__(self, root: Path, form: Format) -> None:
        """Raises OSError when the folder cannot be made or written to."""
        self.root = str(root.absolute())
        self._form = form
        os.makedirs(self.root, exist_ok=True)
        descriptor, path = self.create("")
        os.close(descriptor)
        os.unlink(path)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def create(self, name: str, flags: int = 0) -> tuple[int, str]:
        """A new file that nobody looks for, beside the page ``name``: (descriptor, path).

        In the page's own folder: through one for all, ext4 took 456 us of CPU for a file of 64 KiB instead of 129.
        """
        folder = os.path.dirname(self.path(name))
        path = os.path.join(folder, f".{_HOST}-{os.getpid()}-{_SPACE}-{_LIFE}-{next(_numbers)}{_TEMPORARY}")
        wanted = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags
        try:
            return os.open(path, wanted, 0o644), path
        except FileNotFoundError:
            os.makedirs(folder, exist_ok=True)
            return os.open(path, wanted, 0o644), path

    def look(self, name: str) -> os.stat_result | None:
        """The state of a page's file; None for what is not there, and for what is no plain file."""
        try:
            status = os.lstat(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status if stat.S_ISREG(status.st_mode) else None

    def open(self, name: str, flags: int = 0) -> tuple[int, os.stat_result] | None:
        """A page's descriptor, to read, and what the system says of the file; None for what is not there, and for what
        is no plain file: that is no page.

        Without O_NONBLOCK a FIFO of a page's name would keep its reader until somebody writes into it.
        """
        try:
            descriptor = os.open(f"{self.root}/{name}", _READ | flags)
        except OSError as error:
            # In this order: no file, a file for its folder, a symbolic link, a socket or a FIFO of no device.
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                return None
            raise
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            return descriptor, status
        os.close(descriptor)
        return None

    def publish(self, temporary: str, name: str) -> None:
        """Gives a finished file its name; whoever opens it sees all of it."""
        os.replace(temporary, self.path(name))

    def remove(self, name: str) -> bool:
        """True if it was there."""
        try:
            os.unlink(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def scan(self, clean: bool = False) -> Iterator[tuple[str, int, float]]:
        """(name, bytes, modification time) of every page; ``clean`` removes what killed writers left behind."""
        for prefix in self._form.folders:
            for name, entry in self._entries(prefix, clean):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield name, status.st_size, status.st_mtime

    def names(self) -> list[Names]:
        """Every page that is there all the while, found one after the other: for each folder those in it."""
        return [self._names_in(prefix) for prefix in self._form.folders]

    def _names_in(self, prefix: str) -> Names:
        for name, _ in self._entries(prefix, clean=False):
            yield name

    def _entries(self, prefix: str, clean: bool) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yields the plain files in one folder: nothing else is a page. Raises OSError where the root is gone."""
        absent = (FileNotFoundError, NotADirectoryError) if prefix else ()
        with contextlib.suppress(*absent), os.scandir(self.path(prefix)) as entries:
            for entry in entries:
                if self._form.is_page(entry.name):
                    if entry.is_file(follow_symlinks=False):
                        yield prefix + entry.name, entry
                elif clean and entry.name.endswith(_TEMPORARY):
                    with contextlib.suppress(OSError):
                        if _abandoned(entry.name, entry.stat(follow_symlinks=False).st_mtime):
                            os.unlink(entry.path)


def _abandoned(name: str, modified: float) -> bool:
    """True if the process that wrote it is gone, or it has been still for an hour: another host's process is not seen,
    and a pid may be another process's by now. In another container with our host's name: since before we began."""
    host, pid, space, life, *_ = [*name.removeprefix(".").split("-"), "", "", ""]
    if host == _HOST and pid.isdigit() and (_is_gone(int(pid), life) if space == _SPACE else modified < _BEGAN):
        return True
    return time.time() - modified > _ABANDONED_SECONDS


def _is_gone(pid: int, life: str) -> bool:
    """True if no such process lives, or it is ours, which has another life."""
    return life != _LIFE if pid == os.getpid() else not os.path.exists(f"/proc/{pid}")


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


REMEMBERED_SECONDS = 300.0
"""A round that nobody went on with for so long begins anew: a page that came meanwhile may lie behind it."""
# Each has as many folders open as ``visited`` has threads.
_MOST_REMEMBERED = 8


class ResumableScans:
    """Each round has a name, and none that is remembered is walked by two. Thread-safe."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._stopped: dict[str, tuple[float, deque[Names]]] = {}

    def go_on(self, which: str) -> deque[Names]:
        """Names of pages, folder by folder: those that the round did not come to before it stopped, else all."""
        self._forget(time.monotonic() - REMEMBERED_SECONDS, _MOST_REMEMBERED)
        with self._lock:
            _, folders = self._stopped.pop(which, (0.0, None))
        return deque(self._folder.names()) if folders is None else folders

    def stop(self, which: str, folders: deque[Names]) -> None:
        """Remembers what it did not come to."""
        with self._lock:
            other = self._stopped.pop(which, None)
            self._stopped[which] = time.monotonic(), folders
        if other is not None:
            _close(other[1])
        self._forget(0.0, _MOST_REMEMBERED)

    def close(self) -> None:
        self._forget(time.monotonic(), 0)

    def _forget(self, before: float, most: int) -> None:
        """Those that stopped before then, and the oldest but so many; their folders are open until then."""
        closed = []
        with self._lock:
            while self._stopped:
                which, (stopped, folders) = next(iter(self._stopped.items()))
                if stopped >= before and len(self._stopped) <= most:
                    break
                del self._stopped[which]
                closed.append(folders)
        for folders in closed:
            _close(folders)


def _close(folders: deque[Names]) -> None:
    for names in folders:
        names.close()


BLOCK = 4096
TOUCH_SECONDS = 60.0


class Usage:
    """Least recently used first. Thread-safe; times are Unix seconds, names are paths under the root."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._pages: OrderedDict[str, _Page] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __len__(self) -> int:
        return len(self._pages)

    def reserve(self, name: str, nbytes: int, now: float) -> list[str] | None:
        """Counts a page that will be written; the names that have to go for it. None: larger than all there is."""
        size = _blocks(nbytes)
        with self._lock:
            if self.capacity is not None and size > self.capacity:
                return None
            self._drop(name)
            gone = []
            while self.capacity is not None and self._nbytes + size > self.capacity and self._pages:
                oldest = next(iter(self._pages))
                self._drop(oldest)
                gone.append(oldest)
            self._put(name, size, now, now)
            return gone

    def used(self, name: str, nbytes: int, now: float) -> bool:
        """Notes a read; whether the file's own time should be brought up to date (other processes go by that)."""
        with self._lock:
            page = self._pages.get(name)
            if page is None:
                self._put(name, _blocks(nbytes), now, now)
                return True
            self._pages.move_to_end(name)
            page.used = now
            if page.size != (size := _blocks(nbytes)):
                self._nbytes += size - page.size
                page.size = size
            if now - page.touched <= TOUCH_SECONDS:
                return False
            page.touched = now
            return True

    def prove(self, name: str, state: int | None) -> None:
        """Remembers in which state a file was seen to be its page and whole; None: in none."""
        with self._lock:
            if (page := self._pages.get(name)) is not None:
                page.proved = state

    def proved(self, name: str) -> int | None:
        with self._lock:
            page = self._pages.get(name)
            return None if page is None else page.proved

    def remove(self, name: str) -> None:
        with self._lock:
            self._drop(name)

    def replace(self, found: Mapping[str, tuple[int, float]], began: float) -> None:
        """Takes a scan's pages: name -> (bytes, modification time). Those used since it ``began`` count beside them."""
        with self._lock:
            known = self._pages
            self._pages, self._nbytes = OrderedDict(), 0
            pages = {name: _Page(_blocks(nbytes), time, time) for name, (nbytes, time) in found.items()}
            for name, page in known.items():
                if name in pages:
                    pages[name].used = max(page.used, pages[name].used)
                    pages[name].proved = page.proved
                elif page.used >= began:
                    pages[name] = page
            for name in sorted(pages, key=lambda name: pages[name].used):
                self._pages[name] = pages[name]
                self._nbytes += pages[name].size

    def excess(self) -> list[str]:
        """Names that have to go so that what is there fits; they are counted no more."""
        gone = []
        with self._lock:
            while self.capacity is not None and self._nbytes > self.capacity:
                oldest = next(iter(self._pages))
                self._drop(oldest)
                gone.append(oldest)
        return gone

    def _put(self, name: str, size: int, used: float, touched: float) -> None:
        self._pages[name] = _Page(size, used, touched)
        self._nbytes += size

    def _drop(self, name: str) -> None:
        page = self._pages.pop(name, None)
        if page:
            self._nbytes -= page.size


class _Page:
    __slots__ = ("proved", "size", "touched", "used")

    def __init__(self, size: int, used: float, touched: float) -> None:
        self.size, self.used, self.touched = size, used, touched
        self.proved: int | None = None


def state_of(status: os.stat_result) -> int:
    """A number that differs once a file was written to, or another took its place."""
    return (status.st_ino << 64 | status.st_size) << 64 | status.st_mtime_ns


def _blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK
