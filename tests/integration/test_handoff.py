"""Hand-offs between real processes: the right bytes, and every refusal by name."""

from __future__ import annotations

import pytest

from kvgrpc.model import Layout
from tests.support.pairs import (
    BOOTSTRAPPING,
    BOTH_PLANES,
    FAILED,
    NEEDS_MOONCAKE,
    SHARE_PAGES,
    SUCCESS,
    TRANSFERRING,
    WAITING,
    Start,
    opened_pair,
    prefill_sees,
    random_pages,
)
from tests.support.rank_host import PAGES, RankProcess
from tests.support.waiting import wait_until


@BOTH_PLANES
def test_bytes_and_aux_arrive_whole_in_any_chunks(start: Start, data_plane: str) -> None:
    prefill = start("P", "PREFILL", registry="embedded", data_plane=data_plane)
    decode = start("D", "DECODE", data_plane=data_plane)
    prefill.opened(), decode.opened()
    prefill.call("fill", 7)
    for room, (count, chunk) in enumerate([(1, 0), (8, 3), (100, 0), (256, 64), (0, 0)], 1):
        source, destination = random_pages(room, count), random_pages(room + 100, count)
        decode.call("receive", room, prefill.address, destination, aux_row=room, wait_first=True)
        prefill.call("send", room, source, aux_row=room + 10, chunk=chunk)
        decode.call("wait", "receivers", [room], [SUCCESS])
        prefill.call("wait", "senders", [room], [SUCCESS])
        assert decode.call("page_sums", destination) == prefill.call("page_sums", source)
        assert decode.call("aux_row", room) == prefill.call("aux_row", room + 10)
        assert decode.call("state", "receivers", room)[2]


def test_either_side_may_come_first(pair: tuple[RankProcess, RankProcess]) -> None:
    prefill, decode = pair
    prefill.call("send", 1, [1, 2, 3])
    prefill.call("wait", "senders", [1], [WAITING])
    decode.call("receive", 1, prefill.address, [4, 5, 6])
    decode.call("wait", "receivers", [1], [SUCCESS])


def test_1000_rooms_in_flight_end_right_and_leave_nothing(start: Start, data_plane: str) -> None:
    prefill, decode = opened_pair(start, data_plane, **SHARE_PAGES)
    rooms = list(range(1, 1001))
    decode.call("receive_many", rooms, prefill.address, 2)
    prefill.call("send_many", rooms, 2)
    decode.call("wait", "receivers", rooms, [SUCCESS], 20.0)
    prefill.call("wait", "senders", rooms, [SUCCESS])
    everything = list(range(PAGES - 2))
    assert decode.call("page_sums", everything) == prefill.call("page_sums", everything)
    wait_until(lambda: decode.call("rooms_open") == 0 and prefill.call("rooms_open") == 0)


def test_a_page_that_another_room_has_is_given_to_no_second_one(start: Start) -> None:
    prefill, decode = opened_pair(start, "shm")
    decode.call("receive", 1, prefill.address, [3, 4])
    decode.call("receive", 2, prefill.address, [5, 4])
    decode.call("wait", "receivers", [2], [FAILED])
    reason, message, metadata = decode.call("failure_of", "receivers", 2)
    assert reason == "PAGES_IN_USE" and metadata["page"] == "4" and metadata["owner"] == "room 1 attempt 0"
    assert "page 4 of pool 'kv', given to room 2" in message and "release_safe" in message
    prefill.call("send", 2, [8, 9])
    assert prefill.call("wait", "senders", [2], [FAILED])[2][1] == "PAGES_IN_USE"
    prefill.call("send", 1, [8, 9])
    decode.call("wait", "receivers", [1], [SUCCESS])
    assert decode.call("page_sums", [3, 4]) == prefill.call("page_sums", [8, 9])
    decode.call("receive", 3, prefill.address, [4])
    prefill.call("send", 3, [8])
    decode.call("wait", "receivers", [3], [SUCCESS])


def sleep(process: RankProcess, decode: RankProcess) -> None:
    ref = process.call("reopen")
    assert ref != process.ref
    if process is not decode:  # decode meets it by itself
        wait_until(lambda: decode.call("peers").get(ref) == "OPEN")


@NEEDS_MOONCAKE
@pytest.mark.parametrize("sleeper", ["prefill", "decode"])
def test_a_side_that_slept_and_came_back_on_its_own_memory_is_used_again(start: Start, sleeper: str) -> None:
    """Suspend is close, resume is open_rank: another incarnation of the same rank, and the other side goes on."""
    prefill = start("P", "PREFILL", registry="embedded", data_plane="mooncake", own_memory=True)
    decode = start("D", "DECODE", data_plane="mooncake", own_memory=True)
    prefill.opened(), decode.opened()
    prefill.call("fill", 3)
    for room in (1, 2):
        decode.call("receive", room, prefill.address, [room])
        prefill.call("send", room, [room + 5])
        decode.call("wait", "receivers", [room], [SUCCESS])
        prefill.call("wait", "senders", [room], [SUCCESS])
        assert decode.call("page_sums", [room]) == prefill.call("page_sums", [room + 5])
        if room == 1:
            sleep(prefill if sleeper == "prefill" else decode, decode)


