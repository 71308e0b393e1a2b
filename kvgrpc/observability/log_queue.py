"""Between whoever logs and whoever writes: no thread of kvgrpc waits for a pipe that nobody reads, nor for a lock of
the program's handlers, which a thread that a signal interrupted may hold.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
from logging.handlers import QueueHandler

LIMIT = 10_000
_LAST_SECONDS = 1.0

_kvgrpc = logging.getLogger("kvgrpc")


class LogQueue(QueueHandler):
    """The one handler of the logger ``kvgrpc`` while it is started: a thread hands the records on to the handlers of
    the loggers above, in order. What finds ``LIMIT`` records waiting is dropped and counted, and a line says how many.

    A handler that a program adds to ``kvgrpc`` itself, or below, is called by whoever logs, as ever.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        # Its put may interrupt its own put.
        self._records: queue.SimpleQueue[logging.LogRecord | threading.Event] = queue.SimpleQueue()
        super().__init__(self._records)
        self.dropped = 0
        self._limit = limit
        self._told = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """From now on; repeats are harmless, and put it back where a program has configured the logger anew."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="kvgrpc-log-queue", daemon=True)
            self._thread.start()
            atexit.register(self.stop)
        if self not in _kvgrpc.handlers:
            _kvgrpc.addHandler(self)
        _kvgrpc.propagate = False

    def stop(self, seconds: float = _LAST_SECONDS) -> bool:
        """Waits for what was logged, and lets records go their own way again; not where still nobody reads."""
        if self._thread is None or not self._thread.is_alive():
            self.give_way()  # a forked child has nobody to wait for
            return True
        written = threading.Event()
        self._records.put(written)
        if not written.wait(seconds):
            return False
        self.give_way()
        return True

    def give_way(self) -> None:
        """Records go their own way; also in a forked child, where no thread of ours lives."""
        _kvgrpc.removeHandler(self)
        _kvgrpc.propagate = True

    def handle(self, record: logging.LogRecord) -> bool:
        """Without the lock of handlers: a signal may interrupt whoever has it."""
        if self._records.qsize() >= self._limit:
            self.dropped += 1
            return True
        try:
            record.msg, record.args = record.getMessage(), None  # what it names may change until it is written
        except Exception:
            self.handleError(record)  # as every handler: whoever logs hears nothing of it
            return True
        self._records.put(record)
        return True

    def _serve(self) -> None:
        while True:
            record = self._records.get()
            if isinstance(record, threading.Event):
                record.set()
                continue
            with contextlib.suppress(Exception):  # the program's own handler; logging itself says so where it can
                self._hand_on(record)
                self._tell_dropped()

    def _hand_on(self, record: logging.LogRecord) -> None:
        if _kvgrpc.parent is not None:
            _kvgrpc.parent.callHandlers(record)

    def _tell_dropped(self) -> None:
        new = self.dropped - self._told
        if new:
            self._told += new
            text = f"{new} lines were dropped: {self._limit} waited for a log that was not written"
            place = __name__, logging.WARNING, __file__, 0, text, None, None
            self._hand_on(logging.LogRecord(*place))


log_queue = LogQueue()
os.register_at_fork(after_in_child=log_queue.give_way)
