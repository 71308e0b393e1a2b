"""Found by ``PYTHONPATH`` in every Python process of an engine: at SIGUSR2 its main thread holds the interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

_SECONDS = float(os.environ.get("HELD_SECONDS", "10"))


def _hold(*_: object) -> None:
    """As a compiler or a C extension may: no other thread of Python runs, those of C++ libraries do."""
    usleep, began = ctypes.PyDLL(None).usleep, time.monotonic()
    while (left := began + _SECONDS - time.monotonic()) > 0:  # a signal ends usleep early
        usleep(int(left * 1e6))
    os.write(2, f"process {os.getpid()} held its interpreter for {time.monotonic() - began:.2f} s\n".encode())


with contextlib.suppress(ValueError):  # not in a main thread
    signal.signal(signal.SIGUSR2, _hold)