# An engine whose own balancer chooses the dp rank.


def balanced(start: Start) -> tuple[RankProcess, RankProcess, RankProcess]:
    """Two dp ranks of one prefill engine that do not go by room % 2, and a decode."""
    both = {"layout": Layout(dp=2), "engine_selects_dp": True, **SHARE_PAGES}
    first = start("P", "PREFILL", registry="embedded", **both).opened()
    second = start("P", "PREFILL", registry=first.address, dp=1, **both).opened()
    return first, second, start("D", "DECODE", **SHARE_PAGES).opened()


def test_decode_finds_the_dp_rank_that_an_engines_own_balancer_chose(start: Start) -> None:
    first, second, decode = balanced(start)
    first.call("fill", 1), second.call("fill", 2)
    for room, prefill in [(1, first), (2, second), (3, second), (4, first)]:
        decode.call("receive", room, first.address, None)
        assert decode.call("state", "receivers", room)[0] == BOOTSTRAPPING
        prefill.call("send", room, [room + 10])
        decode.call("wait", "receivers", [room], [WAITING])
        decode.call("give_pages", room, [room])
        decode.call("wait", "receivers", [room], [SUCCESS])
        assert decode.call("page_sums", [room]) == prefill.call("page_sums", [room + 10])
    # A sender that was there first is found at once, and the router's own choice is not asked about.
    second.call("send", 5, [5])
    decode.call("receive", 5, first.address, [5])
    first.call("send", 6, [6])
    decode.call("receive", 6, first.address, [6], prefill_dp_rank=0)
    decode.call("wait", "receivers", [5, 6], [SUCCESS])
    rooms = list(range(100, 1100))
    decode.call("receive_many", rooms, first.address, 1)
    first.call("send_many", rooms[:300], 1), second.call("send_many", rooms[300:], 1)
    decode.call("wait", "receivers", rooms, [SUCCESS])


def test_a_room_that_no_rank_has_yet_waits_until_the_killed_rank_is_back_and_has_it(start: Start) -> None:
    first, second, decode = balanced(start)
    decode.call("receive", 1, first.address, [1])
    second.kill()
    third = start("P", "PREFILL", registry=first.address, dp=1, layout=Layout(dp=2), engine_selects_dp=True).opened()
    third.call("send", 1, [7])
    decode.call("wait", "receivers", [1], [SUCCESS])
    assert decode.call("page_sums", [1]) == third.call("page_sums", [7])


def test_a_room_whose_dp_rank_stays_dead_fails_once_the_registry_says_that_it_is_gone(start: Start) -> None:
    both = {"layout": Layout(dp=2), "engine_selects_dp": True, "lease_ttl": 1.0}
    first = start("P", "PREFILL", registry="embedded", **both).opened()
    second = start("P", "PREFILL", registry=first.address, dp=1, **both).opened()
    decode = start("D", "DECODE", resolve_timeout=1.0).opened()
    decode.call("receive", 1, first.address, [1])
    second.kill()
    assert decode.call("wait", "receivers", [1], [FAILED])[1][1] == "ENGINE_NOT_FOUND"


def test_a_room_that_was_given_up_while_it_was_looked_for_is_told_to_its_sender(start: Start) -> None:
    first, second, decode = balanced(start)
    decode.call("receive", 1, first.address, None)
    decode.call("abort", "receivers", 1)
    second.call("send", 1, [1])
    assert second.call("wait", "senders", [1], [FAILED])[1][1] == "ROOM_CANCELLED"


# Refusals.


def test_a_wrong_layout_is_refused_with_the_differing_fields(start: Start) -> None:
    prefill = start("P", "PREFILL", registry="embedded", pool={"page_tokens": 32, "dtype": "bfloat16"})
    decode = start("D", "DECODE")
    prefill.opened(), decode.opened()
    room = 2**61 + 1  # as routers draw them: a small number that anybody guesses is not failed by a stranger
    prefill.call("send", room, [1])
    decode.call("receive", room, prefill.address, [1])
    decode.call("wait", "receivers", [room], [FAILED])
    reason, text, metadata = decode.call("failure_of", "receivers", room)
    assert reason == "PARALLEL_LAYOUT_MISMATCH"
    assert metadata["mismatchedFields"] == "pools[0].page_tokens,pools[0].dtype"
    assert metadata["pools[0].page_tokens"] == "32 != 16" and "bfloat16" in text
    assert decode.call("state", "receivers", room)[2]
    prefill.call("wait", "senders", [room], [FAILED])
    assert prefill.call("failure_of", "senders", room)[2]["mismatchedFields"] == metadata["mismatchedFields"]


