"""One sender whose pages several decode ranks are owed: its handle says what holds for all of them. Pure.

Each of those decode ranks has a record of its own at prefill, with chunks, writes and an end of its own; a record sees
a ``PlaceHandle`` where the others see the engine's handle.
"""

from __future__ import annotations

from kvgrpc.errors import Failure
from kvgrpc.transfer.protocol.types import Handle, KVPoll


class FanOut:
    """The engine's handle and one for each decode rank that names the room."""

    def __init__(self, handle: Handle, places: int) -> None:
        self.handle = handle
        self.places = [PlaceHandle(self) for _ in range(places)]
        self._behind = places  # those with the fewest pages done

    def update(self) -> None:
        """Brings the handle to the furthest state that all places reached; pages are free once nobody reads them."""
        handle = self.handle
        if not handle.release_safe and all(place.release_safe for place in self.places):
            handle.release()
        poll = min(place.poll for place in self.places)
        if handle.poll not in (KVPoll.Failed, KVPoll.Success) and poll > handle.poll:
            handle.turn(poll)

    def count_pages(self, before: int) -> None:
        """A place that had ``before`` pages done has more: the handle has the fewest of any. Looks at all places only
        when the last with the fewest moves on."""
        if before > self.handle.pages_done:
            return
        self._behind -= 1
        if not self._behind:
            done = [place.pages_done for place in self.places]
            self.handle.pages_done = min(done)
            self._behind = done.count(min(done))

    def fail(self, failure: Failure) -> None:
        """The first place that fails fails the room."""
        if self.handle.poll not in (KVPoll.Failed, KVPoll.Success):
            self.handle.fail(failure)


class PlaceHandle(Handle):
    """What one record knows as its handle."""

    __slots__ = ("_fan_out", "_pages_done", "_poll", "_prefix_pages", "_release_safe")

    def __init__(self, fan_out: FanOut) -> None:
        self._fan_out = fan_out
        self._poll, self._release_safe = KVPoll.Bootstrapping, False
        self._prefix_pages: int | None = None
        self.aborted = None
        self.failure = None
        self.began = fan_out.handle.began
        self._pages_done = 0
        self.on_change = None

    @property
    def sender(self) -> Handle:
        """The engine's."""
        return self._fan_out.handle

    @property
    def poll(self) -> KVPoll:
        return self._poll

    @poll.setter
    def poll(self, poll: KVPoll) -> None:
        self._poll = poll
        self._fan_out.update()

    @property
    def release_safe(self) -> bool:
        return self._release_safe

    @release_safe.setter
    def release_safe(self, safe: bool) -> None:
        self._release_safe = safe
        self._fan_out.update()

    @property
    def prefix_pages(self) -> int | None:
        return self._prefix_pages

    @prefix_pages.setter
    def prefix_pages(self, pages: int | None) -> None:
        self._prefix_pages = pages
        if all(place.prefix_pages is not None for place in self._fan_out.places):
            self._fan_out.handle.prefix_pages = pages

    @property
    def pages_done(self) -> int:
        return self._pages_done

    @pages_done.setter
    def pages_done(self, pages: int) -> None:
        before, self._pages_done = self._pages_done, pages
        if pages > before:
            self._fan_out.count_pages(before)

    def fail(self, failure: Failure) -> None:
        self.failure = failure
        self._poll = KVPoll.Failed
        self._fan_out.fail(failure)
