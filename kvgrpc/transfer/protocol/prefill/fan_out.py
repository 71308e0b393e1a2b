"""One sender whose pages several decode ranks are owed: its handle says what holds for all of them. Pure.

Each of those decode ranks has a record of its own at prefill, with chunks, writes and an end of its own; a record sees
a ``PlaceHandle`` where the others see the engine's handle.
"""

from __future__ import annotations

from kvgrpc.errors import Failure
from kvgrpc.transfer.protocol.types import POLL_FAILED, POLL_SUCCESS, Handle, KVPoll


class FanOut:
    """The engine's handle and one for each decode rank that names the room."""

    def __init__(self, handle: Handle, places: int) -> None:
        self.handle = handle
        self.places = [PlaceHandle(fan_out=self, began=handle.began) for _ in range(places)]
        self._behind = places  # those with the fewest pages done

    def update(self) -> None:
        """Brings the handle to the furthest state that all places reached; pages are free once nobody reads them."""
        handle = self.handle
        if not handle.release_safe and all(place.release_safe for place in self.places):
            handle.release()
        poll = min(place.poll for place in self.places)
        if handle.poll not in (POLL_FAILED, POLL_SUCCESS) and poll > handle.poll:
            handle.turn(poll)

    def count_pages(self, before: int) -> None:
        """A place that had ``before`` pages done has more: the handle has the fewest of any. Looks at all places only
        when the last with the fewest moves on."""
        if before > self.handle.pages_done:
            return
        self._behind -= 1
        if not self._behind:
            done = [place.pages_done for place in self.places]
            self.handle.note_done(min(done))
            self._behind = done.count(min(done))

    def fail(self, failure: Failure) -> None:
        """The first place that fails fails the room."""
        if self.handle.poll not in (POLL_FAILED, POLL_SUCCESS):
            self.handle.fail(failure)


class PlaceHandle(Handle, eq=False, kw_only=True):
    """The handle of one record."""

    fan_out: FanOut

    @property
    def sender(self) -> Handle:
        """The engine's."""
        return self.fan_out.handle

    def turn(self, poll: KVPoll) -> None:
        self.poll = poll
        self.fan_out.update()

    def release(self) -> None:
        self.release_safe = True
        self.fan_out.update()

    def note_prefix(self, pages: int) -> None:
        self.prefix_pages = pages
        if all(place.prefix_pages is not None for place in self.fan_out.places):
            self.sender.note_prefix(pages)

    def note_done(self, pages: int) -> None:
        before, self.pages_done = self.pages_done, pages
        if pages > before:
            self.fan_out.count_pages(before)

    def fail(self, failure: Failure) -> None:
        self.failure = failure
        self.poll = POLL_FAILED
        self.fan_out.fail(failure)
