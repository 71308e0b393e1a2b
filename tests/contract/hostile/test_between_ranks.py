"""What one rank of ours must not do to another, with nobody hostile in between (issue 10, section 0)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

from kvgrpc.errors import AddressNotAllowed, EngineNotFound, InvalidRequest, Reason
from kvgrpc.model import Layout
from kvgrpc.transfer import KVPoll
from kvgrpc.transfer.protocol.types import Bounds, Timing
from tests.support.hostile.honest_pair import ROOMS, TIMING
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import core_of, receiver_of, sender_of
from tests.support.waiting import wait_until

SMALL_FRAME = 64 * 1024
SECONDS = 30.0
Open = Callable[..., RankHost]


@pytest.fixture
def open_host() -> Iterator[Open]:
    """Opens ranks, and closes them."""
    opened: list[RankHost] = []

    def make(engine: str, role: str, **settings: Any) -> RankHost:
        opened.append(RankHost(engine, role, {"timing": TIMING, **settings}))
        return opened[-1]

    yield make
    for host in reversed(opened):
        host.close(1.0)


def loop_of(host: RankHost) -> asyncio.AbstractEventLoop:
    loop: asyncio.AbstractEventLoop = cast(Any, host.rank.transfer)._loop
    return loop


@contextlib.contextmanager
def standing_still(host: RankHost) -> Iterator[None]:
    """What its engine asks meanwhile is one turn of the loop's work."""
    stands, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        go_on.wait(SECONDS)

    loop_of(host).call_soon_threadsafe(stand)
    assert stands.wait(SECONDS)
    yield
    go_on.set()


def hands_over(prefill: RankHost, decode: RankHost, bootstrap: str) -> None:
    room = next(ROOMS)
    receiver = receiver_of(decode, bootstrap, room)
    receiver.init([7, 8], 9)
    prefill.send(room, [1, 2], aux_row=3)
    wait_until(lambda: receiver.poll() is KVPoll.Success or receiver.failure is not None, SECONDS)
    assert receiver.failure is None
    assert np.array_equal(decode.memory[:, 7:9], prefill.memory[:, 1:3])
    assert decode.aux_row(9) == prefill.aux_row(3)


def stream_to(prefill: RankHost, decode: RankHost) -> int:
    """The number of decode's stream to that rank: of another one it is higher."""
    return int(core_of(decode).pairs[prefill.rank.ref].stream.number)


class TestFrameLimits:
    """Each side sends frames that the other one takes; what no frame could carry is refused before anything opens."""

    def test_a_prefill_says_much_at_once_in_frames_that_a_decode_of_small_ones_takes(
        self, prefill: RankHost, open_host: Open
    ) -> None:
        decode = open_host("D11", "DECODE", max_frame_bytes=SMALL_FRAME)
        bootstrap = f"{prefill.rank.address}/P"
        rooms = [next(ROOMS) for _ in range(200)]
        receivers = [receiver_of(decode, bootstrap, room) for room in rooms]
        for receiver in receivers:
            receiver.init([1], 0)
        senders = [sender_of(prefill, room) for room in rooms]
        wait_until(lambda: all(sender.poll() is KVPoll.WaitingForInput for sender in senders), SECONDS)
        with standing_still(prefill):
            for sender in senders:
                sender.abort("x" * 1000)  # 200 KB in all
        wait_until(lambda: all(receiver.poll() is KVPoll.Failed for receiver in receivers), SECONDS)
        assert {receiver.failure.reason for receiver in receivers} == {Reason.ROOM_CANCELLED}
        assert stream_to(prefill, decode) == 1, "the session went on"
        hands_over(prefill, decode, bootstrap)

    def test_a_decode_says_much_at_once_in_frames_that_a_prefill_of_small_ones_takes(
        self, decode: RankHost, open_host: Open
    ) -> None:
        prefill = open_host("P11", "PREFILL", registry="embedded", max_frame_bytes=SMALL_FRAME)
        prefill.fill(2)
        bootstrap = f"{prefill.rank.address}/P11"
        hands_over(prefill, decode, bootstrap)
        before, rooms = stream_to(prefill, decode), [next(ROOMS) for _ in range(200)]
        with standing_still(decode):
            receivers = [receiver_of(decode, bootstrap, room) for room in rooms]
            for receiver in receivers:
                receiver.init(np.arange(0, 512, 2), 0)  # 1 KB each, 200 KB in all
        senders = [sender_of(prefill, room) for room in rooms]
        wait_until(lambda: all(sender.poll() is KVPoll.WaitingForInput for sender in senders), SECONDS)
        for receiver in receivers:
            receiver.abort()
        wait_until(lambda: all(receiver.release_safe for receiver in receivers), SECONDS)
        assert stream_to(prefill, decode) == before, "the session went on"

    def test_an_aux_row_that_no_frame_could_carry_is_refused_before_anything_opens(self) -> None:
        """64 KiB of frame and 64 KiB of aux: a room could never end."""
        for role in ("PREFILL", "DECODE"):
            with pytest.raises(InvalidRequest) as refused:
                RankHost("A", role, {"max_frame_bytes": SMALL_FRAME, "aux_bytes": 65_536})
            assert refused.value.metadata["field"] == "max_frame_bytes"
            assert "82048" in refused.value.metadata["rule"] and "65536 bytes of aux" in refused.value.metadata["rule"]

    def test_with_the_frames_that_the_refusal_names_it_is_handed_over(self, open_host: Open) -> None:
        both = {"max_frame_bytes": 82_048, "aux_bytes": 65_536}
        prefill = open_host("P82", "PREFILL", registry="embedded", **both)
        prefill.fill(3)
        hands_over(prefill, open_host("D82", "DECODE", **both), f"{prefill.rank.address}/P82")


