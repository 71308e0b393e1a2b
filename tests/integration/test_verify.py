"""``verify``: a page that changed on its way is noticed before Success, over both data planes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.support.rank_host import PAGES, RankHost

FAILED, SUCCESS = 0, 4
NEEDS_MOONCAKE = pytest.mark.skipif(not find_spec("mooncake"), reason="install kvgrpc[mooncake-cpu] for it")
Open = Callable[..., RankHost]


@pytest.fixture
def start() -> Iterator[Open]:
    opened: list[RankHost] = []

    def open_one(engine: str, role: str, **settings: Any) -> RankHost:
        opened.append(RankHost(engine, role, {"check_pages": True, **settings}))
        return opened[-1]

    yield open_one
    for host in reversed(opened):
        host.close(2.0)


def hand_off(prefill: RankHost, decode: RankHost, room: int, chunk: int = 0) -> int:
    """Pages 3 to 10 of prefill become 20 to 27 of decode; how decode's end went."""
    decode.receive(room, prefill.rank.address, range(20, 28))
    prefill.send(room, range(3, 11), chunk=chunk)
    assert prefill.wait("senders", [room], [SUCCESS, FAILED])[room][0] == SUCCESS
    return int(decode.wait("receivers", [room], [SUCCESS, FAILED])[room][0])


@pytest.mark.parametrize("data_plane", ["shm", pytest.param("mooncake", marks=NEEDS_MOONCAKE)])
def test_a_bit_that_flips_in_flight_fails_its_room_and_no_other(start: Open, data_plane: str) -> None:
    prefill = start("P", "PREFILL", registry="embedded", data_plane=data_plane, verify=True, corrupts=(1, 3))
    decode = start("D", "DECODE", data_plane=data_plane, verify=True)
    prefill.fill(1)
    assert hand_off(prefill, decode, 1) == SUCCESS
    assert decode.page_sums(range(20, 28)) == prefill.page_sums(range(3, 11))

    assert hand_off(prefill, decode, 2) == FAILED
    reason, message, metadata = decode.failure_of("receivers", 2) or ("", "", {})
    assert reason == "CHECKSUM_MISMATCH" and "page 20 of pool 'kv' at position 0" in message
    assert metadata.keys() == {"peer", "pool", "page", "position", "expected", "actual"}
    assert (metadata["peer"], metadata["page"]) == (str(prefill.rank.ref), "20")
    assert metadata["expected"] != metadata["actual"]
    decode.wait_release([2])

    assert hand_off(prefill, decode, 3, chunk=4) == FAILED, "the fourth write is the second chunk"
    assert (decode.failure_of("receivers", 3) or ("", "", {}))[2]["position"] == "4"
    assert hand_off(prefill, decode, 4) == SUCCESS


@pytest.mark.parametrize(("prefill_verifies", "decode_verifies"), [(False, False), (True, False), (False, True)])
def test_where_not_both_sides_want_it_nothing_is_compared(
    start: Open, prefill_verifies: bool, decode_verifies: bool, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = start("P", "PREFILL", registry="embedded", verify=prefill_verifies, corrupts=(0,))
    decode = start("D", "DECODE", verify=decode_verifies)
    prefill.fill(1)
    assert hand_off(prefill, decode, 1) == SUCCESS
    assert decode.page_sums(range(20, 28)) != prefill.page_sums(range(3, 11))
    said = [record for record in caplog.records if "does not verify" in record.message]
    assert len(said) == (1 if decode_verifies else 0)


def test_rooms_without_pages_and_with_a_prefix_are_compared_as_they_are(start: Open) -> None:
    prefill = start("P", "PREFILL", registry="embedded", verify=True)
    decode = start("D", "DECODE", verify=True)
    prefill.fill(1)
    decode.receive(1, prefill.rank.address, [])
    prefill.send(1, [])
    decode.wait("receivers", [1], [SUCCESS])
    from kvgrpc.transfer import KVReceiver

    receiver = decode.receivers[2, 0] = KVReceiver(decode.rank.transfer, prefill.rank.address, 2)
    receiver.init([9, 8, 7], 0, first_page=2)
    prefill.send(2, range(5), chunk=2)
    decode.wait("receivers", [2], [SUCCESS])
    assert decode.page_sums([9, 8, 7]) == prefill.page_sums([2, 3, 4])


def test_a_receiver_that_is_given_up_while_pages_are_compared_ends_once(start: Open) -> None:
    prefill = start("P", "PREFILL", registry="embedded", verify=True)
    decode = start("D", "DECODE", verify=True)
    rooms = range(1, 60)
    for room in rooms:
        decode.receive(room, prefill.rank.address, range(PAGES // 4))
        prefill.send(room, range(PAGES // 4))
        if room % 2:
            decode.wait("receivers", [room], [3, SUCCESS, FAILED])
            decode.abort("receivers", room)
        else:
            decode.wait("receivers", [room], [SUCCESS])
        decode.wait_release([room])
    ends = decode.wait("receivers", rooms, [SUCCESS, FAILED])
    assert {reason for _, reason, _ in ends.values()} <= {"", "ROOM_CANCELLED"}
    decode.wait_release(rooms)
