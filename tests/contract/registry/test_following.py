"""Whoever waits for an engine to change hears it at once, from one stream, through restarts of the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio

from kvgrpc.model import Role
from kvgrpc.registry.client import following
from kvgrpc.registry.client.following import Following
from kvgrpc.rpc.interceptors import CallLimits
from kvgrpc.server import RegistryServer
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.v1.registry_service_pb2_grpc import RegistryServiceServicer, add_RegistryServiceServicer_to_server
from tests.support.registry_builders import row
from tests.support.registry_serving import Served, dial
from tests.support.waiting import until


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    made = await Served().start()
    yield made
    await made.stop()


@pytest_asyncio.fixture
async def followed() -> AsyncIterator[Following]:
    made = Following(dial)
    yield made
    await made.close()


async def test_the_first_answer_is_the_full_state_and_the_next_one_a_change(
    served: Served, followed: Following
) -> None:
    async def change(since: int) -> int:
        return await followed.change(served.address, "P", Role.PREFILL, since, 10.0)

    first = await change(-1)
    known = await change(first)
    waiting = asyncio.ensure_future(change(known))
    await served.register(row("Q"))
    await asyncio.sleep(0.1)  # in which it must not return
    assert not waiting.done()
    began = time.monotonic()
    await served.register(row("P"))
    assert await waiting == known + 1
    assert time.monotonic() - began < 5.0
    assert await change(-1) == known + 1


async def test_all_who_follow_one_engine_share_a_stream_that_ends_when_nobody_does(
    served: Served, followed: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LINGER_SECONDS", 0.0)
    assert await followed.change(served.address, "P", Role.PREFILL, 0, 10.0) == 1
    waiting = asyncio.gather(*(followed.change(served.address, "P", Role.PREFILL, 1, 10.0) for _ in range(50)))
    await asyncio.sleep(0)
    assert served.servicer._watching.watchers == 1
    await served.register(row("P"))
    assert set(await waiting) == {2}
    await served.register(row("P", epoch=2))
    await until(lambda: served.servicer._watching.watchers == 0 and not followed._streams)


async def test_a_registry_that_is_away_changes_nothing_and_its_return_is_news(followed: Following) -> None:
    first = await Served().start()
    known = await followed.change(first.address, "P", Role.PREFILL, 0, 10.0)
    await first.stop()
    assert await followed.change(first.address, "P", Role.PREFILL, known, 0.3) == known
    again = await Served().start(first.port)
    assert await followed.change(again.address, "P", Role.PREFILL, known, 20.0) == known + 1
    await again.stop()


async def test_a_stream_that_ends_at_once_is_not_asked_for_again_without_a_pause(followed: Following) -> None:
    """By a proxy, or by what only calls itself a registry: the loop of the rank did nothing else."""
    asked = 0

    class Brief(RegistryServiceServicer):
        async def WatchEngines(self, request: object, context: object) -> AsyncIterator[pb.WatchEnginesResponse]:
            nonlocal asked
            asked += 1
            yield pb.WatchEnginesResponse()

    server = grpc.aio.server()
    add_RegistryServiceServicer_to_server(Brief(), server)  # type: ignore[abstract]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    assert await followed.change(address, "P", Role.PREFILL, 0, 1.0) == 0
    assert 1 <= asked <= 10
    await server.stop(0)


async def test_a_stream_that_stood_for_a_while_is_asked_for_again_soon(
    followed: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changes meanwhile is heard of only then: the fifth time that a proxy ended it this took seconds."""
    attempts: list[int] = []

    def pause_before(attempt: int, *others: object) -> float:
        attempts.append(attempt)
        return 0.01

    class Leisurely(RegistryServiceServicer):
        async def WatchEngines(self, request: object, context: object) -> AsyncIterator[pb.WatchEnginesResponse]:
            await asyncio.sleep(0.3)  # longer than what counts as standing
            yield pb.WatchEnginesResponse()

    monkeypatch.setattr(following, "pause_before", pause_before)
    monkeypatch.setattr(following, "LONGEST_PAUSE_SECONDS", 0.1)
    server = grpc.aio.server()
    add_RegistryServiceServicer_to_server(Leisurely(), server)  # type: ignore[abstract]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    change = asyncio.create_task(followed.change(address, "P", Role.PREFILL, 0, 20.0))
    await until(lambda: len(attempts) >= 3)
    assert attempts[:3] == [0, 0, 0]
    change.cancel()
    await asyncio.wait([change])
    await server.stop(0)


async def test_a_stream_that_is_refused_leaves_the_others_at_that_registry_alone(followed: Following) -> None:
    """They share its channel: hung up for the one that its bounds refuse, all others missed what changed meanwhile."""
    registry = RegistryServer(["127.0.0.1:0"], call_limits=CallLimits(watches_per_caller=1))
    await asyncio.to_thread(registry.open)
    try:
        known = await followed.change(registry.address, "A", Role.PREFILL, 0, 10.0)
        waiting = asyncio.ensure_future(followed.change(registry.address, "A", Role.PREFILL, known, 30.0))
        await followed.change(registry.address, "B", Role.PREFILL, known, 3.0)  # refused, and refused again
        assert not waiting.done()
        (stream,) = (stream for place, stream in followed._streams.items() if place.engine == "A")
        assert stream.task is not None and not stream.task.done()
        waiting.cancel()
    finally:
        await asyncio.to_thread(registry.close)


async def test_a_stream_that_begins_again_is_a_change_and_numbers_never_go_back(
    served: Served, followed: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks the registry between two waits may take longer than a stream lingers, and the first full state of
    the next one had the number that it knew."""
    monkeypatch.setattr(following, "LINGER_SECONDS", 0.0)
    known = await followed.change(served.address, "P", Role.PREFILL, 0, 10.0)
    await served.register(row("P"))  # a message, after which nobody wants the stream any more
    await until(lambda: not followed._streams)
    assert await followed.change(served.address, "P", Role.PREFILL, known, 5.0) > known


async def test_a_connection_that_no_stream_uses_is_closed(
    served: Served, followed: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "LINGER_SECONDS", 0.0)
    await followed.change(served.address, "P", Role.PREFILL, 0, 10.0)
    assert followed._channels.is_connected(served.address)
    await served.register(row("P"))
    await until(lambda: not followed._channels.is_connected(served.address))
