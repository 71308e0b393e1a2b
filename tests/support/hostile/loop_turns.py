"""How long the turns of an event loop are, in CPU time of its thread: what others do on this machine is not in it."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

from kvgrpc.rpc.loop import LoopThread


class Turns:
    """``longest``: seconds of the longest turn so far."""

    longest = 0.0


@contextlib.contextmanager
def turns_of_the_loop() -> Iterator[Turns]:
    """Of the one loop that all ranks of this process share."""
    loop: Any = LoopThread.shared().loop
    turns, run_once = Turns(), loop._run_once

    def measured() -> None:
        began = time.thread_time()
        run_once()
        turns.longest = max(turns.longest, time.thread_time() - began)

    # As servers do at their start: what all tests of this process hold would take 70 ms in a full collection.
    gc.collect()
    gc.freeze()
    loop._run_once = measured
    try:
        yield turns
    finally:
        loop._run_once = run_once
        gc.unfreeze()
