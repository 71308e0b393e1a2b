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
from tests.engines.engine import Engine, Pair, Request, another
from tests.engines.model import Case, Reference
from tests.support.waiting import wait_until

STAGE_SECONDS = 30.0
MOST_TRIES = 30
LONG = 300


@dataclass
class Asked:
    """A request as its router sees it, but that decode is told another prompt (``another``): its tokens are right by
    prefill's pages alone. ``prefill`` and ``decode``: its halves; None: nobody has asked there yet."""

    pair: Pair
    case: Case
    room: int
    prefill: Request | None = None
    decode: Request | None = None

    @property
    def number(self) -> int:
        """What kvgrpc calls its room."""
        return self.pair.number_of(self.room)

    def ask_prefill(self) -> Request:
        self.prefill = self.pair.submit_to_prefill(self.case.prompt, self.room)
        return self.prefill

    def ask_decode(self) -> Request:
        self.decode = self.pair.submit_to_decode(another(self.case.prompt), len(self.case.tokens), self.room)
        return self.decode

    @property
    def decode_ended(self) -> bool:
        return self.decode is not None and self.decode.ended is not None


@dataclass
class Stages:
    """Four requests when one side has stopped running (SIGSTOP), at the ``moment``.

    ``alone``: decode waits, and prefill knows its pages; prefill's engine was not asked. ``early``: prefill was asked,
    and decode was not. ``under_way``: both have it, and not all its pages were sent: of a pair that sends chunks some
    were. ``computing``: decode computes its tokens.
    """

    moment: float
    alone: Asked
    early: Asked
    under_way: Asked
    computing: Asked


def stop_at_every_stage(pair: Pair, reference: Reference, role: str) -> Stages:
    """Stops the engine of that role."""
    stopping: Engine = getattr(pair, role)
    witness = pair.decode if stopping is pair.prefill else pair.prefill
    alone, early = (Asked(pair, reference.case(100), pair.room()) for _ in range(2))
    alone.ask_decode()
    wait_for(pair.prefill, alone.number, lambda found: found.pages > 0)
    early.ask_prefill()
    wait_for(pair.prefill, early.number, lambda found: found.local_handle)
    computing: Asked | None = None
    for _ in range(MOST_TRIES):
        if computing is None or computing.decode_ended:
            computing = decoding(pair, reference)
        under_way = Asked(pair, reference.case(400), pair.room())
        halves = under_way.ask_prefill(), under_way.ask_decode()
        wait_for(pair.prefill, under_way.number, has_sent if pair.sends_chunks else has_met, under_way.decode)
        moment = stopping.stop()
        found = room_of(witness, under_way.number)
        if found is not None and not is_over(found) and not computing.decode_ended:
            return Stages(moment, alone, early, under_way, computing)
        stopping.go_on()
        for half in halves:
            half.wait()
    raise AssertionError(f"no request was caught under way\n{pair.prefill.log_tail()}\n{pair.decode.log_tail()}")


def decoding(pair: Pair, reference: Reference) -> Asked:
    """A long request whose first token decode has computed; of its tokens the first are known."""
    asked = Asked(pair, reference.case(100), pair.room())
    asked.prefill, decode = pair.submit_unseen(asked.case.prompt, LONG, asked.room)
    asked.decode = decode
    wait_until(lambda: decode.first is not None or decode.ended is not None)
    return asked


def is_over(room: proto.Room) -> bool:
    return room.state in (proto.ROOM_STATE_SUCCESS, proto.ROOM_STATE_FAILED)


def has_sent(room: proto.Room) -> bool:
    return is_over(room) or any(part.pages_done for part in room.parts)


def has_met(room: proto.Room) -> bool:
    return room.state not in (proto.ROOM_STATE_UNSPECIFIED, proto.ROOM_STATE_BOOTSTRAPPING) and room.pages > 0


def wait_for(
    engine: Engine, number: int, condition: Callable[[proto.Room], bool], request: Request | None = None
) -> None:
    """Until a room is so in every rank of the engine, or ``request`` has ended: it may be forgotten before it is
    seen."""
    end = time.monotonic() + STAGE_SECONDS
    for address in rank_addresses(engine):
        with SyncClient(address) as client:
            is_so = False
            while not is_so:
                is_so = any(room.room == number and condition(room) for room in client.list_rooms())
                if request is not None and request.ended is not None:
                    return
                assert is_so or time.monotonic() < end, (
                    f"room {number} of {engine.role} did not come so far\n{engine.log_tail()}"
                )


def room_of(engine: Engine, number: int) -> proto.Room | None:
    with SyncClient(rank_address(engine)) as client:
        return next((room for room in client.list_rooms() if room.room == number), None)


def check_unseen(pair: Pair, case: Case) -> tuple[int, int]:
    """Tokens of the prompt that decode, or before it prefill, held already, as SGLang counts; and pages that were
    handed over. Decode is told another prompt: it has these tokens by such pages alone, those of an earlier prompt that
    began alike among them. Of engines with one rank."""
    return _check_told(pair, case, another(case.prompt))


def check_continued(pair: Pair, reference: Reference, first: Case, length: int) -> tuple[int, int]:
    """The same of a prompt of ``length`` tokens, with which a conversation goes on that ``check_unseen`` began. Of it
    decode is told the answer that it gave to ``first``, and other tokens before and behind it."""
    asked = first.prompt + first.tokens
    case = reference.case(length, prefix=asked)
    return _check_told(pair, case, another(first.prompt) + first.tokens + another(case.prompt[len(asked) :]))


def _check_told(pair: Pair, case: Case, told: list[int]) -> tuple[int, int]:
    room = pair.room()
    prefill, decode = pair.submit_to_prefill(case.prompt, room), pair.submit_to_decode(told, len(case.tokens), room)
    assert (prefill.result(), decode.result()) == (case.tokens[:1], case.tokens)
    return decode.cached, handed_over(pair, room)


def handed_over(pair: Pair, room: int) -> int:
    """Pages of a hand-off that went well, of the first pool, on which both sides agree. Of engines with one rank."""
    (pages,) = {pages_at(engine, pair.number_of(room)) for engine in (pair.prefill, pair.decode)}
    return pages


def pages_at(engine: Engine, number: int) -> int:
    """Of a hand-off that went well, in the engine's own pages, of the first pool. Of an engine with one rank."""
    wait_for(engine, number, is_over)
    found = room_of(engine, number)
    assert found is not None and found.state == proto.ROOM_STATE_SUCCESS, found
    return found.pages


def rank_address(engine: Engine) -> str:
    """Of an engine with one rank."""
    (address,) = rank_addresses(engine)
    return address


def rank_addresses(engine: Engine) -> list[str]:
    return re.findall(rf"{engine.role} rank \S+ listens on ([^\s,]+)", engine.log())
