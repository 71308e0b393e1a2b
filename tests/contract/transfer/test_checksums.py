"""Checksums in a session, message by message (docs/session.md rule 14, aux and checksums): who asks, what is said,
what is wrong with it."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvgrpc.errors import Reason
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.transfer import KVPoll
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.wire import pool_to_pb
from tests.support.rank_host import AUX_BYTES, RankHost
from tests.support.transfer_peers import (
    SUCCESS,
    WRITE,
    DecodeClient,
    Memory,
    PrefillServer,
    Script,
    closed_in_the_end,
    receiver_of,
    said,
    sender_of,
)
from tests.support.waiting import wait_until

ROOMS = iter(range(50_000, 10_000_000))
Dial = Callable[..., DecodeClient]
Serve = Callable[[Script], PrefillServer]


@pytest.fixture(scope="module")
def verifying_prefill() -> Iterator[RankHost]:
    host = RankHost("V", "PREFILL", {"verify": True})
    host.fill(3)
    yield host
    assert host.rank.transfer.errors == 0
    host.close(1.0)


@pytest.fixture(scope="module")
def verifying_decode() -> Iterator[RankHost]:
    host = RankHost("VD", "DECODE", {"verify": True})
    yield host
    assert host.rank.transfer.errors == 0
    host.close(1.0)


@pytest.fixture
def serve(prefill: RankHost, memory: Memory) -> Iterator[Serve]:
    registry = prefill.rank.address
    with closed_in_the_end(lambda script: PrefillServer(script, registry, memory.pool)) as make:
        yield make


def crc(host: RankHost, page: int) -> int:
    found = 0
    for layer in host.memory:
        found = zlib.crc32(layer[page].tobytes(), found)
    return found


def test_success_brings_the_crc_of_each_page_in_the_order_of_the_destination(
    verifying_prefill: RankHost, dial: Dial
) -> None:
    client = dial(verifying_prefill).open(verify=True)
    welcome = client.kept[0].welcome
    assert welcome.verify and [pool.name for pool in welcome.pools] == ["kv"]
    assert not any(region.address for region in welcome.pools[0].regions)
    room = next(ROOMS)
    sender = sender_of(verifying_prefill, room)
    sender.init(3, 0)
    sender.send([4], slice(2, 3))
    sender.send([7, 5], slice(0, 2))
    client.write(room, [30, 10, 20])
    entry = client.ended(room)
    assert entry.state == SUCCESS
    expected = np.array([crc(verifying_prefill, page) for page in (7, 5, 4)], "<u4")
    assert entry.page_checksums == expected.tobytes()


def test_nothing_is_said_to_a_decode_that_did_not_ask_nor_by_a_prefill_that_does_not_verify(
    verifying_prefill: RankHost, prefill: RankHost, dial: Dial
) -> None:
    for host, hello in ((verifying_prefill, {}), (prefill, {"verify": True})):
        client = dial(host).open(**hello)
        assert not client.kept[0].welcome.verify and not client.kept[0].welcome.pools
        room = next(ROOMS)
        sender = sender_of(host, room)
        sender.init(1, 0)
        sender.send([4])
        client.write(room, [30])
        assert client.ended(room).page_checksums == b""


def answers(checksums: bytes, memory: Memory) -> Script:
    """A prefill that writes nothing, and says that it wrote what has these checksums."""

    def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[pb.SessionResponse]:
        yield server.welcome(verify=True, pools=[pool_to_pb(memory.pool.without_addresses())])
        for request in requests:
            for room in request.rooms:
                if room.want == WRITE:
                    yield said(room.room, SUCCESS, page_checksums=checksums, aux=bytes(AUX_BYTES))

    return script


def test_other_bytes_are_checksum_mismatch(verifying_decode: RankHost, serve: Serve, memory: Memory) -> None:
    wrong = np.array([crc(verifying_decode, 5), crc(verifying_decode, 6) ^ 1], "<u4").tobytes()
    server = serve(answers(wrong, memory))
    receiver = receiver_of(verifying_decode, server.bootstrap, next(ROOMS))
    receiver.init([5, 6], 0)
    wait_until(lambda: receiver.poll() is KVPoll.Failed)
    failure = receiver.failure
    assert failure.reason is Reason.CHECKSUM_MISMATCH
    assert (failure.metadata["pool"], failure.metadata["page"], failure.metadata["position"]) == ("kv", "6", "1")
    assert failure.metadata["actual"] == f"{crc(verifying_decode, 6):08x}"
    wait_until(lambda: receiver.release_safe)


def test_the_right_ones_are_success(verifying_decode: RankHost, serve: Serve, memory: Memory) -> None:
    right = np.array([crc(verifying_decode, 5), crc(verifying_decode, 6)], "<u4").tobytes()
    server = serve(answers(right, memory))
    receiver = receiver_of(verifying_decode, server.bootstrap, next(ROOMS))
    receiver.init([5, 6], 0)
    wait_until(lambda: receiver.poll() is KVPoll.Success)


def test_a_comparison_that_gets_no_thread_fails_its_room_and_nothing_else(
    serve: Serve, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room waited for its deadline, and the process was unhealthy from then on."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with contextlib.closing(RankHost("VT", "DECODE", {"verify": True})) as host:
        right = np.array([crc(host, 5), crc(host, 6)], "<u4").tobytes()
        server = serve(answers(right, memory))
        with monkeypatch.context() as full:
            full.setattr(LoopThread.shared().loop, "run_in_executor", refuse)
            receiver = receiver_of(host, server.bootstrap, next(ROOMS))
            receiver.init([5, 6], 0)
            wait_until(lambda: receiver.poll() is KVPoll.Failed)
        assert receiver.failure.reason is Reason.INTERNAL
        assert LoopThread.shared().healthy
        receiver = receiver_of(host, server.bootstrap, next(ROOMS))
        receiver.init([5, 6], 0)
        wait_until(lambda: receiver.poll() is KVPoll.Success)


@pytest.mark.parametrize("checksums", [b"", b"1234567", b"1234" * 3])
def test_another_number_of_them_is_invalid_request(
    verifying_decode: RankHost, serve: Serve, memory: Memory, checksums: bytes
) -> None:
    server = serve(answers(checksums, memory))
    receiver = receiver_of(verifying_decode, server.bootstrap, next(ROOMS))
    receiver.init([5, 6], 0)
    wait_until(lambda: receiver.poll() is KVPoll.Failed)
    assert receiver.failure.reason is Reason.INVALID_REQUEST
    assert receiver.failure.metadata["field"] == "page_checksums"


def test_pools_that_would_read_beyond_ours_are_refused(
    verifying_decode: RankHost, serve: Serve, memory: Memory
) -> None:
    theirs = pool_to_pb(memory.pool.without_addresses())
    for region in theirs.regions:
        region.page_bytes *= 4096
        region.page_stride_bytes *= 4096

    def script(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[pb.SessionResponse]:
        yield server.welcome(verify=True, pools=[theirs])
        yield from (pb.SessionResponse() for _ in requests)

    receiver = receiver_of(verifying_decode, serve(script).bootstrap, next(ROOMS))
    receiver.init([5, 6], 0)
    wait_until(lambda: receiver.poll() is KVPoll.Failed)
    assert receiver.failure.reason is Reason.PARALLEL_LAYOUT_MISMATCH
    assert receiver.failure.metadata["mismatchedFields"] == "pools[0].regions[0].page_bytes"
