"""Prefill ranks that welcome by a script, and may say nothing more or be another incarnation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvgrpc.errors import Reason
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import transfer_service_pb2 as pb
from tests.support.hostile.honest_pair import ROOMS
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import Memory, PrefillServer, closed_in_the_end, receiver_of
from tests.support.waiting import wait_until

Serve = Callable[..., PrefillServer]


def listens(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[pb.SessionResponse]:
    """Welcomes, and never says anything of a room again."""
    next(requests)
    yield server.welcome()
    yield from (pb.SessionResponse() for _ in requests)


def is_another(server: PrefillServer, requests: Iterator[pb.SessionRequest]) -> Iterator[pb.SessionResponse]:
    """What the next incarnation at the same address answers."""
    next(requests)
    failure = common_pb2.Failure(reason=Reason.STALE_EPOCH, message="that one is gone")  # type: ignore[arg-type]
    yield pb.SessionResponse(goodbye=pb.Goodbye(failure=failure))


@pytest.fixture
def serve(prefill: RankHost, memory: Memory) -> Iterator[Serve]:
    def make(script: Any = listens, address: str = "127.0.0.1:0") -> PrefillServer:
        return PrefillServer(script, prefill.rank.address, memory.pool, address)

    with closed_in_the_end(make) as making:
        yield making


def told_where_to_write(decode: RankHost, server: PrefillServer) -> Any:
    receiver = receiver_of(decode, server.bootstrap, next(ROOMS))
    receiver.init([10, 11], 3)
    wait_until(lambda: any(entry.want == pb.WANT_WRITE for each in server.heard for entry in each.rooms))
    return receiver
