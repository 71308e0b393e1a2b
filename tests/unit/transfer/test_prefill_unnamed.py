"""After the loss of a decode a sender that no decode names does not wait for its whole deadline (rule 6, ending).

A router that asks both sides at once may have sent the request to the dead one, and SGLang's tells prefill no name.
"""

from __future__ import annotations

import pytest

from kvgrpc.model import RankRef
from kvgrpc.transfer.protocol.types import Handle, KVPoll, RoomKey, Timing, Want
from tests.support.prefill_side import D0, D1, Side, reason

TIMING = Timing(unnamed_after_loss=100)
LATE = RoomKey(6)


@pytest.fixture
def side() -> Side:
    return Side(timing=TIMING)


def lose(side: Side, ref: RankRef = D0) -> None:
    """Its stream breaks, and it does not come back in time."""
    stream = side.streams.pop(ref, None) or side.hello(ref)
    side.streams.pop(ref, None)
    side.core.on_end(stream, ref)
    side.ticks(TIMING.welcome_within + 1)


def waits(handle: Handle) -> bool:
    return handle.poll in (KVPoll.Bootstrapping, KVPoll.WaitingForInput)


def test_a_sender_that_waits_then_and_one_that_comes_later_fail_and_say_which_decode_was_lost(side: Side) -> None:
    _, early = side.claim()
    side.ticks(TIMING.unnamed_after_loss + 50)  # without a loss it goes on waiting
    lose(side)
    _, late = side.claim(LATE)
    side.ticks(TIMING.unnamed_after_loss - 1)
    assert waits(early) and waits(late)
    side.ticks(1)
    assert reason(early) == reason(late) == "PEER_LOST"
    assert late.failure is not None and str(D0.rank) in late.failure.message


@pytest.mark.parametrize("want", [Want.ANNOUNCE, Want.WRITE])
def test_one_that_another_decode_names_goes_on(side: Side, want: Want) -> None:
    _, handle = side.claim()
    lose(side)
    side.name(want, ref=D1)
    side.ticks(TIMING.unnamed_after_loss + 1)
    assert waits(handle)


def test_while_another_decode_is_silent_nobody_knows_whose_a_room_is(side: Side) -> None:
    side.hello(D1)
    lose(side)
    _, handle = side.claim()
    side.ticks(TIMING.unnamed_after_loss + TIMING.silent_after, heard=False)
    assert waits(handle)
    side.ticks(2)
    assert reason(handle) == "PEER_LOST"


def test_a_decode_that_is_back_is_no_loss(side: Side) -> None:
    lose(side)
    _, handle = side.claim()
    side.hello(RankRef(D0.rank, D0.epoch + 1))
    side.ticks(TIMING.unnamed_after_loss + 1)
    assert waits(handle)


def test_a_loss_counts_as_long_as_a_room_may_wait(side: Side) -> None:
    lose(side)
    side.ticks(TIMING.room_deadline)
    _, handle = side.claim()
    side.ticks(TIMING.unnamed_after_loss + 1)
    assert waits(handle)


def test_engines_whose_router_asks_one_side_after_the_other_wait_for_the_whole_deadline() -> None:
    side = Side()
    _, handle = side.claim()
    lose(side)
    side.ticks(TIMING.unnamed_after_loss + 1)
    assert waits(handle)
