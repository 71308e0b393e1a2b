"""LocateRooms at a prefill rank, on a loop of virtual time: calls wait while senders come and fail, until a drain."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvgrpc.dataplane.shm.plane import ShmDataPlane
from kvgrpc.errors import Failure, Reason, ServerDraining, TooManyRequests
from kvgrpc.model import Layout, Pool, PoolKind, RankId, RankRef, Region
from kvgrpc.rpc.waiters import Waiters
from kvgrpc.transfer.protocol.types import RoomKey
from kvgrpc.transfer.runtime.boundary import EngineHandle
from kvgrpc.transfer.runtime.manager import TransferConfig
from kvgrpc.transfer.runtime.prefill_manager import PrefillManager
from tests.simulation.virtual_loop import run

ROOMS, CALLS, WAITERS = 12, 60, 8
FOR = 60.0
TICK = 0.2


class Locating:
    """One seed: who asks for rooms, and the engine that has their senders now and then."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.violations: list[str] = []
        self.ends: list[str] = []

    async def run(self) -> Locating:
        loop, rnd = asyncio.get_running_loop(), self.random
        threads: Any = SimpleNamespace(loop=loop, task=lambda work, name: loop.create_task(work), work_waits=False)
        plane = ShmDataPlane()
        pool = Pool("kv", PoolKind.KV, 16, 4, "x", (Region(0, "kv", plane.allocate(64), 16, 16),))
        config = TransferConfig(RankRef(RankId("P"), 1), Layout(), (pool,))
        self.manager = manager = PrefillManager(config, plane, threads)
        manager._sought = Waiters[RoomKey](WAITERS, "rooms sought", draining="drains")
        manager.start()
        calls = [asyncio.ensure_future(self._call()) for _ in range(CALLS)]
        senders: dict[RoomKey, EngineHandle] = {}
        attempts: dict[int, int] = {}
        while loop.time() < FOR:
            await asyncio.sleep(rnd.choice([0.0, 0.1, 0.5, 2.0]))  # virtual time
            room = rnd.randrange(1, ROOMS + 1)
            key = RoomKey(room, attempts.get(room, 0))
            if key in senders:
                manager.fail(senders.pop(key), Failure(Reason.ROOM_CANCELLED, "the client is gone"))
                attempts[room] = key.attempt + 1
            elif rnd.random() < 0.5:
                senders[key] = EngineHandle()
                manager.claim(key, senders[key], "")
            await asyncio.sleep(TICK)  # virtual time
            self._look()
        drained = await manager.drain(0.1)
        await asyncio.wait(calls, timeout=1.0)
        if (
            not all(call.done() for call in calls)
            or manager._sought.count
            or manager._sought._waiting
            or not drained[0]
        ):
            self.violations.append("somebody waits at a rank that drained")
        await manager.stop()
        assert manager.close_worker(5.0) and manager.errors == 0
        plane.close(1.0)
        return self

    def _look(self) -> None:
        sought, rooms = self.manager._sought, self.manager.core.rooms
        there = [key for key in sought._waiting if (record := rooms.get(key)) is not None and record.claimed]
        if there:
            self.violations.append(f"{there} have a sender, and calls wait for one")
        if sought.count > WAITERS:
            self.violations.append(f"{sought.count} wait")

    async def _call(self) -> None:
        loop, rnd = asyncio.get_running_loop(), self.random
        await asyncio.sleep(rnd.uniform(0.0, FOR))  # virtual time
        waits = rnd.choice([0.5, 5.0, 20.0])
        keys = [RoomKey(room, rnd.randrange(3)) for room in rnd.sample(range(1, ROOMS + 1), rnd.randrange(1, 4))]
        end = loop.time() + waits
        try:
            found = await self.manager.locate(keys, waits)
            rooms = self.manager.core.rooms
            if not set(found) <= set(keys) or not all(cast(Any, rooms[key]).claimed for key in found):
                self.violations.append(f"{found} for {keys}")
            self.ends.append("found" if found else "nothing")
        except (TooManyRequests, ServerDraining) as error:
            self.ends.append(error.reason.name)
        if loop.time() > end + TICK:
            self.violations.append(f"a call ended {loop.time() - end:.1f} s after its time")


@pytest.mark.parametrize("seed", range(20))
def test_whoever_asks_for_rooms_hears_of_the_first_sender_in_time(seed: int) -> None:
    locating = run(Locating(seed).run())
    assert len(locating.ends) == CALLS and not locating.violations, "\n".join(locating.violations[:5])


def test_the_seeds_meet_every_end() -> None:
    ends = {end for seed in range(20) for end in run(Locating(seed).run()).ends}
    assert ends == {"found", "nothing", "TOO_MANY_REQUESTS", "SERVER_DRAINING"}
