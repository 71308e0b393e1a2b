"""The transactions that change rows in etcd: each refuses to happen when what it was decided on has changed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvgrpc.model import RankId
from kvgrpc.registry import wire
from kvgrpc.registry.acceptance import by_engine
from kvgrpc.registry.engine import RegisteredEngine
from kvgrpc.registry.model import RankRow
from kvgrpc.registry.store.etcd.keys import EtcdKeys, after
from kvgrpc.registry.store.etcd.v1 import etcd_pb2 as pb
from kvgrpc.registry.table import EngineTable
from kvgrpc.registry.wire import PoolCache


class Fence(NamedTuple):
    """The largest epoch of a rank, and the revision that wrote it."""

    epoch: int
    revision: int


NO_FENCE = Fence(0, 0)


class Known(Protocol):
    """The ground that a transaction is decided on: a view of etcd, and up to which revision it is true."""

    table: EngineTable
    fences: dict[RankId, Fence]
    shapes: dict[str, int]
    revision: int
    pools: PoolCache


# etcd takes 128 comparisons and 128 changes by default: two changes a row, and up to two comparisons and one change an
# engine.
ROWS_PER_TRANSACTION = 40
_MOST_DELETIONS = 120


def reshapes(view: Known, rows: Sequence[RankRow]) -> list[str]:
    """The engines of the rows whose shape becomes another, or larger, with them."""
    return [name for name, group in by_engine(rows).items() if not _covered(view.table.engine(name), group)]


def reshaping(keys: EtcdKeys, view: Known, engine: str, rows: Sequence[RankRow]) -> pb.TxnRequest:
    """Makes way for rows of another shape: whatever else joins the engine meanwhile makes one of the two fail.

    Rows of another shape go, all at once: in between a registry would know both. Acceptance has seen that ``rows``
    replace each of them, and of another role, layout or model they are all that the engine has.
    """
    known = view.table.engine(engine)
    request = pb.TxnRequest(compare=[_unchanged(keys.shape(engine), view.shapes.get(engine, 0))])
    request.compare.append(_nothing_newer(keys.rows_of(engine), view.revision))
    request.success.append(_put(keys.shape(engine), _shape_text(rows).encode()))
    if known is not None and any(map(known.shape.differences, rows)):
        replaced = [row for row in rows if known.leased(row.ref.rank) is not None]
        request.success.extend(map(_deletion, _places(keys, engine, known, replaced)))
    return request


def registration(
    keys: EtcdKeys,
    view: Known,
    rows: Sequence[tuple[int, RankRow]],
    lease: int,
    shapes: Mapping[str, int],
    owner: tuple[str, str] = ("", ""),
) -> pb.TxnRequest:
    """Puts rows (with their index on the lease), unless a rank or the shape of an engine changed meanwhile.

    ``shapes``: revisions of shapes that this very request wrote before. ``owner``: who registers them, and its host.
    """
    request = pb.TxnRequest()
    for engine in by_engine([row for _, row in rows]):
        revision = shapes.get(engine, view.shapes.get(engine, 0))
        request.compare.append(_unchanged(keys.shape(engine), revision))
    for index, row in rows:
        rank = row.ref.rank
        request.compare.append(_unchanged(keys.fence(rank), view.fences.get(rank, NO_FENCE).revision))
        stored = pb.StoredRow(index=index, row=wire.row_to_bytes(row, view.pools), caller=owner[0], host=owner[1])
        request.success.append(_put(keys.row(rank), stored.SerializeToString(), lease))
        request.success.append(_put(keys.fence(rank), str(row.ref.epoch).encode()))
    return request


def removal(keys: EtcdKeys, rows: Iterable[RankRow], revisions: Iterable[int]) -> pb.TxnRequest:
    """Removes rows, unless one of their ranks registered again meanwhile.

    Their fences are written once more: a lease that ends writes nothing, so whoever follows tells the two apart.
    """
    request = pb.TxnRequest()
    for row, revision in zip(rows, revisions, strict=True):
        request.compare.append(_unchanged(keys.fence(row.ref.rank), revision))
        request.success.add().request_delete_range.CopyFrom(pb.DeleteRangeRequest(key=keys.row(row.ref.rank)))
        request.success.append(_put(keys.fence(row.ref.rank), str(row.ref.epoch).encode()))
    return request


def naming(keys: EtcdKeys, registry_id: str) -> pb.TxnRequest:
    """The registry's id, unless it has one."""
    return pb.TxnRequest(compare=[_unchanged(keys.id, 0)], success=[_put(keys.id, registry_id.encode())])


def forgetting(found: Mapping[bytes, int]) -> pb.TxnRequest:
    """Removes keys that still have these revisions."""
    request = pb.TxnRequest(compare=[_unchanged(key, revision) for key, revision in found.items()])
    for key in found:
        request.success.add().request_delete_range.CopyFrom(pb.DeleteRangeRequest(key=key))
    return request


def chunks(rows: Sequence[RankRow]) -> Iterator[list[tuple[int, RankRow]]]:
    """Rows with their index, as many as one transaction takes."""
    numbered = list(enumerate(rows))
    for first in range(0, len(numbered), ROWS_PER_TRANSACTION):
        yield numbered[first : first + ROWS_PER_TRANSACTION]


def _places(
    keys: EtcdKeys, engine: str, known: RegisteredEngine, rows: Sequence[RankRow]
) -> list[pb.DeleteRangeRequest]:
    """Those of the rows; of all that there are, or of more than a transaction takes, that of the engine. The rows that
    go with the latter and have no successor register anew."""
    if len(rows) == known.registered or len(rows) > _MOST_DELETIONS:
        prefix = keys.rows_of(engine)
        return [pb.DeleteRangeRequest(key=prefix, range_end=after(prefix))]
    return [pb.DeleteRangeRequest(key=keys.row(row.ref.rank)) for row in rows]


def _deletion(place: pb.DeleteRangeRequest) -> pb.RequestOp:
    return pb.RequestOp(request_delete_range=place)


def _covered(engine: RegisteredEngine | None, rows: Sequence[RankRow]) -> bool:
    return engine is not None and all(engine.shape.covers(row) for row in rows)


def _shape_text(rows: Sequence[RankRow]) -> str:
    """For people who look into etcd."""
    first = rows[0]
    pools = ",".join(sorted({pool.name for row in rows for pool in row.pools}))
    model = " ".join(f"{field}={value}" for field, value in first.model.items() if value)
    return f"{first.role.name} {first.layout} pools={pools} {model}".rstrip()


def _put(key: bytes, value: bytes, lease: int = 0) -> pb.RequestOp:
    return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))


def _unchanged(key: bytes, revision: int) -> pb.Compare:
    """``revision`` 0: the key is not there."""
    return pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.MOD, key=key, mod_revision=revision)


def _nothing_newer(prefix: bytes, revision: int) -> pb.Compare:
    return pb.Compare(
        result=pb.Compare.LESS,
        target=pb.Compare.MOD,
        key=prefix,
        range_end=after(prefix),
        mod_revision=revision + 1,
    )
