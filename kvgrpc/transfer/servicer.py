"""TransferService over a manager: decode the request, call, encode the answer."""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import grpc

from kvgrpc.errors import Failure, InvalidRequest, RoomNotFound, WrongRank
from kvgrpc.model import Role
from kvgrpc.net import caller_address
from kvgrpc.observability.pair_figures import HandOffSums
from kvgrpc.paging import numbers_token, page_size, page_token, read_numbers_token, read_page_token
from kvgrpc.rpc.callers import caller
from kvgrpc.rpc.security import CallerRole
from kvgrpc.rpc.turns import in_pieces
from kvgrpc.rpc.waiters import longest_wait
from kvgrpc.transfer import wire
from kvgrpc.transfer.layout import engines
from kvgrpc.transfer.protocol.failures import cancelled
from kvgrpc.transfer.protocol.types import MAX_ROOM, RoomKey, RoomState, SessionState
from kvgrpc.transfer.runtime.boundary import Runtime, prefill_of
from kvgrpc.transfer.tables import RoomEnd, RoomRow, SessionRow
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.v1.transfer_service_pb2_grpc import TransferServiceServicer
from kvgrpc.wire import failure_to_pb, layout_to_pb, pool_to_pb, rank_ref_to_pb

logger = logging.getLogger(__name__)
# Clients of other languages take 4 MiB unless told otherwise.
MAX_PAGE_BYTES = 3 << 20
_LONGEST_CAUSE = 256
MAX_LOCATED_ROOMS = 4_096
_SESSIONS = "ListSessions"


