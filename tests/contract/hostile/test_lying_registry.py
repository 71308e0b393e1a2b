"""A registry that only a request named, and that says what no engine can be: its rooms fail, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvgrpc.errors import Reason
from kvgrpc.transfer import KVPoll
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import registry_service_pb2 as pb
from tests.support.hostile.honest_pair import ROOMS
from tests.support.rank_host import RankHost
from tests.support.transfer_peers import receiver_of
from tests.support.waiting import wait_until

SIZES = {"dp": 1, "pp": 1, "cp": 1, "tp": 1}
PREFILL = common_pb2.ROLE_PREFILL
Naming = Callable[[pb.Engine], str]


def engine(pools: Sequence[common_pb2.PagePool] = (), rows: int = 1, **sizes: int) -> pb.Engine:
    """Its rows are all of one rank, at an address where nobody listens."""
    layout = common_pb2.Layout(**{**SIZES, **sizes})
    ref = common_pb2.RankRef(rank=common_pb2.RankId(engine="L"), epoch=1)
    row = pb.RankRow(rank=ref, role=PREFILL, layout=layout, endpoints=pb.Endpoints(grpc="127.0.0.1:9"), pools=pools)
    return pb.Engine(name="L", role=PREFILL, layout=layout, ready=True, rows=[row] * rows, registered_ranks=1)


@pytest.fixture
def naming() -> Iterator[Naming]:
    """Serves registries, each of which knows one engine; gives the address by which a request names it."""
    servers: list[Any] = []

    def serve(engine: pb.Engine) -> str:
        server = grpc.server(ThreadPoolExecutor(2), options=(("grpc.so_reuseport", 0),))
        handler = grpc.unary_unary_rpc_method_handler(
            lambda request, context: pb.ResolveRanksResponse(engine=engine),
            request_deserializer=pb.ResolveRanksRequest.FromString,
            response_serializer=pb.ResolveRanksResponse.SerializeToString,
        )
        generic = grpc.method_handlers_generic_handler("kvgrpc.v1.RegistryService", {"ResolveRanks": handler})
        server.add_generic_rpc_handlers((generic,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}/L"

    yield serve
    for server in servers:
        server.stop(0).wait()


def field_of_failure(decode: RankHost, bootstrap: str) -> str:
    receiver = receiver_of(decode, bootstrap, next(ROOMS))
    wait_until(lambda: receiver.poll() is KVPoll.Failed)
    failure = receiver.failure
    assert failure is not None and failure.reason is Reason.INVALID_REQUEST, failure
    return str(failure.metadata["field"])


@pytest.mark.parametrize("size", [0, 2**32 - 1])
@pytest.mark.parametrize("axis", SIZES)
def test_a_layout_that_no_engine_has_fails_the_rooms_that_named_it(
    decode: RankHost, naming: Naming, axis: str, size: int
) -> None:
    """The rank was unhealthy from then on, the engine's thread got Python's words about a division, or all memory of
    the machine went into a list of ranks."""
    bootstrap = naming(engine((), 1, **{axis: size}))
    # What were remembered of the first answer, the engine's thread would compute with for the second room.
    assert [field_of_failure(decode, bootstrap) for _ in range(2)] == ["engine.layout"] * 2


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (engine(rows=100_000), "engine.rows"),
        (engine([common_pb2.PagePool(kind=common_pb2.POOL_KIND_KV)] * 65, pp=2), "engine.rows[0].pools"),
        (
            engine([common_pb2.PagePool(regions=[common_pb2.PoolRegion()] * 4_097)], pp=2),
            "engine.rows[0].pools.regions",
        ),
        (engine([common_pb2.PagePool(name="n" * 300_000)], pp=2), "engine.rows[0]"),
    ],
    ids=["rows", "pools", "regions", "bytes"],
)
def test_rows_and_pools_without_end_are_refused_before_they_are_looked_at(
    decode: RankHost, naming: Naming, said: pb.Engine, field: str
) -> None:
    """This is read on the loop that all sessions share: a million rows, or pools, took most of a minute of it."""
    assert field_of_failure(decode, naming(said)) == field


def test_pools_that_nobody_asked_for_are_not_read(decode: RankHost, naming: Naming) -> None:
    """Of an engine with as many stages as ours: its first rank is dialled, whatever its pools may be."""
    receiver = receiver_of(decode, naming(engine([common_pb2.PagePool(name="n" * 300_000)])), next(ROOMS))
    wait_until(lambda: receiver.poll() is KVPoll.Failed)
    assert receiver.failure.reason is Reason.PEER_LOST
