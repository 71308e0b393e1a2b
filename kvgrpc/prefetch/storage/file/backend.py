"""The storage backend ``file``. docs/storage.md has its config, its promises and its figures."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from kvgrpc.errors import InvalidRequest
from kvgrpc.prefetch.storage.base import (
    MISSING,
    OK,
    Nbytes,
    PageBuffers,
    PageResult,
    Seconds,
    StorageStats,
    Threads,
    failed,
    page_bytes,
    views,
)
from kvgrpc.prefetch.storage.file.folder import Folder, ResumableScans, Usage, is_full, state_of
from kvgrpc.prefetch.storage.file.formats import Format, Header, OwnFormat, SglangFormat
from kvgrpc.prefetch.storage.file.io import Mover, Vectored, aligned, header, header_block, is_right
from kvgrpc.prefetch.storage.file.visiting import visited
from kvgrpc.prefetch.storage.flat import other_size
from kvgrpc.prefetch.storage.paged import PageByPage
from kvgrpc.settings import read

logger = logging.getLogger(__name__)


class FileConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Config of the backend ``file``."""

    path: str
    """Folder; made if it is not there. Several ranks, processes and hosts may share it."""
    max_bytes: Nbytes = 0
    """Bytes of disk; the pages that were not used for longest make room. 0: unbounded."""
    threads: Threads = 4
    direct: bool = False
    """O_DIRECT for pages whose buffers are aligned to 4,096 bytes: for disks that outrun the page cache."""
    checksum: bool = True
    """Of every page, against blocks that a crash of the machine lost. Not in SGLang's format."""
    sync: bool = False
    """Every page is on disk before it has a name. Only needed where ``checksum`` is off and power may fail."""
    format: Literal["kvgrpc", "sglang"] = "kvgrpc"
    """How files look; "sglang": those of SGLang 0.5.23's own backend ``file``."""
    rescan_interval: Seconds = 30.0
    """Seconds after which pages that other processes wrote are counted too."""