class TransferServicer(TransferServiceServicer):
    """Served by every rank; ``Session`` only where prefill is."""

    def __init__(self, manager: Runtime) -> None:
        self._manager = manager

    async def Session(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[pb.SessionRequest],
        context: grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse],
    ) -> None:
        async def read() -> pb.SessionRequest | None:
            message = await context.read()
            return message if isinstance(message, pb.SessionRequest) else None

        prefill = prefill_of(self._manager)
        if prefill is not None:
            await prefill.serve(read, context.write, caller_address(context.peer()))
            return
        error = _decode_rank(self._manager, "it dials sessions and serves none")
        await context.write(pb.SessionResponse(goodbye=pb.Goodbye(failure=failure_to_pb(Failure.of(error)))))

    async def ListSessions(self, request: pb.ListSessionsRequest, context: object) -> pb.ListSessionsResponse:
        after = read_page_token(_SESSIONS, request.page_token)
        rows = [row for row in await in_pieces(_by_peer(self._manager.sessions())) if row[0] > after]
        size = page_size(request.page_size)
        page = heapq.nsmallest(size, rows, key=itemgetter(0))
        token = page_token(_SESSIONS, page[-1][0]) if len(rows) > size else ""
        sessions = await in_pieces(_session_to_pb(row) for _, row in page)
        return pb.ListSessionsResponse(sessions=sessions, next_page_token=token)

    async def ListRooms(self, request: pb.ListRoomsRequest, context: object) -> pb.ListRoomsResponse:
        states = _states(request.states)
        if request.newest_failed or request.slowest:
            return await self._one_page(request)
        question = f"ListRooms {sorted(map(int, states))} {request.held_only}"
        after = read_numbers_token(question, request.page_token, 2)
        size = page_size(request.page_size)

        def wanted(row: RoomRow) -> bool:
            return (not states or row.state in states) and (row.held or not request.held_only) and self._shows(row)

        everything = not states and not request.held_only and self._shows_all()
        rows, last, total = await self._manager.page_of_rooms(
            RoomKey(*after) if after else RoomKey(0), size, None if everything else wanted
        )
        response = await _listed(rows, total)
        if len(rows) > len(response.rooms):
            last = rows[len(response.rooms) - 1].key
        if last is not None:
            response.next_page_token = numbers_token(question, (last.room, last.attempt))
        return response

    async def _one_page(self, request: pb.ListRoomsRequest) -> pb.ListRoomsResponse:
        order = "newest_failed" if request.newest_failed else "slowest"
        for name in ("states", "held_only", "page_token", *(["slowest"] if request.newest_failed else [])):
            if getattr(request, name):
                raise InvalidRequest.of(name, getattr(request, name), f"empty with {order}")
        wanted = None if self._shows_all() else self._shows
        size = page_size(request.page_size)
        if request.newest_failed:
            rows, total = await self._manager.newest_failed(size, wanted)
        else:
            rows, total = await self._manager.slowest(size, wanted)
        return await _listed(rows, total)

    async def GetRoom(self, request: pb.GetRoomRequest, context: object) -> pb.GetRoomResponse:
        return pb.GetRoomResponse(room=_room_to_pb(self._find(request.room, request.attempt)))

    async def LocateRooms(
        self,
        request: pb.LocateRoomsRequest,
        context: grpc.aio.ServicerContext[pb.LocateRoomsRequest, pb.LocateRoomsResponse],
    ) -> pb.LocateRoomsResponse:
        prefill = prefill_of(self._manager)
        if prefill is None:
            raise _decode_rank(self._manager, "senders are at prefill")
        if not 0 < len(request.rooms) <= MAX_LOCATED_ROOMS:
            raise InvalidRequest.of("rooms", f"{len(request.rooms)} items", f"1 to {MAX_LOCATED_ROOMS} items")
        found = await prefill.locate(wire.room_keys(request.rooms), longest_wait(context.time_remaining()))
        return pb.LocateRoomsResponse(rooms=wire.room_keys_to_pb(found))

    async def CancelRoom(self, request: pb.CancelRoomRequest, context: Any) -> pb.CancelRoomResponse:
        if len(request.cause) > _LONGEST_CAUSE:
            raise InvalidRequest.of("cause", f"{len(request.cause)} characters", f"at most {_LONGEST_CAUSE} characters")
        row = self._find(request.room, request.attempt)
        logger.info(
            "room %d attempt %d: cancelled by %s", row.key.room, row.key.attempt, caller_address(context.peer())
        )
        self._manager.cancel(row.key, cancelled(row.key, request.cause or "an operator cancelled it", "operator"))
        return pb.CancelRoomResponse(room=_room_to_pb(self._manager.room(row.key) or row))

    async def GetTopology(self, request: pb.GetTopologyRequest, context: object) -> pb.GetTopologyResponse:
        lines = engines.each_line(wire.engine_from_pb(request.prefill), wire.engine_from_pb(request.decode))
        owed = engines.in_order(await in_pieces(lines))
        return pb.GetTopologyResponse(parts=await in_pieces(map(wire.owed_to_pb, owed)))

    async def GetRank(self, request: pb.GetRankRequest, context: object) -> pb.GetRankResponse:
        manager = self._manager
        shape = manager.shape
        return pb.GetRankResponse(
            rank=rank_ref_to_pb(manager.ref),
            role=_ROLES[self._role],
            layout=layout_to_pb(shape.layout),
            pools=[pool_to_pb(pool.without_addresses()) for pool in shape.pools],
            data_plane=shape.data_plane,
            aux_item_bytes=shape.aux_item_bytes,
            pages_held=manager.held_pages,
            pages_held_limit=min(manager.held_pages_limit, 2**32 - 1),
        )

    def _find(self, room: int, attempt: int) -> RoomRow:
        if not 0 < room <= MAX_ROOM:
            raise InvalidRequest.of("room", room, "1 to 2^63-1, as a router chooses it")
        row = self._manager.room(RoomKey(room, attempt))
        if row is None or not self._shows(row):
            raise RoomNotFound(
                f"room {room} attempt {attempt} is not known to {self._manager.ref}",
                metadata={"room": room, "attempt": attempt},
            )
        return row

    def _shows_all(self) -> bool:
        """People see all rooms, and so does this rank; who knows a room's number may claim it (rule 10, ownership)."""
        known = caller()
        return known.role is not CallerRole.RANK or known.speaks_for(self._manager.ref, self._role)

    def _shows(self, row: RoomRow) -> bool:
        """A rank sees those that it has a part in."""
        theirs = Role.PREFILL if self._role is Role.DECODE else Role.DECODE
        return self._shows_all() or any(caller().speaks_for(part.peer, theirs) for part in row.parts)

    @property
    def _role(self) -> Role:
        return Role.DECODE if prefill_of(self._manager) is None else Role.PREFILL


