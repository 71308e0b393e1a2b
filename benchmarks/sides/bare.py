"""The floor of many rooms: handles, pages, aux rows, plans, frames of many over a bare stream, and nothing else.

No records, no attempts, no errors, no deadlines, no evidence, no data plane and no thread for one: what any design pays
that has an engine thread which polls room by room, an event loop, protobuf and Python. The messages are kvgrpc's.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.baselines.engines import allocate
from benchmarks.baselines.stream import StreamEnd
from benchmarks.sides.base import Pages, Poll, Setting
from benchmarks.sides.memory import Memory
from kvgrpc.model import Region
from kvgrpc.transfer.layout.plan import Geometry
from kvgrpc.v1 import transfer_service_pb2 as pb

_NO_PAGES = np.empty(0, np.uint32)


class BareRoom:
    """A sender or a receiver of one room."""

    __slots__ = ("_way", "aux_index", "destination", "pages", "room", "state")

    def __init__(self, end: _End, way: _Way, room: int, state: Poll) -> None:
        self._way = way
        self.room = room
        self.state = state
        self.pages: npt.NDArray[np.uint32] = _NO_PAGES
        self.destination: npt.NDArray[np.uint32] = _NO_PAGES
        self.aux_index = 0
        end.rooms[room] = self

    def poll(self) -> int:
        return self.state

    def close(self) -> None: ...

    def give(self, pages: Pages) -> None:
        self.pages = pages.astype(np.uint32)
        self._way.post(self)


class BareSender(BareRoom):
    """See benchmarks.sides.base.Sender."""

    __slots__ = ()

    def init(self, num_pages: int, aux_index: int | None = None) -> None:
        self.aux_index = aux_index or 0

    def send(self, pages: Pages, index_slice: slice, is_last: bool) -> None:
        self.give(pages)


class BareReceiver(BareRoom):
    """See benchmarks.sides.base.Receiver."""

    __slots__ = ()

    def init(self, pages: Pages, aux_index: int) -> None:
        self.aux_index = aux_index
        self.give(pages)


class _Way:
    """A stream to one peer. Rooms that wait are told in one frame, by the loop thread."""

    def __init__(
        self,
        frame: Callable[[Sequence[BareRoom]], bytes],
        take: Callable[[bytes], None],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._frame = frame
        self._waiting: list[BareRoom] = []
        self._waking = self._telling = False
        self.stream = StreamEnd(take, loop)

    def post(self, room: BareRoom) -> None:
        self._waiting.append(room)
        if not self._waking:
            self._waking = True
            self.stream.on_loop(self._tell)

    def _tell(self) -> None:
        if not self._telling:
            self._telling = True
            self.stream.start(self._tell_all())

    async def _tell_all(self) -> None:
        while True:
            self._waking = False
            waiting, self._waiting = self._waiting, []
            if not waiting:
                break
            await self.stream.send(self._frame(waiting))
        self._telling = False


class _End:
    """Memory, plans and frames."""

    page_type = np.int32

    def __init__(self, setting: Setting) -> None:
        maps: list[mmap.mmap] = []
        shape = setting.shape
        self.memory = Memory(shape, lambda nbytes: allocate(nbytes, maps))
        regions = [Region(0, "k", address, shape.page_bytes, shape.page_bytes) for address in self.memory.regions]
        self._maps = maps
        self._geometry = Geometry(regions, regions)
        size = shape.aux_items * shape.aux_item_bytes
        self._aux = memoryview((ctypes.c_char * size).from_address(self.memory.aux)).cast("B")
        self._row = shape.aux_item_bytes
        self.rooms: dict[int, BareRoom] = {}

    def close(self) -> None:
        self.memory.forget()

    def _frame(self, rooms: Sequence[BareRoom]) -> bytes:
        raise NotImplementedError

    def _take(self, frame: bytes) -> None:
        raise NotImplementedError


class BarePrefill(_End):
    """See benchmarks.sides.base.PrefillSide."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._way = _Way(self._frame, self._take)
        self.bootstrap = str(self._way.stream.serve())

    def sender(self, room: int) -> BareSender:
        return BareSender(self, self._way, room, Poll.BOOTSTRAPPING)

    def _take(self, frame: bytes) -> None:
        for message in pb.SessionRequest.FromString(frame).rooms:
            room = self.rooms[message.room]
            room.destination = np.frombuffer(message.pages[0].pages_u32_le, np.uint32)
            room.state = Poll.WAITING_FOR_INPUT

    def _frame(self, rooms: Sequence[BareRoom]) -> bytes:
        frame, row = pb.SessionResponse(), self._row
        add = frame.rooms.add
        for room in rooms:
            self._geometry.plan(room.pages, room.destination)
            aux = bytes(self._aux[room.aux_index * row : (room.aux_index + 1) * row])
            add(room=room.room, state=pb.ROOM_STATE_SUCCESS, writes=pb.WRITES_SETTLED, pages_done=1, aux=aux)
            room.state = Poll.SUCCESS
            del self.rooms[room.room]
        return frame.SerializeToString()


class BareDecode(_End):
    """See benchmarks.sides.base.DecodeSide."""

    def __init__(self, setting: Setting, bootstrap: str) -> None:
        super().__init__(setting)
        self._bootstrap = bootstrap
        self._ways: dict[str, _Way] = {}
        self._way(bootstrap)

    def receiver(self, room: int, bootstrap: str | None = None) -> BareReceiver:
        return BareReceiver(self, self._way(bootstrap or self._bootstrap), room, Poll.WAITING_FOR_INPUT)

    def _way(self, bootstrap: str) -> _Way:
        """To that prefill; all on one loop, as the sessions of a rank are."""
        way = self._ways.get(bootstrap)
        if way is None:
            loop = next((other.stream.loop for other in self._ways.values()), None)
            way = self._ways[bootstrap] = _Way(self._frame, self._take, loop)
            way.stream.connect(int(bootstrap))
        return way

    def settled(self, receivers: Sequence[BareReceiver]) -> bool:
        return True

    def _take(self, frame: bytes) -> None:
        row = self._row
        for message in pb.SessionResponse.FromString(frame).rooms:
            room = self.rooms.pop(message.room)
            self._aux[room.aux_index * row : (room.aux_index + 1) * row] = message.aux
            room.state = Poll.SUCCESS

    def _frame(self, rooms: Sequence[BareRoom]) -> bytes:
        frame = pb.SessionRequest()
        add = frame.rooms.add
        for room in rooms:
            message = add(room=room.room, want=pb.WANT_WRITE, time_left_ms=300_000)
            message.pages.add(pages_u32_le=room.pages.tobytes())
        return frame.SerializeToString()
