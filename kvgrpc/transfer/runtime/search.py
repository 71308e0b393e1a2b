"""Finds the dp rank of a prefill engine that has a room's sender, where the engine's own balancer chose it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence

import grpc

from kvgrpc.errors import KvGrpcError
from kvgrpc.rpc.channels import ChannelPool
from kvgrpc.transfer import wire
from kvgrpc.transfer.protocol.decode_core import DecodeRoom
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


class RoomSearch:
    """Asks every dp rank at once (LocateRooms); rooms that come in one turn of the loop are asked for together.

    A room is looked for until it is found or has ended, by its deadline at the latest. On the loop thread.
    ``found`` gets each room with its rank; ``again`` those that are to be resolved anew, because a rank was silent.
    """

    def __init__(
        self,
        open_channel: Callable[[str], grpc.aio.Channel],
        start: Callable[[Coroutine[None, None, None], str], asyncio.Task[None]],
        found: Callable[[DecodeRoom, Target], None],
        again: Callable[[DecodeRoom], None],
    ) -> None:
        self._channels = ChannelPool(open_channel)
        self._start = start
        self._found = found
        self._again = again
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
        try:
            await self._ask_all(targets, rooms)
            if rooms:
                await asyncio.sleep(_PAUSE_SECONDS)
            for room in rooms.values():
                self._again(room)
        except Exception:  # of a bug: the rooms end by their deadline
            logger.exception("looking for %d rooms failed", len(rooms))

    async def _ask_all(self, targets: Sequence[Target], rooms: _Rooms) -> None:
        """Until no room is left, or a rank is silent: whoever is there now, the registry knows."""
        asking = {self._ask(target, rooms): target for target in targets}
        try:
            while rooms:
                ended, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                for call in ended:
                    target, answer = asking.pop(call), call.result()
                    if answer is None:
                        return
                    found = self._take(rooms, target, answer)
                    asking[self._ask(target, rooms, 0.0 if found else _FRUITLESS_PAUSE_SECONDS)] = target
        finally:
            for call in asking:
                call.cancel()

    def _take(self, rooms: _Rooms, target: Target, keys: Sequence[RoomKey]) -> int:
        """How many of the rooms that we look for it has."""
        found = [room for key in keys if (room := rooms.pop(key, None)) is not None]
        for room in found:
            self._found(room, target)
        for room in [room for room in rooms.values() if room.ended]:
            del rooms[room.key]
        return len(found)

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
            await self._channels.trim(self._asked)
            call = TransferServiceStub(self._channels.get(address)).LocateRooms
            request = pb.LocateRoomsRequest(rooms=wire.room_keys_to_pb(keys))
            return wire.room_keys((await call(request, timeout=_CALL_SECONDS)).rooms)
        except (grpc.aio.AioRpcError, KvGrpcError) as error:
            logger.info("asking %s at %s for %d rooms: %s", target.ref, address, len(keys), error)
            return None
        finally:
            self._asked[address] -= 1
            if not self._asked[address]:
                del self._asked[address]