_ROLES = {Role.PREFILL: common_pb2.ROLE_PREFILL, Role.DECODE: common_pb2.ROLE_DECODE}


def _decode_rank(manager: Runtime, why: str) -> WrongRank:
    return WrongRank(
        f"{manager.ref} is a decode rank: {why}", metadata={"expected": Role.PREFILL.name, "actual": Role.DECODE.name}
    )


def _states(asked: Sequence[int]) -> set[RoomState]:
    known = RoomState._value2member_map_
    unknown = [str(state) for state in asked if state not in known]
    if unknown:
        names = ", ".join(f"{state.name} ({state.value})" for state in RoomState)
        raise InvalidRequest.of("states", ", ".join(unknown[:10]), f"of {names}")
    return {RoomState(state) for state in asked}


async def _listed(rows: Iterable[RoomRow], total: int) -> pb.ListRoomsResponse:
    """The first ones up to MAX_PAGE_BYTES, at least one: a failure or many parts make a room as large as 50 KiB."""
    response = pb.ListRoomsResponse(total=total)

    def filled() -> Iterator[None]:
        left = MAX_PAGE_BYTES
        for row in rows:
            room = _room_to_pb(row)
            left -= room.ByteSize()
            if left < 0 and response.rooms:
                return
            response.rooms.append(room)
            yield

    await in_pieces(filled())
    return response


def _by_peer(rows: Iterable[SessionRow]) -> Iterator[tuple[str, SessionRow]]:
    return ((str(row.peer), row) for row in rows)


def _session_to_pb(row: SessionRow) -> pb.Session:
    message = pb.Session(
        peer=rank_ref_to_pb(row.peer),
        address=row.address,
        state=pb.SessionState.ValueType(row.state),
        stream=row.stream,
        rooms=row.rooms,
        pending_rooms=row.pending_rooms,
    )
    message.since_start.CopyFrom(_figures_to_pb(row.figures.since_start))
    message.last_minute.CopyFrom(_figures_to_pb(row.figures.last_minute()))
    message.idle_time.FromMilliseconds(round(row.idle_seconds * 1000))
    if row.state is SessionState.SILENT:
        message.silent_since.FromNanoseconds(time.time_ns() - round(row.idle_seconds * 1e9))
    return message


def _room_to_pb(row: RoomRow) -> pb.Room:
    message = pb.Room(
        room=row.key.room,
        attempt=row.key.attempt,
        role=_ROLES[row.role],
        state=pb.RoomState.ValueType(row.state),
        parts=[
            pb.RoomPart(
                peer=rank_ref_to_pb(part.peer),
                state=pb.RoomState.ValueType(part.state),
                writes=pb.Writes.ValueType(part.writes),
                pages_done=part.pages_done,
            )
            for part in row.parts
        ],
        pages=row.pages,
        held=row.held,
        local_handle=row.local_handle,
        traceparent=row.traceparent,
        held_pages=row.pages if row.held else 0,
    )
    message.age.FromMilliseconds(round(row.age_seconds * 1000))
    if row.failure is not None:
        message.failure.CopyFrom(failure_to_pb(row.failure))
    if row.end is not None:
        message.end.CopyFrom(_end_to_pb(row.end))
    return message


def _end_to_pb(end: RoomEnd) -> pb.HandOffEnd:
    message = pb.HandOffEnd(bytes=end.nbytes)
    message.time.FromNanoseconds(round(end.ended_at * 1e9))
    for field, seconds in zip(("bootstrap_time", "wait_time", "transfer_time"), end.stages, strict=True):
        getattr(message, field).FromNanoseconds(round(seconds * 1e9))
    message.gigabytes_per_second = end.nbytes / end.stages[-1] / 1e9 if end.stages[-1] else 0.0
    return message


def _figures_to_pb(sums: HandOffSums) -> pb.HandOffFigures:
    message = pb.HandOffFigures(
        succeeded=sums.succeeded,
        failed=sums.failed,
        bytes=sums.nbytes,
        gigabytes_per_second=sums.bytes_per_second / 1e9,
    )
    if sums.succeeded:
        message.p50.FromNanoseconds(round(sums.quantile(0.5) * 1e9))
        message.p99.FromNanoseconds(round(sums.quantile(0.99) * 1e9))
    return message
