"""Ranks whose caches pull from each other, at a registry of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc.client import SyncClient
from kvgrpc.model import RankRef
from kvgrpc.prefetch.model import OperationKind
from kvgrpc.pull.model import Holder, PullConfig
from kvgrpc.pull.wire import identity_to_pb
from kvgrpc.server import IndexServer, RankConfig, RegistryServer
from kvgrpc.server.cache import peer as cache_peer
from kvgrpc.v1 import pull_service_pb2 as pb
from kvgrpc.v1.pull_service_pb2_grpc import PullServiceStub
from kvgrpc.wire import rank_ref_to_pb
from tests.support.cache_serving import LIMITS, CacheRank, open_cache_rank
from tests.support.secrets import bearer
from tests.support.waiting import wait_until

# A busy machine may send nothing for two seconds, which is the default.
PULL = PullConfig(staging_pages=16, answer_timeout=5.0, stall_timeout=8.0)
# Of what is lent to somebody who asked by hand.
ROOM = 2**61 + 7
PATIENT = replace(LIMITS, storage_timeout=20.0)


class PullFleet:
    """The ranks that it has opened close with it, those that came first last."""

    def __init__(self, path: Path) -> None:
        """``path``: a folder for their storage."""
        self._path = path
        self._registry = RegistryServer(["127.0.0.1:0"]).open()
        self.registry = self._registry.address
        self.ranks: list[CacheRank] = []

    def open(self, engine: str, storage: Any = None, **changes: Any) -> CacheRank:
        settings: dict[str, Any] = {"pull": PULL, "limits": PATIENT, **changes}
        rank = open_cache_rank(self._path, storage, engine=engine, registry=self.registry, **settings)
        self.ranks.append(rank)
        return rank

    def pair(self) -> tuple[CacheRank, CacheRank]:
        """A holder, and a taker that knows it."""
        holder, taker = self.open("holder"), self.open("taker")
        wait_until(lambda: bool(candidates_of(taker)))
        return holder, taker

    @contextlib.contextmanager
    def index(self) -> Iterator[SyncClient]:
        """A client of an index that follows these ranks."""
        server = IndexServer(["127.0.0.1:0"], registry=self.registry).open()
        try:
            with SyncClient(server.address) as client:
                yield client
        finally:
            server.close()

    def close(self) -> None:
        for rank in reversed(self.ranks):
            rank.close()
        self._registry.close()


def peer_of(rank: CacheRank) -> Any:
    return rank.rank._parts.cache_peer


def candidates_of(taker: CacheRank) -> list[Holder]:
    """The holders that this taker would ask."""
    return list(peer_of(taker)._holders.candidates())


def forms_of(rank: CacheRank) -> frozenset[int]:
    """What a rank says to indexes of its pages."""
    load = rank.rank.load.now()
    assert load is not None
    return frozenset(load.page_forms)


def lend(holder: CacheRank, hashes: list[str], taker: RankRef, name: str = "") -> int:
    """How many of these pages the holder lends in ROOM to whoever says to be this rank."""
    request = pb.LendPagesRequest(
        identity=identity_to_pb(holder.manager.keys.identity),
        page_hashes=[bytes.fromhex(each) for each in hashes],
        room=ROOM,
        taker=rank_ref_to_pb(taker),
    )
    with grpc.insecure_channel(holder.address) as channel:
        metadata = (("authorization", bearer(name, holder.address)),) if name else ()
        return int(PullServiceStub(channel).LendPages(request, timeout=10.0, metadata=metadata).lent_pages)


def pulled(rank: CacheRank, hashes: list[str]) -> Any:
    """What became of a prefetch of these pages."""
    operation = rank.start(OperationKind.PREFETCH, hashes)
    assert operation.wait(30.0)
    return rank.manager.controller.book.row(operation)


def staging_of(rank: CacheRank) -> Any:
    return peer_of(rank)._staging


def nothing_is_lent(rank: CacheRank) -> bool:
    return bool(staging_of(rank).lending.taken == 0 and rank.manager.host.table.counts()["read"] == 0)


def all_is_back(*ranks: CacheRank) -> bool:
    """Nothing is lent, and no page waits for what is taken."""
    return all(nothing_is_lent(rank) and staging_of(rank).landing.taken == 0 for rank in ranks)


@contextlib.contextmanager
def planes_of_caches(around: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """The data planes for pulls of ranks that open meanwhile, each as ``around`` makes it."""
    planes: list[Any] = []
    plain = cache_peer._plane_like

    def opened(config: RankConfig) -> Any:
        planes.append(around(plain(config)))
        return planes[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_peer, "_plane_like", opened)
        yield planes
