"""Wraps handlers of all four arities in the layers, once per method."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
from google.protobuf.message import Message

from kvgrpc.errors import FrameTooLarge, InvalidRequest, TooManyRequests
from kvgrpc.observability.logging import RateLimited
from kvgrpc.rpc.callers import PEER
from kvgrpc.rpc.credentials.audience import Audiences
from kvgrpc.rpc.interceptors.admission import NOT_COUNTED, Admission
from kvgrpc.rpc.interceptors.auth import auth
from kvgrpc.rpc.interceptors.call import Behaviour, Context, Layer, Method
from kvgrpc.rpc.interceptors.deadline import deadline
from kvgrpc.rpc.interceptors.errors import errors
from kvgrpc.rpc.interceptors.parsing import merge_in_pieces
from kvgrpc.rpc.interceptors.telemetry import telemetry
from kvgrpc.rpc.methods import largest_request
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.rpc.turns import LARGE_BYTES, Turns, next_turn

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Room = Callable[[int], AbstractAsyncContextManager[Callable[[int], None]]]

_log = logging.getLogger(__name__)


def interceptors_of(
    security: ServerSecurity,
    admission: Admission | None = None,
    refused: RateLimited | None = None,
    audiences: Audiences | None = None,
) -> list[grpc.aio.ServerInterceptor]:
    """The interceptors of one server, in their order. Raises InvalidRequest for a token file that cannot be used.

    ``refused``: where callers are named who may not call. ``audiences``: the targets of the tokens that it takes; those
    of ``security`` unless given.
    """
    admission, refused = admission or Admission(), refused or RateLimited(_log)
    authentication = auth(security, refused, audiences or Audiences(security.audience))
    return [_Interceptor((telemetry, errors, authentication, admission.layer, deadline), admission.body)]


class _Interceptor(grpc.aio.ServerInterceptor):
    def __init__(self, layers: Sequence[Layer], body: Room) -> None:
        self._layers = layers
        self._body = body
        # Methods that exist, so bounded: what has no handler is not kept.
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        path = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        known = self._wrapped.get(path)
        if known is None or known[0] is not handler:
            known = self._wrapped[path] = (handler, self._wrap(handler, path))
        return known[1]

    def _wrap(self, handler: Any, path: str) -> Handler:
        streams = handler.request_streaming or handler.response_streaming
        behaviour, make = _ARITIES[bool(handler.request_streaming), bool(handler.response_streaming)](handler)
        inner = _as_coroutine(behaviour, path)
        deserializer = handler.request_deserializer
        if not handler.request_streaming:
            # Served as if requests were a stream, so that the layers come before the request is read: whoever may not
            # call, or has its share already, sends no body. And decoded here: the library answers what it cannot decode
            # with a status that is not ours and a stack trace in the log for each.
            inner = partial(_read, inner, deserializer or bytes, largest_request(path), self._body)
        else:
            inner = partial(_read_each, inner, deserializer or bytes)
        made: Handler = make(self._layered(inner, Method(path, streams)), None, handler.response_serializer)
        return made

    def _layered(self, behaviour: Behaviour, method: Method) -> Any:
        behaviour = _within(self._layers, method, behaviour)
        # It is counted, and its exception becomes a status; nothing else happens.
        refuse = _within([telemetry, errors], method, _refuse)
        probe = method.path.startswith(NOT_COUNTED)

        # The library looks for a coroutine function, and partial objects and the like do not always count as one.
        async def call(request: Any, context: Context) -> Any:
            PEER.set(context.peer())
            turns = Turns.of_this_loop()
            try:
                leave = turns.place(probe=probe)
            except TooManyRequests as error:
                return await refuse(error, context)
            return await turns.in_turns(cast(Coroutine[Any, Any, Any], behaviour(request, context)), leave)

        return call


def _within(layers: Sequence[Layer], method: Method, behaviour: Behaviour) -> Behaviour:
    for layer in reversed(layers):
        behaviour = layer(method, behaviour)
    return behaviour


async def _refuse(request: Any, context: Context) -> None:
    """Of a call without a place, whose "request" is the error."""
    raise request


_ARITIES: dict[tuple[bool, bool], Callable[[Any], tuple[Any, Callable[..., Any]]]] = {
    (False, False): lambda handler: (handler.unary_unary, grpc.stream_unary_rpc_method_handler),
    (False, True): lambda handler: (handler.unary_stream, grpc.stream_stream_rpc_method_handler),
    (True, False): lambda handler: (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
    (True, True): lambda handler: (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
}


def _as_coroutine(behaviour: Any, path: str) -> Behaviour:
    if inspect.iscoroutinefunction(behaviour):
        return cast(Behaviour, behaviour)
    if inspect.isasyncgenfunction(behaviour):
        return partial(_written, behaviour)
    raise TypeError(f"{path}: a servicer's methods must be async, this one would block the event loop")


async def _written(behaviour: Any, request: Any, context: Context) -> None:
    # Without aclosing a cancelled call would leave the generator's finally to the garbage collector.
    async with aclosing(behaviour(request, context)) as responses:
        async for response in responses:
            await context.write(response)


async def _read(
    behaviour: Behaviour,
    deserializer: Callable[[bytes], Any],
    limit: int,
    room: Room,
    requests: Any,
    context: Context,
) -> Any:
    """The one request of a call, and what is made of it. Raises InvalidRequest where there is none, FrameTooLarge."""
    async with room(limit) as shrink:
        request: Any = await context.read()
        if request is grpc.aio.EOF:
            raise InvalidRequest.of("request", "absent", "one message")
        if len(request) > limit:
            text = f"a request of {len(request)} bytes, at most {limit} are allowed"
            raise FrameTooLarge(text, metadata={"limit": limit, "value": len(request)})
        shrink(len(request))
        decoded = await _decoded(request, deserializer)
        del request
        return await behaviour(decoded, context)


async def _read_each(
    behaviour: Behaviour, deserializer: Callable[[bytes], Any], requests: Any, context: Context
) -> Any:
    """A stream of requests, each decoded as the one of a call is."""

    async def decoded() -> AsyncIterator[Any]:
        async for request in requests:
            yield await _decoded(request, deserializer)

    return await behaviour(decoded(), cast(Context, _Decoding(context, deserializer)))


class _Decoding:
    """A call's context, whose ``read`` gives messages of a library that was told to decode none."""

    def __init__(self, context: Context, deserializer: Callable[[bytes], Any]) -> None:
        self._context = context
        self._deserializer = deserializer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        request: Any = await self._context.read()
        return request if request is grpc.aio.EOF else await _decoded(request, self._deserializer)


async def _decoded(request: bytes, deserializer: Callable[[bytes], Any]) -> Any:
    if len(request) <= LARGE_BYTES:
        return deserializer(request)
    turns = Turns.of_this_loop()
    await turns.take()
    kind = getattr(deserializer, "__self__", None)
    if turns.hurries and isinstance(kind, type) and issubclass(kind, Message):
        decoded: Any = kind()
        for _ in merge_in_pieces(decoded, request):
            await asyncio.sleep(0)
            await turns.take_as_a_call()
    else:
        decoded = deserializer(request)
    # What is made of it comes in another turn: parsing 4 MiB takes 30 ms by itself.
    await next_turn()
    return decoded
