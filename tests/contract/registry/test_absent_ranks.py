"""GetEngine says which ranks an engine lacks, and what became of each."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from kvgrpc.errors import StaleEpoch
from kvgrpc.v1 import registry_service_pb2 as pb
from kvgrpc.wire import rank_ref_to_pb
from tests.support.registry_builders import ranks, row
from tests.support.registry_serving import TP2, Served, failure


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = await Served().start()
    yield served
    await served.stop()


async def engine(served: Served) -> pb.Engine:
    return (await served.stub.GetEngine(pb.GetEngineRequest(engine="P"), timeout=10)).engine


async def test_one_that_deregistered_says_when_and_which_incarnation(served: Served) -> None:
    await served.register(*ranks(TP2, epoch=5))
    assert not (await engine(served)).absent_ranks
    before = time.time()
    gone = rank_ref_to_pb(row(tp=1, epoch=5).ref)
    await served.stub.Deregister(pb.DeregisterRequest(ranks=[gone]), timeout=10)
    found = await engine(served)
    (absent,) = found.absent_ranks
    assert (absent.rank, absent.absence) == (gone, pb.ABSENCE_DEREGISTERED)
    assert before - 0.001 <= absent.time.ToNanoseconds() / 1e9 <= time.time() + 0.001
    assert [each.tp for each in found.missing_ranks] == [1]
    listed = (await served.stub.ListEngines(pb.ListEnginesRequest(), timeout=10)).engines
    assert not listed[0].absent_ranks and not listed[0].missing_ranks


async def test_an_old_incarnation_that_asks_in_vain_is_why_its_rank_is_absent(served: Served) -> None:
    await served.register(*ranks(TP2, epoch=5))
    old, new = (row(tp=1, epoch=epoch, layout=TP2) for epoch in (4, 5))
    assert isinstance(await failure(served.register(old)), StaleEpoch)
    assert not (await engine(served)).absent_ranks  # its successor is there
    await served.stub.Deregister(pb.DeregisterRequest(ranks=[rank_ref_to_pb(new.ref)]), timeout=10)
    assert isinstance(await failure(served.register(old)), StaleEpoch)
    (absent,) = (await engine(served)).absent_ranks
    assert (absent.rank, absent.absence) == (rank_ref_to_pb(old.ref), pb.ABSENCE_FENCED)
    await served.register(new)
    assert not (await engine(served)).absent_ranks
