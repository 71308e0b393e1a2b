"""Keys of stored pages: a page's hash, and what else decides whether its bytes are the right ones. Pure.

The hash covers the tokens (with extra key and cache salt). Everything else that changes bytes must be in the key, or
two engines that share a store exchange pages that do not fit: SGLang's own keys lack dtype and layout.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvgrpc.errors import InvalidRequest

KV = "kv"
"""Name of the pool whose pages are a prefix by themselves; others (indexer, mamba, …) lie beside it."""

_HASH = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_EXTRA = re.compile(r"(?<=/)extra-[0-9a-f]{16}/(?=kv/)")
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")
_STATE_POOLS = frozenset({"mamba"})  # different on each tp rank, also where the KV cache is replicated


class KeyMode(str, enum.Enum):
    """Whose keys. SGLANG: those of its backend ``file``, 0.5.23; SGLANG_SEED: those of the 0.5.1 to 0.5.2 era."""

    KVGRPC = "kvgrpc"
    SGLANG = "sglang"
    SGLANG_SEED = "sglang-seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageIdentity:
    """The values that a page's bytes depend on besides its hash.

    Attributes:
        model: name or path, as the engine was started with it; ``revision``: of its weights, where known.
        dtype: of the stored bytes: "bfloat16", "float8_e4m3fn".
        layout: everything that decides the order of the bytes, in any fixed words: memory layout, layers, heads.
        page_size: tokens.
        tp_rank, tp_size: attention tensor parallelism; pp_rank, …: stages; cp_rank, …: context parallelism.
        dcp_rank, dcp_size: decode context parallelism, of replicated caches.
        replicated: every tp rank holds the same bytes (MLA): they share their pages.
    """

    model: str
    dtype: str
    layout: str
    page_size: int
    revision: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    replicated: bool = False

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "cp", "dcp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise InvalidRequest.of(f"{axis}_rank", rank, f"from 0 to {size - 1}")


class Keys:
    """Makes the keys of one rank. Immutable, thread-safe."""

    def __init__(self, mode: KeyMode | str, identity: PageIdentity) -> None:
        """Raises InvalidRequest for a mode that there is not, or that cannot tell these pages apart."""
        try:
            self.mode = KeyMode(mode)
        except ValueError:
            raise InvalidRequest.of("key_mode", mode, f"one of {', '.join(each.value for each in KeyMode)}") from None
        self.identity = identity
        if self.mode is KeyMode.SGLANG_SEED and (identity.pp_size, identity.cp_size, identity.dcp_size) != (1, 1, 1):
            raise InvalidRequest.of("key_mode", mode, "another one: sglang-seed tells ranks of pp and cp not apart")
        self._of: Callable[[str, str, str], str] = {
            KeyMode.KVGRPC: self._kvgrpc,
            KeyMode.SGLANG: self._sglang,
            KeyMode.SGLANG_SEED: self._seed,
        }[self.mode]
        self._prefixes = {shared: _prefix(identity, shared) for shared in (False, True)}
        self._suffixes = {shared: _sglang_suffix(identity, shared) for shared in (False, True)}

    def of(self, page_hash: str, pool: str = KV, *, extra_key: str = "") -> str:
        """The key of a page of a pool. ``extra_key``: the namespace within the model that its hash covers already; here
        it makes that namespace a prefix."""
        return self._of(page_hash, pool, extra_key)

    @property
    def prefix(self) -> str | None:
        """The beginning of the keys of all of this rank's pages, and of no others; None where only their ends tell."""
        return f"{self._prefixes[self._shared(KV)]}/" if self.mode is KeyMode.KVGRPC else None

    def prefix_of(self, extra_key: str) -> str | None:
        """The beginning of the keys of this rank's KV pages of one extra key; empty: of those without one."""
        return None if self.prefix is None else f"{self.prefix}{_extra(extra_key)}{KV}/"

    def hash_of(self, key: str) -> str | None:
        """The hash of one of this rank's pages; None for another's key."""
        found = _HASH.search(key)
        plain = _EXTRA.sub("", key, count=1) if self.mode is KeyMode.KVGRPC else key
        return found[0] if found is not None and self.of(found[0]) == plain else None

    def of_all(self, page_hashes: Iterable[str], pool: str = KV, *, extra_key: str = "") -> list[str]:
        return [self._of(page_hash, pool, extra_key) for page_hash in page_hashes]

    def _shared(self, pool: str) -> bool:
        """True if the tp ranks share the page."""
        return self.identity.replicated and pool not in _STATE_POOLS

    def _kvgrpc(self, page_hash: str, pool: str, extra_key: str) -> str:
        return f"{self._prefixes[self._shared(pool)]}/{_extra(extra_key)}{pool}/{page_hash}"

    def _sglang(self, page_hash: str, pool: str, extra_key: str) -> str:
        name = page_hash if pool == KV else f"{page_hash}.{pool}"
        return name + self._suffixes[self._shared(pool)]

    def _seed(self, page_hash: str, pool: str, extra_key: str) -> str:
        if pool != KV:
            raise InvalidRequest.of("pool", pool, f"{KV!r}: sglang-seed has no others")
        one = self.identity.tp_size == 1 or self.identity.replicated
        return page_hash if one else f"{page_hash}_{self.identity.tp_rank}_{self.identity.tp_size}"


def _prefix(identity: PageIdentity, shared: bool) -> str:
    """Words for people, and a digest of all that matters: ``Llama-3-8B-3f62a1b09c5d7e84``."""
    fields = {name: getattr(identity, name) for name in identity.__slots__}
    if shared:
        # Which tp rank, and of how many, changes nothing; which dcp shard it is does.
        fields["tp_rank"] = fields["tp_size"] = 0
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
    words = _NOT_PLAIN.sub("-", identity.model.rstrip("/").rpartition("/")[2])[:64].strip("-.") or "model"
    return f"{words}-{digest}"


@functools.lru_cache(maxsize=1024)
def _extra(extra_key: str) -> str:
    """A digest: who may list a store need not learn the names of tenants."""
    if not extra_key:
        return ""
    return f"extra-{hashlib.sha256(extra_key.encode(errors='surrogatepass')).hexdigest()[:16]}/"


def _sglang_suffix(identity: PageIdentity, shared: bool) -> str:
    model = identity.model.replace("/", "-")
    suffix = f"_{model}" if shared else f"_{model}_{identity.tp_rank}_{identity.tp_size}"
    if identity.pp_size > 1:
        suffix += f"_{identity.pp_size}_{identity.pp_rank}"
    if identity.cp_size > 1:
        suffix += f"_cp{identity.cp_rank}_{identity.cp_size}"
    if identity.dcp_size > 1:
        suffix += f"_tp{identity.tp_size}_dcp{identity.dcp_rank}_{identity.dcp_size}_page{identity.page_size}"
    return suffix
