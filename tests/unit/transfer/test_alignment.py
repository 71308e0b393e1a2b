"""Which page goes where when prefill sends another number of pages than decode wants (session.md rule 13, chunks)."""

from __future__ import annotations

import numpy as np
import pytest

from kvgrpc.dataplane.base import Outcome
from kvgrpc.model import RankId, RankRef
from kvgrpc.transfer.protocol.prefill.core import Chunk, PrefillCore
from kvgrpc.transfer.protocol.types import Align, DecodeEntry, Destination, Handle, KVPoll, RoomKey, Want

PREFILL, DECODE, KEY = RankRef(RankId("P"), 1), RankRef(RankId("D"), 2), RoomKey(5)
WHOLE_PROMPT = 6


def placed(wanted: list[int], first_page: int, total: int | None, sent: int, align: Align) -> dict[int, int] | str:
    """Decode's page -> prefill's page after pages 100, 101, … were sent one by one; or the reason of the failure."""
    core, stream, handle = PrefillCore(PREFILL), object(), Handle()
    assert core.on_hello(stream, DECODE, PREFILL, 1) is None
    destination = Destination(np.array(wanted, np.uint32), first_page)
    core.on_frame(stream, DECODE, [DecodeEntry(KEY, Want.WRITE, destination, 10_000)])
    record = core.claim(KEY, handle)
    assert record is not None
    record.expect(total, align)
    for position in range(sent):
        core.send(record, Chunk(np.array([100 + position], np.uint32), position, position == sent - 1))
    moved: dict[int, int] = {}
    for submission in core.take_work().submissions:
        moved.update(zip(submission.destination.tolist(), submission.source.tolist(), strict=True))
        core.on_outcome(submission, Outcome.DONE)
    if handle.failure is not None:
        return handle.failure.reason.name
    assert handle.poll is KVPoll.Success
    return moved


@pytest.mark.parametrize("align", Align)
@pytest.mark.parametrize("total", [3, None])
def test_as_many_as_wanted_go_one_to_one(align: Align, total: int | None) -> None:
    assert placed([7, 8, 9], 0, total, 3, align) == {7: 100, 8: 101, 9: 102}


def test_decode_with_a_prefix_and_prefill_that_sends_the_rest_go_one_to_one() -> None:
    assert placed([7, 8], 4, 2, 2, Align.HEAD) == {7: 100, 8: 101}


@pytest.mark.parametrize("align", Align)
@pytest.mark.parametrize("total", [WHOLE_PROMPT, None])
def test_decode_with_a_prefix_gets_the_rest_of_a_whole_prompt(align: Align, total: int | None) -> None:
    assert placed([7, 8], 4, total, WHOLE_PROMPT, align) == {7: 104, 8: 105}


def test_without_a_prefix_head_gives_the_first_pages_and_tail_the_last() -> None:
    assert placed([7, 8], 0, WHOLE_PROMPT, WHOLE_PROMPT, Align.HEAD) == {7: 100, 8: 101}
    assert placed([7, 8], 0, WHOLE_PROMPT, WHOLE_PROMPT, Align.TAIL) == {7: 104, 8: 105}


@pytest.mark.parametrize("align", Align)
@pytest.mark.parametrize("first_page", [0, 4])
def test_fewer_than_wanted_fail_the_room(align: Align, first_page: int) -> None:
    assert placed([7, 8, 9], first_page, 2, 2, align) == "INVALID_REQUEST"


def test_a_full_prefix_hit_needs_no_page() -> None:
    assert placed([], WHOLE_PROMPT, WHOLE_PROMPT, WHOLE_PROMPT, Align.HEAD) == {}
