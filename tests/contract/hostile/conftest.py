"""Honest ranks that must not notice what the tests beside do to them, and the peers that do it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from kvgrpc.transfer import KVPoll
from tests.support.hostile.honest_pair import ROOMS, TIMING
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import (
    DecodeClient,
    Memory,
    PrefillServer,
    Script,
    closed_in_the_end,
    core_of,
    memory,
    receiver_of,
)
from tests.support.waiting import wait_until

__all__ = ["memory"]

# The room of the honest pair waits for as long as a test takes: on a busy machine one of eight callers took longer than
# the 150 s that a sender had to come, and it was the room that failed.
PATIENT = replace(TIMING, room_deadline=36_000, unclaimed=36_000)
Dial = Callable[..., DecodeClient]
Serve = Callable[[Script], PrefillServer]


@pytest.fixture(scope="module")
def prefill() -> Iterator[RankHost]:
    host = RankHost("P", "PREFILL", {"registry": "embedded", "timing": PATIENT})
    host.fill(1)
    yield host
    host.close(1.0)


@pytest.fixture(scope="module")
def decode() -> Iterator[RankHost]:
    host = RankHost("D", "DECODE", {"timing": PATIENT})
    yield host
    host.close(1.0)


@pytest.fixture(autouse=True)
def nobody_else_notices(prefill: RankHost, decode: RankHost, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Around every test: a hand-off between honest ranks goes on, nothing was a bug, and nothing stays."""
    room = next(ROOMS)
    receiver = receiver_of(decode, f"{prefill.rank.address}/P", room)
    wait_until(lambda: receiver.poll() is KVPoll.WaitingForInput)
    yield
    receiver.init([1, 2, 3], 1)
    prefill.send(room, [4, 5, 6], aux_row=2)
    wait_until(lambda: receiver.poll() >= KVPoll.Success or receiver.failure is not None)
    assert receiver.failure is None
    assert np.array_equal(decode.memory[:, 1:4], prefill.memory[:, 4:7])
    assert decode.aux_row(1) == prefill.aux_row(2)
    for host in (prefill, decode):
        assert host.rank.healthy
        assert cast(Any, host.rank.transfer).errors == 0
    # The library says itself what is no message; what a hostile peer sent last may be read only now.
    ours = [record for record in caplog.records if record.name != "grpc._common"]
    assert [record.getMessage() for record in ours if record.levelno >= logging.ERROR] == []


@pytest.fixture
def dial(prefill: RankHost, memory: Memory) -> Iterator[Dial]:
    with closed_in_the_end(lambda **named: DecodeClient(prefill, memory, **named)) as make:
        yield make


@pytest.fixture
def serve(prefill: RankHost, memory: Memory) -> Iterator[Serve]:
    """Makes prefill ranks that answer by a script, and closes them."""
    with closed_in_the_end(lambda script: PrefillServer(script, prefill.rank.address, memory.pool)) as make:
        yield make


@pytest.fixture(scope="module", autouse=True)
def nothing_of_all_this_stays(prefill: RankHost, decode: RankHost) -> Iterator[None]:
    """Around each file: what strangers named is forgotten in the end, and so are they."""
    yield
    wait_until(lambda: len(core_of(prefill).pairs) <= 1)
    wait_until(lambda: len(core_of(prefill).rooms) <= 1)
    wait_until(lambda: len(core_of(decode).pairs) <= 1)
    wait_until(lambda: len(core_of(decode).rooms) <= 1)
    transfer = cast(Any, prefill.rank.transfer)
    wait_until(lambda: len(transfer._sessions) <= 1)  # the call of a session ends after its pair was forgotten
    assert core_of(prefill).open_writes == 0
    assert decode.rank.transfer.held_pages == 0
