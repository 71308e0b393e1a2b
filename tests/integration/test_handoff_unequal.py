"""Engines with other tensor-parallel sizes: real ranks, real bytes, over shared memory and over Mooncake."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from kvgrpc.client import SyncClient
from kvgrpc.model import Attention, Layout, ModelIdentity
from kvgrpc.observability.metrics import REGISTRY
from kvgrpc.server import RankConfig, RegistryServer
from kvgrpc.v1 import transfer_service_pb2 as pb
from tests.support.rank_host import LAYERS, RankHost
from tests.support.waiting import wait_until

TOKENS, HEADS, DIM = 16, 8, 16
SUCCESS, FAILED, WAITING = 4, 0, 2
AXES = "token,head,dim"
LATENT = ModelIdentity("latent", attention=Attention.MLA)
GATHER = RankConfig.__dataclass_fields__["gather_bytes"].default
Open = Callable[..., list[RankHost]]
NEEDS_MOONCAKE = pytest.mark.skipif(not find_spec("mooncake"), reason="install kvgrpc[mooncake-cpu] for it")


@pytest.fixture
def registry() -> Iterator[str]:
    server = RegistryServer(["127.0.0.1:0"]).open()
    yield server.address
    server.close()


@pytest.fixture
def engine(registry: str) -> Iterator[Open]:
    opened: list[RankHost] = []

    def open_engine(
        name: str, role: str, tp: int, *, heads: int = HEADS, axes: str = "token,head,dim", cp: int = 1,
        tokens: int = TOKENS, shares: bool = False, **more: Any,
    ) -> list[RankHost]:  # fmt: skip
        """``heads`` 0: of latents. ``shares``: each rank has every so many-th token of them."""
        ranks = []
        for at_cp, at_tp in itertools.product(range(cp), range(tp)):
            pool: dict[str, Any] = {"page_tokens": tokens}
            page_bytes = tokens * DIM
            if heads:
                held = max(heads // tp, 1)
                pool |= {"heads_total": heads, "head_start": at_tp * heads // tp, "head_count": held, "axes": axes}
                page_bytes *= held
            elif shares:
                pool |= {"axes": f"tokens over {tp}", "head_start": at_tp, "head_count": 1}
                page_bytes //= tp
            else:
                pool["axes"] = "token,dim"
            settings = {"registry": registry, "layout": Layout(tp=tp, cp=cp), "tp": at_tp, "cp": at_cp, **more}
            if role == "DECODE":
                settings["bootstrap_allow"] = ("127.0.0.1",)
            ranks.append(
                RankHost(name, role, {"pool": pool, "page_bytes": page_bytes, "check_pages": True, **settings})
            )
        opened.extend(ranks)
        return ranks

    yield open_engine
    for host in reversed(opened):
        host.close(2.0)


@pytest.fixture
def staged(engine: Open) -> Callable[..., list[RankHost]]:
    """An engine of several stages, each with its share of the layers."""

    def open_staged(
        name: str, role: str, layout: Layout, layers: Sequence[tuple[int, int]] | None = None, data_plane: str = "shm"
    ) -> list[RankHost]:
        share = LAYERS // layout.pp
        stages = layers or [(pp * share, share) for pp in range(layout.pp)]
        return [
            rank
            for pp, held in enumerate(stages)
            for rank in engine(
                name, role, layout.tp, axes=AXES, layout=layout, pp=pp, layers=held, data_plane=data_plane
            )
        ]

    return open_staged


def cache_of(ranks: Sequence[RankHost], axes: str, pages: Sequence[int]) -> Any:
    """What an engine holds of these pages: [layers, pages, tokens, heads, dim]."""
    parts = []
    for rank in ranks:
        layers = rank.memory.shape[0]
        held = rank.memory.shape[2] // (TOKENS * DIM)
        order = (TOKENS, held, DIM) if axes.startswith("token") else (held, TOKENS, DIM)
        part = rank.memory[:, list(pages)].reshape(layers, len(pages), *order)
        parts.append(part if axes.startswith("token") else part.swapaxes(2, 3))
    return np.concatenate(parts, axis=3)


def hand_off(prefill: Sequence[RankHost], decode: Sequence[RankHost], registry: str, room: int) -> None:
    """Prefill's pages 3 to 8 become decode's pages 10 to 15, on every rank of both."""
    for rank in decode:
        rank.receive(room, registry, range(10, 16), aux_row=2)
    for rank in prefill:
        rank.send(room, range(3, 9), aux_row=1, chunk=2)
    for rank in decode:
        assert rank.wait("receivers", [room], [SUCCESS, FAILED])[room][0] == SUCCESS, rank.failure_of("receivers", room)
    for rank in prefill:
        assert rank.wait("senders", [room], [SUCCESS, FAILED])[room][0] == SUCCESS, rank.failure_of("senders", room)


@pytest.mark.parametrize("axes", ["token,head,dim", "head,token,dim"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (4, 2), (2, 4), (2, 2)])
def test_heads_arrive_where_they_belong(
    engine: Open, registry: str, prefill_tp: int, decode_tp: int, axes: str
) -> None:
    prefill = engine("P", "PREFILL", prefill_tp, axes=axes)
    decode = engine("D", "DECODE", decode_tp, axes=axes)
    for number, rank in enumerate(prefill):
        rank.fill(number)
        rank.aux[:] = prefill[0].aux
    before = cache_of(decode, axes, [0, 9, 16])
    for room in (1, 2):
        hand_off(prefill, decode, registry, room)
        assert (cache_of(prefill, axes, range(3, 9)) == cache_of(decode, axes, range(10, 16))).all()
        for rank in decode:
            assert rank.aux_row(2) == prefill[0].aux_row(1)
        for rank in decode:
            rank.memory[:, 10:16] = 0
    assert (cache_of(decode, axes, [0, 9, 16]) == before).all()


def tokens_of(ranks: Sequence[RankHost], axes: str, pages: Sequence[int], size: int) -> Any:
    """[layers, tokens, heads, bytes of one] of these pages, of ``size`` tokens each."""
    parts = []
    for rank in ranks:
        held = rank.memory.shape[2] // (size * DIM)
        order = (size, held, DIM) if axes.startswith("token") else (held, size, DIM)
        part = rank.memory[:, list(pages)].reshape(len(rank.memory), len(pages), *order)
        part = part if axes.startswith("token") else part.swapaxes(2, 3)
        parts.append(part.reshape(len(part), -1, held, DIM))
    return np.concatenate(parts, axis=2)


@pytest.mark.parametrize("data_plane", ["shm", pytest.param("mooncake", marks=NEEDS_MOONCAKE)])
@pytest.mark.parametrize("axes", ["token,head,kv,dim", "head,token,kv,dim"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
def test_two_pages_of_prefill_fill_one_of_decode(
    engine: Open, registry: str, prefill_tp: int, decode_tp: int, axes: str, data_plane: str
) -> None:
    """Of a prompt of five pages, in chunks of two: decode's third has room left, which nobody writes."""
    prefill = engine("P", "PREFILL", prefill_tp, axes=axes, data_plane=data_plane)
    decode = engine("D", "DECODE", decode_tp, axes=axes, tokens=2 * TOKENS, data_plane=data_plane)
    for number, rank in enumerate(prefill):
        rank.fill(number)
    others = [page for page in range(decode[0].memory.shape[1]) if page not in (12, 10, 15)]
    for rank in decode:
        rank.receive(1, registry, (12, 10, 15), aux_row=2)
    for rank in prefill:
        rank.send(1, (7, 3, 4, 9, 5), aux_row=1, chunk=2)
    for rank in decode:
        assert rank.wait("receivers", [1], [SUCCESS, FAILED])[1][0] == SUCCESS, rank.failure_of("receivers", 1)
        assert rank.receivers[1, 0].pages_done == 3
    for rank in prefill:
        assert rank.wait("senders", [1], [SUCCESS, FAILED])[1][0] == SUCCESS, rank.failure_of("senders", 1)
        assert rank.senders[1, 0].pages_done == 5
    sent, found = tokens_of(prefill, axes, (7, 3, 4, 9, 5), TOKENS), tokens_of(decode, axes, (12, 10, 15), 2 * TOKENS)
    assert (found[:, : 5 * TOKENS] == sent).all()
    assert not found[:, 5 * TOKENS :].any() and not tokens_of(decode, axes, others, 2 * TOKENS).any()


