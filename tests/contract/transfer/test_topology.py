"""GetTopology and ``kvgrpc topology``: who owes what, of two layouts that nobody need run."""

from __future__ import annotations

import json

import click
import pytest

from kvgrpc.cli.main import command
from kvgrpc.client import SyncClient
from kvgrpc.errors import InvalidRequest, ParallelLayoutMismatch
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import transfer_service_pb2 as pb
from tests.support.rank_host import RankHost


def shape(tp: int, heads: int = 8, **more: object) -> pb.EngineShape:
    layout = common_pb2.Layout(dp=1, pp=1, cp=1, tp=tp)
    return pb.EngineShape(layout=layout, heads=heads, layers=4, **more)  # type: ignore[arg-type]  # keywords of a proto


def test_any_rank_answers_for_any_two_engines(prefill: RankHost, decode: RankHost) -> None:
    answers = []
    for host in (prefill, decode):
        with SyncClient(host.rank.address) as client:
            answers.append(client.get_topology(shape(4), shape(2)))
    assert answers[0] == answers[1]
    assert [(owed.prefill.tp, owed.decode.tp, owed.part.head_start, owed.part.head_count) for owed in answers[0]] == [
        (0, 0, 0, 2),
        (1, 0, 2, 2),
        (2, 1, 4, 2),
        (3, 1, 6, 2),
    ]
    assert [owed.part.aux for owed in answers[0]] == [True, False, True, False]
    assert {owed.descriptors_per_page for owed in answers[0]} == {4 * 16}


def test_what_does_not_fit_or_cannot_be_is_refused_with_the_field(prefill: RankHost) -> None:
    with SyncClient(prefill.rank.address) as client:
        with pytest.raises(ParallelLayoutMismatch) as mismatch:
            client.get_topology(shape(3), shape(2))
        assert mismatch.value.metadata["mismatchedFields"] == "layout.tp"
        with pytest.raises(ParallelLayoutMismatch) as heads:
            client.get_topology(shape(2, heads=4), shape(2))
        assert heads.value.metadata["mismatchedFields"] == "heads"
        with pytest.raises(InvalidRequest) as empty:
            client.get_topology(shape(0), shape(2))
        assert empty.value.metadata["field"] == "layout.tp"
        with pytest.raises(InvalidRequest):
            client.get_topology(shape(1), shape(1 << 20))
        with pytest.raises(InvalidRequest):
            client.get_topology(shape(1, page_tokens=1 << 30), shape(1, page_tokens=1 << 30))


def test_decode_context_parallel_ranks_get_their_tokens(prefill: RankHost) -> None:
    """Tokens that are dealt out are the heads of a plan: of each page a rank of 4 gets one run a row of 4 tokens."""
    shares = shape(4, heads=0, axes="tokens over 4")
    with SyncClient(prefill.rank.address) as client:
        owed = client.get_topology(shape(1, heads=0), shares)
        assert [(line.prefill.tp, line.decode.tp, line.part.layer_count) for line in owed] == [
            (0, tp, 4) for tp in range(4)
        ]
        assert {line.descriptors_per_page for line in owed} == {4 * 16 // 4}
        same = client.get_topology(shares, shares)
        assert [(line.prefill.tp, line.decode.tp, line.descriptors_per_page) for line in same] == [
            (tp, tp, 4) for tp in range(4)
        ]
        for wrong, field in (
            (shape(4, axes="tokens over 4"), "heads"),
            (shape(4, heads=0, axes="tokens over 3"), "axes"),
            (shape(4, heads=0, axes="tokens over 0"), "axes"),
            (shape(4, heads=0, axes="tokens over 4", page_tokens=6), "page_tokens"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                client.get_topology(wrong, wrong)
            assert refused.value.metadata["field"] == field


def test_the_command_asks_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    command(["topology", "--prefill", "tp=2", "--decode", "tp=1", "--mla", "--json"], standalone_mode=False)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["prefill"]["tp"], line["layerCount"], line["aux"]) for line in lines] == [
        (0, 32, True),
        (1, 0, False),
    ]
    command(["topology", "--prefill", "tp=2", "--decode", "tp=1"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "0 to 3" in shown and "4 to 7" in shown


def test_the_command_says_which_tokens_a_rank_gets(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["topology", "--prefill", "tp=1", "--decode", "tp=4,dcp=2", "--mla"]
    command([*sizes, "--json"], standalone_mode=False)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["decode"]["tp"], line["tokensAt"], line["tokensOver"]) for line in lines] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 0, 2),
        (3, 1, 2),
    ]
    command(sizes, standalone_mode=False)
    shown = capsys.readouterr().out
    assert "tokens" in shown and shown.count("token 0 of each 2") == shown.count("token 1 of each 2") == 2
    with pytest.raises(InvalidRequest, match=r"heads: must be 0 \(MLA\)"):
        command(sizes[:-1], standalone_mode=False)


def test_ranks_that_share_tokens_are_among_the_tensor_parallel_ones() -> None:
    with pytest.raises(click.BadParameter, match="dcp=3 does not divide tp=4"):
        command(["topology", "--prefill", "tp=1", "--decode", "tp=4,dcp=3", "--mla"], standalone_mode=False)
