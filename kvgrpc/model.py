"""The words of common.proto as plain values: ranks, layouts, pools. Stdlib only; every capability may import it."""

from __future__ import annotations

import enum
import operator
import re
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, overload

from kvgrpc.arrays import rows_of
from kvgrpc.errors import InvalidRequest, Violation

__all__ = [
    "COMPONENTS",
    "ENGINE_NAME",
    "MAX_EPOCH",
    "MAX_WORD_CHARS",
    "UNKNOWN_MODEL",
    "Attention",
    "Layout",
    "ModelIdentity",
    "Pool",
    "PoolKind",
    "RankId",
    "RankRef",
    "Region",
    "Regions",
    "Role",
    "Tier",
    "check_pools",
    "check_rank",
    "new_epoch",
    "raise_if",
]


ENGINE_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
MAX_EPOCH = 2**53 - 1
MAX_WORD_CHARS = 64
# Of one rank, over all of its pools; decoding so many takes 40 ms of a loop that others share.
MAX_REGIONS = 4_096
MAX_ENGINE_RANKS = 65_536
_LONGEST = {"name": 128, "dtype": MAX_WORD_CHARS, "axes": 256, "location": MAX_WORD_CHARS}
COMPONENTS = ("k", "v", "kv", "latent", "indexer", "conv", "temporal")
_SHOWN_CHARS = 200


class Role(enum.IntEnum):
    """The work of a rank."""

    PREFILL = 1
    DECODE = 2
    UNIFIED = 3


class Tier(enum.IntEnum):
    """The place of a page, or block, the fastest first."""

    DEVICE = 1
    HOST = 2
    STORAGE = 3


class PoolKind(enum.IntEnum):
    """The contents of a pool's pages."""

    KV = 1
    STATE = 2


class Attention(enum.IntEnum):
    """A model's attention, by what its KV cache holds: heads over the tensor-parallel ranks, or one latent in each."""

    UNKNOWN = 0
    MHA = 1
    MLA = 2


class RankId(NamedTuple):
    """One rank of one engine in KV coordinates (attention sizes count). A tuple, because it is a key everywhere."""

    engine: str
    dp: int = 0
    pp: int = 0
    cp: int = 0
    tp: int = 0

    @classmethod
    def from_flat(cls, engine: str, layout: Layout, engine_rank: int) -> RankId:
        """The coordinates of an engine's flat rank number: tp counts fastest, then cp, dp, pp, as SGLang's ranks do
        (``tp_size * pp_rank + tp_rank``, its tp group divided into dp, cp and tp).

        Raises InvalidRequest for one that the layout does not have.
        """
        if not 0 <= engine_rank < layout.ranks:
            rule = f"0 to {layout.ranks - 1}, the ranks of dp={layout.dp} pp={layout.pp} cp={layout.cp} tp={layout.tp}"
            raise InvalidRequest.of("engine_rank", engine_rank, rule)
        rest, tp = divmod(engine_rank, layout.tp)
        rest, cp = divmod(rest, layout.cp)
        pp, dp = divmod(rest, layout.dp)
        return cls(engine, dp, pp, cp, tp)

    @property
    def leads(self) -> bool:
        """True for the first rank of its dp, which tells of the cache and takes orders for it: the others hold parts or
        copies of the same blocks."""
        return self.pp == self.cp == self.tp == 0

    def __str__(self) -> str:
        return f"{self.engine}/dp{self.dp}/pp{self.pp}/cp{self.cp}/tp{self.tp}"


