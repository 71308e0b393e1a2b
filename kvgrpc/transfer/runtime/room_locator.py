"""Finds the dp rank of a prefill engine that has a room's sender, where the engine's own balancer chose it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence

import grpc

from kvgrpc.errors import EngineNotFound, KvGrpcError
from kvgrpc.rpc.dialing.channels import ChannelPool
from kvgrpc.transfer import wire
from kvgrpc.transfer.protocol.decode.core import DecodeRoom
from kvgrpc.transfer.protocol.types import RoomKey, Target
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.v1.transfer_service_pb2_grpc import TransferServiceStub

logger = logging.getLogger(__name__)
ROOMS_TOGETHER = 4_096
_CALL_SECONDS = 10.0
_PAUSE_SECONDS = 1.0
# A rank waits before it says "none": one that does not must not keep us busy.
_FRUITLESS_PAUSE_SECONDS = 0.1
_Rooms = dict[RoomKey, DecodeRoom]
Renewed = Sequence[Target] | EngineNotFound | None


class RoomLocator:
    """Asks every dp rank at once (LocateRooms); rooms that come in one turn of the loop are asked for together.

    A room is looked for until it is found or has ended, by its deadline at the latest. A rank that does not answer
    ends nothing: the others are asked on, it is asked again, and the registry is asked who is at its place now. Only
    where none answers are the rooms resolved anew; where the registry says that a rank is gone, and the others do not
    have them, they fail. On the loop thread.

    ``start`` runs a search beside the others. ``found`` gets each room with its rank, ``again`` those that are to be
    resolved anew. ``renew`` asks the registry of a room for the ranks of its engine; None: it does not know them now.
    ``gone`` gets each room of an engine whose ranks are not all there, ``over`` each that ended meanwhile, with the
    ranks that may have its sender.
    """

    def __init__(
        self,
        open_channel: Callable[[str], grpc.aio.Channel],
        start: Callable[[Coroutine[None, None, None], str], asyncio.Task[None]],
        found: Callable[[DecodeRoom, Target], None],
        again: Callable[[DecodeRoom], None],
        renew: Callable[[DecodeRoom], Coroutine[None, None, Renewed]],
        gone: Callable[[DecodeRoom, EngineNotFound], None],
        over: Callable[[DecodeRoom, Sequence[Target]], None],
    ) -> None:
        self._channels = ChannelPool(open_channel)
        self._start = start
        self._found = found
        self._again = again
        self._renew = renew
        self._gone = gone
        self._over = over
        self._batches: dict[tuple[Target, ...], _Rooms] = {}
        self._asked: Counter[str] = Counter()

    def add(self, room: DecodeRoom, targets: Sequence[Target]) -> None:
        """``targets``: the ranks of which one has it, or will."""
        among = tuple(targets)
        rooms = self._batches.get(among)
        if rooms is None or len(rooms) == ROOMS_TOGETHER:
            rooms = self._batches[among] = {}
            self._start(self._find(among, rooms), f"search {among[0].ref.rank.engine}")
        rooms[room.key] = room

    async def close(self) -> None:
        await self._channels.close()

    async def _find(self, targets: tuple[Target, ...], rooms: _Rooms) -> None:
        if self._batches.get(targets) is rooms:
            del self._batches[targets]
        asking = {self._ask(target, rooms): target for target in targets}
        renewing: asyncio.Task[Renewed] | None = None
        no_answer: set[Target] = set()
        try:
            while rooms and len(no_answer) < len(asking):
                waiting = [*asking, *([] if renewing is None else [renewing])]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for answered in [call for call in asking if call.done()]:
                    target = asking.pop(answered)
                    pause = self._take(rooms, target, answered.result(), no_answer)
                    asking[self._ask(target, rooms, pause)] = target
                self._let_go(rooms, list(asking.values()))
                if renewing is not None and renewing.done():
                    self._replace(asking, no_answer, renewing.result(), rooms)
                    renewing = None
                if no_answer and renewing is None and rooms:
                    renewing = asyncio.ensure_future(self._renew_soon(next(iter(rooms.values()))))
            if rooms:
                await asyncio.sleep(_PAUSE_SECONDS)
        finally:
            for task in (*asking, *([] if renewing is None else [renewing])):
                task.cancel()
        for room in rooms.values():
            self._again(room)

    def _take(self, rooms: _Rooms, target: Target, keys: Sequence[RoomKey] | None, no_answer: set[Target]) -> float:
        """Takes a rank's answer, None where there was none. Returns the seconds until it is asked again."""
        if keys is None:
            no_answer.add(target)
            return _PAUSE_SECONDS
        no_answer.discard(target)
        found = [room for key in keys if (room := rooms.pop(key, None)) is not None]
        for room in found:
            self._found(room, target)
        return 0.0 if found else _FRUITLESS_PAUSE_SECONDS

    def _let_go(self, rooms: _Rooms, targets: Sequence[Target]) -> None:
        for room in [room for room in rooms.values() if room.ended]:
            del rooms[room.key]
            self._over(room, targets)

    def _replace(
        self,
        asking: dict[asyncio.Task[list[RoomKey] | None], Target],
        no_answer: set[Target],
        targets: Renewed,
        rooms: _Rooms,
    ) -> None:
        """The registry said who is there now: ranks without an answer that are gone are dropped, new ones are asked."""
        if targets is None:
            return
        if isinstance(targets, EngineNotFound):
            while rooms:
                self._gone(rooms.popitem()[1], targets)
            return
        for call, target in list(asking.items()):
            if target in no_answer and target not in targets:
                no_answer.discard(target)
                del asking[call]
                call.cancel()
        for target in targets:
            if target not in asking.values():
                asking[self._ask(target, rooms)] = target

    async def _renew_soon(self, room: DecodeRoom) -> Renewed:
        await asyncio.sleep(_PAUSE_SECONDS)
        try:
            return await self._renew(room)
        except Exception:
            logger.exception("asking the registry for the ranks of %s failed", room.key)
            return None

    def _ask(self, target: Target, rooms: _Rooms, pause: float = 0.0) -> asyncio.Task[list[RoomKey] | None]:
        return asyncio.get_running_loop().create_task(
            self._ask_after(pause, target, rooms), name=f"locate {target.ref}"
        )

    async def _ask_after(self, pause: float, target: Target, rooms: _Rooms) -> list[RoomKey] | None:
        if pause:
            await asyncio.sleep(pause)
        return await self._located(target, list(rooms))

    async def _located(self, target: Target, keys: Sequence[RoomKey]) -> list[RoomKey] | None:
        """None: no answer. Empty: none of them has a sender there yet."""
        address = target.address
        self._asked[address] += 1
        try:
            self._channels.trim(self._asked)
            call = TransferServiceStub(self._channels.get(address)).LocateRooms
            request = pb.LocateRoomsRequest(rooms=wire.room_keys_to_pb(keys))
            return wire.room_keys((await call(request, timeout=_CALL_SECONDS)).rooms)
        except (grpc.aio.AioRpcError, KvGrpcError) as error:
            logger.info("asking %s at %s for %d rooms: %s", target.ref, address, len(keys), error)
            return None
        except Exception:  # of one rank: the others are asked on
            logger.exception("asking %s at %s for %d rooms failed", target.ref, address, len(keys))
            return None
        finally:
            self._asked[address] -= 1
            if not self._asked[address]:
                del self._asked[address]
