"""transfer_service.proto <-> model, and nothing else.

What is wrong with one entry of a frame becomes that entry's ``error`` and fails that room alone; what is wrong with the
frame itself raises InvalidRequest and ends the session (rule 15, hostile frames).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvgrpc.errors import FrameTooLarge, InvalidRequest, KvGrpcError
from kvgrpc.model import RankId
from kvgrpc.transfer.layout.engines import EngineShape, Owed
from kvgrpc.transfer.layout.plan import check_destination, check_inside
from kvgrpc.transfer.layout.topology import Part
from kvgrpc.transfer.protocol.types import (
    LONGEST_TRACEPARENT,
    MAX_ROOM,
    STATE_FAILED,
    WANT_ANNOUNCE,
    WANT_FORGET,
    WANT_OPENED,
    WANT_WRITE,
    DecodeEntry,
    Destination,
    PrefillEntry,
    RoomKey,
    RoomState,
    Want,
    Writes,
)
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.v1.common_pb2 import PageSet
from kvgrpc.wire import failure_from_pb, failure_to_pb, layout_from_pb, rank_id_to_pb

MAX_PAGES = 2**24
MOST_WAITING_ROOMS = 1024  # of one Hello
_ENTRY_BYTES = 64
_FAILURE_BYTES = 8192
# More runs than one for so many pages are a list: so no room has more of them than that part of its pool.
_PAGES_OF_A_RUN = 8
_WANTS = {int(want): want for want in Want if want is not WANT_OPENED}
_STATES = {int(state): state for state in RoomState}
_WRITES = {int(writes): writes for writes in Writes}


def engine_from_pb(message: pb.EngineShape) -> EngineShape:
    """Raises InvalidRequest for sizes below 1."""
    layout = layout_from_pb(message.layout)
    for axis in ("dp", "pp", "cp", "tp"):
        if getattr(layout, axis) < 1:
            raise InvalidRequest.of(f"layout.{axis}", getattr(layout, axis), "at least 1")
    axes = message.axes or "token,head,dim"
    return EngineShape(layout, message.heads, message.layers or 1, axes, message.page_tokens or 16)


def owed_to_pb(owed: Owed) -> pb.OwedPart:
    return pb.OwedPart(
        prefill=rank_id_to_pb(RankId("", *owed.prefill)),
        decode=rank_id_to_pb(RankId("", *owed.decode)),
        part=part_to_pb(owed.part),
        descriptors_per_page=owed.descriptors,
    )


def part_to_pb(part: Part) -> pb.CachePart:
    return pb.CachePart(
        layer_start=part.layer_start,
        layer_count=part.layer_count,
        head_start=part.head_start,
        head_count=part.head_count,
        aux=part.aux,
    )


def part_from_pb(message: pb.CachePart) -> Part:
    return Part(message.layer_start, message.layer_count, message.head_start, message.head_count, message.aux)


def room_keys(messages: Sequence[pb.RoomKey]) -> list[RoomKey]:
    """Raises InvalidRequest for a room that cannot be one."""
    return [_key(message.room, message.attempt, index) for index, message in enumerate(messages)]


def waiting_rooms(first: pb.SessionRequest | None) -> list[RoomKey]:
    """The rooms that a Hello names, without those whose key is invalid."""
    waiting = [] if first is None else first.hello.waiting_rooms
    return [RoomKey(message.room, message.attempt) for message in waiting if 0 < message.room <= MAX_ROOM]


def opener_engine(first: pb.SessionRequest | None) -> str:
    """Whose Hello it is, as it says itself."""
    return "" if first is None else first.hello.opener.rank.engine


def room_keys_to_pb(keys: Iterable[RoomKey]) -> list[pb.RoomKey]:
    return [pb.RoomKey(room=key.room, attempt=key.attempt) for key in keys]


def encode_requests(
    entries: Sequence[DecodeEntry], limit: int, too_large: list[DecodeEntry]
) -> Iterator[pb.SessionRequest]:
    """Encodes all entries as one frame, or as several where one would be larger than ``limit`` bytes.

    Sizes are estimated, never too small. An entry that is too large for any frame is appended to ``too_large`` instead.
    """
    frame = pb.SessionRequest()
    add, used = frame.rooms.add, 0
    forget: list[int] = []
    for entry in entries:
        room, attempt, want = entry.key.room, entry.key.attempt, entry.want
        destination, failure, traceparent = entry.destination, entry.failure, entry.traceparent
        size = _ENTRY_BYTES + len(traceparent)
        if destination is not None:
            size += _destination_bytes(destination)
            if size > limit:
                too_large.append(entry)
                continue
        elif failure is not None:
            size += _FAILURE_BYTES
        if used and used + size > limit:
            frame.forget_rooms.extend(forget)
            yield frame
            frame = pb.SessionRequest()
            add, used, forget = frame.rooms.add, 0, []
        used += size
        if want is WANT_FORGET and not attempt:
            forget.append(room)
        elif want is WANT_WRITE and destination is not None:
            message = add(room=room, attempt=attempt, want=2, time_left_ms=entry.time_left_ms)
            if destination.first_page:
                message.first_page = destination.first_page
            if traceparent:
                message.traceparent = traceparent
            fill_page_set(message.pages.add(), destination)
            for pool, other in enumerate(destination.others or (), 1):
                fill_page_set(message.pages.add(pool=pool), other)
        else:
            message = add(room=room, attempt=attempt, want=pb.Want.ValueType(want))
            if want is WANT_ANNOUNCE:
                message.time_left_ms, message.traceparent = entry.time_left_ms, traceparent
            if failure is not None:
                message.failure.CopyFrom(failure_to_pb(failure))
    if used:
        frame.forget_rooms.extend(forget)
        yield frame


def parse_request(
    frame: pb.SessionRequest, pool_pages: Sequence[tuple[str, int]], most_pages: Sequence[int] = ()
) -> Iterator[DecodeEntry]:
    """Yields the entries of a frame that decode sent; each is parsed when it is asked for.

    ``pool_pages``: name and number of pages of each pool in its Hello. ``most_pages``: how many pages of each pool one
    room may name. Raises InvalidRequest at an entry that is malformed.
    """
    for index, message in enumerate(frame.rooms):
        key = _key(message.room, message.attempt, index)
        want = _WANTS.get(message.want)
        if want is WANT_WRITE or want is WANT_ANNOUNCE:
            destination, traceparent, error = None, message.traceparent, None
            try:
                if len(traceparent) > LONGEST_TRACEPARENT:
                    raise _too_long(traceparent, index)
                if want is WANT_WRITE:
                    destination = _destination(message, pool_pages, most_pages, index)
            except KvGrpcError as found:
                traceparent, error = "", found
            yield DecodeEntry(key, want, destination, message.time_left_ms, None, traceparent, error)
        elif want is None:
            rule = "WANT_ANNOUNCE, WANT_WRITE, WANT_STOP or WANT_FORGET"
            raise InvalidRequest.of(f"rooms[{index}].want", message.want, rule)
        else:
            failure = failure_from_pb(message.failure) if message.HasField("failure") else None
            yield DecodeEntry(key, want, failure=failure)
    for index, room in enumerate(frame.forget_rooms):
        if not 0 < room <= MAX_ROOM:
            raise InvalidRequest.of(f"forget_rooms[{index}]", room, "1 to 2^63-1")
        yield DecodeEntry(RoomKey(room), WANT_FORGET)


def encode_responses(entries: Iterable[PrefillEntry], limit: int) -> Iterator[pb.SessionResponse]:
    """Encodes what prefill says to decode; see ``encode_requests``."""
    frame = pb.SessionResponse()
    add, used = frame.rooms.add, 0
    for entry in entries:
        key, aux, failure, checksums = entry.key, entry.aux, entry.failure, entry.checksums
        size = _ENTRY_BYTES + len(aux) + len(checksums) + (0 if failure is None else _FAILURE_BYTES)
        if used and used + size > limit:
            yield frame
            frame = pb.SessionResponse()
            add, used = frame.rooms.add, 0
        used += size
        message = add(
            room=key.room,
            attempt=key.attempt,
            state=entry.state,
            writes=entry.writes,
            pages_done=entry.pages_done,
            aux=aux,
        )
        if checksums:
            message.page_checksums = checksums
        if failure is not None:
            message.failure.CopyFrom(failure_to_pb(failure))
    if used:
        yield frame


def parse_response(frame: pb.SessionResponse) -> Iterator[PrefillEntry]:
    """Yields the entries of a frame that prefill sent, as ``parse_request`` does; raises the same."""
    for index, message in enumerate(frame.rooms):
        key = _key(message.room, message.attempt, index)
        state, writes = _STATES.get(message.state), _WRITES.get(message.writes)
        if state is None:
            raise InvalidRequest.of(f"rooms[{index}].state", message.state, "a known state")
        if writes is None:
            raise InvalidRequest.of(f"rooms[{index}].writes", message.writes, "a known value")
        failed = state is STATE_FAILED and message.HasField("failure")
        failure = failure_from_pb(message.failure) if failed else None
        yield PrefillEntry(key, state, writes, message.pages_done, message.aux, failure, message.page_checksums)


def check_frame(frame: pb.SessionRequest | pb.SessionResponse, limit: int) -> None:
    """Raises FrameTooLarge for a frame above what was allowed: ``limit`` bytes, and an entry for each 64 of them."""
    entries = len(frame.rooms) + (len(frame.forget_rooms) if isinstance(frame, pb.SessionRequest) else 0)
    if entries > limit // _ENTRY_BYTES:
        raise FrameTooLarge(
            f"a frame of {entries} rooms, at most {limit // _ENTRY_BYTES} are allowed",
            metadata={"limit": limit // _ENTRY_BYTES, "value": entries},
        )
    size = frame.ByteSize()
    if size > limit:
        raise FrameTooLarge(
            f"a frame of {size} bytes, at most {limit} are allowed", metadata={"limit": limit, "value": size}
        )


def smallest_frame(aux_bytes: int) -> int:
    """The smallest limit in bytes that works: a frame with the end of one room, its aux or its failure."""
    return 2 * (_ENTRY_BYTES + _FAILURE_BYTES) + aux_bytes


def check_size(destination: Destination, limit: int, answer: int = 0) -> None:
    """Raises FrameTooLarge where the pages, or the ``answer`` to them (bytes), fit into no frame."""
    if _ENTRY_BYTES + LONGEST_TRACEPARENT + _destination_bytes(destination) > limit or answer > limit:
        raise too_large(destination, limit)


def answer_bytes(destination: Destination, aux_bytes: int) -> int:
    """The most bytes that a SUCCESS with a checksum for each page takes in a frame."""
    return _ENTRY_BYTES + aux_bytes + 4 * destination.held


def too_large(destination: Destination, limit: int) -> FrameTooLarge:
    """The error of pages that do not fit into a frame of ``limit`` bytes."""
    size = _ENTRY_BYTES + LONGEST_TRACEPARENT + _destination_bytes(destination)
    return FrameTooLarge(
        f"{destination.held} pages take up to {size} bytes, a frame at most {limit}",
        metadata={"limit": limit, "value": size},
    )


def destination_from_pb(message: PageSet, most: int = MAX_PAGES, first_page: int = 0) -> Destination:
    """The pages of a PageSet; runs are not expanded. Raises InvalidRequest, also for more than ``most`` pages, and for
    more runs than whoever keeps to the contract has of so many pages."""
    most = most if most < MAX_PAGES else MAX_PAGES
    raw = message.pages_u32_le
    if raw:
        if message.run_starts or message.run_lengths:
            raise InvalidRequest.of("run_starts", len(message.run_starts), "empty when pages_u32_le is given")
        if len(raw) % 4:
            raise InvalidRequest.of("pages_u32_le", len(raw), "a multiple of 4 bytes")
        if len(raw) > most * 4:
            raise InvalidRequest.of("pages_u32_le", len(raw), f"at most {most} pages")
        return Destination(raw, first_page)
    if not message.run_starts and not message.run_lengths:
        return Destination(_NO_PAGES, first_page)
    runs = len(message.run_starts)
    if runs != len(message.run_lengths):
        raise InvalidRequest.of("run_lengths", len(message.run_lengths), f"as many as run_starts ({runs})")
    most_runs = -(-most // _PAGES_OF_A_RUN)
    if runs > most_runs:
        raise InvalidRequest.of("run_starts", runs, f"at most {most_runs}, one for {_PAGES_OF_A_RUN} pages of {most}")
    starts = np.array(message.run_starts, dtype=np.int64)
    lengths = np.array(message.run_lengths, dtype=np.int64)
    total = int(lengths.sum())
    if total > most or int((starts + lengths).max(initial=0)) > 2**32:
        raise InvalidRequest.of("run_lengths", total, f"at most {most} pages, each below 2^32")
    return Destination.of_runs(starts, lengths, first_page)


def fill_page_set(message: PageSet, destination: Destination) -> None:
    """Writes the pages as runs where there is at most one run for eight pages, else as raw numbers."""
    count = destination.count
    if count >= _PAGES_OF_A_RUN:
        pages = destination.pages
        first = np.concatenate(([0], np.flatnonzero(np.diff(pages.astype(np.int64)) != 1) + 1))
        if len(first) * _PAGES_OF_A_RUN <= count:
            message.run_starts.extend(pages[first].tolist())
            message.run_lengths.extend(np.diff(first, append=count).tolist())
            return
    message.pages_u32_le = destination.raw


def _destination_bytes(destination: Destination) -> int:
    return 8 * destination.held + 16 * (1 + len(destination.others or ()))


_NO_PAGES = np.empty(0, dtype=np.uint32)


def _destination(
    message: pb.DecodeRoom, pool_pages: Sequence[tuple[str, int]], most_pages: Sequence[int], index: int
) -> Destination:
    """One set addresses every pool with the same numbers; else there is one for each."""
    sets = message.pages
    if len(sets) == 1:
        most = most_pages[0] if len(most_pages) == 1 else min(most_pages, default=MAX_PAGES)
        destination = _pages_of(sets[0], pool_pages[0], most, index, 0, message.first_page)
        for name, count in pool_pages[1:]:
            check_inside(destination, count, name)
        return destination
    if len(sets) != len(pool_pages):
        rule = f"one set for all, or one for each of the {len(pool_pages)} pools"
        raise InvalidRequest.of(f"rooms[{index}].pages", len(sets), rule)
    first, *others = [
        _pages_of(page_set, pool, most_pages[number] if most_pages else MAX_PAGES, index, number, message.first_page)
        for number, (page_set, pool) in enumerate(zip(sets, pool_pages, strict=True))
    ]
    first.others = tuple(others)
    return first


def _pages_of(
    page_set: PageSet, pool: tuple[str, int], most: int, index: int, number: int, first_page: int
) -> Destination:
    name, count = pool
    try:
        if page_set.pool != number:
            raise InvalidRequest.of("pool", page_set.pool, f"{number}, in the order of the Hello")
        found = destination_from_pb(page_set, count if count < most else most, 0 if number else first_page)
        check_destination(found, count, name, "")
    except InvalidRequest as error:
        raise error.inside(f"rooms[{index}].pages[{number}]") from None
    return found


def _too_long(traceparent: str, index: int) -> InvalidRequest:
    rule = f"at most {LONGEST_TRACEPARENT} characters"
    return InvalidRequest.of(f"rooms[{index}].traceparent", f"{len(traceparent)} characters", rule)


def _key(room: int, attempt: int, index: int) -> RoomKey:
    if not 0 < room <= MAX_ROOM:
        raise InvalidRequest.of(f"rooms[{index}].room", room, "1 to 2^63-1")
    return RoomKey(room, attempt)