class RankRef(NamedTuple):
    """One incarnation of one rank. ``epoch``: Unix microseconds at the opening of the runtime; larger is newer."""

    rank: RankId
    epoch: int

    def __str__(self) -> str:
        return f"{self.rank}@{self.epoch}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel sizes of one engine, in KV coordinates."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    def __contains__(self, rank: RankId) -> bool:
        return rank.dp < self.dp and rank.pp < self.pp and rank.cp < self.cp and rank.tp < self.tp


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The meaning of the bytes of a KV cache. What is left empty is not said, and fits everything."""

    name: str = ""
    revision: str = ""
    cache_dtype: str = ""
    attention: Attention = Attention.UNKNOWN

    def items(self) -> tuple[tuple[str, str], ...]:
        """Each field by the name that a refusal gives it, as text; empty where it is not said."""
        attention = self.attention.name if self.attention else ""
        return (
            ("model.name", self.name),
            ("model.revision", self.revision),
            ("model.cache_dtype", self.cache_dtype),
            ("model.attention", attention),
        )

    def differences(self, other: ModelIdentity) -> dict[str, tuple[str, str]]:
        """Field -> both values, where both sides say something and it differs."""
        return {
            field: (mine, theirs)
            for (field, mine), (_, theirs) in zip(self.items(), other.items(), strict=True)
            if mine and theirs and mine != theirs
        }


UNKNOWN_MODEL = ModelIdentity()


class Region(NamedTuple):
    """Memory of one layer and component of a pool. ``address`` is in the owner's address space, sizes are bytes.

    ``layer``: its number in the whole model, whatever the pipeline stage. ``component``: one of COMPONENTS, or a word
    that both engines use.
    """

    layer: int
    component: str
    address: int
    page_stride_bytes: int
    page_bytes: int


_region_of: Callable[[Iterable[Any]], Region] = partial(tuple.__new__, Region)


class Regions(Sequence[Region]):
    """Regions, in 32 bytes each, that are made anew for whoever looks at them: a collection of garbage looks at every
    object that there is, and a registry's rows have hundreds of thousands of regions. Immutable."""

    __slots__ = ("_numbers", "_words")
    # As the machine has its numbers, so that those of one field are a stride of memory.
    _ONE = struct.Struct("=IIQQQ")

    def __init__(self, regions: Iterable[tuple[int, str, int, int, int]]) -> None:
        """Raises ``struct.error`` for numbers that no region can have."""
        words: dict[str, int] = {}
        pack = self._ONE.pack
        self._numbers = b"".join(
            [
                pack(layer, words.setdefault(component, len(words)), address, stride_bytes, page_bytes)
                for layer, component, address, stride_bytes, page_bytes in regions
            ]
        )
        self._words = tuple(map(sys.intern, words))

    def __len__(self) -> int:
        return len(self._numbers) // self._ONE.size

    def __iter__(self) -> Iterator[Region]:
        return map(_region_of, zip(*self.columns(), strict=True))

    def columns(self) -> tuple[list[int], list[str], list[int], list[int], list[int]]:
        """Each field of a region, of all of them: for who looks at thousands."""
        numbers = memoryview(self._numbers)
        halves, wholes = numbers.cast("I"), numbers.cast("Q")
        words = map(self._words.__getitem__, halves[1::8])
        return halves[::8].tolist(), list(words), wholes[1::4].tolist(), wholes[2::4].tolist(), wholes[3::4].tolist()

    @property
    def layers(self) -> list[int]:
        return memoryview(self._numbers).cast("I")[::8].tolist()

    def without_addresses(self) -> Regions:
        shape, numbers = Regions(()), bytearray(self._numbers)
        memoryview(numbers).cast("Q")[1::4] = memoryview(bytes(8 * len(self))).cast("Q")
        shape._numbers, shape._words = bytes(numbers), self._words
        return shape

    @overload
    def __getitem__(self, index: int) -> Region: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Region]: ...

    def __getitem__(self, index: int | slice) -> Region | Sequence[Region]:
        if isinstance(index, slice):
            return Regions(self[n] for n in range(len(self))[index])
        layer, word, *numbers = self._ONE.unpack_from(self._numbers, range(len(self))[index] * self._ONE.size)
        return Region(layer, self._words[word], *numbers)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Regions):
            return NotImplemented
        return self._numbers == other._numbers and self._words == other._words

    def __hash__(self) -> int:
        return hash((self._numbers, self._words))

    def __repr__(self) -> str:
        return f"Regions({list(self)!r})"


def _packed(regions: Sequence[Region]) -> Sequence[Region]:
    """Packs the regions; returns them unpacked if no region can be so: ``check_pools`` says what is wrong."""
    try:
        if not isinstance(regions, Regions) and all(isinstance(each, Region) for each in regions):
            return Regions(regions)
    except (TypeError, struct.error):
        pass
    return regions


