"""Pulls between real ranks: pages that one host cache has reach another one, with the right bytes or not at all."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvgrpc.cli.main import main
from kvgrpc.model import Layout, RankId, RankRef
from kvgrpc.observability.metrics import REGISTRY
from kvgrpc.prefetch.model import OperationKind, OperationState
from kvgrpc.pull.lending import lender, servicer
from kvgrpc.pull.model import PullConfig, PullDirection
from kvgrpc.pull.staging import Staging
from kvgrpc.pull.taking.taker import Taker
from kvgrpc.pull.wire import identity_to_pb
from kvgrpc.rpc.status import error_from
from kvgrpc.v1 import pull_service_pb2 as pb
from kvgrpc.v1.pull_service_pb2_grpc import PullServiceStub
from kvgrpc.wire import rank_ref_to_pb
from tests.support.cache_serving import LIMITS, SHAPE, CacheRank, hashes_of, prompt
from tests.support.pull_fleet import PATIENT, PullFleet, candidates_of, nothing_is_lent, peer_of, pulled
from tests.support.waiting import wait_until


def counted() -> Any:
    """Rooms that ended well and their bytes, lent and then taken."""
    return np.array(
        [
            REGISTRY.get_sample_value(name, {"direction": direction, **more}) or 0
            for direction in ("lent", "taken")
            for name, more in (("kvgrpc_pulls_total", {"end": "OK"}), ("kvgrpc_pulled_bytes_total", {}))
        ]
    )


def test_pages_of_another_engine_arrive_with_the_same_bytes(fleet: PullFleet) -> None:
    """More of them than may be lent at a time, so in several rooms."""
    holder, taker = fleet.pair()
    hashes = hashes_of(prompt(20))
    holder.fill(hashes)
    before = counted()
    row = pulled(taker, hashes)
    assert (row.state, row.completed) == (OperationState.DONE, 20)
    taker.assert_bytes(hashes)
    wait_until(lambda: nothing_is_lent(holder), 10.0)
    taken = peer_of(taker).book.rows()
    assert sum(each.done for each in taken) == 20 and not any(each.failure for each in taken)
    assert {each.direction for each in peer_of(holder).book.rows()} == {PullDirection.LENT}
    rooms, nbytes = len(taken), 20 * SHAPE.page_bytes
    assert (counted() - before).tolist() == [rooms, nbytes, rooms, nbytes], "by the metrics of this process"


def test_a_pull_waits_for_a_hand_off_that_is_being_written(fleet: PullFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "GIVES_WAY_SECONDS", 60.0)
    patient = PullConfig(staging_pages=16, answer_timeout=60.0, stall_timeout=60.0)
    holder, taker = (
        fleet.open(name, pull=patient, limits=replace(LIMITS, storage_timeout=60.0)) for name in ("holder", "taker")
    )
    wait_until(lambda: bool(candidates_of(taker)))
    hashes = hashes_of(prompt(4))
    holder.fill(hashes)
    looks, writes = list[bool](), [True]

    def hands_off() -> bool:
        looks.append(writes[0])
        return writes[0]

    monkeypatch.setattr(peer_of(holder).servicer, "_hands_off", hands_off)
    operation = taker.start(OperationKind.PREFETCH, hashes)
    wait_until(lambda: len(looks) > 3, 20.0)
    assert not peer_of(holder).book.rows()
    writes[0] = False
    assert operation.wait(60.0)
    taker.assert_bytes(hashes)
    assert not looks[-1] and [row.lent for row in peer_of(holder).book.rows()] == [4]


def test_a_hand_off_that_hangs_costs_pulls_the_size_of_their_batches(
    fleet: PullFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "PIECE_BYTES", 2 * SHAPE.page_bytes)
    holder, taker = fleet.pair()
    hashes = hashes_of(prompt(7))
    holder.fill(hashes)
    records: Any = holder.rank.transfer.core._records
    records.open_writes += 1
    assert pulled(taker, hashes).completed == 7
    records.open_writes -= 1
    taker.assert_bytes(hashes)
    assert max(row.lent for row in peer_of(holder).book.rows()) == 2


def in_pieces(fleet: PullFleet, monkeypatch: pytest.MonkeyPatch) -> tuple[CacheRank, list[str]]:
    """A taker that takes 12 pages of a holder as one batch, in pieces of three."""
    limits = replace(PATIENT, batch_pages=12)
    holder, taker = (
        fleet.open(name, pull=PullConfig(staging_pages=64, stall_timeout=8.0), limits=limits)
        for name in ("holder", "taker")
    )
    wait_until(lambda: bool(candidates_of(taker)))
    hashes = hashes_of(prompt(12))
    holder.fill(hashes)
    monkeypatch.setattr(Taker, "piece_bytes", 3 * SHAPE.page_bytes)
    return taker, hashes


def test_a_piece_is_on_its_way_while_the_one_before_it_is_copied(
    fleet: PullFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    taker, hashes = in_pieces(fleet, monkeypatch)
    copy, open_then = Staging.copy_out, list[int]()

    def looks(staging: Staging, *arguments: Any) -> bool:
        open_then.append(len(peer_of(taker).book.rows(open_only=True)))
        return copy(staging, *arguments)

    monkeypatch.setattr(Staging, "copy_out", looks)
    assert pulled(taker, hashes).completed == 12
    taker.assert_bytes(hashes)
    assert open_then == [2, 2, 2, 1] and {row.lent for row in peer_of(taker).book.rows()} == {3}


def test_a_piece_behind_one_that_did_not_come_is_given_up_with_it(
    fleet: PullFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = staging_pages()
    taker, hashes = in_pieces(fleet, monkeypatch)
    copy, copied = Staging.copy_out, list[int]()

    def only_one(staging: Staging, pages: Any, *others: Any) -> bool:
        copied.append(len(pages))
        return len(copied) == 1 and copy(staging, pages, *others)

    monkeypatch.setattr(Staging, "copy_out", only_one)
    row = pulled(taker, hashes)
    assert (row.state, row.completed, copied) == (OperationState.PARTIAL, 3, [3, 3])
    taker.assert_bytes(hashes[:3])
    book = peer_of(taker).book
    assert [each.failure.message for each in book.rows() if each.failure] == [
        "it is not waited for: pages before it did not come"
    ]
    assert not book.rows(open_only=True)
    wait_until(lambda: (staging_pages() - before)[::2].tolist() == [0, 0], 20.0)


def staging_pages() -> np.ndarray[Any, Any]:
    """Lent, of how many, taken, of how many: by the metrics of this process."""
    names = ("kvgrpc_pull_pages", "kvgrpc_pull_pages_limit")
    asked = [(name, direction) for direction in ("lent", "taken") for name in names]
    return np.array([REGISTRY.get_sample_value(name, {"direction": direction}) or 0 for name, direction in asked])


def test_metrics_say_what_staging_memory_is_lent_and_taken(fleet: PullFleet) -> None:
    before = staging_pages()
    rank = fleet.open("holder")
    lending, landing = peer_of(rank)._staging.lending, peer_of(rank)._staging.landing
    lent, taken = lending.take(3), landing.take(2)
    assert (staging_pages() - before).tolist() == [3, 8, 2, 8]
    proven: list[bool] = []
    landing.retire(taken, lambda: bool(proven))
    lending.give_back(lent)
    assert (staging_pages() - before).tolist() == [0, 8, 2, 8], "a peer may still write to those that were taken"
    proven.append(True)
    assert (staging_pages() - before).tolist() == [0, 8, 0, 8]
    rank.close()
    assert (staging_pages() - before).tolist() == [0, 0, 0, 0]


def test_the_pages_behind_those_that_the_taker_has_are_pulled(fleet: PullFleet) -> None:
    holder, taker = fleet.pair()
    hashes = hashes_of(prompt(12))
    holder.fill(hashes)
    taker.fill(hashes[:5])
    row = pulled(taker, hashes)
    assert (row.state, row.covered, row.completed) == (OperationState.DONE, 5, 12)
    taker.assert_bytes(hashes)
    assert sum(each.done for each in peer_of(taker).book.rows()) == 7


def test_a_lookup_counts_the_pages_of_others_behind_those_that_are_here(fleet: PullFleet) -> None:
    """Without what lies before them nobody knew them, and a router heard that a prefetch would bring nothing."""
    holder, taker = fleet.pair()
    hashes = hashes_of(prompt(12))
    holder.fill(hashes)
    taker.fill(hashes[:5])
    assert taker.manager.lookup(hashes, 5.0) == (0, 5, 12)


def test_what_the_holder_lacks_comes_from_storage(fleet: PullFleet, tmp_path: Path) -> None:
    holder = fleet.open("holder")
    taker = fleet.open("taker", "file")
    wait_until(lambda: bool(candidates_of(taker)))
    hashes = hashes_of(prompt(12))
    taker.store(hashes)
    holder.fill(hashes[:7])
    row = pulled(taker, hashes)
    assert (row.state, row.completed) == (OperationState.DONE, 12)
    taker.assert_bytes(hashes)
    assert sum(each.done for each in peer_of(taker).book.rows()) == 7


def test_pages_that_are_evicted_between_question_and_answer_are_a_partial_prefetch(fleet: PullFleet) -> None:
    holder, taker = fleet.pair()
    hashes = hashes_of(prompt(8))
    holder.fill(hashes)
    backend: Any = taker.rank._parts.peers
    keys, real, count = backend._connected

    def count_then_evict(hashes: Any, timeout: float, without: Any, only: Any = None) -> Any:
        answer = count(hashes, timeout, without, only)
        holder.evict()
        return answer

    backend.connect(keys, real, count_then_evict)
    row = pulled(taker, hashes)
    assert (row.state, row.completed) == (OperationState.FAILED, 0)
    assert taker.manager.host.table.counts()["reserved"] == 0


def test_a_prompt_that_nobody_has_is_declined(fleet: PullFleet) -> None:
    _, taker = fleet.pair()
    assert pulled(taker, hashes_of(prompt(8))).state is OperationState.DECLINED


def test_engines_of_another_model_are_not_asked(fleet: PullFleet) -> None:
    holder = fleet.open("holder", model="test/other")
    taker = fleet.open("taker")
    hashes = hashes_of(prompt(8))
    holder.fill(hashes)
    wait_until(lambda: bool(candidates_of(taker)))
    assert pulled(taker, hashes).state is OperationState.DECLINED
    assert peer_of(taker).book.rows() == []


def test_a_holder_that_closes_ends_a_pull_and_the_taker_goes_on(fleet: PullFleet) -> None:
    holder, taker = fleet.pair()
    hashes = hashes_of(prompt(20))
    holder.fill(hashes)
    assert pulled(taker, hashes[:4]).state is OperationState.DONE
    holder.close()
    fleet.ranks.remove(holder)
    began = time.monotonic()
    row = pulled(taker, hashes)
    assert row.state in (OperationState.DECLINED, OperationState.FAILED, OperationState.PARTIAL)
    assert time.monotonic() - began < 10.0
    assert taker.manager.host.table.counts()["reserved"] == 0
    taker.assert_bytes(hashes[:4])


def test_people_see_what_was_taken_and_lent(fleet: PullFleet, capsys: pytest.CaptureFixture[str]) -> None:
    holder, taker = fleet.pair()
    hashes = hashes_of(prompt(4))
    holder.fill(hashes)
    assert pulled(taker, hashes).state is OperationState.DONE
    for rank, way in ((holder, "lent"), (taker, "taken")):
        wait_until(lambda: not peer_of(holder).book.rows(open_only=True), 10.0)
        with pytest.raises(SystemExit) as ended:
            main(["pulls", "-s", rank.address])
        shown = capsys.readouterr().out
        assert ended.value.code in (0, None) and way in shown and "4/4" in shown and "ok" in shown


def refused(rank: CacheRank, **changes: Any) -> dict[str, str]:
    """What a LendPages with a wrong field is answered."""
    request = pb.LendPagesRequest(
        identity=identity_to_pb(rank.manager.keys.identity),
        page_hashes=[bytes(32)],
        room=7,
        taker=rank_ref_to_pb(rank.rank.ref),
    )
    for field, value in changes.items():
        owner: Any = request.identity if field in pb.PageIdentity.DESCRIPTOR.fields_by_name else request
        owner.ClearField(field)
        getattr(owner, field).extend(value) if isinstance(value, list) else setattr(owner, field, value)
    with grpc.insecure_channel(rank.address) as channel, pytest.raises(grpc.RpcError) as error:
        PullServiceStub(channel).LendPages(request, timeout=10.0)
    return dict(error_from(error.value).metadata)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": "another/model"}, "identity.model"),
        ({"revision": "abc"}, "identity.revision"),
        ({"dtype": "float64"}, "identity.dtype"),
        ({"layout": "of another engine"}, "identity.layout"),
        ({"tp_size": 2}, "identity.tp_size"),
        ({"tp_rank": 1, "tp_size": 2, "layout": "half of the heads"}, "identity.tp_size"),
        ({"pp_size": 2}, "identity.pp_size"),
        ({"cp_size": 2}, "identity.cp_size"),
        ({"page_tokens": 5}, "identity.page_tokens"),
        ({"room": 0}, "room"),
        ({"room": 2**63}, "room"),
        ({"first_page": 1}, "first_page"),
        ({"page_hashes": [b"short"]}, "page_hashes[0]"),
        ({"page_hashes": [bytes(32)] * 65_537}, "page_hashes"),
        ({"counted_prompt": b"short", "pages": 1}, "counted_prompt"),
        ({"counted_prompt": bytes(32), "pages": 0}, "pages"),
        ({"counted_prompt": bytes(32), "pages": 2, "first_page": 65_535}, "pages"),
    ],
)
def test_bad_input_is_refused_with_its_field(fleet: PullFleet, changes: dict[str, Any], field: str) -> None:
    assert refused(fleet.open("holder"), **changes)["field"] == field


def test_an_engine_of_another_tensor_parallel_size_is_refused_with_that_field_and_not_asked(
    fleet: PullFleet, caplog: pytest.LogCaptureFixture
) -> None:
    taker = fleet.open("taker")
    half = replace(
        SHAPE, components=tuple(replace(each, layer_bytes=each.layer_bytes // 2) for each in SHAPE.components)
    )
    two = fleet.open("two", layout=Layout(tp=2), shape=half)
    wait_until(lambda: "pages of two are not taken: INVALID_REQUEST: identity.tp_size" in caplog.text, 10.0)
    assert not candidates_of(taker) and not candidates_of(two)
    request = pb.CountPagesRequest(identity=identity_to_pb(two.manager.keys.identity), page_hashes=[bytes(32)])
    with grpc.insecure_channel(taker.address) as channel, pytest.raises(grpc.RpcError) as error:
        PullServiceStub(channel).CountPages(request, timeout=10.0)
    assert error_from(error.value).metadata["field"] == "identity.tp_size"


def test_a_room_that_nobody_opens_gives_its_pages_back(fleet: PullFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lender, "UNOPENED_SECONDS", 0.5)
    holder = fleet.open("holder")
    hashes = hashes_of(prompt(3))
    holder.fill(hashes)
    request = pb.LendPagesRequest(
        identity=identity_to_pb(holder.manager.keys.identity),
        page_hashes=[bytes.fromhex(each) for each in hashes],
        room=7,
        taker=rank_ref_to_pb(holder.rank.ref),
    )
    with grpc.insecure_channel(holder.address) as channel:
        assert PullServiceStub(channel).LendPages(request, timeout=10.0).lent_pages == 3
    assert peer_of(holder).book.rows(open_only=True)
    wait_until(lambda: nothing_is_lent(holder), 10.0)
    (row,) = peer_of(holder).book.rows()
    assert row.failure is not None and "nobody opened" in row.failure.message


def test_one_engine_has_at_most_half_of_what_may_be_lent(fleet: PullFleet) -> None:
    holder = fleet.open("holder")
    hashes = hashes_of(prompt(8))
    holder.fill(hashes)
    greedy, other = holder.rank.ref, RankRef(RankId("other"), holder.rank.ref.epoch)
    reads = reads_of(holder)

    def lend(stub: PullServiceStub, room: int, taker: RankRef) -> int:
        request = pb.LendPagesRequest(
            identity=identity_to_pb(holder.manager.keys.identity),
            page_hashes=[bytes.fromhex(each) for each in hashes],
            room=room,
            taker=rank_ref_to_pb(taker),
        )
        return stub.LendPages(request, timeout=10.0).lent_pages

    with grpc.insecure_channel(holder.address) as channel:
        stub = PullServiceStub(channel)
        assert lend(stub, 1, greedy) == 4
        for again in (greedy, RankRef(greedy.rank, 1), RankRef(greedy.rank._replace(dp=7), 1)):
            with pytest.raises(grpc.RpcError) as error:
                lend(stub, 2, again)
            assert error_from(error.value).retry_after is not None
        assert len(reads) == 1, "the cache is not read for those who get nothing"
        assert lend(stub, 3, other) == 4


def reads_of(rank: CacheRank) -> list[int]:
    """How many pages were wanted each time that a lender reads the cache, from now on."""
    cache, reads = peer_of(rank)._lender._cache, list[int]()

    class Counted:
        buffers = cache.buffers

        def reading(self, hashes: list[str], first: int) -> Any:
            reads.append(len(hashes) - first)
            return cache.reading(hashes, first)

    peer_of(rank)._lender._cache = Counted()
    return reads
