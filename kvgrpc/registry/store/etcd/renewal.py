"""Renews leases at etcd: one stream for all of a registry's ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc

from kvgrpc.errors import KvGrpcError
from kvgrpc.registry.store.etcd.client import CALL_SECONDS, EtcdClient, KeepAliveCall
from kvgrpc.registry.store.etcd.v1 import etcd_pb2 as pb
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.within import within


class Renewal:
    """Asks for many leases at a time; who asks for one that is being asked for shares the answer.

    Belongs to one event loop.
    """

    def __init__(self, client: EtcdClient) -> None:
        self._client = client
        self._asked: dict[int, asyncio.Future[int]] = {}
        self._waiting: list[int] = []
        self._writing: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self._call: KeepAliveCall | None = None
        self._reading: asyncio.Task[None] | None = None

    async def renew(self, leases: Iterable[int]) -> set[int]:
        """Renews them and returns those that etcd does not know any more. Raises StoreUnavailable."""
        wanted = set(leases)
        new = [lease for lease in wanted if lease not in self._asked]
        answers = [self._asked.get(lease) or self._ask(lease) for lease in wanted]
        if new:
            self._send(new)
        with self._client.errors(self._channel):
            seconds = await within(CALL_SECONDS, asyncio.gather(*map(asyncio.shield, answers)))
        return {lease for lease, left in zip(wanted, seconds, strict=True) if left <= 0}

    async def close(self) -> None:
        tasks = [task for task in (self._reading, self._writing) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._end(self._client.unavailable(self._client.address, "the registry stops"))

    def _ask(self, lease: int) -> asyncio.Future[int]:
        answer = self._asked[lease] = asyncio.get_running_loop().create_future()
        return answer

    def _send(self, leases: Iterable[int]) -> None:
        if self._call is None:
            self._channel, self._call = self._client.channel, self._client.keep_alive()
            self._reading = background(self._read(self._channel, self._call), "etcd-leases")
        self._waiting.extend(leases)
        if self._writing is None or self._writing.done():
            self._writing = background(self._write(self._channel, self._call), "etcd-leases-asked")

    async def _write(self, channel: grpc.aio.Channel | None, call: KeepAliveCall) -> None:
        """Writes what waits, and what is added meanwhile: a stream takes one write at a time."""
        try:
            with self._client.errors(channel):
                while self._waiting:
                    await call.write(pb.LeaseKeepAliveRequest(ID=self._waiting.pop()))
        except KvGrpcError as error:
            self._end(error)

    async def _read(self, channel: grpc.aio.Channel | None, call: KeepAliveCall) -> None:
        error: KvGrpcError = self._client.unavailable(self._client.address, "it ended the stream of leases")
        try:
            with self._client.errors(channel):
                while isinstance(response := await call.read(), pb.LeaseKeepAliveResponse):
                    answer = self._asked.pop(response.ID, None)
                    if answer is not None and not answer.done():
                        answer.set_result(response.TTL)
        except KvGrpcError as known:
            error = known
        finally:
            call.cancel()
            if self._call is call:
                self._end(error)

    def _end(self, error: KvGrpcError) -> None:
        self._call = None
        self._waiting.clear()
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # those who asked may have gone
