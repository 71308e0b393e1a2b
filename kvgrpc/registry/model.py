"""The words of the registry as plain values: rows, shapes, selectors, engines. Pure and immutable."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kvgrpc.errors import InvalidRequest, Violation
from kvgrpc.model import UNKNOWN_MODEL, Layout, ModelIdentity, Pool, RankId, RankRef, Role

# Seconds that a lease lives without a renewal.
DEFAULT_TTL = 10.0
# What an operator says of a rank, for whoever chooses among engines: names and values, by name.
Labels = tuple[tuple[str, str], ...]
MAX_LABELS, MAX_LABEL_CHARS = 16, 128


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of a rank: ``grpc`` as "host:port", ``events_pub`` as a ZMQ endpoint, ``cache`` (PullService) as
    "host:port". Empty: not served."""

    grpc: str = ""
    events_pub: str = ""
    cache: str = ""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank that is there. ``pools`` are shapes, their region addresses are 0."""

    ref: RankRef
    role: Role
    endpoints: Endpoints
    layout: Layout
    pools: tuple[Pool, ...] = ()
    data_plane: str = ""
    engine_selects_dp: bool = False
    model: ModelIdentity = UNKNOWN_MODEL
    serves_events: bool = False
    labels: Labels = ()


@dataclass(frozen=True, slots=True)
class Lease:
    """A row's right to exist. ``lease_id`` means something only at the registry that gave it."""

    ref: RankRef
    lease_id: int


class Absence(enum.IntEnum):
    """The way in which a rank left; the numbers of the proto."""

    DEREGISTERED = 1
    LEASE_RAN_OUT = 2
    FENCED = 3


@dataclass(frozen=True, slots=True)
class AbsentRank:
    """A rank that was there and is not: its last incarnation (with FENCED the one that was refused last), and since
    when (Unix seconds)."""

    ref: RankRef
    absence: Absence
    since: float


