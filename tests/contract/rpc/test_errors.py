"""Every failure of a servicer reaches its caller as one status with a reason, over a real server, in every arity."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.wrappers_pb2 import StringValue
from google.rpc import error_details_pb2, status_pb2

from kvgrpc.errors import (
    FeatureDisabled,
    Internal,
    InvalidRequest,
    KvGrpcError,
    OldShapeStillLeased,
    Reason,
    RoomNotFound,
    TooManyRequests,
    Violation,
    WarmingUp,
    exception_of,
)
from kvgrpc.observability import metrics
from kvgrpc.rpc.interceptors import ALLOWED, Admission, CallLimits, deadline
from kvgrpc.rpc.shares import RETRY_SECONDS
from kvgrpc.rpc.status import DETAILS_KEY, error_from
from tests.support.serving import ARITIES, METHODS, SERVICE, Act, Context, failure, responses_of, serving
from tests.support.waiting import until

REASONS = [reason for reason in Reason if reason]


def raising(error: BaseException) -> Act:
    async def act(context: Context) -> None:
        raise error

    return act


async def for_ever(context: Context) -> None:
    await asyncio.Event().wait()


def counted(method: str, code: str) -> float:
    value = metrics.REGISTRY.get_sample_value(
        "kvgrpc_rpc_calls_total", {"method": f"/{SERVICE}/{method}", "code": code}
    )
    return value or 0.0


class TestDomainExceptions:
    @pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.name)
    async def test_every_reason_arrives_as_it_was_raised(self, reason: Reason) -> None:
        raised = exception_of(reason)(
            f"text of {reason.name}",
            metadata={"room": 2**63 - 1, "rank": "P/dp0"},
            retry_after=1.25,
            violations=[Violation("pools[0].pages", "at least 1")],
        )
        async with serving(raising(raised)) as served:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.call("UnaryUnary")
            error = error_from(caught.value)
        assert type(error) is type(raised)
        assert caught.value.code().name == raised.code == error.code
        assert caught.value.details() == raised.message == error.message
        assert error.metadata == {"room": "9223372036854775807", "rank": "P/dp0"}
        assert error.retry_after == 1.25
        assert error.violations == (Violation("pools[0].pages", "at least 1"),)

    @pytest.mark.parametrize("method", METHODS)
    async def test_they_arrive_in_every_arity(self, method: str) -> None:
        async with serving(raising(RoomNotFound("no room 7", metadata={"room": 7}))) as served:
            error = await served.failure(method)
            assert isinstance(error, RoomNotFound)
            assert error.metadata == {"room": "7"}
            served.servicer.act = raising(WarmingUp("wait", retry_after=0.5))
            again = await served.failure(method)
            assert isinstance(again, WarmingUp), "a failed call leaves the server as it was"

    @pytest.mark.parametrize("method", ["UnaryStream", "UnaryGenerator", "StreamStream", "StreamGenerator"])
    async def test_responses_before_the_failure_arrive_first(self, method: str) -> None:
        async with serving(raising(RoomNotFound("no room 7"))) as served:
            call = served.start(method)
            assert (await call.read()).value == "hello"
            assert isinstance(await failure(responses_of(call)), RoomNotFound)

    async def test_one_reason_with_two_codes_is_two_exceptions(self) -> None:
        async with serving(raising(OldShapeStillLeased("held", retry_after=7.0))) as served:
            error = await served.failure("UnaryUnary")
        assert type(error) is OldShapeStillLeased
        assert (error.code, error.retry_after) == ("UNAVAILABLE", 7.0)

    async def test_the_synchronous_api_decodes_them_too(self) -> None:
        async with serving(raising(RoomNotFound("no room 7", metadata={"room": 7}))) as served:

            def call() -> KvGrpcError:
                with grpc.insecure_channel(served.address) as channel:
                    method: Any = channel.unary_unary(f"/{SERVICE}/UnaryUnary")
                    try:
                        method(b"", timeout=10)
                    except grpc.RpcError as error:
                        return error_from(error)
                raise AssertionError("the call did not fail")

            error = await asyncio.to_thread(call)
        assert isinstance(error, RoomNotFound)
        assert error.metadata == {"room": "7"}

    @pytest.mark.parametrize(
        "error",
        [
            RoomNotFound("€" * 1_000_000),
            RoomNotFound("%\n" * 1_000_000),
            RoomNotFound("lone surrogate \udcff"),
            RoomNotFound("x", metadata={f"key{number}" * 20: "€" * 100_000 for number in range(1000)}),
            RoomNotFound("x", violations=[Violation("f" * 10_000, "d" * 10_000)] * 1000),
            RoomNotFound(
                "€" * 5000,
                metadata={str(number): "m" * 500 for number in range(50)},
                violations=[Violation("f" * 100, "d" * 100)] * 50,
            ),
        ],
        ids=["long text", "text to escape", "surrogate", "metadata", "violations", "everything"],
    )
    async def test_what_does_not_fit_is_cut_and_the_reason_stays(self, error: KvGrpcError) -> None:
        async with serving(raising(error)) as served:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.call("UnaryUnary")
        assert isinstance(error_from(caught.value), RoomNotFound)
        trailing = dict([*caught.value.trailing_metadata()])  # an older grpcio has it as no real mapping
        assert len(trailing[DETAILS_KEY]) <= 4096
        assert len((caught.value.details() or "").encode()) <= 1024


class TestBugs:
    @pytest.mark.parametrize("method", METHODS)
    async def test_an_unknown_exception_is_internal_without_its_text(
        self, method: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serving(raising(ZeroDivisionError("secret path /etc/kvgrpc"))) as served:
            error = await served.failure(method)
        assert isinstance(error, Internal)
        assert "secret" not in error.message
        records = [record for record in caplog.records if error.metadata["requestId"] in record.getMessage()]
        assert len(records) == 1
        assert records[0].exc_info and isinstance(records[0].exc_info[1], ZeroDivisionError)
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == records

    @pytest.mark.parametrize("method", METHODS)
    async def test_a_cancelled_await_inside_a_servicer_is_answered(self, method: str) -> None:
        async def act(context: Context) -> None:
            task = asyncio.ensure_future(asyncio.sleep(3600))  # for ever
            asyncio.get_running_loop().call_soon(task.cancel)
            await task

        async with serving(act) as served:
            assert isinstance(await served.failure(method, timeout=5.0), Internal)

    @pytest.mark.parametrize("method", ARITIES)
    async def test_bytes_that_are_no_message_are_an_invalid_request(
        self, method: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with serving() as served:
            error = await served.failure(method, b"\xff\xff\xff")
        assert isinstance(error, InvalidRequest)
        assert served.servicer.begun == [] or method == "StreamStream"
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []

    @pytest.mark.parametrize("method", ["UnaryStream", "StreamStream"])
    async def test_a_write_that_fails_while_the_caller_is_there_is_a_bug_that_is_answered(
        self, method: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def act(context: Context) -> None:  # as the library says of two writes at once, on some days
            raise grpc.aio.InternalError("too many operations")

        async with serving(act) as served:
            error = await served.failure(method, timeout=5.0)
        assert isinstance(error, Internal)
        assert sum(error.metadata["requestId"] in record.getMessage() for record in caplog.records) == 1

    async def test_a_blocking_servicer_is_refused_instead_of_stopping_the_loop(self) -> None:
        def blocking(request: Any, context: Any) -> Any:
            return request

        async with serving() as served:
            handler: Any = grpc.unary_unary_rpc_method_handler(blocking)
            served.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Sync", {"A": handler}),))
            error = await failure(served.channel.unary_unary("/test.Sync/A")(b"", timeout=5))
            assert error.code == "UNKNOWN"
            assert await served.call("UnaryUnary") == ["hello"]


class TestCallersThatLeave:
    @pytest.mark.parametrize("method", METHODS)
    async def test_the_servicer_is_cancelled_and_nothing_is_logged(
        self, method: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        before = counted(method, "CANCELLED")
        async with serving(for_ever) as served:
            call = served.start(method)
            await until(lambda: served.servicer.begun)
            call.cancel()
            await until(lambda: served.servicer.ended)
            await until(lambda: counted(method, "CANCELLED") == before + 1)
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []

    @pytest.mark.parametrize("method", METHODS)
    async def test_a_deadline_ends_the_servicer_too(self, method: str, caplog: pytest.LogCaptureFixture) -> None:
        async with serving(for_ever) as served:
            timeout = 0.2
            while not served.servicer.begun:  # before the deadline, which a busy machine may miss
                error = await served.failure(method, timeout=timeout)
                assert (error.reason, error.code) == (Reason.UNSPECIFIED, "DEADLINE_EXCEEDED")
                timeout *= 2
            await until(lambda: served.servicer.ended)
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []

    @pytest.mark.parametrize("method", ["UnaryStream", "UnaryGenerator"])
    async def test_leaving_while_responses_are_written_is_no_bug(
        self, method: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def write_much(context: Context) -> None:
            while True:
                await context.write(StringValue(value="x" * 100_000))

        async with serving(write_much) as served:
            for _ in range(20):
                call = served.start(method)
                await call.read()
                await call.read()
                call.cancel()
            await until(lambda: len(served.servicer.ended) == 20)
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []

    @pytest.mark.parametrize("method", METHODS)
    async def test_without_knowing_who_cancelled_the_call_ends_as_well(
        self, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As on Python 3.10."""
        monkeypatch.setattr("kvgrpc.rpc.interceptors.errors._CAN_TELL", False)
        async with serving(for_ever) as served:
            call = served.start(method)
            await until(lambda: served.servicer.begun)
            call.cancel()
            await until(lambda: served.servicer.ended)
            served.servicer.act = raising(asyncio.CancelledError())
            assert isinstance(await served.failure(method), Internal)
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


