"""ListCallers says who has something open at a process, and how far behind its readers are."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import pytest

from kvgrpc.client import Client
from kvgrpc.errors import InvalidRequest
from kvgrpc.model import Layout
from kvgrpc.observability.metrics import REGISTRY
from kvgrpc.rpc.callers import Who
from kvgrpc.rpc.dialing.channel import open_channel
from kvgrpc.rpc.interceptors import Admission, OpenCalls
from kvgrpc.rpc.interceptors.call import Method
from kvgrpc.rpc.security import ClientSecurity, ServerSecurity
from kvgrpc.server import RegistryServer
from kvgrpc.server.port.callers import CallerHere, CallersHere
from kvgrpc.v1 import registry_service_pb2 as registry_pb
from kvgrpc.v1 import server_service_pb2 as pb
from kvgrpc.v1.common_pb2 import ROLE_PREFILL
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceStub
from kvgrpc.v1.server_service_pb2_grpc import ServerServiceStub
from tests.support.event_serving import HEARTBEAT, SNAPSHOT, TAIL, Served, served
from tests.support.registry_builders import ranks
from tests.support.registry_serving import failure, request_of
from tests.support.secrets import proof, tokens_of
from tests.support.waiting import until

TOKENS = "rank P*:ranks\nconsumer router-a:router\noperator:boss"
SERVICE = "/kvgrpc.v1.RegistryService/"


@pytest.fixture
async def registry() -> AsyncIterator[RegistryServer]:
    made = await asyncio.to_thread(RegistryServer(["127.0.0.1:0"], ServerSecurity(tokens=tokens_of(TOKENS))).open)
    yield made
    await asyncio.to_thread(made.close)


async def callers(address: str, security: ClientSecurity | None = None) -> dict[str, pb.Caller]:
    async with Client(address, security) as client:
        return {caller.name: caller for caller in await client.list_callers()}


async def test_each_caller_has_its_role_its_calls_its_rows_and_what_it_reads(registry: RegistryServer) -> None:
    address = registry.address
    async with open_channel(address, proof("ranks")) as channel, Client(address, proof("router")) as router:
        stub = RegistryServiceStub(channel)
        await stub.Register(request_of(*ranks(Layout(tp=3))), timeout=10)
        wait = registry_pb.ResolveRanksRequest(engine="P-2", role=ROLE_PREFILL, wait_ready=True)
        waiting = stub.ResolveRanks(wait, timeout=60)
        watching = router.watch_engines()
        await anext(watching)
        await until(lambda: registry._servicer._waiters.count == 1)
        found = await callers(address, proof("boss"))
        assert found.keys() == {"rank P*", "consumer router-a"}  # looking at it is not counted
        rank, reader = found["rank P*"], found["consumer router-a"]
        assert (rank.role, rank.address, rank.rows) == (pb.CALLER_ROLE_RANK, "127.0.0.1", 3)
        assert (rank.open_calls, rank.open_streams) == (1, 0)
        assert [(each.method, each.open) for each in rank.methods] == [(f"{SERVICE}ResolveRanks", 1)]
        assert (reader.role, reader.rows, reader.open_streams) == (pb.CALLER_ROLE_CONSUMER, 0, 1)
        assert [(each.method, each.behind, each.HasField("behind")) for each in reader.readers] == [
            (f"{SERVICE}WatchEngines", 0, True)
        ]
        waiting.cancel()
        await watching.aclose()  # type: ignore[attr-defined]  # it is an async generator
        await until(lambda: not registry._listener.admission.open_calls)
        left = await callers(address, proof("boss"))
        assert [(caller.name, caller.rows, len(caller.methods)) for caller in left.values()] == [("rank P*", 3, 0)]


async def test_they_come_in_pages(registry: RegistryServer) -> None:
    address = registry.address
    router = Client(address, proof("router"))
    watching = router.watch_engines()
    await anext(watching)
    async with open_channel(address, proof("ranks")) as channel:
        await RegistryServiceStub(channel).Register(request_of(*ranks(Layout())), timeout=10)
    async with open_channel(address, proof("boss")) as channel:
        stub, found, token = ServerServiceStub(channel), list[str](), ""
        while not found or token:
            request = pb.ListCallersRequest(page_size=1, page_token=token)
            page = await stub.ListCallers(request, timeout=10)
            found += [caller.name for caller in page.callers]
            token = page.next_page_token
        assert found == ["consumer router-a", "rank P*"]
        wrong = pb.ListCallersRequest(page_token="nobody's")
        assert isinstance(await failure(stub.ListCallers(wrong, timeout=10)), InvalidRequest)
    await watching.aclose()  # type: ignore[attr-defined]  # it is an async generator
    await router.close()


async def test_callers_are_gathered_once_for_all_pages_of_a_list(registry: RegistryServer) -> None:
    address = registry.address
    async with open_channel(address, proof("ranks")) as channel, Client(address, proof("router")) as router:
        await RegistryServiceStub(channel).Register(request_of(*ranks(Layout())), timeout=10)
        watching = router.watch_engines()
        await anext(watching)
        admission = registry._listener.admission
        here = CallersHere(admission, [registry._servicer.readers], registry._servicer.store.rows_by_owner)
        first, after = await here.page("", 1, True)
        await watching.aclose()  # type: ignore[attr-defined]  # it is an async generator
        await until(lambda: not admission.open_calls)
        second, end = await here.page(after, 1, True)
        assert ([each.name for each in first + second], end) == (["consumer router-a", "rank P*"], "")
        assert [each.name for each in (await here.page("", 2, True))[0]] == ["rank P*"]  # a new list looks again


async def test_one_that_ends_while_callers_are_gathered_is_not_told_with_nothing_open() -> None:
    method, going = Method("/kvgrpc.v1.TransferService/ListRooms", False), Who("goes", "127.0.0.1", None)
    admission = Admission()

    class Ending(OpenCalls):
        """Between two pieces the other call ends."""

        def copy(self) -> OpenCalls:
            admission._end(going, method)
            return super().copy()

    admission._open = {Who("stays", "127.0.0.1", None): Ending(), going: OpenCalls()}
    for calls in admission._open.values():
        calls.add(method, 1)
    found, _ = await CallersHere(admission).page("", 10, False)
    assert [(each.name, each.open_calls) for each in found] == [("stays", 1)]


async def test_of_lists_that_begin_one_after_the_other_only_the_last_is_kept() -> None:
    here, kept = CallersHere(Admission()), list[weakref.ref[object]]()

    class Listed(list[CallerHere]):
        """A list that tells when it is forgotten."""

    async def look(authenticates: bool) -> list[CallerHere]:
        listed = Listed()
        kept.append(weakref.ref(listed))
        return listed

    here._now = look  # type: ignore[method-assign]
    for _ in range(5):
        await here.page("", 1, False)
    gc.collect()
    assert [each() is not None for each in kept] == [False] * 4 + [True]


async def test_a_reader_of_events_is_behind_by_what_it_was_not_sent() -> None:
    async with served() as events:
        call = events.watch(TAIL)
        await call.read()
        await until(lambda: behind(events) == [0])
        await events.publish(*[bytes(100_000)] * 200)  # more than a connection takes unread
        (unsent,) = behind(events)
        assert unsent
        assert REGISTRY.get_sample_value("kvgrpc_event_watch_lag_batches")
        read = 0
        while read < 200:
            read += len((await call.read()).raw.payloads)
        await until(lambda: behind(events) == [0])
        call.cancel()
        await until(lambda: behind(events) == [])


async def test_who_takes_heartbeats_or_awaits_a_snapshot_is_behind_nothing() -> None:
    async with served(heartbeat=0.05) as events:
        await events.publish(b"one")
        call = events.watch(HEARTBEAT)
        for _ in range(2):
            await call.read()
        assert behind(events) == [None]
        call.cancel()
        await until(lambda: not behind(events))
        call = events.watch(SNAPSHOT)
        while (await call.read()).WhichOneof("kind") != "heartbeat":
            continue
        assert behind(events) == [0]


def behind(events: Served) -> list[int | None]:
    return [reader.behind for reader in events.servicer.readers()]
