"""Pulls among ranks: a lent room is its taker's, what a holder says is checked, and no page is out for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvgrpc.errors import Reason
from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.pull.model import Holder, PullConfig
from kvgrpc.pull.wire import identity_to_pb
from kvgrpc.rpc.loop import LoopThread
from kvgrpc.rpc.security import ServerSecurity
from kvgrpc.transfer import KVReceiver
from kvgrpc.transfer.protocol.types import KVPoll
from kvgrpc.v1 import pull_service_pb2 as pb
from kvgrpc.v1.pull_service_pb2_grpc import PullServiceStub
from tests.support.cache_serving import CacheRank, hashes_of, prompt
from tests.support.pull_fleet import PATIENT, ROOM, PullFleet, candidates_of, lend, nothing_is_lent, peer_of, pulled
from tests.support.secrets import bearer, proof, tokens_of
from tests.support.waiting import wait_until


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[PullFleet]:
    with closing(PullFleet(tmp_path)) as opened:
        yield opened


def opened_by(taker: CacheRank, holder: CacheRank, pages: int) -> KVReceiver:
    """The room that was lent, as a rank opens it that knows its number."""
    peer = peer_of(taker)
    sessions = peer_of(holder).address
    peer._holders._remember(Holder("holder", holder.address, sessions), holder.rank.ref, Layout())
    receiver = KVReceiver(peer._landings.managers[0], sessions, ROOM, prefill_dp_rank=0)
    receiver.init(peer._staging.landing.take(pages))
    receiver.wait(10.0)
    return receiver


def test_a_lent_room_is_opened_by_its_taker_alone(fleet: PullFleet) -> None:
    holder, taker, thief = fleet.open("holder"), fleet.open("taker"), fleet.open("thief")
    hashes = hashes_of(prompt(3))
    holder.fill(hashes)
    assert lend(holder, hashes, taker.rank.ref) == 3
    stolen = opened_by(thief, holder, 3)
    assert stolen.failure is not None and stolen.failure.reason is Reason.ROOM_CONFLICT
    assert opened_by(taker, holder, 3).poll() is KVPoll.Success


def test_a_rank_is_told_its_own_pulls_alone(fleet: PullFleet) -> None:
    tokens = "rank holder:holder\nrank taker:taker\nrank thief:thief\nrank:any\noperator boss:boss"
    security = {"server_security": ServerSecurity(tokens=tokens_of(tokens)), "client_security": proof("holder")}
    holder = fleet.open("holder", **security)
    hashes = hashes_of(prompt(3))
    holder.fill(hashes)
    taker = RankRef(RankId("taker"), holder.rank.ref.epoch)
    assert lend(holder, hashes, taker, "taker") == 3
    with grpc.insecure_channel(holder.address) as channel:
        for name, expected in (("thief", []), *((each, [ROOM]) for each in ("taker", "holder", "any", "boss"))):
            metadata = (("authorization", bearer(name, holder.address)),)
            answer = PullServiceStub(channel).ListPulls(pb.ListPullsRequest(), timeout=10.0, metadata=metadata)
            assert [row.room for row in answer.pulls] == expected, name


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("_layout", Layout(0, 0, 0, 0)),
        ("_layout", Layout(tp=2**20)),
        ("_ref", RankRef(RankId("somebody"), 1)),
        ("_ref", RankRef(RankId("holder", tp=1), 1)),
        ("_ref", RankRef(RankId("holder"), 0)),
    ],
)
def test_a_holder_that_says_to_be_another_or_of_any_size_is_not_believed(
    fleet: PullFleet, attribute: str, value: Any
) -> None:
    holder, taker = fleet.pair()
    hashes = hashes_of(prompt(4))
    holder.fill(hashes)
    setattr(peer_of(holder).servicer, attribute, value)
    assert pulled(taker, hashes).completed == 0
    assert not peer_of(taker).book.rows() and not peer_of(taker)._holders._known
    assert peer_of(taker)._staging.landing.taken == 0


def test_nobody_puts_other_pages_under_a_prompt_that_somebody_else_had_counted(
    fleet: PullFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has heard of a prompt's last page asks, between its question and its order, for other pages before it."""
    holder, taker = fleet.pair()
    wanted, others = hashes_of(prompt(4)), hashes_of(prompt(3, first=7))
    for hashes in (wanted, others):
        holder.fill(hashes)
    poison = pb.CountPagesRequest(
        identity=identity_to_pb(holder.manager.keys.identity),
        page_hashes=[bytes.fromhex(each) for each in (*others, wanted[-1])],
    )
    holders = peer_of(taker)._holders
    real = holders.lend

    async def poisoned(*arguments: Any) -> Any:
        stub = PullServiceStub(holders._channels.get(holder.address))
        for name in (b"", b"x" * 32):
            poison.prompt_name = name
            assert (await stub.CountPages(poison, timeout=10.0)).host_pages == 3
        return await real(*arguments)

    monkeypatch.setattr(holders, "lend", poisoned)
    assert pulled(taker, wanted).completed == 4
    taker.assert_bytes(wanted)


