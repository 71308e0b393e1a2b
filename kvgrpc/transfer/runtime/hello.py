"""The Hello of a decode: read, bounded, and compared with this prefill rank before it is believed (1, opening)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgrpc.dataplane.base import MAX_ADDRESS_BYTES
from kvgrpc.errors import InvalidRequest, WrongRank
from kvgrpc.model import MAX_REGIONS, Layout, Pool, RankRef, check_pools, check_rank
from kvgrpc.rpc.callers import check_speaker
from kvgrpc.transfer import wire
from kvgrpc.transfer.layout import topology
from kvgrpc.transfer.runtime.manager import TransferConfig
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import transfer_service_pb2 as pb
from kvgrpc.wire import layout_from_pb, model_from_pb, pool_from_pb, rank_ref_from_pb

MOST_POOLS, MOST_AUX_BUFFERS = 64, 256
# Of one replica, that name a room to one prefill rank: each has a record of every such room.
MOST_DECODE_RANKS = 256


@dataclass(frozen=True, slots=True)
class DecodeHello:
    """A Hello that fits this rank. ``part``: what we owe the decode rank; ``place``: which of the ``places`` ranks of
    its engine that name each room to us it is. ``max_frame_bytes``, ``verify``: as both sides take it. ``parts``: how
    many of our pages fill one of its own."""

    ref: RankRef
    to: RankRef
    stream: int
    layout: Layout
    pools: tuple[Pool, ...]
    data_plane_address: bytes
    part: topology.Part
    place: int
    places: int
    max_frame_bytes: int
    verify: bool
    parts: int


def read_hello(first: pb.SessionRequest, config: TransferConfig, shape: topology.Shape, row_bytes: int) -> DecodeHello:
    """The Hello that ``first`` has to be, for the rank of ``shape`` whose aux rows have ``row_bytes``.

    Raises InvalidRequest, IdentityMismatch, WrongRank, and ParallelLayoutMismatch where both sides do not fit. What was
    meant for another incarnation is not compared: the core refuses it.
    """
    if not first.HasField("hello"):
        raise InvalidRequest.of("hello", "absent", "in the first message")
    wire.check_frame(first, config.max_frame_bytes)
    hello = first.hello
    _check_sizes(hello, row_bytes)
    ref, layout = rank_ref_from_pb(hello.opener), layout_from_pb(hello.layout)
    check_rank(ref, layout, "hello.opener")
    check_speaker(ref, config.opener_role, "hello.opener")
    places = topology.decode_ranks_of(config.layout, layout)
    if places > MOST_DECODE_RANKS:
        raise InvalidRequest.of("hello.layout", layout, f"at most {MOST_DECODE_RANKS} ranks that one of ours writes to")
    pools = tuple(pool_from_pb(pool, f"hello.pools[{index}]") for index, pool in enumerate(hello.pools))
    check_pools(pools, "hello.pools")
    me, to = config.ref, rank_ref_from_pb(hello.to)
    if to.rank != me.rank:
        raise WrongRank(f"{to.rank} was meant, {me.rank} is here", metadata={"expected": to.rank, "actual": me.rank})
    part, parts = topology.NOTHING, 1
    verify = config.verify and hello.verify
    if to == me:
        aux, model = tuple(hello.aux_item_bytes), model_from_pb(hello.model)
        part = _part(shape, topology.Shape(ref.rank, layout, pools, aux, hello.data_plane, model), hello)
        parts = topology.parts_of_pages(shape.pools, pools)
        if verify and parts > 1:
            tokens = [f"{side[0].page_tokens}, verify" for side in (shape.pools, pools)]
            raise topology.mismatch({"pools[0].page_tokens": (tokens[0], tokens[1])})
    return DecodeHello(
        ref,
        to,
        hello.stream,
        layout,
        pools,
        hello.data_plane_address,
        part,
        topology.place_of(ref.rank, config.layout, layout),
        places,
        min(config.max_frame_bytes, hello.max_frame_bytes or 2**63),
        verify,
        parts,
    )


def _part(ours: topology.Shape, decode: topology.Shape, hello: pb.Hello) -> topology.Part:
    """Returns what we owe it. Raises ParallelLayoutMismatch, also where it expects something else."""
    part, expected = topology.owed_part(ours, decode), wire.part_from_pb(hello.expected)
    if part != expected:
        raise topology.mismatch({"part": (part, expected)})
    return part


def check_pool_sizes(pools: Sequence[common_pb2.PagePool], path: str) -> None:
    """Raises InvalidRequest for more pools or regions than a rank may have, before any of them is looked at."""
    if len(pools) > MOST_POOLS:
        raise InvalidRequest.of(path, len(pools), f"at most {MOST_POOLS}")
    regions = sum(len(pool.regions) for pool in pools)
    if regions > MAX_REGIONS:
        raise InvalidRequest.of(f"{path}.regions", regions, f"at most {MAX_REGIONS}")


def _check_sizes(hello: pb.Hello, row_bytes: int) -> None:
    """Bounds before anything is looked at: this runs on the loop that all sessions share."""
    check_pool_sizes(hello.pools, "hello.pools")
    for field, size, limit in (
        ("aux_item_bytes", len(hello.aux_item_bytes), MOST_AUX_BUFFERS),
        ("waiting_rooms", len(hello.waiting_rooms), wire.MOST_WAITING_ROOMS),
        ("data_plane_address", len(hello.data_plane_address), MAX_ADDRESS_BYTES),
    ):
        if size > limit:
            raise InvalidRequest.of(f"hello.{field}", size, f"at most {limit}")
    least = wire.smallest_frame(row_bytes)
    if 0 < hello.max_frame_bytes < least:
        rule = f"at least {least}, which the end of a room with its aux takes; or absent"
        raise InvalidRequest.of("hello.max_frame_bytes", hello.max_frame_bytes, rule)
