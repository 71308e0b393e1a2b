"""A small file that may be replaced while we run, such as one that holds tokens."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvgrpc.errors import InvalidRequest, KvGrpcError

CHECK_SECONDS = 1.0
MAX_BYTES = 1 << 20

_log = logging.getLogger(__name__)
T = TypeVar("T")


class ReloadedFile(Generic[T]):
    """What ``parse`` makes of a file, made anew when the file changes; looked at once a second at most. Thread-safe.

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
        try:
            status = os.stat(self._path)
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> T:
        try:
            with open(self._path, encoding="utf-8") as file:
                text = file.read(MAX_BYTES + 1)
            if len(text) > MAX_BYTES:
                raise OSError(None, f"larger than {MAX_BYTES} bytes")
            return self._parse(text)
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not UTF-8"
            raise InvalidRequest.of(self._key, self._path, f"a file that can be read ({why})") from None
