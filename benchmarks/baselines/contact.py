"""The floor of a first contact: a question and a stream on new channels, a page by an engine that never met its peer.

Overlapped as ours is: the writer opens its peer when it hears of it, while greeting and order still travel.
"""

from __future__ import annotations

import json
import threading
import time

from benchmarks.baselines.raw import BareMooncake, Descriptors
from benchmarks.baselines.stream import DEADLINE, FRAME, StreamEnd

PAUSE = 100e-6


class BarePrefill:
    """Serves one contact: answers the question, greets, and writes the page that is ordered then."""

    def __init__(self, regions: int, page_bytes: int) -> None:
        self._engine = BareMooncake()
        self._memory = self._engine.allocate(regions * page_bytes)
        self._regions, self._page_bytes = regions, page_bytes
        self._hello = b""
        self._greeted, self._ordered = threading.Event(), threading.Event()
        self._end = StreamEnd(self._take)
        self.port = self._end.serve()
        threading.Thread(target=self._write, daemon=True).start()

    def close(self) -> None:
        self._end.close()

    def _take(self, frame: bytes) -> None:
        if self._greeted.is_set():
            self._ordered.set()
        else:
            self._hello = frame
            self._greeted.set()
            self._end.start(self._end.send(FRAME))

    def _write(self) -> None:
        if not self._greeted.wait(DEADLINE):
            return
        session, target = json.loads(self._hello)
        self._engine.write_at_once(session, ([self._memory], [target], [0]))
        if self._ordered.wait(DEADLINE):
            self._engine.write_at_once(session, self._page(target))
            self._end.write()

    def _page(self, target: int) -> Descriptors:
        offsets = range(0, self._regions * self._page_bytes, self._page_bytes)
        sources, destinations = [self._memory + at for at in offsets], [target + at for at in offsets]
        return sources, destinations, [self._page_bytes] * self._regions


class BareDecode:
    """Makes one contact."""

    def __init__(self, regions: int, page_bytes: int) -> None:
        self._engine = BareMooncake()
        self._memory = self._engine.allocate(regions * page_bytes)
        self._end = StreamEnd()

    def contact(self, port: int) -> tuple[float, float]:
        """Seconds from the question to the greeting, and to the word that the page is there."""
        begin = time.perf_counter()
        self._end.ask(port)
        self._end.connect(port)
        hello = json.dumps((self._engine.session, self._memory)).encode()
        self._end.on_loop(lambda: self._end.start(self._end.send(hello)))
        self._end.wait(1, PAUSE)
        greeted = time.perf_counter() - begin
        self._end.write()
        self._end.wait(2, PAUSE)
        return greeted, time.perf_counter() - begin

    def close(self) -> None:
        self._end.close()
