"""Deadlines say what a dict of due ticks would say, and keep nothing of what is over."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvgrpc.transfer.protocol.timers import Deadlines
from kvgrpc.transfer.protocol.types import RoomKey

actions = st.lists(st.tuples(st.sampled_from(["set", "clear"]), st.integers(0, 5), st.integers(1, 8)), max_size=6)


@dataclass
class Room:
    key: RoomKey
    deadline: int = 0


@given(st.lists(actions, max_size=12))
def test_it_equals_a_dict(ticks: list[list[tuple[str, int, int]]]) -> None:
    deadlines, naive = Deadlines[Room](), dict[int, int]()
    rooms = [Room(RoomKey(number)) for number in range(6)]
    for now, chosen in enumerate([*ticks, *([] for _ in range(9))], 1):
        for action, number, delay in chosen:
            if action == "set":
                deadlines.set(rooms[number], now + delay)
                naive[number] = now + delay
            else:
                deadlines.clear(rooms[number])
                naive.pop(number, None)
        due = {number for number, tick in naive.items() if tick == now}
        assert {room.key.room for room in deadlines.due(now)} == due
        naive = {number: tick for number, tick in naive.items() if tick != now}
        assert {room.key.room: room.deadline for room in rooms if room.deadline} == naive
        assert len(deadlines) == len(naive)
    assert not deadlines._due
