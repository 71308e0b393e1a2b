"""Log records of kvgrpc: one logger per module below "kvgrpc", quiet until a program configures it.

A library does not configure logging; ``configure`` is for our own programs (``kvgrpc serve``, ``kvgrpc demo``).
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import json
import logging
import os
import threading
import time
import unicodedata
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial

LONGEST_LINE = 400  # characters of foreign text in one record

_ABOUT = "kvgrpc_about"
FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s [%(threadName)s] %(message)s"


class JsonLines(logging.Formatter):
    """A record as one JSON object: ``time`` (UTC), ``level``, ``logger``, ``thread``, ``message``, ``exception``; and
    what the line is about, of a hand-off ``room``, ``attempt``, ``reason``, ``peers`` and ``trace_id``. Any program may
    use it.
    """

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        fields: dict[str, object] = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields | getattr(record, _ABOUT, {}), ensure_ascii=True, default=str)


def configure(level: str | int = "INFO", *, as_json: bool = False) -> None:
    """Sends records from ``level`` on to stderr, as text or as JSON lines. Call it once, from a program's main."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if as_json else logging.Formatter(FORMAT, "%Y-%m-%dT%H:%M:%S"))
    logging.basicConfig(level=level, handlers=[handler])
    drop_poller_noise()


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """Text of others as one printable line: control characters, line breaks and what turns text around are escaped."""
    cut = text if len(text) <= longest else text[: longest - 3] + "..."
    return cut if cut.isprintable() else "".join(_shown(character) for character in cut)


class RateLimited:
    """Records of a logger, at most ``lines`` of one key in ``seconds``; then how many were left out. Thread-safe.

    That count comes by itself: when the time is over, before the next line of the key, or when the process ends.
    Keys are few and our own: names of reasons, not what a peer says. Whom a line is about is no key, it is its
    ``subject``: each gets one line in that time, so that one who fails all the time leaves the others theirs, and many
    together get no more than ``lines``.
    """

    def __init__(self, logger: logging.Logger, lines: int = 5, seconds: float = 10.0) -> None:
        self._logger = logger
        self._lines = lines
        self._seconds = seconds
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}

    def warning(self, key: str, text: str | Callable[[], str], *, subject: str = "") -> None:
        self.say(logging.WARNING, key, text, subject=subject)

    def exception(self, key: str, text: str) -> None:
        """The error that is being handled, with its traceback."""
        self.say(logging.ERROR, key, text, exc_info=True)

    def say(
        self,
        level: int,
        key: str,
        text: str | Callable[[], str],
        *,
        exc_info: bool = False,
        about: Mapping[str, object] | None = None,
        subject: str = "",
    ) -> None:
        """``text``, or what makes it: thousands that are left out then cost nothing to word. ``about``: fields of
        JsonLines. ``subject``: whom it is about, as a peer may name itself; empty: nobody in particular."""
        now, ended = time.monotonic(), None
        with self._lock:
            window = self._windows.get(key)
            if window is not None and window.process is not _counts.process:
                window = None  # our parent's, who sums it up
            if window is None or now >= window.end:
                ended, window = window, _Window(now + self._seconds, level)
                self._windows[key] = window
            left_out = window.count(subject, self._lines)
        if ended is not None:
            self._sum_up(key, ended)
        if not left_out:
            extra = {_ABOUT: about} if about else None
            said = text if isinstance(text, str) else text()
            self._logger.log(level, "%s", said, exc_info=exc_info or None, extra=extra)
        elif left_out == 1:
            _counts.owe(window.end, partial(self._end, key, window))

    def _end(self, key: str, window: _Window) -> None:
        with self._lock:
            if self._windows.get(key) is not window:
                return  # the next line has summed it up
            del self._windows[key]
        self._sum_up(key, window)

    def _sum_up(self, key: str, window: _Window) -> None:
        if window.left_out:
            self._logger.log(window.level, "%d more like these of %s in %g s", window.left_out, key, self._seconds)


class _Window:
    __slots__ = ("end", "left_out", "level", "process", "said", "subjects")

    def __init__(self, end: float, level: int) -> None:
        self.end = end
        self.level = level
        self.said = self.left_out = 0
        # Those of the lines that were said.
        self.subjects: tuple[str, ...] = ()
        self.process = _counts.process

    def count(self, subject: str, lines: int) -> int:
        """Counts one more line, and returns how many are left out with it; 0: it is to be said."""
        if self.said == lines or subject in self.subjects:
            self.left_out += 1
            return self.left_out
        self.said += 1
        if subject:
            self.subjects = (*self.subjects, subject)
        return 0


class _Counts:
    """Counts that are owed for lines left out. One thread of the process says them; it is there while any is owed."""

    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """Nothing is owed: also not in a forked child, where it is its parent's, and so was the thread. ``process`` is
        another object in each process."""
        self.process = object()
        self._changed = threading.Condition()
        self._owed: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._thread: threading.Thread | None = None

    def owe(self, at: float, say: Callable[[], None]) -> None:
        """Calls ``say`` at that time (``time.monotonic``), or when the process ends."""
        with self._changed:
            heapq.heappush(self._owed, (at, next(self._number), say))
            self._changed.notify()
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._serve, name="kvgrpc-log", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return  # no thread can be made now: whoever owes next tries again
                self._thread = thread

    def say_all(self) -> None:
        with self._changed:
            owed, self._owed = self._owed, []
        for _, _, say in sorted(owed):
            say()

    def _serve(self) -> None:
        while (say := self._next()) is not None:
            say()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while self._owed:
                seconds = self._owed[0][0] - time.monotonic()
                if seconds <= 0:
                    return heapq.heappop(self._owed)[-1]
                self._changed.wait(seconds)
            self._thread = None
            return None


_counts = _Counts()
os.register_at_fork(after_in_child=_counts.start_over)
atexit.register(_counts.say_all)


def _shown(character: str) -> str:
    if character.isprintable() and unicodedata.category(character) not in ("Cf", "Cc"):
        return character
    return character.encode("unicode_escape").decode()


def drop_poller_noise() -> None:
    """Hides two records of grpc.aio that say nothing of ours. Repeating it changes nothing.

    A header that is not UTF-8 writes a traceback for each call, whoever sends it: that becomes one line in 10 s.
    Several loops of a process share one completion-queue poller; a loop that wakes after another one has read the
    queue's socket reports BlockingIOError from PollerCompletionQueue, and one that finds an answer for a loop that was
    closed meanwhile RuntimeError. Nothing is lost by either.
    """
    for name, noise in (("asyncio", _PollerNoise), ("grpc._cython.cygrpc", _InvalidEncoding)):
        noisy = logging.getLogger(name)
        if not any(isinstance(present, noise) for present in noisy.filters):
            noisy.addFilter(noise())


class _PollerNoise(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        is_noise = isinstance(error, BlockingIOError) or str(error) == "Event loop is closed"
        return not (is_noise and "PollerCompletionQueue" in record.getMessage())


class _InvalidEncoding(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._lines = RateLimited(logging.getLogger("kvgrpc.rpc"), lines=1)

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("Invalid encoding on"):
            return True
        self._lines.warning("headers that are not UTF-8", "a caller sent a header that is not UTF-8")
        return False
