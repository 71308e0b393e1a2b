"""A handle that knows when its room came how far, and that ends once: by the loop, or by its engine's abort."""

from __future__ import annotations

import os
import threading
import time

from kvgrpc.errors import Failure
from kvgrpc.transfer.protocol.types import (
    POLL_FAILED,
    POLL_SUCCESS,
    POLL_TRANSFERRING,
    POLL_WAITING_FOR_INPUT,
    Handle,
    KVPoll,
)

# Held, for a microsecond, while somebody begins or ends to wait for news. One for all, because that is rare; a thread
# may take it once more in a signal handler, and the loop never waits for it: a handler may wait for the loop.
waiters_lock = threading.RLock()
# A child would wait for ever for a lock that another thread had: it refuses handles, and ends those that it inherited.
os.register_at_fork(
    before=waiters_lock.acquire, after_in_parent=waiters_lock.release, after_in_child=waiters_lock.release
)
# For how long an abort waits, at most, for a loop that is just ending the room, and how often it looks.
_DECIDED_WITHIN_SECONDS, _LOOK_SECONDS = 1.0, 20e-6


class TimedHandle(Handle, eq=False):
    """``ready_at``: when it said WaitingForInput; ``moving_at``: when it had pages to move: at decode the engine's, at
    prefill the first that were computed (s, monotonic; 0: not yet).

    The first end counts, without a lock: a signal may interrupt an abort anywhere, and its handler wait for the loop.
    Each side says what it is about to do before it looks at the other's word: ``aborting``, the engine's; ``ending``,
    the loop's. Where both see each other the abort wins, and its thread waits for the loop to say so.
    """

    aborting: Failure | None = None
    ending: bool = False
    ready_at: float = 0.0
    moving_at: float = 0.0

    def turn(self, poll: KVPoll) -> None:
        if poll is POLL_WAITING_FOR_INPUT:
            self.ready_at = time.monotonic()
        elif poll is POLL_TRANSFERRING and not self.moving_at:
            self.moving_at = time.monotonic()
        if poll is POLL_SUCCESS or poll is POLL_FAILED:
            if self.claim() or poll is POLL_FAILED:
                self.poll = poll
        else:
            self.poll = poll
        if self.on_change is not None:
            self.say_change()

    def claim(self) -> bool:
        """On the loop: whether no abort came. None comes in then before ``yield_claim``; after an end, never."""
        self.ending = True
        if self.aborting is None:
            return True
        self.aborted = self.aborting
        self.ending = False
        return False

    def yield_claim(self) -> None:
        """The loop has done what no abort may overtake, and the room is open yet."""
        self.ending = False

    def give_up(self, failure: Failure) -> bool:
        """On any thread: ends it with ``failure`` unless it has ended, or another thread is giving it up."""
        if self.aborting is not None:
            return False
        self.aborting = failure
        end = time.monotonic() + _DECIDED_WITHIN_SECONDS
        while self.ending and time.monotonic() < end:
            if self.poll is POLL_SUCCESS or self.poll is POLL_FAILED:
                return False
            time.sleep(_LOOK_SECONDS)
        if self.poll is POLL_SUCCESS or self.poll is POLL_FAILED:
            return False
        self.aborted = failure
        return True
