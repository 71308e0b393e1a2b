"""A server of one made-up service with a method of each arity, around which everything else is real."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import StringValue

from kvgrpc.errors import KvGrpcError
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.interceptors import Admission, interceptors_of
from kvgrpc.rpc.options import SERVER_OPTIONS
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.rpc.server import add_absent
from kvgrpc.rpc.status import error_from

SERVICE = "test.Arities"
ARITIES = ("UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream")
# The same two with the responses from a generator instead of context.write.
METHODS = (*ARITIES, "UnaryGenerator", "StreamGenerator")

Context = Any
Act = Callable[[Context], Awaitable[None]]


async def nothing(context: Context) -> None:
    """A servicer that just answers."""


@dataclass
class Servicer:
    """Reads all requests, does what ``act`` says, answers with the last request. ``begun`` names the calls so far."""

    act: Act = nothing
    begun: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(SERVICE, self.methods())

    def methods(self) -> dict[str, Any]:
        codec: dict[str, Any] = {
            "request_deserializer": StringValue.FromString,
            "response_serializer": StringValue.SerializeToString,
        }
        return {
            "UnaryUnary": grpc.unary_unary_rpc_method_handler(self.unary_unary, **codec),
            "UnaryStream": grpc.unary_stream_rpc_method_handler(self.unary_stream, **codec),
            "StreamUnary": grpc.stream_unary_rpc_method_handler(self.stream_unary, **codec),
            "StreamStream": grpc.stream_stream_rpc_method_handler(self.stream_stream, **codec),
            "UnaryGenerator": grpc.unary_stream_rpc_method_handler(self.unary_generator, **codec),
            "StreamGenerator": grpc.stream_stream_rpc_method_handler(self.stream_generator, **codec),
        }

    async def unary_unary(self, request: StringValue, context: Context) -> StringValue:
        async with self.call("UnaryUnary", context):
            return request

    async def unary_stream(self, request: StringValue, context: Context) -> None:
        await context.write(request)
        async with self.call("UnaryStream", context):
            await context.write(request)

    async def stream_unary(self, requests: AsyncIterator[StringValue], context: Context) -> StringValue:
        last = StringValue()
        async for request in requests:
            last = request
        async with self.call("StreamUnary", context):
            return last

    async def stream_stream(self, requests: AsyncIterator[StringValue], context: Context) -> None:
        while (request := await context.read()) is not grpc.aio.EOF:
            await context.write(request)
        async with self.call("StreamStream", context):
            pass

    async def unary_generator(self, request: StringValue, context: Context) -> AsyncIterator[StringValue]:
        yield request
        async with self.call("UnaryGenerator", context):
            yield request

    async def stream_generator(
        self, requests: AsyncIterator[StringValue], context: Context
    ) -> AsyncIterator[StringValue]:
        async for request in requests:
            yield request
        async with self.call("StreamGenerator", context):
            pass

    @contextlib.asynccontextmanager
    async def call(self, name: str, context: Context) -> AsyncIterator[None]:
        self.begun.append(name)
        try:
            await self.act(context)
            yield
        finally:
            self.ended.append(name)


@dataclass
class Served:
    servicer: Servicer
    server: grpc.aio.Server
    address: str
    channel: Any  # grpc.aio.Channel, whose types know no call without codecs

    def start(self, name: str, request: Any = None, **options: Any) -> Any:
        """Begins a call of any arity, with StringValue or raw bytes as the request (or the only one of a stream)."""
        return begin(self.channel, f"/{SERVICE}/{name}", request, **options)

    async def call(self, name: str, request: Any = None, **options: Any) -> list[str]:
        """A whole call; the responses."""
        return await responses_of(self.start(name, request, **options))

    async def failure(self, name: str, request: Any = None, **options: Any) -> KvGrpcError:
        return await failure(self.call(name, request, **options))


@contextlib.asynccontextmanager
async def serving(
    act: Act = nothing, security: ServerSecurity | None = None, admission: Admission | None = None
) -> AsyncIterator[Served]:
    servicer = Servicer(act)
    server = grpc.aio.server(
        interceptors=interceptors_of(security or ServerSecurity(), admission), options=SERVER_OPTIONS
    )
    server.add_generic_rpc_handlers((servicer.handlers(),))
    add_absent(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    channel = open_channel(address)
    try:
        yield Served(servicer, server, address, channel)
    finally:
        await channel.close()
        await server.stop(0)


def begin(channel: grpc.aio.Channel, path: str, request: Any = None, *, timeout: float | None = 10.0) -> Any:
    """Begins a call of the arity that the method's name says."""
    name = path.rpartition("/")[2]
    request = StringValue(value="hello") if request is None else request
    codec: dict[str, Any] = {"response_deserializer": StringValue.FromString}
    if not isinstance(request, bytes):
        codec["request_serializer"] = StringValue.SerializeToString
    if name == "UnaryUnary":
        return channel.unary_unary(path, **codec)(request, timeout=timeout)
    if name in ("UnaryStream", "UnaryGenerator"):
        return channel.unary_stream(path, **codec)(request, timeout=timeout)
    if name == "StreamUnary":
        return channel.stream_unary(path, **codec)(once(request), timeout=timeout)
    return channel.stream_stream(path, **codec)(once(request), timeout=timeout)


async def once(request: Any) -> AsyncIterator[Any]:
    yield request


async def responses_of(call: Any) -> list[str]:
    if isinstance(call, (grpc.aio.UnaryUnaryCall, grpc.aio.StreamUnaryCall)):
        return [(await call).value]
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response.value)
    return responses


async def failure(call: Awaitable[object]) -> KvGrpcError:
    """The domain exception of a call that must fail."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return error_from(error)
    raise AssertionError(f"the call did not fail but answered {answer!r}")
