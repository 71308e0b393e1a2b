"""The Python client: the same methods async and plain, answers as messages, errors as domain exceptions, no waiting."""

from __future__ import annotations

import asyncio
import inspect
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from kvgrpc.client import Begin, Client, Dropped, Heartbeat, Payloads, SyncClient
from kvgrpc.errors import (
    EngineNotFound,
    FeatureDisabled,
    KvGrpcError,
    PeerUnreachable,
    RoomNotFound,
    ServerDraining,
    StreamNotFound,
    WarmingUp,
)
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.server.port.listener import Listener
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import event_service_pb2 as events_pb
from kvgrpc.v1 import registry_service_pb2 as registry_pb
from kvgrpc.v1 import transfer_service_pb2 as transfer_pb
from kvgrpc.v1.event_service_pb2_grpc import EventServiceServicer, add_EventServiceServicer_to_server
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceServicer, add_RegistryServiceServicer_to_server
from kvgrpc.v1.transfer_service_pb2_grpc import TransferServiceServicer, add_TransferServiceServicer_to_server
from tests.support.waiting import until

not_needed: Any = None  # methods that no test here calls


class Registry(RegistryServiceServicer):
    """Three engines on two pages, of which the first call finds it warming up."""

    Register = KeepAlive = Deregister = WatchEngines = not_needed

    def __init__(self) -> None:
        self.calls = 0
        self.more = ""

    async def ListEngines(self, request: Any, context: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise WarmingUp("just started", retry_after=0.05)
        first = not request.page_token
        names = ["A", "B"] if first else ["C"]
        engines = [registry_pb.Engine(name=name, role=common_pb2.Role.ROLE_PREFILL) for name in names]
        more = self.more or ("more" if first else "")
        return registry_pb.ListEnginesResponse(engines=engines, next_page_token=more)

    async def GetEngine(self, request: Any, context: Any) -> Any:
        self.calls += 1
        if request.engine != "A":
            raise EngineNotFound(f"no engine {request.engine}", metadata={"engine": request.engine})
        row = registry_pb.RankRow(data_plane=request.page_token or "first")
        token = "" if request.page_token else "second"
        return registry_pb.GetEngineResponse(engine=registry_pb.Engine(name="A", rows=[row]), next_page_token=token)

    async def ResolveRanks(self, request: Any, context: Any) -> Any:
        if request.wait_ready:
            await asyncio.Event().wait()
        return registry_pb.ResolveRanksResponse(engine=registry_pb.Engine(name=request.engine))


class Transfer(TransferServiceServicer):
    Session = GetTopology = LocateRooms = not_needed

    async def ListSessions(self, request: Any, context: Any) -> Any:
        return transfer_pb.ListSessionsResponse(sessions=[transfer_pb.Session(address=request.page_token or "1")])

    async def ListRooms(self, request: Any, context: Any) -> Any:
        rooms = [transfer_pb.Room(room=number, held=request.held_only) for number in (1, 2**63 - 1)]
        return transfer_pb.ListRoomsResponse(rooms=rooms)

    async def GetRoom(self, request: Any, context: Any) -> Any:
        if request.room != 7:
            raise RoomNotFound("no such room", metadata={"room": request.room, "attempt": request.attempt})
        return transfer_pb.GetRoomResponse(room=transfer_pb.Room(room=7, attempt=request.attempt))

    async def CancelRoom(self, request: Any, context: Any) -> Any:
        return transfer_pb.CancelRoomResponse(room=transfer_pb.Room(room=request.room))

    async def GetRank(self, request: Any, context: Any) -> Any:
        return transfer_pb.GetRankResponse(data_plane="shm")


class Events(EventServiceServicer):
    """Stream A: every kind, then the end or (TAIL) silence."""

    def __init__(self) -> None:
        self.watches_ended = 0

    async def ListStreams(self, request: Any, context: Any) -> Any:
        return events_pb.ListStreamsResponse(streams=[events_pb.EventStream(engine="A")])

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[events_pb.WatchResponse]:
        try:
            if request.engine != "A":
                raise StreamNotFound("no such stream", metadata={"engine": request.engine})
            first = request.from_sequence
            yield events_pb.WatchResponse(
                begin=events_pb.WatchBegin(stream=events_pb.EventStream(engine="A"), first_sequence=first)
            )
            yield events_pb.WatchResponse(raw=events_pb.RawBatches(first_sequence=first, payloads=[b"1", b"2"]))
            yield events_pb.WatchResponse()  # a kind of a newer version
            yield events_pb.WatchResponse(dropped=events_pb.DroppedRange(first_sequence=9, last_sequence=9, cause="x"))
            yield events_pb.WatchResponse(heartbeat=events_pb.WatchHeartbeat(next_sequence=10))
            if request.mode == events_pb.WatchMode.WATCH_MODE_TAIL:
                await asyncio.Event().wait()
        finally:
            self.watches_ended += 1


class Process:
    """One listener with all of these."""

    def __init__(self) -> None:
        self.registry, self.events = Registry(), Events()
        self.listener = Listener()
        self.address = ""

    async def open(self) -> Process:
        (self.address,) = await self.listener.start(self._add, ["127.0.0.1:0"])
        return self

    def _add(self, server: grpc.aio.Server) -> Sequence[str]:
        add_RegistryServiceServicer_to_server(self.registry, server)
        add_TransferServiceServicer_to_server(Transfer(), server)
        add_EventServiceServicer_to_server(self.events, server)
        return ["kvgrpc.v1.RegistryService"]


@pytest.fixture
async def process() -> AsyncIterator[Process]:
    process = await Process().open()
    yield process
    await process.listener.stop(0.0)


@pytest.fixture
async def client(process: Process) -> AsyncIterator[Client]:
    async with Client(process.address, timeout=5.0) as client:
        yield client


@pytest.fixture
def elsewhere() -> Iterator[Process]:
    """The same for plain tests: it lives on the loop thread, as servers do."""
    loop = LoopThread.shared()
    process = loop.run(Process().open(), 10)
    yield process
    loop.run(process.listener.stop(0.0), 10)


@pytest.fixture
def nobody() -> str:
    """An address at which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


WATCHED = [
    Begin(events_pb.EventStream(engine="A"), 8),
    Payloads(8, (b"1", b"2")),
    Dropped(9, 9, "x"),
    Heartbeat(10),
]


class TestParity:
    def test_both_clients_have_the_same_methods_with_the_same_parameters(self) -> None:
        assert signatures(Client) == signatures(SyncClient)
        assert signatures(Client).keys() >= {"list_engines", "list_rooms", "watch", "drain", "health", "close"}


class TestAnswers:
    async def test_lists_follow_their_pages(self, client: Client) -> None:
        assert [engine.name for engine in await client.list_engines()] == ["A", "B", "C"]
        assert [row.data_plane for row in (await client.get_engine("A")).rows] == ["first", "second"]
        assert [room.room for room in await client.list_rooms(held_only=True)] == [1, 2**63 - 1]
        assert [session.address for session in await client.list_sessions()] == ["1"]

    async def test_a_list_without_an_end_is_not_read_for_ever(self, process: Process, client: Client) -> None:
        process.registry.more = "again"
        with pytest.raises(KvGrpcError, match="its list has no end"):
            await client.list_engines()

    async def test_single_things_are_their_messages(self, client: Client) -> None:
        assert (await client.get_room(7, attempt=2)).attempt == 2
        assert (await client.cancel_room(9, cause="test")).room == 9
        assert (await client.get_rank()).data_plane == "shm"
        assert (await client.resolve_ranks("A", common_pb2.Role.ROLE_PREFILL)).name == "A"
        assert [stream.engine for stream in await client.list_streams()] == ["A"]
        assert await client.health() == "SERVING"
        assert await client.health("kvgrpc.v1.RegistryService") == "SERVING"

    def test_the_plain_client_answers_the_same_from_any_thread(self, elsewhere: Process) -> None:
        found: list[Any] = []

        def work() -> None:
            with SyncClient(elsewhere.address) as client:
                found.append([engine.name for engine in client.list_engines()])
                found.append(client.get_room(7).room)
                found.append(client.health())
                found.append(list(client.watch(engine="A", from_sequence=8)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
        assert found == [["A", "B", "C"], 7, "SERVING", WATCHED]

    async def test_a_closed_client_opens_again_when_it_is_used(self, client: Client) -> None:
        await client.close()
        await client.close()
        assert await client.health() == "SERVING"


class TestErrors:
    async def test_they_are_domain_exceptions_with_their_metadata(self, client: Client) -> None:
        with pytest.raises(EngineNotFound) as caught:
            await client.get_engine("B")
        assert caught.value.metadata == {"engine": "B"}
        with pytest.raises(RoomNotFound):
            await client.get_room(8)
        with pytest.raises(StreamNotFound):
            await anext(client.watch(engine="B"))
        with pytest.raises(FeatureDisabled):
            await client.get_server_info()

    async def test_only_what_may_succeed_later_is_repeated(self, client: Client, process: Process) -> None:
        await client.list_engines()
        assert process.registry.calls == 3, "WARMING_UP once, then two pages"
        with pytest.raises(EngineNotFound):
            await client.get_engine("B")
        assert process.registry.calls == 4

    async def test_nobody_at_the_address_is_told_in_time(self, nobody: str) -> None:
        begun = time.monotonic()
        async with Client(nobody, timeout=0.5) as client:
            with pytest.raises(PeerUnreachable) as caught:
                await client.list_engines()
            with pytest.raises(PeerUnreachable):
                await anext(client.watch())
        assert caught.value.metadata == {"address": nobody}
        assert time.monotonic() - begun < 8.0  # without a deadline of the call it would be for ever

    async def test_an_answer_that_does_not_come_is_told_in_time(self, process: Process) -> None:
        async with Client(process.address, timeout=0.3) as client:
            with pytest.raises(PeerUnreachable, match=process.address):
                await client.resolve_ranks("A", common_pb2.Role.ROLE_PREFILL, wait_ready=True)

    async def test_a_peer_that_accepts_and_says_nothing_is_told_in_time(self) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            begun = time.monotonic()
            async with Client(f"127.0.0.1:{silent.getsockname()[1]}", timeout=0.5) as client:
                with pytest.raises(PeerUnreachable):
                    await client.health()
            assert time.monotonic() - begun < 8.0  # without a deadline of the call it would be for ever

    def test_the_plain_client_raises_the_same(self, elsewhere: Process, nobody: str) -> None:
        with SyncClient(elsewhere.address) as client:
            with pytest.raises(RoomNotFound):
                client.get_room(8)
            with pytest.raises(StreamNotFound):
                next(client.watch(engine="B"))
        with SyncClient(nobody, timeout=0.3) as client, pytest.raises(PeerUnreachable):
            client.health()


class TestWatch:
    async def test_every_kind_is_a_value_and_unknown_ones_are_passed_over(self, client: Client) -> None:
        assert [part async for part in client.watch(engine="A", from_sequence=8)] == WATCHED

    async def test_closing_it_early_ends_it_at_the_server(self, client: Client, process: Process) -> None:
        async with aclosing(client.watch(engine="A", from_sequence=8)) as parts:  # type: ignore[type-var]
            async for part in parts:
                assert isinstance(part, Begin)
                break
        await until_ended(process, 1)

    def test_closing_the_plain_one_early_does_too(self, elsewhere: Process) -> None:
        tail = events_pb.WatchMode.WATCH_MODE_TAIL
        with SyncClient(elsewhere.address) as client:
            parts = client.watch(engine="A", from_sequence=8, mode=tail)
            assert next(parts) == WATCHED[0]
            parts.close()  # type: ignore[attr-defined]  # it is a generator
            LoopThread.shared().run(until_ended(elsewhere, 1), 10)

    async def test_a_silent_one_ends_as_unreachable(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvgrpc.client.aio._LEAST_IDLE_SECONDS", 0.0)
        client._timeout = 1.5
        seen = []
        with pytest.raises(PeerUnreachable, match=r"1\.5 s"):
            async for part in client.watch(engine="A", from_sequence=8, mode=events_pb.WatchMode.WATCH_MODE_TAIL):
                seen.append(part)
        assert seen == WATCHED

    async def test_a_slow_reader_is_not_taken_for_silence(
        self, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvgrpc.client.aio._LEAST_IDLE_SECONDS", 0.0)
        client._timeout = 1.0
        seen = []
        async for part in client.watch(engine="A", from_sequence=8):
            seen.append(part)
            if len(seen) == 1:
                await asyncio.sleep(1.5)  # the slow reader itself
        assert seen == WATCHED

    async def test_one_that_the_server_ends_says_why(self, client: Client, process: Process) -> None:
        parts = client.watch(engine="A", from_sequence=8, mode=events_pb.WatchMode.WATCH_MODE_TAIL)
        assert await anext(parts) == WATCHED[0]
        await process.listener.stop(1.0)
        with pytest.raises(ServerDraining):
            async for _ in parts:
                pass

    async def test_cancelling_the_reader_is_a_cancellation(self, client: Client) -> None:
        reads = asyncio.Event()

        async def read() -> None:
            async for _ in client.watch(engine="A", mode=events_pb.WatchMode.WATCH_MODE_TAIL):
                reads.set()

        task = asyncio.ensure_future(read())
        await asyncio.wait_for(reads.wait(), 10.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class TestProcess:
    def test_the_client_needs_no_server_side_and_nothing_heavy(self) -> None:
        text = "import sys, kvgrpc.client; print([name for name in sys.modules if name.startswith(%r)])"
        ours = ("kvgrpc.server", "kvgrpc.transfer", "kvgrpc.registry")
        heavy = ("torch", "mooncake", "zmq", "numpy", "prometheus_client", *ours)
        done = subprocess.run([sys.executable, "-c", text % (heavy,)], capture_output=True, text=True, timeout=50)
        assert done.stdout == "[]\n", done.stdout + done.stderr

    def test_a_program_that_used_it_ends_cleanly(self, elsewhere: Process) -> None:
        text = (
            "import sys\n"
            "from kvgrpc.client import SyncClient\n"
            "client = SyncClient(sys.argv[1])\n"
            "parts = client.watch(engine='A', mode=2)\n"
            "print(client.health(), type(next(parts)).__name__)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", text, elsewhere.address], capture_output=True, text=True, timeout=50
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "SERVING Begin\n", "")


def signatures(of: type) -> dict[str, list[inspect.Parameter]]:
    methods = {name: method for name, method in vars(of).items() if callable(method) and not name.startswith("_")}
    return {name: list(inspect.signature(method).parameters.values()) for name, method in methods.items()}


async def until_ended(process: Process, watches: int) -> None:
    await until(lambda: process.events.watches_ended >= watches)
