"""RoomLocator with ranks that answer as no rank of ours does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from kvgrpc.errors import EngineNotFound
from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.decode.core import DecodeRoom
from kvgrpc.transfer.protocol.types import Handle, RoomKey, Target
from kvgrpc.transfer.runtime import room_locator as search_module
from kvgrpc.transfer.runtime.room_locator import RoomLocator

RANKS = [Target(RankRef(RankId("P", dp=dp), 1), f"127.0.0.1:{dp + 1}") for dp in range(2)]


class Search(RoomLocator):
    """Asks ``answers`` instead of a rank."""

    def __init__(self, answers: dict[Target, list[RoomKey] | None]) -> None:
        self.answers = answers
        self.calls = 0
        self.found: list[tuple[RoomKey, Target]] = []
        self.again: list[RoomKey] = []
        self.now: list[Target] | EngineNotFound | None = None
        self.failed: list[tuple[RoomKey, EngineNotFound]] = []
        self.over: list[tuple[RoomKey, list[Target]]] = []
        super().__init__(
            self._no_channel,
            self._run,
            lambda room, target: self.found.append((room.key, target)),
            self._give_back,
            self._who_is_there,
            lambda room, error: self.failed.append((room.key, error)),
            lambda room, targets: self.over.append((room.key, list(targets))),
        )

    async def _located(self, target: Target, keys: Sequence[RoomKey]) -> list[RoomKey] | None:
        self.calls += 1
        if target not in self.answers:
            await asyncio.Event().wait()
        return self.answers[target]

    def _no_channel(self, address: str) -> Any:
        raise AssertionError(f"{address} was dialled")

    def _run(self, coroutine: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        self.task = asyncio.get_running_loop().create_task(coroutine)
        return self.task

    async def _who_is_there(self, room: DecodeRoom) -> list[Target] | EngineNotFound | None:
        return self.now

    async def asked(self, times: int) -> None:
        end = time.monotonic() + 20.0
        while self.calls < times:
            assert time.monotonic() < end
            await asyncio.sleep(0.005)

    def _give_back(self, room: DecodeRoom) -> None:
        self.again.append(room.key)


def room(number: int) -> DecodeRoom:
    return DecodeRoom(RoomKey(number), Handle())


async def test_a_rank_that_answers_nothing_at_once_is_not_asked_in_a_busy_loop() -> None:
    search = Search({RANKS[0]: []})
    search.add(room(1), RANKS)
    began = time.monotonic()
    await search.asked(4)
    assert time.monotonic() - began > 1.5 * search_module._FRUITLESS_PAUSE_SECONDS
    search.task.cancel()


async def test_rooms_that_were_not_asked_for_are_ignored() -> None:
    search = Search({RANKS[0]: [RoomKey(7), RoomKey(1)]})
    search.add(room(1), RANKS)
    await search.task
    assert search.found == [(RoomKey(1), RANKS[0])]


async def test_a_room_that_has_ended_is_looked_for_no_more() -> None:
    ended = room(1)
    ended.ended = True
    search = Search({RANKS[0]: []})
    search.add(ended, RANKS)
    await search.task
    assert not search.found and not search.again
    ((key, ranks),) = search.over
    assert key == ended.key and set(ranks) == set(RANKS), "wherever its sender is, it is to hear of the end"


async def test_what_a_rank_has_that_the_registry_says_is_gone_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "_PAUSE_SECONDS", 0.01)
    search = Search({RANKS[0]: [], RANKS[1]: None})
    search.now = EngineNotFound("rank 1 is gone")
    search.add(room(1), RANKS)
    await asyncio.wait_for(search.task, 10.0)
    assert search.failed == [(RoomKey(1), search.now)] and not search.again


async def test_a_dead_rank_ends_nothing_for_rooms_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "_PAUSE_SECONDS", 0.05)
    search = Search({RANKS[0]: [], RANKS[1]: None})
    search.add(room(1), RANKS)
    await search.asked(8)
    assert not search.again and not search.task.done(), "it is looked for on"
    search.answers[RANKS[0]] = [RoomKey(1)]  # its sender comes, long after the dead rank did not answer
    await asyncio.wait_for(search.task, 5.0)
    assert search.found == [(RoomKey(1), RANKS[0])] and not search.again


async def test_the_successor_of_a_dead_rank_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "_PAUSE_SECONDS", 0.05)
    successor = Target(RankRef(RankId("P", dp=1), 2), "127.0.0.1:9")
    search = Search({RANKS[0]: [], RANKS[1]: None, successor: [RoomKey(1)]})
    search.now = [RANKS[0], successor]
    search.add(room(1), RANKS)
    await asyncio.wait_for(search.task, 5.0)
    assert search.found == [(RoomKey(1), successor)]


async def test_where_no_rank_answers_the_rooms_are_resolved_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "_PAUSE_SECONDS", 0.05)
    search = Search({RANKS[0]: None, RANKS[1]: None})
    search.add(room(1), RANKS)
    search.add(room(2), RANKS)
    await asyncio.wait_for(search.task, 5.0)
    assert search.again == [RoomKey(1), RoomKey(2)]
