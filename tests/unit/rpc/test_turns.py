"""Long work of a loop comes in pieces: one at a time, connections in turn, and rest between."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

import pytest

from kvgrpc.rpc.callers import CALLER, PEER, Caller
from kvgrpc.rpc.interceptors.chain import _decoded
from kvgrpc.rpc.turns import LARGE_BYTES, PIECE_SECONDS, Turns, in_pieces


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        continue


async def test_pieces_of_one_connection_let_others_pass_between() -> None:
    turns, order = Turns.of_this_loop(), []

    async def work(peer: str, pieces: int) -> None:
        CALLER.set(Caller(peer))
        PEER.set(f"ipv4:{peer}:1")
        for _ in range(pieces):
            await turns.take()
            order.append(peer)
            compute(0.001)

    greedy = [asyncio.create_task(work("10.0.0.1", 1)) for _ in range(20)]
    await asyncio.sleep(0)
    await asyncio.gather(*greedy, asyncio.create_task(work("10.0.0.2", 3)))
    assert len(order) == 23 and max(i for i, peer in enumerate(order) if peer == "10.0.0.2") < 8
    assert not turns._waiting


async def test_one_caller_with_many_connections_has_no_more_turns_than_another() -> None:
    turns, order = Turns.of_this_loop(), list[str]()

    async def work(name: str, port: int) -> None:
        CALLER.set(Caller(name))
        PEER.set(f"ipv4:10.0.0.1:{port}")
        await turns.take()
        order.append(name)
        compute(0.001)

    greedy = [asyncio.create_task(work("greedy", port)) for port in range(1, 41)]
    await asyncio.sleep(0)
    await asyncio.gather(*greedy, *(asyncio.create_task(work("honest", port)) for port in (41, 42, 43)))
    assert len(order) == 43 and max(at for at, name in enumerate(order) if name == "honest") < 8


async def test_after_a_piece_the_loop_is_everybody_elses_for_as_long() -> None:
    turns, pieces = Turns.of_this_loop(), []

    async def greedy() -> None:
        for _ in range(4):
            await turns.take()
            began = time.monotonic()
            compute(0.01)
            pieces.append((began, time.monotonic()))
            await asyncio.sleep(0)

    await asyncio.gather(*(greedy() for _ in range(4)))
    rests = [after[0] - before[1] for before, after in itertools.pairwise(sorted(pieces))]
    assert len(rests) == 15 and min(rests) >= 0.009


async def test_one_that_went_away_is_passed_over() -> None:
    turns = Turns.of_this_loop()
    await turns.take()
    gone, stays = asyncio.create_task(turns.take()), asyncio.create_task(turns.take())
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait_for(stays, 10)


async def test_items_come_whole_and_in_order_however_long_they_take() -> None:
    def slow() -> Iterator[int]:
        for number in range(5):
            compute(PIECE_SECONDS)
            yield number

    assert await in_pieces(iter([])) == []
    assert await in_pieces(slow()) == list(range(5))

    def fails() -> Iterator[int]:
        yield 1
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await in_pieces(fails())


@pytest.mark.parametrize(("size", "between"), [(LARGE_BYTES, []), (LARGE_BYTES + 1, ["others"])])
async def test_a_large_request_is_parsed_in_one_turn_and_worked_on_in_the_next(size: int, between: list[str]) -> None:
    order = list[str]()

    def parse(request: bytes) -> bytes:
        order.append("parsed")
        asyncio.get_running_loop().call_soon(order.append, "others")
        return request

    assert len(await _decoded(bytes(size), parse)) == size
    assert [*order, "worked on"] == ["parsed", *between, "worked on"]
