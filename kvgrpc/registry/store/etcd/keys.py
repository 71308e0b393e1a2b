"""Keys and values in etcd, and how they read. Pure.

``r/ENGINE/DP/PP/CP/TP``  a row, on the lease of the request that brought it
``f/ENGINE/DP/PP/CP/TP``  the largest epoch of that rank: an older incarnation stays fenced when the row is gone
``s/ENGINE``              the shape of the engine, as text; each change of it is a new revision of this key
``id``                    the registry's id, the same for all of its replicas
"""

from __future__ import annotations

from kvgrpc.model import RankId

# The low bits of a lease id say which row of an etcd lease it is: a request has at most 1,024 rows.
INDEX_BITS = 10
_INDEX_MASK = (1 << INDEX_BITS) - 1


class EtcdKeys:
    """The keys below one prefix, "/kvgrpc/registry/" unless several registries share an etcd."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.encode()
        self.id = self.prefix + b"id"
        self.rows = self.prefix + b"r/"
        self.fences = self.prefix + b"f/"
        self.shapes = self.prefix + b"s/"

    def row(self, rank: RankId) -> bytes:
        return self.rows + _path(rank)

    def rows_of(self, engine: str) -> bytes:
        return self.rows + engine.encode() + b"/"

    def fence(self, rank: RankId) -> bytes:
        return self.fences + _path(rank)

    def shape(self, engine: str) -> bytes:
        return self.shapes + engine.encode()

    def rank_of(self, key: bytes) -> RankId:
        """The rank of a row's or a fence's key. Raises ValueError for any other."""
        engine, dp, pp, cp, tp = key[len(self.rows) :].decode().split("/")
        return RankId(engine, int(dp), int(pp), int(cp), int(tp))

    def engine_of(self, key: bytes) -> str:
        """The engine of a shape's key."""
        return key[len(self.shapes) :].decode()


def lease_id(etcd_lease: int, index: int) -> int:
    """Returns what a rank renews for one of the rows of an etcd lease."""
    return etcd_lease | index


def etcd_lease(lease_id: int) -> int:
    return lease_id & ~_INDEX_MASK


def after(prefix: bytes) -> bytes:
    """The end of the range of all keys with the prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _path(rank: RankId) -> bytes:
    return f"{rank.engine}/{rank.dp}/{rank.pp}/{rank.cp}/{rank.tp}".encode()
