"""What an engine does wrong with its handles is refused at once, with the reason: none of it waits for a deadline."""

from __future__ import annotations

import gc
import itertools
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgrpc.client import SyncClient
from kvgrpc.errors import InvalidRequest, PeerUnreachable, Reason
from kvgrpc.model import Pool
from kvgrpc.server import KVPoll, KVReceiver, KVSender, open_decode, open_prefill
from kvgrpc.transfer.handle import TransferHandle
from tests.support.rank_host import RankHost
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
SECONDS = 10.0
ROOMS = itertools.count(601)
NEVER_CLOSED = """
from kvgrpc.dataplane import open_plane
from kvgrpc.model import Pool, PoolKind, Region, Role
from kvgrpc.server import RankConfig, open_prefill
plane = open_plane("shm")
pool = Pool("kv", PoolKind.KV, 16, 8, "uint8", (Region(0, "kv", plane.allocate(8 * 64), 64, 64),))
rank = open_prefill(RankConfig(engine="P", role=Role.PREFILL, pools=(pool,), data_plane=plane))
"""


@pytest.fixture
def sender(prefill: RankHost) -> Iterator[KVSender]:
    with KVSender(prefill.rank.transfer, room=next(ROOMS)) as sender:
        yield sender


@pytest.fixture
def receiver(prefill: RankHost, decode: RankHost) -> Iterator[KVReceiver]:
    with KVReceiver(decode.rank.transfer, bootstrap_addr=f"{prefill.rank.address}/P", room=next(ROOMS)) as receiver:
        yield receiver


def refused(handle: TransferHandle) -> tuple[str, str]:
    """Field and value, once the handle has failed."""
    assert handle.wait(SECONDS) is KVPoll.Failed
    failure = handle.failure
    assert failure is not None and failure.reason is Reason.INVALID_REQUEST
    return failure.metadata["field"], failure.metadata["value"]


def test_a_second_init_of_a_sender_is_refused(sender: KVSender) -> None:
    sender.init(4)
    sender.init(5)
    assert refused(sender) == ("init", "'a second call'")


def test_a_second_init_of_a_receiver_is_refused(receiver: KVReceiver) -> None:
    receiver.init(np.array([1], np.int32), 0)
    receiver.init(np.array([2], np.int32), 0)
    assert refused(receiver) == ("init", "'a second call'")


def test_a_send_before_init_is_refused(sender: KVSender) -> None:
    sender.send(np.array([1], np.int32))
    assert refused(sender) == ("send", "'before init'")


@contextmanager
def warned_once(match: str) -> Iterator[None]:
    with pytest.warns(ResourceWarning, match=match) as warnings:
        yield
        gc.collect()
    assert len(warnings) == 1


def test_a_sender_that_is_dropped_fails_its_room_at_both_sides(prefill: RankHost, decode: RankHost) -> None:
    room = next(ROOMS)
    with KVReceiver(decode.rank.transfer, bootstrap_addr=f"{prefill.rank.address}/P", room=room) as receiver:
        receiver.init(np.array([3], np.int32), 0)
        sender = KVSender(prefill.rank.transfer, room=room)
        sender.init(1, 0)
        with warned_once(f"KVSender of room {room} was dropped before its end"):
            del sender
        assert receiver.wait(SECONDS) is KVPoll.Failed
        assert receiver.failure is not None
        assert receiver.failure.reason is Reason.ROOM_CANCELLED
        assert receiver.failure.message == "the prefill engine dropped its handle"


def test_a_receiver_that_is_dropped_fails_its_room_at_both_sides(prefill: RankHost, decode: RankHost) -> None:
    room = next(ROOMS)
    with KVSender(prefill.rank.transfer, room=room) as sender:
        sender.init(1, 0)
        receiver = KVReceiver(decode.rank.transfer, bootstrap_addr=f"{prefill.rank.address}/P", room=room)
        receiver.init(np.array([4], np.int32), 0)
        with warned_once(f"KVReceiver of room {room} was dropped before its end"):
            del receiver
        assert sender.wait(SECONDS) is KVPoll.Failed
        assert sender.failure is not None and sender.failure.message == "the decode engine dropped its handle"