@dataclass(frozen=True, slots=True)
class ResolvedEngine:
    """One engine as the registry saw it at one moment, with those rows that were asked for.

    ``ready``: every distinct rank of the layout is registered, all with one layout. ``dp_lacking_events``: the first
    dp ranks of a ready engine that lack a stream of events which others of it have. ``missing_ranks``: the first ranks
    that keep it from READY, where one engine was asked for, and ``absent_ranks`` those of them that were there.
    """

    name: str
    role: Role
    layout: Layout
    ready: bool
    rows: tuple[RankRow, ...] = ()
    registered_ranks: int = 0
    model: ModelIdentity = UNKNOWN_MODEL
    dp_lacking_events: tuple[int, ...] = ()
    missing_ranks: tuple[RankId, ...] = ()
    absent_ranks: tuple[AbsentRank, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineChange:
    """The news of one engine, as it is now.

    ``engine.rows``: rows that are new or were replaced. ``gone``: incarnations that are there no more and have no
    successor; with ``engine.registered_ranks`` 0 the engine itself is gone. ``before``: the incarnations that the new
    and the gone ones replace, and ``role_before`` what the engine did then (None: it was not there).
    """

    engine: ResolvedEngine
    gone: tuple[RankRef, ...] = ()
    before: tuple[RankRef, ...] = ()
    role_before: Role | None = None


@dataclass(frozen=True, slots=True)
class EngineFilter:
    """The engines that a reader follows, with their pools or without."""

    engine: str = ""
    role: Role | None = None
    pools: bool = True

    def takes(self, name: str, role: Role | None) -> bool:
        return self.engine in ("", name) and role is not None and self.role in (None, role)

    def applied_to(self, change: EngineChange) -> EngineChange | None:
        """Returns what a follower hears of a change; an engine that took another role is gone for who follows the old
        one."""
        name, engine = change.engine.name, change.engine
        if self.takes(name, engine.role):
            return change
        if not self.takes(name, change.role_before):
            return None
        return EngineChange(
            replace(engine, ready=False, rows=(), registered_ranks=0, dp_lacking_events=()), change.before
        )


@dataclass(frozen=True, slots=True)
class RankSelector:
    """Ranks whose coordinates equal the given ones; None stands for any."""

    dp: int | None = None
    pp: int | None = None
    cp: int | None = None
    tp: int | None = None

    def ranks(self, engine: str, layout: Layout) -> Iterator[RankId]:
        """The ranks of the layout that it selects, ordered by coordinates."""
        return (RankId(engine, *coordinates) for coordinates in itertools.product(*self._axes(layout)))

    def count(self, layout: Layout) -> int:
        """Returns how many ranks of the layout it selects."""
        return math.prod(map(len, self._axes(layout)))

    def _axes(self, layout: Layout) -> tuple[range, ...]:
        return (
            _coordinates(self.dp, layout.dp),
            _coordinates(self.pp, layout.pp),
            _coordinates(self.cp, layout.cp),
            _coordinates(self.tp, layout.tp),
        )


EVERY_RANK = RankSelector()


Coordinates = tuple[int, int, int, int]
BEFORE_ALL: Coordinates = (-1, -1, -1, -1)


def coordinates_of(rank: RankId) -> Coordinates:
    """The order in which rows are listed."""
    return rank.dp, rank.pp, rank.cp, rank.tp


def engine_differences(role: Role, layout: Layout, model: ModelIdentity, row: RankRow) -> dict[str, str]:
    """Returns what of a row does not fit the engine that it wants to join: field -> both values; empty when it fits."""
    differences = {}
    if row.role != role:
        differences["role"] = _both(role.name, row.role.name)
    for axis in ("dp", "pp", "cp", "tp"):
        if getattr(row.layout, axis) != getattr(layout, axis):
            differences[f"layout.{axis}"] = _both(getattr(layout, axis), getattr(row.layout, axis))
    for (field, known), (_, offered) in zip(model.items(), row.model.items(), strict=True):
        if known != offered:
            differences[field] = _both(repr(known), repr(offered))
    return differences


def pool_differences(known: Pool, offered: Pool) -> dict[str, str]:
    """Returns what must be equal in all pools of one name of an engine, and is not: field -> both values.

    Pages, held heads, location and layers may differ from rank to rank. A rank that has no layer of the pool does not
    know what bytes of one are.
    """
    are_of_bytes = ("dtype", "axes") if known.regions and offered.regions else ()
    return {
        f"pools[{known.name}].{field}": _both(getattr(known, field), getattr(offered, field))
        for field in ("kind", "page_tokens", "heads_total", *are_of_bytes)
        if getattr(known, field) != getattr(offered, field)
    }


def row_differences(known: RankRow, offered: RankRow) -> dict[str, str]:
    """The differences of two rows of one incarnation: field -> both values."""
    differences = engine_differences(known.role, known.layout, known.model, offered)
    for field in ("grpc", "events_pub"):
        if getattr(known.endpoints, field) != getattr(offered.endpoints, field):
            differences[f"endpoints.{field}"] = _both(
                getattr(known.endpoints, field), getattr(offered.endpoints, field)
            )
    for field in ("data_plane", "engine_selects_dp", "serves_events", "labels"):
        if getattr(known, field) != getattr(offered, field):
            differences[field] = _both(getattr(known, field), getattr(offered, field))
    if known.pools != offered.pools:
        differences["pools"] = _both(_pool_names(known), _pool_names(offered))
        offered_pools = {pool.name: pool for pool in offered.pools}
        for pool in known.pools:
            if pool.name in offered_pools:
                differences |= pool_differences(pool, offered_pools[pool.name])
    return differences


def conflict_metadata(rank: RankId, differences: Mapping[str, str]) -> dict[str, str]:
    """The metadata of REGISTRATION_SHAPE_CONFLICT: which fields differ, and one key a field with both values.

    Bounded, because metadata of a status is: the first 16 fields, 120 characters a value.
    """
    shown = dict(itertools.islice(differences.items(), 16))
    values = {field: value[:120] for field, value in shown.items()}
    return {"rank": str(rank), "mismatchedFields": ",".join(shown), **values}


def labels_of(texts: Iterable[str]) -> Labels:
    """Reads "NAME=VALUE" of each. Raises InvalidRequest."""
    found: dict[str, str] = {}
    for text in texts:
        name, is_one, value = text.partition("=")
        if not is_one or name in found:
            raise InvalidRequest.of("labels", text, "NAME=VALUE, no name twice")
        found[name] = value
    for violation in wrong_labels(found, "labels"):
        raise InvalidRequest.of(violation.field, violation.value, violation.description)
    return tuple(sorted(found.items()))


def wrong_labels(labels: Mapping[str, str], path: str) -> Iterator[Violation]:
    """Yields one for each that cannot be."""
    if len(labels) > MAX_LABELS:
        yield Violation(path, f"at most {MAX_LABELS}", f"{len(labels)} of them")
    for name, value in labels.items():
        if not 0 < len(name) <= MAX_LABEL_CHARS or len(value) > MAX_LABEL_CHARS:
            yield Violation(path, f"a name of 1 to {MAX_LABEL_CHARS} characters, and a value of at most as many", name)


def _coordinates(wanted: int | None, size: int) -> range:
    if wanted is None:
        return range(size)
    return range(wanted, wanted + 1) if 0 <= wanted < size else range(0)


def _both(known: object, offered: object) -> str:
    return f"registered {known}, offered {offered}"


def _pool_names(row: RankRow) -> str:
    return ",".join(pool.name for pool in row.pools) or "none"


def absent(engine: str, role: Role | None, state: str) -> str:
    """Says "prefill engine P is not READY"; of an engine that was not named, "no prefill engine is READY"."""
    kind = "engine" if role is None else f"{role.name.lower()} engine"
    return f"{kind} {engine} is not {state}" if engine else f"no {kind} is {state}"
