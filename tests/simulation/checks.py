"""What must hold: bounds in time after a single fault; at the end nothing is open, held or kept without need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvgrpc.transfer.protocol.decode.core import DecodePart, DecodeRoom
from kvgrpc.transfer.protocol.prefill.core import PrefillCore, PrefillPair, PrefillRoom
from kvgrpc.transfer.protocol.types import DecodeEntry, KVPoll, RoomKey, Writes
from tests.simulation.processes import ALL_PAGES, TIMING, DecodeProcess, PrefillProcess, Process

if TYPE_CHECKING:
    from tests.simulation.network import Link
    from tests.simulation.world import World

# A message is up to 2 ticks on its way each time, and each side looks once a tick.
LATENCY = 5
DECODE_KNOWS_OF_A_DEATH = 10
PREFILL_KNOWS_OF_A_DEATH = 20
# An unanswered ping ends the connection, and the next one does not come to be.
KNOWS_OF_A_STOP = TIMING.ping_interval + TIMING.ping_timeout + TIMING.welcome_within


@dataclass(eq=False)
class Promise:
    """Something that must be so ``by`` a tick, unless another fault touches one of ``processes`` before, or the process
    that took the place of a killed one at the address ``successor_at``."""

    what: str
    key: RoomKey
    since: int
    by: int
    kept: Callable[[], bool]
    processes: tuple[Process, ...]
    disturbances: int
    successor_at: str | None = None


class Promises:
    """The liveness of the case table in docs/session/cases.md, wherever a schedule happens to hold a single fault."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: list[Promise] = []
        self.kept: dict[str, list[int]] = {}

    def after_death_of_prefill(self, prefill: PrefillProcess) -> None:
        for link in self._standing(prefill):
            for key, kept in _open_at_decode(link):
                what, within = "decode knows of a killed prefill", DECODE_KNOWS_OF_A_DEATH
                self._promise(what, key, within, kept, link.decode, successor_at=link.address)

    def after_stop_of_prefill(self, prefill: PrefillProcess) -> None:
        for link in self._standing(prefill):
            for key, kept in _open_at_decode(link):
                self._promise("decode knows of a stopped prefill", key, KNOWS_OF_A_STOP, kept, link.decode, prefill)

    def after_death_of_decode(self, decode: DecodeProcess) -> None:
        for link in self._standing(decode):
            prefill = link.prefill
            assert prefill is not None
            pair = prefill.core.pairs[decode.ref]
            # One that was stopped, or held, before it was killed has the time of a stopped one, from its last word.
            within = max(PREFILL_KNOWS_OF_A_DEATH, pair.heard_at + KNOWS_OF_A_STOP - prefill.core.now)
            for key, kept in _open_at_prefill(prefill.core, pair):
                self._promise("prefill knows of a killed decode", key, within, kept, prefill)

    def check(self) -> None:
        """Once a tick."""
        still = []
        for promise in self._open:
            if promise.kept():
                self.kept.setdefault(promise.what, []).append(self._world.now - promise.since)
            elif self._void(promise):
                continue
            elif self._world.now > promise.by:
                self._world.violate(f"not in time: {promise.what}", promise.key)
            else:
                still.append(promise)
        self._open = still

    def _standing(self, process: Process) -> Iterator[Link]:
        """Streams of a process that stood, and both ends knew it."""
        for link in self._world.network.links:
            if process is not link.prefill and process is not link.decode:
                continue
            other = link.decode if process is link.prefill else link.prefill
            cut = (link.decode.number, link.address) in self._world.network.cuts
            if not link.standing or link.slow or cut or other is None or other.state != "running":
                continue
            pair = link.prefill.core.pairs.get(link.decode.ref) if link.prefill is not None else None
            if link.stream.pair.up and pair is not None and pair.stream is link:
                yield link

    def _promise(
        self,
        what: str,
        key: RoomKey,
        within: int,
        kept: Callable[[], bool],
        *processes: Process,
        successor_at: str | None = None,
    ) -> None:
        now, disturbances = self._world.now, sum(process.disturbances for process in processes)
        self._open.append(Promise(what, key, now, now + within + LATENCY, kept, processes, disturbances, successor_at))

    def _void(self, promise: Promise) -> bool:
        """Another fault happened: the fault is not a single one."""
        successor = self._world.listening.get(promise.successor_at or "")
        disturbed = sum(process.disturbances for process in promise.processes) != promise.disturbances
        return disturbed or (successor is not None and successor.disturbances > 0)


def _open_at_decode(link: Link) -> Iterator[tuple[RoomKey, Callable[[], bool]]]:
    """Rooms that depend on this stream, and what ends that: the room's end, or a part that settled just before."""
    pair = link.stream.pair
    for key in sorted(pair.rooms):
        room = link.decode.core.rooms[key]
        part = room.part_of(pair)
        if not room.ended and part is not None and not part.settled:
            yield key, partial(_over_at_decode, room, part)