def test_a_room_that_decode_refuses_is_told_to_prefill_whose_sender_fails(prefill: RankHost, open_host: Open) -> None:
    """Else its pages stay pinned until the deadline of the room, 300 s."""
    decode = open_host("D12", "DECODE", bounds=Bounds(rooms=1))
    bootstrap = f"{prefill.rank.address}/P"
    first, refused = receiver_of(decode, bootstrap, next(ROOMS)), receiver_of(decode, bootstrap, next(ROOMS))
    sender = sender_of(prefill, refused.room)
    wait_until(lambda: refused.poll() is KVPoll.Failed and sender.poll() is KVPoll.Failed, SECONDS)
    assert refused.failure.reason is sender.failure.reason is Reason.TOO_MANY_REQUESTS
    assert refused.failure.metadata["limit"] == "1" and refused.release_safe
    assert sender.failure.origin == str(decode.rank.ref)
    wait_until(lambda: first.poll() is KVPoll.WaitingForInput, SECONDS)
    first.abort()


def test_a_room_that_comes_later_has_a_question_and_a_time_of_its_own(prefill: RankHost, decode: RankHost) -> None:
    """Had it joined the one that runs, it would fail with that one's room, before its own time was over."""
    routes = cast(Any, decode.rank.transfer)._resolver
    resolve, loop = routes._resolve, loop_of(decode)
    questions: list[asyncio.Future[Any]] = []

    async def asked(bootstrap_addr: str, rank: object) -> Any:
        if bootstrap_addr != unknown:  # decode still asks for the successors of ranks of other tests
            return await resolve(bootstrap_addr, rank)
        questions.append(question := loop.create_future())
        return await question

    address = f"{prefill.rank.address}/P"
    engine = decode.rank._loop.run(resolve(address, decode.rank.ref.rank), SECONDS)
    unknown = prefill.rank.address  # another key: of this one nothing is known yet
    routes._resolve = asked
    try:
        first = receiver_of(decode, unknown, next(ROOMS))
        wait_until(lambda: len(questions) == 1)
        asked_at = loop.time()
        wait_until(lambda: loop.time() - asked_at > 0.3)  # the time within which rooms join is a quarter of a second
        late = receiver_of(decode, unknown, next(ROOMS))
        wait_until(lambda: len(questions) == 2)
        nobody = EngineNotFound("nobody is there", metadata={"engine": "P", "role": "PREFILL", "missingRanks": ""})
        loop.call_soon_threadsafe(questions[0].set_exception, nobody)
        wait_until(lambda: first.poll() is KVPoll.Failed)
        assert first.failure.reason is Reason.ENGINE_NOT_FOUND
        loop.call_soon_threadsafe(questions[1].set_result, engine)
        wait_until(lambda: late.poll() is KVPoll.WaitingForInput)
    finally:
        routes._resolve = resolve
    late.abort()