def test_pages_of_two_sizes_are_not_compared_by_checksums(engine: Open, registry: str) -> None:
    (prefill,) = engine("P", "PREFILL", 1, axes="token,head,kv,dim", verify=True)
    (decode,) = engine("D", "DECODE", 1, axes="token,head,kv,dim", tokens=2 * TOKENS, verify=True)
    decode.receive(1, registry, (1,))
    prefill.send(1, (1, 2))
    assert decode.wait("receivers", [1], [SUCCESS, FAILED])[1][0] == FAILED
    failure = decode.failure_of("receivers", 1)
    assert failure is not None and failure[0] == "PARALLEL_LAYOUT_MISMATCH"
    assert "pools[0].page_tokens: prefill 16, verify, decode 32, verify" in failure[1]


def test_a_room_of_two_decode_ranks_is_one_at_prefill_with_its_stages(engine: Open, registry: str) -> None:
    """Its sender's times were nobody's: each decode rank has a handle of its own, and these know none."""

    def counted() -> list[float]:
        stages = [
            REGISTRY.get_sample_value("kvgrpc_hand_off_stage_seconds_count", {"role": "prefill", "stage": stage})
            for stage in ("bootstrap", "wait", "transfer")
        ]
        ended = {"role": "prefill", "outcome": "success", "reason": ""}
        return [value or 0.0 for value in (*stages, REGISTRY.get_sample_value("kvgrpc_rooms_ended_total", ended))]

    prefill, decode = engine("P", "PREFILL", 1), engine("D", "DECODE", 2)
    before = counted()
    hand_off(prefill, decode, registry, 1)
    wait_until(lambda: [now - count for now, count in zip(counted(), before, strict=True)] == [1, 1, 1, 1])


