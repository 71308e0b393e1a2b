"""A small file that may be replaced while we run, such as one that holds tokens."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvgrpc.errors import InvalidRequest, KvGrpcError

CHECK_SECONDS = 1.0
MAX_BYTES = 1 << 20

_log = logging.getLogger(__name__)
T = TypeVar("T")


class ReloadedFile(Generic[T]):
    """The value that ``parse`` makes of a file, anew when it changes; looked at once a second at most. Thread-safe.

    Raises InvalidRequest, which names the configuration ``key``, when the file cannot be used at construction. Later
    one that cannot be used leaves the last good value in force, and is logged once per change.
    """

    def __init__(self, path: str, key: str, parse: Callable[[str], T]) -> None:
        self._path = path
        self._key = key
        self._parse = parse
        self._stamp = self._look()
        self._value = self._read()
        self._next_look = time.monotonic() + CHECK_SECONDS

    def value(self) -> T:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + CHECK_SECONDS
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                self._replace()
        return self._value

    def _replace(self) -> None:
        try:
            self._value = self._read()
            _log.info("%s: read %s again", self._key, self._path)
        except KvGrpcError as error:
            # Without the traceback, which could show the file's content.
            _log.error("%s changed and cannot be used, what it held before stays: %s", self._path, error.message)

    def _look(self) -> tuple[int, ...]:
        return stamp_of(self._path)

    def _read(self) -> T:
        return self._parse(read_small_file(self._path, self._key))


def stamp_of(path: str) -> tuple[int, ...]:
    """Returns what changes when a file is replaced or written; empty where there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


def read_small_file(path: str, key: str) -> str:
    """The text of a regular file (a pipe would block until somebody writes to it), at most MAX_BYTES.

    Raises InvalidRequest, which names the configuration ``key``.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(None, "not a regular file")
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise OSError(None, f"larger than {MAX_BYTES} bytes")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise InvalidRequest.of(key, path, f"a file that can be read ({why})") from None
    return text
