"""Mooncake's logger. It complains of every start that goes well, in two lines that look like faults."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_LEAST_LEVEL = "_ZN3fLI17FLAGS_minloglevelE"
_ERROR, _FATAL = 2, 3


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Meanwhile only what ends the process is written, where somebody has not asked for more than errors."""
    levels = [level for level in _levels() if level.value == _ERROR]
    for level in levels:
        level.value = _FATAL
    try:
        yield
    finally:
        for level in levels:
            level.value = _ERROR


def _levels() -> list[ctypes.c_int]:
    """The least level that is written, of each glog in this process; none where its names are others."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libglog" in line}
        for path in sorted(paths):
            found.append(ctypes.c_int.in_dll(ctypes.CDLL(path), _LEAST_LEVEL))
    return found
