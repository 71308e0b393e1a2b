"""Speaks to etcd, version 3: unary calls with a bound on each, and its two streams. Knows nothing of registries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from kvgrpc.errors import StoreUnavailable
from kvgrpc.registry.store.etcd.keys import after
from kvgrpc.registry.store.etcd.v1 import etcd_pb2 as pb
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.loop import background
from kvgrpc.rpc.security import ClientSecurity

CALL_SECONDS = 3.0
PAGE_KEYS = 1_000
_RETRY_SECONDS = 0.5

Answer = TypeVar("Answer", bound=Message)
WatchCall = grpc.aio.StreamStreamCall[pb.WatchRequest, pb.WatchResponse]
KeepAliveCall = grpc.aio.StreamStreamCall[pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse]


class EtcdClient:
    """One member of an etcd cluster at a time, of ``endpoints`` ("host:port"). Belongs to one event loop.

    A call that gets no answer raises StoreUnavailable, and the next one goes to the next member. Whether such a call
    was carried out is not known.
    """

    def __init__(self, endpoints: Sequence[str], security: ClientSecurity | None = None) -> None:
        self._endpoints = tuple(endpoints)
        self._security = security
        self._at = 0
        self._channel: grpc.aio.Channel | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return self._endpoints[self._at]

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel that the next call is made on."""
        if self._channel is None:
            self._channel = open_channel(self.address, self._security, own_connection=True)
        return self._channel

    async def read(self, prefix: bytes) -> tuple[pb.ResponseHeader, list[pb.KeyValue]]:
        """All keys with the prefix, as they were at the revision that the header names."""
        found: list[pb.KeyValue] = []
        request = pb.RangeRequest(key=prefix, range_end=after(prefix), limit=PAGE_KEYS)
        header: pb.ResponseHeader | None = None
        while True:
            page = await self._call("KV/Range", request, pb.RangeResponse)
            found += page.kvs
            header = header or page.header
            if not page.more:
                return header, found
            request.revision = header.revision
            request.key = page.kvs[-1].key + b"\0"

    async def transact(self, request: pb.TxnRequest) -> pb.TxnResponse:
        return await self._call("KV/Txn", request, pb.TxnResponse)

    async def grant(self, lease: int, seconds: int) -> None:
        """Makes a lease of this number."""
        await self._call("Lease/LeaseGrant", pb.LeaseGrantRequest(ID=lease, TTL=seconds), pb.LeaseGrantResponse)

    async def revoke(self, lease: int) -> None:
        """Ends a lease and removes its keys."""
        await self._call("Lease/LeaseRevoke", pb.LeaseRevokeRequest(ID=lease), pb.LeaseRevokeResponse)

    def watch(self) -> WatchCall:
        call: WatchCall = self._stream("Watch/Watch", pb.WatchRequest, pb.WatchResponse)
        return call

    def keep_alive(self) -> KeepAliveCall:
        call: KeepAliveCall = self._stream("Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse)
        return call

    @contextlib.contextmanager
    def errors(self, channel: grpc.aio.Channel | None) -> Iterator[None]:
        """Yields what a call of grpc.aio raises as StoreUnavailable; the next call goes to the next member.
        ``channel``: the one that the call was made on, which another call may have left since."""
        address = self.address
        try:
            yield
        except asyncio.CancelledError:
            # Closing a channel cancels its calls: then another call found that the member does not answer.
            if channel is self._channel:
                raise
            raise self.unavailable(address, "another call found that it does not answer") from None
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:  # that is an answer, as any member would give it
                self._leave(channel)
            raise self.unavailable(address, error.details() or error.code().name) from None
        except (asyncio.TimeoutError, asyncio.InvalidStateError):
            self._leave(channel)
            raise self.unavailable(address, "no answer in time") from None

    def unavailable(self, address: str, why: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"etcd at {address} did not answer: {why}",
            metadata={"store": "etcd", "address": address},
            retry_after=_RETRY_SECONDS,
        )

    async def close(self) -> None:
        self._leave(self._channel)
        if self._leaving:
            await asyncio.wait(self._leaving)

    async def _call(self, method: str, request: Message, answer: type[Answer]) -> Answer:
        channel = self.channel
        call = channel.unary_unary(
            f"/etcdserverpb.{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        with self.errors(channel):
            response: Answer = await call(request, timeout=CALL_SECONDS)
        return response

    def _stream(self, method: str, request: type[Message], answer: type[Message]) -> Any:
        return self.channel.stream_stream(
            f"/etcdserverpb.{method}",
            request_serializer=request.SerializeToString,
            response_deserializer=answer.FromString,
        )()

    def _leave(self, channel: grpc.aio.Channel | None) -> None:
        """Once for all calls that failed on one channel: a later one may lead to the same member."""
        if channel is None or channel is not self._channel:
            return
        self._channel, self._at = None, (self._at + 1) % len(self._endpoints)
        task = background(channel.close(None), "etcd-leave")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
