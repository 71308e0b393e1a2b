"""Decode's half of a session for tests: its core, and prefills and an engine that a test steers step by step."""

from __future__ import annotations

import numpy as np
import pytest

from kvgrpc.errors import Failure, Reason
from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.decode.core import DecodeCore, DecodeRoom, Stream
from kvgrpc.transfer.protocol.types import (
    DecodeEntry,
    Destination,
    Handle,
    KVPoll,
    PrefillEntry,
    RoomKey,
    RoomState,
    Target,
    Timing,
    Want,
    Writes,
)
from tests.support.core_work import Work

ME, KEY, TIMING = RankRef(RankId("D"), 1), RoomKey(5), Timing()
P0, P1 = Target(RankRef(RankId("P0"), 2), "host:1"), Target(RankRef(RankId("P1"), 3), "host:2")
CANCELLED = Failure(Reason.ROOM_CANCELLED, "enough")


class Side:
    """A decode core, and the shell around it by hand."""

    def __init__(self, **settings: object) -> None:
        self.connections: frozenset[str] | None = frozenset()
        self.aux: list[bytes | None] = []
        self.aux_failure: Failure | None = None
        self.core = DecodeCore(
            ME,
            connections=lambda pair: self.connections,
            deliver_aux=self._deliver_aux,
            **settings,  # type: ignore[arg-type]
        )
        self.take = Work(self.core).take

    def open(self, key: RoomKey = KEY, *targets: Target) -> DecodeRoom:
        room = DecodeRoom(key, Handle())
        if self.core.open(room):
            self.core.bind(room, targets or (P0,))
        return room

    def welcome(self) -> list[Stream]:
        streams = self.take("dials")
        for stream in streams:
            self.core.on_welcome(stream)
        return streams

    def writing(self, key: RoomKey = KEY, *targets: Target, pages: int = 2) -> tuple[DecodeRoom, Stream]:
        """A room whose prefill was told where to write."""
        room = self.open(key, *targets)
        (stream, *_) = self.welcome()
        self.core.write(room, Destination(np.arange(pages, dtype=np.uint32)))
        assert {entry.want for entry in self.said()} == {Want.WRITE}
        return room, stream

    def said(self) -> list[DecodeEntry]:
        return [entry for pair in self.take("tell") for entry in self.core.flush(pair)]

    def hear(self, stream: Stream, state: RoomState, writes: Writes, key: RoomKey = KEY, aux: bytes = b"") -> None:
        failure = Failure(Reason.TRANSFER_FAILED, "no") if state is RoomState.FAILED else None
        self.core.on_frame(stream, [PrefillEntry(key, state, writes, 0, aux, failure)])

    def ticks(self, count: int, hear: Stream | None = None) -> None:
        for _ in range(count):
            self.core.tick()
            if hear is not None:
                self.core.on_heard(hear)

    def _deliver_aux(self, room: DecodeRoom) -> Failure | None:
        self.aux.append(room.aux)
        return self.aux_failure


@pytest.fixture
def side() -> Side:
    return Side()


def reason(room: DecodeRoom) -> str:
    assert room.handle.poll is KVPoll.Failed and room.handle.failure is not None
    return room.handle.failure.reason.name
