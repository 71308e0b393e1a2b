"""Places that callers, their hosts and their connections share: whoever takes leaves as many to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvgrpc.errors import TooManyRequests
from kvgrpc.rpc.callers import CALLER, PEER, Caller
from kvgrpc.rpc.shares import AT_LEAST, Shares, TakenShare
from tests.support.callers import calls_of


@pytest.fixture(autouse=True)
def nobody_afterwards() -> Iterator[None]:
    with calls_of(""):
        yield


def be(name: str, peer: str) -> None:
    CALLER.set(Caller(name))
    PEER.set(peer)


def take_all(shares: Shares, name: str, peer: str, places: int = 1) -> list[TakenShare]:
    be(name, peer)
    found = []
    while True:
        try:
            found.append(shares.take(places))
        except TooManyRequests:
            return found


def test_a_connection_leaves_places_to_its_host_which_leaves_some_to_its_caller() -> None:
    shares = Shares(1_024, "things")
    got = [
        len(take_all(shares, name, f"ipv4:{peer}"))
        for name, peer in (
            ("rank *", "10.0.0.1:1"),
            ("rank *", "10.0.0.1:2"),
            ("rank *", "10.0.0.2:1"),
            ("other", "10.0.0.3:1"),
        )
    ]
    assert got == [128, 64, 80, 94]
    assert shares.count == sum(got) < 1_024


def test_a_caller_that_is_its_host_has_no_second_account_of_it() -> None:
    shares = Shares(1_024, "things")
    assert len(take_all(shares, "10.0.0.1", "ipv4:10.0.0.1:1")) == 256
    assert len(take_all(shares, "unix:", "unix:")) == 384


def test_of_what_outlives_connections_they_have_no_share() -> None:
    shares = Shares(1_024, "rows", connections=False)
    assert len(take_all(shares, "rank *", "ipv4:10.0.0.1:1")) == 256
    assert len(take_all(shares, "rank *", "ipv4:10.0.0.1:2")) == 0


def test_places_of_one_caller_are_shared_by_its_hosts_and_connections() -> None:
    shares = Shares(1_024, "calls of one caller", "setting", of_one="rank *")
    greedy = take_all(shares, "rank *", "ipv4:10.0.0.1:1")
    assert len(greedy) == 256
    assert len(take_all(shares, "rank *", "ipv4:10.0.0.2:1")) == 192
    small = Shares(AT_LEAST, "calls of one caller", "setting", of_one="rank *")
    assert len(take_all(small, "rank *", "ipv4:10.0.0.1:1")) == AT_LEAST, "few places are not divided"
    with pytest.raises(TooManyRequests, match=r"rank \*.*its setting is the bound") as refused:
        small.take()
    assert refused.value.metadata == {"limit": "16", "value": "17", "scope": "calls of one caller"}


def test_a_refusal_says_whose_share_it_is() -> None:
    shares = Shares(1_024, "things")
    take_all(shares, "rank *", "ipv4:10.0.0.1:1")
    with pytest.raises(TooManyRequests, match="one connection") as refused:
        shares.take()
    assert refused.value.metadata["scope"] == "things of one connection" and refused.value.retry_after


def test_what_was_given_back_is_nobodys() -> None:
    shares = Shares(1_024, "bytes")
    for taken in take_all(shares, "rank *", "ipv4:10.0.0.1:1", 8):
        shares.give_back(taken, 7)
        shares.give_back(taken, 1)
    assert shares.count == 0 and not shares._of_callers


async def test_who_waits_gets_its_turn_and_connections_one_place_after_the_other() -> None:
    shares = Shares(64, "bytes")
    order: list[str] = []

    async def one(name: str, peer: str) -> TakenShare:
        be(name, peer)
        taken = await shares.take_in_turn(16)
        order.append(peer)
        return taken

    greedy = [asyncio.create_task(one("g", "ipv4:10.0.0.1:1")) for _ in range(6)]
    await asyncio.sleep(0)
    assert len(order) == 1, "16 of 64 are what a connection may have in any case"
    honest = asyncio.create_task(one("h", "ipv4:10.0.0.2:1"))
    await asyncio.sleep(0)
    assert order[1:] == ["ipv4:10.0.0.2:1"], "others have places left"
    again = asyncio.create_task(one("h", "ipv4:10.0.0.2:1"))
    await asyncio.sleep(0)
    greedy[1].cancel()
    await asyncio.sleep(0)
    while not again.done():
        done = next(task for task in (honest, *greedy) if task.done() and not task.cancelled())
        shares.give_back(done.result())
        honest, greedy = again if done is honest else honest, [task for task in greedy if task is not done]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert order.count("ipv4:10.0.0.1:1") <= 3
    for task in greedy:
        task.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)


def test_places_are_told_by_caller_and_host() -> None:
    shares = Shares(1_024, "rows", connections=False)
    for name, peer, places in (
        ("rank *", "ipv4:10.0.0.1:1", 3),
        ("rank *", "ipv4:10.0.0.2:1", 4),
        ("10.0.0.3", "ipv4:10.0.0.3:1", 5),
        ("10.0.0.3", "ipv4:10.0.0.3:2", 6),
    ):
        be(name, peer)
        shares.take(places)
    shares.hold((), 7)
    told = {("rank *", "10.0.0.1"): 3, ("rank *", "10.0.0.2"): 4, ("10.0.0.3", "10.0.0.3"): 11}
    assert shares.by_host() == told
