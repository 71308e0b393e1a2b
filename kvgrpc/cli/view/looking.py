"""When the fleet is looked at: as long as somebody watches, once for all who do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

# Who watched so long ago has left.
_INTEREST_SECONDS = 3.0
_END_SECONDS = 10.0

State = Mapping[str, Any]


class Looking:
    """Calls ``look`` every ``every`` seconds on a thread of its own while somebody asks for what it saw.

    A look that takes long is followed by a pause of a quarter of it: most of it is the wait for ranks that are
    dead. One that raises is a state with only ``error``: the page keeps what it has, and says so.
    """

    def __init__(self, look: Callable[[], State], every: float) -> None:
        self._look, self._every = look, every
        self._changed = threading.Condition()
        self._number, self._seen = 0, b""
        self._wanted_until = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvgrpc-view-looking", daemon=True)

    def __enter__(self) -> Looking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_END_SECONDS)

    @property
    def closed(self) -> bool:
        return self._closed

    def after(self, number: int, seconds: float) -> tuple[int, bytes] | None:
        """The newest state behind the one of ``number``, as JSON with its number; None if none comes in ``seconds``."""
        end = time.monotonic() + seconds
        with self._changed:
            if time.monotonic() >= self._wanted_until:
                number = self._number  # seen for somebody who has left: too old to be shown
            while not self._closed:
                now = time.monotonic()
                self._wanted_until = now + _INTEREST_SECONDS
                self._changed.notify_all()
                if self._number > number:
                    return self._number, self._seen
                if now >= end:
                    return None
                self._changed.wait(min(end - now, 1.0))
        return None

    def _run(self) -> None:
        while self._until_wanted():
            began = time.monotonic()
            try:
                seen = dict(self._look())
            except Exception as error:  # the registry is away, or a bug of ours: the page says which
                seen = {"error": f"{type(error).__name__}: {error}"[:500]}
            took = time.monotonic() - began
            seen |= {"at": time.time(), "took": round(took, 3)}
            with self._changed:
                self._number, self._seen = self._number + 1, json.dumps(seen, separators=(",", ":")).encode()
                self._changed.notify_all()
                self._pause(max(self._every - took, took / 4))

    def _until_wanted(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or time.monotonic() < self._wanted_until)
            return not self._closed

    def _pause(self, seconds: float) -> None:
        self._changed.wait_for(lambda: self._closed, seconds)