def test_a_page_outside_the_pool_fails_that_room_alone(pair: tuple[RankProcess, RankProcess]) -> None:
    prefill, decode = pair
    decode.call("receive", 1, prefill.address, [1, PAGES])
    decode.call("receive", 2, prefill.address, [1, 2])
    prefill.call("send", 2, [3, 4])
    prefill.call("send", 3, [PAGES + 7])
    decode.call("wait", "receivers", [1, 2], [FAILED, SUCCESS])
    assert decode.call("state", "receivers", 1)[:2] == (FAILED, "KV_INDEX_OUT_OF_RANGE")
    assert decode.call("failure_of", "receivers", 1)[2] == {
        "pool": "kv",
        "page": str(PAGES),
        "pages": str(PAGES),
        "position": "1",
    }
    assert decode.call("state", "receivers", 2)[0] == SUCCESS
    prefill.call("wait", "senders", [3], [FAILED])
    assert prefill.call("state", "senders", 3)[1] == "KV_INDEX_OUT_OF_RANGE"


def test_a_duplicate_room_fails_only_the_newcomer(pair: tuple[RankProcess, RankProcess], start: Start) -> None:
    prefill, decode = pair
    other = start("D2", "DECODE", data_plane=prefill.call("data_plane")).opened()
    decode.call("receive", 1, prefill.address, [1])
    prefill_sees(prefill, 1)
    other.call("receive", 1, prefill.address, [1])
    other.call("wait", "receivers", [1], [FAILED])
    assert other.call("state", "receivers", 1)[1] == "ROOM_CONFLICT"
    prefill.call("send", 1, [5])
    decode.call("wait", "receivers", [1], [SUCCESS])


def test_room_0_is_refused_with_a_reason(pair: tuple[RankProcess, RankProcess]) -> None:
    _, decode = pair
    decode.call("receive", 0, "127.0.0.1:1", [1])
    assert decode.call("state", "receivers", 0) == (FAILED, "INVALID_REQUEST", True)


def test_a_registry_that_may_not_be_dialled_names_the_setting(pair: tuple[RankProcess, RankProcess]) -> None:
    _, decode = pair
    decode.call("receive", 1, "10.1.2.3:8998", [1])
    decode.call("wait", "receivers", [1], [FAILED])
    assert decode.call("state", "receivers", 1)[1] == "ADDRESS_NOT_ALLOWED"
    assert decode.call("failure_of", "receivers", 1)[2]["configKey"] == "bootstrap_allow"


# Cancels.


@pytest.mark.parametrize("side", ["receivers", "senders"])
def test_a_cancel_at_any_state_ends_both_sides_and_gives_the_pages_back(start: Start, side: str) -> None:
    prefill = start("P", "PREFILL", registry="embedded", slow_seconds={0: 10.0})
    decode = start("D", "DECODE")
    prefill.opened(), decode.opened()
    canceller = decode if side == "receivers" else prefill

    def both_end(room: int, poll: int) -> None:
        decode.call("wait", "receivers", [room], [poll])
        prefill.call("wait", "senders", [room], [poll])
        decode.call("wait_release", [room])

    # Decode waits for pages to be given, prefill has computed.
    prefill.call("send", 1, [1, 2])
    decode.call("receive", 1, prefill.address, None, wait_first=True)
    canceller.call("abort", side, 1)
    if side == "senders":  # decode has not named the room yet: it is told once it does
        decode.call("give_pages", 1, [3, 4])
    both_end(1, FAILED)
    # Both wait: decode gave pages, prefill computes.
    prefill.call("send", 2, [], last=False)
    decode.call("receive", 2, prefill.address, [3, 4])
    prefill.call("wait", "senders", [2], [WAITING])
    canceller.call("abort", side, 2)
    both_end(2, FAILED)
    # Pages move: this is the first submission.
    prefill.call("send", 3, [1, 2])
    decode.call("receive", 3, prefill.address, [3, 4])
    decode.call("wait", "receivers", [3], [TRANSFERRING])
    canceller.call("abort", side, 3)
    both_end(3, FAILED)
    # All is over.
    prefill.call("send", 4, [1, 2])
    decode.call("receive", 4, prefill.address, [3, 4])
    both_end(4, SUCCESS)
    canceller.call("abort", side, 4)
    both_end(4, SUCCESS)
    # Only decode is there, then prefill comes late.
    if side == "receivers":
        decode.call("receive", 5, prefill.address, [3, 4])
        prefill_sees(prefill, 1)
        decode.call("abort", side, 5)
        decode.call("wait_release", [5])
        prefill.call("send", 5, [1, 2])
        prefill.call("wait", "senders", [5], [FAILED])
        assert prefill.call("state", "senders", 5)[1] == "ROOM_CANCELLED"
    wait_until(lambda: decode.call("rooms_open") == 0)


def test_close_with_open_rooms_ends_them_and_reports(pair: tuple[RankProcess, RankProcess]) -> None:
    prefill, decode = pair
    decode.call("receive", 1, prefill.address, [1])
    prefill_sees(prefill, 1)
    drained, open_rooms, _ = prefill.call("close", 1.0)
    assert drained and open_rooms == 0
    decode.call("wait", "receivers", [1], [FAILED])
    assert decode.call("state", "receivers", 1)[1] in ("SERVER_DRAINING", "PEER_LOST")
