"""Streams between the processes: they delay, break half open, carry stale frames for long, and are cut for a while."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvgrpc.errors import Failure, Reason
from kvgrpc.transfer import wire
from kvgrpc.transfer.protocol.decode.core import Stream
from kvgrpc.transfer.protocol.types import DecodeEntry, PrefillEntry
from kvgrpc.v1 import transfer_service_pb2 as pb
from tests.simulation.checks import check_rooms_are_known
from tests.simulation.hostile import LyingCore, owed_by_others
from tests.simulation.processes import TIMING

if TYPE_CHECKING:
    from tests.simulation.processes import DecodeProcess, PrefillProcess
    from tests.simulation.world import World

# What arrives when: (tick, kind, content). Kinds: hello, welcome, goodbye, rooms, end.
Queue = deque[tuple[int, str, Any]]
FRAME_BYTES = 1 << 20
# Ticks after which an unanswered ping ends a connection at the latest: it may have been sent just before the fault.
PINGS = TIMING.ping_interval + TIMING.ping_timeout
POOLS = [("kv", 1 << 16), ("state", 1 << 16)]


@dataclass(eq=False)
class Link:
    """One stream, from a decode to whoever listened at the address when the dial got through.

    ``broken``: nothing new enters it. A side that closed it sends nothing more, but may still be sent to. A ``slow``
    one takes up to three seconds. ``unanswered``: for how long pings were not, ``severed``: too long.
    """

    decode: DecodeProcess
    stream: Stream
    address: str
    prefill: PrefillProcess | None = None
    to_prefill: Queue = field(default_factory=deque)
    to_decode: Queue = field(default_factory=deque)
    decode_closed: bool = False
    prefill_closed: bool = False
    broken: bool = False
    slow: bool = False
    unanswered: int = 0
    severed: bool = False

    @property
    def standing(self) -> bool:
        """Both ends believe in it, and it carries."""
        return self.prefill is not None and not (self.broken or self.decode_closed or self.prefill_closed)


class Network:
    """``links`` carry; ``cuts``: between which decode and which address nothing does, and until when."""

    def __init__(self, world: World, rnd: random.Random, through_wire: bool) -> None:
        self.links: list[Link] = []
        self.slow_share = 0.0
        self.cuts: dict[tuple[int, str], int] = {}
        self._world = world
        self._random = rnd
        self._through_wire = through_wire

    # Faults.

    def cut(self, decode: DecodeProcess, address: str, ticks: int) -> None:
        self.cuts[decode.number, address] = self._world.now + ticks

    def is_cut(self, decode: DecodeProcess, prefill: PrefillProcess) -> bool:
        return (decode.number, prefill.address) in self.cuts

    def break_stream(self, link: Link, learn: tuple[int, int] | None = None) -> None:
        """Half open on either side: one end may learn of it much later, and get stale frames until then. ``learn``: in
        how many ticks decode does, and prefill."""
        link.broken = True
        rnd = self._random
        if rnd.random() < 0.5:
            link.to_decode.clear()
        if rnd.random() < 0.3:
            link.to_prefill.clear()
        else:
            stale = rnd.choice([0, 20, 60, 150])
            link.to_prefill = deque((due + rnd.randint(0, stale), kind, what) for due, kind, what in link.to_prefill)
        decode_learns, prefill_learns = learn or rnd.choice([(0, 0), (0, 0), (0, 60), (0, 999), (25, 0)])
        self._send(link.to_decode, "end", None, decode_learns)
        self._send(link.to_prefill, "end", None, prefill_learns)

    def process_died(self, process: DecodeProcess | PrefillProcess, goodbye: bool = False) -> None:
        """Its kernel ends its streams; after a drain a Goodbye goes before."""
        for link in self.links:
            if link.prefill is process:
                link.to_prefill.clear()
                if not link.broken:
                    drained = Failure(Reason.SERVER_DRAINING, f"{process.ref} is closed")
                    self._send(link.to_decode, "goodbye" if goodbye else "end", drained if goodbye else None)
                link.broken = link.prefill_closed = True
            elif link.decode is process:
                link.to_decode.clear()
                if not link.broken:
                    self._send(link.to_prefill, "end", None)
                link.broken = link.decode_closed = True

    # One tick.

    def carry(self) -> None:
        for cut in [cut for cut, until in self.cuts.items() if until <= self._world.now]:
            del self.cuts[cut]
        self._open_and_close()
        self._write()
        for link in list(self.links):
            if link.prefill is not None:
                self._ping(link, link.prefill)
            if (link.decode.number, link.address) in self.cuts and not link.severed:
                continue
            if link.prefill is None:
                self._connect(link)
            if link.prefill is not None:
                self._deliver(link, link.prefill)

    def _open_and_close(self) -> None:
        for decode in self._world.decodes:
            if decode.state == "running":
                self.links += [self._dialled(decode, stream) for stream in decode.take("dials")]
                for stream in decode.take("closes"):
                    for link in self.links:
                        if link.stream is stream and not link.decode_closed:
                            link.decode_closed = True
                            self._end(link, link.to_prefill)
        for prefill in self._world.prefills:
            if prefill.state == "running":
                for link in prefill.take("closes"):
                    if isinstance(link, Link) and not link.prefill_closed:
                        link.prefill_closed = True
                        self._end(link, link.to_decode)

    def _dialled(self, decode: DecodeProcess, stream: Stream) -> Link:
        return Link(decode, stream, stream.pair.address, slow=self._random.random() < self.slow_share)

    def _end(self, link: Link, queue: Queue) -> None:
        if not link.broken:
            self._send(queue, "end", None, self._random.choice([0, 0, 2, 20]))

    def _connect(self, link: Link) -> None:
        prefill = self._world.listening.get(link.address)
        if link.decode.state == "dead" or (link.decode_closed and self._random.random() < 0.5):
            self.links.remove(link)
        elif prefill is not None:  # a stopped process still accepts: its kernel does
            link.prefill = prefill
            link.to_prefill.appendleft((self._world.now, "hello", None))
        elif link.decode.state == "running":
            self.links.remove(link)
            link.decode.core.on_refused(link.stream)

    def _ping(self, link: Link, prefill: PrefillProcess) -> None:
        """What the library's threads do on either side, also while the interpreter is held: a peer that is stopped or
        cut off does not answer, and whoever runs ends the connection."""
        decode, cut = link.decode, self.is_cut(link.decode, prefill)
        alive = [process.state in ("running", "held") for process in (decode, prefill)]
        if all(alive) and not cut:
            link.unanswered = 0
            if not link.broken and decode.state == "running":
                decode.core.on_connected(link.stream)
        elif any(alive) and not link.severed and (cut or not link.broken):
            link.unanswered += 1
            if link.unanswered > PINGS - self._random.randrange(TIMING.ping_interval):
                link.broken = link.severed = True
                for queue, answers in zip((link.to_decode, link.to_prefill), alive, strict=True):
                    if answers or cut:  # else its kernel has what came before
                        queue.clear()
                    self._send(queue, "end", None, 0)

    def _deliver(self, link: Link, prefill: PrefillProcess) -> None:
        now = self._world.now
        while prefill.state == "running" and link.to_prefill and link.to_prefill[0][0] <= now:
            self._at_prefill(link, prefill, *link.to_prefill.popleft()[1:])
            prefill.take_turn(self._random)
        while link.decode.state == "running" and link.to_decode and link.to_decode[0][0] <= now:
            self._at_decode(link, *link.to_decode.popleft()[1:])
            link.decode.take_turn(self._random)
        if link.standing and link.decode.state == prefill.state == "running":  # heartbeats
            link.decode.core.on_heard(link.stream)
            prefill.core.on_heard(link, link.decode.ref)
        prefill_done = prefill.state == "dead" or not link.to_prefill
        decode_done = link.decode.state == "dead" or not link.to_decode
        if prefill_done and decode_done and (link.broken or (link.decode_closed and link.prefill_closed)):
            self.links.remove(link)

    def _at_prefill(self, link: Link, prefill: PrefillProcess, kind: str, content: Any) -> None:
        core, decode = prefill.core, link.decode
        if kind == "hello":
            error = core.on_hello(link, decode.ref, link.stream.pair.ref, link.stream.number, decode)
            if error is None:
                pair = core.pairs[decode.ref]
                fleet = self._world.fleet
                pair.place, pair.places = fleet.places(decode.number)
                pair.parts = self._world.parts
                pair.sends_aux = fleet.part(prefill.number, decode.number).aux
            if not link.broken:
                goodbye = None if error is None else Failure.of(error)
                self._send(link.to_decode, "welcome" if error is None else "goodbye", goodbye)
        elif kind == "rooms":
            core.on_frame(link, decode.ref, content)
            if not isinstance(core, LyingCore):
                check_rooms_are_known(self._world, prefill, decode, content)
        else:
            core.on_end(link, decode.ref)
            link.prefill_closed = True

    def _at_decode(self, link: Link, kind: str, content: Any) -> None:
        core, stream = link.decode.core, link.stream
        if kind == "welcome":
            core.on_welcome(stream)
        elif kind == "rooms":
            lies = link.prefill is not None and isinstance(link.prefill.core, LyingCore)
            before = owed_by_others(link.decode, stream.pair.ref) if lies else {}
            core.on_frame(stream, content)
            after = owed_by_others(link.decode, stream.pair.ref) if lies else {}
            if any(after.get(key) != was for key, was in before.items()):
                self._world.violate("a lying prefill changed a room of others", stream.pair.ref)
            if any(room.handle.pages_done > room.page_count for room in link.decode.core.rooms.values()):
                self._world.violate("more pages are done than the room has", stream.pair.ref)
            link.decode.check_progress()
        else:
            link.decode_closed = True
            if kind == "goodbye":
                core.on_goodbye(stream, content)
            else:
                core.on_end(stream)

    # Frames.

    def _write(self) -> None:
        """What the cores have to say goes onto the streams that they hold to be the right ones."""
        for decode in self._world.decodes:
            if decode.state == "running":
                for pair in decode.take("tell"):
                    link = next((link for link in self.links if link.stream is pair.stream), None)
                    if link is not None:
                        self._frames(link, link.to_prefill, self._decode_frames(decode.core.flush(pair)))
        for prefill in self._world.prefills:
            if prefill.state == "running":
                for owner in prefill.take("tell"):
                    if isinstance(owner.stream, Link):
                        frames = self._prefill_frames(prefill.core.flush(owner))
                        self._frames(owner.stream, owner.stream.to_decode, frames)

    def _frames(self, link: Link, queue: Queue, entries: list[Any]) -> None:
        """Order between rooms means nothing, and repeats are harmless: both happen here."""
        if link.broken or not entries:
            return
        self._random.shuffle(entries)
        for _ in range(2 if self._random.random() < 0.05 else 1):
            self._send(queue, "rooms", entries, self._random.choice([0, 2, 10, 30]) if link.slow else None)

    def _decode_frames(self, entries: list[DecodeEntry]) -> list[DecodeEntry]:
        if not self._through_wire:
            return entries
        read = [
            pb.SessionRequest.FromString(f.SerializeToString()) for f in wire.encode_requests(entries, FRAME_BYTES, [])
        ]
        return [entry for frame in read for entry in wire.parse_request(frame, POOLS)]

    def _prefill_frames(self, entries: list[PrefillEntry]) -> list[PrefillEntry]:
        if not self._through_wire:  # which says nothing of places
            return [replace(entry, key=entry.key.at(0)) for entry in entries]
        read = [
            pb.SessionResponse.FromString(f.SerializeToString()) for f in wire.encode_responses(entries, FRAME_BYTES)
        ]
        return [entry for frame in read for entry in wire.parse_response(frame)]

    def _send(self, queue: Queue, kind: str, content: Any, delay: int | None = None) -> None:
        """In order: nothing overtakes what was sent before."""
        due = self._world.now + (self._random.choice([0, 0, 0, 1, 2]) if delay is None else delay)
        queue.append((max(due, queue[-1][0]) if queue else due, kind, content))
