"""Processes of registries and etcd are killed under load, and no rank is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys

import grpc
import pytest

from kvgrpc.client.engine_mirror import EngineMirror
from kvgrpc.model import Layout
from kvgrpc.registry.client.registration import Registration
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from tests.support.etcd import ETCD, Etcd, running_etcd
from tests.support.mirrored import known_engines
from tests.support.ports import free_port
from tests.support.registry_builders import row
from tests.support.registry_serving import dial
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(ETCD is None, reason="etcd is not installed (Debian: etcd-server)")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kills", "longest"), [(2, 1.0), pytest.param(6, 4.0, marks=pytest.mark.slow)])
async def test_replicas_and_etcd_are_killed_under_load_and_no_rank_is_lost(kills: int, longest: float) -> None:
    """Three registry processes over one etcd; one after another is killed and comes back, and etcd with every other.

    A reader at each replica sees at every moment every rank whose registration was taken.
    """
    chance = random.Random(7)
    with running_etcd() as etcd, contextlib.ExitStack() as started:
        processes = [RegistryProcess(etcd, free_port()) for _ in range(3)]
        for process in processes:
            started.callback(process.kill)
        addresses = [process.address for process in processes]
        layout = Layout(dp=10, tp=8)
        registrations = []
        for dp in range(10):
            rows = [row(dp=dp, tp=tp, layout=layout) for tp in range(8)]
            turned = ",".join(addresses[dp % 3 :] + addresses[: dp % 3])
            registrations.append(Registration(dial, turned, rows))
        await asyncio.gather(*(registration.start(20.0) for registration in registrations))
        readers = [Follower(process.address) for process in processes]
        await until(lambda: all(len(reader.ranks) == 80 for reader in readers), 60.0)
        for number in range(kills):
            victim = chance.choice(processes)
            victim.kill()
            if number % 2 == 0:
                etcd.kill()
                await asyncio.sleep(chance.uniform(0.1, longest))  # between two faults
                await asyncio.to_thread(etcd.start)  # whoever renews lives here, and must not stand meanwhile
            await asyncio.sleep(chance.uniform(0.1, longest))  # the outage itself
            await asyncio.to_thread(victim.start)
            await asyncio.sleep(chance.uniform(0.0, longest / 2))  # between two faults
        await until(lambda: all(registration.state == "registered" for registration in registrations), 60.0)
        assert [reader.lost for reader in readers] == [set()] * 3
        await until(lambda: sum(reader.full_states for reader in readers) > 3, 60.0)
        await until(lambda: all(len(reader.ranks) == 80 for reader in readers), 60.0)
        newcomer = Follower(processes[0].address)
        await until(lambda: len(newcomer.ranks) == 80, 60.0)
        for reader in readers:
            reader.judging = False
        await asyncio.gather(*(registration.close() for registration in registrations))
        await until(lambda: all(not reader.ranks for reader in readers), 60.0)
        for reader in [*readers, newcomer]:
            await reader.close()


class RegistryProcess:
    """``kvgrpc serve registry --store etcd`` at an address that it keeps."""

    def __init__(self, etcd: Etcd, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._etcd = etcd.address
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "kvgrpc", "serve", "registry", "--listen", self.address]
        command += ["--lease-ttl", "30", "--store", "etcd", "--etcd", self._etcd, "--log-level", "ERROR"]
        self._popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._popen.stdout is not None
        assert self._popen.stdout.readline().strip() == f"kvgrpc registry listens on {self.address}"

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()


class Follower:
    """Follows the engines of one replica through its deaths, and notes ranks that it once said and no longer says."""

    def __init__(self, address: str) -> None:
        self.full_states = 0
        self.lost: set[str] = set()
        self.judging = True
        self._mirror = EngineMirror()
        self._seen: set[str] = set()
        self._channel = dial(address)
        self._task = asyncio.create_task(self._follow())

    @property
    def ranks(self) -> set[str]:
        return {str(at.ref) for engine in known_engines(self._mirror).values() for at in engine.rows}

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._channel.close()

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                call = RegistryServiceStub(self._channel).WatchEngines(pb.WatchEnginesRequest(without_pools=True))
                while isinstance(message := await call.read(), pb.WatchEnginesResponse):
                    self._mirror.apply(message)
                    self.full_states += message.state_complete
                    self._judge()
            await asyncio.sleep(0.05)

    def _judge(self) -> None:
        """An absence counts unless the registry itself says that it means nothing."""
        if self._mirror.complete and not self._mirror.warming_up:
            ranks = self.ranks
            self.lost |= self._seen - ranks if self.judging else set()
            self._seen |= ranks
