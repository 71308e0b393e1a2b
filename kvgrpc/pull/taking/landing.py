"""The memory in which pages of a pull land, and the side of sessions that receives them there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvgrpc.prefetch.storage.base import PageBuffers
from kvgrpc.pull.staging import StagingPages
from kvgrpc.transfer.runtime.boundary import DecodeRuntime


class LandingMemory(Protocol):
    """In ``slots``: each takes what one page of ours is made of. ``page_bytes``: of one page of the holder's."""

    @property
    def slots(self) -> StagingPages: ...

    @property
    def page_bytes(self) -> int: ...

    def pages(self, slots: Sequence[int], share: int) -> list[int]:
        """The landing pages for the holder's rank number ``share``, one for each slot."""

    def copy_out(self, slots: Sequence[int], buffers: Iterable[PageBuffers]) -> bool:
        """Whole pages into those of the cache; False, and nothing is written, once it is closed."""


@dataclass(frozen=True, slots=True)
class Landing:
    """Of all holders whose pages are divided in one way: one size of page has one side of sessions."""

    manager: DecodeRuntime
    memory: LandingMemory


__all__ = ["Landing", "LandingMemory"]
