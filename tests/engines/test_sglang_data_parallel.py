"""Two dp ranks on both sides, whose controllers give requests out in turn: decode finds out who has which."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from tests.engines.engine import Pair
from tests.engines.model import Reference
from tests.engines.stages import rank_addresses

pytestmark = pytest.mark.timeout(400)
IN_TURN = {"dp_size": 2, "load_balance_method": "round_robin"}


@pytest.fixture(scope="module")
def pair(folder: Path, reference: Reference) -> Iterator[Pair]:
    pair = Pair(folder, reference.path, prefill=IN_TURN, decode=IN_TURN)
    yield pair.wait_ready()
    pair.close()


def rooms_of_ranks(pair: Pair, role: str, rooms: list[int]) -> list[int]:
    """How many of them each rank of that side had."""
    counts = []
    for address in rank_addresses(getattr(pair, role)):
        with SyncClient(address) as client:
            counts.append(len({room.room for room in client.list_rooms()} & {*rooms}))
    return counts


def test_tokens_are_right_whichever_dp_rank_computed_the_prompt(pair: Pair, reference: Reference) -> None:
    rooms = [pair.room() & ~1 for _ in range(6)]  # all even: room % dp would name one rank only
    for room in rooms:
        case = reference.case(100)
        prefill, decode = pair.submit_unseen(case.prompt, 8, room)
        assert decode.result() == case.tokens
        assert prefill.result() == case.tokens[:1]
    for role in ("prefill", "decode"):
        assert rooms_of_ranks(pair, role, rooms) == [3, 3]


def test_requests_at_once_leave_no_page_behind(pair: Pair, reference: Reference) -> None:
    pair.check_at_once([reference.case(120) for _ in range(6)])
