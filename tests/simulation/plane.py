"""A data plane with moods: page writes that arrive, are refused, fail, hang, or arrive after they were given up."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgrpc.dataplane.base import Outcome
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol.prefill.core import PrefillRoom, Submission
from kvgrpc.transfer.protocol.types import RoomKey
from tests.simulation.hostile import LyingCore

if TYPE_CHECKING:
    from tests.simulation.processes import DecodeProcess, PrefillProcess
    from tests.simulation.world import World

MOODS_SHARE = 0.03


@dataclass(eq=False)
class Write:
    """One page on its way: ``position`` of the room goes to ``part`` of ``page`` of the decode process that was meant.
    ``key``: as that one knows it."""

    key: RoomKey
    target: DecodeProcess
    page: int
    part: int
    position: int
    submission: Submission


@dataclass(eq=False)
class Residue:
    """Bytes of a writer that writes no more: in our socket buffers until ``due``, or held back by a ``cut``."""

    connection: str
    write: Write
    writer: PrefillProcess
    sent_at: int
    cut: bool
    due: int

    @property
    def source(self) -> RankRef:
        return self.writer.ref


class Plane:
    """Of one prefill process. ``in_flight`` ends with an outcome; ``late`` was reported UNKNOWN and may still land.

    A ``frozen`` one moves nothing.
    """

    def __init__(self, world: World, process: PrefillProcess) -> None:
        self.in_flight: list[Write] = []
        self.late: list[Write] = []
        self.unknown: set[tuple[RoomKey, RankRef]] = set()
        self.frozen = False
        self._world = world
        self._process = process
        self._left: dict[Submission, int] = {}

    @property
    def idle(self) -> bool:
        return not self.in_flight and not self.late

    def start(self, submissions: Iterable[Submission]) -> None:
        from tests.simulation.processes import DecodeProcess

        if isinstance(self._process.core, LyingCore):
            return  # what it says of its writes is not so: it writes nothing
        for submission in submissions:
            target = submission.pair.peer
            assert isinstance(target, DecodeProcess)
            if submission.pair.lost:
                self._world.violate("a write starts for a pair that was given up", submission.record.key)
            if self._world.fleet.part(self._process.number, target.number).empty:
                self._process.post(self._process.core.on_outcome, submission, Outcome.DONE, "another rank writes it")
                continue
            key = submission.record.key.at(0)
            pages = list(_pages_of(submission, self._world.parts))
            self._left[submission] = len(pages)
            for page, part, position in pages:  # the page of prefill's pool says which position it holds
                self.in_flight.append(Write(key, target, page, part, position, submission))

    def stop(self, records: Collection[PrefillRoom], rnd: random.Random) -> None:
        """Of what runs, some can be stopped."""
        if self.frozen:
            return
        for write in [write for write in self.in_flight if write.submission.record in records]:
            if write in self.in_flight and rnd.random() < 0.5:
                self.end(write, Outcome.FAILED_SRC_FREE)

    def move(self, rnd: random.Random, calm: bool) -> None:
        """One step of the hardware, also while the process is stopped."""
        if self.frozen:
            return
        if self.late and rnd.random() < 0.03:
            self._world.land(self._process, self.late.pop(rnd.randrange(len(self.late))))
        if not self.in_flight or rnd.random() < 0.5:
            return
        write = rnd.choice(self.in_flight)
        reachable = write.target.state == "running" and not self._world.network.is_cut(write.target, self._process)
        if self._process.state == "stopped":
            if reachable and rnd.random() < 0.3:
                self._world.land(self._process, write)  # bytes move, nobody reports
            return
        mood = rnd.random() / (0.000_001 if calm else MOODS_SHARE)
        if mood < 1:
            self.end(write, Outcome.REJECTED)
        elif mood < 2:
            self.end(write, Outcome.FAILED_SRC_FREE)
        elif mood < 3 or write.target.state == "dead":
            self.end(write, Outcome.FAILED_UNKNOWN)
        elif reachable:
            self.end(write, Outcome.DONE)

    def end(self, write: Write, outcome: Outcome) -> None:
        """One page ended; a failure ends its whole submission."""
        submission = write.submission
        if outcome is Outcome.DONE:
            self._world.land(self._process, write)
            self.in_flight.remove(write)
            self._left[submission] -= 1
            if self._left[submission]:
                return
        else:
            unfinished = [other for other in self.in_flight if other.submission is submission]
            self.in_flight = [other for other in self.in_flight if other.submission is not submission]
            if outcome is Outcome.FAILED_SRC_FREE:
                self._leave(unfinished)
            elif outcome is Outcome.FAILED_UNKNOWN:
                self.late += [other for other in unfinished if other.target.state != "dead"]
                self.unknown.add((write.key, write.target.ref))
        del self._left[submission]
        self._process.post(self._process.core.on_outcome, submission, outcome, "simulated")

    def end_all(self, outcome: Outcome) -> None:
        while self.in_flight:
            self.end(self.in_flight[0], outcome)

    def destroy(self) -> None:
        """The engine is destroyed and made again: no write of the old one starts any more, what left may still land."""
        self._leave(self.late)
        self.late = []
        self.end_all(Outcome.FAILED_SRC_FREE)
        self.unknown.clear()
        self._process.post(self._process.core.on_engine_destroyed)

    def die(self) -> None:
        """The process was killed: its kernel may still deliver."""
        self._leave([*self.in_flight, *self.late], killed=True)
        self.in_flight, self.late = [], []

    def _leave(self, writes: Iterable[Write], killed: bool = False) -> None:
        for write in writes:
            self._world.leave(write, self._process, killed)


def _pages_of(submission: Submission, parts: int) -> Iterator[tuple[int, int, int]]:
    """Pages of decode, numbered through all its pools, which of the ``parts`` of the first pool's, what goes there."""
    from tests.simulation.processes import POOL_PAGES

    sets = [(submission.source, submission.destination), *(submission.others or ())]
    for pool, (source, destination) in enumerate(sets):
        for place, position in zip(destination.tolist(), source.tolist(), strict=True):
            page, part = (place, 0) if pool else divmod(place, parts)
            yield page + pool * POOL_PAGES, part, position
