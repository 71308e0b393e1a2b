"""The rooms of a manager as people read them: those of its core, and the last that went well or failed."""

from __future__ import annotations

import heapq
import operator
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from kvgrpc.errors import Failure
from kvgrpc.model import RankRef, Role
from kvgrpc.observability.hand_offs import HandOff, HandOffs
from kvgrpc.rpc.turns import in_pieces, next_turn
from kvgrpc.transfer.protocol.types import (
    PAST_FAILURES,
    STATE_SUCCESS,
    WRITES_SETTLED,
    Destination,
    Handle,
    RoomKey,
    RoomState,
)
from kvgrpc.transfer.runtime.past_rooms import PastRooms
from kvgrpc.transfer.tables import PartRow, RoomEnd, RoomRow, SessionRow

_ROOMS_LOOKED_AT_IN_A_TURN = 512
_BEHIND_ALL_ROOMS = RoomKey(2**64)


class AnyRoom(Protocol):
    """The fields that a room's record has at either core."""

    @property
    def key(self) -> RoomKey: ...

    @property
    def state(self) -> RoomState: ...

    @property
    def handle(self) -> Handle | None: ...

    @property
    def failure(self) -> Failure | None: ...

    @property
    def destination(self) -> Destination | None: ...

    @property
    def page_count(self) -> int: ...

    @property
    def traceparent(self) -> str: ...


Record = TypeVar("Record", bound=AnyRoom)


class Core(Protocol[Record]):
    """The parts of either core that the managers read."""

    @property
    def rooms(self) -> Mapping[RoomKey, Record]: ...

    @property
    def open_rooms(self) -> int: ...

    def fail(self, record: Record, failure: Failure, /) -> None: ...


