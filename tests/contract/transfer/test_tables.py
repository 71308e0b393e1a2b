"""The tables of real ranks: sessions, rooms, topology, and cancelling a room."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest

from kvgrpc.errors import KvGrpcError, Reason
from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.paging import numbers_token, page_token
from kvgrpc.rpc import turns
from kvgrpc.rpc.status import error_from
from kvgrpc.transfer import KVPoll
from kvgrpc.transfer.protocol.types import RoomKey
from kvgrpc.transfer.runtime import room_tables
from kvgrpc.transfer.servicer import TransferServicer
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.wire import layout_to_pb, rank_ref_to_pb
from tests.support.rank_host import AUX_BYTES, LAYERS, PAGES, RankHost
from tests.support.transfer_peers import (
    BOOTSTRAPPING,
    FAILED,
    OPEN,
    SECONDS,
    SETTLED,
    STOP,
    SUCCESS,
    DecodeClient,
    Memory,
    PrefillServer,
    core_of,
    named,
    receiver_of,
    said,
    sender_of,
)
from tests.support.waiting import wait_until

ROOMS = iter(range(1_000, 10_000_000))
Dial = Callable[..., DecodeClient]


def all_are_gone(host: RankHost, rooms: Sequence[int]) -> None:
    wait_until(lambda: not core_of(host).rooms.keys() & set(map(RoomKey, rooms)))


def keeps_the_last(stub: Any, rooms: Sequence[int]) -> Callable[[], bool]:
    """True once of 300 cancelled rooms the first 44 are listed no more, and the last 50 are: 256 are kept in all. Rooms
    of earlier tests that failed for other reasons are among them, and a reason loses none while another has more."""

    def kept() -> bool:
        failed = stub.ListRooms(pb.ListRoomsRequest(states=[FAILED], page_size=1000), timeout=5).rooms
        listed = {each.room for each in failed}
        return listed.issuperset(rooms[-50:]) and listed.isdisjoint(rooms[:44])

    return kept


def refusal(call: Callable[..., Any], request: Any) -> KvGrpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=5)
    return error_from(caught.value)


def hand_off(prefill: RankHost, decode: RankHost, pages: Sequence[int], after: float = 0.0) -> int:
    """One that goes well, its pages sent ``after`` seconds; its room."""
    room = next(ROOMS)
    receiver = receiver_of(decode, f"{prefill.rank.address}/P", room)
    receiver.init(list(pages), 0)
    sender = sender_of(prefill, room)
    sender.init(len(pages), 0)
    time.sleep(after)  # how long prefill computes
    sender.send(list(pages), is_last=True)
    wait_until(lambda: (receiver.poll(), sender.poll()) == (KVPoll.Success, KVPoll.Success))
    return room


class TestTables:
    def test_topology_says_the_shapes_without_addresses(
        self, prefill: RankHost, decode: RankHost, stub_of: Any
    ) -> None:
        for host, role in ((prefill, common_pb2.ROLE_PREFILL), (decode, common_pb2.ROLE_DECODE)):
            topology = stub_of(host).GetRank(pb.GetRankRequest(), timeout=5)
            assert topology.rank == rank_ref_to_pb(host.rank.ref)
            assert (topology.role, topology.data_plane) == (role, "shm")
            assert topology.layout == layout_to_pb(Layout())
            assert [region.address for region in topology.pools[0].regions] == [0] * LAYERS
            assert topology.pools[0].pages == PAGES
            assert list(topology.aux_item_bytes) == [AUX_BYTES]
            assert topology.pages_held_limit == PAGES // 4

    def test_sessions_of_both_sides(self, prefill: RankHost, decode: RankHost, stub_of: Any) -> None:
        room = next(ROOMS)
        receiver = receiver_of(decode, f"{prefill.rank.address}/P", room)
        wait_until(lambda: receiver.poll() is KVPoll.WaitingForInput)
        receiver.init([1], 0)
        (session,) = stub_of(decode).ListSessions(pb.ListSessionsRequest(), timeout=5).sessions
        assert session.peer == rank_ref_to_pb(prefill.rank.ref)
        assert (session.address, session.state, session.rooms) == (prefill.rank.address, pb.SESSION_STATE_OPEN, 1)
        named(prefill, room)
        sessions = stub_of(prefill).ListSessions(pb.ListSessionsRequest(page_size=1000), timeout=5).sessions
        (ours,) = [each for each in sessions if each.peer == rank_ref_to_pb(decode.rank.ref)]
        assert (ours.state, ours.rooms > 0) == (pb.SESSION_STATE_OPEN, True)
        assert ours.address.startswith("127.0.0.1:"), "from where decode calls"
        assert ours.idle_time.ToMilliseconds() < 3000
        assert ours.stream == session.stream
        receiver.abort()

    def test_sessions_are_paged_by_peer(self, prefill: RankHost, dial: Dial, stub_of: Any) -> None:
        clients = [dial(prefill, engine=f"Page{number}").open() for number in (3, 1, 2)]
        names, token = [], ""
        while True:
            request = pb.ListSessionsRequest(page_size=2, page_token=token)
            response = stub_of(prefill).ListSessions(request, timeout=5)
            assert len(response.sessions) <= 2
            names += [each.peer.rank.engine for each in response.sessions]
            token = response.next_page_token
            if not token:
                break
        assert [name for name in names if name.startswith("Page")] == ["Page1", "Page2", "Page3"]
        assert len(names) == len(set(names))
        assert len(clients) == 3

    def test_rooms_are_paged_filtered_and_counted(self, prefill: RankHost, dial: Dial, stub_of: Any) -> None:
        client, stub = dial(prefill).open(), stub_of(prefill)
        first = 2**62  # after all others
        for room in range(first, first + 7):
            client.write(room, [1])
        client.want(first + 3, STOP)
        client.ended(first + 3)

        def behind_the_others(states: Sequence[int] = (), held_only: bool = False) -> str:
            return numbers_token(f"ListRooms {sorted(set(states))} {held_only}", (first - 1, 0))

        def listed(token: str | None = None, page_size: int = 0, **filters: Any) -> Any:
            token = behind_the_others(**filters) if token is None else token
            request = pb.ListRoomsRequest(page_token=token, page_size=page_size, **filters)
            return stub.ListRooms(request, timeout=5)

        found, token = [], behind_the_others()
        while token:
            response = listed(token, page_size=3)
            found += [each.room for each in response.rooms]
            token = response.next_page_token
        assert found == list(range(first, first + 7))
        assert response.total == listed("", page_size=1000).total >= len(core_of(prefill).rooms)
        assert [each.room for each in listed(states=[FAILED]).rooms] == [first + 3]
        assert len(listed(states=[BOOTSTRAPPING]).rooms) == 6
        assert len(listed(states=[BOOTSTRAPPING, FAILED, FAILED]).rooms) == 7
        assert not listed(held_only=True).rooms
        last = listed(page_size=7)
        assert (len(last.rooms), last.next_page_token) == (7, "")
        elsewhere = pb.ListRoomsRequest(page_token=behind_the_others(), held_only=True)
        assert refusal(stub.ListRooms, elsewhere).metadata["field"] == "page_token", "of the same filters only"

    def test_no_turn_of_the_loop_looks_at_all_rooms(
        self, prefill: RankHost, dial: Dial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = dial(prefill).open()
        rooms = [next(ROOMS) for _ in range(40)]
        for room in rooms:
            client.write(room, [1])
        wait_until(lambda: all(RoomKey(room) in core_of(prefill).rooms for room in rooms))
        monkeypatch.setattr(room_tables, "_ROOMS_LOOKED_AT_IN_A_TURN", 8)
        others = 0

        async def list_them() -> Any:
            nonlocal others
            listing = asyncio.ensure_future(prefill.rank.transfer.page_of_rooms(RoomKey(rooms[0]), 5))
            while not listing.done():
                others += 1
                await asyncio.sleep(0)
            return await listing

        rows, more, total = prefill.rank._loop.run(list_them(), 5.0)
        assert [row.key.room for row in rows] == rooms[1:6] and others >= total // 8
        assert more == rows[-1].key

    def test_rooms_that_go_while_a_page_is_made_end_no_list(
        self, prefill: RankHost, dial: Dial, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = dial(prefill).open()
        rooms = [next(ROOMS) for _ in range(12)]
        for room in rooms:
            client.write(room, [1])
        core = core_of(prefill)
        wait_until(lambda: all(RoomKey(room) in core.rooms for room in rooms))
        monkeypatch.setattr(turns, "PIECE_SECONDS", 0.0)  # each room takes a turn of its own
        row_of, read = prefill.rank.transfer._row_of, list[int]()

        def one_goes(key: RoomKey) -> Any:
            """Two of a page are gone when their turn comes."""
            read.append(key.room)
            return None if key.room in rooms[2:4] else row_of(key)

        async def list_them() -> list[int]:
            found, token = list[int](), ""
            while True:
                asked = pb.ListRoomsRequest(page_size=5, page_token=token)
                page = await TransferServicer(prefill.rank.transfer).ListRooms(asked, None)
                found += [each.room for each in page.rooms]
                token = page.next_page_token
                if not token:
                    return found

        monkeypatch.setattr(prefill.rank.transfer, "_row_of", one_goes)
        found = prefill.rank._loop.run(list_them(), 10.0)
        assert [room for room in found if room in rooms] == [*rooms[:2], *rooms[4:]] and read

    @pytest.mark.parametrize("slowest", [False, True])
    def test_an_answer_is_made_in_as_many_turns_as_it_takes(
        self, slowest: bool, prefill: RankHost, decode: RankHost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for _ in range(3):
            hand_off(prefill, decode, pages=[1])
        monkeypatch.setattr(turns, "PIECE_SECONDS", 0.0)  # each room takes a turn of its own
        others = 0

        async def list_them() -> pb.ListRoomsResponse:
            nonlocal others
            asked = TransferServicer(prefill.rank.transfer).ListRooms(pb.ListRoomsRequest(slowest=slowest), None)
            listing = asyncio.ensure_future(asked)
            while not listing.done():
                others += 1
                await asyncio.sleep(0)
            return await listing

        rooms = prefill.rank._loop.run(list_them(), 5.0).rooms
        assert len(rooms) >= 3 and others > 2 * len(rooms), "each is looked up in a turn, and told in one"

    def test_sessions_are_sought_and_told_in_as_many_turns_as_they_take(
        self, prefill: RankHost, decode: RankHost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hand_off(prefill, decode, pages=[1])
        one = next(prefill.rank.transfer.sessions())
        rows = [replace(one, peer=RankRef(RankId(f"D-{number:02}"), 1)) for number in reversed(range(60))]
        monkeypatch.setattr(prefill.rank.transfer, "sessions", lambda: iter(rows))
        monkeypatch.setattr(turns, "PIECE_SECONDS", 0.0)  # each session takes a turn of its own
        others = 0

        async def list_them(token: str = "") -> pb.ListSessionsResponse:
            nonlocal others
            request = pb.ListSessionsRequest(page_size=50, page_token=token)
            listing = asyncio.ensure_future(TransferServicer(prefill.rank.transfer).ListSessions(request, None))
            while not listing.done():
                others += 1
                await asyncio.sleep(0)
            return await listing

        first = prefill.rank._loop.run(list_them(), 20.0)
        assert others > 60 + 50, "each is looked up in a turn, and told in one"
        second = prefill.rank._loop.run(list_them(first.next_page_token), 20.0)
        told = [each.peer.rank.engine for each in (*first.sessions, *second.sessions)]
        assert told == [f"D-{number:02}" for number in range(60)] and not second.next_page_token

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_a_room_that_went_well_stays_listed_with_its_stages(
        self, side: str, prefill: RankHost, decode: RankHost, stub_of: Any
    ) -> None:
        hosts = {"prefill": prefill, "decode": decode}
        room = hand_off(prefill, decode, pages=[1, 2, 3])
        all_are_gone(prefill, [room])
        all_are_gone(decode, [room])
        listed = stub_of(hosts[side]).ListRooms(pb.ListRoomsRequest(states=[SUCCESS], page_size=1000), timeout=5).rooms
        (found,) = [each for each in listed if each.room == room]
        peer = hosts["decode" if side == "prefill" else "prefill"].rank.ref
        assert [part.peer for part in found.parts] == [rank_ref_to_pb(peer)]
        assert (found.pages, found.held_pages, found.state) == (3, 0, SUCCESS)
        assert found.end.bytes == 3 * sum(pool.page_bytes for pool in prefill.rank.transfer.config.pools)
        stages = found.end.bootstrap_time, found.end.wait_time, found.end.transfer_time
        took = sum(each.ToMicroseconds() for each in stages)
        assert 0 < took <= found.age.ToMicroseconds() + 1000, "age is said in milliseconds"
        speed = found.end.bytes / found.end.transfer_time.ToNanoseconds()
        assert found.end.gigabytes_per_second == pytest.approx(speed, rel=0.01)
        alone = stub_of(hosts[side]).GetRoom(pb.GetRoomRequest(room=room), timeout=5).room
        assert (alone.end.bytes, alone.end.transfer_time) == (found.end.bytes, found.end.transfer_time)

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_the_slowest_rooms_come_first(self, side: str, prefill: RankHost, decode: RankHost, stub_of: Any) -> None:
        rooms = [hand_off(prefill, decode, pages=[1], after=after) for after in (0.0, 0.3, 0.1)]
        stub = stub_of(prefill if side == "prefill" else decode)
        listed = stub.ListRooms(pb.ListRoomsRequest(slowest=True, page_size=1000), timeout=5).rooms
        stages = [(each.end.bootstrap_time, each.end.wait_time, each.end.transfer_time) for each in listed]
        took = [sum(stage.ToMicroseconds() for stage in each) for each in stages]
        assert took == sorted(took, reverse=True) and set(rooms) <= {each.room for each in listed}
        assert {each.state for each in listed} == {SUCCESS}
        for wrong in ({"states": [FAILED]}, {"held_only": True}, {"newest_failed": True}, {"page_token": "x"}):
            error = refusal(stub.ListRooms, pb.ListRoomsRequest(slowest=True, **wrong))
            assert error.reason is Reason.INVALID_REQUEST

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_a_session_says_what_its_hand_offs_came_to(
        self, side: str, prefill: RankHost, decode: RankHost, stub_of: Any
    ) -> None:
        here, there = (prefill, decode) if side == "prefill" else (decode, prefill)

        def figures() -> Sequence[pb.HandOffFigures]:
            sessions = stub_of(here).ListSessions(pb.ListSessionsRequest(page_size=1000), timeout=5).sessions
            of_peer = [each for each in sessions if each.peer == rank_ref_to_pb(there.rank.ref)]
            return (of_peer[0].since_start, of_peer[0].last_minute) if of_peer else (pb.HandOffFigures(),) * 2

        before = [(each.succeeded, each.failed, each.bytes) for each in figures()]
        page_bytes = sum(pool.page_bytes for pool in prefill.rank.transfer.config.pools)
        for _ in range(3):
            hand_off(prefill, decode, pages=[1, 2])
        receiver = receiver_of(decode, f"{prefill.rank.address}/P", next(ROOMS))
        wait_until(lambda: receiver.poll() is KVPoll.WaitingForInput)
        receiver.init([3], 0)
        named(prefill, receiver.room)
        receiver.abort()
        wanted = [(well + 3, failed + 1, nbytes + 6 * page_bytes) for well, failed, nbytes in before]
        wait_until(lambda: [(each.succeeded, each.failed, each.bytes) for each in figures()] == wanted)
        for each in figures():
            assert 0 < each.p50.ToNanoseconds() <= each.p99.ToNanoseconds()
            assert each.gigabytes_per_second > 0

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_bad_pages_are_refused_by_name(self, side: str, request: pytest.FixtureRequest, stub_of: Any) -> None:
        stub = stub_of(request.getfixturevalue(side))
        question = "ListRooms [] False"
        forged = [page_token(question, text) for text in ("x", "1", "1,2,3", "a,b", "1,", "9" * 5000 + ",0")]
        for token in ("x", "s:", "r:1:0", *forged):
            for call, page in ((stub.ListSessions, pb.ListSessionsRequest), (stub.ListRooms, pb.ListRoomsRequest)):
                error = refusal(call, page(page_token=token))
                assert (error.reason, error.metadata["field"]) == (Reason.INVALID_REQUEST, "page_token")
        for call, page in ((stub.ListSessions, pb.ListSessionsRequest), (stub.ListRooms, pb.ListRoomsRequest)):
            for size in (1000, 1001, 2**32 - 1):
                assert call(page(page_size=size), timeout=5), "more than the bound means the bound"
        for states in ([0], [6], [-1], [4, 99]):
            error = refusal(stub.ListRooms, pb.ListRoomsRequest(states=states))  # type: ignore[arg-type]
            assert (error.reason, error.metadata["field"]) == (Reason.INVALID_REQUEST, "states")

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_what_no_request_may_hold_is_named_with_its_value_and_the_rule(
        self, side: str, request: pytest.FixtureRequest, stub_of: Any
    ) -> None:
        stub = stub_of(request.getfixturevalue(side))
        for call, message, field, value in (
            (stub.GetRoom, pb.GetRoomRequest(), "room", "0"),
            (stub.GetRoom, pb.GetRoomRequest(room=2**63), "room", str(2**63)),
            (stub.CancelRoom, pb.CancelRoomRequest(room=2**64 - 1), "room", str(2**64 - 1)),
            (stub.CancelRoom, pb.CancelRoomRequest(room=1, cause="x" * 257), "cause", "257 characters"),
            (stub.ListRooms, pb.ListRoomsRequest(states=[4, 99, -1]), "states", "99, -1"),  # type: ignore[list-item]
            (stub.ListRooms, pb.ListRoomsRequest(page_token="r:-1:0"), "page_token", "r:-1:0"),
            (stub.ListSessions, pb.ListSessionsRequest(page_token="x"), "page_token", "x"),
        ):
            error = refusal(call, message)
            assert error.reason is Reason.INVALID_REQUEST
            assert error.metadata["field"] == field
            assert value in error.metadata["value"]
            assert [each.field for each in error.violations] == [field]
            assert error.metadata["rule"] in error.message

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_an_unknown_room_is_not_found(self, side: str, request: pytest.FixtureRequest, stub_of: Any) -> None:
        stub = stub_of(request.getfixturevalue(side))
        for room, attempt in ((999, 0), (2**63 - 1, 2**32 - 1)):
            for call, message in ((stub.GetRoom, pb.GetRoomRequest), (stub.CancelRoom, pb.CancelRoomRequest)):
                error = refusal(call, message(room=room, attempt=attempt))
                assert error.reason is Reason.ROOM_NOT_FOUND
                assert error.metadata == {"room": str(room), "attempt": str(attempt)}

    def test_a_room_says_who_waits_for_whom(self, prefill: RankHost, decode: RankHost, stub_of: Any) -> None:
        room, trace = next(ROOMS), "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        receiver = receiver_of(decode, f"{prefill.rank.address}/P", room, traceparent=trace)
        receiver.init([4, 5, 6], 0)
        named(prefill, room)
        there = stub_of(prefill).GetRoom(pb.GetRoomRequest(room=room), timeout=5).room
        assert (there.role, there.state, there.pages) == (common_pb2.ROLE_PREFILL, BOOTSTRAPPING, 3)
        assert not there.local_handle
        assert there.parts[0].peer == rank_ref_to_pb(decode.rank.ref)
        here = stub_of(decode).GetRoom(pb.GetRoomRequest(room=room), timeout=5).room
        assert (here.role, here.pages, here.local_handle, here.held) == (common_pb2.ROLE_DECODE, 3, True, False)
        assert here.parts[0].peer == rank_ref_to_pb(prefill.rank.ref)
        assert here.age.ToMilliseconds() < 5000
        assert here.traceparent == there.traceparent == trace
        receiver.abort()

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    def test_cancel_fails_the_room_on_both_sides_with_the_operators_words(
        self, side: str, prefill: RankHost, decode: RankHost, request: pytest.FixtureRequest, stub_of: Any
    ) -> None:
        room = next(ROOMS)
        receiver = receiver_of(decode, f"{prefill.rank.address}/P", room)
        receiver.init([4], 0)
        sender = sender_of(prefill, room)
        wait_until(lambda: sender.poll() is KVPoll.WaitingForInput)
        stub = stub_of(request.getfixturevalue(side))
        answer = stub.CancelRoom(pb.CancelRoomRequest(room=room, cause="spring cleaning"), timeout=5).room
        assert (answer.state, answer.failure.reason) == (FAILED, Reason.ROOM_CANCELLED)
        wait_until(lambda: sender.failure is not None and receiver.failure is not None)
        for handle in (sender, receiver):
            assert (handle.failure.message, handle.failure.metadata["by"]) == ("spring cleaning", "operator")
        wait_until(lambda: receiver.release_safe)

    def test_why_the_last_rooms_failed_can_still_be_asked_when_they_are_over(
        self, prefill: RankHost, decode: RankHost, stub_of: Any
    ) -> None:
        rooms = [next(ROOMS) for _ in range(300)]
        for room in rooms:
            receiver = receiver_of(decode, f"{prefill.rank.address}/P", room)
            receiver.init([4], 0)
            sender_of(prefill, room).abort(f"no more of {room}")
        for host in (prefill, decode):
            all_are_gone(host, rooms)
            stub = stub_of(host)
            last = stub.GetRoom(pb.GetRoomRequest(room=rooms[-1]), timeout=5).room
            assert (last.state, last.failure.message) == (FAILED, f"no more of {rooms[-1]}")
            # The oldest went, once the session has no more to say of them.
            wait_until(keeps_the_last(stub, rooms))
            cancelled = stub.CancelRoom(pb.CancelRoomRequest(room=rooms[-1], cause="late"), timeout=5).room
            assert cancelled.failure.message == f"no more of {rooms[-1]}"

    def test_cancel_of_what_has_ended_changes_nothing(self, prefill: RankHost, dial: Dial, stub_of: Any) -> None:
        client = dial(prefill).open()
        client.write(room := next(ROOMS), [1])
        prefill.send(room, [1])
        client.ended(room)
        answer = stub_of(prefill).CancelRoom(pb.CancelRoomRequest(room=room), timeout=5).room
        assert answer.state == SUCCESS
        assert not answer.HasField("failure")

    def test_held_pages_are_shown_until_the_writer_says_settled(
        self, prefill: RankHost, decode: RankHost, memory: Memory, stub_of: Any
    ) -> None:
        room, say = next(ROOMS), threading.Event()

        def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[pb.SessionResponse]:
            yield server.welcome()
            yield from (said(room, FAILED, OPEN) for request in requests if request.rooms)

        def settled(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[pb.SessionResponse]:
            yield server.welcome()
            say.wait(SECONDS)
            yield said(room, FAILED, SETTLED)
            yield from (pb.SessionResponse() for request in requests)

        server = PrefillServer(script, prefill.rank.address, memory.pool)
        try:
            receiver = receiver_of(decode, server.bootstrap, room)
            receiver.init([1, 2, 3], 0)
            wait_until(lambda: receiver.poll() is KVPoll.Failed)
            stub = stub_of(decode)
            rooms = stub.ListRooms(pb.ListRoomsRequest(held_only=True), timeout=5).rooms
            (held,) = [each for each in rooms if each.room == room]
            assert (held.held, held.pages, held.state) == (True, 3, FAILED)
            assert held.parts[0].writes == OPEN
            assert stub.GetRank(pb.GetRankRequest(), timeout=5).pages_held >= 3
            assert not receiver.release_safe
            server.script = settled
            server.end_sessions()
            say.set()
            wait_until(lambda: receiver.release_safe)
            wait_until(
                lambda: room not in [each.room for each in stub.ListRooms(pb.ListRoomsRequest(), timeout=5).rooms]
            )
        finally:
            server.close()
