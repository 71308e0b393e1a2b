"""WatchEngines over a real server: full state, then changes; the same bytes for all; a slow reader never grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from kvgrpc.cli.fleet.registry import show_changes
from kvgrpc.client import Client
from kvgrpc.client.engine_mirror import EngineMirror
from kvgrpc.errors import InvalidRequest, ServerDraining, TooManyRequests
from kvgrpc.model import Layout, Role
from kvgrpc.registry import feed, watching, wire
from kvgrpc.registry.model import EngineChange, EngineFilter, ResolvedEngine
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.common_pb2 import ROLE_DECODE, ROLE_PREFILL
from tests.support.mirrored import change_message, known_engines
from tests.support.registry_builders import pool, ranks, row
from tests.support.registry_serving import TP2, Served, failure
from tests.support.waiting import until


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    made = (await Served().start()).grown_up()
    yield made
    await made.stop()


class Reader:
    """One WatchEngines and what is known from it."""

    def __init__(self, served: Served, **request: Any) -> None:
        self.call = served.stub.WatchEngines(pb.WatchEnginesRequest(**request))
        self.mirror = EngineMirror()
        self.messages: list[pb.WatchEnginesResponse] = []
        self.full_states = 0

    async def read(self) -> pb.WatchEnginesResponse:
        message = await asyncio.wait_for(self.call.read(), 20)
        assert isinstance(message, pb.WatchEnginesResponse)
        self.messages.append(message)
        self.mirror.apply(message)
        self.full_states += message.state_complete
        return message

    async def until_complete(self) -> Reader:
        while not (await self.read()).state_complete:
            continue
        return self

    async def until_ranks(self, engine: str, count: int) -> None:
        while count != (((found := self.mirror.engine(engine)) and found.registered_ranks) or 0):
            await self.read()


def shown(served: Served) -> dict[str, Any]:
    return {engine.name: engine for engine in served.store.table.list_engines(None, "", 100, rows=True)}


async def test_who_follows_one_engine_costs_nothing_when_another_changes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All changes were held against the filter of each reader, in one turn of the loop."""
    asked: list[tuple[str, str]] = []
    applied_to = EngineFilter.applied_to

    def counted(self: EngineFilter, change: EngineChange) -> EngineChange | None:
        asked.append((self.engine, change.engine.name))
        return applied_to(self, change)

    readers = [await Reader(served, engine=f"P{number}").until_complete() for number in range(20)]
    every = await Reader(served).until_complete()
    monkeypatch.setattr(EngineFilter, "applied_to", counted)
    await served.register(*(row(f"P{number}") for number in range(10, 60)))
    await every.until_ranks("P59", 1)
    for number in range(10, 20):
        await readers[number].until_ranks(f"P{number}", 1)
    assert all(engine in ("", changed) for engine, changed in asked)
    assert len(asked) == 50 + 10


class TestFullState:
    async def test_an_empty_registry_says_that_this_is_all(self, served: Served) -> None:
        message = await Reader(served).read()
        assert (message.state_begins, message.state_complete, len(message.changes)) == (True, True, 0)

    async def test_it_comes_first_and_whole_in_messages_of_at_most_one_mebibyte(self, served: Served) -> None:
        fat = [row(tp=tp, layout=Layout(tp=12), data_plane="x" * 200_000) for tp in range(12)]
        for at in [*fat, row("Q", pools=(pool(),))]:
            await served.register(at)
        reader = await Reader(served).until_complete()
        assert len(reader.messages) == 3
        assert all(message.ByteSize() <= 1 << 20 for message in reader.messages)
        assert [message.state_begins for message in reader.messages] == [True, False, False]
        assert [message.state_complete for message in reader.messages] == [False, False, True]
        assert known_engines(reader.mirror) == shown(served)

    async def test_what_was_known_stands_until_the_next_full_state_is_complete(self, served: Served) -> None:
        await served.register(row("P"))
        reader = await Reader(served).until_complete()
        reader.mirror.apply(pb.WatchEnginesResponse(state_begins=True))
        assert reader.mirror.engine("P") is not None
        reader.mirror.apply(pb.WatchEnginesResponse(state_complete=True))
        assert reader.mirror.engine("P") is None

    async def test_engine_role_and_pools_are_chosen(self, served: Served) -> None:
        await served.register(row("P", pools=(pool(),)), row("D", role=Role.DECODE, pools=(pool(),)))
        prefills = await Reader(served, role=ROLE_PREFILL).until_complete()
        decode = await Reader(served, engine="D", without_pools=True).until_complete()
        nobody = await Reader(served, engine="D", role=ROLE_PREFILL).until_complete()
        assert known_engines(prefills.mirror) == {"P": shown(served)["P"]}
        assert [at.pools for at in known_engines(decode.mirror)["D"].rows] == [()]
        assert known_engines(nobody.mirror) == {}

    async def test_a_role_that_is_none_is_invalid(self, served: Served) -> None:
        assert isinstance(await failure(Reader(served, role=7).read()), InvalidRequest)