class TestDeadline:
    @pytest.fixture(autouse=True)
    def short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deadline, "DEFAULT_SECONDS", 0.1)

    async def test_a_unary_call_without_one_gets_one(self) -> None:
        async with serving(for_ever) as served:
            error = await served.failure("UnaryUnary", timeout=None)
            assert (error.reason, error.code) == (Reason.CALL_TOO_LONG, "DEADLINE_EXCEEDED")
            assert error.metadata == {"method": f"/{SERVICE}/UnaryUnary", "limitMs": "100"}

    async def test_a_callers_own_may_be_longer(self) -> None:
        async def act(context: Context) -> None:
            await asyncio.sleep(0.3)  # the long call itself

        async with serving(act) as served:
            assert await served.call("UnaryUnary", timeout=5.0) == ["hello"]

    async def test_streams_need_none(self) -> None:
        async def act(context: Context) -> None:
            await asyncio.sleep(0.3)  # the long call itself

        async with serving(act) as served:
            assert await served.call("UnaryStream", timeout=None) == ["hello", "hello"]


class TestAdmission:
    @pytest.mark.parametrize(
        ("method", "limit", "scope"),
        [(name, "1", f"{'streams' if number else 'calls'} of one caller") for number, name in enumerate(METHODS)],
    )
    async def test_past_the_bound_calls_are_refused_with_the_time_to_wait(
        self, method: str, limit: str, scope: str
    ) -> None:
        async with serving(for_ever, admission=Admission(CallLimits(unary=3, streams=3))) as served:
            running = [served.start(method) for _ in range(2)]
            await until(lambda: len(served.servicer.begun) == 2)
            error = await served.failure(method)
            assert isinstance(error, TooManyRequests)
            assert error.metadata == {"limit": limit, "value": "3", "scope": scope}
            assert error.retry_after == RETRY_SECONDS
            running[0].cancel()
            await until(lambda: len(served.servicer.ended) == 1)
            running.append(served.start(method))  # a call that nobody holds is cancelled
            await until(lambda: len(served.servicer.begun) == 3)

    async def test_calls_and_streams_are_counted_apart(self) -> None:
        async with serving(for_ever, admission=Admission(CallLimits(unary=1, streams=1))) as served:
            running = [served.start("StreamStream")]
            await until(lambda: len(served.servicer.begun) == 1)
            running.append(served.start("UnaryUnary"))
            await until(lambda: len(served.servicer.begun) == 2)


