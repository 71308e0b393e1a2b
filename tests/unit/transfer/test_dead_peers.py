"""The kernel's tables are read beside the loop, once for all peers that are asked about meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvgrpc.dataplane.base import DataPlane
from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.decode.core import DecodePair
from kvgrpc.transfer.protocol.types import Target
from kvgrpc.transfer.runtime.dead_peers import DeadPeers
from kvgrpc.transfer.runtime.guarded import GuardedPlane


def pair(number: int) -> DecodePair:
    return DecodePair(Target(RankRef(RankId(f"P{number}"), 2), f"host:{number}"), 0)


def names(address: bytes) -> frozenset[str]:
    return frozenset({f"{address.decode()} -> us"})


def peers_of(look: Callable[[Sequence[bytes]], list[frozenset[str]]], tasks: list[asyncio.Task[None]]) -> DeadPeers:
    def begin(coroutine: Coroutine[None, None, None], name: str) -> Any:
        tasks.append(asyncio.create_task(coroutine))

    return DeadPeers(GuardedPlane(cast(DataPlane, SimpleNamespace(connections_from_each=look))), begin)


async def test_the_loop_goes_on_while_a_thread_looks_once_for_all() -> None:
    leave, threads, looks = threading.Event(), [threading.current_thread()], [0]

    def look(addresses: Sequence[bytes]) -> list[frozenset[str]]:
        threads.append(threading.current_thread())
        looks[0] += 1
        assert leave.wait(10)
        return [names(address) for address in addresses]

    tasks: list[asyncio.Task[None]] = []
    peers, pairs = peers_of(look, tasks), [pair(number) for number in range(8)]
    for number, each in enumerate(pairs):
        assert peers.connections(each, b"%d" % number) is None
    await asyncio.sleep(0.05)  # which a look on the loop would not let pass
    assert peers.connections(pairs[0], b"0") is None, "what it finds now may be older than the question"
    leave.set()
    await asyncio.gather(*tasks)
    assert looks == [2] and len(tasks) == 1 and threads[1] is not threads[0]
    assert [peers.connections(each, b"%d" % number) for number, each in enumerate(pairs)] == [
        names(b"%d" % number) for number in range(8)
    ]
    assert peers.connections(pairs[0], b"0") is None, "each answer is told once"
    await asyncio.gather(*tasks)


async def test_a_plane_that_raises_tells_nothing_and_is_asked_again() -> None:
    answers: list[list[frozenset[str]]] = [[names(b"1")]]

    def look(addresses: Sequence[bytes]) -> list[frozenset[str]]:
        if len(tasks) == 1:
            raise OSError("too many open files")
        return answers[0]

    tasks: list[asyncio.Task[None]] = []
    peers, one = peers_of(look, tasks), pair(1)
    for expected in (None, None, names(b"1")):
        assert peers.connections(one, b"1") == expected
        await asyncio.gather(*tasks)
    peers.forget(lambda pair: False)
    assert peers.connections(one, b"1") is None
    await asyncio.gather(*tasks)


async def test_without_a_thread_left_they_are_asked_about_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervised task that fails makes its process unhealthy for good."""

    def refused(*_: object) -> Any:
        raise RuntimeError("can't start new thread")

    tasks: list[asyncio.Task[None]] = []
    peers, one = peers_of(lambda addresses: [names(address) for address in addresses], tasks), pair(1)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "run_in_executor", refused)
        assert peers.connections(one, b"1") is None
        await asyncio.gather(*tasks)
    assert peers.connections(one, b"1") is None
    await asyncio.gather(*tasks)
    assert peers.connections(one, b"1") == names(b"1")
    await asyncio.gather(*tasks)
