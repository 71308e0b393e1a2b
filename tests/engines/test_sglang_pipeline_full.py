"""Pipeline stages of decode with a pool of few pages: all of them admit, free and retract the same requests."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.v1 import transfer_service_pb2 as proto
from tests.engines.engine import PAGE, Pair
from tests.engines.lost_in_a_stage import PLUGIN, ROOMS
from tests.engines.model import STAGED, Reference
from tests.engines.pipeline import check, check_empty
from tests.engines.stages import Asked, has_met, rank_addresses, wait_for
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(900)
STAGES, POOL = 2, 16 * PAGE
MOST, LESS = 10 * PAGE - 5, 7 * PAGE - 5  # two prompts that have no room beside each other


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("staged"), STAGED)


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That decode's second stage loses."""
    return tmp_path_factory.mktemp("rooms")


@pytest.fixture(scope="module")
def pair(folder: Path, staged: Reference, rooms: Path) -> Iterator[Pair]:
    decode = {
        "pp_size": STAGES,
        "max_total_tokens": POOL,
        "num_reserved_decode_tokens": PAGE,
        "disaggregation_decode_retraction_backup": "host_pool",
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
    }
    environment = {"SGLANG_ON_CPU_PLUGIN": PLUGIN, ROOMS: str(rooms)}
    pair = Pair(folder, staged.path, environment=environment, prefill={"pp_size": STAGES}, decode=decode)
    yield pair.wait_ready()
    pair.close()


def rooms_of(pair: Pair, number: int) -> list[proto.Room | None]:
    """In each stage of decode."""
    found: list[proto.Room | None] = []
    for address in rank_addresses(pair.decode):
        with SyncClient(address) as client:
            found.append(next((room for room in client.list_rooms() if room.room == number), None))
    return found


def test_a_request_is_admitted_when_every_stage_has_its_pages_back(pair: Pair, staged: Reference) -> None:
    given_up, waiting = (Asked(pair, staged.case(length), pair.room()) for length in (MOST, LESS))
    decode = given_up.ask_decode()
    wait_for(pair.decode, given_up.number, has_met)
    waits = waiting.ask_decode()
    wait_for(pair.decode, waiting.number, lambda room: room.state == proto.ROOM_STATE_WAITING_FOR_INPUT)
    pair.prefill.stop_stage(1)
    try:
        pair.decode.abort(decode)
        assert decode.wait(), pair.decode.log_tail()
        wait_until(
            lambda: sorted(bool(room and room.held) for room in rooms_of(pair, given_up.number)) == [False, True]
        )
        time.sleep(0.5)  # many steps of decode, in which it could admit the other
        assert [room and room.pages for room in rooms_of(pair, waiting.number)] == [0, 0]
    finally:
        pair.prefill.go_on()
    wait_for(pair.decode, waiting.number, has_met)
    waiting.ask_prefill()
    assert waits.result() == waiting.case.tokens
    check_empty(pair.decode, STAGES)
    check(pair, staged.case(50))


def test_a_hand_off_that_one_stage_loses_when_the_other_has_it_ends_in_both(
    pair: Pair, staged: Reference, rooms: Path
) -> None:
    lost, others = Asked(pair, staged.case(MOST), pair.room()), [staged.case(LESS - number) for number in range(4)]
    (rooms / str(lost.room)).touch()
    lost.ask_prefill(), lost.ask_decode()
    halves = [pair.submit_unseen(case.prompt, len(case.tokens)) for case in others]
    assert lost.decode is not None and "another" in lost.decode.failure()
    assert (rooms / f"{lost.room}.first").exists(), "the first stage never had it"
    assert [decode.result() for _, decode in halves] == [case.tokens for case in others]
    check_empty(pair.decode, STAGES)
    check(pair, staged.case(50))


def test_stages_retract_the_same_requests(pair: Pair, staged: Reference) -> None:
    """SGLang retracts within a micro-batch, of which there are as many as stages, and aborts the last request of one
    where the others have filled the pool."""
    cases = [staged.case(2 * PAGE + 1 + number, new_tokens=60) for number in range(6)]
    halves = [pair.submit_unseen(case.prompt, len(case.tokens)) for case in cases]
    for case, (_, decode) in zip(cases, halves, strict=True):
        assert decode.wait(), pair.decode.log_tail()
        assert decode.tokens == case.tokens or "Out of memory" in (decode.error or ""), decode.error
    assert any(decode.error is None for _, decode in halves)
    check_empty(pair.decode, STAGES)
    retracted = [
        re.findall(rf"PP{stage}\]\s+KV cache pool is full\. Retract requests\. (.*)", pair.decode.log())
        for stage in range(STAGES)
    ]
    assert retracted[0] and retracted[0] == retracted[1]
    check(pair, staged.case(50))
