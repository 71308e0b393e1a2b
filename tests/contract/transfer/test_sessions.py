"""TransferService of real ranks, message by message: what the comments of transfer_service.proto promise."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvgrpc.errors import Reason
from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.transfer import KVPoll
from kvgrpc.transfer.runtime.prefill_manager import PrefillManager
from kvgrpc.transfer.runtime.sessions import SessionWriter
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.wire import layout_to_pb, pool_to_pb, rank_ref_to_pb
from tests.support.rank_host import LAYERS, RankHost
from tests.support.transfer_peers import (
    ANNOUNCE,
    FAILED,
    SECONDS,
    STOP,
    SUCCESS,
    DecodeClient,
    Memory,
    core_of,
    named,
    receiver_of,
    sender_of,
    session_with,
)
from tests.support.waiting import wait_until

ROOMS = iter(range(1_000, 10_000_000))
Dial = Callable[..., DecodeClient]


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
