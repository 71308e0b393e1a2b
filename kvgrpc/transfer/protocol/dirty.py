"""Rooms that changed and are to be told: taken in pieces, so that one peer's thousands hold up nobody's ten. Pure."""

from __future__ import annotations

from itertools import islice

from kvgrpc.transfer.protocol.types import RoomKey

# Of one frame. More at once are no faster, and what lives for a frame's time is what the garbage collector looks at.
ROOMS_AT_ONCE = 1024


def take(dirty: dict[RoomKey, None], most: int = ROOMS_AT_ONCE) -> list[RoomKey]:
    """The oldest ``most`` of them, which are dirty no more."""
    if len(dirty) <= most:
        taken = list(dirty)
        dirty.clear()
    else:
        taken = list(islice(dirty, most))
        for key in taken:
            del dirty[key]
    return taken