class TestMethodsThatAreNotServed:
    @pytest.mark.parametrize("path", sorted(ALLOWED))
    async def test_a_method_of_ours_says_that_another_process_serves_it(self, path: str) -> None:
        async with serving() as served:
            for call in (
                served.channel.unary_unary(path)(b"", timeout=5),
                responses_of(served.channel.stream_stream(path)(timeout=5)),
            ):
                error = await failure(call)
                assert isinstance(error, FeatureDisabled)
                assert error.metadata["feature"] == path.split("/")[1]

    async def test_any_other_is_the_librarys_unimplemented(self) -> None:
        async with serving() as served:
            error = await failure(served.channel.unary_unary("/foreign.Service/Method")(b"", timeout=5))
        assert (error.reason, error.code) == (Reason.UNSPECIFIED, "UNIMPLEMENTED")


class TestForeignStatuses:
    """What other servers and newer versions of ours may send."""

    async def sent(self, code: grpc.StatusCode, text: str, details: bytes) -> KvGrpcError:
        async def act(context: Context) -> None:
            await context.abort(code, text, ((DETAILS_KEY, details),))

        async with serving(act) as served:
            return await served.failure("UnaryUnary")

    def status(self, *details: Any) -> bytes:
        packed = []
        for detail in details:
            packed.append(AnyMessage())
            packed[-1].Pack(detail)
        serialized: bytes = status_pb2.Status(code=5, message="text", details=packed).SerializeToString()
        return serialized

    async def test_a_reason_of_a_newer_version_keeps_its_name_and_code(self) -> None:
        info = error_details_pb2.ErrorInfo(
            reason="ERROR_REASON_FROM_THE_FUTURE", domain="kvgrpc.dev", metadata={"key": "value"}
        )
        error = await self.sent(grpc.StatusCode.NOT_FOUND, "text", self.status(info))
        assert type(error) is KvGrpcError
        assert error.code == "NOT_FOUND"
        assert error.metadata == {"key": "value", "reason": "ERROR_REASON_FROM_THE_FUTURE"}

    async def test_the_reason_of_another_domain_is_not_ours(self) -> None:
        info = error_details_pb2.ErrorInfo(reason="ERROR_REASON_ROOM_NOT_FOUND", domain="example.com")
        error = await self.sent(grpc.StatusCode.NOT_FOUND, "text", self.status(info))
        assert (error.reason, error.code, error.message) == (Reason.UNSPECIFIED, "NOT_FOUND", "text")

    async def test_details_that_are_no_message_are_ignored(self) -> None:
        error = await self.sent(grpc.StatusCode.ABORTED, "text", b"\xff\xff\xff")
        assert (error.reason, error.code, error.message) == (Reason.UNSPECIFIED, "ABORTED", "text")

    async def test_a_detail_that_is_no_message_is_ignored(self) -> None:
        broken = AnyMessage(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff\xff")
        details = status_pb2.Status(code=5, details=[broken]).SerializeToString()
        error = await self.sent(grpc.StatusCode.ABORTED, "text", details)
        assert (error.reason, error.code) == (Reason.UNSPECIFIED, "ABORTED")

    async def test_a_text_that_a_proxy_changed_does_not_hide_the_reason(self) -> None:
        info = error_details_pb2.ErrorInfo(reason="ERROR_REASON_ROOM_NOT_FOUND", domain="kvgrpc.dev")
        error = await self.sent(grpc.StatusCode.NOT_FOUND, "another text", self.status(info))
        assert isinstance(error, RoomNotFound)


class TestTelemetry:
    @pytest.mark.parametrize("method", METHODS)
    async def test_every_call_is_counted_once_by_method_and_code(self, method: str) -> None:
        good, bad = counted(method, "OK"), counted(method, "NOT_FOUND")
        async with serving() as served:
            await served.call(method)
            served.servicer.act = raising(RoomNotFound("x"))
            await served.failure(method)
            await until(lambda: (counted(method, "OK"), counted(method, "NOT_FOUND")) == (good + 1, bad + 1))
        in_flight = metrics.REGISTRY.get_sample_value("kvgrpc_rpc_in_flight", {"method": f"/{SERVICE}/{method}"})
        assert in_flight == 0
