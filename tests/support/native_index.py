"""``kvgrpc-index``, the native index, as a process."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from tests.support.rust import built_index

START_SECONDS, END_SECONDS = 20.0, 10.0


def made_up_block(at: int) -> int:
    """A hash of the first conversation of a made-up fleet (clients/rust/index/examples/support/layout.rs)."""
    mask = 2**64 - 1
    z = at + 0x9E3779B97F4A7C15 & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


class NativeIndex:
    """Follows these sources. ``open`` and ``close`` block, as those of IndexServer."""

    def __init__(self, sources: Sequence[str] = (), *more: str, listen: str = "127.0.0.1:0") -> None:
        self._listen = listen
        self._arguments = [*more, *(word for source in sources for word in ("--source", source))]
        self._process: subprocess.Popen[str] | None = None
        self.address = self.metrics_address = ""

    def open(self) -> NativeIndex:
        """Raises AssertionError with what it says where it does not start."""
        command = [built_index(), "--listen", self._listen, *self._arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.startswith("metrics at "):
            self.metrics_address = line.split()[-1]
            line = self._process.stdout.readline()
        assert line.startswith("kvgrpc index listens on "), line
        self.address = line.split()[-1]
        return self

    def close(self) -> int:
        """Ends it as an operator does; its exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(END_SECONDS)

    def kill(self) -> None:
        """Ends it as a machine does that dies."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(END_SECONDS)
