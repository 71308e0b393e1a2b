"""The real cores with a rule switched off: the simulation must notice."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from kvgrpc.errors import Failure
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol.decode.core import DecodeCore, DecodePair, DecodePart, DecodeRoom, Stream
from kvgrpc.transfer.protocol.decode.held import HeldPages
from kvgrpc.transfer.protocol.prefill.core import PrefillCore, PrefillPair, PrefillRoom
from kvgrpc.transfer.protocol.types import DecodeEntry, Timing


def cores(off: Collection[int]) -> tuple[type[DecodeCore], type[PrefillCore]]:
    """The classes of a world in which these rules do not hold."""
    decode: type[DecodeCore] = DecodeCore
    prefill: type[PrefillCore] = PrefillCore
    if 2 in off:
        decode, prefill = _DecodeWithout2, _PrefillWithout2
    if 3 in off:
        decode = type("DecodeWithout3", (_Without3, decode), {})
        prefill = type("PrefillWithout3", (_Without3, prefill), {})
    if 4 in off:
        decode = type("DecodeWithout4", (_Without4, decode), {})
    if 8 in off:
        decode = type("DecodeWithout8", (_Without8, decode), {})
    if 13 in off:
        prefill = type("PrefillWithout13", (_Without13, prefill), {})
    return decode, prefill


class _DecodeWithout2(DecodeCore):
    """Applies frames of any stream."""

    def _current(self, stream: Stream) -> bool:
        return True


class _PrefillWithout2(PrefillCore):
    """Applies frames of any stream, and welcomes smaller ones."""

    def _refuses_smaller_streams(self) -> bool:
        return False

    def _current(self, pair: PrefillPair, stream: object) -> bool:
        return True


class _Without3:
    """A peer that says nothing for three seconds is lost, whatever its connection does."""

    def __init__(self, me: RankRef, *, timing: Timing, **settings: Any) -> None:
        super().__init__(me, timing=replace(timing, idle_timeout=timing.silent_after), **settings)  # type: ignore[call-arg]


class _Without4(DecodeCore):
    """A reset or silence proves a death."""

    def _break(self, pair: DecodePair) -> None:
        super()._break(pair)
        self._prove_dead(pair)

    def _lose(self, pair: DecodePair, how: str, cause: Failure | None = None) -> None:
        if pair.dead_at is None:
            self._held.died(pair, self.now)
        super()._lose(pair, how, cause)


class _ByTime(HeldPages):
    """Pages come back after four seconds, whatever the evidence."""

    def look(self, room: DecodeRoom, now: int) -> bool:
        over = super().look(room, now)
        if not over:
            self._looks.set(room, now + 1)
        return over

    def _evidence(self, room: DecodeRoom, part: DecodePart, now: int) -> bool:
        ended = self.__dict__.setdefault("_ended_at", {}).setdefault(room.key, now)
        return super()._evidence(room, part, now) or now - ended > 40


class _Without8(DecodeCore):
    held_pages_class = _ByTime


class _Without13(PrefillCore):
    """Takes decode's pages for as large as its own."""

    def _take_want(self, pair: PrefillPair, room: PrefillRoom, entry: DecodeEntry) -> None:
        pair.parts = 1
        super()._take_want(pair, room, entry)