@dataclass(frozen=True, slots=True)
class Pool:
    """A set of regions that one page number addresses; all of it but addresses and location is compared by both sides.

    Attributes:
        name: "kv" for the only pool of an engine; "swa", "mamba" and the like for others.
        kind: what the pages hold.
        page_tokens: tokens in one page; 0 for pools that do not count tokens.
        pages: pages in the pool; a page number is below it.
        dtype: as torch and numpy name it, "bfloat16", "float8_e4m3fn", "uint8".
        regions: one for each layer and component; any sequence becomes ``Regions``. Empty where a pipeline stage has no
            layer that the pool is of: nothing travels there, and neither dtype nor axes are compared.
        axes: of one page, outermost first, with commas: "token,head,dim", "head,token,dim", "kv,token,head,dim",
            "token,latent"; "" where nobody needs to know (equal layouts), and of latents that lie token after token.
            "tokens over 2": every second token of a prompt, those whose number is ``head_start`` modulo 2.
        heads_total, head_start, head_count: KV heads of the model, the first one held here, and how many; 0 for MLA
            and state, but for the share of "tokens over".
        location: where the memory is: "cpu:0", "cuda:3".
    """

    name: str
    kind: PoolKind
    page_tokens: int
    pages: int
    dtype: str
    regions: Sequence[Region]
    axes: str = ""
    heads_total: int = 0
    head_start: int = 0
    head_count: int = 0
    location: str = "cpu:0"

    def __post_init__(self) -> None:
        object.__setattr__(self, "regions", _packed(self.regions))

    @classmethod
    def from_arrays(
        cls,
        arrays: Sequence[Any] | Mapping[tuple[int, str], Any],
        *,
        page_tokens: int,
        name: str = "kv",
        kind: PoolKind = PoolKind.KV,
        component: str = "kv",
        axes: str = "",
        heads_total: int = 0,
        head_start: int = 0,
        head_count: int = 0,
    ) -> Pool:
        """The pool of an engine's own arrays, numpy's or torch's, which have a page along their first axis.

        Args:
            arrays: one for each layer (all of them ``component``), or by (global layer, component):
                ``{(0, "k"): keys[0], (0, "v"): values[0], …}``. Their memory stays the caller's, who keeps it alive.
            page_tokens, name, kind, axes, heads_total, head_start, head_count: as the attributes.

        Raises InvalidRequest for flat arrays, and for those whose pages are not dense, or differ in number, dtype or
        location.
        """
        by_key = arrays if isinstance(arrays, Mapping) else {(n, component): each for n, each in enumerate(arrays)}
        for (layer, part), array in by_key.items():
            if len(getattr(array, "shape", (0, 0))) < 2:
                rule = "at least two axes, pages first: a flat array has a page for each of its numbers"
                raise InvalidRequest.of(f"arrays[{layer}, {part!r}]", f"shape {tuple(array.shape)}", rule)
        found = [(key, rows_of(array, f"arrays[{key[0]}, {key[1]!r}]")) for key, array in by_key.items()]
        if not found:
            raise InvalidRequest.of("arrays", "empty", "at least one array")
        first = found[0][1]
        for (layer, part), each in found:
            for what in ("rows", "dtype", "location"):
                if getattr(each, what) != getattr(first, what):
                    rule = f"{what} {getattr(first, what)}, as the first array has"
                    raise InvalidRequest.of(f"arrays[{layer}, {part!r}]", getattr(each, what), rule)
        regions = tuple(Region(*key, each.address, each.stride_bytes, each.row_bytes) for key, each in found)
        heads = heads_total, head_start, head_count
        return cls(name, kind, page_tokens, first.rows, first.dtype, regions, axes, *heads, first.location)

    @property
    def layers(self) -> list[int]:
        """Of each region."""
        regions = self.regions
        return regions.layers if isinstance(regions, Regions) else [region.layer for region in regions]

    @property
    def page_bytes(self) -> int:
        """Of one page in all regions."""
        return sum(region.page_bytes for region in self.regions)

    def without_addresses(self) -> Pool:
        """The shape alone, as it is told to a registry and to people."""
        regions = self.regions
        if isinstance(regions, Regions):
            return replace(self, regions=regions.without_addresses())
        return replace(self, regions=[region._replace(address=0) for region in regions])


