"""LocateRooms against real ranks: which rooms have a sender here, and how long a call waits for one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest

from kvgrpc.errors import KvGrpcError, Reason
from kvgrpc.model import Layout
from kvgrpc.rpc.status import error_from
from kvgrpc.transfer import KVPoll
from kvgrpc.transfer.runtime.room_locator import ROOMS_TOGETHER
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.v1.transfer_service_pb2_grpc import TransferServiceStub
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import receiver_of, sender_of
from tests.support.waiting import wait_until

ROOMS = iter(range(20_000_000, 30_000_000))
LONG = 20.0


def ask(stub: TransferServiceStub, *rooms: int, timeout: float = LONG, attempt: int = 0) -> list[int]:
    request = pb.LocateRoomsRequest(rooms=[pb.RoomKey(room=room, attempt=attempt) for room in rooms])
    return [key.room for key in stub.LocateRooms(request, timeout=timeout).rooms]


def answer_in_time(stub: TransferServiceStub, room: int, timeout: float, attempt: int = 0) -> list[int]:
    """It comes 250 ms before the deadline, too late on a busy machine: then it is asked for again."""
    for _ in range(7):
        try:
            return ask(stub, room, timeout=timeout, attempt=attempt)
        except grpc.RpcError as error:
            if error_from(error).code != "DEADLINE_EXCEEDED":
                raise
    return ask(stub, room, timeout=timeout, attempt=attempt)


def rooms_sought(host: RankHost) -> int:
    """By calls that wait there for a sender."""
    return int(cast(Any, host.rank.transfer)._sought.count)


def refusal(stub: TransferServiceStub, *rooms: int) -> KvGrpcError:
    with pytest.raises(grpc.RpcError) as caught:
        ask(stub, *rooms)
    return error_from(caught.value)


@pytest.fixture
def stub(prefill: RankHost, stub_of: Any) -> TransferServiceStub:
    made: TransferServiceStub = stub_of(prefill)
    return made


@pytest.fixture(scope="module")
def balanced() -> Iterator[tuple[RankHost, RankHost]]:
    """An engine of two dp ranks whose balancer has a mind of its own."""
    both = {"layout": Layout(dp=2), "engine_selects_dp": True}
    first = RankHost("B", "PREFILL", {"registry": "embedded", **both})
    second = RankHost("B", "PREFILL", {"registry": first.rank.address, "dp": 1, **both})
    yield first, second
    second.close(1.0)
    first.close(1.0)


class TestAnswers:
    def test_only_rooms_with_a_sender_of_that_attempt_are_named(
        self, prefill: RankHost, stub: TransferServiceStub
    ) -> None:
        here, absent = next(ROOMS), next(ROOMS)
        sender = sender_of(prefill, here)
        assert ask(stub, absent, here) == [here]
        assert answer_in_time(stub, here, 0.5, attempt=1) == []
        sender.abort()

    def test_a_call_waits_for_the_first_sender(self, prefill: RankHost, stub: TransferServiceStub) -> None:
        first, second = next(ROOMS), next(ROOMS)
        found: list[int] = []
        asking = threading.Thread(target=lambda: found.extend(ask(stub, first, second)))
        asking.start()
        wait_until(lambda: rooms_sought(prefill) == 2, LONG)
        sender = sender_of(prefill, second)
        asking.join(LONG)
        assert found == [second]
        sender.abort()

    def test_shortly_before_the_deadline_the_answer_is_empty(self, stub: TransferServiceStub) -> None:
        assert answer_in_time(stub, next(ROOMS), 0.4) == []


class TestRefusals:
    def test_a_decode_rank_has_no_senders(self, decode: RankHost, stub_of: Any) -> None:
        error = refusal(stub_of(decode), 1)
        assert error.reason is Reason.WRONG_RANK
        assert error.metadata["expected"] == "PREFILL" and error.metadata["actual"] == "DECODE"

    @pytest.mark.parametrize(("rooms", "field"), [((), "rooms"), ((1,) * 4097, "rooms"), ((5, 0), "rooms[1].room")])
    def test_nonsense_is_named(self, stub: TransferServiceStub, rooms: tuple[int, ...], field: str) -> None:
        error = refusal(stub, *rooms)
        assert error.reason is Reason.INVALID_REQUEST
        assert error.metadata["field"] == field

    def test_more_rooms_than_a_rank_can_watch_for_are_refused(
        self, prefill: RankHost, stub: TransferServiceStub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        manager: Any = prefill.rank.transfer
        monkeypatch.setattr(manager._sought._shares, "_limit", 1)
        error = refusal(stub, next(ROOMS), next(ROOMS))
        assert error.reason is Reason.TOO_MANY_REQUESTS
        assert error.metadata["scope"] == "rooms sought" and error.metadata["limit"] == "1"


class TestSearch:
    """Decode's side."""

    def test_more_rooms_than_one_call_may_name_are_all_found(
        self, balanced: tuple[RankHost, RankHost], decode: RankHost
    ) -> None:
        rooms = [next(ROOMS) for _ in range(ROOMS_TOGETHER + 500)]
        bootstrap = f"{balanced[0].rank.address}/B"
        receivers = [receiver_of(decode, bootstrap, room) for room in rooms]
        senders = [sender_of(balanced[room // 2 % 2], room) for room in rooms]
        wait_until(lambda: all(receiver.poll() is KVPoll.WaitingForInput for receiver in receivers), LONG)
        for each in (*receivers, *senders):
            each.abort()

    def test_a_room_that_is_given_up_leaves_the_others_to_be_found(
        self, balanced: tuple[RankHost, RankHost], decode: RankHost
    ) -> None:
        given_up, wanted = (receiver_of(decode, f"{balanced[0].rank.address}/B", next(ROOMS)) for _ in range(2))
        given_up.abort()
        sender = sender_of(balanced[1], wanted.room)
        wait_until(lambda: wanted.poll() is KVPoll.WaitingForInput, LONG)
        assert given_up.poll() is KVPoll.Failed and given_up.release_safe
        wanted.abort()
        sender.abort()

    def test_a_rank_that_the_engine_does_not_have_is_named(
        self, balanced: tuple[RankHost, RankHost], decode: RankHost
    ) -> None:
        lost = receiver_of(decode, f"{balanced[0].rank.address}/B", next(ROOMS), prefill_dp_rank=2)
        wait_until(lambda: lost.poll() is KVPoll.Failed)
        assert lost.failure.reason is Reason.PARALLEL_LAYOUT_MISMATCH
        assert lost.failure.metadata["prefill_dp_rank"] == "below 2 != 2"


class TestDrain:
    @pytest.fixture
    def leaving(self) -> Iterator[RankHost]:
        host = RankHost("L", "PREFILL", {})
        yield host
        host.close(1.0)

    def test_a_waiting_call_ends_and_a_room_that_is_here_is_still_found(self, leaving: RankHost, stub_of: Any) -> None:
        here, absent = next(ROOMS), next(ROOMS)
        sender = sender_of(leaving, here)
        stub = stub_of(leaving)
        assert ask(stub, here) == [here]
        errors: list[KvGrpcError] = []
        waiting = threading.Thread(target=lambda: errors.append(refusal(stub, absent)))
        waiting.start()
        wait_until(lambda: rooms_sought(leaving) == 1, LONG)
        closing = threading.Thread(target=leaving.close, args=(8.0,))
        closing.start()
        waiting.join(LONG)
        assert errors[0].reason is Reason.SERVER_DRAINING
        assert ask(stub, absent, here) == [here]
        assert sender.failure is None
        closing.join(LONG)
