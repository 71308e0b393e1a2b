"""How the layers stand around a method: in one order, once per method, and beside the messages of a stream."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvgrpc.errors import RoomNotFound, TooManyRequests
from kvgrpc.rpc.callers import CALLER, Caller
from kvgrpc.rpc.interceptors import Admission, CallLimits, interceptors_of
from kvgrpc.rpc.interceptors.call import Method
from kvgrpc.rpc.security import CallerRole, ServerSecurity, Token
from kvgrpc.rpc.shares import RETRY_SECONDS
from tests.support.secrets import bearer, secret

SESSION = "/kvgrpc.v1.TransferService/Session"
GET_ROOM = "/kvgrpc.v1.TransferService/GetRoom"


class Aborted(grpc.aio.AbortError):
    pass


class Context:
    """As much of a servicer's context as the layers ask for."""

    def __init__(self, *headers: tuple[str, str], seconds: float | None = 5.0) -> None:
        self._headers = headers
        self._seconds = seconds
        self._code: grpc.StatusCode | None = None

    def invocation_metadata(self) -> Any:
        return self._headers

    def peer(self) -> str:
        return "ipv4:127.0.0.1:4711"

    def auth_context(self) -> dict[str, Any]:
        return {}

    def time_remaining(self) -> float | None:
        return self._seconds

    def code(self) -> grpc.StatusCode | None:
        return self._code

    async def read(self) -> str:
        return "request"

    async def send_initial_metadata(self, metadata: Any) -> None: ...

    async def abort(self, code: grpc.StatusCode, text: str, metadata: Any) -> None:
        self._code = code
        raise Aborted


async def wrapped(interceptor: grpc.aio.ServerInterceptor, path: str, handler: Any) -> Any:
    async def resolve(details: Any) -> Any:
        return handler

    details: Any = SimpleNamespace(method=path, invocation_metadata=())
    return await interceptor.intercept_service(resolve, details)


async def test_a_stream_decodes_what_the_library_read_and_nothing_else_of_ours_is_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    async def session(requests: Any, context: Any) -> None:
        assert context.abort == library.abort
        seen.extend([each async for each in requests])
        seen.append(await context.read())
        seen.append(await context.read())

    (interceptor,) = interceptors_of(ServerSecurity())
    handler: Any = grpc.stream_stream_rpc_method_handler(session, lambda raw: raw.decode(), bytes)
    made = await wrapped(interceptor, SESSION, handler)
    assert (made.request_deserializer, made.response_serializer) == (None, bytes)
    library, frames = Context(), [b"third", grpc.aio.EOF]

    async def read() -> Any:
        return frames.pop(0)

    async def requests() -> Any:
        for frame in (b"first", b"second"):
            yield frame

    monkeypatch.setattr(library, "read", read)
    await made.stream_stream(requests(), library)
    assert seen == ["first", "second", "third", grpc.aio.EOF]


async def test_a_method_is_wrapped_once() -> None:
    async def get_room(request: Any, context: Any) -> Any:
        return request

    (interceptor,) = interceptors_of(ServerSecurity())
    handler: Any = grpc.unary_unary_rpc_method_handler(get_room)
    first = await wrapped(interceptor, GET_ROOM, handler)
    assert await wrapped(interceptor, GET_ROOM, handler) is first
    other: Any = grpc.unary_unary_rpc_method_handler(get_room)
    assert await wrapped(interceptor, GET_ROOM, other) is not first


