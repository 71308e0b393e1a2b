"""Prefill's half of a session for tests: its core, and decodes and a sender that a test steers step by step."""

from __future__ import annotations

import numpy as np
import pytest

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Failure, Reason
from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.prefill.core import Chunk, PrefillCore, PrefillRoom, Submission
from kvgrpc.transfer.protocol.types import (
    Align,
    DecodeEntry,
    Destination,
    Handle,
    KVPoll,
    PrefillEntry,
    RoomKey,
    Timing,
    Want,
)
from tests.support.core_work import Work

ME, KEY, TIMING = RankRef(RankId("P"), 1), RoomKey(5), Timing()
D0, D1 = RankRef(RankId("D0"), 2), RankRef(RankId("D1"), 3)
CANCELLED = Failure(Reason.ROOM_CANCELLED, "enough", {}, "D0")


class Side:
    """A prefill core, and the shell around it by hand."""

    def __init__(self, **settings: object) -> None:
        self.core = PrefillCore(ME, **settings)  # type: ignore[arg-type]
        self.take = Work(self.core).take
        self.streams: dict[RankRef, object] = {}
        self._number = 0

    def hello(self, ref: RankRef = D0) -> object:
        self._number += 1
        stream = self.streams[ref] = object()
        assert self.core.on_hello(stream, ref, ME, self._number) is None
        return stream

    def name(self, want: Want = Want.WRITE, key: RoomKey = KEY, pages: int = 3, ref: RankRef = D0) -> None:
        """Decode says a room; its pages are 10, 11, …"""
        if ref not in self.streams:
            self.hello(ref)
        destination = Destination(np.arange(10, 10 + pages, dtype=np.uint32)) if want is Want.WRITE else None
        failure = CANCELLED if want is Want.STOP else None
        self.core.on_frame(self.streams[ref], ref, [DecodeEntry(key, want, destination, 300_000, failure)])

    def claim(self, key: RoomKey = KEY, total: int | None = 3, align: Align = Align.HEAD) -> tuple[PrefillRoom, Handle]:
        handle = Handle()
        record = self.core.claim(key, handle)
        assert record is not None
        self.expect(record, total, align)
        return record, handle

    def expect(self, record: PrefillRoom, total: int | None, align: Align = Align.HEAD) -> None:
        """As a ``send`` does that comes after ``init``."""
        for each in record.siblings:
            if not each.ended:
                each.expect(total, align)

    def send(self, record: PrefillRoom, start: int, stop: int, last: bool = False, aux: bytes | None = None) -> None:
        """Position n of the room is page 100 + n."""
        self.core.send(record, Chunk(np.arange(100 + start, 100 + stop, dtype=np.uint32), start, last), aux)

    def writing(self, key: RoomKey = KEY) -> tuple[PrefillRoom, Handle, Submission]:
        self.name(key=key)
        record, handle = self.claim(key)
        self.send(record, 0, 3, last=True)
        (submission,) = self.take("submissions")
        return record, handle, submission

    def done(self) -> dict[int, int]:
        """Every write that was submitted ends well; decode's page -> our page."""
        moved: dict[int, int] = {}
        for submission in self.take("submissions"):
            moved.update(zip(submission.destination.tolist(), submission.source.tolist(), strict=True))
            self.core.on_outcome(submission, Outcome.DONE)
        return moved

    def said(self, ref: RankRef = D0) -> dict[RoomKey, PrefillEntry]:
        return {entry.key: entry for pair in self.take("tell") for entry in self.core.flush(pair) if pair.ref == ref}

    def ticks(self, count: int, heard: bool = True) -> None:
        for _ in range(count):
            self.core.tick()
            for ref, stream in self.streams.items():
                if heard:
                    self.core.on_heard(stream, ref)


@pytest.fixture
def side() -> Side:
    return Side()


def reason(handle: Handle) -> str:
    assert handle.poll is KVPoll.Failed and handle.failure is not None
    return handle.failure.reason.name
