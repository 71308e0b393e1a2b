"""SGLang's hierarchical cache over kvgrpc's storage backends: a class for ``--hicache-storage-backend dynamic``.

SGLang imports this module by the name in its extra config, so it needs no plug-in to be loaded. Calls come from four of
its threads at once. docs/engines/sglang.md, section HiCache, has the flags.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

from kvgrpc.engines.compatibility import SGLANG, STORAGE, check
from kvgrpc.engines.sglang import CACHE_LISTEN
from kvgrpc.engines.sglang.cache.common import common_of, heads_of_pool, words_of
from kvgrpc.engines.sglang.cache.stored import StoredPages
from kvgrpc.engines.sglang.clearing import Clearing
from kvgrpc.errors import FeatureDisabled, InvalidRequest
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.prefetch.storage import open_backend
from kvgrpc.prefetch.storage.base import (
    MAX_BATCH_PAGES,
    MemoryRange,
    PageBuffers,
    PageResult,
    StorageBackend,
    StorageDown,
)
from kvgrpc.prefetch.storage.keys import KeyMode, Keys, PageIdentity
from kvgrpc.pull.heads import PageHeads, Share, ranks_with
from kvgrpc.pull.lending.exported import ExportedPages
from kvgrpc.pull.lending.lender import LentPages
from kvgrpc.pull.model import PullConfig
from kvgrpc.pull.taking.peers import PeersBackend
from kvgrpc.settings import read

logger = logging.getLogger(__name__)

_LOADER_KEYS = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
_CLOSE_SECONDS = 5.0
_QUIET_SECONDS = 30.0
_LEAST_SECONDS = 0.001
# What SGLang's scheduler may wait for a store that is asked where a page is, and how long none is asked that took more.
_SCHEDULER_SECONDS, _AWAY_SECONDS = 0.5, 10.0

T = TypeVar("T")


class HiCacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Our keys of ``--hicache-storage-backend-extra-config``, besides SGLang's own."""

    storage: str = ""
    """Name of a kvgrpc storage backend; empty, with ``pull``: other engines' caches alone."""
    storage_config: dict[str, object] = {}
    """Its config."""
    key_mode: KeyMode = KeyMode.KVGRPC
    timeout: Annotated[float, msgspec.Meta(gt=0, le=8)] = 4.0
    """Seconds for a batch of pages. SGLang's threads are joined for 10 when it detaches."""
    pull: dict[str, object] | None = None
    """Pages of other engines, and ours for them: keys of PullConfig, and ``exported_pages``; None: neither."""


