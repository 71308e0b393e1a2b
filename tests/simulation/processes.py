"""Two kinds of simulated processes around the real cores: what an engine and its kernel would do."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Failure, Reason
from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol.decode.core import DecodeCore, DecodePair, DecodeRoom
from kvgrpc.transfer.protocol.page_check import PoolSize, ReadPages, WrittenPages
from kvgrpc.transfer.protocol.prefill.core import Chunk, PrefillCore, PrefillRoom
from kvgrpc.transfer.protocol.types import Bounds, Destination, KVPoll, RoomKey, Target, Timing
from tests.simulation.plane import Plane
from tests.simulation.requests import STATES, Request, WatchedHandle
from tests.support.core_work import Work

if TYPE_CHECKING:
    from tests.simulation.world import World

POOL_PAGES = 10
# Of the second pool; in a decode process they are numbered after those of the first.
STATE_PAGES = 4
ALL_PAGES = POOL_PAGES + STATE_PAGES
# Long times are scaled, so that schedules of a minute meet them; short ones are the product's own.
TIMING = Timing(room_deadline=300, unclaimed=300, ended_record=60)


class Process:
    """``state``: running, held (one of its threads holds the interpreter), stopped (SIGSTOP) or dead.

    ``disturbances``: faults that touched it. ``went_on_at``: when it was last stopped or held no more.
    """

    def __init__(self, world: World, number: int, ref: RankRef) -> None:
        self.world = world
        self.number = number
        self.ref = ref
        self.state = "running"
        self.stopped_forever = False
        self.disturbances = 0
        self.went_on_at = -1_000
        self._commands: deque[Callable[[], object]] = deque()

    def post(self, action: Callable[..., object], *arguments: object) -> None:
        """A thread asks the loop thread for something: in order, but frames and ticks may come before."""
        self._commands.append(partial(action, *arguments))
        if not self.world.threads_wait:
            self.run_commands()

    def run_commands(self, most: int | None = None) -> None:
        """A turn of the loop thread; ``most`` of what waits."""
        for _ in range(len(self._commands) if most is None else min(most, len(self._commands))):
            self._commands.popleft()()

    def take_turn(self, rnd: random.Random) -> None:
        """Some of what waits, or all of it, or nothing."""
        if self._commands and self.state == "running":
            self.run_commands(rnd.choice([0, 1, 2, None]))

    @property
    def busy(self) -> bool:
        return bool(self._commands)

    def handle(self, key: RoomKey) -> WatchedHandle:
        return WatchedHandle(complain=lambda text: self.world.violate(f"{self.ref.rank.engine[0]}: {text}", key))

    def cancelled(self) -> Failure:
        return Failure(Reason.ROOM_CANCELLED, f"{self.ref} cancelled", {}, str(self.ref))


@dataclass(eq=False)
class Receiving:
    """A receiver, as its scheduler knows it. ``pages`` are the engine's, from allocation to release. ``late``: the
    registry's answer is on its way, and the engine may give its pages before it comes.
    """

    request: Request
    room: DecodeRoom
    handle: WatchedHandle
    pages: list[int] | None = None
    told: bool = False
    late: bool = False

    @property
    def over(self) -> bool:
        """As its engine sees it: an abort counts at once."""
        return self.handle.terminal or self.handle.aborted is not None


class DecodeProcess(Process):
    """A decode rank: the real core, two pools whose pages are reused at once, and a scheduler that retries nothing."""

    def __init__(self, world: World, number: int, epoch: int, core: type[DecodeCore], bounds: Bounds) -> None:
        super().__init__(world, number, RankRef(world.fleet.decodes[number], epoch))
        self.core = core(
            self.ref,
            timing=TIMING,
            bounds=bounds,
            connections=self._connections,
            deliver_aux=self._deliver_aux,
            written=WrittenPages([PoolSize("kv", POOL_PAGES), PoolSize("state", STATE_PAGES)]),
        )
        self.take = Work(self.core).take
        self.free = list(range(POOL_PAGES))
        self.free_states = list(range(POOL_PAGES, ALL_PAGES))
        self.owner: list[RoomKey | None] = [None] * ALL_PAGES
        # Of each page: what which writer wrote into which part of it.
        self.memory: list[dict[tuple[int, int], tuple[RoomKey, int]]] = [{} for _ in range(ALL_PAGES)]
        self.receiving: dict[RoomKey, Receiving] = {}
        self.unbound: list[tuple[DecodeRoom, Request]] = []
        self.told_about: dict[DecodePair, frozenset[str]] = {}

    def begin(self, request: Request, late: bool = False) -> DecodeRoom | None:
        """The scheduler makes a receiver; pages follow once it says WaitingForInput. None: it has one of that key."""
        if request.key in self.receiving:
            return None
        handle = self.handle(request.key)
        room = DecodeRoom(request.key, handle)
        self.receiving[request.key] = Receiving(request, room, handle, late=late)
        self.post(self._open, room, request, late)
        return room

    def _open(self, room: DecodeRoom, request: Request, late: bool) -> None:
        if self.core.open(room) or room.refused:
            self.unbound.append((room, request)) if late else self._bind(room, request)

    def schedule(self, rnd: random.Random) -> None:
        """One round of the engine's loop: allocate, look, release."""
        self.unbound += [(room, self.receiving[room.key].request) for room in self.take("resolves")]
        for asked in list(self.unbound):
            if rnd.random() < 0.2:
                self.unbound.remove(asked)
                self._bind(*asked)
        for lost in self.take("lost_peers"):
            if rnd.random() < 0.5:  # else the registry answers too late
                self.core.predial(self.world.registry[self.world.fleet.prefills.index(lost.rank)])
        for key, receiving in list(self.receiving.items()):
            handle = receiving.handle
            if receiving.over:
                if not receiving.told:
                    receiving.told = True
                    self._ended(receiving)
                if handle.release_safe:
                    del self.receiving[key]
                    self._free(receiving.pages or [])
            elif (
                receiving.pages is None
                and (receiving.late or handle.poll is KVPoll.WaitingForInput)
                and rnd.random() < 0.4
            ):
                self._allocate(receiving)

    def abort(self, key: RoomKey) -> None:
        receiving = self.receiving.get(key)
        if receiving is not None and not receiving.over:
            receiving.handle.aborted = self.cancelled()
            self.post(self.core.fail, receiving.room, receiving.handle.aborted)

    def _bind(self, room: DecodeRoom, request: Request) -> None:
        """The registry answers, also for a room that ended meanwhile."""
        if room.key in self.receiving:
            self.receiving[room.key].late = False
        registry = self.world.registry
        self.core.bind(room, [registry[number] for number in self._sources(request)])

    def _sources(self, request: Request) -> tuple[int, ...]:
        return self.world.fleet.sources(self.number, request.prefills)

    def _allocate(self, receiving: Receiving) -> None:
        count, states = receiving.request.pages, receiving.request.states[0]
        if len(self.free) < count or len(self.free_states) < (states or 0):
            return
        pages = [self.free.pop() for _ in range(count)]  # last in, first out: reused at once
        others = [self.free_states.pop() for _ in range(states or 0)]
        receiving.pages = [*pages, *others]
        for page in receiving.pages:
            self.owner[page] = receiving.room.key
            self.memory[page] = {}
        second = Destination(np.array([page - POOL_PAGES for page in others], np.uint32))
        per_pool = None if states is None else (second,)
        destination = Destination(np.array(pages, np.uint32), receiving.request.first_page, per_pool)
        self.post(self.core.write, receiving.room, destination, 0)

    def _free(self, pages: list[int]) -> None:
        for page in pages:
            self.owner[page] = None
            (self.free if page < POOL_PAGES else self.free_states).append(page)

    def _ended(self, receiving: Receiving) -> None:
        """The engine sees the end of a handle, and reads the pages of a good one."""
        room, request = receiving.room, receiving.request
        self.world.ended(self, room.key, receiving.handle)
        failure = receiving.handle.failure
        if not self._is_honest(request):
            return
        if receiving.handle.poll is KVPoll.Success and receiving.handle.aborted is None:
            if not request.fits:
                self.world.violate("SUCCESS, and the second pool's pages of the two sides do not fit", room.key)
            if not self._holds(receiving, len(receiving.pages or [])):
                self.world.violate("SUCCESS with wrong bytes", room.key)
        elif request.fits and failure is not None and failure.reason is Reason.INVALID_REQUEST:
            self.world.violate("a room fails as if the pages of its two sides did not fit", room.key)

    def check_progress(self) -> None:
        """Pages of which a handle says that they are done are there, each with all its parts."""
        for key, receiving in self.receiving.items():
            if self._is_honest(receiving.request) and not self._holds(receiving, receiving.handle.pages_done):
                self.world.violate("a page is done that is not there", key)

    def _holds(self, receiving: Receiving, count: int) -> bool:
        """The first ``count`` pages hold what all that owe them wrote, and nothing else."""
        fleet, request = self.world.fleet, receiving.request
        writers = [number for number in self._sources(request) if not fleet.part(number, self.number).empty]
        for index, page in enumerate((receiving.pages or [])[:count]):
            positions = enumerate(request.positions(index))
            wanted = {(writer, part): (request.key, position) for part, position in positions for writer in writers}
            if self.memory[page] != wanted:
                return False
        return True

    def _deliver_aux(self, room: DecodeRoom) -> Failure | None:
        request = self.receiving[room.key].request
        if room.aux != request.aux and self._is_honest(request):
            self.world.violate(f"SUCCESS with wrong aux {room.aux!r}", room.key)
        return None

    def _is_honest(self, request: Request) -> bool:
        """A prefill may say SUCCESS and have written nothing: nobody else's room is touched by that."""
        return not self.world.suspects.intersection(self._sources(request))

    def _connections(self, pair: DecodePair) -> frozenset[str] | None:
        """As they were when it was asked last: a thread looks meanwhile."""
        told = self.told_about.get(pair)
        self.told_about[pair] = self.world.connections(self, pair.ref)
        return told


