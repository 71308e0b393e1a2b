"""A handle that knows when its room came how far, and that ends once: by the loop, or by its engine's abort."""

from __future__ import annotations

import os
import threading
import time
from typing import TypeAlias

from kvgrpc.transfer.protocol.types import (
    POLL_FAILED,
    POLL_SUCCESS,
    POLL_TRANSFERRING,
    POLL_WAITING_FOR_INPUT,
    Handle,
    KVPoll,
)

# Held, for a microsecond, while the loop ends a room and while its engine aborts one: the first of them counts. Also
# while an aux row is written, because after its abort a row is the engine's again, and while somebody begins or ends to
# wait for news. One for all, because all of it is rare; a thread may take it once more in a signal handler.
handle_lock = threading.RLock()
# A child would wait for ever for a lock that another thread had: it refuses handles, and ends those that it inherited.
os.register_at_fork(before=handle_lock.acquire, after_in_parent=handle_lock.release, after_in_child=handle_lock.release)

# How long the stages of a successful room took, in seconds: until both sides were known, from then until there were
# pages to move, and from then until they had moved and the end was known here.
Stages: TypeAlias = "tuple[float, float, float]"


class TimedHandle(Handle, eq=False):
    """``ready_at``: when it said WaitingForInput; ``moving_at``: when it had pages to move: at decode the engine's, at
    prefill the first that were computed (s, monotonic; 0: not yet).
    """

    ready_at: float = 0.0
    moving_at: float = 0.0

    def turn(self, poll: KVPoll) -> None:
        if poll is POLL_WAITING_FOR_INPUT:
            self.ready_at = time.monotonic()
        elif poll is POLL_TRANSFERRING and not self.moving_at:
            self.moving_at = time.monotonic()
        if poll is POLL_SUCCESS or poll is POLL_FAILED:
            with handle_lock:
                if self.aborted is None or poll is POLL_FAILED:
                    self.poll = poll
        else:
            self.poll = poll
        if self.on_change is not None:
            self.say_change()

    def stages(self, now: float) -> Stages:
        began, ready, moving = self.began, self.ready_at, self.moving_at
        # Comparisons: max() costs ten times as much, and every room comes here.
        ready = ready if ready > began else began
        moving = moving if moving > ready else ready
        return ready - began, moving - ready, now - moving
