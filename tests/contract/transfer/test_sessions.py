"""TransferService of real ranks, message by message: what the comments of transfer_service.proto promise."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvgrpc.dataplane.base import Outcome
from kvgrpc.errors import Reason
from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.transfer import KVPoll
from kvgrpc.transfer.protocol.types import Bounds, RoomKey, Timing
from kvgrpc.transfer.runtime.prefill_manager import PrefillManager
from kvgrpc.transfer.runtime.session_writer import SessionWriter
from kvgrpc.v1 import common_pb2, error_reason_pb2
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.wire import layout_to_pb, pool_to_pb, rank_ref_to_pb
from tests.contract.transfer_peers import (
    ANNOUNCE,
    FAILED,
    FORGET,
    OPEN,
    SECONDS,
    SETTLED,
    STOP,
    STOPPED,
    SUCCESS,
    DecodeClient,
    Memory,
    core_of,
    named,
    receiver_of,
    sender_of,
    session_with,
)
from tests.support.faults.dataplane import Fault
from tests.support.rank_host import AUX_BYTES, LAYERS, PAGES, RankHost
from tests.support.waiting import wait_until

ROOMS = iter(range(1_000, 10_000_000))
Dial = Callable[..., DecodeClient]


def fails(sender: Any) -> None:
    wait_until(lambda: sender.poll() is KVPoll.Failed)


class Unread:
    """A decode that says hello and reads no message but the first ``after``: whoever writes more waits for ever."""

    def __init__(self, hello: pb.Hello, after: int) -> None:
        self._first: list[pb.SessionRequest] = [pb.SessionRequest(hello=hello)]
        self._left = after

    async def read(self) -> pb.SessionRequest | None:
        if self._first:
            return self._first.pop()
        await asyncio.Event().wait()
        return None

    async def write(self, message: pb.SessionResponse) -> None:
        self._left -= 1
        if self._left < 0:
            await asyncio.Event().wait()


def ticks_between_heartbeats(
    pairs: list[tuple[RankHost, RankHost]], monkeypatch: pytest.MonkeyPatch
) -> list[list[int]]:
    """Of those that are due from the first of each pair to the second, from now on."""
    apart: list[list[int]] = [[] for _ in pairs]
    before = [0 for _ in pairs]
    beat = SessionWriter.beat

    def note(session: SessionWriter) -> None:
        for index, (host, peer) in enumerate(pairs):
            if session is session_with(host, peer):
                apart[index].append(core_of(host).now - before[index])
                before[index] = core_of(host).now
        beat(session)

    monkeypatch.setattr(SessionWriter, "beat", note)
    return apart


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_peer_that_reads_nothing_keeps_no_stream_once_it_was_given_up(
    hasty: RankHost, memory: Memory, after: int
) -> None:
    """Welcome, or a heartbeat, waited for its window for ever, and with it a task and what it was to write."""
    assert served(hasty, Unread(DecodeClient(hasty, memory).hello(), after))


def test_nor_does_one_whose_hello_is_refused(hasty: RankHost, memory: Memory) -> None:
    assert served(hasty, Unread(DecodeClient(hasty, memory).hello(aux_item_bytes=[1]), 0))


def served(host: RankHost, peer: Unread) -> bool:
    """Whether the stream of such a peer ends."""
    manager: Any = host.rank.transfer

    async def ends() -> bool:
        serving = asyncio.ensure_future(manager.serve(peer.read, peer.write))
        done, _ = await asyncio.wait([serving], timeout=SECONDS)
        serving.cancel()
        return bool(done)

    return LoopThread.shared().run(ends(), 2 * SECONDS)


class TestHello:
    def test_welcome_says_who_answers_and_how_often_it_speaks(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        welcome = client.kept[0].welcome
        assert welcome.rank == rank_ref_to_pb(prefill.rank.ref)
        assert welcome.max_frame_bytes == 4 << 20
        assert (welcome.heartbeat.ToMilliseconds(), welcome.idle_timeout.ToMilliseconds()) == (900, 60_000)
        assert welcome.data_plane_address == prefill.rank.plane.address()

    def test_the_data_plane_contacts_nobody_to_whom_welcome_could_not_be_said(
        self, prefill: RankHost, dial: Dial, memory: Memory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        manager: Any = prefill.rank.transfer
        plane, contacted = prefill.rank.plane, list[bytes]()
        attach = plane.attach

        def note(address: bytes) -> object:
            contacted.append(address)
            return attach(address)

        async def read(said: Iterator[pb.SessionRequest]) -> pb.SessionRequest | None:
            return next(said, None) or await asyncio.Future[pb.SessionRequest]()

        async def gone(message: pb.SessionResponse) -> None:
            raise ConnectionResetError

        monkeypatch.setattr(plane, "attach", note)
        hello = pb.SessionRequest(hello=dial(prefill).hello(data_plane_address=b"nobody"))
        serving = manager.serve(functools.partial(read, iter([hello])), gone)
        with pytest.raises(ConnectionResetError):
            asyncio.run_coroutine_threadsafe(serving, manager._loop).result(SECONDS)
        dial(prefill).open()  # what is to be attached is attached in its order
        wait_until(lambda: contacted)
        assert contacted == [memory.plane.address()]

    def test_another_incarnation_is_stale_epoch_and_names_the_current(self, prefill: RankHost, dial: Dial) -> None:
        epoch = prefill.rank.ref.epoch
        for other in (epoch - 1, epoch + 1, 0):
            to = rank_ref_to_pb(RankRef(prefill.rank.ref.rank, other))
            failure = dial(prefill).refused(to=to)
            assert failure.reason is Reason.STALE_EPOCH
            assert failure.metadata["currentEpoch"] == str(epoch)
            assert failure.metadata["requestEpoch"] == str(other)

    def test_another_rank_is_wrong_rank(self, prefill: RankHost, dial: Dial) -> None:
        for rank in (RankId("Q"), RankId("P", tp=1)):
            failure = dial(prefill).refused(to=rank_ref_to_pb(RankRef(rank, prefill.rank.ref.epoch)))
            assert failure.reason is Reason.WRONG_RANK
            assert failure.metadata == {"expected": str(rank), "actual": "P/dp0/pp0/cp0/tp0"}

    def test_a_decode_rank_serves_no_session(self, decode: RankHost, dial: Dial) -> None:
        failure = dial(decode).refused()
        assert failure.reason is Reason.WRONG_RANK
        assert failure.metadata == {"expected": "PREFILL", "actual": "DECODE"}

    def test_shapes_that_differ_are_named(
        self, prefill: RankHost, dial: Dial, memory: Memory, caplog: pytest.LogCaptureFixture
    ) -> None:
        pool = pool_to_pb(memory.pool)
        pool.page_tokens, pool.dtype = 32, "bfloat16"
        failure = dial(prefill).refused(pools=[pool], aux_item_bytes=[8], data_plane="mooncake")
        assert f"{prefill.rank.ref} refused a session of 127.0.0.1:" in caplog.text
        assert ": PARALLEL_LAYOUT_MISMATCH: " in caplog.text and "page_tokens" in caplog.text
        assert failure.reason is Reason.PARALLEL_LAYOUT_MISMATCH
        assert failure.metadata["mismatchedFields"].split(",") == [
            "pools[0].page_tokens",
            "pools[0].dtype",
            "aux_item_bytes",
            "data_plane",
        ]
        assert failure.metadata["pools[0].page_tokens"] == "16 != 32"

    def test_sizes_and_parts_that_differ_are_named(self, prefill: RankHost, dial: Dial) -> None:
        failure = dial(prefill).refused(layout=layout_to_pb(Layout(cp=2)))
        assert failure.metadata["mismatchedFields"] == "layout.cp"
        failure = dial(prefill).refused(expected=pb.CachePart(layer_count=LAYERS + 1, aux=True))
        assert failure.reason is Reason.PARALLEL_LAYOUT_MISMATCH
        assert failure.metadata["mismatchedFields"] == "part"
        assert dial(prefill).refused(pools=[]).metadata["pools"] == "['kv'] != []"

    def test_what_is_missing_or_wrong_is_invalid_request_and_names_the_field(
        self, prefill: RankHost, dial: Dial, memory: Memory
    ) -> None:
        client = dial(prefill)
        zero = pb.Hello(opener=rank_ref_to_pb(RankRef(client.ref.rank, 0)))
        nameless = pb.Hello(opener=rank_ref_to_pb(RankRef(RankId(""), 1)))
        unkind = pool_to_pb(memory.pool)
        unkind.kind = 77  # type: ignore[assignment]
        for changes, field in (
            ({"stream": 0}, "stream"),
            ({"pools": [unkind]}, "hello.pools[0].kind"),
            ({"pools": [common_pb2.PagePool(kind=common_pb2.POOL_KIND_KV)]}, "hello.pools[0].name"),
            ({"layout": common_pb2.Layout()}, "hello.layout.dp"),
            ({"opener": zero.opener}, "hello.opener.epoch"),
            ({"opener": nameless.opener}, "hello.opener.rank.engine"),
        ):
            failure = dial(prefill).refused(**changes)
            assert failure.reason is Reason.INVALID_REQUEST, (changes, failure)
            assert failure.metadata["field"] == field

    def test_anything_before_hello_is_refused(self, prefill: RankHost, dial: Dial) -> None:
        for first in (
            pb.SessionRequest(),
            pb.SessionRequest(forget_rooms=[1]),
            pb.SessionRequest(goodbye=pb.Goodbye()),
        ):
            failure = dial(prefill).dial().send_raw(first.SerializeToString()).goodbye()
            assert failure.reason is Reason.INVALID_REQUEST
            assert failure.metadata["field"] == "hello"

    def test_no_hello_in_time_is_refused(self, prefill: RankHost, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(PrefillManager, "_hello_within", 0.1)
        client = dial(prefill).dial()
        assert client.goodbye().reason is Reason.INVALID_REQUEST
        assert client.over() is None

    def test_a_client_that_leaves_before_hello_hears_goodbye(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).dial()
        client.finish()
        assert client.read() == pb.SessionResponse(goodbye=pb.Goodbye())
        assert client.over() is None

    def test_refusals_leave_no_pair(self, prefill: RankHost, dial: Dial, stub_of: Any) -> None:
        client = dial(prefill)
        client.refused(data_plane="mooncake")
        sessions = stub_of(prefill).ListSessions(pb.ListSessionsRequest(page_size=1000), timeout=5).sessions
        assert rank_ref_to_pb(client.ref) not in [each.peer for each in sessions]


class TestStreams:
    def test_a_newer_stream_ends_the_older_before_its_welcome(self, prefill: RankHost, dial: Dial) -> None:
        old = dial(prefill).open()
        new = old.again(2)
        while not (last := old.read()).HasField("goodbye"):
            pass
        assert not last.goodbye.HasField("failure")
        assert old.over() is None
        new.want(room := next(ROOMS), STOP)
        assert new.ended(room).state == FAILED
        new.close()

    def test_an_older_or_equal_stream_is_refused_also_after_the_pair_was_dropped(
        self, hasty: RankHost, dial: Dial
    ) -> None:
        client = dial(hasty).open(stream=5)
        for stream in (5, 4, 1):
            refused = dial(hasty)
            refused.ref = client.ref
            failure = refused.refused(stream=stream)
            assert failure.reason is Reason.INVALID_REQUEST
            assert failure.metadata["field"] == "stream"
        client.close()
        wait_until(lambda: client.ref not in core_of(hasty).pairs)
        late = dial(hasty)
        late.ref = client.ref
        assert late.refused(stream=5).metadata["field"] == "stream"

    def test_heartbeats_come_within_300_ms(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open().want(next(ROOMS), ANNOUNCE)
        heard = [time.monotonic()]
        for _ in range(6):
            assert client.read() == pb.SessionResponse()
            heard.append(time.monotonic())
        assert np.median(np.diff(heard)) < 0.6  # a tick that a busy machine brings late does not count

    def test_decode_sends_heartbeats_within_300_ms(
        self, prefill: RankHost, decode: RankHost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heard: list[float] = []
        core = core_of(prefill)
        on_heard = core.on_heard

        def listen(stream: object, ref: RankRef) -> None:
            if ref == decode.rank.ref:
                heard.append(time.monotonic())
            on_heard(stream, ref)

        monkeypatch.setattr(core, "on_heard", listen)
        receiver = receiver_of(decode, f"{prefill.rank.address}/P", next(ROOMS))
        wait_until(lambda: len(heard) >= 7)
        assert np.median(np.diff(heard)) < 0.6
        receiver.abort()

    def test_both_sides_speak_a_third_as_often_while_no_room_of_the_pair_is_open(
        self, prefill: RankHost, decode: RankHost, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        apart = ticks_between_heartbeats([(prefill, decode), (decode, prefill)], monkeypatch)
        receiver = receiver_of(decode, f"{prefill.rank.address}/P", next(ROOMS))
        wait_until(lambda: [ticks[-1:] for ticks in apart] == [[3], [3]])
        receiver.abort()
        wait_until(lambda: [ticks[-1:] for ticks in apart] == [[9], [9]])

    def test_silence_for_the_patience_loses_the_pair(self, hasty: RankHost, dial: Dial) -> None:
        client = dial(hasty).open()
        began = time.monotonic()  # before its last word, which silence is counted from
        client.write(room := next(ROOMS), [1, 2])
        sender = sender_of(hasty, room)
        wait_until(lambda: sender.poll() is KVPoll.Failed)
        assert time.monotonic() - began > 0.8
        assert sender.failure.reason is Reason.PEER_LOST
        assert sender.failure.metadata == {
            "peer": str(client.ref),
            "how": "not a word for 1000 ms, though its connection stood",
        }
        client.over()

    def test_heartbeats_keep_the_pair(self, hasty: RankHost, dial: Dial) -> None:
        client = dial(hasty).open()
        client.write(room := next(ROOMS), [1, 2])
        sender = sender_of(hasty, room)
        for _ in range(30):
            client.send()
            client.quiet(0.05)
        assert sender.poll() is KVPoll.WaitingForInput
        sender.abort()

    def test_a_break_loses_nothing_when_decode_comes_back(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [7])
        sender = sender_of(prefill, room)
        named(prefill, room)
        client._call.cancel()
        again = client.again(2)
        again.write(room, [7])
        sender.init(1, 0)
        sender.send([9])
        assert again.ended(room).state == SUCCESS
        assert np.array_equal(client.memory.bytes[:, 7], prefill.memory[:, 9])
        again.close()

    def test_no_return_after_a_break_loses_the_pair(self, hasty: RankHost, dial: Dial) -> None:
        client = dial(hasty).open()
        client.write(room := next(ROOMS), [1])
        sender = sender_of(hasty, room)
        wait_until(lambda: sender.poll() is KVPoll.WaitingForInput)
        client.send(goodbye=pb.Goodbye())
        assert client.over() is None
        wait_until(lambda: sender.poll() is KVPoll.Failed)
        assert "back within 500 ms of a break" in sender.failure.metadata["how"]


class TestRooms:
    def test_write_moves_the_pages_and_success_brings_aux(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        source, destination = [3, 1, 400, 77], [500, 8, 9, 10]
        client.memory.bytes[:] = 0
        client.write(room, destination)
        prefill.send(room, source, aux_row=5)
        last = client.ended(room)
        assert (last.state, last.writes, last.pages_done) == (SUCCESS, SETTLED, 4)
        assert last.aux == prefill.aux_row(5)
        assert len(last.aux) == AUX_BYTES
        assert np.array_equal(client.memory.bytes[:, destination], prefill.memory[:, source])
        untouched = np.setdiff1d(np.arange(PAGES), destination)
        assert not client.memory.bytes[:, untouched].any()
        client.want(room, FORGET)
        wait_until(lambda: RoomKey(room) not in core_of(prefill).rooms)

    def test_states_only_advance(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [1, 2, 3])
        prefill.send(room, [1, 2], last=False)
        client.room(room, lambda entry: entry.pages_done == 2)
        prefill.send_rest(room, 3)
        client.ended(room)
        seen = [entry for message in client.kept for entry in message.rooms if entry.room == room]
        for field in ("state", "writes", "pages_done"):
            values = [getattr(entry, field) for entry in seen]
            assert values == sorted(values)

    def test_pages_travel_raw_and_as_runs(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        runs = [common_pb2.PageSet(run_starts=[100, 10], run_lengths=[3, 2])]
        client.send(rooms=[pb.DecodeRoom(room=room, want=pb.WANT_WRITE, pages=runs)])
        prefill.send(room, [20, 21, 22, 23, 24])
        assert client.ended(room).state == SUCCESS
        assert np.array_equal(client.memory.bytes[:, [100, 101, 102, 10, 11]], prefill.memory[:, 20:25])

    def test_a_full_prefix_hit_is_a_set_without_pages(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [], first_page=9)
        prefill.send(room, [], aux_row=3)
        last = client.ended(room)
        assert (last.state, last.aux) == (SUCCESS, prefill.aux_row(3))
        assert prefill.senders[room, 0].decode_prefix_pages == 9

    def test_repeats_are_harmless(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        for _ in range(3):
            client.write(room, [30, 31])
        prefill.send(room, [1, 2])
        done = client.ended(room)
        client.write(room, [30, 31])
        assert client.room(room) == done
        for _ in range(3):
            client.want(room, FORGET)
        client.send(forget_rooms=[room, room])
        wait_until(lambda: RoomKey(room) not in core_of(prefill).rooms)

    def test_changed_pages_are_a_conflict(self, prefill: RankHost, dial: Dial) -> None:
        for pages, first_page in (([1, 3], 0), ([1], 0), ([1, 2], 1)):
            client = dial(prefill).open()
            room = next(ROOMS)
            client.write(room, [1, 2])
            sender = sender_of(prefill, room)
            client.write(room, pages, first_page=first_page)
            last = client.ended(room)
            assert (last.state, last.failure.reason) == (FAILED, Reason.ROOM_CONFLICT)
            fails(sender)

    def test_stop_fails_both_sides_with_the_cause_that_decode_gave(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [1, 2])
        sender = sender_of(prefill, room)
        cause = common_pb2.Failure(
            reason=error_reason_pb2.ERROR_REASON_ROOM_DEADLINE, message="why not", metadata={"a": "b"}
        )
        client.want(room, STOP, failure=cause)
        last = client.ended(room)
        assert (last.state, last.writes) == (FAILED, SETTLED)
        assert (last.failure.reason, last.failure.message, last.failure.metadata) == (4, "why not", {"a": "b"})
        wait_until(lambda: sender.failure is not None)
        assert (sender.failure.reason, sender.failure.message) == (Reason.ROOM_DEADLINE, "why not")

    def test_stop_of_an_unclaimed_room_is_stopped_not_settled(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.want(room, STOP)
        last = client.ended(room)
        assert (last.state, last.writes, last.failure.reason) == (FAILED, STOPPED, Reason.ROOM_CANCELLED)
        late = sender_of(prefill, room)
        wait_until(lambda: late.poll() is KVPoll.Failed)
        assert late.failure.reason is Reason.ROOM_CANCELLED

    def test_stop_after_success_changes_nothing(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [1])
        prefill.send(room, [1])
        client.ended(room)
        client.want(room, STOP)
        again = client.room(room)
        assert (again.state, again.writes) == (SUCCESS, SETTLED)
        assert prefill.senders[room, 0].poll() is KVPoll.Success

    def test_nothing_goes_back(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.want(room, STOP)
        client.ended(room)
        client.write(room, [1])
        assert client.room(room).state == FAILED

    def test_forget_of_what_is_not_settled_is_ignored(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [1])
        sender = sender_of(prefill, room)
        wait_until(lambda: sender.poll() is KVPoll.WaitingForInput)
        core = core_of(prefill)
        ignored = core.ignored_entries
        client.want(room, FORGET)
        client.want(next(ROOMS), FORGET)
        wait_until(lambda: core.ignored_entries > ignored)
        client.write(room, [1])
        sender.init(1, 0)
        sender.send([5])
        assert client.ended(room).state == SUCCESS

    def test_no_local_sender_in_the_time_left_is_room_not_found(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [1], time_left_ms=1500)
        last = client.ended(room)
        assert "within 500 ms" in last.failure.message  # so that decode hears it before its own deadline
        assert (last.state, last.writes, last.failure.reason) == (FAILED, STOPPED, Reason.ROOM_NOT_FOUND)
        late = sender_of(prefill, room)
        wait_until(lambda: late.failure is not None)
        assert late.failure.reason is Reason.ROOM_NOT_FOUND

    def test_another_asker_gets_conflict_until_it_forgets_and_disturbs_nobody(
        self, prefill: RankHost, dial: Dial
    ) -> None:
        owner, other = dial(prefill).open(), dial(prefill).open()
        room = next(ROOMS)
        owner.write(room, [1])
        named(prefill, room)
        for _ in range(2):
            other.write(room, [2])
            answer = other.room(room)
            assert (answer.state, answer.writes > OPEN) == (FAILED, True)
            assert answer.failure.reason == Reason.ROOM_CONFLICT
            assert answer.failure.metadata["owner"] == str(owner.ref)
        other.want(room, STOP)
        assert other.room(room).failure.reason == Reason.ROOM_CONFLICT
        other.want(room, FORGET)
        assert other.quiet()
        prefill.send(room, [1])
        assert owner.ended(room).state == SUCCESS

    def test_attempts_are_independent_rooms(self, prefill: RankHost, dial: Dial) -> None:
        one, two = dial(prefill).open(), dial(prefill).open()
        room = next(ROOMS)
        one.write(room, [1])
        two.write(room, [2], attempt=1)
        prefill.send(room, [3], attempt=1)
        done = two.ended(room)
        assert (done.attempt, done.state) == (1, SUCCESS)
        prefill.send(room, [4])
        assert one.ended(room).attempt == 0

    def test_a_sender_abort_reaches_decode(self, prefill: RankHost, dial: Dial) -> None:
        client = dial(prefill).open()
        room = next(ROOMS)
        client.write(room, [1])
        sender = sender_of(prefill, room)
        sender.abort("too warm")
        last = client.ended(room)
        assert (last.state, last.writes, last.failure.message) == (FAILED, SETTLED, "too warm")

    def test_past_the_bound_of_unknown_writes_rooms_are_refused_until_one_that_is_tried_is_done(
        self, dial: Dial
    ) -> None:
        settings = {"bounds": Bounds(unknown_writes=1), "timing": Timing(probe=20), "slow_seconds": {10**6: 0.0}}
        host = RankHost("V", "PREFILL", settings)
        try:
            plane: Any = host.rank.plane
            plane.fault = lambda number, _: Fault(Outcome.FAILED_UNKNOWN) if number < 2 else None
            client = dial(host).open()

            def hand_off(room: int) -> Any:
                sender = sender_of(host, room)
                named(host, room)
                client.write(room, [4])
                sender.init(1, 0)
                sender.send([1])
                entry = client.ended(room)
                wait_until(lambda: sender.ended)
                return entry

            assert [hand_off(room).failure.reason for room in (1, 2)] == [Reason.TRANSFER_FAILED] * 2
            refused = hand_off(3)
            assert (refused.failure.reason, refused.writes) == (Reason.TOO_MANY_REQUESTS, SETTLED)
            assert refused.failure.metadata["scope"] == "unknown_writes"
            assert 0 < refused.failure.retry_after.ToMilliseconds() <= 2_000
            assert host.rank.transfer.depths()["unknown_writes"] == 2
            assert host.rank.transfer.depths()["peers_refused"] == 1
            rooms = itertools.count(4)
            wait_until(lambda: hand_off(next(rooms)).state == SUCCESS)
            assert host.rank.transfer.depths()["peers_refused"] == 0
        finally:
            host.close(1.0)

    def test_a_prefill_that_closes_says_that_writes_nobody_knew_of_are_over(self, dial: Dial) -> None:
        """Its pages come back by its word, and not only by a refused dial of its address."""
        host = RankHost("U", "PREFILL", {"slow_seconds": {10**6: 0.0}})
        try:
            plane: Any = host.rank.plane
            plane.fault = lambda number, _: Fault(Outcome.FAILED_UNKNOWN)
            host.rank._parts.owns_plane = True  # as where the rank opened it: closing the rank closes the plane
            client, room = dial(host).open(), next(ROOMS)
            client.write(room, [1])
            host.send(room, [1])
            assert client.room(room, lambda entry: entry.state == FAILED).writes == pb.WRITES_UNKNOWN
        finally:
            host.close(2.0)
        assert client.room(room, lambda entry: entry.writes != pb.WRITES_UNKNOWN).writes == pb.WRITES_STOPPED
        assert client.goodbye().reason is Reason.SERVER_DRAINING

    def test_a_draining_prefill_fails_new_rooms_and_finishes_old_ones(self, dial: Dial) -> None:
        host = RankHost("Q", "PREFILL", {})
        try:
            client = dial(host).open()
            running, late = next(ROOMS), next(ROOMS)
            client.write(running, [1, 2])
            host.send(running, [1], last=False)
            client.room(running, lambda entry: entry.pages_done == 1)
            host.rank._loop.loop.call_soon_threadsafe(core_of(host).drain)
            client.write(late, [3])
            last = client.ended(late)
            assert (last.state, last.failure.reason) == (FAILED, Reason.SERVER_DRAINING)
            host.send_rest(running, 2)
            assert client.ended(running).state == SUCCESS
        finally:
            host.close(1.0)
        assert client.goodbye().reason is Reason.SERVER_DRAINING
