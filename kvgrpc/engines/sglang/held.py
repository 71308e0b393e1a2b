"""Receivers of failed requests whose pages SGLang holds at decode. Imports nothing of SGLang."""

from __future__ import annotations

from typing import Protocol


class Receiver(Protocol):
    """The part of a receiver that is asked here."""

    @property
    def release_safe(self) -> bool:
        """True if nobody writes to its pages any more; never goes back to False."""
        ...


class RoomsAwaitingRelease:
    """The rooms that somebody may still write for. SGLang asks by room, and two requests may have had the same one:
    then the pages of both are held until nobody writes for either. Used on the scheduler's thread alone.

    Bounded: safe receivers, which answer as if they were not there, are dropped whenever as many have come as were left
    the last time; of others there are at most ``Bounds.rooms``, as many as the rank has.
    """

    SWEPT_FROM = 1024

    def __init__(self) -> None:
        self._receivers: dict[int, list[Receiver]] = {}
        self._count = 0
        self._sweep_at = self.SWEPT_FROM

    def __len__(self) -> int:
        return self._count

    def add(self, room: int, receiver: Receiver) -> None:
        known = self._receivers.setdefault(room, [])
        if receiver in known:
            return
        known.append(receiver)
        self._count += 1
        if self._count >= self._sweep_at:
            for each in list(self._receivers):
                self.clear(each)
            self._sweep_at = max(self.SWEPT_FROM, 2 * self._count)

    def safe(self, room: int) -> bool:
        return all(receiver.release_safe for receiver in self._receivers.get(room, ()))

    def clear(self, room: int) -> None:
        """Forgets those of a room that are safe. SGLang clears after a time of its own too, safe or not."""
        known = self._receivers.pop(room, [])
        unsafe = [receiver for receiver in known if not receiver.release_safe]
        self._count -= len(known) - len(unsafe)
        if unsafe:
            self._receivers[room] = unsafe
