"""Peers that are alive and say nothing: shown to people, and nobody's failure (rule 3, break and loss). Pure."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol.types import Timing


class SilentPair(NamedTuple):
    """A pair whose peer said nothing for ``seconds`` though its connection stands, or that is no longer ``silent``.
    ``rooms``: how many depend on it."""

    ref: RankRef
    silent: bool
    seconds: float
    rooms: int


class _Pair(Protocol):
    @property
    def ref(self) -> RankRef: ...

    silent: bool


def note_silence(pair: _Pair, since: int | None, rooms: int, now: int, timing: Timing) -> SilentPair | None:
    """Returns what is to be told of a pair in this tick. ``since``: when its peer was heard, or reached, last; None: no
    connection stands."""
    before, pair.silent = pair.silent, since is not None and now - since > timing.silent_after
    if since is None or pair.silent == before:
        return None
    return SilentPair(pair.ref, pair.silent, (now - since) * timing.tick_seconds, rooms)