class FileBackend(PageByPage):
    """A StorageBackend with a file for each page. A call that hangs in the kernel keeps one thread and its page."""

    name = "file"

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> FileBackend:
        """Raises InvalidRequest for settings that are not right, also for a folder that cannot be written to."""
        return cls(read(FileConfig, settings))

    def __init__(self, config: FileConfig, mover: Mover | None = None) -> None:
        self._config = config
        self._mover = mover or Vectored()
        self._form: Format = SglangFormat() if config.format == "sglang" else OwnFormat()
        try:
            self._folder = Folder(Path(config.path), self._form)
        except OSError as error:
            raise InvalidRequest.of(
                "path", config.path, f"a folder that this process may write to ({error})"
            ) from error
        self._direct = config.direct and _takes_direct(self._folder)
        if config.direct and not self._direct:
            logger.warning("storage %r: %s takes no O_DIRECT: pages go through the page cache", self.name, config.path)
        self._rounds = ResumableScans(self._folder)
        self._usage = Usage(config.max_bytes or None)
        self._closed = threading.Event()
        super().__init__(config.path, config.threads)
        try:
            self._rescan(clean=True)
        except BaseException:
            self._calls.close(0.0)
            raise
        self._scanner = threading.Thread(target=self._keep_scanning, name=f"kvgrpc-{self.name}-scan", daemon=True)
        self._scanner.start()

    def clear(self, prefix: str = "", timeout: float = 60.0) -> int:
        """Those of other processes that share the folder too. Each page's own header says its key.

        A repeat goes on where the last one ran out of time, if that was within ``REMEMBERED_SECONDS``; each comes on by
        one file at least.
        """
        if self._closed.is_set():
            raise self._calls.down("it is closed")
        deadline = time.monotonic() + timeout
        folders = self._rounds.go_on(prefix)
        try:
            with self._removed.telling() as tell:
                gone = visited(folders, self._clearing(prefix, tell), deadline)
        except OSError as error:
            raise self._calls.down(str(error)) from error
        if folders:
            self._rounds.stop(prefix, folders)
            raise self._calls.down(f"{gone} pages were dropped in {timeout:g} s; a repeat goes on")
        return gone

    def _clearing(self, prefix: str, tell: Callable[[str | None], None]) -> Callable[[str], bool]:
        """Removes the page of a name if its key begins so, and tells of it; true if it did."""
        telling = threading.Lock()

        def clear(name: str) -> bool:
            key = self._key_in(name) if prefix or self._removed else None
            dropped = (not prefix or (key or "").startswith(prefix)) and self._remove(name)
            with telling:
                tell(key if dropped else None)
            return dropped

        return clear

    def count(self, prefix: str, timeout: float) -> int:
        if self._closed.is_set():
            raise self._calls.down("it is closed")
        folders = deque(self._folder.names())

        def counts(name: str) -> bool:
            return not prefix or (self._key_in(name) or "").startswith(prefix)

        try:
            found = visited(folders, counts, time.monotonic() + timeout)
        except OSError as error:
            raise self._calls.down(str(error)) from error
        if folders:
            raise self._calls.down(f"{found} pages were counted in {timeout:g} s, more are there")
        return found

    def stats(self) -> StorageStats:
        trouble = "closed" if self._closed.is_set() else self._calls.trouble
        return self._tally.stats(
            healthy=not trouble,
            detail=trouble,
            pages=len(self._usage),
            nbytes=self._usage.nbytes,
            capacity=self._usage.capacity,
        )

    def close(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        self._closed.set()
        self._rounds.close()
        ended = self._calls.close(timeout)
        self._mover.close()
        self._scanner.join(max(0.0, deadline - time.monotonic()))
        return ended and not self._scanner.is_alive()

    def _read(self, key: str, page: PageBuffers) -> PageResult:
        name = self._form.path(key)
        if name is None:
            return MISSING
        try:
            opened = self._folder.open(name, self._flags(page))
        except OSError as error:
            return failed(str(error), retryable=True)
        if opened is None:
            self._usage.remove(name)
            return MISSING
        descriptor, status = opened
        pieces, size = views(page), status.st_size
        try:
            if size != self._form.header_bytes + page_bytes(page):
                return MISSING
            if self._form.header_bytes:
                block = header_block()
                if self._mover.read(descriptor, [block, *pieces]) != size:
                    return MISSING
                found = Header.decode(block)
                if found is None or found.key != key or (self._config.checksum and not is_right(found, pieces)):
                    self._remove(name)  # torn or foreign: away with it, so that the page can be written again
                    return MISSING
            elif self._mover.read(descriptor, pieces) != size:
                return MISSING
            if self._usage.used(name, size, time.time()):
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
            return OK
        except OSError as error:
            return failed(str(error), retryable=True)
        finally:
            os.close(descriptor)

    def _write(self, key: str, page: PageBuffers, deadline: float) -> PageResult:
        name, nbytes = self._form.path(key), page_bytes(page)
        if name is None:
            return failed(f"{key[:80]!r} cannot be the name of a file in SGLang's format")
        there = self._size(key)
        if there is not None and (there == nbytes or self._form.header_bytes):
            return OK if there == nbytes else failed(other_size(key, there, nbytes))
        size = self._form.header_bytes + nbytes
        evicted = self._usage.reserve(name, size, time.time())
        if evicted is None:
            return failed(f"the page has {size} bytes, and max_bytes is {self._usage.capacity}")
        try:
            self._evict(evicted)
            self._write_new(key, name, page)
        except OSError as error:
            self._usage.remove(name)
            remedy = ": set max_bytes below what the disk can hold" if is_full(error) else ""
            return failed(f"{error}{remedy}", retryable=True)
        self._tally.add("written")
        return OK

    def _write_new(self, key: str, name: str, page: PageBuffers) -> None:
        pieces = views(page)
        if self._form.header_bytes:
            block = header_block()
            block[:] = header(key, pieces, checked=self._config.checksum).encode()
            pieces = [block, *pieces]
        descriptor, temporary = self._folder.create(name, self._flags(page))
        try:
            try:
                self._mover.write(descriptor, pieces)
                if self._config.sync:
                    os.fdatasync(descriptor)
                written = state_of(os.fstat(descriptor))
            finally:
                os.close(descriptor)
            self._folder.publish(temporary, name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._usage.prove(name, written)

    def _size(self, key: str) -> int | None:
        """Bytes of the page's payload by its header and by its size; None if it is not there, or not whole.

        A file that is as it was when its header was read last, or when we wrote it, is looked at and not opened.
        """
        name = self._form.path(key)
        if name is None:
            return None
        proved = self._usage.proved(name)
        if proved is not None or not self._form.header_bytes:
            status = self._folder.look(name)
            if status is None:
                return None
            if not self._form.header_bytes or proved == state_of(status):
                return status.st_size - self._form.header_bytes
        opened = self._folder.open(name)
        if opened is None:
            return None
        descriptor, status = opened
        try:
            nbytes = status.st_size - self._form.header_bytes
            found = Header.decode(os.pread(descriptor, self._form.header_bytes, 0))
        finally:
            os.close(descriptor)
        if found is None or found.key != key or found.nbytes != nbytes:
            return None
        self._usage.prove(name, state_of(status))
        return nbytes

    def _flags(self, page: PageBuffers) -> int:
        return os.O_DIRECT if self._direct and aligned(page) else 0

    def _drop(self, key: str) -> bool:
        return self._remove(self._form.path(key))

    def _remove(self, name: str | None) -> bool:
        if name is None:
            return False
        self._usage.remove(name)
        return self._folder.remove(name)

    def _evict(self, names: Sequence[str]) -> None:
        with self._removed.telling() as tell:
            for name in names:
                key = self._key_in(name) if self._removed else None
                if self._folder.remove(name):
                    self._tally.add("evicted")
                    tell(key)

    def _key_in(self, name: str) -> str | None:
        """The key of the page in a file; None when the file is gone, cannot be read, or says none.

        Raises OSError where this process has no descriptor left: that says nothing of the page.
        """
        try:
            opened = self._folder.open(name)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return None
        if opened is None:
            return None
        descriptor, _ = opened
        try:
            return self._form.key_of(name, os.pread(descriptor, self._form.header_bytes, 0))
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def _keep_scanning(self) -> None:
        """Learns what other processes wrote and dropped; a scan takes at most a twentieth of the time."""
        interval = self._config.rescan_interval
        while not self._closed.wait(interval):
            began = time.monotonic()
            try:
                self._rescan()
            except OSError as error:
                logger.warning("storage %r: %s cannot be looked through: %s", self.name, self._config.path, error)
            interval = max(self._config.rescan_interval, 20 * (time.monotonic() - began))

    def _rescan(self, clean: bool = False) -> None:
        began = time.time()
        found = {name: (nbytes, modified) for name, nbytes, modified in self._folder.scan(clean)}
        self._usage.replace(found, began)
        self._evict(self._usage.excess())


def _takes_direct(folder: Folder) -> bool:
    """True if the file system below knows O_DIRECT."""
    try:
        descriptor, path = folder.create("", os.O_DIRECT)
    except OSError:
        return False
    os.close(descriptor)
    os.unlink(path)
    return True
