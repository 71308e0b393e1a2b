"""vLLM's offloaded cache as PrefetchService sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.tiering.base import ParentManager

from kvgrpc.engines.vllm.offload.common import note_prompt
from kvgrpc.engines.vllm.offload.engine_core import EngineCore
from kvgrpc.engines.vllm.offload.keys import ChunkNames
from kvgrpc.engines.vllm.offload.questions import Questions
from kvgrpc.engines.vllm.tier import KvGrpcTier
from kvgrpc.errors import FeatureDisabled
from kvgrpc.model import RankRef, Role, Tier
from kvgrpc.prefetch.model import CacheFacts, Namespace, OperationKind, PrefetchLimits, Purged, TierUse
from kvgrpc.prefetch.orders import EngineOrders
from kvgrpc.prefetch.protocol.book import OperationBook
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.pull.names import NotedNames

_ANSWER_SECONDS = 2.0


class OffloadedCache:
    """A ServedCache. Device counts are vLLM's blocks, the others its chunks; ``page_tokens`` is a chunk's."""

    leader = None
    pinnable: int | None = None
    role = Role.UNIFIED

    def __init__(
        self,
        rank: RankRef,
        namespace: Namespace,
        names: ChunkNames,
        orders: EngineOrders,
        questions: Questions,
        core: EngineCore,
        chunks: int,
        chunk_bytes: int,
        address: int,
        is_well: Callable[[], bool],
        common: NotedNames | None = None,
    ) -> None:
        """``common``: hears of the prompts that are asked for by their tokens."""
        self.rank = rank
        self._common = common
        self.namespace = namespace
        self._names, self._orders, self._questions, self._core = names, orders, questions, core
        self._chunks, self._chunk_bytes, self._address = chunks, chunk_bytes, address
        self._is_well = is_well

    @property
    def healthy(self) -> bool:
        return self._is_well()

    @property
    def limits(self) -> PrefetchLimits:
        return self._orders.limits

    @property
    def book(self) -> OperationBook:
        return self._orders.book

    def hash_tokens(
        self, tokens: Sequence[int], *, extra_key: str | None, cache_salt: str | None, bigram: bool
    ) -> list[bytes]:
        hashes = self._names.hash_tokens(tokens, extra_key, cache_salt)
        if self._common is not None:
            note_prompt(self._common, hashes, tokens, cache_salt)
        return hashes

    def lookup(
        self, hashes: Sequence[str], timeout: float, *, extra_key: str = "", storage: bool = True
    ) -> tuple[int, int, int]:
        keys, end = self._names.keys(hashes), time.monotonic() + timeout

        def left() -> float:
            return max(0.0, end - time.monotonic())

        def in_host(keys: Sequence[OffloadKey]) -> list[bool]:
            return self._questions.present_in_host(keys, left())

        def anywhere(keys: Sequence[OffloadKey]) -> list[bool]:
            stored = [tier.present_in_store(keys) for tier in self._tiers()]
            return [any(each) for each in zip(in_host(keys), *stored, strict=True)]

        device = self._names.usable(hashes, self._core.leading_on_device(keys), 0, self._core.present_on_device)
        there = device + self._questions.leading_in_host(keys[device:], left())
        near = self._names.usable(hashes, there, device, in_host)
        if not storage:
            return device, near, near
        return device, near, self._names.usable(hashes, there + self._behind(keys, there), near, anywhere)

    def start(self, order: Order) -> Operation:
        if order.kind is OperationKind.BACKUP:
            _refuse("StartBackup", "nothing: vLLM writes each chunk to all of its tiers when it leaves the device")
        return self._orders.start(order)

    def began(self, kind: OperationKind, request_id: str) -> Operation | None:
        return self._orders.began(kind, request_id)

    def terminate(self, operation: Operation) -> None:
        self._orders.terminate(operation)

    def use(self) -> list[TierUse]:
        blocks, used_blocks = self._core.device_blocks()
        used = self._questions.ask(chunks_in_use, _ANSWER_SECONDS)
        uses = [TierUse(Tier.HOST, self._chunks, used, 0, self._chunk_bytes)]
        if blocks:
            uses.insert(0, TierUse(Tier.DEVICE, blocks, used_blocks, 0, 0))
        for tier in self._tiers():
            stats = tier.backend.stats()
            counts = {name: int(getattr(stats, name)) for name in ("hits", "misses", "written", "failed", "timeouts")}
            most = (stats.capacity or 0) // self._chunk_bytes
            uses.append(TierUse(Tier.STORAGE, most, stats.pages or 0, 0, self._chunk_bytes, counts))
        return uses

    def facts(self) -> CacheFacts:
        stats = [(tier.backend.name, tier.backend.stats()) for tier in self._tiers()]
        bad = [f"{name}: {each.detail}" for name, each in stats if not each.healthy]
        return CacheFacts(
            storage=",".join(name for name, _ in stats),
            storage_healthy=not bad,
            storage_detail="; ".join(bad),
            write_policy="write_through",
            occupied=0,
            capacity=int(self.limits.occupancy * self._chunks),
        )

    def purge(self, tiers: Sequence[Tier], extra_key: str | None, *, dry_run: bool, timeout: float) -> Purged:
        if set(tiers) != {Tier.STORAGE} or extra_key is not None:
            _refuse("PurgePages of device and host", "vLLM's POST /reset_prefix_cache?reset_connector=true")
        counts = [tier.purge(dry_run, timeout) for tier in self._tiers()]
        known = [count for count in counts if count is not None]
        return Purged({}, sum(known) if len(known) == len(counts) else None, 0, known_only=False)

    def pin(self, hashes: Sequence[str], seconds: float) -> int:
        _refuse("PinPages", "nothing: vLLM's engine core never rests while a chunk is held")

    def drain(self) -> None:
        self._orders.drain()

    def undrain(self) -> None:
        self._orders.undrain()

    def _behind(self, keys: Sequence[OffloadKey], first: int) -> int:
        """Of other engines, where a tier takes from them, and of storage."""
        return max((tier.count_behind(keys, first) for tier in self._tiers()), default=0) if first < len(keys) else 0

    def _tiers(self) -> list[KvGrpcTier]:
        """Ours over storage that belong to the same engine core, in no order. Of vLLM's own tiers nobody can ask
        without a promotion."""
        return [tier for tier in list(KvGrpcTier.opened) if tier.address == self._address]


def chunks_in_use(parent: ParentManager) -> int:
    """Of the host; 0 where this vLLM does not say."""
    primary = _primary(parent)
    return 0 if primary is None else primary._num_chunks - primary._get_num_free_chunks()


def is_full(parent: ParentManager) -> bool:
    """True if the host has no chunk that is free or could be evicted; False where this vLLM does not say."""
    primary = _primary(parent)
    return primary is not None and primary._get_num_free_chunks() + primary._num_evictable_cache_chunks == 0


def holds_promotions(parent: ParentManager) -> bool:
    """True from the emptying of the host until the workers have said that they write to it no more: meanwhile vLLM
    answers MISS for what storage has. False where this vLLM does not say."""
    return bool(getattr(getattr(parent, "_m", None), "_promotions_held", False))


def _primary(parent: ParentManager) -> Any:
    return getattr(getattr(parent, "_m", None), "primary_tier", None)


def _refuse(what: str, instead: str) -> NoReturn:
    raise FeatureDisabled(
        f"{what} is not served over vLLM's offloading; use {instead}",
        metadata={"feature": f"{what} in vLLM", "howToEnable": instead},
    )
