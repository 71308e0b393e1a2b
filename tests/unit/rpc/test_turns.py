"""Long work of a loop comes in pieces: one at a time, connections in turn, and rest between."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

import kvgrpc.rpc.turns
from kvgrpc.errors import TooManyRequests
from kvgrpc.rpc.callers import CALLER, PEER, Caller
from kvgrpc.rpc.interceptors.chain import _decoded
from kvgrpc.rpc.turns import (
    LARGE_BYTES,
    LONGEST_REST_SECONDS,
    PIECE_SECONDS,
    SWITCH_SECONDS,
    Turns,
    _Line,
    _Waiting,
    in_pieces,
)
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def own_switch_interval(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A loop that ends while hand-offs go on puts nothing back."""
    monkeypatch.setattr(kvgrpc.rpc.turns, "_usual_switch", None)
    usual = sys.getswitchinterval()
    yield
    sys.setswitchinterval(usual)


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


async def rests_between_pieces() -> list[float]:
    """Of four callers, with four pieces of 10 ms each."""
    turns, pieces = Turns.of_this_loop(), []

    async def greedy() -> None:
        for _ in range(4):
            await turns.take()
            began = time.monotonic()
            compute(0.01)
            pieces.append((began, time.monotonic()))
            await asyncio.sleep(0)

    await asyncio.gather(*(greedy() for _ in range(4)))
    assert len(pieces) == 16
    return [after[0] - before[1] for before, after in itertools.pairwise(sorted(pieces))]


async def test_after_a_piece_the_loop_is_everybody_elses_for_as_long() -> None:
    async def busy() -> None:
        while True:
            compute(0.0005)
            await asyncio.sleep(0)

    others = asyncio.create_task(busy())
    rests = await rests_between_pieces()
    others.cancel()
    assert min(rests) >= 0.009


async def test_a_loop_that_nobody_else_wants_does_not_rest() -> None:
    """What it takes by itself is 0.1 ms a piece."""
    assert statistics.median(await rests_between_pieces()) < 0.005


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


class Steps:
    """Calls of which each step computes for a while; ``of_turns``: who had steps in each turn of the loop."""

    def __init__(self) -> None:
        self.turns = Turns.of_this_loop()
        self.of_turns: list[list[str]] = [[]]
        self._counting = asyncio.create_task(self._count())

    async def _count(self) -> None:
        while True:
            self.of_turns.append([])
            await asyncio.sleep(0)

    async def call(self, name: str, steps: int, seconds: float = 0.0005) -> str:
        async def steps_of_it() -> str:
            CALLER.set(Caller(name))
            for _ in range(steps):
                self.of_turns[-1].append(name)
                compute(seconds)
                await asyncio.sleep(0)
            return name

        PEER.set(f"ipv4:10.0.0.{len(name)}:1")
        return await self.turns.in_turns(steps_of_it())

    async def ended(self, *calls: Coroutine[Any, Any, str]) -> list[str]:
        found = await asyncio.wait_for(asyncio.gather(*calls), 60)
        self._counting.cancel()
        return found


@pytest.mark.parametrize("hurries", [False, True])
async def test_while_hand_offs_go_on_a_turn_of_the_loop_has_few_steps_of_all_calls(hurries: bool) -> None:
    steps = Steps()
    if hurries:
        steps.turns._hurries_until = float("inf")
    assert await steps.ended(*(steps.call("greedy", 2) for _ in range(20))) == ["greedy"] * 20
    assert sum(map(len, steps.of_turns)) == 40
    assert (max(map(len, steps.of_turns)) <= 2) is hurries  # two, where the turn of who counts fell in between
    assert not steps.turns._waiting


async def test_while_hand_offs_go_on_steps_rest_as_long_as_they_took_and_thrice_as_long_as_they_waited() -> None:
    steps, took, owed = Steps(), 0.0, 0.0
    steps.turns._hurries_until = float("inf")
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def timed(waits: float) -> str:
        async def work() -> str:
            nonlocal took, owed
            for _ in range(20):
                before, own_before = loop.time(), time.thread_time()
                compute(0.001)
                time.sleep(waits)  # noqa: ASYNC251  # as for a processor, or for the interpreter
                wall, own = loop.time() - before, time.thread_time() - own_before
                took += wall
                owed += min(own + 3 * (wall - own), LONGEST_REST_SECONDS)
                await asyncio.sleep(0)
            return ""

        return await steps.turns.in_turns(work())

    await steps.ended(timed(0.0), timed(0.002))
    assert loop.time() - began > took + owed - LONGEST_REST_SECONDS  # the last rest is nobody's


