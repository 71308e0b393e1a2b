"""Requests at known stages of their hand-off, for the faults of one side.

The stage is seen in the rooms of the ranks, as an operator sees them, before the fault; it is not left to chance.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvgrpc.client import SyncClient
from kvgrpc.v1 import transfer_service_pb2 as proto
from tests.engines.engine import Engine, Pair, Request
from tests.engines.model import Case, Reference
from tests.support.waiting import wait_until

STAGE_SECONDS = 30.0
MOST_TRIES = 30
LONG = 300


@dataclass
class Stages:
    """Three requests of decode when prefill has stopped running (SIGSTOP).

    ``alone``: decode waits, and prefill knows its pages; nothing was asked of prefill's engine. ``under_way``: both
    have it, and not all its pages were sent; of a pair that sends no chunks it was asked just before. ``computing``:
    decode computes its tokens.
    """

    stopped: float
    alone: Request
    alone_room: int
    under_way: Request
    under_way_tokens: list[int]
    computing: Request
    computing_case: Case


def stop_prefill_at_every_stage(pair: Pair, reference: Reference) -> Stages:
    room, computing_case = pair.room(), reference.case(100)
    alone = pair.submit_to_decode(reference.case(100).prompt, 8, room)
    wait_for(pair.prefill, pair.number_of(room), lambda found: found.pages > 0)
    computing = None
    for _ in range(MOST_TRIES):
        if computing is None or computing.ended:
            computing = decoding(pair, computing_case)
        under_way_case, under_way_room = reference.case(400), pair.room()
        requests = pair.submit(under_way_case.prompt, 8, under_way_room)
        number = pair.number_of(under_way_room)
        if pair.sends_chunks:
            wait_for(pair.prefill, number, has_sent, requests[1])
        stopped = pair.prefill.stop()
        found = room_of(pair.decode, number) if pair.sends_chunks else None
        unsent = not pair.sends_chunks or (found is not None and not is_over(found))
        if unsent and computing.ended is None:
            return Stages(stopped, alone, room, requests[1], under_way_case.tokens[:8], computing, computing_case)
        pair.prefill.go_on()
        for request in requests:
            request.wait()
    raise AssertionError(f"no request was caught under way\n{pair.prefill.log_tail()}\n{pair.decode.log_tail()}")


def ended_after(moment: float, *requests: Request) -> str:
    """Seconds from then to the end of each."""
    return ", ".join(f"{(request.ended or 0) - moment:.3f}" for request in requests)


def decoding(pair: Pair, case: Case) -> Request:
    """A long request whose first token decode has computed."""
    _, decode = pair.submit(case.prompt, LONG)
    wait_until(lambda: decode.first is not None or decode.ended is not None)
    return decode


def is_over(room: proto.Room) -> bool:
    return room.state in (proto.ROOM_STATE_SUCCESS, proto.ROOM_STATE_FAILED)


def has_sent(room: proto.Room) -> bool:
    return is_over(room) or any(part.pages_done for part in room.parts)


def wait_for(
    engine: Engine, number: int, condition: Callable[[proto.Room], bool], request: Request | None = None
) -> None:
    """Until a room of the engine's rank is so, or ``request`` has ended: it may be forgotten before it is seen."""
    with SyncClient(rank_address(engine)) as client:
        end = time.monotonic() + STAGE_SECONDS
        while time.monotonic() < end:
            found = [room for room in client.list_rooms() if room.room == number]
            if (found and condition(found[0])) or (request is not None and request.ended is not None):
                return
    raise AssertionError(f"room {number} of {engine.role} did not come so far\n{engine.log_tail()}")


def room_of(engine: Engine, number: int) -> proto.Room | None:
    with SyncClient(rank_address(engine)) as client:
        return next((room for room in client.list_rooms() if room.room == number), None)


def rank_address(engine: Engine) -> str:
    (address,) = re.findall(rf"{engine.role} rank \S+ listens on ([^\s,]+)", engine.log())
    return str(address)