def test_an_operator_sees_and_ends_a_room_of_which_one_decode_rank_has_all(engine: Open, registry: str) -> None:
    """Once the first rank had forgotten it, it was in no table, and neither abort nor cancel reached the second."""
    (prefill,) = engine("P", "PREFILL", 1, slow_seconds={1: 60.0})
    decode = engine("D", "DECODE", 2)
    for rank in decode:
        rank.receive(1, registry, range(10, 16))
    transfer: Any = prefill.rank.transfer
    wait_until(lambda: sorted(key.place for key in transfer.core.rooms) == [0, 1])
    prefill.send(1, range(3, 9))
    with SyncClient(prefill.rank.address) as client:
        wait_until(lambda: [key.place for key in transfer.core.rooms] == [1])
        (listed,) = client.list_rooms()
        assert (listed.room, listed.state, listed.local_handle) == (1, pb.ROOM_STATE_TRANSFERRING, True)
        assert (client.get_room(1).pages, len(listed.parts)) == (6, 2)
        client.cancel_room(1, cause="stuck")
        wait_until(lambda: prefill.failure_of("senders", 1) is not None)
        wait_until(lambda: any(rank.failure_of("receivers", 1) is not None for rank in decode))
        wait_until(lambda: client.get_room(1).state == pb.ROOM_STATE_FAILED)


