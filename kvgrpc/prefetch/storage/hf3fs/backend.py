"""The storage backend ``hf3fs``: pages in slots of one file. docs/storage.md has its config and its promises."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from kvgrpc.errors import FeatureDisabled, InvalidRequest
from kvgrpc.prefetch.storage.base import (
    MISSING,
    OK,
    PageBuffers,
    PageResult,
    StorageStats,
    Threads,
    check_keys,
    failed,
    page_bytes,
    timed_out,
    views,
)
from kvgrpc.prefetch.storage.file.formats import HEADER_BYTES, NO_SUM, Header
from kvgrpc.prefetch.storage.file.io import header, header_block, is_right
from kvgrpc.prefetch.storage.flat import other_size
from kvgrpc.prefetch.storage.hf3fs.client import Hf3fsClient, LocalClient, UsrbioClient
from kvgrpc.prefetch.storage.hf3fs.slots import Slot, Slots
from kvgrpc.prefetch.storage.paged import PageByPage
from kvgrpc.settings import read

_PACKAGE = "hf3fs_fuse"
_INSTALL = (
    "build 3FS's hf3fs_fuse and hf3fs_py_usrbio (github.com/deepseek-ai/3FS) for this Python, or set client to 'local'"
)
_LAYOUT = "kvgrpc hf3fs layout 1"
_NOTHING = memoryview(bytes(HEADER_BYTES))
_CLEARED_AT_ONCE = 64


class Hf3fsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Config of the backend ``hf3fs``."""

    path: str
    """Folder on a mounted 3FS, or with ``client`` "local" any; made if it is not there."""
    max_bytes: Annotated[int, msgspec.Meta(ge=1)]
    """Size of the file, which is made at once."""
    page_bytes: Annotated[int, msgspec.Meta(ge=1)]
    """The largest page: ``shape.page_bytes`` of the engine's cache."""
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$")] = "kvgrpc"
    """Of the file, without ".bin". One process has a file at a time: each rank needs a name of its own."""
    client: Literal["usrbio", "local"] = "usrbio"
    """What moves the bytes: 3FS's own client, or the kernel."""
    threads: Threads = 4
    sync: bool = False
    """Every page is on disk before it can be found."""