class RoomTables(ABC, Generic[Record]):
    """For the loop thread. One turn of the loop looks at five hundred rooms at most."""

    core: Core[Record]
    side: Role

    def __init__(self, hand_offs: HandOffs) -> None:
        self._hand_offs = hand_offs
        self._failed = PastRooms(PAST_FAILURES)

    @abstractmethod
    def sessions(self) -> Iterator[SessionRow]: ...

    async def page_of_rooms(
        self, after: RoomKey, count: int, wanted: Callable[[RoomRow], bool] | None = None
    ) -> tuple[list[RoomRow], RoomKey | None, int]:
        """The first ``count`` rooms after ``after`` that are ``wanted``, in order; behind which room the next page
        begins, None: there is none; and how many rooms there are in all. Rooms that went meanwhile are left out."""
        keys = self._all_keys()

        def is_wanted(key: RoomKey) -> bool:
            row = self._row_of(key)
            return row is not None and (wanted is None or wanted(row))

        found: list[RoomKey] = []
        for start in range(0, len(keys), _ROOMS_LOOKED_AT_IN_A_TURN):
            if start:
                await next_turn()
            end = found[-1] if len(found) > count else _BEHIND_ALL_ROOMS
            some = [key for key in keys[start : start + _ROOMS_LOOKED_AT_IN_A_TURN] if after < key < end]
            found = heapq.nsmallest(count + 1, found + (some if wanted is None else list(filter(is_wanted, some))))
        rows = await in_pieces(map(self._row_of, found[:count]))
        more = found[count - 1] if len(found) > count else None
        # By what they are now: they may have changed since they were found.
        return [row for row in rows if row is not None and (wanted is None or wanted(row))], more, len(keys)

    async def newest_failed(
        self, count: int, wanted: Callable[[RoomRow], bool] | None = None
    ) -> tuple[list[RoomRow], int]:
        """The ``count`` rooms of ``page_of_rooms`` that failed last, the newest first, and how many rooms there are."""
        keys = self._all_keys()
        newest: list[tuple[float, RoomKey, RoomRow]] = []
        for start in range(0, len(keys), _ROOMS_LOOKED_AT_IN_A_TURN):
            if start:
                await next_turn()
            found = map(self._row_of, keys[start : start + _ROOMS_LOOKED_AT_IN_A_TURN])
            rows = [row for row in found if row is not None and (wanted is None or wanted(row))]
            failed = [(row.failure.time, row.key, row) for row in rows if row.failure is not None]
            newest = heapq.nlargest(count, newest + failed, key=operator.itemgetter(0, 1))
        return [row for _, _, row in newest], len(keys)

    async def slowest(self, count: int, wanted: Callable[[RoomRow], bool] | None = None) -> tuple[list[RoomRow], int]:
        """Of the last rooms that went well, the ``count`` that took longest, the slowest first, and how many rooms
        there are in all."""
        past = self._hand_offs.last_succeeded().values()
        by_length = sorted(past, key=lambda hand_off: sum(hand_off.stages()), reverse=True)
        rows = await in_pieces(self._row_of(RoomKey(hand_off.room, hand_off.attempt)) for hand_off in by_length)
        found = [row for row in rows if row is not None and (wanted is None or wanted(row))]
        return found[:count], len(self._all_keys())

    def room(self, key: RoomKey) -> RoomRow | None:
        self._pump()
        return self._row_of(key)

    async def rooms_by_state(self) -> Mapping[str, int]:
        found: Counter[RoomState] = Counter()
        keys = self._keys()
        for start in range(0, len(keys), _ROOMS_LOOKED_AT_IN_A_TURN):
            if start:
                await next_turn()
            records = map(self._record, keys[start : start + _ROOMS_LOOKED_AT_IN_A_TURN])
            found.update(self._state(record) for record in records if record is not None)
        return {state.name.lower(): found[state] for state in RoomState}

    # For subclasses.

    @abstractmethod
    def _pump(self) -> None:
        """Does what the core asks after something happened."""

    @abstractmethod
    def _row(self, record: Record) -> RoomRow: ...

    @abstractmethod
    def _peers(self, record: Record) -> Sequence[RankRef]:
        """Returns who owes a part of it, or is owed one, as far as they are known."""

    def _keys(self) -> list[RoomKey]:
        """Of all rooms that the core knows."""
        return list(self.core.rooms)

    def _record(self, key: RoomKey) -> Record | None:
        return self.core.rooms.get(key)

    def _state(self, record: Record) -> RoomState:
        return record.state

    def _keep_failed(self, record: Record) -> None:
        """The core may drop it: people may still ask why."""
        self._failed.keep(self._row(record), time.monotonic())

    def _all_keys(self) -> list[RoomKey]:
        self._pump()  # rooms may have been dropped since
        return [*self._keys(), *(key for key in self._past_keys() if self._record(key) is None)]

    def _past_keys(self) -> Iterator[RoomKey]:
        yield from self._failed
        for room, attempt in self._hand_offs.last_succeeded():
            key = RoomKey(room, attempt)
            if key not in self._failed:
                yield key

    def _row_of(self, key: RoomKey) -> RoomRow | None:
        record = self._record(key)
        if record is None and key in self._failed:
            row, since = self._failed[key]
            return replace(row, age_seconds=row.age_seconds + time.monotonic() - since)
        hand_off = self._hand_offs.last_succeeded().get((key.room, key.attempt))
        if record is not None:
            row = self._row(record)
            return replace(row, end=_end(hand_off)) if hand_off and row.state is STATE_SUCCESS else row
        return None if hand_off is None else _succeeded_row(key, self.side, hand_off)


def _succeeded_row(key: RoomKey, side: Role, hand_off: HandOff) -> RoomRow:
    """Of a room that the core has forgotten."""
    parts = [
        PartRow(peer, STATE_SUCCESS, WRITES_SETTLED, hand_off.pages)
        for peer in hand_off.peers
        if isinstance(peer, RankRef)
    ]
    age = time.monotonic() - (hand_off.began or hand_off.ended)
    return RoomRow(
        key,
        side,
        STATE_SUCCESS,
        tuple(parts),
        hand_off.pages,
        False,
        False,
        age,
        None,
        hand_off.traceparent,
        _end(hand_off),
    )


def _end(hand_off: HandOff) -> RoomEnd:
    ended_at = time.time() - (time.monotonic() - hand_off.ended)
    return RoomEnd(ended_at, hand_off.nbytes, hand_off.stages())