@pytest.mark.parametrize("axes", ["token,head,dim", "head,token,dim"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_slices_of_heads_are_compared_by_what_of_a_page_each_rank_sent(
    engine: Open, registry: str, prefill_tp: int, decode_tp: int, axes: str
) -> None:
    prefill = engine("P", "PREFILL", prefill_tp, axes=axes, verify=True)
    decode = engine("D", "DECODE", decode_tp, axes=axes, verify=True)
    for number, rank in enumerate(prefill):
        rank.fill(number)
        rank.aux[:] = prefill[0].aux
    hand_off(prefill, decode, registry, 1)
    assert all(pair.verify for rank in decode for pair in rank.rank.transfer.core.pairs.values())


# Which attention it is one of both says, or each.
SAY = pytest.mark.parametrize(
    ("prefill_model", "decode_model"),
    [(LATENT, LATENT), (LATENT, ModelIdentity("latent")), (ModelIdentity("latent"), LATENT)],
    ids=["both", "prefill", "decode"],
)


@SAY
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_a_verified_latent_cache_needs_nothing_of_those_who_owe_nothing(
    engine: Open,
    registry: str,
    prefill_tp: int,
    decode_tp: int,
    prefill_model: ModelIdentity,
    decode_model: ModelIdentity,
) -> None:
    prefill = engine("P", "PREFILL", prefill_tp, heads=0, model=prefill_model, verify=True)
    decode = engine("D", "DECODE", decode_tp, heads=0, model=decode_model, verify=True)
    for rank in prefill:
        rank.fill(1)
    hand_off(prefill, decode, registry, 1)
    assert all(pair.verify for rank in decode for pair in rank.rank.transfer.core.pairs.values())


@SAY
def test_shares_of_tokens_are_compared_by_the_tokens_that_each_rank_gets(
    engine: Open, registry: str, prefill_model: ModelIdentity, decode_model: ModelIdentity
) -> None:
    """Of the second room a bit flips on its way to one of the ranks."""
    (prefill,) = engine("P", "PREFILL", 1, heads=0, model=prefill_model, verify=True, corrupts=(6,))
    decode = engine("D", "DECODE", 2, heads=0, shares=True, model=decode_model, verify=True)
    prefill.fill(1)
    hand_off([prefill], decode, registry, 1)
    tokens = prefill.memory[:, 3:9].reshape(LAYERS, 6, TOKENS, DIM)
    for tp, rank in enumerate(decode):
        assert (rank.memory[:, 10:16].reshape(LAYERS, 6, TOKENS // 2, DIM) == tokens[:, :, tp::2]).all()
    for rank in decode:
        rank.receive(2, registry, range(10, 16), aux_row=2)
    prefill.send(2, range(3, 9), aux_row=1)
    ends = [rank.wait("receivers", [2], [SUCCESS, FAILED])[2][0] for rank in decode]
    assert sorted(ends) == [FAILED, SUCCESS]
    failure = decode[ends.index(FAILED)].failure_of("receivers", 2)
    assert failure is not None and failure[0] == "CHECKSUM_MISMATCH"


def writes() -> float:
    """Of all ranks over Mooncake in this process."""
    return REGISTRY.get_sample_value("kvgrpc_data_plane_descriptors_total", {"data_plane": "mooncake"}) or 0.0


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "gather_bytes", "writes_a_page"), [(2, 1, GATHER, 16), (1, 2, GATHER, 1), (1, 2, 0, 16)]
)
def test_over_mooncake_too(
    engine: Open, registry: str, prefill_tp: int, decode_tp: int, gather_bytes: int, writes_a_page: int
) -> None:
    """Where prefill is the smaller one, the tokens of a page are gathered, and a page is a write a layer and rank."""
    pytest.importorskip("mooncake")
    prefill = engine("P", "PREFILL", prefill_tp, data_plane="mooncake", gather_bytes=gather_bytes)
    decode = engine("D", "DECODE", decode_tp, data_plane="mooncake")
    for number, rank in enumerate(prefill):
        rank.fill(number)
        rank.aux[:] = prefill[0].aux
    before, outside = writes(), cache_of(decode, AXES, [0, 9, 16])
    hand_off(prefill, decode, registry, 1)
    assert (cache_of(prefill, AXES, range(3, 9)) == cache_of(decode, AXES, range(10, 16))).all()
    assert (cache_of(decode, AXES, [0, 9, 16]) == outside).all()
    assert 6 * LAYERS * writes_a_page <= writes() - before <= 2 * 6 * LAYERS * writes_a_page


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_a_latent_cache_is_sent_once_to_each_decode_rank(
    engine: Open, registry: str, prefill_tp: int, decode_tp: int
) -> None:
    """MLA: every rank holds all of it. A prefill rank that owes nothing ends with the others."""
    prefill = engine("P", "PREFILL", prefill_tp, heads=0, model=LATENT)
    decode = engine("D", "DECODE", decode_tp, heads=0, model=LATENT)
    for rank in prefill:
        rank.fill(7)
    hand_off(prefill, decode, registry, 1)
    for rank in decode:
        assert (rank.memory[:, 10:16] == prefill[0].memory[:, 3:9]).all()
    sent = [rank.rank.transfer.bytes_written for rank in prefill]
    assert sent == [decode_tp * 6 * LAYERS * TOKENS * DIM, *[0] * (prefill_tp - 1)]


@pytest.mark.parametrize(
    ("prefill_layout", "decode_layout"),
    [
        (Layout(pp=2), Layout()),
        (Layout(), Layout(pp=2)),
        (Layout(pp=2, tp=2), Layout()),
        (Layout(), Layout(pp=2, tp=2)),
        (Layout(pp=2), Layout(tp=2)),
    ],
)
@pytest.mark.parametrize("data_plane", ["shm", pytest.param("mooncake", marks=NEEDS_MOONCAKE)])
def test_layers_arrive_where_they_belong(
    registry: str,
    prefill_layout: Layout,
    decode_layout: Layout,
    staged: Callable[..., list[RankHost]],
    data_plane: str,
) -> None:
    prefill = staged("P", "PREFILL", prefill_layout, data_plane=data_plane)
    decode = staged("D", "DECODE", decode_layout, data_plane=data_plane)
    for number, rank in enumerate(prefill):
        rank.fill(number)
        rank.aux[:] = prefill[0].aux
    hand_off(prefill, decode, registry, 1)
    sent, came = (
        np.concatenate(
            [
                cache_of(ranks[at : at + tp], AXES, pages) for at in range(0, len(ranks), tp)
            ],  # one stage after the other
            axis=0,
        )
        for ranks, tp, pages in (
            (prefill, prefill_layout.tp, range(3, 9)),
            (decode, decode_layout.tp, range(10, 16)),
        )
    )
    assert (sent == came).all()
    assert all(rank.aux_row(2) == prefill[0].aux_row(1) for rank in decode)


def test_stages_whose_layers_do_not_fit_are_refused(registry: str, staged: Callable[..., list[RankHost]]) -> None:
    staged("P", "PREFILL", Layout(pp=2), layers=[(0, 1), (1, 2)])
    (decode,) = staged("D", "DECODE", Layout())
    decode.receive(1, registry, range(3))
    decode.wait("receivers", [1], [FAILED])
    failure = decode.failure_of("receivers", 1)
    assert failure is not None and failure[2]["mismatchedFields"] == "layers", failure


def test_a_decode_stage_of_whose_layers_prefill_has_none_is_refused(
    registry: str, staged: Callable[..., list[RankHost]]
) -> None:
    staged("P", "PREFILL", Layout(), layers=[(0, 1)])
    decode = staged("D", "DECODE", Layout(pp=2), layers=[(0, 2), (2, 2)])[1]
    decode.receive(1, registry, range(3))
    decode.wait("receivers", [1], [FAILED])
    failure = decode.failure_of("receivers", 1)
    assert failure is not None and failure[2]["mismatchedFields"] == "pools[0].layers", failure


def test_of_context_parallel_prefill_ranks_the_first_sends_and_all_end(engine: Open, registry: str) -> None:
    prefill, decode = engine("P", "PREFILL", 1, cp=2), engine("D", "DECODE", 1)
    for rank in prefill:
        rank.fill(7)
    hand_off(prefill, decode, registry, 1)
    assert (decode[0].memory[:, 10:16] == prefill[0].memory[:, 3:9]).all()
    assert prefill[1].rank.transfer.bytes_written == 0


def test_engines_of_one_shape_and_different_models_never_exchange_a_page(engine: Open, registry: str) -> None:
    prefill = engine("P", "PREFILL", 1, model=ModelIdentity("llama", "v1", "bfloat16", Attention.MHA))
    decode = engine("D", "DECODE", 1, model=ModelIdentity("llama", "v2", "bfloat16", Attention.MHA))
    prefill[0].fill(1)
    decode[0].receive(1, registry, range(3))
    prefill[0].send(1, range(3))
    decode[0].wait("receivers", [1], [FAILED])
    failure = decode[0].failure_of("receivers", 1)
    assert failure is not None
    assert (failure[0], failure[2]["mismatchedFields"]) == ("PARALLEL_LAYOUT_MISMATCH", "model.revision")
    assert failure[2]["model.revision"] == "v1 != v2"
    assert not decode[0].memory.any()
