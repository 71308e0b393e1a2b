"""A world for followers: one publisher with its log, Watches that break, a PUB that loses, all drawn from one seed.

The server keeps the promises of event_service.proto in as few lines as they can be said in; it shares no code with the
real one. Time is steps; a batch is a number, and what it says is looked up.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from kvgrpc.errors import EventsCompacted, EventsSequenceInFuture, FeatureDisabled, PeerUnreachable, StaleLog
from kvgrpc.events.following.follower import FollowerCore
from kvgrpc.events.following.index import BlockIndex
from kvgrpc.events.following.messages import CloseWatch, FollowerState, Mode, OpenWatch, ResetLive
from kvgrpc.events.log.digest import CHECKPOINT_BATCHES, MASK, StateDigest, TierDigest, mix
from kvgrpc.events.model import AllBlocksCleared, BlockRemoved, BlockStored

MEDIA = ("GPU", "GPU", "GPU", "CPU", "DISK")
HASHES = 40
STEP_SECONDS = 0.02
HEARTBEAT_STEPS = 50
Place = tuple[str, int]


@dataclass(frozen=True)
class Faults:
    """How often, for each step, something goes wrong."""

    publish: float = 0.3
    compact: float = 0.01
    restart: float = 0.002
    hole: float = 0.01
    break_watches: float = 0.01
    away: float = 0.002
    lose: float = 0.1
    # Of what waits, this part arrives.
    arrive: float = 0.5


CALM = Faults(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9)


@dataclass
class Log:
    """One numbering: each entry is a payload or, for a hole, None; ``states`` are those before each sequence."""

    log_id: str
    entries: list[bytes | None] = field(default_factory=list)
    oldest: int = 0
    states: list[dict[Place, Counter[int]]] = field(default_factory=lambda: [{}])


class Server:
    """The publisher and its EventService."""

    def __init__(self, rng: random.Random, snapshots: bool) -> None:
        self.rng = rng
        self.snapshots = snapshots
        self.logs = 0
        self.said: dict[bytes, list[object]] = {}
        self.away_until = 0
        self.log = self.new_log()

    def new_log(self) -> Log:
        self.logs += 1
        self.log = Log(f"log{self.logs}")
        self.append([AllBlocksCleared()])
        return self.log

    def append(self, events: list[object]) -> bytes:
        payload = f"{self.log.log_id}/{len(self.log.entries)}".encode()
        self.said[payload] = events
        self.log.entries.append(payload)
        state = {place: Counter(copies) for place, copies in self.log.states[-1].items()}
        for event in events:
            apply(state, event)
        self.log.states.append(state)
        return payload

    def append_hole(self) -> None:
        self.log.entries.append(None)
        self.log.states.append(self.log.states[-1])
        self.append([AllBlocksCleared()])

    def events(self) -> list[object]:
        made: list[object] = []
        for _ in range(self.rng.randrange(1, 4)):
            hashes = [self.rng.randrange(HASHES) for _ in range(self.rng.randrange(1, 6))]
            medium = self.rng.choice(MEDIA)
            draw = self.rng.random()
            if draw < 0.6:
                made.append(BlockStored(list(hashes), None, [], 16, None, medium))
            elif draw < 0.98:
                made.append(BlockRemoved(list(hashes), medium))
            else:
                made.append(AllBlocksCleared())
        return made

    def digest(self, sequence: int) -> StateDigest:
        tiers = []
        for (medium, group), copies in sorted(self.log.states[sequence].items()):
            blocks, mixed = 0, 0
            for block, count in (+copies).items():
                blocks, mixed = blocks + 1, (mixed + count * mix(block)) & MASK
            if blocks:
                tiers.append(TierDigest(medium, group, blocks, mixed))
        return StateDigest(sequence, tuple(tiers))

    def decode(self, payload: bytes) -> Iterable[object]:
        if payload not in self.said:
            raise msgspec.DecodeError("no batch")
        return self.said[payload]

    def watch(self, order: OpenWatch) -> Iterator[Callable[[FollowerCore, float], None] | None]:
        """One message after the other, None where there is nothing to say; raises as the RPC does."""
        if order.mode is Mode.SNAPSHOT and not self.snapshots:
            raise FeatureDisabled("no snapshots here")
        if order.log_id and order.log_id != self.log.log_id:
            raise StaleLog("another log")
        log, first = self.log, self._first(order)
        upcoming, oldest = len(log.entries), first
        yield lambda core, now: core.begun(order.number, log.log_id, upcoming, oldest, now)
        if order.mode is Mode.SNAPSHOT:
            first = len(log.entries)
            yield from self._snapshot(order.number, first)
        idle = 0
        while order.mode is not Mode.REPLAY or first <= (order.last or 0):
            if log is not self.log:
                raise PeerUnreachable("the publisher was restarted")
            message = None if order.mode is Mode.HEARTBEAT else self._read(order, first)
            if message is not None:
                first, say = message
                idle = 0
                yield say
                if order.mode is not Mode.REPLAY and self.rng.random() < 0.1:
                    yield self._heartbeat(order.number)
                continue
            idle += 1
            yield self._heartbeat(order.number) if idle % HEARTBEAT_STEPS == 0 else None

    def _first(self, order: OpenWatch) -> int:
        if order.first is None:
            return self.log.oldest
        if order.first > len(self.log.entries):
            raise EventsSequenceInFuture("future")
        if order.first < self.log.oldest:
            raise EventsCompacted("compacted")
        return order.first

    def _read(self, order: OpenWatch, first: int) -> tuple[int, Callable[[FollowerCore, float], None]] | None:
        if first < self.log.oldest:
            raise EventsCompacted("overtaken")
        end = len(self.log.entries) if order.last is None else order.last + 1
        if first >= end:
            return None
        if self.log.entries[first] is None:
            return first + 1, lambda core, now: core.dropped(order.number, first, first, now)
        payloads: list[bytes] = []
        for entry in self.log.entries[first : min(end, first + self.rng.randrange(1, 8))]:
            if entry is None:
                break
            payloads.append(entry)
        return first + len(payloads), lambda core, now: core.batches(order.number, first, payloads, now)

    def _snapshot(self, number: int, cut: int) -> Iterator[Callable[[FollowerCore, float], None]]:
        state = self.digest(cut)
        stored = [
            BlockStored([block] * copies, None, [], 16, None, medium)
            for (medium, _), counted in self.log.states[cut].items()
            for block, copies in (+counted).items()
        ]
        size = self.rng.randrange(1, 20)
        parts = [stored[start : start + size] for start in range(0, len(stored), size)] or [[]]
        for index, part in enumerate(parts):
            payload = f"snapshot{cut}/{index}/{self.rng.random()}".encode()
            self.said[payload] = list(part)
            yield lambda core, now, index=index, payload=payload: core.snapshot(number, index, cut, [payload], now)  # type: ignore[misc]
        yield lambda core, now: core.snapshot_complete(number, state, now)

    def _heartbeat(self, number: int) -> Callable[[FollowerCore, float], None]:
        upcoming = len(self.log.entries)
        checkpoint = upcoming // CHECKPOINT_BATCHES * CHECKPOINT_BATCHES
        behind = self.rng.choice((upcoming, upcoming, max(0, upcoming - 1), max(0, upcoming - 3), checkpoint))
        state = self.digest(behind) if self.snapshots else None
        return lambda core, now: core.heartbeat(number, upcoming, state, now)


class World:
    """One follower beside one server."""

    def __init__(self, seed: int, faults: Faults, *, live: bool, snapshots: bool) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.server = Server(self.rng, snapshots)
        self.index = BlockIndex()
        self.core = FollowerCore(self.index, self.server.decode, live=live, jitter=self.rng.random)
        self.watches: dict[int, Iterator[Callable[[FollowerCore, float], None] | None]] = {}
        # What was said and has not arrived; a Watch that breaks loses it.
        self.on_the_way: dict[int, deque[Callable[[FollowerCore, float], None]]] = {}
        self.pub: deque[tuple[int, bytes]] = deque()
        self.logs = {self.server.log.log_id: self.server.log}
        self.steps = 0
        self.compared: object = None
        self.core.start()
        self.obey()

    @property
    def now(self) -> float:
        return self.steps * STEP_SECONDS

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def settle(self, steps: int) -> bool:
        """No faults any more: whether the follower comes to the state of the cache."""
        self.faults = CALM
        for _ in range(steps):
            self.step()
            if self.core.state is FollowerState.CURRENT and self.core.next_sequence == len(self.server.log.entries):
                return True
        return False

    def step(self) -> None:
        self.steps += 1
        faults, rng, server = self.faults, self.rng, self.server
        if rng.random() < faults.publish:
            self.published(server.append(server.events()))
        if rng.random() < faults.hole:
            server.append_hole()
        if rng.random() < faults.compact:
            server.log.oldest = rng.randrange(server.log.oldest, len(server.log.entries) + 1)
        if rng.random() < faults.restart:
            log = server.new_log()
            self.logs[log.log_id] = log
        if rng.random() < faults.away:
            server.away_until = self.steps + rng.randrange(10, 400)
        if rng.random() < faults.break_watches or server.away_until > self.steps:
            self.break_all()
        self.pump()
        self.hear()
        if self.core.wake_at is not None and self.now >= self.core.wake_at:
            self.core.tick(self.now)
        self.obey()

    def published(self, payload: bytes) -> None:
        if self.rng.random() >= self.faults.lose:
            self.pub.append((len(self.server.log.entries) - 1, payload))

    def pump(self) -> None:
        for number, watch in list(self.watches.items()):
            try:
                message = next(watch)
                if message is not None:
                    self.on_the_way[number].append(message)
            except StopIteration:
                self.on_the_way[number].append(lambda core, now, number=number: core.ended(number, None, now))  # type: ignore[misc]
                del self.watches[number]
            except Exception as error:
                self.on_the_way[number].append(
                    lambda core, now, number=number, error=error: core.ended(number, error, now)  # type: ignore[misc]
                )
                del self.watches[number]

    def hear(self) -> None:
        for number in list(self.on_the_way):
            queue = self.on_the_way.get(number)
            while queue and self.rng.random() < self.faults.arrive:
                queue.popleft()(self.core, self.now)
                self.obey()
        while self.pub and self.rng.random() < self.faults.arrive:
            self.core.live(*self.pub.popleft(), self.now)
            self.obey()

    def break_all(self) -> None:
        for number in list(self.watches):
            del self.watches[number]
            self.on_the_way[number].clear()
            self.core.ended(number, PeerUnreachable("broken"), self.now)
        self.obey()

    def obey(self) -> None:
        for command in self.core.take_commands():
            if isinstance(command, CloseWatch):
                self.watches.pop(command.number, None)
                self.on_the_way.pop(command.number, None)
            elif isinstance(command, ResetLive):
                self.pub.clear()
            else:
                self.watches[command.number] = self.server.watch(command)
                self.on_the_way[command.number] = deque()
        assert len(self.watches) <= 2, "one Watch, and one that fills a gap: a publisher bounds how many it serves"

    def is_exact(self) -> bool:
        """Whether what is shown is the state that the cache had before the follower's next sequence."""
        contents = self.core.contents
        if contents is None:
            return True
        here = (self.core.log_id, contents.next_sequence, contents.whole)
        if here == self.compared:
            return True
        self.compared = here
        state = self.logs[self.core.log_id].states[contents.next_sequence]
        for block in range(HASHES):
            truly = {medium for (medium, _), copies in state.items() if copies[block] > 0}
            shown = contents.blocks.media_of(block)
            if shown - truly or (contents.whole and truly - shown):
                return False
        return True


def apply(state: dict[Place, Counter[int]], event: object) -> None:
    if isinstance(event, BlockStored):
        state.setdefault((event.medium or "GPU", 0), Counter()).update(map(int, event.block_hashes))
    elif isinstance(event, BlockRemoved):
        copies = state.setdefault((event.medium or "GPU", 0), Counter())
        for block in event.block_hashes:
            copies[int(block)] = max(0, copies[int(block)] - 1)
    else:
        state.clear()