def new_epoch() -> int:
    """Unix microseconds now."""
    return time.time_ns() // 1000


def check_rank(rank: RankRef, layout: Layout, path: str = "rank") -> None:
    """Raises InvalidRequest naming every field of an identity that cannot be right. The layout stands beside it."""
    violations = []
    beside = path[: path.rfind(".") + 1]
    if not ENGINE_NAME.fullmatch(rank.rank.engine):
        violations.append(
            Violation(f"{path}.rank.engine", "1 to 128 characters of A-Z a-z 0-9 . _ -", rank.rank.engine)
        )
    if not 0 < rank.epoch <= MAX_EPOCH:
        violations.append(Violation(f"{path}.epoch", f"1 to {MAX_EPOCH} (Unix microseconds)", rank.epoch))
    for name in ("dp", "pp", "cp", "tp"):
        size, coordinate = getattr(layout, name), getattr(rank.rank, name)
        if size < 1:
            violations.append(Violation(f"{beside}layout.{name}", "at least 1", size))
        elif not 0 <= coordinate < size:
            violations.append(Violation(f"{path}.rank.{name}", f"below {beside}layout.{name} = {size}", coordinate))
    raise_if(violations)


def check_pools(pools: Sequence[Pool], path: str = "pools", *, addresses: bool = True, of_a_rank: bool = True) -> None:
    """Raises InvalidRequest naming every field of a pool that cannot be right. ``of_a_rank``: they are all that a rank
    has, one of which has regions."""
    violations = []
    names: set[str] = set()
    if (regions := sum(len(pool.regions) for pool in pools)) > MAX_REGIONS:
        raise_if([Violation(path, f"at most {MAX_REGIONS} regions together", regions)])
    for index, pool in enumerate(pools):
        where = f"{path}[{index}]"
        if not pool.name:
            violations.append(Violation(f"{where}.name", "not empty", pool.name))
        if pool.name in names:
            violations.append(Violation(f"{where}.name", f"unique, {pool.name!r} is there twice", pool.name))
        names.add(pool.name)
        if not 0 < pool.pages < 2**32:
            violations.append(Violation(f"{where}.pages", "1 to 2^32-1", pool.pages))
        if pool.kind == PoolKind.KV and pool.page_tokens < 1:
            violations.append(Violation(f"{where}.page_tokens", "at least 1 for a KV pool", pool.page_tokens))
        if of_a_rank and not regions:
            violations.append(Violation(f"{where}.regions", "at least one in a pool of the rank", pool.regions))
        for field, limit in _LONGEST.items():
            if len(getattr(pool, field)) > limit:
                violations.append(Violation(f"{where}.{field}", f"at most {limit} characters", getattr(pool, field)))
        for field in ("heads_total", "head_start", "head_count"):
            if not 0 <= getattr(pool, field) < 2**32:
                violations.append(Violation(f"{where}.{field}", "0 to 2^32-1", getattr(pool, field)))
        if not _regions_are_right(pool, addresses):
            violations.extend(_wrong_regions(pool, where, addresses))
        if addresses and not violations:
            violations.extend(_overlaps(pool, where))
    raise_if(violations)


def _regions_are_right(pool: Pool, addresses: bool) -> bool:
    """True if nothing is wrong with any by itself: much quicker than to look for what is. A peer may have 4,096."""
    if not pool.regions or not isinstance(pool.regions, Regions):
        return False
    layers, components, starts, strides, sizes = pool.regions.columns()
    if len(set(zip(layers, components, strict=True))) < len(layers):
        return False
    if not all(0 < len(each) <= MAX_WORD_CHARS for each in set(components)):
        return False
    if min(sizes) < 1 or not all(map(operator.le, sizes, strides)):
        return False
    return not addresses or (min(starts) > 0 and max(starts) + pool.pages * max(strides) <= 2**64)