def test_a_loop_that_is_late_costs_no_landing_page(fleet: PullFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = fleet.open("holder")
    taker = fleet.open("taker", limits=replace(PATIENT, storage_timeout=1.0))
    wait_until(lambda: bool(candidates_of(taker)), 10.0)
    hashes = hashes_of(prompt(4))
    holder.fill(hashes)
    asked: list[Any] = []

    async def never(*arguments: Any) -> None:
        asked.append(arguments)
        await asyncio.Event().wait()

    monkeypatch.setattr(peer_of(taker)._holders, "lend", never)
    assert pulled(taker, hashes).completed == 0
    assert asked
    wait_until(lambda: peer_of(taker)._staging.landing.taken == 0, 5.0)


def test_a_loan_that_nobody_settles_any_more_gives_its_pages_back(fleet: PullFleet) -> None:
    holder = fleet.open("holder")
    hashes = hashes_of(prompt(3))
    holder.fill(hashes)
    assert lend(holder, hashes, holder.rank.ref) == 3

    async def cancel() -> None:
        (task,) = (each for each in asyncio.all_tasks() if each.get_name() == f"loan {ROOM}")
        task.cancel()

    LoopThread.shared().run(cancel(), 5.0)
    wait_until(lambda: nothing_is_lent(holder), 5.0)
    assert not peer_of(holder)._lender._lent_to
    assert not peer_of(holder).book.rows(open_only=True)


def test_the_memory_of_a_copy_that_runs_outlives_the_close(fleet: PullFleet) -> None:
    rank = fleet.open("holder", pull=PullConfig(staging_pages=16))
    peer = peer_of(rank)
    with peer._staging._copying() as may:
        assert may
        closed = rank.rank.close(1.0)
        assert not peer.plane.closed
        assert closed.listening and not closed.drained, "whoever closes is told that its memory is not free yet"
    assert not peer._staging.copy_out([0], [((0, 1),)])
    assert not rank.rank.close(5.0).listening
    assert peer.plane.closed


def test_who_asks_for_a_loan_by_anothers_room_takes_neither_its_pages_nor_its_row(fleet: PullFleet) -> None:
    holder = fleet.open("holder")
    hashes = hashes_of(prompt(3))
    holder.fill(hashes)
    assert lend(holder, hashes, holder.rank.ref) == 3
    with contextlib.suppress(grpc.RpcError):
        lend(holder, hashes, holder.rank.ref)
    wait_until(lambda: [row.lent for row in peer_of(holder).book.rows(open_only=True)] == [3])
    wait_until(lambda: nothing_is_lent(holder), 30.0)
    assert not peer_of(holder)._lender._lent_to
    assert not peer_of(holder).book.rows(open_only=True)
