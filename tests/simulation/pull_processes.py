"""The two processes of a simulated engine that pulls, one where rooms are received and one where
the cache's are served; and what its senders and receivers ask of a manager there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from kvgrpc.errors import Failure
from kvgrpc.transfer.layout.pools import CopiedPages, destination_of, pages_of_pools
from kvgrpc.transfer.protocol.decode.core import DecodeCore
from kvgrpc.transfer.protocol.prefill.chunks import Chunk
from kvgrpc.transfer.protocol.prefill.core import PrefillCore
from kvgrpc.transfer.protocol.types import Align, Bounds, RoomKey
from kvgrpc.transfer.runtime.boundary import EngineHandle, RoomRequest, SentPages
from kvgrpc.transfer.runtime.resolve import ReceiverRoom
from tests.simulation.processes import TIMING, DecodeProcess, PrefillProcess
from tests.support.core_work import Work

if TYPE_CHECKING:
    import random

    from tests.simulation.pull_engines import Engine
    from tests.simulation.pull_world import PullWorld


class TakerProcess(DecodeProcess):
    """Where rooms of pulls are received. Its engine's threads run with it."""

    engine: Engine

    def __init__(self, world: PullWorld, number: int, epoch: int) -> None:
        super().__init__(world, number, epoch, DecodeCore, Bounds())
        self.core = DecodeCore(self.ref, timing=TIMING, connections=self._connections)
        self.take = Work(self.core).take

    def schedule(self, rnd: random.Random) -> None:
        self.take("lost_peers")
        for room in self.take("resolves"):
            self._find(room)
        self.engine.run_threads()

    def open(self, handle: EngineHandle, request: RoomRequest) -> None:
        room = handle.record = ReceiverRoom.of(handle, request)
        if self.core.open(room) or room.refused:
            self._find(room)

    def _find(self, room: ReceiverRoom) -> None:
        self.core.bind(room, [self.engine.known[room.request.bootstrap_addr]])


class HolderProcess(PrefillProcess):
    """Where the cache's rooms are served."""

    engine: Engine

    def __init__(self, world: PullWorld, number: int, epoch: int, address: str, core: type[PrefillCore]) -> None:
        super().__init__(world, number, epoch, address, core, Bounds())
        self.core = core(self.ref, timing=TIMING)
        self.take = Work(self.core).take

    def schedule(self, rnd: random.Random) -> None:
        self.engine.settle_loans()


class _NoAux:
    def read(self, row: int | None) -> bytes | None:
        return None


class _Runtime:
    """What senders and receivers ask of either runtime."""

    pool_names, aux, queue_full, on_change = ("kv",), _NoAux(), False, None

    def __init__(self, role: str, process: TakerProcess | HolderProcess) -> None:
        self.role, self.ref, self._process = role, process.ref, process

    def refusal(self, key: RoomKey) -> Failure | None:
        return None

    def give_way(self) -> None: ...

    def fail(self, handle: EngineHandle, failure: Failure) -> None:
        core = cast(Any, self._process.core)
        self._process.post(lambda: None if handle.record is None else core.fail(handle.record, failure))


class Sending(_Runtime):
    """The prefill side of a simulated engine."""

    def __init__(self, process: HolderProcess) -> None:
        super().__init__("prefill", process)
        self._core = process.core

    def claim(self, key: RoomKey, handle: EngineHandle, decode: str) -> None:
        self._process.post(self._claim, key, handle, decode)

    def send(
        self, handle: EngineHandle, sent: SentPages, aux: bytes | None, expectation: tuple[int | None, Align] | None
    ) -> None:
        self._process.post(self._send, handle, sent, expectation)

    def _claim(self, key: RoomKey, handle: EngineHandle, decode: str) -> None:
        record = self._core.claim(key, handle, decode)
        handle.record = None if record is None or record.ended else record

    def _send(self, handle: EngineHandle, sent: SentPages, expectation: tuple[int | None, Align] | None) -> None:
        if handle.record is not None:
            pages, _ = pages_of_pools(sent.pages)
            self._core.send(handle.record, Chunk(pages, sent.start, sent.is_last), None, expectation)


class Receiving(_Runtime):
    """The decode side. ``owner``: which room a landing page was named for last."""

    def __init__(self, process: TakerProcess) -> None:
        super().__init__("decode", process)
        self._taker = process
        self.owner: dict[int, int] = {}
        self._rooms: dict[EngineHandle, int] = {}

    def stands(self, request: RoomRequest) -> bool:
        return False

    def open(self, handle: EngineHandle, request: RoomRequest) -> None:
        self._rooms[handle] = request.key.room
        self._taker.post(self._taker.open, handle, request)

    def write(self, handle: EngineHandle, pages: CopiedPages, first_page: int, aux_index: int | None) -> None:
        destination = destination_of(pages, first_page)
        self.owner.update(dict.fromkeys(destination.pages.tolist(), self._rooms.pop(handle)))
        core = self._taker.core
        self._taker.post(lambda: None if handle.record is None else core.write(handle.record, destination))
