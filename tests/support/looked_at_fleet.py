"""A fleet for whoever looks at it: a room on its way, one that failed, and a rank that is dead but not forgotten."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvgrpc.server import RegistryServer
from tests.support.rank_host import RankHost, RankProcess
from tests.support.waiting import wait_until


@contextlib.contextmanager
def looked_at_fleet(half: int, lonely: int, why: str, with_dead: bool = True) -> Iterator[str]:
    """The address of its registry. Prefill P and decode D have 7 of 8 pages of room ``half``; ``lonely`` was given up
    for the reason ``why``; prefill X (``with_dead``) was killed: each look at all ranks waits for it."""
    server = RegistryServer(["127.0.0.1:0"], lease_ttl=600.0).open()
    prefill = RankHost("P", "PREFILL", {"registry": server.address})
    decode = RankHost("D", "DECODE", {"registry": server.address})
    dead = RankProcess("X", "PREFILL", registry=server.address).opened() if with_dead else None
    prefill.fill(1)
    decode.receive(half, f"{server.address}/P", range(8))
    prefill.send(half, range(8, 15), last=False)
    decode.wait("receivers", [half], [3])
    decode.receive(lonely, f"{server.address}/P", range(8, 12))
    decode.receivers[lonely, 0].abort(why)
    wait_until(lambda: decode.receivers[lonely, 0].ended)
    if dead is not None:
        dead.kill()
    yield server.address
    decode.close(2.0)
    prefill.close(2.0)
    server.close()