def _open_at_prefill(core: PrefillCore, pair: PrefillPair) -> Iterator[tuple[RoomKey, Callable[[], bool]]]:
    for key in sorted(pair.rooms):
        record = core.rooms[key]
        if not record.ended:
            yield key, partial(_over_at_prefill, core, record)


def _over_at_prefill(core: PrefillCore, record: PrefillRoom) -> bool:
    """Or gone: the last word of a decode was that it forgets a room for which no sender had come (11, memory of
    the ended)."""
    return record.ended or core.rooms.get(record.key) is not record


def _over_at_decode(room: DecodeRoom, part: DecodePart) -> bool:
    """Or it is another's now: prefill was never told of the room: nothing is lost (3, break and loss)."""
    return room.ended or part.settled or room.part_of(part.pair) is not part


def check_rooms_are_known(
    world: World, prefill: PrefillProcess, decode: DecodeProcess, entries: Iterable[DecodeEntry]
) -> None:
    """What decode is over with stays over: no frame opens it at prefill once more, with pages to write to."""
    pair = prefill.core.pairs.get(decode.ref)
    for entry in entries:
        record = prefill.core.rooms.get(entry.key.at(pair.place if pair is not None else 0))
        if record is None or record.ended or record.destination is None:
            continue
        if record.owner is None or record.owner.ref != decode.ref:
            continue
        if decode.state != "dead" and entry.key not in decode.core.rooms:
            world.violate("a room is back that decode was over with", entry.key)


def check_end(world: World) -> None:
    """After the quiet: no open handle, every page back for which evidence exists, no record or pair without need."""
    for decode in world.decodes:
        _check_pages(world, decode)
        for room in decode.core.rooms.values():
            if not room.ended:
                world.violate("a handle is open at the end", room.key)
        for receiving in decode.receiving.values():
            if not receiving.told:
                world.violate("a receiver never heard the end", receiving.room.key)
    for prefill in world.prefills:
        if prefill.state == "running":
            _check_records(world, prefill)
            for sending in prefill.sending.values():
                world.violate("a sender never heard the end", sending.request.key)


def _check_pages(world: World, decode: DecodeProcess) -> None:
    if decode.core.open_rooms != sum(not room.ended for room in decode.core.rooms.values()):
        world.violate("open rooms are miscounted", decode.ref)
    held = 0
    for key, receiving in decode.receiving.items():
        held += len(receiving.pages or [])
        if receiving.pages and receiving.told:
            for part in receiving.room.parts:
                _check_held(world, decode, key, part, len(receiving.pages))
    if held + len(decode.free) + len(decode.free_states) != ALL_PAGES:
        world.violate("pages are gone", decode.ref)
    known = sum(room.page_count for room in decode.core.rooms.values() if room.handle.poll is KVPoll.Failed)
    if decode.core.held_pages > known:
        world.violate("the core counts pages that nobody holds", decode.ref)


def _check_held(world: World, decode: DecodeProcess, key: RoomKey, part: DecodePart, pages: int) -> None:
    """Pages may stay held only where no evidence can exist; those are listed."""
    if not part.told_write or part.settled or part.pair.dead_at is not None:
        return
    writer = next((prefill for prefill in world.prefills if prefill.ref == part.pair.ref), None)
    sitting = world.listening.get(part.pair.address)
    if writer is not None and writer.state == "stopped":
        world.held["the writer is stopped for ever"] += pages
    elif writer is None and sitting is not None and sitting.state == "stopped":
        world.held["a stopped process sits on the dead writer's address"] += pages
    elif writer is not None and (key, decode.ref) in writer.plane.unknown:
        world.held["UNKNOWN: a write may be on its way for ever"] += pages
    elif writer is not None and part.writes is Writes.UNKNOWN and writer.plane.unknown:
        world.held["UNKNOWN, said of a record that is gone"] += pages
    else:
        world.violate(f"a page is held without need ({part.writes.name})", key)


def _check_records(world: World, prefill: PrefillProcess) -> None:
    core = prefill.core
    for record in core.rooms.values():
        if record.writes is not Writes.UNKNOWN:
            world.violate(f"a record was never dropped ({record.state.name})", record.key)
    owners = {record.owner for record in core.rooms.values()}
    alive = {decode.ref for decode in world.decodes}
    for ref, pair in core.pairs.items():
        if ref not in alive and pair not in owners:
            world.violate("the pair of a dead decode was never dropped", ref)
        if pair.unclaimed != sum(record.unclaimed for record in core.rooms.values() if record.owner is pair):
            world.violate("unclaimed rooms are miscounted", ref)
    if core.open_rooms != sum(not record.ended for record in core.rooms.values()):
        world.violate("open rooms are miscounted", prefill.ref)
    if core.open_writes != len({write.submission for write in prefill.plane.in_flight}):
        world.violate("open writes are miscounted", prefill.ref)
