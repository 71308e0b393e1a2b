"""Peers that keep no rule: a decode that dials and says anything, a prefill that answers anything. Nobody else suffers.

What they say parses, or ends their session: it goes through the product's own wire format. They know every room of the
others; the rooms that they are the first to name are theirs, unless their senders name an engine (10, ownership).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvgrpc.errors import Failure, KvGrpcError, Reason
from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer import wire
from kvgrpc.transfer.protocol.prefill.core import PrefillCore, PrefillPair
from kvgrpc.transfer.protocol.types import PrefillEntry, RoomKey, RoomState, Writes
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.v1.common_pb2 import PageSet

if TYPE_CHECKING:
    from tests.simulation.processes import DecodeProcess, PrefillProcess
    from tests.simulation.world import World

OWN_ROOMS = 10**6  # and above: nobody else asks for these
_KNOWN_ROOMS = 60
_POOL_PAGES = 10


class RogueStream:
    """Of which only the rogue knows; the core may close it as often as it likes."""


class RogueDecode:
    """Dials any prefill rank and sends frames of wrong, repeated, contradictory and foreign entries."""

    def __init__(self, world: World, number: int) -> None:
        self.ref = RankRef(RankId(f"X{number}"), 1)
        self._world = world
        self._streams: dict[RankRef, list[RogueStream]] = {}
        self._number = 0

    def step(self, rnd: random.Random) -> None:
        """What it does in a tick."""
        prefill = rnd.choice(self._world.prefills) if self._world.prefills else None
        if prefill is None or prefill.state != "running" or rnd.random() < 0.7:
            return
        before = owned_by_others(prefill, self.ref)
        streams = self._streams.setdefault(prefill.ref, [])
        if not streams or rnd.random() < 0.1:
            self._dial(prefill, rnd, streams)
        elif rnd.random() < 0.05:
            prefill.core.on_end(rnd.choice(streams), self.ref)
        else:
            self._frame(prefill, rnd, streams[-1] if rnd.random() < 0.9 else rnd.choice(streams))
        self._check(prefill, before)

    def leave(self) -> None:
        """Its process is gone."""
        for prefill in self._world.prefills:
            for stream in self._streams.get(prefill.ref, ()):
                prefill.core.on_end(stream, self.ref)

    def _dial(self, prefill: PrefillProcess, rnd: random.Random, streams: list[RogueStream]) -> None:
        stream = RogueStream()
        self._number += rnd.choice([1, 1, 1, 0, -1])
        to = prefill.ref if rnd.random() < 0.9 else RankRef(prefill.ref.rank, 1)
        if prefill.core.on_hello(stream, self.ref, to, self._number, self) is None:
            streams.append(stream)
            pair = prefill.core.pairs[self.ref]
            pair.places = rnd.choice([1, 1, 2])
            pair.place = rnd.randrange(pair.places)
            pair.parts = self._world.parts

    def _frame(self, prefill: PrefillProcess, rnd: random.Random, stream: RogueStream) -> None:
        frame = pb.SessionRequest(rooms=[self._entry(prefill, rnd) for _ in range(rnd.choice([1, 2, 12]))])
        frame.forget_rooms.extend(rnd.randrange(1, _KNOWN_ROOMS) for _ in range(rnd.choice([0, 0, 20])))
        if rnd.random() < 0.3:
            frame.rooms.extend(list(frame.rooms))
        try:
            read = pb.SessionRequest.FromString(frame.SerializeToString())
            entries = wire.parse_request(read, [("kv", _POOL_PAGES)], (_POOL_PAGES,))
            prefill.core.on_frame(stream, self.ref, entries)
        except KvGrpcError:
            prefill.core.on_end(stream, self.ref)
        pair = prefill.core.pairs.get(self.ref)
        if pair is not None and pair.stream is stream and rnd.random() < 0.5:
            prefill.core.flush(pair)

    def _entry(self, prefill: PrefillProcess, rnd: random.Random) -> pb.DecodeRoom:
        key = RoomKey(OWN_ROOMS + rnd.randrange(40), rnd.randrange(2))
        named = sorted(key for key, record in prefill.core.rooms.items() if record.owner is not None)
        if named and rnd.random() < 0.5:
            key = rnd.choice(named)
        bound = sorted(prefill.core._records.owners.named)
        if bound and rnd.random() < 0.3:
            key = rnd.choice(bound)
        entry = pb.DecodeRoom(
            room=key.room, attempt=key.attempt, want=pb.Want.ValueType(rnd.choice([1, 2, 2, 3, 3, 4]))
        )
        entry.time_left_ms = rnd.choice([0, 1, 5000, 2**32 - 1])
        if rnd.random() < 0.01:
            entry.want = pb.Want.ValueType(9)
        if rnd.random() < 0.7:
            entry.pages.extend(_pages(rnd) for _ in range(rnd.choice([1, 1, 1, 2])))
            entry.first_page = rnd.choice([0, 0, 1, 2**32 - 1])
        if rnd.random() < 0.2:
            entry.traceparent = "0" * rnd.choice([55, 56])
        if rnd.random() < 0.2:
            entry.failure.reason = rnd.choice([0, 3, 9, 99])  # type: ignore[assignment]
        return entry

    def _check(self, prefill: PrefillProcess, before: dict[RoomKey, tuple[object, ...]]) -> None:
        if owned_by_others(prefill, self.ref) != before:
            self._world.violate("a rogue decode changed a room of others", prefill.ref)
        core, bounds = prefill.core, prefill.core.bounds
        core.ignored_entries = 0
        pair = core.pairs.get(self.ref)
        if pair is None:
            return
        if pair.open_rooms > bounds.unclaimed_per_session:
            self._world.violate(f"a rogue decode has {pair.open_rooms} rooms", prefill.ref)
        if isinstance(core, LyingCore):
            return
        if len(pair.answers) > bounds.unclaimed or len(pair.pending_rooms) > len(pair.rooms) + len(pair.answers):
            self._world.violate("a rogue decode has more answers than it may", prefill.ref)


class LyingCore(PrefillCore):
    """The real core with answers that are made up. Its data plane writes what is right, or nothing."""

    liar = random.Random(0)

    def tick(self) -> None:
        super().tick()
        for pair in self.pairs.values():
            if pair.up and self.liar.random() < 0.3:
                self._records.pending.add(pair, RoomKey(OWN_ROOMS))

    def flush(self, pair: PrefillPair) -> list[PrefillEntry]:
        rnd, honest = self.liar, super().flush(pair)
        lies = [entry for entry in honest if rnd.random() < 0.5]
        for _ in range(rnd.choice([0, 1, 20])):
            known = sorted(pair.rooms)
            key = rnd.choice(known) if known and rnd.random() < 0.4 else RoomKey(rnd.randrange(1, 60), rnd.randrange(2))
            lies.append(self._lie(key, rnd))
        return lies * rnd.choice([1, 1, 2])

    def _lie(self, key: RoomKey, rnd: random.Random) -> PrefillEntry:
        reason = rnd.choice([Reason.SERVER_DRAINING, Reason.STALE_EPOCH, Reason.ROOM_CONFLICT, Reason.UNSPECIFIED])
        failure = None if rnd.random() < 0.3 else Failure(reason, "a lie", {}, str(self.me))
        state, writes = rnd.choice(list(RoomState)), rnd.choice(list(Writes))
        aux = bytes(rnd.choice([0, 0, 5, self.bounds.aux_bytes + 1]))
        return PrefillEntry(key, state, writes, rnd.choice([0, 1, 2**32 - 1]), aux, failure)


def owned_by_others(prefill: PrefillProcess, rogue: RankRef) -> dict[RoomKey, tuple[object, ...]]:
    """What a rogue decode must leave as it is."""
    return {
        key: (record.owner, record.state, record.writes, record.want, record.destination, record.claimed, record.handle)
        for key, record in prefill.core.rooms.items()
        if record.owner is None or record.owner.ref != rogue
    }


def owed_by_others(decode: DecodeProcess, liar: RankRef) -> dict[RoomKey, tuple[object, ...]]:
    """What a lying prefill must leave as it is."""
    return {
        key: (room.state, room.ended, room.failure, room.handle.poll, room.handle.release_safe, tuple(_parts_of(room)))
        for key, room in decode.core.rooms.items()
        if liar not in [part.pair.ref for part in room.parts]
    }


def _parts_of(room: object) -> Iterator[tuple[object, ...]]:
    from kvgrpc.transfer.protocol.decode.room import DecodeRoom

    assert isinstance(room, DecodeRoom)
    for part in room.parts:
        yield part.pair, part.state, part.writes, part.pages_done, part.forgot


def _pages(rnd: random.Random) -> PageSet:
    pages = PageSet(pool=rnd.choice([0, 0, 0, 1]))
    kind = rnd.randrange(5)
    if kind == 0:
        pages.pages_u32_le = bytes(rnd.choice([0, 4, 7, 12]))  # page 0 again and again, or half a number
    elif kind == 1:
        pages.pages_u32_le = rnd.randrange(2**32).to_bytes(4, "little")
    else:
        pages.run_starts.append(rnd.choice([0, 5, 2**32 - 1]))
        pages.run_lengths.extend([rnd.choice([1, 5, 2**24, 2**32 - 1])] * rnd.choice([1, 1, 2]))
    return pages
