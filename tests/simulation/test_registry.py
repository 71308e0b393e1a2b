"""ResolveRanks that waits, on a loop of virtual time, while ranks register, renew, vanish, are fenced and leave."""

from __future__ import annotations

import asyncio
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from kvgrpc.errors import EngineNotFound, KvGrpcError, ServerDraining, TooManyRequests, WarmingUp
from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.registry.servicer import RegistryServicer
from kvgrpc.registry.store.memory import MemoryRegistry, MemoryStore
from kvgrpc.v1 import registry_service_pb2 as pb
from tests.simulation.virtual_loop import run
from tests.support.registry_builders import TTL, row

LAYOUT = Layout(dp=2, tp=2)
WAITERS = 6
TICK = 0.1
FOR = 60.0


class Callers:
    """One seed: callers that wait for two engines, whose ranks come and go."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.violations: list[str] = []
        self.ends: list[str] = []
        self.waiting = 0

    async def run(self) -> Callers:
        loop, rnd = asyncio.get_running_loop(), self.random
        store = MemoryStore(ttl=TTL)
        self.registry = store.registry = MemoryRegistry(
            clock=loop.time, registry_id="r", lease_ids=itertools.count(1), ttl=TTL, max_rows=1_000
        )
        self.servicer = RegistryServicer(store, max_waiters=WAITERS)
        await self.servicer.start()
        calls = [asyncio.ensure_future(self._call()) for _ in range(60)]
        epochs: dict[RankId, int] = {}
        leases: dict[RankId, int] = {}
        while loop.time() < FOR:
            await asyncio.sleep(rnd.choice([0.0, 0.1, 0.5, 2.0]))  # virtual time
            at = row(rnd.choice("PQ"), dp=rnd.randrange(2), tp=rnd.randrange(2), layout=LAYOUT).ref.rank
            epoch = epochs.get(at, 1) + rnd.choice([-1, 0, 0, 1])
            act = rnd.choice(["register"] * 4 + ["keep alive", "keep all", "deregister"])
            if act == "register":
                try:
                    (lease,) = await store.register([row(at.engine, dp=at.dp, tp=at.tp, epoch=epoch, layout=LAYOUT)])
                    leases[at], epochs[at] = lease.lease_id, epoch
                except KvGrpcError as error:
                    if epoch >= epochs.get(at, 1):
                        self.violations.append(f"{at}@{epoch} was refused: {error}")
            elif act == "deregister":
                await store.deregister([RankRef(at, epoch)])
            else:
                await store.keep_alive(list(leases.values()) if act == "keep all" else [leases.get(at, 999)])
            await asyncio.sleep(TICK)  # virtual time
            ready = [name for name in "PQ" if (engine := store.table.find(name, None)) is not None and engine.ready]
            forgotten = [name for name in ready if self.servicer._waiters._waiting.get(name)]
            if forgotten:
                self.violations.append(f"{forgotten} is READY, and calls wait for it")
            if self.servicer._waiters.count > WAITERS:
                self.violations.append(f"{self.servicer._waiters.count} wait")
        self.servicer.drain()
        await asyncio.wait(calls, timeout=1.0)
        if not all(call.done() for call in calls) or self.servicer._waiters.count or self.servicer._waiters._waiting:
            self.violations.append("somebody waits at a registry that drained")
        await self.servicer.close()
        return self

    async def _call(self) -> None:
        loop, rnd = asyncio.get_running_loop(), self.random
        await asyncio.sleep(rnd.uniform(0.0, FOR))  # virtual time
        waits = rnd.choice([1.0, 5.0, 20.0])
        engine, end = rnd.choice("PQ"), loop.time() + waits
        context: Any = SimpleNamespace(time_remaining=lambda: end - loop.time())
        try:
            answer = await self.servicer.ResolveRanks(pb.ResolveRanksRequest(engine=engine, wait_ready=True), context)
            self.ends.append("READY" if answer.engine.ready else "not READY")
        except (EngineNotFound, WarmingUp, TooManyRequests, ServerDraining) as error:
            self.ends.append(error.reason.name)
        if loop.time() > end + TICK:
            self.violations.append(f"a call ended {loop.time() - end:.1f} s after its deadline")


@pytest.mark.parametrize("seed", range(30))
def test_whoever_waits_is_woken_in_time_and_once_the_engine_is_ready(seed: int) -> None:
    callers = run(Callers(seed).run())
    assert len(callers.ends) == 60 and not callers.violations, "\n".join(callers.violations[:5])


def test_the_seeds_meet_every_end() -> None:
    ends = {end for seed in range(30) for end in run(Callers(seed).run()).ends}
    assert ends >= {"READY", "ENGINE_NOT_FOUND", "WARMING_UP", "SERVER_DRAINING", "TOO_MANY_REQUESTS"}
    assert "not READY" not in ends