def test_a_handle_whose_room_has_ended_may_be_dropped(prefill: RankHost, recwarn: pytest.WarningsRecorder) -> None:
    sender = KVSender(prefill.rank.transfer, room=next(ROOMS))
    sender.abort()
    del sender
    gc.collect()
    assert [each for each in recwarn if each.category is ResourceWarning] == []


def test_a_handle_that_is_left_is_closed(prefill: RankHost) -> None:
    with KVSender(prefill.rank.transfer, room=next(ROOMS)) as sender:
        sender.init(1, 0)
    assert sender.failure is not None and sender.failure.reason is Reason.ROOM_CANCELLED


@pytest.mark.parametrize(("opening", "role"), [(open_prefill, "prefill"), (open_decode, "decode")])
async def test_a_rank_is_closed_beside_the_loop_that_left_it(
    prefill: RankHost, decode: RankHost, opening: Callable[..., object], role: str
) -> None:
    like = (prefill if role == "prefill" else decode).rank.config
    config = replace(like, engine="A", registry="", listen="127.0.0.1:0", metrics_listen="")
    async with opening(config) as rank:  # type: ignore[attr-defined]
        address = rank.address
        assert rank.healthy
    assert not rank.healthy
    with SyncClient(address, timeout=0.5) as client, pytest.raises(PeerUnreachable):
        client.health()


@pytest.mark.parametrize(("opening", "role"), [(open_prefill, "prefill"), (open_decode, "decode")])
def test_a_rank_that_is_dropped_is_said_and_closed_at_once(
    prefill: RankHost, decode: RankHost, opening: Callable[..., Any], role: str, caplog: pytest.LogCaptureFixture
) -> None:
    like = (prefill if role == "prefill" else decode).rank.config
    rank = opening(replace(like, engine="A", registry="", listen="127.0.0.1:0", metrics_listen=""))
    address, transfer = rank.address, rank.transfer
    with pytest.warns(ResourceWarning, match="rank A/dp0/pp0/cp0/tp0@.* was dropped, and not closed"):
        del rank
        gc.collect()
    wait_until(lambda: not is_bound(address), 30.0)
    assert not transfer.open_rooms()
    assert "keep what open_rank returns" in caplog.text


@pytest.mark.filterwarnings("error::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_rank_that_is_dropped_is_closed_where_warnings_are_errors(prefill: RankHost) -> None:
    like = replace(prefill.rank.config, engine="A", registry="", listen="127.0.0.1:0", metrics_listen="")
    rank = open_prefill(like)
    address = rank.address
    del rank
    gc.collect()
    wait_until(lambda: not is_bound(address), 30.0)


def is_bound(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    with socket.socket() as dialled:
        return dialled.connect_ex((host, int(port))) == 0


def test_a_rank_that_was_closed_may_be_dropped(prefill: RankHost, recwarn: pytest.WarningsRecorder) -> None:
    with open_prefill(replace(prefill.rank.config, engine="A", registry="", listen="127.0.0.1:0", metrics_listen="")):
        pass
    gc.collect()
    assert not any("dropped" in str(each.message) for each in recwarn)


def test_a_rank_that_nobody_closed_is_said_and_closed_at_the_end_of_the_process() -> None:
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", NEVER_CLOSED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0
    assert "ResourceWarning: <Rank P/dp0/pp0/cp0/tp0@" in done.stderr
    assert "was not closed before the end of the process" in done.stderr


def test_a_flat_array_is_no_pool() -> None:
    with pytest.raises(InvalidRequest) as flat:
        Pool.from_arrays([np.zeros(4096, np.uint8)], page_tokens=16)
    assert flat.value.metadata["field"] == "arrays[0, 'kv']"
    assert "pages first" in flat.value.metadata["rule"]