def _wrong_regions(pool: Pool, path: str, addresses: bool) -> Iterator[Violation]:
    seen: set[tuple[int, str]] = set()
    for number, region in enumerate(pool.regions):
        where = f"{path}.regions[{number}]"
        if not 0 <= region.layer < 2**32:
            yield Violation(f"{where}.layer", "0 to 2^32-1", region.layer)
        if not 0 < len(region.component) <= MAX_WORD_CHARS:
            yield Violation(f"{where}.component", f"1 to {MAX_WORD_CHARS} characters", region.component)
        if (region.layer, region.component) in seen:
            rule = "another layer or component than the regions before"
            yield Violation(where, rule, f"{region.layer}, {region.component!r}")
        seen.add((region.layer, region.component))
        if not 0 < region.page_bytes <= region.page_stride_bytes:
            yield Violation(f"{where}.page_bytes", "1 to page_stride_bytes", region.page_bytes)
        elif addresses and not 0 < region.address <= 2**64 - pool.pages * region.page_stride_bytes:
            yield Violation(f"{where}.address", "a region inside the address space", region.address)


def _overlaps(pool: Pool, path: str) -> Iterator[Violation]:
    """Regions whose pages share bytes: a page that arrives there would be another one's end.

    Regions may lie in each other's gaps, as the k and v of one tensor do; then they have one stride. O(n log n): a peer
    chooses how many there are.
    """
    if _lie_apart(pool):
        return
    end, cluster = 0, list[tuple[int, Region]]()
    for number, region in sorted(enumerate(pool.regions), key=lambda each: each[1].address):
        if region.address >= end:
            yield from _overlaps_of(cluster, path)
            cluster = []
        cluster.append((number, region))
        end = max(end, region.address + (pool.pages - 1) * region.page_stride_bytes + region.page_bytes)
    yield from _overlaps_of(cluster, path)


def _lie_apart(pool: Pool) -> bool:
    """True if each region ends before the next one begins, as most do."""
    places = sorted((region.address, region.page_stride_bytes, region.page_bytes) for region in pool.regions)
    ends = [address + (pool.pages - 1) * stride + size for address, stride, size in places]
    return all(end <= place[0] for end, place in zip(ends, places[1:], strict=False))


def _overlaps_of(cluster: Sequence[tuple[int, Region]], path: str) -> Iterator[Violation]:
    """Of regions between whose first and last page there are others."""
    if len(cluster) < 2:
        return
    base, stride = cluster[0][1].address, cluster[0][1].page_stride_bytes
    places = sorted(((region.address - base) % stride, number, region) for number, region in cluster)
    behind = [*places[1:], (places[0][0] + stride, *places[0][1:])]
    for (place, number, region), (next_place, other, _) in zip(places, behind, strict=True):
        if region.page_stride_bytes != stride or place + region.page_bytes > next_place:
            rule = f"memory of its own: its pages lie among those of regions[{other}]"
            yield Violation(f"{path}.regions[{number}].address", rule, region.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The work that an engine has to do, and its speed; 0 where nobody told it.

    ``page_tokens`` and ``page_bytes``: of its host cache, where it lends and takes pages. ``lent_pulls`` and
    ``taken_pulls`` are in flight. ``pull_rates``: engines that lend, and bytes in a second, the newest first.
    ``page_forms``: what its pages are to other caches; two that have one in common exchange pages. None: not told.
    """

    prefill_tokens_per_second: float = 0.0
    waiting_tokens: int = 0
    page_tokens: int = 0
    page_bytes: int = 0
    lent_pulls: int = 0
    taken_pulls: int = 0
    pull_rates: tuple[tuple[str, float], ...] = ()
    page_forms: tuple[int, ...] = ()


def raise_if(violations: Sequence[Violation]) -> None:
    """Raises InvalidRequest of all violations, if there is any; the first one is in the text and the metadata."""
    if violations:
        first = violations[0]
        raise InvalidRequest(
            "; ".join(_said(violation) for violation in violations[:5]),
            metadata={"field": first.field, "value": str(first.value)[:_SHOWN_CHARS], "rule": first.description},
            violations=violations,
        )


def _said(violation: Violation) -> str:
    value = "" if violation.value is None else f", not {violation.value!r:.{_SHOWN_CHARS}}"
    return f"{violation.field}: must be {violation.description}{value}"
