"""How prefill is resolved and searched, on a loop of virtual time: which dp rank has a room, whatever others answer.

The decode core, PrefillResolver and RoomLocator are the product's; ranks, their sessions and the registry are fakes.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from functools import cache
from typing import Any

import grpc
import numpy as np
import pytest

from kvgrpc.errors import EngineNotFound, Failure, InvalidRequest, PeerUnreachable, Reason
from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.transfer.layout.topology import Shape
from kvgrpc.transfer.protocol.decode.core import DecodeCore, DecodeRoom, Stream
from kvgrpc.transfer.protocol.types import (
    Destination,
    KVPoll,
    PrefillEntry,
    RoomKey,
    RoomState,
    Target,
    Timing,
    Want,
    Writes,
)
from kvgrpc.transfer.runtime.boundary import RoomRequest
from kvgrpc.transfer.runtime.resolve import PrefillEngine, PrefillResolver, ReceiverRoom
from kvgrpc.v1 import transfer_service_pb2 as pb
from tests.simulation.requests import WatchedHandle
from tests.simulation.virtual_loop import run

ADDRESS = "registry:8998"
TIMING = Timing(room_deadline=600)
DEADLINE = 60.0
ROOMS = 20
# Ranks that do what a rank should not, and one that only takes its time.
MOODS = ("late", "silent", "wrong", "empty", "refuses", "garbage", "undialable", "broken", "restarts")
SEEDS = range(24)


class Rank:
    """A prefill rank: its senders, and how it answers LocateRooms."""

    def __init__(self, dp: int, epoch: int, mood: str, address: str) -> None:
        self.target = Target(RankRef(RankId("P", dp=dp), epoch), address)
        self.mood = mood
        self.senders: set[RoomKey] = set()
        self.told_stop: set[RoomKey] = set()
        self.news: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def claim(self, key: RoomKey) -> None:
        """Its sender is there."""
        self.senders.add(key)
        news, self.news = self.news, asyncio.get_running_loop().create_future()
        news.set_result(None)


class Channel:
    """What a stub of TransferService calls: LocateRooms of whoever listens at the address."""

    def __init__(self, fleet: Fleet, address: str) -> None:
        self._fleet = fleet
        self._address = address

    def unary_unary(self, path: str, **_: Any) -> Any:
        return self._locate if path.endswith("/LocateRooms") else None

    stream_stream = unary_stream = unary_unary

    async def _locate(self, request: pb.LocateRoomsRequest, timeout: float) -> pb.LocateRoomsResponse:
        return await self._fleet.locate(self._address, request, timeout)

    async def close(self) -> None:
        pass


class Fleet:
    """All that is random, from one seed. ``healthy``: ranks that answer as they should all along."""

    def __init__(self, seed: int) -> None:
        self.random = rnd = random.Random(seed)
        self.size = size = rnd.randint(2, 5)
        moods = ["good", *(rnd.choice((*MOODS, "good")) for _ in range(size - 1))]
        rnd.shuffle(moods)
        self.moods = moods
        self.ranks = [Rank(dp, 1, mood, f"10.0.0.{dp}:1") for dp, mood in enumerate(moods)]
        self.healthy = [rank for rank in self.ranks if rank.mood in ("good", "late")]
        self.registered = list(self.ranks)
        self.moody_registry = rnd.random() < 0.3
        # A lease runs out: from then on the registry says EngineNotFound.
        self.forgets = rnd.random() < 0.25
        self.core = DecodeCore(RankRef(RankId("D"), 1), timing=TIMING)
        self.ended: Counter[RoomKey] = Counter()
        self.ended_at: dict[RoomKey, float] = {}
        self.calls: Counter[str] = Counter()
        self.now_asked: Counter[str] = Counter()
        self.most_asked = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.violations: list[str] = []
        shape = Shape(RankId("D"), Layout(), (), (), "fake")
        self.routes = PrefillResolver(self.core, shape, self.resolve, self.open_channel, self.start, self.pump)

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def start(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.violations.append(f"{task.get_name()} raised {task.exception()!r}")

    # What PrefillResolver asks.

    async def resolve(self, bootstrap_addr: str, decode: RankId, at_once: bool = False) -> PrefillEngine:
        if self.moody_registry and self.random.random() < 0.3:
            await asyncio.sleep(self.random.choice([0.0, 2.0]))  # virtual time
            raise self.random.choice([PeerUnreachable("no answer"), RuntimeError("a bug of a resolver")])
        await asyncio.sleep(self.random.choice([0.0, 0.05, 0.3]))  # virtual time
        if len(self.registered) < self.size:
            await asyncio.sleep(5.0)  # as long as it waits for an engine to be READY
        if len(self.registered) < self.size:
            raise EngineNotFound("P is not READY")
        targets = {rank.target.ref.rank[1:]: rank.target for rank in self.registered}
        return PrefillEngine("P", Layout(dp=self.size), targets, engine_selects_dp=True)

    def open_channel(self, address: str) -> Any:
        rank = self._listening(address)
        if rank is not None and rank.mood == "undialable":
            raise InvalidRequest.of("address", address, "one that can be dialled")
        if rank is not None and rank.mood == "broken":
            raise OSError("no file descriptors")
        return Channel(self, address)

    async def locate(self, address: str, request: pb.LocateRoomsRequest, timeout: float) -> pb.LocateRoomsResponse:
        self.calls[address] += 1
        if self.calls[address] > ROOMS * (20 * self.now + 20):
            self.violations.append(f"{address} was asked {self.calls[address]} times in {self.now:.1f} s")
            await asyncio.Event().wait()
        self.now_asked[address] += 1
        self.most_asked = max(self.most_asked, self.now_asked[address])
        try:
            return await asyncio.wait_for(self._answer(address, request), timeout)
        except asyncio.TimeoutError:
            raise _rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED) from None
        finally:
            self.now_asked[address] -= 1

    async def _answer(self, address: str, request: pb.LocateRoomsRequest) -> pb.LocateRoomsResponse:
        rank, asked = self._listening(address), [RoomKey(key.room, key.attempt) for key in request.rooms]
        if rank is None or rank.mood == "refuses":
            raise _rpc_error(grpc.StatusCode.UNAVAILABLE)
        if rank.mood == "silent":
            await asyncio.Event().wait()
        if rank.mood == "late":
            await asyncio.sleep(self.random.uniform(1.0, 9.0))  # virtual time
        if rank.mood == "garbage":
            return pb.LocateRoomsResponse(rooms=[pb.RoomKey(room=0)])
        if rank.mood == "empty":
            return pb.LocateRoomsResponse()
        if rank.mood == "wrong":  # foreign rooms, and attempts that nobody made
            foreign = [RoomKey(key.room, key.attempt + 1) for key in asked] + [RoomKey(999_999)]
            return pb.LocateRoomsResponse(rooms=[pb.RoomKey(room=key.room, attempt=key.attempt) for key in foreign])
        waited_until = self.now + 8.0
        while not (found := rank.senders.intersection(asked)) and (left := waited_until - self.now) > 0:
            await asyncio.wait([rank.news], timeout=left)
        return pb.LocateRoomsResponse(rooms=[pb.RoomKey(room=key.room, attempt=key.attempt) for key in sorted(found)])

    def _listening(self, address: str) -> Rank | None:
        return next((rank for rank in self.ranks if rank.target.address == address), None)

    # Sessions.

    def pump(self) -> None:
        work = self.core.take_work()
        for room in work.resolves:
            assert isinstance(room, ReceiverRoom)
            self.routes.find_anew(room)
        for lost in work.lost_peers:
            self.routes.await_restart(lost)
        for stream in work.dials:
            asyncio.get_running_loop().call_later(self.random.uniform(0.0, 0.2), self._connect, stream)
        for pair in work.tell:
            rank = self._listening(pair.address)
            entries = self.core.flush(pair)
            if rank is None or rank.target.ref != pair.ref or pair.stream is None:
                continue
            for entry in entries:
                if entry.want is Want.STOP:
                    rank.told_stop.add(entry.key)
                    self._say(pair.stream, PrefillEntry(entry.key, RoomState.FAILED, Writes.SETTLED))
                elif entry.want is Want.WRITE and entry.key in rank.senders:
                    self._say(pair.stream, PrefillEntry(entry.key, RoomState.SUCCESS, Writes.SETTLED))
        for ended in work.ended:
            self.ended[ended.key] += 1
            self.ended_at.setdefault(ended.key, self.now)
        if work.resolves or work.lost_peers:
            self.pump()

    def _connect(self, stream: Stream) -> None:
        rank = self._listening(stream.pair.address)
        if rank is None:
            self.core.on_refused(stream)
        elif rank.target.ref != stream.pair.ref:
            self.core.on_goodbye(stream, Failure(Reason.STALE_EPOCH, "another incarnation", {}, str(rank.target.ref)))
        else:
            self.core.on_welcome(stream)
        self.pump()

    def _say(self, stream: Stream, entry: PrefillEntry) -> None:
        def said() -> None:
            self.core.on_frame(stream, [entry])
            self.pump()

        asyncio.get_running_loop().call_later(self.random.uniform(0.01, 0.2), said)

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(TIMING.tick_seconds)  # virtual time
            self.core.tick()
            for pair in self.core.pairs.values():  # heartbeats
                rank = self._listening(pair.address)
                if pair.up and pair.stream is not None and rank is not None and rank.target.ref == pair.ref:
                    self.core.on_heard(pair.stream)
            self.pump()

    # Faults.

    async def restart(self, rank: Rank) -> None:
        """Killed, and back as another incarnation, at its place or elsewhere; the registry hears of both late."""
        await asyncio.sleep(self.random.uniform(0.0, 30.0))  # virtual time
        self.ranks.remove(rank)
        await asyncio.sleep(self.random.uniform(0.0, 3.0))  # virtual time
        address = self.random.choice([rank.target.address, rank.target.address + "1"])
        again = Rank(rank.target.ref.rank.dp, 2, "good", address)
        self.ranks.append(again)
        await asyncio.sleep(self.random.uniform(0.0, 3.0))  # virtual time
        self.registered[self.registered.index(rank)] = again

    async def forget(self) -> None:
        await asyncio.sleep(self.random.uniform(5.0, 40.0))  # virtual time
        rank = self.random.choice([rank for rank in self.registered if rank not in self.healthy] or [None])
        if rank is not None:
            self.registered.remove(rank)


def _rpc_error(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "fake")


class Hunt:
    """One seed: rooms come over half a minute, each with a sender somewhere, sooner or later or never."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.opened: dict[RoomKey, tuple[ReceiverRoom, float]] = {}
        self.owed: set[RoomKey] = set()
        self.aborted: set[RoomKey] = set()

    async def run(self) -> Hunt:
        fleet = self.fleet = Fleet(self.seed)
        rnd = fleet.random
        ticking = asyncio.ensure_future(fleet.tick())
        for rank in list(fleet.ranks):
            if rank.mood == "restarts":
                fleet.start(fleet.restart(rank), "restart")
        if fleet.forgets:
            fleet.start(fleet.forget(), "forget")
        for number in range(1, ROOMS + 1):
            if rnd.random() < 0.3:
                await asyncio.sleep(rnd.uniform(0.0, 2.0))  # virtual time
            self._open(RoomKey(number, rnd.choice([0, 0, 1])))
        await asyncio.sleep(DEADLINE + 30.0)  # and the longest call of a search
        await fleet.routes.close()
        await asyncio.sleep(1.0)  # virtual time
        ticking.cancel()
        fleet.violations += [f"left over: {task.get_name()}" for task in fleet.tasks]
        return self

    def _open(self, key: RoomKey) -> None:
        fleet, rnd = self.fleet, self.fleet.random
        handle = WatchedHandle(complain=lambda text: fleet.violations.append(f"{key}: {text}"))
        room = ReceiverRoom.of(handle, RoomRequest(key, ADDRESS, None, ""))
        self.opened[key] = room, fleet.now
        assert fleet.core.open(room)
        fleet.core.write(room, Destination(np.arange(2, dtype=np.uint32)))
        fleet.routes.find(room)
        fleet.pump()
        rank = rnd.choice(fleet.ranks)
        late = rnd.choice([0.0, 0.0, 1.0, 15.0, 35.0])
        if rnd.random() < 0.1:
            return  # nobody ever sends it
        if rank in fleet.healthy and not (fleet.forgets or fleet.moody_registry):
            self.owed.add(key)
        asyncio.get_running_loop().call_later(late, rank.claim, key)
        if rnd.random() < 0.3:
            self.owed.discard(key)
            self.aborted.add(key)
            asyncio.get_running_loop().call_later(rnd.uniform(0.0, 10.0), self._abort, room)

    def _abort(self, room: DecodeRoom) -> None:
        self.fleet.core.fail(room, Failure(Reason.ROOM_CANCELLED, "cancelled", {}, "D"))
        self.fleet.pump()

    @property
    def violations(self) -> list[str]:
        fleet, found = self.fleet, list(self.fleet.violations)
        for key, (room, opened_at) in self.opened.items():
            if fleet.ended[key] != 1:
                found.append(f"{key} ended {fleet.ended[key]} times")
            elif fleet.ended_at[key] > opened_at + DEADLINE + 2 * TIMING.tick_seconds:
                found.append(f"{key} ended {fleet.ended_at[key] - opened_at:.1f} s after it began")
            if key in self.owed and room.handle.poll is not KVPoll.Success:
                found.append(f"{key}, which a healthy rank has, failed: {room.handle.failure}")
            unstopped = [rank for rank in fleet.healthy if key in rank.senders and key not in rank.told_stop]
            if key in self.aborted and room.handle.poll is KVPoll.Failed and unstopped and self._calm:
                found.append(f"{key} was aborted, and its prefill never heard of it")
        routes, search = fleet.routes, fleet.routes._locator
        if routes._questions or search._batches or search._asked:
            found.append(f"kept: {routes._questions} {search._batches} {search._asked}")
        if fleet.most_asked > ROOMS:
            found.append(f"{fleet.most_asked} calls to one rank at a time")
        return found

    @property
    def _calm(self) -> bool:
        return not (self.fleet.forgets or self.fleet.moody_registry)


@cache
def hunt_of(seed: int) -> Hunt:
    return run(Hunt(seed).run())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_room_is_found_wherever_it_is_and_ends_once_and_in_time(seed: int) -> None:
    hunt = hunt_of(seed)
    assert not hunt.violations, "\n".join(hunt.violations[:8])


def test_the_seeds_meet_every_mood_and_every_end() -> None:
    moods: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    for hunt in map(hunt_of, SEEDS):
        moods.update(hunt.fleet.moods)
        for room, _ in hunt.opened.values():
            ends["SUCCESS" if room.handle.failure is None else room.handle.failure.reason.name] += 1
    assert moods.keys() == {*MOODS, "good"}
    assert ends.keys() >= {"SUCCESS", "ROOM_CANCELLED", "ROOM_DEADLINE", "ENGINE_NOT_FOUND"}, ends
