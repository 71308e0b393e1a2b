"""Keys of a terminal, one at a time, without Return."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import tty
from collections import deque
from types import TracebackType

# Arrows and the like mean nothing here, and begin as Esc does.
_OF_SEVERAL_BYTES = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]")


class Keyboard:
    """Meanwhile the terminal gives each key at once. Without a terminal on stdin there are none."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1

    def __enter__(self) -> Keyboard:
        if self._fd >= 0:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)

    def pressed(self, seconds: float) -> str:
        """The next key, or empty after ``seconds`` without one. A terminal that is gone ends the program."""
        if not self._waiting:
            found, _, _ = select.select([self._fd] if self._fd >= 0 else [], [], [], max(0.0, seconds))
            if not found:
                return ""
            read = os.read(self._fd, 64).decode(errors="replace")
            if not read:
                raise SystemExit(0)
            self._waiting.extend(_OF_SEVERAL_BYTES.sub("", read))
        return self._waiting.popleft() if self._waiting else ""
