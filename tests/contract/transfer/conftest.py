"""The ranks that the tests of TransferService talk to, and what talks to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import grpc
import pytest

from kvgrpc.transfer.protocol.types import Timing
from kvgrpc.transfer.runtime.prefill_manager import PrefillManager
from kvgrpc.v1.transfer_service_pb2_grpc import TransferServiceStub
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import (
    DecodeClient,
    Memory,
    closed_in_the_end,
    memory,
)

__all__ = ["memory"]

# Idle timeout 1 s, a break 0.5 s, ended records 1 s.
TIMING = Timing(
    tick_seconds=0.05, heartbeat=4, welcome_within=10, idle_timeout=20, settle=4, abandon_dial=10, ended_record=20
)
Dial = Callable[..., DecodeClient]


@pytest.fixture(scope="module")
def prefill() -> Iterator[RankHost]:
    host = RankHost("P", "PREFILL", {"registry": "embedded"})
    host.fill(1)
    yield host
    assert host.rank.transfer.errors == 0
    host.close(1.0)


@pytest.fixture(scope="module")
def hasty() -> Iterator[RankHost]:
    """A prefill whose idle timeout is a second. A Hello may take longer: a busy machine brings one too late else."""
    host = RankHost("H", "PREFILL", {"timing": TIMING})
    with mock.patch.object(PrefillManager, "_hello_within", 20.0):
        yield host
    assert host.rank.transfer.errors == 0
    host.close(1.0)


@pytest.fixture(scope="module")
def decode() -> Iterator[RankHost]:
    host = RankHost("D", "DECODE", {})
    yield host
    assert host.rank.transfer.errors == 0
    host.close(1.0)


@pytest.fixture
def dial(memory: Memory) -> Iterator[Dial]:
    """Makes decode clients, and closes them."""
    with closed_in_the_end(lambda host, **named: DecodeClient(host, memory, **named)) as make:
        yield make


@pytest.fixture
def stub_of() -> Iterator[Callable[[RankHost], Any]]:
    with closed_in_the_end(lambda host: grpc.insecure_channel(host.rank.address)) as channel:
        yield lambda host: TransferServiceStub(channel(host))