class Hf3fsBackend(PageByPage):
    """A StorageBackend over slots of one size. Each slot begins with a header that proves the page behind it, so the
    file is all the metadata there is: it is read once, at the start."""

    name = "hf3fs"

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Hf3fsBackend:
        """Raises InvalidRequest, and FeatureDisabled where 3FS's client is wanted and not installed."""
        config = read(Hf3fsConfig, settings)
        if config.client == "usrbio" and importlib.util.find_spec(_PACKAGE) is None:
            raise _disabled(f"needs {_PACKAGE}, 3FS's client, which has no wheel")
        return cls(config)

    def __init__(self, config: Hf3fsConfig) -> None:
        self._config = config
        self._slot_bytes = HEADER_BYTES + -(-config.page_bytes // HEADER_BYTES) * HEADER_BYTES
        self._slots = Slots(config.max_bytes // self._slot_bytes)
        if not self._slots.count:
            raise InvalidRequest.of("max_bytes", config.max_bytes, f"at least {self._slot_bytes}, one page")
        path = os.path.join(os.path.abspath(config.path), f"{config.name}.bin")
        with contextlib.ExitStack() as undo:
            self._descriptor = _open(path, config.path)
            undo.callback(os.close, self._descriptor)
            self._client = self._open_client(path)
            undo.callback(self._client.close)
            self._read_layout(path)
            undo.pop_all()
        super().__init__(path, config.threads)
        self._open = True

    def contains(self, keys: Sequence[str], timeout: float) -> list[bool]:
        """Answers as every backend, but what is known in memory needs no thread."""
        check_keys(keys)
        if keys and (self._calls.closed or timeout <= 0):
            raise self._calls.down("it is closed" if self._calls.closed else "not begun in time")
        return [self._size(key) is not None for key in keys]

    def clear(self, prefix: str = "", timeout: float = 60.0) -> int:
        if self._calls.closed:
            raise self._calls.down("it is closed")
        keys = [key for key in self._slots.keys() if key.startswith(prefix)]  # noqa: SIM118
        parts = [keys[start : start + _CLEARED_AT_ONCE] for start in range(0, len(keys), _CLEARED_AT_ONCE)]
        return sum(self._calls.ask(lambda number: self._drop_all(parts[number]), len(parts), timeout))

    def count(self, prefix: str, timeout: float) -> int:
        if self._calls.closed:
            raise self._calls.down("it is closed")
        return sum(key.startswith(prefix) for key in self._slots.keys())  # noqa: SIM118

    def stats(self) -> StorageStats:
        trouble = self._calls.trouble
        return self._tally.stats(
            healthy=not trouble,
            detail=trouble,
            pages=len(self._slots),
            nbytes=self._slots.nbytes,
            capacity=self._slots.count * self._config.page_bytes,
        )

    def close(self, timeout: float) -> bool:
        ended = self._calls.close(timeout)
        if ended and self._open:
            self._open = False
            self._client.close()
            os.close(self._descriptor)  # and with it the lock
        return ended

    def _size(self, key: str) -> int | None:
        return self._slots.size(key)

    def _read(self, key: str, page: PageBuffers) -> PageResult:
        if self._slots.size(key) != page_bytes(page) or (slot := self._slots.read(key)) is None:
            return MISSING
        with self._using(slot) as use:
            pieces, block = views(page), header_block()
            done = self._client.read(self._offset(slot.number), [block, *pieces])
            found = Header.decode(block)
            use.complete = (
                done == HEADER_BYTES + page_bytes(page)
                and found is not None
                and found.key == key
                and is_right(found, pieces)
            )
        if use.error is not None:
            return failed(str(use.error), retryable=True)
        return OK if use.complete else MISSING

    def _write(self, key: str, page: PageBuffers, deadline: float) -> PageResult:
        nbytes = page_bytes(page)
        if nbytes > self._slot_bytes - HEADER_BYTES:
            return failed(f"the page has {nbytes} bytes, and page_bytes is {self._config.page_bytes}")
        try:
            slot, gone = self._slots.claim(key, nbytes, deadline)
        except TimeoutError:
            return timed_out("another write of the same page did not end in time")
        if slot is None:
            return failed(f"all {self._slots.count} slots are being read or written", retryable=True)
        if slot.complete:
            there = slot.nbytes
            self._slots.end(slot, complete=True)
            return OK if there == nbytes else failed(other_size(key, there, nbytes))
        if gone:
            self._tally.add("evicted", len(gone))
            self._removed.tell(gone)
        with self._using(slot) as use:
            self._fill(slot, page)
        if use.error is not None:
            return failed(str(use.error), retryable=True)
        self._tally.add("written")
        return OK

    def _fill(self, slot: Slot, page: PageBuffers) -> None:
        """The old header goes first and the new one comes last: whoever is killed in between leaves no page."""
        offset, block, pieces = self._offset(slot.number), header_block(), views(page)
        self._client.write(offset, [_NOTHING])
        self._client.write(offset + HEADER_BYTES, pieces)
        if self._config.sync:
            self._client.sync()
        block[:] = header(slot.key, pieces).encode()
        self._client.write(offset, [block])
        if self._config.sync:
            self._client.sync()

    @contextlib.contextmanager
    def _using(self, slot: Slot) -> Iterator[_Use]:
        """Ends the use of a slot, whose page is gone when a write of it failed or its bytes are not its own."""
        use, reads = _Use(), slot.complete
        try:
            yield use
        except OSError as error:
            use.error, use.complete = error, reads
        except BaseException:
            use.complete = False
            raise
        finally:
            self._slots.end(slot, complete=use.complete)

    def _drop(self, key: str) -> bool:
        slot = self._slots.drop(key)
        if slot is None:
            return False
        self._wipe(slot)
        return True

    def _drop_all(self, keys: Sequence[str]) -> int:
        """Drops these pages and tells it at once, whoever waits for their wiping, or does not any more."""
        gone = []
        with contextlib.ExitStack() as wiping:
            for key in keys:
                if (slot := self._slots.drop(key)) is not None:
                    gone.append(key)
                    wiping.callback(self._wipe, slot)
            self._removed.tell(gone)
        return len(gone)

    def _wipe(self, slot: Slot) -> None:
        """Ends the use of a slot whose page was dropped."""
        try:
            # Else it would be there again at the next start: a nuisance, and no wrong page.
            with contextlib.suppress(OSError):
                self._client.write(self._offset(slot.number), [_NOTHING])
        finally:
            self._slots.end(slot, complete=False)

    def _offset(self, number: int) -> int:
        return HEADER_BYTES + number * self._slot_bytes

    def _open_client(self, path: str) -> Hf3fsClient:
        if self._config.client == "local":
            return LocalClient(self._descriptor)
        try:
            return UsrbioClient(path, self._descriptor, self._slot_bytes)
        except Exception as error:  # its errors share no class
            raise _disabled(f"does not start on {path} ({type(error).__name__}: {error})") from error

    def _read_layout(self, path: str) -> None:
        """Reads what the file says of itself and of its slots; a new one is made as long as it will be."""
        whole = self._offset(self._slots.count)
        said = Header(f"{_LAYOUT}, {self._slots.count} slots of {self._slot_bytes} bytes", whole, NO_SUM, 0)
        block = header_block()
        if os.fstat(self._descriptor).st_size:
            self._client.read(0, [block])
            there = Header.decode(block)
            if there != said:
                words = there.key if there is not None and there.key.startswith(_LAYOUT) else "no file of kvgrpc"
                rule = f"a name of its own for other sizes: {path} has {words}"
                raise InvalidRequest.of("name", self._config.name, rule)
            self._read_slots(block)
            return
        try:
            os.posix_fallocate(self._descriptor, 0, whole)
            block[:] = said.encode()
            self._client.write(0, [block])
        except OSError as error:
            os.ftruncate(self._descriptor, 0)
            raise InvalidRequest.of("max_bytes", self._config.max_bytes, f"what the disk can hold ({error})") from error

    def _read_slots(self, block: memoryview) -> None:
        for number in range(self._slots.count):
            self._client.read(self._offset(number), [block])
            found = Header.decode(block)
            if found is not None and found.nbytes <= self._slot_bytes - HEADER_BYTES:
                self._slots.found(number, found.key, found.nbytes)


class _Use:
    """The end of the use of a slot."""

    def __init__(self) -> None:
        self.complete = True
        self.error: OSError | None = None


def _open(path: str, folder: str) -> int:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise InvalidRequest.of("path", folder, f"a folder that this process may write to ({error})") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        rule = f"a name of its own for each rank: another process has {path} open"
        raise InvalidRequest.of("name", os.path.basename(path), rule) from error
    return descriptor


def _disabled(why: str) -> FeatureDisabled:
    return FeatureDisabled(
        f"storage 'hf3fs' {why}: {_INSTALL}", metadata={"feature": "storage.hf3fs", "howToEnable": _INSTALL}
    )