@dataclass(eq=False)
class Sending:
    """A sender, as its scheduler knows it. ``chunks``: positions that are not computed yet, and pages of the second
    pool that go with each."""

    request: Request
    handle: WatchedHandle
    chunks: list[tuple[range, range | None]]
    record: PrefillRoom | None = None


class PrefillProcess(Process):
    """A prefill rank: the real core, a scheduler that computes in chunks of any order, and a data plane with moods."""

    def __init__(
        self, world: World, number: int, epoch: int, address: str, core: type[PrefillCore], bounds: Bounds
    ) -> None:
        super().__init__(world, number, RankRef(world.fleet.prefills[number], epoch))
        self.address = address
        self.core = core(self.ref, timing=TIMING, bounds=bounds, read=ReadPages(PoolSize("kv", 2 * POOL_PAGES)))
        self.take = Work(self.core).take
        self.plane = Plane(world, self)
        self.draining = False
        self.lazy = False
        self.sending: dict[RoomKey, Sending] = {}

    @property
    def target(self) -> Target:
        return Target(self.ref, self.address)

    def begin(self, request: Request, rnd: random.Random) -> WatchedHandle:
        """The scheduler makes a sender; its chunks follow, in any order. Page n of this pool holds position n."""
        handle = self.handle(request.key)
        sending = Sending(request, handle, [])
        self.post(self._claim, sending)
        if handle.terminal:
            self.world.ended(self, request.key, handle)
            return handle
        few = 1 + request.key.room % request.parts  # also a chunk that begins inside one of decode's pages
        size = few if rnd.random() < 0.7 else max(1, request.total)
        chunks = [range(start, min(start + size, request.total)) for start in range(0, request.total, size)]
        if rnd.random() < 0.3:
            rnd.shuffle(chunks)
        if not chunks or rnd.random() < 0.1:
            chunks.append(range(request.total, request.total))  # an empty last one, for aux alone
        sending.chunks = list(zip(chunks, _shares(request.states[1], len(chunks), rnd), strict=True))
        self.sending[request.key] = sending
        return handle

    def schedule(self, rnd: random.Random) -> None:
        """One round of the engine's loop: look, compute, send. A ``lazy`` one computes nothing."""
        for key, sending in list(self.sending.items()):
            if sending.handle.terminal or sending.handle.aborted is not None:
                del self.sending[key]
                self.world.ended(self, key, sending.handle)
            elif sending.chunks and not self.lazy and rnd.random() < 0.3:
                self._send(sending)

    def abort(self, key: RoomKey) -> None:
        sending = self.sending.get(key)
        if sending is not None and not sending.handle.terminal:
            sending.handle.aborted = self.cancelled()
            self.post(self._fail, sending, sending.handle.aborted)

    def feed(self, rnd: random.Random) -> None:
        """The data plane starts and stops what the core asks for."""
        submissions = self.take("submissions")
        for submission in submissions:
            if submission.record.ended:  # while it waited for the transfer thread
                self.post(self.core.on_outcome, submission, Outcome.REJECTED)
        self.plane.start(submission for submission in submissions if not submission.record.ended)
        stops = self.take("stops")
        if stops:
            self.plane.stop(stops, rnd)

    def _send(self, sending: Sending) -> None:
        (positions, states), request = sending.chunks.pop(0), sending.request
        last = not sending.chunks
        others = None if states is None else (np.array(states, np.uint32) + np.uint32(STATES),)
        chunk = Chunk(np.array(positions, np.uint32), positions.start, last, others=others)
        gives_aux = last and self.world.fleet.gives_aux(self.number, request.prefills)
        aux = request.aux if gives_aux else None
        self.post(self._take_chunk, sending, chunk, aux)

    # On the loop thread.

    def _claim(self, sending: Sending) -> None:
        request = sending.request
        # Every other router says which decode it chose (10, ownership).
        decode = self.world.fleet.decodes[request.decodes[0]].engine if request.key.room % 2 else ""
        sending.record = self.core.claim(request.key, sending.handle, decode)

    def _take_chunk(self, sending: Sending, chunk: Chunk, aux: bytes | None) -> None:
        if sending.record is not None:
            expectation = sending.request.total, sending.request.align
            self.core.send(sending.record, chunk, aux, expectation)

    def _fail(self, sending: Sending, failure: Failure) -> None:
        if sending.record is not None:
            self.core.fail(sending.record, failure)


def _shares(states: int | None, chunks: int, rnd: random.Random) -> list[range | None]:
    """Pages of the second pool that come with each chunk: in order, any number of them at a time."""
    if states is None:
        return [None] * chunks
    ends = [*sorted(rnd.randint(0, states) for _ in range(chunks - 1)), states]
    return [range(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