class KvGrpcStorage(HiCacheStorage):
    """One rank's view of the store. To SGLang a failure is False or 0, of whatever kind: an error would end a thread of
    its, which nobody starts again. The log says why, once in 30 s."""

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        """Raises InvalidRequest, FeatureDisabled: SGLang then does not start, or refuses to attach."""
        check(SGLANG, STORAGE)
        given = {key: value for key, value in (storage_config.extra_config or {}).items() if key not in _LOADER_KEYS}
        self._settings = read(HiCacheSettings, given)
        self._sglang = storage_config
        self._keys: Keys | None = None
        self._pools: dict[str, Any] = {}
        # A store that is down is asked for every request.
        self._lines = RateLimited(logger, lines=1, seconds=_QUIET_SECONDS)
        self._clearing = Clearing()
        self._asked_again_at = 0.0
        self._exported_pages, self.pull = pull_settings(self._settings.pull)
        self._check_source(storage_config)
        self._exported: ExportedPages | None = None
        self._backend: StorageBackend = self._open()

    @property
    def stored(self) -> StoredPages | None:
        """For whoever asks beside SGLang; None before SGLang said what its pages are."""
        pool = self._pools.get(str(PoolName.KV))
        if self._keys is None or pool is None or self._clearing.under_way:
            return None
        return StoredPages(self._backend, self._keys, pool.size_per_token * pool.page_size)

    def pulls(self, model: str = "", heads_total: int = 0) -> tuple[LentPages, PeersBackend] | None:
        """The pages that a CachePeer lends and the backend that it asks by; None where pulls are off. ``model``: as
        engines of another kind call it; ``heads_total``: its heads of keys and values, 0: unknown."""
        if self._exported is None or self._keys is None or not isinstance(self._backend, PeersBackend):
            return None
        identity, page_bytes = self._keys.identity, self._exported.page_bytes
        found = LentPages(
            self._exported, self._keys, page_bytes, identity.page_size, identity.dtype, fills=self._writes
        )
        # Beside keys and values other pools have a part of each page, which other engines do not.
        whole = len(self._pools) == 1 and not identity.replicated
        return (self._with_heads(found, model, heads_total) if whole else found), self._backend

    def _with_heads(self, pages: LentPages, model: str, heads_total: int) -> LentPages:
        """For engines of other tensor-parallel sizes, and of another kind."""
        pool, mode, identity = self._pools[str(PoolName.KV)], self._settings.key_mode, pages.keys.identity
        own = heads_of_pool(pool, mode, heads_total, identity.tp_size, identity.tp_rank)
        if own is None and identity.tp_size > 1:
            return pages
        pages = replace(pages, common=common_of(pool, mode, model, own))
        return pages if own is None else replace(pages, heads=(own,), shares=partial(self._shares, own, identity))

    def _shares(self, own: PageHeads, identity: PageIdentity, tp_size: int) -> list[Share]:
        """The ranks of an engine like this one, of another size, that have our pages together."""
        pool, mode, found = self._pools[str(PoolName.KV)], self._settings.key_mode, list[Share]()
        for tp in ranks_with(own, tp_size):
            theirs = own.of_rank(tp_size, tp)
            words = words_of(pool, mode, theirs.count)
            found.append(Share(tp, replace(identity, tp_rank=tp, tp_size=tp_size, layout=words), (theirs,)))
        return found

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._keys = Keys(self._settings.key_mode, _identity(self._sglang, mem_pool_host, self._settings.key_mode))
        self._add_pool(str(PoolName.KV), mem_pool_host)
        if self.pull is not None and self._exported is None:
            page_bytes = mem_pool_host.size_per_token * mem_pool_host.page_size
            self._exported = ExportedPages(self._exported_pages if self._writes else 1, page_bytes)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add_pool(str(host_pool_name), host_pool)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._look(lambda end: self._leading(self._names(keys), end), 0)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move("read", str(PoolName.KV), keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move("write", str(PoolName.KV), keys, host_indices)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return self._move_all("read", transfers)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return self._move_all("write", transfers)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """The longest prefix that is there with all that its other pools need; shorter ones may lack something."""
        pools = pool_transfers or ()
        return self._look(lambda end: self._restorable(keys, pools, end), PoolTransferResult.empty())

    def _restorable(self, keys: list[str], pool_transfers: Sequence[Any], end: float) -> PoolTransferResult:
        leading = self._leading(self._names(keys), end)
        hits = {PoolName.KV: leading} if leading else {}
        restorable = set(range(1, leading + 1))
        for transfer in pool_transfers:
            names = self._names(keys[:leading], str(transfer.name)) if restorable else []
            there = self._contained(names, end)
            usable = _usable(there, transfer)
            if usable:
                hits[transfer.name] = max(usable)
            restorable &= usable
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """The interface without ``interface_v1``: into flat tensors, which SGLang copies once more."""
        done = self._move_flat("read", keys, target_locations)
        return [tensor if ok else None for tensor, ok in zip(target_locations, done, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self._move_flat("write", keys, values))

    def _open(self) -> StorageBackend:
        settings = self._settings
        behind = open_backend(settings.storage, settings.storage_config) if settings.storage else None
        if self.pull is not None:
            return PeersBackend(behind, owns_storage=True)
        assert behind is not None
        return behind

    @property
    def _writes(self) -> bool:
        """True if SGLang gives this rank pages to write: of ranks that hold the same bytes one does."""
        return bool(getattr(self._sglang, "is_storage_writer", True))

    def _check_source(self, config: Any) -> None:
        """Raises InvalidRequest, FeatureDisabled."""
        if self.pull is None and not self._settings.storage:
            raise InvalidRequest.of("storage", "", "the name of a storage backend; with pull it may be left out")
        if self.pull is not None and config.pp_size * config.attn_cp_size * getattr(config, "dcp_size", 1) > 1:
            remedy = "leave pull out of the extra config"
            raise FeatureDisabled(
                f"pulls of SGLang engines with several stages or context ranks are not built: {remedy}",
                metadata={"feature": "pull", "howToEnable": remedy},
            )
        if self.pull is not None and not os.environ.get(CACHE_LISTEN):
            remedy = f"set {CACHE_LISTEN} to the address where this engine's cache is served"
            raise FeatureDisabled(
                f"pull needs an address: {remedy}", metadata={"feature": "pull", "howToEnable": remedy}
            )

    def clear(self) -> bool:
        """Drops what the storage backend calls its own, also of other ranks; False when it could not, or did not come
        to the end in the seconds for which SGLang's scheduler may be held: see Clearing."""
        if self._exported is not None:
            self._exported.clear()
        try:
            return self._clearing.clear(self._backend)
        except InvalidRequest as error:
            logger.error("kvgrpc: the storage was not cleared: %s", error)
            return False

    def close(self) -> None:
        """SGLang detaches its storage: its weights may be others before it attaches one again."""
        if self._exported is not None:
            self._exported.close()
        self._clearing.stop()
        if not self._backend.close(_CLOSE_SECONDS):
            logger.error("kvgrpc: storage %r still hangs after %.0f s", self._settings.storage, _CLOSE_SECONDS)

    def _add_pool(self, name: str, pool: Any) -> None:
        self._pools[name] = pool
        self._backend.register(_memory(pool))

    def _names(self, hashes: Sequence[str], pool: str = str(PoolName.KV)) -> list[str]:
        if self._keys is None:
            raise InvalidRequest.of("mem_pool_host", None, "registered before pages are asked for")
        return self._keys.of_all(hashes, pool)

    def _look(self, call: Callable[[float], T], otherwise: T) -> T:
        """Returns what ``call``, which has time until then, finds of where pages are.

        SGLang's decode asks on its scheduler's thread, for which all requests wait: a store that did not answer soon is
        not asked there for a while.
        """
        now, seconds = time.monotonic(), self._settings.timeout
        is_awaited = _is_the_schedulers_thread()
        if is_awaited:
            seconds = min(seconds, _SCHEDULER_SECONDS)
        if self._clearing.under_way or (is_awaited and now < self._asked_again_at):
            return otherwise

        def looked() -> T:
            try:
                return call(now + seconds)
            except StorageDown:
                if is_awaited:
                    self._asked_again_at = now + _AWAY_SECONDS
                raise

        return self._told("count", looked, otherwise)

    def _leading(self, names: list[str], end: float) -> int:
        """Of a prompt, of which SGLang names all pages at once. The scheduler's thread waits for no peers. Raises
        StorageDown."""
        backend, there = self._backend, 0
        count = backend.count_leading
        if isinstance(backend, PeersBackend) and _is_the_schedulers_thread():
            count = backend.count_stored
        while there < len(names):
            part = names[there : there + MAX_BATCH_PAGES]
            found = count(part, _left(end))
            there += found
            if found < len(part):
                break
        return there

    def _contained(self, names: list[str], end: float) -> list[bool]:
        """Raises StorageDown."""
        there = list[bool]()
        while len(there) < len(names):
            there += self._backend.contains(names[len(there) : len(there) + MAX_BATCH_PAGES], _left(end))
        return there

    def _told(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        """The answer of ``call``, or ``otherwise`` where it has none."""
        try:
            return call()
        except StorageDown as error:
            self._complain(error.message)
        except Exception as error:
            text = one_line(f"{what}: {type(error).__name__}: {error}")
            self._lines.exception("errors", f"kvgrpc: storage {self._settings.storage!r}: {text}")
        return otherwise

    def _move_all(self, what: str, transfers: list[Any]) -> dict[str, list[bool]]:
        return {
            transfer.name: self._move(what, str(transfer.name), transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    def _move(self, what: str, pool_name: str, hashes: list[str], host_indices: Any) -> list[bool]:
        return self._told(what, lambda: self._moved(what, pool_name, hashes, host_indices), [False] * len(hashes))

    def _move_flat(self, what: str, hashes: list[str], tensors: Any) -> list[bool]:
        """The interface without ``interface_v1``."""

        def moved() -> list[bool]:
            return self._run(what, self._names(hashes), [_flat(tensor) for tensor in tensors])

        return self._told(what, moved, [False] * len(hashes))

    def _moved(self, what: str, pool_name: str, hashes: list[str], host_indices: Any) -> list[bool]:
        pool = self._pools[pool_name]
        page_size = getattr(pool, "page_size", 1) or 1
        if host_indices is None or len(host_indices) != len(hashes) * page_size:
            found = 0 if host_indices is None else len(host_indices)
            self._complain(f"{found} indices of pool {pool_name} for {len(hashes)} pages of {page_size}")
            return [False] * len(hashes)
        pages = _pages(pool, host_indices, len(hashes), self._settings.key_mode)
        if self._exported is not None and what == "write" and pool_name == str(PoolName.KV):
            self._exported.offer(hashes, pages)
            if not self._settings.storage:
                return [True] * len(hashes)
        return self._run(what, self._names(hashes, pool_name), pages)

    def _run(self, what: str, names: list[str], pages: list[PageBuffers]) -> list[bool]:
        """Returns for each page if it was moved, once nothing touches the pages any more: SGLang uses them again."""
        if self._clearing.under_way:
            return [False] * len(names)
        call = self._backend.read if what == "read" else self._backend.write
        results = call(names, pages, self._settings.timeout)
        _settle(results)
        bad = next((result for result in results if result.detail), None)
        if bad is not None:
            self._complain(f"{what} of {names[results.index(bad)][-80:]}: {bad.detail}")
        return [result.ok for result in results]

    def _complain(self, what: str) -> None:
        self._lines.warning(self._settings.storage, f"kvgrpc: storage {self._settings.storage!r}: {what}")


def pull_settings(given: dict[str, object] | None) -> tuple[int, PullConfig | None]:
    """Pages that are kept for others, and the rest of the settings. Raises InvalidRequest."""
    if given is None:
        return 0, None
    exported = read(_Exported, {key: value for key, value in given.items() if key == "exported_pages"})
    rest = {key: value for key, value in given.items() if key != "exported_pages"}
    return exported.exported_pages, read(PullConfig, rest, "pull.", lenient=True)


class _Exported(msgspec.Struct, frozen=True):
    exported_pages: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)] = 4096


def _is_the_schedulers_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _left(end: float) -> float:
    """Seconds, some in any case."""
    return max(_LEAST_SECONDS, end - time.monotonic())


def _settle(results: Sequence[PageResult]) -> None:
    for result in results:
        if result.released is not None:
            while not result.released.wait(_QUIET_SECONDS):
                logger.error("kvgrpc: storage still uses pages of a call that timed out; SGLang must not have them yet")


def _identity(config: Any, pool: Any, mode: KeyMode) -> PageIdentity:
    """SGLang before 0.5.23 has no storage of decode context parallel ranks, and says nothing of them."""
    told = getattr(config, "logical_page_size", None)
    tokens: int = getattr(pool, "page_size", 1) if told is None else told
    return PageIdentity(
        model=config.model_name or "",
        dtype=str(getattr(pool, "dtype", "")).removeprefix("torch."),
        layout=words_of(pool, mode),
        page_size=tokens,
        tp_rank=config.tp_rank,
        tp_size=config.tp_size,
        pp_rank=config.pp_rank,
        pp_size=config.pp_size,
        cp_rank=config.attn_cp_rank,
        cp_size=config.attn_cp_size,
        dcp_rank=getattr(config, "dcp_rank", 0),
        dcp_size=getattr(config, "dcp_size", 1),
        replicated=config.is_mla_model,
    )


def _usable(there: list[bool], transfer: Any) -> set[int]:
    """Lengths of prefixes for which this pool has what it needs. Raises InvalidRequest."""
    lengths = range(1, len(there) + 1)
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return set(range(1, [*there, False].index(False) + 1))
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        window = max(1, len(transfer.keys or ()))
        return {length for length in lengths if all(there[max(0, length - window) : length])}
    raise InvalidRequest.of("hit_policy", transfer.hit_policy, "all_pages or trailing_pages")


def _pages(pool: Any, host_indices: Any, count: int, mode: KeyMode) -> list[PageBuffers]:
    if not count:
        return []
    addresses, sizes = pool.get_page_buffer_meta(host_indices)
    pieces = list(zip(addresses, sizes, strict=True))
    each = len(pieces) // count
    pages = [tuple(pieces[number * each : (number + 1) * each]) for number in range(count)]
    if mode is not KeyMode.KVGRPC and each > 2:
        # One address a layer, K and V in turn; in SGLang's own objects all K come first.
        pages = [page[0::2] + page[1::2] for page in pages]
    return pages


def _memory(pool: Any) -> list[MemoryRange]:
    """The tensors in which a host pool's pages lie: their names differ from class to class."""
    found = []
    for name, value in vars(pool).items():
        if not name.endswith("buffer") and not name.endswith("buffers"):
            continue
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if hasattr(tensor, "data_ptr") and hasattr(tensor, "untyped_storage") and not tensor.is_cuda:
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    found.append(MemoryRange(storage.data_ptr(), storage.nbytes()))
    return sorted(set(found), key=lambda each: each.address)


def _flat(tensor: Any) -> PageBuffers:
    if tensor.is_cuda or not tensor.is_contiguous():
        raise InvalidRequest.of("values", tuple(tensor.shape), "contiguous tensors of host memory")
    return ((tensor.data_ptr(), tensor.numel() * tensor.element_size()),)
