"""A server's life: how it binds, what its health and reflection say, how it drains and how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.wrappers_pb2 import StringValue
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvgrpc.client import Client
from kvgrpc.errors import AddressNotAllowed, Internal, InvalidRequest, KvGrpcError, ServerDraining
from kvgrpc.observability import metrics
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.interceptors import Admission
from kvgrpc.server.port import listener as listener_module
from kvgrpc.server.port.listener import Listener
from kvgrpc.v1 import server_service_pb2
from kvgrpc.v1.server_service_pb2_grpc import ServerServiceStub
from tests.support.listening import (
    NOT_SERVING,
    SERVER_SERVICE,
    SERVING,
    House,
    channel,
    house,
    next_status,
    refuses,
    status,
    watch,
)
from tests.support.serving import SERVICE, Context, begin, failure, once, responses_of, serving
from tests.support.waiting import until

__all__ = ["channel", "house"]


class TestBinding:
    async def test_port_0_is_read_back_and_several_addresses_serve_the_same(self, tmp_path: Path) -> None:
        house = await House().open("127.0.0.1:0", "127.0.0.1:0", f"unix:{tmp_path}/admin")
        assert len(set(house.bound)) == 3
        for address in house.bound:
            assert not address.endswith(":0")
            async with open_channel(address) as channel:
                assert await responses_of(begin(channel, f"/{SERVICE}/UnaryUnary")) == ["hello"]
        await house.listener.stop(0.0)

    async def test_a_second_server_on_the_port_is_refused_and_the_first_serves_on(
        self, house: House, channel: Any
    ) -> None:
        with pytest.raises(AddressNotAllowed) as caught:
            await House().open(house.address)
        assert caught.value.metadata == {"address": house.address, "configKey": "listen"}
        assert house.address in caught.value.message
        for _ in range(20):
            assert await responses_of(begin(channel, f"/{SERVICE}/UnaryUnary")) == ["hello"]

    @pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
    async def test_a_name_is_taken_when_one_of_its_addresses_is(self, family: int) -> None:
        with socket.socket(family) as other:
            try:
                other.bind(("localhost", 0))
            except OSError:
                pytest.skip("this host has no such loopback address")
            other.listen()
            with pytest.raises(AddressNotAllowed):
                await House().open(f"localhost:{other.getsockname()[1]}")

    async def test_a_listener_that_could_not_bind_all_lets_go_of_the_others(self, house: House) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = f"127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(AddressNotAllowed):
            await House().open(free, house.address)
        again = await House().open(free)
        await again.listener.stop(0.0)

    @pytest.mark.parametrize("address", ["127.0.0.1:99999", "nonsense", "192.0.2.1:0", "unix:/nowhere/at/all", ""])
    async def test_an_address_that_cannot_be_bound_is_named(self, address: str) -> None:
        with pytest.raises(AddressNotAllowed):
            await House().open(address)

    async def test_own_connections_are_connections_of_their_own(self, house: House) -> None:
        peers = []

        async def remember(context: Context) -> None:
            peers.append(context.peer())

        house.servicer.act = remember
        channels = [open_channel(house.address, own_connection=own) for own in (False, False, True, True)]
        for each in channels:
            await responses_of(begin(each, f"/{SERVICE}/UnaryUnary"))
        for each in channels:
            await each.close()
        assert peers[0] == peers[1]
        assert len(set(peers)) == 3


class TestUnixSockets:
    async def test_the_file_is_for_its_owner_only_and_goes_with_the_server(self, tmp_path: Path) -> None:
        path = tmp_path / "socket"
        house = await House().open(f"unix:{path}")
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        async with open_channel(house.address) as channel:
            assert await responses_of(begin(channel, f"/{SERVICE}/UnaryUnary")) == ["hello"]
        await house.listener.stop(0.0)
        await until(lambda: not path.exists())

    @pytest.mark.parametrize("form", ["unix:{}", "unix://{}"])
    async def test_a_second_server_on_the_file_is_refused_and_the_first_serves_on(
        self, tmp_path: Path, form: str
    ) -> None:
        house = await House().open(f"unix:{tmp_path}/socket")
        with pytest.raises(AddressNotAllowed):
            await House().open(form.format(f"{tmp_path}/socket"))
        async with open_channel(house.address) as channel:
            assert await responses_of(begin(channel, f"/{SERVICE}/UnaryUnary")) == ["hello"]
        await house.listener.stop(0.0)

    async def test_the_file_of_a_dead_server_is_replaced(self, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(f"{tmp_path}/socket")
        house = await House().open(f"unix:{tmp_path}/socket")
        async with open_channel(house.address) as channel:
            assert await responses_of(begin(channel, f"/{SERVICE}/UnaryUnary")) == ["hello"]
        await house.listener.stop(0.0)

    @pytest.mark.parametrize(
        ("name", "why"), [("nowhere/socket", "No such file"), ("a" * 120, "too long"), ("", "is a directory")]
    )
    async def test_a_file_that_cannot_be_made_is_refused_with_the_reason(
        self, tmp_path: Path, name: str, why: str
    ) -> None:
        with pytest.raises(AddressNotAllowed, match=why) as refused:
            await House().open(f"unix:{tmp_path}/{name}")
        assert "port 0" not in refused.value.message

    async def test_a_file_that_is_no_socket_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "precious").write_text("data")
        with pytest.raises(AddressNotAllowed):
            await House().open(f"unix:{tmp_path}/precious")
        assert (tmp_path / "precious").read_text() == "data"


class TestHealth:
    async def test_each_service_has_a_status_and_the_empty_name_stands_for_all(
        self, house: House, channel: Any
    ) -> None:
        for service in ("", SERVICE, SERVER_SERVICE):
            assert await status(channel, service) == SERVING
        assert (await failure(status(channel, "no.Such"))).code == "NOT_FOUND"
        seen = watch(channel, SERVICE)
        assert await next_status(seen) == SERVING
        house.well = False
        assert await next_status(seen) == NOT_SERVING
        assert [await status(channel, service) for service in ("", SERVER_SERVICE)] == [NOT_SERVING, SERVING]
        house.well = True
        assert await next_status(seen) == SERVING
        assert await status(channel) == SERVING

    async def test_it_follows_what_a_service_stands_on(self, caplog: pytest.LogCaptureFixture) -> None:
        alive: list[Callable[[], bool]] = [lambda: True]
        house = await House(health_checks={SERVICE: lambda: alive[0]()}).open()

        def crash() -> bool:
            raise ZeroDivisionError("inside the check")

        async with open_channel(house.address) as channel:
            seen, others = watch(channel, SERVICE), watch(channel, SERVER_SERVICE)
            assert await next_status(seen) == SERVING
            assert await next_status(others) == SERVING
            for dead in (lambda: False, crash):
                alive[0] = dead
                assert await next_status(seen) == NOT_SERVING
                assert await status(channel) == NOT_SERVING
                assert await status(channel, SERVER_SERVICE) == SERVING
                alive[0] = lambda: True
                assert await next_status(seen) == SERVING
        await house.listener.stop(0.0)
        records = [record for record in caplog.records if "health check" in record.getMessage()]
        assert len(records) == 2, "a check that fails is logged once, not twice a second"

    async def test_a_watcher_that_goes_away_or_does_not_read_keeps_no_other_from_hearing(
        self, house: House, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listener_module, "_LOOK_SECONDS", 0.005)
        channels: list[Any] = [open_channel(house.address, own_connection=True) for _ in range(3)]
        leaves, sleeps, hears = (watch(channel, SERVICE) for channel in channels)
        for call in (leaves, sleeps, hears):
            assert await next_status(call) == SERVING
        leaves.cancel()
        for serves in [False, True] * 50:
            house.well = serves
            assert await next_status(hears) == (SERVING if serves else NOT_SERVING)
        await channels[0].close()
        house.well = False
        assert await next_status(hears) == NOT_SERVING
        for each in channels:
            await each.close()

    async def test_a_watcher_of_an_unknown_service_is_told_so(self, channel: Any) -> None:
        assert await next_status(watch(channel, "no.Such")) == "SERVICE_UNKNOWN"


class TestReflection:
    async def test_it_lists_the_services_and_describes_them_with_json_names(self, channel: Any) -> None:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def ask(**question: Any) -> Any:
            request = reflection_pb2.ServerReflectionRequest(**question)
            return await stub.ServerReflectionInfo(once(request), timeout=5).read()

        listed = await ask(list_services="")
        names = {service.name for service in listed.list_services_response.service}
        reflection = "grpc.reflection.v1alpha.ServerReflection"
        assert names == {SERVICE, SERVER_SERVICE, "grpc.health.v1.Health", reflection}
        described = await ask(file_containing_symbol=SERVER_SERVICE)
        files = [
            FileDescriptorProto.FromString(raw) for raw in described.file_descriptor_response.file_descriptor_proto
        ]
        fields = {field.json_name for file in files for message in file.message_type for field in message.field}
        assert {"startTime", "openRooms"} <= fields


class TestServerInfo:
    async def test_it_says_who_this_is(self, house: House, channel: Any) -> None:
        info = await ServerServiceStub(channel).GetServerInfo(server_service_pb2.GetServerInfoRequest(), timeout=5)
        assert (info.version, info.rank.rank.engine, info.rank.epoch, info.pid) == ("1.2.3", "P", 7, os.getpid())
        assert list(info.services) == [SERVICE, SERVER_SERVICE]
        assert info.limits.rank.max_rooms == 9
        assert abs(info.start_time.ToNanoseconds() / 1e9 - time.time()) < 30
        assert not info.draining

    async def test_a_drain_from_elsewhere_shows_too(self, house: House, channel: Any) -> None:
        await house.listener.drain()
        info = await ServerServiceStub(channel).GetServerInfo(server_service_pb2.GetServerInfoRequest(), timeout=5)
        assert info.draining


class TestDrain:
    async def test_health_says_so_and_calls_are_still_served(self, house: House, channel: Any) -> None:
        seen = watch(channel)
        assert await next_status(seen) == SERVING
        await house.listener.drain()
        assert await next_status(seen) == NOT_SERVING
        assert [await status(channel, name) for name in (SERVICE, SERVER_SERVICE)] == [NOT_SERVING] * 2
        assert await responses_of(begin(channel, f"/{SERVICE}/StreamStream")) == ["hello"]

    async def test_it_answers_what_is_left_when_the_grace_is_over(self, house: House) -> None:
        async with Client(house.address) as client:
            answer = await client.drain(grace=0.05)
            assert (answer.drained, answer.open_rooms) == (False, 3)
            assert (await client.get_server_info()).draining
            house.machine.rooms_ended.set()
            answer = await client.drain(grace=0.05)
            assert (answer.drained, answer.open_rooms) == (True, 0)

    async def test_callers_at_the_same_time_share_one_drain(self, house: House) -> None:
        async with Client(house.address) as client:
            calls = [asyncio.ensure_future(client.drain(grace=20.0)) for _ in range(3)]
            await until(lambda: house.drains.waiting == 3)
            house.machine.rooms_ended.set()
            assert all(answer.drained for answer in await asyncio.gather(*calls))
        assert house.machine.graces == [20.0]

    @pytest.mark.parametrize(
        ("seconds", "nanos"), [(-1, 0), (3601, 0), (3600, 1), (10**12, 0), (1, -5), (0, -1), (0, 10**9), (-1, 5)]
    )
    async def test_a_grace_that_cannot_be_is_refused(
        self, house: House, channel: Any, seconds: int, nanos: int
    ) -> None:
        request = server_service_pb2.DrainRequest()
        request.grace.seconds, request.grace.nanos = seconds, nanos
        error = await failure(ServerServiceStub(channel).Drain(request, timeout=10))
        assert isinstance(error, InvalidRequest) and error.metadata["field"] == "grace"
        assert not house.machine.graces

    async def test_a_caller_that_leaves_does_not_end_it(self, house: House, channel: Any) -> None:
        call = ServerServiceStub(channel).Drain(server_service_pb2.DrainRequest(), timeout=10)
        await until(lambda: house.machine.graces)
        call.cancel()
        await until(lambda: drains_in_flight() == 0)
        async with Client(house.address) as client:
            waiting = asyncio.ensure_future(client.drain())
            await until(lambda: house.drains.waiting == 1)
            house.machine.rooms_ended.set()
            assert (await waiting).drained
        assert house.machine.graces == [30.0], "the second caller waited for what the first had begun"

    async def test_one_that_failed_may_be_tried_again(self, house: House) -> None:
        house.machine.fails = ZeroDivisionError()
        house.machine.rooms_ended.set()
        async with Client(house.address) as client:
            with pytest.raises(Internal):
                await client.drain()
            house.machine.fails = None
            assert (await client.drain()).drained


class TestStop:
    @pytest.mark.parametrize("method", ["UnaryStream", "UnaryGenerator", "StreamUnary", "StreamStream"])
    async def test_a_stream_without_end_is_ended_and_told_why(self, method: str) -> None:
        house = await House().open()
        house.servicer.act = for_ever
        async with open_channel(house.address) as channel:
            call = begin(channel, f"/{SERVICE}/{method}", timeout=None)
            await until(lambda: house.servicer.begun)
            began = time.monotonic()
            assert await house.listener.stop(10.0)
            assert time.monotonic() - began < 8.0, "the grace is for unary calls"
            assert isinstance(await failure(responses_of(call)), ServerDraining)
        assert house.servicer.ended == [method]

    async def test_a_bidirectional_stream_whose_caller_is_silent_is_ended_too(self) -> None:
        house = await House().open()
        async with open_channel(house.address) as channel:
            call: Any = channel.stream_stream(f"/{SERVICE}/StreamStream")()
            await call.write(b"")
            assert await call.read() == b""
            assert await house.listener.stop(10.0)
            assert isinstance(await failure(call.read()), ServerDraining)

    async def test_a_stream_that_is_just_writing_its_first_response_is_told_why(self) -> None:
        admission = Admission()

        async def write_while_it_ends(context: Context) -> None:
            admission.end_streams()
            await context.write(StringValue())

        async with serving(write_while_it_ends, admission=admission) as served:
            call = served.channel.stream_stream(f"/{SERVICE}/StreamStream")()
            await call.done_writing()
            assert await call.read() == b""
            assert isinstance(await failure(call.read()), ServerDraining)

    async def test_a_health_watcher_is_told_before(self) -> None:
        house = await House().open()
        async with open_channel(house.address) as channel:
            call = watch(channel)
            assert await next_status(call) == SERVING
            assert await house.listener.stop(1.0)
            last = await failure(drain_statuses(call))
            assert isinstance(last, ServerDraining)

    async def test_unary_calls_have_the_grace_to_end(self) -> None:
        house = await House().open()
        go_on = asyncio.Event()

        async def wait(context: Context) -> None:
            await go_on.wait()

        house.servicer.act = wait
        async with open_channel(house.address) as channel:
            call = asyncio.ensure_future(responses_of(begin(channel, f"/{SERVICE}/UnaryUnary")))
            await until(lambda: house.servicer.begun)
            stopping = asyncio.ensure_future(house.listener.stop(10.0))
            await until(lambda: refuses(house.address))
            assert not call.done()
            go_on.set()
            assert await call == ["hello"]
            assert await stopping

    async def test_after_the_grace_they_are_ended(self) -> None:
        house = await House().open()
        house.servicer.act = for_ever
        async with open_channel(house.address) as channel:
            call = begin(channel, f"/{SERVICE}/UnaryUnary")
            await until(lambda: house.servicer.begun)
            assert await house.listener.stop(0.1)
            assert (await failure(responses_of(call))).code in ("UNAVAILABLE", "CANCELLED")

    async def test_a_servicer_that_never_ends_does_not_hold_it_up(self) -> None:
        house = await House().open()
        release = asyncio.Event()

        async def stubborn(context: Context) -> None:
            while not release.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await release.wait()

        house.servicer.act = stubborn
        async with open_channel(house.address) as channel:
            call = begin(channel, f"/{SERVICE}/StreamStream")
            await until(lambda: house.servicer.begun)
            try:
                assert await house.listener.stop(0.1), "the library ended it, it was not left behind"
                assert refuses(house.address)
            finally:
                release.set()
                await until(lambda: house.servicer.ended)
                call.cancel()

    async def test_a_library_that_never_ends_does_not_hold_it_up(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        house = await House().open()
        server = house.listener._server
        assert server is not None
        monkeypatch.setattr(listener_module, "_HARD_STOP_SECONDS", 0.2)
        monkeypatch.setattr(type(server), "stop", lambda self, grace: asyncio.sleep(3600))  # for ever
        began = time.monotonic()
        assert not await house.listener.stop(0.1)
        assert time.monotonic() - began < 10.0
        assert "left behind" in caplog.text
        monkeypatch.undo()
        await server.stop(0)

    async def test_it_may_be_repeated_and_come_before_the_start(self) -> None:
        assert await Listener().stop(0.0)
        house = await House().open()
        assert await house.listener.stop(0.0)
        assert await house.listener.stop(0.0)
        assert house.listener.draining

    async def test_the_port_can_be_bound_again_at_once(self) -> None:
        house = await House().open()
        async with open_channel(house.address) as channel:
            await responses_of(begin(channel, f"/{SERVICE}/UnaryUnary"))
            await house.listener.stop(0.0)
            again = await House().open(house.address)
            error: KvGrpcError | None = None
            for _ in range(100):
                try:
                    assert await responses_of(begin(channel, f"/{SERVICE}/UnaryUnary", timeout=2)) == ["hello"]
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.02)  # between two tries
            else:
                raise AssertionError(f"the channel does not come back: {error}")
            await again.listener.stop(0.0)


def drains_in_flight() -> float | None:
    return metrics.REGISTRY.get_sample_value("kvgrpc_rpc_in_flight", {"method": f"/{SERVER_SERVICE}/Drain"})


async def for_ever(context: Context) -> None:
    await asyncio.Event().wait()


async def drain_statuses(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_process_that_was_stopped_has_not_failed(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """What its checks look at lay still as long as it did."""
    house.well = "it lay still"
    asyncio.get_running_loop().call_soon(time.sleep, listener_module._LATE_SECONDS + 1.0)  # as in a stop
    await asyncio.sleep(0.2)  # the first look after it
    assert house.listener.serving()[SERVICE]
    house.well = True
    await asyncio.sleep(2 * listener_module._LOOK_SECONDS)  # looks that must find nothing
    assert not [message for message in caplog.messages if "health check" in message]


async def test_one_whose_every_look_comes_late_is_not_excused_for_ever(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that holds the interpreter is no process that was stopped once."""
    monkeypatch.setattr(listener_module, "_LATE_SECONDS", 0.0)
    house.well = "its thread has ended"
    await until(lambda: not house.listener.serving()[SERVICE])


async def test_a_check_that_fails_says_why_and_when_it_holds_again(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, listener_module.__name__)
    house.well = "its thread has ended"
    await until(lambda: not house.listener.serving()[SERVICE])
    house.well = True
    await until(lambda: house.listener.serving()[SERVICE])
    fails, holds = (message for message in caplog.messages if "health check" in message)
    assert fails == f"the health check of {SERVICE} fails: its thread has ended"
    assert holds.startswith(f"the health check of {SERVICE} holds again after ")
