"""A calm world for directed tests: only what the test does goes wrong."""

from __future__ import annotations

from collections.abc import Callable

from kvgrpc.transfer.protocol.decode.core import DecodePart, DecodeRoom
from kvgrpc.transfer.protocol.prefill.core import PrefillRoom
from kvgrpc.transfer.protocol.types import Bounds, RoomKey
from tests.simulation.fleet import SINGLES, Fleet
from tests.simulation.network import Link
from tests.simulation.plane import Plane
from tests.simulation.processes import DecodeProcess, PrefillProcess
from tests.simulation.requests import Request, WatchedHandle
from tests.simulation.world import World

KEY = RoomKey(7, 0)
SECOND = 10
FOREVER = 9_999


class Stage(World):
    """Tests talk of ``decode`` and ``prefill``, the first of each, unless they say which. Times are ticks."""

    def __init__(self, bounds: Bounds | None = None, fleet: Fleet = SINGLES) -> None:
        super().__init__(1, bounds=bounds, fleet=fleet)
        self.calm = True

    @property
    def decode(self) -> DecodeProcess:
        return self.decodes[0]

    @property
    def prefill(self) -> PrefillProcess:
        return self.current[0]

    @property
    def link(self) -> Link:
        """The stream between the two that stands."""
        return next(
            x for x in self.network.links if x.decode is self.decode and x.prefill is self.prefill and x.standing
        )

    def receive(self, request: Request) -> tuple[DecodeRoom, WatchedHandle]:
        room = self.decode.begin(request)
        assert room is not None
        return room, self.decode.receiving[request.key].handle

    def send(self, request: Request, number: int = 0) -> WatchedHandle:
        return self.current[number].begin(request, self.random)

    def record(self, key: RoomKey = KEY, number: int = 0) -> PrefillRoom:
        return self.current[number].core.rooms[key]

    def until(self, condition: Callable[[], bool], within: int = 10 * SECOND) -> int:
        """Steps until it holds; how many ticks that took."""
        for passed in range(within + 1):
            if condition():
                return passed
            self.step()
        raise AssertionError(f"not within {within} ticks")

    def until_named(self, key: RoomKey = KEY, number: int = 0) -> None:
        """Prefill knows decode's pages."""
        core = self.current[number].core
        self.until(lambda: key in core.rooms and core.rooms[key].destination is not None)

    def freeze(self, key: RoomKey = KEY, number: int = 0) -> Plane:
        """Writes of the room are on their way, and its data plane moves nothing until it is thawed."""
        plane = self.current[number].plane
        plane.frozen = True
        self.until(lambda: any(write.key == key for write in plane.in_flight))
        return plane

    def until_over(self, within: int = 20 * SECOND) -> None:
        """Decode has nothing left: every page is back, and every room was told FORGET."""
        self.until(lambda: not self.decode.core.rooms and not self.decode.receiving, within)

    def steps(self, ticks: int) -> None:
        for _ in range(ticks):
            self.step()

    def snap(self, link: Link) -> None:
        """Breaks a stream: what is on its way is lost, both ends learn of it at once."""
        self.break_stream(link)
        for queue in (link.to_prefill, link.to_decode):
            queue.clear()
            queue.append((self.now, "end", None))


def failed(handle: WatchedHandle, reason: str) -> bool:
    """It failed, and for this reason."""
    if handle.failure is not None and handle.failure.reason.name != reason:
        raise AssertionError(f"{handle.failure} is not {reason}")
    return handle.terminal and handle.failure is not None


def part_of(room: DecodeRoom, number: int = 0) -> DecodePart:
    """What prefill ``number`` owes."""
    return next(part for part in room.parts if part.pair.ref.rank.engine == f"P{number}")