class TestChanges:
    async def test_what_registers_goes_and_is_replaced_is_told_in_order(self, served: Served) -> None:
        reader = await Reader(served).until_complete()
        await served.register(*ranks(TP2))
        await reader.until_ranks("P", 2)
        assert known_engines(reader.mirror) == shown(served)
        await served.register(row(tp=1, epoch=2, layout=TP2, port=9))
        while known_engines(reader.mirror) != shown(served):
            await reader.read()
        served.registry.deregister([row(tp=0).ref])
        await reader.until_ranks("P", 1)
        assert known_engines(reader.mirror) == shown(served)
        served.registry.deregister([row(tp=1, epoch=2).ref])
        await reader.until_ranks("P", 0)
        assert known_engines(reader.mirror) == {}
        assert reader.full_states == 1

    async def test_only_the_rows_that_changed_are_sent(self, served: Served) -> None:
        await served.register(*ranks(Layout(tp=100)))
        reader = await Reader(served).until_complete()
        await served.register(row(tp=7, epoch=2, layout=Layout(tp=100)))
        change = (await reader.read()).changes[0]
        assert (len(change.engine.rows), change.engine.registered_ranks, list(change.gone)) == (1, 100, [])

    async def test_who_follows_a_role_hears_that_an_engine_took_another(self, served: Served) -> None:
        await served.register(row("E", epoch=1))
        prefills = await Reader(served, role=ROLE_PREFILL).until_complete()
        decodes = await Reader(served, role=ROLE_DECODE).until_complete()
        await served.register(row("E", epoch=2, role=Role.DECODE))
        await prefills.until_ranks("E", 0)
        await decodes.until_ranks("E", 1)

    async def test_a_reconnect_starts_with_the_full_state(self, served: Served) -> None:
        first = await Reader(served).until_complete()
        await served.register(row("P"))
        await first.until_ranks("P", 1)
        first.call.cancel()
        again = await Reader(served).until_complete()
        assert known_engines(again.mirror) == shown(served) and again.messages[0].state_begins

    async def test_ranks_whose_leases_ran_out_are_gone(self) -> None:
        brief = await Served(ttl=0.5).start()
        await brief.register(row("P"))
        reader = await Reader(brief).until_complete()
        await reader.until_ranks("P", 0)
        await brief.stop()

    async def test_changes_that_follow_each_other_fast_come_gathered(self, served: Served) -> None:
        reader = await Reader(served).until_complete()
        layout = Layout(tp=300)
        for at in ranks(layout):
            served.registry.register([at])
            served.store._tell()
        await reader.until_ranks("P", 300)
        assert len(reader.messages) < 10