async def test_while_hand_offs_go_on_a_caller_waits_for_no_second_step_of_another() -> None:
    steps = Steps()
    steps.turns._hurries_until = float("inf")
    await steps.ended(*(steps.call("greedy", 3) for _ in range(20)), steps.call("good", 5))
    order = [name for names in steps.of_turns for name in names]
    # Beside those of a host that were not asked yet who they are, and those of the greedy caller that were.
    assert max(at for at, name in enumerate(order) if name == "good") < 20 < len(order)


async def test_while_hand_offs_go_on_a_session_waits_for_one_step_and_no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With frames that are parsed in turns of their own, beside calls that owe a rest that never ends."""
    monkeypatch.setattr(kvgrpc.rpc.turns, "LONGEST_REST_SECONDS", float("inf"))
    steps = Steps()
    steps.turns._hurries_until = float("inf")
    steps.turns._owed, steps.turns._owed_at = 1e6, time.monotonic()
    greedy = [asyncio.create_task(steps.call(f"greedy {number}", 100)) for number in range(8)]
    await until(lambda: sum(map(len, steps.turns._waiting._calls.values())) == 8)

    async def session() -> None:
        CALLER.set(Caller("peer"))
        for _ in range(5):
            await steps.turns.take()
            compute(0.0005)
            await asyncio.sleep(0)

    await asyncio.wait_for(session(), 20)
    for each in greedy:
        each.cancel()
    steps._counting.cancel()
    assert len([name for names in steps.of_turns for name in names]) < 20


async def waiting(turns: Turns, host: str, port: int = 1, *, probe: bool = False) -> str:
    """A call that takes a place, and its turn when that comes."""

    async def nothing() -> str:
        return host

    PEER.set(f"ipv4:{host}:{port}")
    leave = turns.place(probe=probe)
    return await turns.in_turns(nothing(), leave)


async def test_a_host_leaves_places_to_others_and_its_connections_to_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvgrpc.rpc.turns, "MOST_WAITING", 256)
    monkeypatch.setattr(kvgrpc.rpc.turns, "MOST_PROBES", 2)
    turns = Turns()
    turns._hurries_until, turns._busy = float("inf"), True  # somebody's piece, that does not end
    asked = [asyncio.create_task(waiting(turns, "10.0.0.1", port)) for port in (1, 2) for _ in range(300)]
    asked += [asyncio.create_task(waiting(turns, "10.0.0.2")) for _ in range(10)]
    asked += [asyncio.create_task(waiting(turns, "10.0.0.1", 3, probe=True)) for _ in range(2)]
    await until(lambda: turns._places.count == 64 + 32 + 10 and turns._probes.count == 1)
    refused = [task for task in asked if task.done()]
    assert len(refused) == 500 + 4 + 1
    assert {type(task.exception()) for task in refused} == {TooManyRequests}
    turns._next()
    assert len(await asyncio.wait_for(asyncio.gather(*(task for task in asked if task not in refused)), 20)) == 107
    assert not turns._places.count and not turns._probes.count


async def test_a_call_that_ends_while_it_waits_leaves_its_place() -> None:
    turns = Turns()
    turns._hurries_until, turns._busy = float("inf"), True
    task = asyncio.create_task(waiting(turns, "10.0.0.1"))
    await until(lambda: turns._places.count == 1)
    task.cancel()
    await asyncio.wait([task])
    assert not turns._places.count


async def test_refusals_rest_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvgrpc.rpc.turns, "MOST_WAITING", 0)
    monkeypatch.setattr(kvgrpc.rpc.turns, "REFUSAL_REST_SECONDS", 0.02)
    turns = Turns()
    turns._hurries_until, turns._busy = float("inf"), True
    began = time.monotonic()
    for _ in range(10):
        await turns.room()
        with pytest.raises(TooManyRequests):
            turns.place(probe=False)
    await turns.room()
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("steps", [1, 0], ids=["while it waits for its turn", "while it awaits"])
async def test_a_call_that_is_cancelled_hears_of_it_at_once(steps: int) -> None:
    turns, heard = Turns.of_this_loop(), list[str]()
    turns._hurries_until = float("inf")

    async def call() -> None:
        try:
            for _ in range(steps):
                await asyncio.sleep(0)
            await asyncio.get_running_loop().create_future()
        finally:
            heard.append("ends")

    async def made() -> None:
        await turns.in_turns(call())

    task = asyncio.create_task(made())
    await asyncio.sleep(0)
    turns._busy = True  # somebody's piece, that rests long
    await asyncio.sleep(0.01)  # a while in which it must not go on
    assert not heard
    task.cancel()
    assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
    assert heard == ["ends"]


@pytest.mark.parametrize("hurries", [False, True])
async def test_a_call_in_turns_gets_what_it_awaits_and_gives_what_it_raises(hurries: bool) -> None:
    turns = Turns.of_this_loop()
    if hurries:
        turns._hurries_until = float("inf")

    async def fails() -> None:
        await asyncio.sleep(0.001)  # a slow part
        raise KeyError("within")

    async def call() -> str:
        with pytest.raises(KeyError):
            await asyncio.gather(fails())
        await turns.take()  # it has its turn
        raise ValueError(await asyncio.sleep(0.001, "awaited"))  # a slow part

    with pytest.raises(ValueError, match="awaited"):
        await asyncio.wait_for(turns.in_turns(call()), 20)


@pytest.mark.parametrize(("size", "between"), [(LARGE_BYTES, []), (LARGE_BYTES + 1, ["others"])])
async def test_a_large_request_is_parsed_in_one_turn_and_worked_on_in_the_next(size: int, between: list[str]) -> None:
    order = list[str]()

    def parse(request: bytes) -> bytes:
        order.append("parsed")
        asyncio.get_running_loop().call_soon(order.append, "others")
        return request

    assert len(await _decoded(bytes(size), parse)) == size
    assert [*order, "worked on"] == ["parsed", *between, "worked on"]


async def test_while_hand_offs_go_on_who_had_least_of_the_loop_is_next() -> None:
    """A probe beside callers whose steps take long, and one that comes anew beside one that has waited."""
    steps = Steps()
    steps.turns._hurries_until = float("inf")
    greedy = [steps.call(f"greedy {n}", 12, 0.002) for n in range(4) for _ in range(2)]
    await steps.ended(*greedy, steps.call("good", 12, 0.0001))
    order = [name for names in steps.of_turns for name in names]
    before = order[: max(at for at, name in enumerate(order) if name == "good")]
    # One of each of the others for its first turns, and one step of somebody between each two of its own.
    assert sum(name != "good" for name in before) < 40 < len(order)


def test_who_comes_anew_each_time_keeps_nobody_waiting_for_ever() -> None:
    """Callers that connect for one step, of which one waits whenever another has had its step."""
    line, order = _Line[str](), list[str]()
    line.enter("stays")
    assert line.next() == "stays"
    line.charge("stays", 0.001)
    line.enter("stays")
    for number in range(20):
        line.enter(f"new {number}")
        order.append(line.next())
        line.charge(order[-1], 0.001)
    assert "stays" in order[:4]


def test_those_that_came_once_are_forgotten() -> None:
    waiting = _Waiting()
    for number in range(5_000):
        waiting.charge((("", "10.0.0.1"), ("", "10.0.0.1", f"10.0.0.1:{number}")), 0.001)
        waiting.charge((("", f"host {number}"), ("", f"host {number}", "1")), 0.001)
    lines = [waiting._callers, *waiting._connections.values()]
    assert len(lines) < 2_000 and max(len(line.had) for line in lines) < 1_000


async def test_threads_change_sooner_while_calls_wait_beside_hand_offs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvgrpc.rpc.turns, "HURRY_SECONDS", 0.5)
    turns, usual = Turns.of_this_loop(), sys.getswitchinterval()
    seen = []

    async def call() -> None:
        compute(0.001)
        seen.append(sys.getswitchinterval())

    async def made() -> None:
        await turns.in_turns(call())

    turns.hurry()
    await made()
    assert seen == [usual], "nobody waited"
    await asyncio.gather(made(), made(), made())
    assert seen[-1] == SWITCH_SECONDS < usual
    await until(lambda: sys.getswitchinterval() == usual, 5)


def test_what_a_loop_that_ended_left_short_the_next_one_puts_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvgrpc.rpc.turns, "HURRY_SECONDS", 0.5)
    usual = sys.getswitchinterval()

    async def call() -> None:
        compute(0.001)

    async def wait_beside_a_hand_off() -> None:
        turns = Turns.of_this_loop()
        turns.hurry()
        await asyncio.gather(turns.in_turns(call()), turns.in_turns(call()))

    async def goes_on() -> None:
        await wait_beside_a_hand_off()
        await until(lambda: sys.getswitchinterval() == usual, 5)

    asyncio.run(wait_beside_a_hand_off())
    assert sys.getswitchinterval() == SWITCH_SECONDS
    asyncio.run(goes_on())


async def test_an_interval_that_somebody_set_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvgrpc.rpc.turns, "HURRY_SECONDS", 0.5)
    turns = Turns.of_this_loop()

    async def call() -> None:
        compute(0.001)

    async def made() -> None:
        await turns.in_turns(call())

    turns.hurry()
    await asyncio.gather(made(), made())
    sys.setswitchinterval(0.002)
    await until(lambda: not turns._puts_back, 5)
    assert sys.getswitchinterval() == 0.002
