"""RoomSearch with ranks that answer as no rank of ours does."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.decode_core import DecodeRoom
from kvgrpc.transfer.protocol.types import Handle, RoomKey, Target
from kvgrpc.transfer.runtime.search import RoomSearch

RANKS = [Target(RankRef(RankId("P", dp=dp), 1), f"127.0.0.1:{dp + 1}") for dp in range(2)]


class Search(RoomSearch):
    """Asks ``answers`` instead of a rank."""

    def __init__(self, answers: dict[Target, list[RoomKey] | None]) -> None:
        self.answers = answers
        self.calls = 0
        self.found: list[tuple[RoomKey, Target]] = []
        self.again: list[RoomKey] = []
        super().__init__(
            self._no_channel, self._run, lambda room, target: self.found.append((room.key, target)), self._give_back
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

    def _give_back(self, room: DecodeRoom) -> None:
        self.again.append(room.key)


def room(number: int) -> DecodeRoom:
    return DecodeRoom(RoomKey(number), Handle())


async def test_a_rank_that_answers_nothing_at_once_is_not_asked_in_a_busy_loop() -> None:
    search = Search({RANKS[0]: []})
    search.add(room(1), RANKS)
    await asyncio.sleep(0.35)
    assert 2 <= search.calls <= 6
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


async def test_a_silent_rank_has_its_rooms_resolved_anew() -> None:
    search = Search({RANKS[1]: None})
    search.add(room(1), RANKS)
    search.add(room(2), RANKS)
    await search.task
    assert search.again == [RoomKey(1), RoomKey(2)] and search.calls == 2
