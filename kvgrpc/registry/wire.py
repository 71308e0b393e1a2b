"""registry_service.proto <-> model, and nothing else. Decoders raise InvalidRequest or AddressNotAllowed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from google.protobuf.message import Message

from kvgrpc import wire
from kvgrpc.errors import InvalidRequest, Violation
from kvgrpc.model import (
    ENGINE_NAME,
    MAX_ENGINE_RANKS,
    MAX_REGIONS,
    Layout,
    Pool,
    RankRef,
    Role,
    check_pools,
    check_rank,
    raise_if,
)
from kvgrpc.registry.addresses import check_advertised, check_events_endpoint
from kvgrpc.registry.model import (
    MAX_LABELS,
    AbsentRank,
    Endpoints,
    EngineFilter,
    Lease,
    RankRow,
    RankSelector,
    ResolvedEngine,
    wrong_labels,
)
from kvgrpc.v1 import common_pb2
from kvgrpc.v1 import registry_service_pb2 as pb

MAX_ROWS_PER_REQUEST = 1_024
MAX_LEASES_PER_REQUEST = 65_536
MAX_SELECTORS = 256
MAX_ROW_BYTES = 256 * 1024
MAX_POOLS = 64
# Of all pools that are kept to be met again: 32 bytes each, and as many of their message.
MAX_CACHED_REGIONS = 262_144

_Key = TypeVar("_Key")


class PoolCache:
    """Makes equal pools one object, and their bytes too; holds at most ``size`` of them, and ``regions`` in all of them
    together; the least used goes first.

    The ranks of an engine have few distinct pool shapes with hundreds of regions each: without this, decoding and
    keeping them would be nearly all that a registry of 10,000 ranks does. Not thread-safe.
    """

    def __init__(self, size: int = 1_024, regions: int = MAX_CACHED_REGIONS) -> None:
        self._by_bytes = _LastUsed[bytes](size, regions)
        self._encoded = _LastUsed[int](size, regions)

    def decode(self, message: common_pb2.PagePool, path: str) -> Pool:
        """The checked shape of a pool, without addresses, which it takes out of the message."""
        key = _shape_of(message)
        known = self._by_bytes.get(key)
        if known is not None:
            return self._keep(key, known[0])
        pool = wire.pool_from_pb(message, path, addresses=False)
        _check_pool(pool, path)
        return self._keep(key, pool)

    def read(self, message: common_pb2.PagePool, path: str) -> Iterator[None]:
        """Yields behind each piece of the work of ``decode``, which has little left to do then."""
        key = _shape_of(message)
        yield
        if self._by_bytes.get(key) is None:
            pool = yield from wire.pool_in_pieces(message, path, addresses=False)
            yield
            _check_pool(pool, path)
            self._keep(key, pool)
            yield

    def _keep(self, key: bytes, pool: Pool) -> Pool:
        self._by_bytes.keep(key, pool, key)
        self._encoded.keep(id(pool), pool, key)
        return pool

    def encode(self, pool: Pool) -> bytes:
        """A PagePool without addresses."""
        known = self._encoded.get(id(pool))
        # The entry holds the pool itself, so its id cannot be another object's while it is here.
        raw = wire.pool_to_pb(pool.without_addresses()).SerializeToString() if known is None else known[1]
        self._encoded.keep(id(pool), pool, raw)
        return raw


class _LastUsed(Generic[_Key]):
    """Pools with their bytes, as many as fit: the last one kept does in any case."""

    def __init__(self, size: int, regions: int) -> None:
        self._size = size
        self._regions_left = regions
        self._kept: OrderedDict[_Key, tuple[Pool, bytes]] = OrderedDict()

    def get(self, key: _Key) -> tuple[Pool, bytes] | None:
        return self._kept.get(key)

    def keep(self, key: _Key, pool: Pool, raw: bytes) -> None:
        if key not in self._kept:
            self._kept[key] = pool, raw
            self._regions_left -= len(pool.regions)
        self._kept.move_to_end(key)
        while len(self._kept) > self._size or (self._regions_left < 0 and len(self._kept) > 1):
            _, (oldest, _) = self._kept.popitem(last=False)
            self._regions_left += len(oldest.regions)


def row_to_pb(row: RankRow, pools: PoolCache | None) -> pb.RankRow:
    """``pools`` None: the row without its pools."""
    return pb.RankRow.FromString(row_to_bytes(row, pools))


def row_to_bytes(row: RankRow, pools: PoolCache | None) -> bytes:
    """The row, encoded. What is large of it, its pools, is copied as bytes: as messages they would be copied region
    by region into each message around them."""
    message = pb.RankRow(
        rank=wire.rank_ref_to_pb(row.ref),
        role=common_pb2.Role.ValueType(row.role),
        endpoints=pb.Endpoints(grpc=row.endpoints.grpc, events_pub=row.endpoints.events_pub, cache=row.endpoints.cache),
        layout=wire.layout_to_pb(row.layout),
        data_plane=row.data_plane,
        engine_selects_dp=row.engine_selects_dp,
        model=wire.model_to_pb(row.model),
        serves_events=row.serves_events,
        labels=dict(row.labels),
    ).SerializeToString(deterministic=True)
    return message + joined(pb.RankRow, "pools", () if pools is None else map(pools.encode, row.pools))


def joined(kind: type[Message], field: str, parts: Iterable[bytes]) -> bytes:
    """Encoded messages as the field of a message around them, to be appended to the bytes of its other fields."""
    tag = kind.DESCRIPTOR.fields_by_name[field].number << 3 | 2
    return b"".join(piece for part in parts for piece in (_varint(tag), _varint(len(part)), part))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def row_from_pb(message: pb.RankRow, pools: PoolCache | None, path: str = "row") -> RankRow:
    """Decodes a row that a registry sent; whoever dials its addresses may trust their syntax no further than that.
    ``pools`` None: the row without its pools."""
    read = (
        ()
        if pools is None
        else tuple(pools.decode(pool, f"{path}.pools[{index}]") for index, pool in enumerate(message.pools))
    )
    return RankRow(
        ref=wire.rank_ref_from_pb(message.rank),
        role=wire.role_from_pb(message.role, f"{path}.role"),
        endpoints=Endpoints(message.endpoints.grpc, message.endpoints.events_pub, message.endpoints.cache),
        layout=wire.layout_from_pb(message.layout),
        pools=read,
        data_plane=message.data_plane,
        engine_selects_dp=message.engine_selects_dp,
        model=wire.model_from_pb(message.model),
        serves_events=message.serves_events,
        labels=tuple(sorted(message.labels.items())),
    )


def rows_to_register(request: pb.RegisterRequest, pools: PoolCache, *, peer_is_local: bool) -> Iterator[RankRow]:
    """Decodes and checks everything that a row says about itself, its addresses included."""
    return (row for row in rows_in_pieces(request, pools, peer_is_local=peer_is_local) if row is not None)


def rows_in_pieces(request: pb.RegisterRequest, pools: PoolCache, *, peer_is_local: bool) -> Iterator[RankRow | None]:
    """``rows_to_register``, which may take seconds in all, with None behind a piece of a row that has many regions."""
    _check_count("rows", len(request.rows), 1, MAX_ROWS_PER_REQUEST)
    for index, message in enumerate(request.rows):
        path = f"rows[{index}]"
        _check_sizes(message, path)
        yield from _large_pools(message, pools, path)
        row = row_from_pb(message, pools, path)
        _check_row(row, path)
        _check_endpoints(row, f"{path}.endpoints", peer_is_local)
        yield row


def _large_pools(message: pb.RankRow, pools: PoolCache, path: str) -> Iterator[None]:
    """Reads them ahead of their row, and yields behind each piece."""
    for number, pool in enumerate(message.pools):
        if len(pool.regions) > wire.REGIONS_OF_A_PIECE:
            yield from pools.read(pool, f"{path}.pools[{number}]")


def leases_to_pb(leases: Iterable[Lease]) -> list[pb.RankLease]:
    return [pb.RankLease(rank=wire.rank_ref_to_pb(lease.ref), lease_id=lease.lease_id) for lease in leases]


def lease_ids(request: pb.KeepAliveRequest) -> Sequence[int]:
    _check_count("lease_ids", len(request.lease_ids), 0, MAX_LEASES_PER_REQUEST)
    return request.lease_ids


def refs_to_deregister(request: pb.DeregisterRequest) -> list[RankRef]:
    _check_count("ranks", len(request.ranks), 0, MAX_ROWS_PER_REQUEST)
    return [wire.rank_ref_from_pb(message) for message in request.ranks]


def engine_to_pb(engine: ResolvedEngine, rows: Iterable[pb.RankRow] = ()) -> pb.Engine:
    """The engine with the given rows, which need not be all that ``engine`` has."""
    return pb.Engine(
        name=engine.name,
        role=common_pb2.Role.ValueType(engine.role),
        layout=wire.layout_to_pb(engine.layout),
        registered_ranks=engine.registered_ranks,
        expected_ranks=engine.layout.ranks,
        ready=engine.ready,
        rows=rows,
        model=wire.model_to_pb(engine.model),
        dp_lacking_events=engine.dp_lacking_events,
        missing_ranks=map(wire.rank_id_to_pb, engine.missing_ranks),
        absent_ranks=map(_absent_to_pb, engine.absent_ranks),
    )


def _absent_to_pb(absent: AbsentRank) -> pb.AbsentRank:
    message = pb.AbsentRank(rank=wire.rank_ref_to_pb(absent.ref), absence=pb.Absence.ValueType(absent.absence))
    message.time.FromNanoseconds(round(absent.since * 1e9))
    return message


def engine_to_bytes(engine: ResolvedEngine, rows: Iterable[bytes] = ()) -> bytes:
    return engine_to_pb(engine).SerializeToString() + joined(pb.Engine, "rows", rows)


def change_to_bytes(engine: bytes, gone: Iterable[RankRef] = ()) -> bytes:
    """``engine``: what ``engine_to_bytes`` gave."""
    others = pb.EngineChange(gone=map(wire.rank_ref_to_pb, gone)).SerializeToString()
    return joined(pb.EngineChange, "engine", [engine]) + others


def engine_from_pb(message: pb.Engine, pools: PoolCache | None) -> ResolvedEngine:
    """An engine that a registry sent; ``pools`` None: without its pools, asked for or not.

    Raises InvalidRequest for one that cannot be.
    """
    return engine_of(message, engine_rows(message, pools))


def engine_rows(message: pb.Engine, pools: PoolCache | None) -> Iterator[RankRow | None]:
    """The rows of an engine that a registry sent, which may take seconds in all, with None behind a piece of a row that
    has many regions. Each thing is counted before it is looked at. Raises InvalidRequest."""
    check_engine_sizes(message, len(message.rows))
    for index, row in enumerate(message.rows):
        path = f"engine.rows[{index}]"
        if pools is not None:
            _check_sizes(row, path)
            yield from _large_pools(row, pools, path)
        yield engine_row(row, pools, path)


def check_engine_sizes(head: pb.Engine, rows: int) -> None:
    """Raises InvalidRequest for an engine whose ranks, or so many rows, nobody is to look through."""
    raise_if(_wrong_layout(wire.layout_from_pb(head.layout), "engine.layout"))
    _check_count("engine.rows", rows, 0, MAX_ENGINE_RANKS)
    _check_count("engine.dp_lacking_events", len(head.dp_lacking_events), 0, MAX_ENGINE_RANKS)


def engine_row(row: pb.RankRow, pools: PoolCache | None, path: str) -> RankRow:
    """One row of an engine that a registry sent; ``pools`` None: without its pools. Raises InvalidRequest."""
    _check_sizes(row, path)
    _check_count(f"{path}.labels", len(row.labels), 0, MAX_LABELS)
    read = row_from_pb(row, pools, path)
    check_rank(read.ref, read.layout, f"{path}.rank")  # logs say its name
    return read


def engine_of(message: pb.Engine, rows: Iterable[RankRow | None]) -> ResolvedEngine:
    """``rows``: what ``engine_rows`` gave, or none."""
    return ResolvedEngine(
        name=message.name,
        role=wire.role_from_pb(message.role, "engine.role"),
        layout=wire.layout_from_pb(message.layout),
        ready=message.ready,
        rows=tuple(row for row in rows if row is not None),
        registered_ranks=message.registered_ranks,
        model=wire.model_from_pb(message.model),
        dp_lacking_events=tuple(message.dp_lacking_events),
    )


def selector_to_pb(selector: RankSelector) -> pb.RankSelector:
    return pb.RankSelector(dp=selector.dp, pp=selector.pp, cp=selector.cp, tp=selector.tp)


def selectors_from_pb(messages: Sequence[pb.RankSelector]) -> list[RankSelector]:
    _check_count("selectors", len(messages), 0, MAX_SELECTORS)
    return [
        RankSelector(
            message.dp if message.HasField("dp") else None,
            message.pp if message.HasField("pp") else None,
            message.cp if message.HasField("cp") else None,
            message.tp if message.HasField("tp") else None,
        )
        for message in messages
    ]


def check_engine(name: str) -> None:
    """Raises InvalidRequest for a name that no engine can have: nobody waits for it in vain."""
    if not ENGINE_NAME.fullmatch(name):
        raise InvalidRequest.of("engine", name, "1 to 128 characters of A-Z a-z 0-9 . _ -")


def filter_from_pb(message: pb.WatchEnginesRequest) -> EngineFilter:
    if message.engine:
        check_engine(message.engine)
    return EngineFilter(message.engine, optional_role(message.role), not message.without_pools)


def optional_role(value: int) -> Role | None:
    return wire.role_from_pb(value) if value else None


def _shape_of(message: common_pb2.PagePool) -> bytes:
    """Without addresses, which it takes out of the message."""
    for region in message.regions:
        if region.address:
            region.address = 0
    message.DiscardUnknownFields()
    return message.SerializeToString(deterministic=True)


def _check_pool(pool: Pool, path: str) -> None:
    try:
        check_pools([pool], addresses=False, of_a_rank=False)
    except InvalidRequest as error:
        raise_if([replace(wrong, field=path + wrong.field.removeprefix("pools[0]")) for wrong in error.violations])


def _check_row(row: RankRow, path: str) -> None:
    check_rank(row.ref, row.layout, f"{path}.rank")
    names = [pool.name for pool in row.pools]
    violations = [
        Violation(f"{path}.pools[{index}].name", f"unique, {name!r} is there twice", name)
        for index, name in enumerate(names)
        if name in names[:index]
    ]
    if row.pools and not any(pool.regions for pool in row.pools):
        violations.append(Violation(f"{path}.pools[0].regions", "at least one in a pool of the rank", 0))
    violations.extend(_wrong_layout(row.layout, f"{path}.layout"))
    violations.extend(wrong_labels(dict(row.labels), f"{path}.labels"))
    raise_if(violations)


def _wrong_layout(layout: Layout, path: str) -> list[Violation]:
    """Why nobody is to look through the ranks of such an engine."""
    sizes = ((name, getattr(layout, name)) for name in ("dp", "pp", "cp", "tp"))
    violations = [Violation(f"{path}.{name}", "at least 1", size) for name, size in sizes if size < 1]
    if layout.ranks > MAX_ENGINE_RANKS:
        violations.append(Violation(path, f"at most {MAX_ENGINE_RANKS} ranks", layout.ranks))
    return violations


def _check_sizes(message: pb.RankRow, path: str) -> None:
    size = message.ByteSize()
    if size > MAX_ROW_BYTES:
        raise_if([Violation(path, f"at most {MAX_ROW_BYTES} bytes", size)])
    _check_count(f"{path}.pools", len(message.pools), 0, MAX_POOLS)
    _check_count(f"{path}.pools.regions", sum(len(pool.regions) for pool in message.pools), 0, MAX_REGIONS)


def _check_endpoints(row: RankRow, path: str, peer_is_local: bool) -> None:
    endpoints = row.endpoints
    if endpoints.grpc:
        check_advertised(endpoints.grpc, field=f"{path}.grpc", peer_is_local=peer_is_local)
    elif row.role == Role.PREFILL:
        raise_if([Violation(f"{path}.grpc", "set on a prefill rank: decode dials it", endpoints.grpc)])
    if endpoints.cache:
        check_advertised(endpoints.cache, field=f"{path}.cache", peer_is_local=peer_is_local)
    if endpoints.events_pub:
        check_events_endpoint(endpoints.events_pub, field=f"{path}.events_pub", peer_is_local=peer_is_local)


def _check_count(field: str, count: int, least: int, most: int) -> None:
    if not least <= count <= most:
        raise_if([Violation(field, f"{least} to {most} entries", count)])
