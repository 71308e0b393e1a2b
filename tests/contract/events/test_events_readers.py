"""Readers of a log: a slow one holds up nobody and is told when the log overtakes it, they are bounded, and whatever
ends the stream ends them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from kvgrpc.errors import EventsCompacted
from kvgrpc.events.log.journal import Batches
from kvgrpc.events.watch import Watch, WatchMode, WatchOrder
from kvgrpc.observability.metrics import REGISTRY
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import event_service_pb2 as pb
from kvgrpc.v1.event_service_pb2_grpc import EventServiceStub
from tests.support.event_serving import (
    HEARTBEAT,
    REPLAY,
    SNAPSHOT,
    TAIL,
    kinds,
    payloads,
    publish,
    said,
    served,
    stored,
)
from tests.support.waiting import until


async def test_a_reader_that_the_log_overtakes_is_told() -> None:
    async with served(buffer_steps=5) as events:
        call = events.watch(TAIL)
        await call.read()
        # More than the transport holds for a reader that does not read.
        for _ in range(400):
            await events.publish(b"x" * 50_000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                await call.read()
        assert error_from(caught.value).reason.name == "EVENTS_COMPACTED"


async def test_a_reader_that_does_not_read_holds_up_nobody() -> None:
    async with served() as events:
        idle = events.watch(TAIL)
        await idle.read()
        busy = events.watch(TAIL)
        await busy.read()
        sent = [b"%d" % number * 10_000 for number in range(1_000)]
        await events.publish(*sent)
        seen: list[bytes] = []
        while len(seen) < len(sent):
            seen += (await busy.read()).raw.payloads
        assert seen == [said(word) for word in sent]
        caught_up: list[bytes] = []
        while len(caught_up) < len(sent):
            caught_up += (await idle.read()).raw.payloads
        assert caught_up == seen


@pytest.mark.slow
async def test_a_thousand_readers_that_do_not_read_hold_up_nobody() -> None:
    """One that reads gets all, the publisher drops nothing, and each of the others gets all once it reads."""
    readers, sent = 1_000, [b"%d" % number * 100 for number in range(1_000)]
    # Its last connection too has fewer than it leaves to others.
    async with served(max_watches=readers + 1, watches_per_caller=2 * readers) as events, AsyncExitStack() as stack:
        idle = []
        for number in range(readers):
            if number % 100 == 0:
                own = grpc.aio.insecure_channel(events.address, options=[("grpc.use_local_subchannel_pool", 1)])
                stub: Any = EventServiceStub(await stack.enter_async_context(own))
            idle.append(stub.Watch(pb.WatchRequest(mode=TAIL)))
        for call in idle:
            assert (await call.read()).HasField("begin")
        busy = events.watch(TAIL)
        await busy.read()
        await events.publish(*sent)
        wanted, seen = [said(word) for word in sent], list[bytes]()
        while len(seen) < len(sent):
            seen += (await busy.read()).raw.payloads
        assert seen == wanted
        assert events.servicer.watches == readers + 1 and events.publisher.counts.dropped == 0
        for call in idle:
            late: list[bytes] = []
            while len(late) < len(sent):
                late += (await call.read()).raw.payloads
            assert late == wanted


@pytest.mark.parametrize("mode", [WatchMode.REPLAY, WatchMode.TAIL])
async def test_a_reader_without_a_cursor_gets_the_oldest_however_busy_the_publisher(mode: WatchMode) -> None:
    """It drops the oldest batch while the reader hears where it begins."""
    async with served(buffer_steps=4) as events:
        await publish(events, *(stored(number) for number in range(8)))
        reader = Watch(events.stream, WatchOrder(mode))
        await publish(events, *(stored(number) for number in range(8, 16)))
        part = await reader.next_part()
        assert isinstance(part, Batches) and (part.first, len(part.payloads)) == (reader.state.oldest_sequence, 4)
        with pytest.raises(EventsCompacted):  # a reader that is too slow is told, as ever
            Watch(events.stream, WatchOrder(mode, first=reader.state.oldest_sequence))


async def test_a_reader_whose_oldest_went_between_two_looks_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(buffer_steps=4) as events:
        await publish(events, *(stored(number) for number in range(8)))
        before = events.stream.state()
        await publish(events, *(stored(number) for number in range(8, 16)))
        states = iter([before, before, events.stream.state()])
        monkeypatch.setattr(type(events.stream), "state", lambda self: next(states))
        reader = Watch(events.stream, WatchOrder(WatchMode.REPLAY))
        part = await reader.next_part()
        assert isinstance(part, Batches) and reader.complete
        assert (part.first, part.last) == (reader.state.oldest_sequence, reader.state.next_sequence - 1)


async def test_readers_are_bounded_and_one_that_leaves_makes_room() -> None:
    def counted() -> float:
        return REGISTRY.get_sample_value("kvgrpc_event_watch_readers") or 0.0

    before = counted()
    async with served(max_watches=2) as events:
        calls = [events.watch(TAIL) for _ in range(2)]
        for call in calls:
            await call.read()
        assert counted() - before == 2
        refused = await events.refusal(TAIL)
        assert (refused.code, refused.reason.name) == ("RESOURCE_EXHAUSTED", "TOO_MANY_REQUESTS")
        assert refused.metadata == {"limit": "2", "value": "3", "scope": "watches"}
        assert refused.retry_after
        calls[0].cancel()
        await until(lambda: events.servicer.watches == 1)
        assert kinds(await events.read()) == ["begin"]
        calls[1].cancel()
        await until(lambda: events.servicer.watches == 0)
        assert events.stream._listeners == () and counted() == before


@pytest.mark.parametrize("mode", [TAIL, HEARTBEAT])
async def test_draining_ends_whoever_would_not_end(mode: pb.WatchMode.ValueType) -> None:
    async with served() as events:
        await events.publish(b"a")
        call = events.watch(mode)
        await call.read()
        events.servicer.drain()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read():
                pass
        refused = error_from(caught.value)
        assert (refused.code, refused.reason.name) == ("UNAVAILABLE", "SERVER_DRAINING")
        assert (await events.refusal(mode)).reason.name == "SERVER_DRAINING"
        assert payloads(await events.read(REPLAY)) == [said(b"a")]


async def test_a_tail_ends_with_its_publisher_and_after_its_last_batch() -> None:
    async with served() as events:
        call = events.watch(TAIL)
        await call.read()
        events.publisher.publish_raw(said(b"last"))
        await asyncio.to_thread(events.publisher.shutdown, 1)
        assert list((await call.read()).raw.payloads) == [said(b"last")]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert error_from(caught.value).reason.name == "SERVER_DRAINING"


async def test_the_readers_of_a_fenced_publisher_are_sent_away() -> None:
    async with served() as events:
        calls = [events.watch(mode) for mode in (TAIL, HEARTBEAT, SNAPSHOT)]
        for call in calls:
            await call.read()
        events.publisher.fence()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert error_from(caught.value).reason.name == "SERVER_DRAINING"
