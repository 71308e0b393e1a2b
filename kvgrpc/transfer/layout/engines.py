"""The topology of two whole engines: every line of who owes what, for people and for tests. Pure."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvgrpc.errors import InvalidRequest
from kvgrpc.model import Attention, Layout, ModelIdentity, Pool, PoolKind, RankId, Region
from kvgrpc.transfer.layout.heads import number_of_runs, shared
from kvgrpc.transfer.layout.token_shares import shares_of
from kvgrpc.transfer.layout.topology import Coordinates, Part, Shape, heads_of, mismatch, owed_part, prefill_ranks

MOST_LINES = 8_192
# Of an engine: of one pool's regions a rank has as many at most, and nobody has more heads, or a page of more tokens.
MOST_LAYERS = 4_096
MOST_PAGE_TOKENS = 4_096
MOST_HEADS = 4_096
# Lines times what each looks at, its layers, tokens of a page and heads: a second of computing.
MOST_WORK = 1 << 19
_POOLS_KEPT = 64


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The numbers that a topology needs. ``heads``: key and value heads of the model; 0: MLA, each rank holds all, or
    where ``axes`` say so (``axes_of_shares``) a share of the tokens."""

    layout: Layout
    heads: int = 0
    layers: int = 1
    axes: str = "head,token,dim"
    page_tokens: int = 16

    def shape(self, coordinates: Coordinates, pool: Pool | None = None) -> Shape:
        """One rank. ``pool``: of its stage and share, where it has been made."""
        pool = pool or self.pool(coordinates[1], coordinates[3])
        model = ModelIdentity(attention=Attention.MHA if self.heads else Attention.MLA)
        return Shape(RankId("engine", *coordinates), self.layout, (pool,), (1,), "", model)

    def pool(self, pp: int, tp: int) -> Pool:
        """Of two bytes a token and head, or a token."""
        heads, shares = heads_of(self.heads, self.layout.tp, tp), self.shares
        first, count = layers_of(self.layers, self.layout.pp, pp)
        nbytes = 2 * self.page_tokens // shares * max(heads.stop - heads.start, 1)
        return Pool(
            name="kv",
            kind=PoolKind.KV,
            page_tokens=self.page_tokens,
            pages=1,
            dtype="bfloat16",
            regions=tuple(Region(layer, "kv", 0, nbytes, nbytes) for layer in range(first, first + count)),
            axes=self.axes if self.heads or shares > 1 else "token,dim",
            heads_total=heads.total,
            head_start=heads.start if shares == 1 else tp % shares,
            head_count=heads.stop - heads.start if shares == 1 else 1,
        )

    @property
    def shares(self) -> int:
        """Decode context parallel ranks, among whom the tokens of each page are dealt out, as engines do by tp."""
        return shares_of(self.axes)


@dataclass(frozen=True, slots=True)
class Owed:
    """The debt of one prefill rank to one decode rank. ``descriptors``: that a page costs; 0: it owes nothing."""

    prefill: Coordinates
    decode: Coordinates
    part: Part
    descriptors: int


def topology(prefill: EngineShape, decode: EngineShape) -> list[Owed]:
    """Returns what the ranks of one prefill replica owe those of one decode replica, ordered by prefill and decode.

    Raises ParallelLayoutMismatch, and InvalidRequest for engines with too many ranks.
    """
    return in_order(each_line(prefill, decode))


def in_order(lines: Iterable[Owed]) -> list[Owed]:
    return sorted(lines, key=lambda line: (line.prefill, line.decode))


def each_line(prefill: EngineShape, decode: EngineShape) -> Iterator[Owed]:
    """The lines of ``topology`` as they are computed, some milliseconds each at most; raises at the first."""
    _check_work(prefill, decode)
    for field, one, other in (("heads", prefill.heads, decode.heads), ("layers", prefill.layers, decode.layers)):
        if one != other:
            raise mismatch({field: (one, other)})
    _check_shares(prefill)
    _check_shares(decode)
    stages = max(prefill.layout.pp, decode.layout.pp)
    if stages > decode.layers:
        raise InvalidRequest.of("layers", decode.layers, f"at least one for each of {stages} stages")
    # Most lines of one decode rank are of prefill ranks that hold the same.
    pool_of = functools.lru_cache(_POOLS_KEPT)(prefill.pool)
    for pp, cp, tp in itertools.product(*map(range, (decode.layout.pp, decode.layout.cp, decode.layout.tp))):
        target = decode.shape((0, pp, cp, tp))
        for coordinates in prefill_ranks(target.rank, decode.layout, prefill.layout, 0):
            source = prefill.shape(coordinates, pool_of(coordinates[1], coordinates[3]))
            part = owed_part(source, target)
            yield Owed(coordinates, (0, pp, cp, tp), part, 0 if part.empty else _descriptors(source, target))


def _check_work(prefill: EngineShape, decode: EngineShape) -> None:
    lines = decode.layout.ranks // decode.layout.dp * prefill.layout.cp
    lines *= max(prefill.layout.tp // decode.layout.tp, 1) * max(prefill.layout.pp // decode.layout.pp, 1)
    if lines > MOST_LINES:
        raise InvalidRequest.of("layout", lines, f"small enough for {MOST_LINES} lines")
    for engine in (prefill, decode):
        if engine.layers > MOST_LAYERS:
            raise InvalidRequest.of("layers", engine.layers, f"at most {MOST_LAYERS}")
        if engine.page_tokens > MOST_PAGE_TOKENS:
            raise InvalidRequest.of("page_tokens", engine.page_tokens, f"at most {MOST_PAGE_TOKENS}")
        if engine.heads > MOST_HEADS:
            raise InvalidRequest.of("heads", engine.heads, f"at most {MOST_HEADS}")
        work = lines * (-(-engine.layers // engine.layout.pp) + engine.page_tokens + engine.heads // engine.layout.tp)
        if work > MOST_WORK:
            rule = f"lines ({lines}) x (layers of a stage + page_tokens + heads of a rank) of at most {MOST_WORK}"
            raise InvalidRequest.of("layout", work, rule)


def _check_shares(engine: EngineShape) -> None:
    shares = engine.shares
    if shares > 1 and engine.heads:
        raise InvalidRequest.of("heads", engine.heads, f"0 (MLA) with axes {engine.axes!r}")
    if not shares or engine.layout.tp % shares:
        raise InvalidRequest.of("axes", engine.axes, f"over a number that divides layout.tp {engine.layout.tp}")
    if engine.page_tokens % shares:
        raise InvalidRequest.of("page_tokens", engine.page_tokens, f"a multiple of {shares}, as axes say")


def _descriptors(source: Shape, target: Shape) -> int:
    """Of one page: all layers of a made-up pool are alike, so one of them is looked at."""
    ours, theirs = shared(source.pools[0], target.pools[0])
    one, other = (replace(pool, regions=pool.regions[:1]) for pool in (ours, theirs))
    return number_of_runs(one, other) * len(ours.regions)


def layers_of(layers: int, pp_size: int, pp: int) -> tuple[int, int]:
    """First layer and number of layers of a stage, in equal shares; the first stages have what is left over."""
    share, left = divmod(layers, pp_size)
    return pp * share + min(pp, left), share + (pp < left)
