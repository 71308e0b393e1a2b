"""What one etcd takes of a fleet: leases, transactions that register a rank, and renewals.

``python -m benchmarks.scale --etcd [ranks]``, with registries' own client and transactions against a real etcd of its
own. The rate is of one Python client beside it; what etcd itself needs of a CPU says how far it would go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import psutil

from kvgrpc.registry.model import RankRow
from kvgrpc.registry.store.etcd.client import EtcdClient
from kvgrpc.registry.store.etcd.keys import EtcdKeys
from kvgrpc.registry.store.etcd.renewal import Renewal
from kvgrpc.registry.store.etcd.transactions import registration
from kvgrpc.registry.wire import PoolCache
from tests.support.etcd import running_etcd

AT_ONCE, RENEWED_AT_ONCE, RENEWALS, TTL = 64, 200, 10, 600
FIRST_LEASE = 1 << 40
Say = Callable[[str, float, str], None]


async def measure_etcd(ranks: Sequence[RankRow], say: Say) -> None:
    """Each rank registers by itself, as engines' do."""
    for fsync in (False, True):
        with running_etcd(fsync=fsync) as etcd:
            client = EtcdClient([etcd.address])
            try:
                await _measure(client, psutil.Process(etcd.pid), ranks, say, "with fsync" if fsync else "without fsync")
            finally:
                await client.close()


async def _measure(client: EtcdClient, process: psutil.Process, ranks: Sequence[RankRow], say: Say, how: str) -> None:
    leases = range(FIRST_LEASE, FIRST_LEASE + len(ranks))

    async def timed(what: str, work: Awaitable[object], count: int) -> None:
        def now() -> tuple[float, float, float]:
            return time.perf_counter(), time.process_time(), sum(process.cpu_times()[:2])

        began = now()
        await work
        seconds, own, its = (end - begin for end, begin in zip(now(), began, strict=True))
        each = f"{its / count * 1e6:.0f} us of etcd's CPU each, {own / count * 1e6:.0f} us of ours"
        say(f"etcd, {what}, {how}", count / seconds, f"a second; {each}")

    view: Any = SimpleNamespace(fences={}, shapes={}, pools=PoolCache())
    keys = EtcdKeys("scale")
    requests = [registration(keys, view, [(0, row)], lease, {}) for row, lease in zip(ranks, leases, strict=True)]

    async def register(number: int) -> None:
        answer = await client.transact(requests[number])
        assert answer.succeeded, "a row was there already"

    await timed("leases granted", _each(lambda n: client.grant(leases[n], TTL), len(ranks)), len(ranks))
    await timed(f"transactions of {len(requests[0].success)} puts", _each(register, len(ranks)), len(ranks))
    renewal = Renewal(client)

    async def renew() -> None:
        for first in [*range(0, len(leases), RENEWED_AT_ONCE)] * RENEWALS:
            assert not await renewal.renew(leases[first : first + RENEWED_AT_ONCE]), "a lease is gone"

    await timed("leases renewed, one stream", renew(), len(leases) * RENEWALS)
    await renewal.close()


async def _each(call: Callable[[int], Awaitable[None]], count: int) -> None:
    """``AT_ONCE`` of them at a time."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await call(number)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