def test_one_dp_rank_that_is_gone_fails_no_room_of_the_others(
    decode: RankHost, open_host: Open, caplog: pytest.LogCaptureFixture
) -> None:
    both = {"layout": Layout(dp=2), "engine_selects_dp": True}
    first = open_host("G", "PREFILL", registry="embedded", **both)
    second = open_host("G", "PREFILL", registry=first.rank.address, dp=1, **both)
    bootstrap = f"{first.rank.address}/G"
    met = receiver_of(decode, bootstrap, next(ROOMS))
    of_met = sender_of(first, met.room)
    wait_until(lambda: met.poll() is KVPoll.WaitingForInput, SECONDS)
    second.close(1.0)
    with caplog.at_level(logging.INFO, "kvgrpc.transfer.runtime.room_locator"):
        late = receiver_of(decode, bootstrap, next(ROOMS))
        asking = f"asking {second.rank.ref} at"
        wait_until(lambda: asking in caplog.text or late.ended, SECONDS)  # it does not answer
    assert late.failure is None
    sender = sender_of(first, late.room)
    wait_until(lambda: late.poll() is KVPoll.WaitingForInput, SECONDS)
    for each in (met, late, of_met, sender):
        each.abort()


@pytest.mark.parametrize("error", [AddressNotAllowed("a token needs TLS"), RuntimeError("a bug")])
def test_a_channel_that_cannot_be_made_fails_the_room_with_its_cause_and_leaves_nothing(
    prefill: RankHost,
    open_host: Open,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    decode, bootstrap = open_host("DC", "DECODE"), f"{prefill.rank.address}/P"
    manager: Any = decode.rank.transfer

    def no_channel(address: str) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(manager, "_open_channel", no_channel)
        receiver = receiver_of(decode, bootstrap, next(ROOMS))
        wait_until(lambda: receiver.poll() is KVPoll.Failed)
        known = isinstance(error, AddressNotAllowed)
        assert receiver.failure.reason is (Reason.ADDRESS_NOT_ALLOWED if known else Reason.INTERNAL)
        assert known or receiver.failure.metadata["requestId"] in caplog.text
        wait_until(lambda: not manager._sessions)
    receiver = receiver_of(decode, bootstrap, next(ROOMS))
    wait_until(lambda: receiver.poll() is KVPoll.WaitingForInput)
    receiver.abort()
    caplog.clear()  # the bug was the test's


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_handles_made_while_a_rank_closes_end(
    role: str, prefill: RankHost, open_host: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = open_host("C", role.upper())

    def make() -> Any:
        room = next(ROOMS)
        return sender_of(host, room) if role == "prefill" else receiver_of(host, f"{prefill.rank.address}/P", room)

    monkeypatch.setattr(host.rank.transfer, "refusal", lambda key: None)  # as it was when the engine looked
    closing = threading.Thread(target=host.close, args=(2.0,))
    closing.start()
    made = []
    while closing.is_alive():
        made.append(make())
        time.sleep(0.01)
    made += [make() for _ in range(3)]
    wait_until(lambda: all(each.poll() is KVPoll.Failed for each in made))
    assert {each.failure.reason for each in made} == {Reason.SERVER_DRAINING}


@pytest.mark.parametrize(
    ("field", "timing"),
    [
        ("timing.room_deadline", Timing(room_deadline=10.5)),  # type: ignore[arg-type]
        ("timing.room_deadline", Timing(room_deadline=43_000_000)),
        ("timing.idle_timeout", Timing(idle_timeout=3, heartbeat=3)),
        ("timing.tick_seconds", Timing(tick_seconds=0.0001)),
    ],
)
@pytest.mark.parametrize("role", ["PREFILL", "DECODE"])
def test_times_that_never_come_or_that_the_wire_cannot_carry_are_refused_before_anything_opens(
    role: str, field: str, timing: Timing
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        RankHost("T", role, {"timing": timing})
    assert refused.value.metadata["field"] == field
