"""Prefills that hang with pages which they may still write: the bound is each one's own, and the health says so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvgrpc.client import SyncClient
from kvgrpc.errors import Reason
from kvgrpc.transfer.protocol.types import Bounds
from tests.support.hostile.honest_pair import ROOMS, TIMING
from tests.support.hostile.scripted_prefill import Serve, is_another, serve, told_where_to_write
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import receiver_of
from tests.support.waiting import wait_until

__all__ = ["serve"]
TRANSFER = "kvgrpc.v1.TransferService"


@pytest.fixture
def small() -> Iterator[RankHost]:
    """Of two pages of one peer that wait for evidence it has enough."""
    host = RankHost("D3", "DECODE", {"timing": TIMING, "bounds": Bounds(held_pages=1)})
    yield host
    host.close(1.0)


def refused(decode: RankHost, bootstrap: str) -> bool:
    room = next(ROOMS)
    receiver = receiver_of(decode, bootstrap, room)
    # With a session that stands a receiver says WaitingForInput at once: only the loop thread knows of held pages.
    with SyncClient(decode.rank.address) as client:
        wait_until(lambda: receiver.ended or is_bound(client, room))
    failure: Any = receiver.failure
    receiver.abort()
    return failure is not None and failure.reason is Reason.PAGES_HELD


def is_bound(client: SyncClient, room: int) -> bool:
    """Whether the rank has told the room to its prefill, or is about to."""
    return any(row.room == room and row.parts for row in client.list_rooms())


def test_one_that_hangs_is_refused_alone_and_two_are_said_by_the_health(
    prefill: RankHost, small: RankHost, serve: Serve
) -> None:
    honest = f"{prefill.rank.address}/P"
    first, second = serve(), serve()
    with SyncClient(small.rank.address) as client:
        aborted = told_where_to_write(small, first)
        aborted.abort()
        assert refused(small, first.bootstrap) and not refused(small, honest)
        assert small.rank.transfer.healthy and client.health(TRANSFER) == "SERVING"
        other = told_where_to_write(small, second)
        other.abort()
        assert refused(small, honest)
        wait_until(lambda: client.health(TRANSFER) == "NOT_SERVING")
        first.close()  # a refused dial is proof, and its pages come back
        wait_until(lambda: aborted.release_safe)
        assert not refused(small, honest)
        wait_until(lambda: client.health(TRANSFER) == "SERVING")
        second.close()
        serve(is_another, second.address)
        wait_until(lambda: other.release_safe)