async def test_who_may_not_call_takes_no_place_and_reaches_nothing() -> None:
    """Auth before admission, admission before the servicer."""
    reached: list[str] = []

    async def get_room(request: Any, context: Any) -> Any:
        reached.append(request)
        raise RoomNotFound("no such room")

    tokens = (Token(CallerRole.OPERATOR, secret("good")), Token(CallerRole.CONSUMER, secret("other")))
    security = ServerSecurity(tokens=tokens, audience=("10.0.0.7:9001",))
    (interceptor,) = interceptors_of(security, Admission(CallLimits(unary=0)))
    handler: Any = grpc.unary_unary_rpc_method_handler(get_room)
    made = await wrapped(interceptor, GET_ROOM, handler)
    expected = [
        ((), grpc.StatusCode.UNAUTHENTICATED),
        ((("authorization", "Bearer bad"),), grpc.StatusCode.UNAUTHENTICATED),
        ((("authorization", bearer("good", "10.0.0.8:9001")),), grpc.StatusCode.UNAUTHENTICATED),
        ((("authorization", bearer("other", "10.0.0.7:9001")),), grpc.StatusCode.PERMISSION_DENIED),
        ((("authorization", bearer("good", "10.0.0.7:9001")),), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ]
    for headers, code in expected:
        context = Context(*headers)
        with pytest.raises(Aborted):
            await made.stream_unary(None, context)
        assert context.code() is code
    assert reached == []


async def test_a_call_that_was_over_before_its_turn_is_not_taken_for_a_strangers() -> None:
    """The library knows no address of it any more: its loopback token was said to be for another server."""
    security = ServerSecurity(tokens=(Token(CallerRole.OPERATOR, secret("good"), "ops"),), audience=("127.0.0.1:9001",))
    (interceptor,) = interceptors_of(security)
    served: list[Any] = []

    async def get_room(request: Any, context: Any) -> Any:
        served.append(CALLER.get())

    class Over(Context):
        addresses = iter(["ipv4:127.0.0.1:4711"])

        def peer(self) -> str:
            return next(self.addresses, "")

    handler: Any = grpc.unary_unary_rpc_method_handler(get_room, request_deserializer=str)
    made = await wrapped(interceptor, GET_ROOM, handler)
    await made.stream_unary(None, Over(("authorization", bearer("good", "127.0.0.1:9001"))))
    assert [caller.name for caller in served] == ["operator ops"]


@pytest.mark.parametrize(
    ("path", "scope"),
    [(SESSION, "streams"), ("/kvgrpc.v1.PrefetchService/JoinAgreement", "streams"), (GET_ROOM, "calls")],
)
async def test_calls_of_one_caller_leave_as_many_to_others(path: str, scope: str) -> None:
    opened: list[str] = []

    async def stays(requests: Any, context: Any) -> None:
        opened.append(requests)
        await asyncio.Event().wait()

    setting = "unary" if scope == "calls" else "streams"
    serve = Admission(CallLimits(**{setting: 8})).layer(Method(path, streams=scope == "streams"), stays)

    async def call(name: str) -> None:
        CALLER.set(Caller(name))
        context: Any = Context()
        await serve(name, context)

    tasks = [asyncio.create_task(call("greedy")) for _ in range(5)] + [asyncio.create_task(call("b"))]
    done, standing = await asyncio.wait(tasks, timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
    (error,) = [task.exception() for task in done]
    assert isinstance(error, TooManyRequests) and f"call_limits.{setting} (KVGRPC_CALL_LIMITS)" in error.message
    assert error.metadata == {"limit": "4", "value": "5", "scope": f"{scope} of one caller"}
    assert error.retry_after == RETRY_SECONDS
    await asyncio.wait([*standing], timeout=0)
    assert opened == ["greedy"] * 4 + ["b"]
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    again = asyncio.create_task(call("greedy"))
    await asyncio.wait([again], timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
    assert not again.done()
    for task in [*standing, again]:
        task.cancel()
    await asyncio.wait([*standing, again])


async def test_a_method_of_another_package_without_handler_is_left_to_the_library() -> None:
    (interceptor,) = interceptors_of(ServerSecurity())
    assert await wrapped(interceptor, "/foreign.Service/Method", None) is None
    assert await wrapped(interceptor, GET_ROOM, None) is None


async def test_headers_that_can_no_longer_be_sent_when_a_stream_is_ended_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, gone = asyncio.Event(), asyncio.Event()

    class Leaving(Context):
        async def send_initial_metadata(self, metadata: Any) -> None:
            begun.set()
            await gone.wait()
            raise grpc.aio.InternalError("the caller went away")

    async def session(requests: Any, context: Any) -> None:
        raise AssertionError("never reached")

    (interceptor,) = interceptors_of(ServerSecurity())
    made = await wrapped(interceptor, SESSION, grpc.stream_stream_rpc_method_handler(session))
    call = asyncio.ensure_future(made.stream_stream(None, Leaving()))
    await asyncio.wait_for(begun.wait(), 5)
    call.cancel()
    await asyncio.sleep(0)
    gone.set()
    await asyncio.wait([call], timeout=5)
    assert call.cancelled()
    del call
    gc.collect()
    assert not [record for record in caplog.records if record.exc_info and "went away" in str(record.exc_info[1])]


async def test_a_unary_call_gives_its_place_back_however_it_ends() -> None:
    ends: list[BaseException | None] = [None, RoomNotFound("no such room"), asyncio.CancelledError()]

    async def get_room(request: Any, context: Any) -> None:
        if request is not None:
            raise request

    serve = Admission(CallLimits(unary=1)).layer(Method(GET_ROOM, streams=False), get_room)
    context: Any = Context()
    for end in ends * 2:
        try:
            await serve(end, context)
        except (RoomNotFound, asyncio.CancelledError):
            assert end is not None
