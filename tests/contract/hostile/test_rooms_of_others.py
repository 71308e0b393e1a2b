"""A scope protects rooms too: no rank is told those of others, and none that learned a number gets or ends the room."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import pytest

from kvgrpc.client import SyncClient
from kvgrpc.errors import Reason, RoomNotFound
from kvgrpc.model import Layout
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.transfer import KVPoll, KVSender
from kvgrpc.transfer.protocol.types import HARDLY_GUESSED
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.v1.transfer_service_pb2_grpc import TransferServiceStub
from kvgrpc.wire import failure_from_pb, layout_to_pb
from tests.support.hostile.honest_pair import ROOMS, TIMING
from tests.support.rank_host import RankHost
from tests.support.secrets import bearer, proof, secret, tokens_of
from tests.support.transfer_peers import FAILED, DecodeClient, Memory, closed_in_the_end, named, sender_of
from tests.support.waiting import wait_until

TOKENS = """
rank honest-p role=prefill:prefill
rank decode-7 role=decode:seven
rank decode-evil role=decode:evil
rank:any
operator boss:boss
"""
Dial = Callable[..., DecodeClient]


@pytest.fixture(scope="module")
def guarded() -> Iterator[RankHost]:
    security = {"server_security": ServerSecurity(tokens=tokens_of(TOKENS)), "client_security": proof("prefill")}
    host = RankHost("honest-p", "PREFILL", {"timing": TIMING, **security})
    yield host
    host.close(1.0)


@pytest.fixture
def dial_as(guarded: RankHost, memory: Memory) -> Iterator[Dial]:
    def make(name: str, engine: str) -> DecodeClient:
        client = DecodeClient(guarded, memory, engine)
        client.secret = secret(name)
        return client

    with closed_in_the_end(make) as making:
        yield making


def seen_by(name: str, guarded: RankHost) -> set[int]:
    with SyncClient(guarded.rank.address, proof(name)) as client:
        return {row.room for row in client.list_rooms()}


def test_a_rank_is_told_its_own_rooms_alone(guarded: RankHost, dial_as: Dial) -> None:
    mine, unowned = next(ROOMS), next(ROOMS)
    dial_as("seven", "decode-7").open().write(mine, [1])
    waiting = sender_of(guarded, unowned)
    named(guarded, mine)
    named(guarded, unowned)
    for name, expected in (
        ("evil", set[int]()),
        ("seven", {mine}),
        *((each, {mine, unowned}) for each in ("boss", "any", "prefill")),
    ):
        assert seen_by(name, guarded) & {mine, unowned} == expected, name
    with SyncClient(guarded.rank.address, proof("evil")) as evil, pytest.raises(RoomNotFound) as refused:
        evil.get_room(mine)
    with SyncClient(guarded.rank.address, proof("evil")) as evil, pytest.raises(RoomNotFound) as unknown:
        evil.get_room(next(ROOMS))
    assert set(refused.value.metadata) == set(unknown.value.metadata)
    with SyncClient(guarded.rank.address, proof("seven")) as seven:
        assert seven.get_room(mine).room == mine
    waiting.abort()


def failed_seen_by(name: str, guarded: RankHost) -> set[int]:
    address = guarded.rank.address
    with grpc.insecure_channel(address) as channel:
        request = pb.ListRoomsRequest(newest_failed=True)
        metadata = (("authorization", bearer(name, address)),)
        answer = TransferServiceStub(channel).ListRooms(request, timeout=10.0, metadata=metadata)
    return {row.room for row in answer.rooms}


def test_a_rank_is_told_its_own_failed_rooms_alone(guarded: RankHost, dial_as: Dial) -> None:
    mine, unowned = next(ROOMS), next(ROOMS)
    dial_as("seven", "decode-7").open().write(mine, [1])
    named(guarded, mine)
    for room in (mine, unowned):
        sender_of(guarded, room).abort()
    wait_until(lambda: failed_seen_by("boss", guarded) >= {mine, unowned})
    for name, expected in (("evil", set[int]()), ("seven", {mine}), ("any", {mine, unowned})):
        assert failed_seen_by(name, guarded) & {mine, unowned} == expected, name


@pytest.mark.parametrize("first", ["thief", "sender"])
def test_who_says_write_first_gets_no_page_of_a_room_whose_sender_names_another(
    guarded: RankHost, dial_as: Dial, memory: Memory, first: str
) -> None:
    room = next(ROOMS)
    thief = dial_as("evil", "decode-evil").open()
    if first == "thief":
        thief.write(room, [3])
        named(guarded, room)
    sender = KVSender(guarded.rank.transfer, "", room, decode="decode-7")
    if first == "sender":
        named(guarded, room)
        thief.write(room, [3])
    sender.init(1, 0)
    sender.send([1], is_last=True)
    refused = thief.room(room, lambda entry: entry.state == FAILED)
    failure = failure_from_pb(refused.failure)
    assert failure.reason is Reason.ROOM_CONFLICT and "decode-7" not in str(failure)
    honest = dial_as("seven", "decode-7").open().write(room, [4])
    assert honest.ended(room).state == pb.ROOM_STATE_SUCCESS
    wait_until(lambda: sender.poll() is KVPoll.Success)


def mismatching(client: DecodeClient, *rooms: int) -> Reason:
    return client.refused(
        layout=layout_to_pb(Layout(cp=3)), waiting_rooms=[pb.RoomKey(room=room) for room in rooms]
    ).reason


def test_a_hello_that_does_not_fit_ends_no_room_that_it_may_have_guessed_or_that_is_anothers(
    guarded: RankHost, dial_as: Dial
) -> None:
    guessed, bound, own = next(ROOMS), HARDLY_GUESSED + next(ROOMS), HARDLY_GUESSED + next(ROOMS)
    handles = [
        KVSender(guarded.rank.transfer, "", guessed),
        KVSender(guarded.rank.transfer, "", bound, decode="decode-7"),
        KVSender(guarded.rank.transfer, "", own, decode="decode-evil"),
    ]
    for room in (guessed, bound, own):
        named(guarded, room)
    assert mismatching(dial_as("evil", "decode-evil"), guessed, bound, own) is Reason.PARALLEL_LAYOUT_MISMATCH
    wait_until(lambda: handles[2].poll() is KVPoll.Failed)
    assert handles[2].failure is not None and handles[2].failure.reason is Reason.PARALLEL_LAYOUT_MISMATCH
    assert [handle.failure for handle in handles[:2]] == [None, None]
    for handle in handles[:2]:
        handle.abort()


@pytest.mark.parametrize("name", ["two words", "x" * 129, 7])
def test_a_name_that_is_none_fails_that_room(guarded: RankHost, name: object) -> None:
    sender = KVSender(guarded.rank.transfer, "", next(ROOMS), decode=name)  # type: ignore[arg-type]
    wait_until(lambda: sender.poll() is KVPoll.Failed)
    assert sender.failure is not None and sender.failure.metadata["field"] == "decode"
