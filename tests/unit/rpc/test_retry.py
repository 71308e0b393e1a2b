"""What is repeated, how often, and until when."""

from __future__ import annotations

import asyncio

import pytest

from kvgrpc.errors import (
    EngineNotFound,
    KvGrpcError,
    PagesHeld,
    PeerUnreachable,
    RoomNotFound,
    TooManyRequests,
    WarmingUp,
)
from kvgrpc.rpc.dialing.retry import may_repeat, repeated


class Server:
    """Fails with the given errors in turn, then answers; remembers the time that each call was left."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.left: list[float] = []

    async def call(self, seconds: float) -> str:
        self.left.append(seconds)
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


@pytest.mark.parametrize(
    ("error", "may"),
    [
        (PeerUnreachable("x"), True),
        (WarmingUp("x", retry_after=1.0), True),
        (TooManyRequests("x", retry_after=1.0), True),
        (TooManyRequests("x"), False),
        (PagesHeld("x"), False),
        (RoomNotFound("x"), False),
        (EngineNotFound("x", retry_after=1.0), True),
        (KvGrpcError("x"), False),
        (ValueError("x"), False),
    ],
)
def test_what_is_unavailable_or_names_a_time_is_repeated(error: Exception, may: bool) -> None:
    assert may_repeat(error) is may


async def test_a_call_is_repeated_until_it_succeeds() -> None:
    server = Server(PeerUnreachable("x"), PeerUnreachable("x"))
    assert await repeated(server.call, 10.0) == "answer"
    assert len(server.left) == 3
    assert server.left == sorted(server.left, reverse=True)
    assert server.left[0] <= 10.0


async def test_what_may_not_be_repeated_is_raised_at_once() -> None:
    server = Server(RoomNotFound("x"))
    with pytest.raises(RoomNotFound):
        await repeated(server.call, 10.0)
    assert len(server.left) == 1


async def test_the_time_that_the_server_asks_for_is_waited() -> None:
    server = Server(WarmingUp("x", retry_after=0.3))
    begun = asyncio.get_running_loop().time()
    await repeated(server.call, 10.0)
    assert 0.3 <= asyncio.get_running_loop().time() - begun < 10.0


async def test_a_wait_that_would_pass_the_deadline_is_not_begun() -> None:
    server = Server(WarmingUp("x", retry_after=60.0))
    begun = asyncio.get_running_loop().time()
    with pytest.raises(WarmingUp):
        await repeated(server.call, 30.0)
    assert asyncio.get_running_loop().time() - begun < 10.0


async def test_the_last_error_is_raised_when_time_is_over() -> None:
    server = Server(*(PeerUnreachable(str(number)) for number in range(1000)))
    begun = asyncio.get_running_loop().time()
    with pytest.raises(PeerUnreachable) as caught:
        await repeated(server.call, 0.5)
    assert asyncio.get_running_loop().time() - begun < 5.0
    assert caught.value.message == str(len(server.left) - 1)
    assert len(server.left) >= 2


async def test_a_silence_at_the_end_tells_what_the_server_answered_before() -> None:
    said = WarmingUp("3 pages were dropped; a repeat goes on", retry_after=0.01)
    said.answered = True
    with pytest.raises(PeerUnreachable) as caught:
        await repeated(Server(said, *[PeerUnreachable("silence", metadata={"address": "a:1"})] * 1000).call, 0.3)
    assert caught.value.message == "silence; before that it answered WARMING_UP: 3 pages were dropped; a repeat goes on"
    assert caught.value.metadata == {"address": "a:1"}