class TestManyReaders:
    async def test_a_state_and_a_change_are_encoded_once_for_all(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encoded: list[str] = []
        engine_to_pb = wire.engine_to_pb

        def counted(engine: Any, rows: Any = ()) -> pb.Engine:
            encoded.append(engine.name)
            return engine_to_pb(engine, rows)

        monkeypatch.setattr(wire, "engine_to_pb", counted)
        await served.register(row("P"))
        readers = [await Reader(served).until_complete() for _ in range(20)]
        assert encoded == ["P"]
        await served.register(row("Q"))
        for reader in readers:
            await reader.until_ranks("Q", 1)
        assert encoded == ["P", "Q"]

    async def test_a_newcomer_has_everything_when_the_state_is_complete(self, served: Served) -> None:
        """Also what changed since the state was encoded for somebody else."""
        await served.register(row("P"))
        first = await Reader(served).until_complete()
        for name in ("Q", "R"):
            await served.register(row(name))
            await first.until_ranks(name, 1)
        served.registry.deregister([row("P").ref])
        await first.until_ranks("P", 0)
        newcomer = await Reader(served).until_complete()
        assert known_engines(newcomer.mirror) == shown(served) and set(known_engines(newcomer.mirror)) == {"Q", "R"}

    async def test_their_number_is_bounded(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        served.servicer._watching._max_watchers = 2
        # Held, because a call that nobody holds is cancelled.
        readers = [await Reader(served).until_complete() for _ in range(2)]
        error = await failure(Reader(served).read())
        assert isinstance(error, TooManyRequests)
        assert error.metadata["scope"] == "watchers"
        readers[0].call.cancel()
        await until(lambda: served.servicer._watching.watchers == 1)
        await Reader(served).until_complete()

    async def test_a_slow_reader_is_restarted_from_the_full_state_and_nothing_grows(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(feed, "MAX_LOG_BYTES", 100_000)
        monkeypatch.setattr(watching, "PACE_SECONDS", 0.0)
        slow = await Reader(served).until_complete()
        quick = await Reader(served).until_complete()
        for epoch in range(1, 400):
            await served.register(row("P", epoch=epoch, data_plane="x" * 50_000))
            await quick.read()
        (shared,) = served.servicer._watching._feeds.values()
        assert shared._log_bytes <= 100_000
        while known_engines(slow.mirror) != shown(served):
            await slow.read()
        assert slow.full_states > 1
        assert len(slow.messages) < 400

    async def test_feeds_that_nobody_reads_are_gone(self, served: Served) -> None:
        reader = await Reader(served, engine="P").until_complete()
        reader.call.cancel()
        await until(lambda: not served.servicer._watching._feeds)


class TestSaysHowItStands:
    async def test_that_it_warms_up_and_that_this_is_over(self) -> None:
        fresh = await Served(ttl=1.0).start()
        reader = await Reader(fresh).until_complete()
        assert reader.mirror.warming_up
        while reader.mirror.warming_up:
            await reader.read()
        await fresh.stop()

    async def test_something_comes_even_when_nothing_changes(
        self, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(watching, "HEARTBEAT_SECONDS", 0.05)
        reader = await Reader(served).until_complete()
        assert await reader.read() == pb.WatchEnginesResponse()

    async def test_a_drain_ends_it(self, served: Served) -> None:
        reader = await Reader(served).until_complete()
        served.servicer.drain()
        assert isinstance(await failure(reader.read()), ServerDraining)
        assert isinstance(await failure(Reader(served).read()), ServerDraining)


class TestClient:
    async def test_yields_messages_until_it_is_closed(self, served: Served) -> None:
        await served.register(row("P"))
        async with Client(served.address) as client:
            messages = client.watch_engines(role=ROLE_PREFILL)
            first = await anext(messages)
            assert first.state_complete and first.changes[0].engine.name == "P"
            await messages.aclose()  # type: ignore[attr-defined]  # it is an async generator

    async def test_a_registry_that_goes_is_said(self, served: Served) -> None:
        async with Client(served.address) as client:
            messages = client.watch_engines()
            await anext(messages)
            served.servicer.drain()
            with pytest.raises(ServerDraining):
                await anext(messages)


def test_people_watch_a_line_for_each_engine_and_rank(capsys: pytest.CaptureFixture[str]) -> None:
    both, one = ranks(TP2, epoch=5), ranks(TP2, epoch=6)[1]
    rows = [wire.row_to_pb(at, None) for at in both]
    ready = ResolvedEngine("P", Role.PREFILL, TP2, True, (), 2)
    left = ResolvedEngine("P", Role.PREFILL, TP2, False, (), 1)
    gone = ResolvedEngine("P", Role.PREFILL, TP2, False, (), 0)
    show_changes(
        iter(
            [
                pb.WatchEnginesResponse(
                    state_begins=True,
                    changes=[change_message(ready, rows, ())],
                    state_complete=True,
                    warming_up=True,
                ),
                pb.WatchEnginesResponse(),
                pb.WatchEnginesResponse(changes=[change_message(left, (), [one.ref])]),
                pb.WatchEnginesResponse(changes=[change_message(gone, (), [both[0].ref])]),
            ]
        ),
        as_json=False,
    )
    assert capsys.readouterr().out.splitlines() == [
        "P  prefill  READY  2/2",
        "  + P/dp0/pp0/cp0/tp0@5  127.0.0.1:1",
        "  + P/dp0/pp0/cp0/tp1@5  127.0.0.1:1",
        "that is all; now what changes",
        "the registry warms up: more may be there",
        "it knows everybody now",
        "P  prefill  incomplete  1/2",
        "  - P/dp0/pp0/cp0/tp1@6",
        "P  gone",
    ]


def test_what_is_sent_needs_no_second_encoding() -> None:
    """The library takes the first handler of a method: were that to change, each reader would be encoded for."""

    async def first(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"

    async def second(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"second"

    async def ask() -> bytes:
        server = grpc.aio.server()
        for behaviour in (first, second):
            handlers: dict[str, Any] = {"M": grpc.unary_stream_rpc_method_handler(behaviour)}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("S", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask_it: Any = channel.unary_stream("/S/M")
            answer = bytes(await ask_it(b"").read())
        await server.stop(0)
        return answer

    assert asyncio.run(ask()) == b"first"
