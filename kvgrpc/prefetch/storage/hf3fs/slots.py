"""The slots of the file: which page lies in which, and which the next one gets. Pure; not of any thread."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Slot:
    """One page's place. ``users``: calls that read or write its bytes: it is nobody else's until they have ended."""

    number: int
    key: str
    nbytes: int
    users: int = 0
    complete: bool = False
    dropped: bool = False


class Slots:
    """Thread-safe. Least recently used pages make room, never one that somebody reads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._changed = threading.Condition()
        self._free = dict.fromkeys(range(count - 1, -1, -1))
        self._pages: OrderedDict[str, Slot] = OrderedDict()
        self._complete = 0
        self.nbytes = 0
        """Of complete pages."""

    def __len__(self) -> int:
        """Complete pages."""
        return self._complete

    def found(self, number: int, key: str, nbytes: int) -> None:
        """A page that was there when the file was opened. One that is there twice counts once."""
        with self._changed:
            if key not in self._pages:
                del self._free[number]
                self._pages[key] = slot = Slot(number, key, nbytes)
                self._set(slot, True)

    def size(self, key: str) -> int | None:
        """Bytes of a complete page."""
        with self._changed:
            slot = self._pages.get(key)
            return slot.nbytes if slot is not None and slot.complete else None

    def keys(self) -> list[str]:
        """Of complete pages: one that is being written may come to nothing."""
        with self._changed:
            return [key for key, slot in self._pages.items() if slot.complete]

    def read(self, key: str) -> Slot | None:
        """The slot of a complete page, which stays until ``end``; counts as a use."""
        with self._changed:
            slot = self._pages.get(key)
            if slot is None or not slot.complete:
                return None
            self._pages.move_to_end(key)
            slot.users += 1
            return slot

    def claim(self, key: str, nbytes: int, deadline: float) -> tuple[Slot | None, list[str]]:
        """A slot to write a page into, ended by ``end``, and the keys that went for it; (None, []) when all slots are
        in use. One that is there already is given as ``complete``.

        Waits while somebody else writes the same page; raises TimeoutError when they do at ``deadline`` (of
        ``time.monotonic``), for they may hang.
        """
        with self._changed:
            while (slot := self._pages.get(key)) is not None and not slot.complete:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._changed.wait(left)
            if slot is not None:
                slot.users += 1
                return slot, []
            gone = []
            if not self._free and (idle := next(self._idle(), None)) is not None:
                gone.append(idle.key)
                self._drop(idle)
            if not self._free:
                return None, []
            slot = self._pages[key] = Slot(self._free.popitem()[0], key, nbytes, users=1)
            return slot, gone

    def end(self, slot: Slot, *, complete: bool) -> None:
        """A call has ended; ``complete`` False: there is no page any more."""
        with self._changed:
            slot.users -= 1
            if slot.dropped:
                self._free_if_unused(slot)
            elif complete:
                self._set(slot, True)
            else:
                self._drop(slot)
            self._changed.notify_all()

    def drop(self, key: str) -> Slot | None:
        """Forgets a complete page. Its slot, which is the caller's as well until ``end``, is free once nobody uses
        it."""
        with self._changed:
            slot = self._pages.get(key)
            if slot is None or not slot.complete:
                return None
            slot.users += 1
            self._drop(slot)
            return slot

    def _drop(self, slot: Slot) -> None:
        del self._pages[slot.key]
        self._set(slot, False)
        slot.dropped = True
        self._free_if_unused(slot)

    def _free_if_unused(self, slot: Slot) -> None:
        if not slot.users:
            self._free[slot.number] = None

    def _set(self, slot: Slot, complete: bool) -> None:
        change = int(complete) - int(slot.complete)
        slot.complete = complete
        self._complete += change
        self.nbytes += change * slot.nbytes

    def _idle(self) -> Iterator[Slot]:
        return (slot for slot in self._pages.values() if not slot.users)
