"""What a router asks of both engines, and a handle that complains when a core lets it go back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvgrpc.transfer.protocol.types import Align, Handle, KVPoll, RoomKey

# What prefill numbers the pages of its second pool from, so that they are told from those of the first.
STATES = 1000


@dataclass(frozen=True)
class Request:
    """``prefills`` owe the room to ``decodes``; prefill sends ``extra`` pages more than the ``pages`` decode wants.

    ``prefix``: these are the first ones, which decode has already. ``states``: pages of a second pool that has numbers
    of its own, as decode gives and as prefill sends them; None: that side knows of one list of pages alone. ``parts``:
    all these are decode's pages, and so many of prefill's fill one of the first pool; the last one lacks ``left``.
    """

    key: RoomKey
    prefills: tuple[int, ...] = (0,)
    pages: int = 2
    extra: int = 0
    align: Align = Align.HEAD
    prefix: bool = False
    decodes: tuple[int, ...] = (0,)
    states: tuple[int | None, int | None] = (None, None)
    parts: int = 1
    left: int = 0

    @property
    def first_page(self) -> int:
        return self.extra if self.prefix else 0

    @property
    def total(self) -> int:
        """Pages that prefill sends, its own."""
        return max((self.pages + self.extra) * self.parts - self.left, 0)

    @property
    def aux(self) -> bytes:
        """What the first of the prefills sends with SUCCESS."""
        return f"first token of room {self.key.room}, attempt {self.key.attempt}".encode()

    def positions(self, index: int) -> range:
        """Which of prefill's pages belong into decode's page ``index``; those of the second pool come last."""
        if index >= self.pages:
            state = STATES + index - self.pages + self._more_states
            return range(state, state + 1)
        first = (index + (self.extra if self.prefix or self.align is Align.TAIL else 0)) * self.parts
        return range(first, min(first + self.parts, self.total))

    @property
    def fits(self) -> bool:
        """Both sides know of the same pools and pages, or prefill of more where decode gets the last."""
        return self.states[0] == self.states[1] or (self.align is Align.TAIL and self._more_states > 0)

    @property
    def _more_states(self) -> int:
        """Pages of the second pool that prefill sends and decode does not want."""
        wanted, sent = self.states
        return 0 if wanted is None or sent is None else sent - wanted


class WatchedHandle(Handle, eq=False, kw_only=True):
    """Exactly one terminal state, and nothing goes back."""

    complain: Callable[[str], None]

    @property
    def terminal(self) -> bool:
        return self.poll in (KVPoll.Failed, KVPoll.Success)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "poll":
            assert isinstance(value, KVPoll)
            if self.terminal:
                self.complain(f"a handle that said {self.poll.name} says {value.name}")
            elif value is KVPoll.Failed and self.failure is None:
                self.complain("a handle failed without a cause")
            elif value is not KVPoll.Failed and value < self.poll:
                self.complain(f"a handle went back from {self.poll.name} to {value.name}")
        if name == "release_safe" and value is False and self.release_safe:
            self.complain("pages that were given back are taken again")
        super().__setattr__(name, value)
