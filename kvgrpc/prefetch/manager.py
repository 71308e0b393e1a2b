"""The hierarchical cache of one rank, opened as its config says: what ``Rank.prefetch`` is."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvgrpc.errors import Failure, ServerDraining, StorageFailed, WrongRank
from kvgrpc.hashing import page_hashes, storage_seed
from kvgrpc.model import Layout, RankId, RankRef, Role, Tier
from kvgrpc.observability.logging import RateLimited, one_line
from kvgrpc.prefetch.agreement.leader import LeaderAgreement
from kvgrpc.prefetch.agreement.member import FindLeader, JoinedAgreement, OpenChannel, Spawn
from kvgrpc.prefetch.config import PrefetchConfig
from kvgrpc.prefetch.model import CacheFacts, Namespace, OperationKind, PrefetchLimits, Purged, TierUse
from kvgrpc.prefetch.pools.host import HostPool
from kvgrpc.prefetch.pools.pages import Pages, as_pages
from kvgrpc.prefetch.protocol.backup import IsWriter, every_page, writer_of
from kvgrpc.prefetch.protocol.book import OperationBook
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.order import Order
from kvgrpc.prefetch.protocol.votes import Agreement, AloneAgreement
from kvgrpc.prefetch.purging import Purger, known_cache
from kvgrpc.prefetch.runtime.controller import CacheController
from kvgrpc.prefetch.storage import open_backend
from kvgrpc.prefetch.storage.base import StorageBackend
from kvgrpc.prefetch.storage.keys import Keys, PageIdentity
from kvgrpc.prefetch.tree.cache import TieredCache
from kvgrpc.prefetch.tree.keeper import leading_by_tier

if TYPE_CHECKING:
    from kvgrpc.prefetch.copies.engine import CopyEngine

_log = logging.getLogger(__name__)
# For each part of one that cannot be opened.
_UNDO_SECONDS = 1.0


class PrefetchManager:
    """``cache`` (None with ``own_radix_cache``), ``controller``, ``copies`` (None without a device), ``host``,
    ``storage``.

    For engine threads and the service; only ``close`` and what says so wait. Of a replica of several ranks the one with
    pp = cp = tp = 0 has a ``leader``, the others have ``joined``, which needs ``connect``.
    """

    def __init__(
        self,
        config: PrefetchConfig,
        rank: RankRef,
        layout: Layout | None = None,
        role: Role = Role.PREFILL,
    ) -> None:
        self.config = config
        self.rank = rank
        self._lines = RateLimited(_log)
        self.role = role
        self.layout = layout or Layout()
        self.leader_address = config.leader
        self.namespace = _namespace(config, rank.rank, self.layout)
        self.keys = keys_of(config, self.namespace)
        self.leader: LeaderAgreement | None = None
        self.joined: JoinedAgreement | None = None
        self.cache: TieredCache | None = None
        self.copies: CopyEngine | None = None
        self.storage: StorageBackend | None = None
        self._own_storage = isinstance(config.storage, str)
        self._draining = False
        self._closed = False
        self.host = HostPool(config.shape, config.host_pages, config.host_layout)
        with contextlib.ExitStack() as opened:
            opened.callback(self.host.close)
            self._open(config, opened)
            opened.pop_all()

    def _open(self, config: PrefetchConfig, opened: contextlib.ExitStack) -> None:
        """The parts behind the host pool; ``opened`` closes them."""
        storage = self.storage = _storage_of(config)
        if self._own_storage and storage is not None:
            opened.callback(storage.close, _UNDO_SECONDS)
        if not config.own_radix_cache:
            self.cache = TieredCache(
                self.host,
                write_policy=config.write_policy,
                write_hits=config.write_hits,
                backup=config.backup,
                listener=config.listener,
            )
        self.agreement = self._agreement()
        for agreement in (self.leader, self.joined):
            if agreement is not None:
                opened.callback(agreement.close, _UNDO_SECONDS)
        if config.device is not None:
            from kvgrpc.prefetch.copies.engine import CopyEngine
            from kvgrpc.prefetch.copies.paths import IoBackend

            on_ack = None if self.cache is None else self.cache.on_ack
            self.copies = CopyEngine(config.device, self.host, backend=IoBackend(config.io_backend), on_ack=on_ack)
            opened.callback(self.copies.close, _UNDO_SECONDS)
        self.controller = CacheController(
            self.host,
            self.storage,
            lambda page_hash, extra_key: self.keys.of(page_hash, extra_key=extra_key),
            keeper=config.keeper if self.cache is None else self.cache,
            agreement=self.agreement,
            limits=config.limits,
            writes=self._writes(),
        )
        opened.callback(self.controller.close, _UNDO_SECONDS)
        if self.cache is not None:
            self.cache.copies = self.copies
            self.cache.attach(self.controller)
        # Whoever listens makes a backend look for the key of every page that goes: only where somebody hears of it.
        self._end_listening = (
            None if self.storage is None or config.listener is None else self.storage.on_removed(self._storage_removed)
        )
        tells_of_clears = config.listener is not None and self._end_listening is None
        self.purger = Purger(self.cache, self.controller, self.keys, self._tell_removed, tells_of_clears)

    @property
    def limits(self) -> PrefetchLimits:
        return self.config.limits

    @property
    def pinnable(self) -> int:
        """Pages that callers may pin together: of the smaller tier as much as prefetches may hold, the rest is free for
        the engine."""
        device = self.config.device
        return int(self.limits.occupancy * min(self.host.pages, self.host.pages if device is None else device.pages))

    @property
    def book(self) -> OperationBook:
        return self.controller.book

    @property
    def ranks(self) -> int:
        """Ranks of the replica."""
        return self.layout.pp * self.layout.cp * self.layout.tp

    @property
    def healthy(self) -> bool:
        """All of its threads live, and storage does not hold all of a kind past its time-out. Storage that is away does
        not count: the cache goes on without it."""
        return not self._closed and self.controller.healthy and (self.copies is None or self.copies.healthy)

    def hash_tokens(
        self, tokens: Sequence[int], *, extra_key: str | None, cache_salt: str | None, bigram: bool
    ) -> list[bytes]:
        """SGLang's chain."""
        seed = storage_seed(extra_key, cache_salt)
        return page_hashes(tokens, self.namespace.page_tokens, after=seed, bigram=bigram)

    def start(self, order: Order) -> Operation:
        """Begins a prefetch or backup at all ranks of the replica, as ``CacheController`` does at one.

        A backup writes the leading pages that the host of each has, and declines with NOT_PRESENT when one of them has
        none. Raises WrongRank on any but the leading rank, ServerDraining.
        """
        before = self.began(order.kind, order.request_id)
        self._check_start(before)
        operation = self._begin(order)
        if self.leader is not None and operation is not before and not operation.ended:
            self.leader.tell_start(order, operation.deadline - time.monotonic())
        return operation

    def terminate(self, operation: Operation) -> None:
        """Terminates an operation at all ranks of the replica (``CacheController.terminate``)."""
        self.controller.terminate(operation)
        if self.leader is not None:
            self.leader.tell_terminated(operation.operation_id)

    def began(self, kind: OperationKind, request_id: str) -> Operation | None:
        """The operation that a request id began before, as long as that is remembered."""
        return self.controller.book.of_request(kind, request_id)

    def lookup(
        self, hashes: Sequence[str], timeout: float, *, extra_key: str = "", storage: bool = True
    ) -> tuple[int, int, int]:
        """Leading pages on the device; on device or host; anywhere. Blocks for at most ``timeout`` seconds."""
        device, near = leading_by_tier(self.controller.keeper, hashes)
        if not storage:
            return device, near, near
        far = self.controller.count_in_storage(hashes[near:], timeout, extra_key, behind=hashes[:near])
        return device, near, near + far

    def purge(self, tiers: Sequence[Tier], extra_key: str | None, *, dry_run: bool, timeout: float) -> Purged:
        """Purges as ``Purger.purge`` does."""
        return self.purger.purge(tiers, extra_key, dry_run=dry_run, timeout=timeout)

    def pin(self, hashes: Sequence[str], seconds: float) -> int:
        """Pins as ``TieredCache.pin`` does."""
        return self.known_cache().pin(hashes, seconds)

    def known_cache(self) -> TieredCache:
        """Raises FeatureDisabled where the engine has its own radix cache."""
        return known_cache(self.cache)

    def facts(self) -> CacheFacts:
        stats = None if self.storage is None else self.storage.stats()
        return CacheFacts(
            storage="" if self.storage is None else self.storage.name,
            storage_healthy=stats is not None and stats.healthy,
            storage_detail="" if stats is None else stats.detail,
            write_policy=self.config.write_policy.value,
            stop_policy=self.limits.stop_policy.value,
            occupied=self.controller.occupied,
            capacity=self.controller.capacity,
            agreeing_ranks=self.agreeing_ranks(),
        )

    def use(self) -> list[TierUse]:
        """The use of each tier."""
        page_bytes = self.config.shape.page_bytes
        if self.cache is not None:
            uses = self.cache.use()
        else:
            counts = self.host.table.counts()
            used = counts["reserved"] + counts["present"]
            uses = [TierUse(Tier.HOST, self.host.pages, used, counts["reserved"], page_bytes)]
        if self.storage is not None:
            stats = self.storage.stats()
            names = ("hits", "misses", "written", "failed", "timeouts", "evicted", "in_use")
            details = {name: int(getattr(stats, name)) for name in names}
            most = (stats.capacity or 0) // page_bytes
            uses.append(TierUse(Tier.STORAGE, most, stats.pages or 0, 0, page_bytes, details))
        return uses

    def agreeing_ranks(self) -> int:
        """Ranks of the replica that are known to take part."""
        if self.leader is not None:
            return len(self.leader.live)
        return 1 if self.joined is None else len(self.joined.live)

    def connect(self, find_leader: FindLeader, open_channel: OpenChannel, spawn: Spawn) -> None:
        """Joins the leader of the replica, and again whenever that is lost. For ranks that do not lead."""
        if self.joined is not None:
            self.joined.connect(find_leader, open_channel, spawn, self._begin_for_the_leader, self._end_for_the_leader)

    def drain(self) -> None:
        """Takes no new starts from now on; what runs goes on."""
        self._draining = True

    def undrain(self) -> None:
        """Takes new starts again, unless it was closed."""
        self._draining = self._closed

    def close(self, timeout: float = 10.0) -> bool:
        """Ends every operation, copy and thread, then frees the host memory; False when something was left behind.

        What was left may still move bytes: the memory stays mapped then, and the engine's device pages are not to be
        freed while the process lives. Repeats are harmless.
        """
        self._draining = True
        if self._closed:
            return True
        end = time.monotonic() + timeout
        if self._end_listening is not None:
            self._end_listening()
        well = self.controller.close(timeout * 0.5)
        for agreement in (self.leader, self.joined):
            if agreement is not None:
                well = agreement.close(max(0.1, (end - time.monotonic()) * 0.3)) and well
        if self.copies is not None:
            well = self.copies.close(max(0.1, (end - time.monotonic()) * 0.5)) and well
        if self._own_storage and self.storage is not None:
            well = self.storage.close(max(0.1, end - time.monotonic())) and well
        if well:
            if self.cache is not None:
                # The device pool is the engine's, which may open it again.
                self.cache.clear()
            well = self.host.close()
        self._closed = well
        return well

    def _begin(self, order: Order) -> Operation:
        """This rank's part of what all ranks of the replica do together."""
        if order.kind is OperationKind.PREFETCH:
            return self.controller.start_prefetch(order)
        order.check()
        pages, failure = self._present(order.hashes)
        return self.controller.start_backup(order, pages, agrees=self.ranks > 1, failure=failure)

    def _present(self, hashes: Sequence[str]) -> tuple[Pages, Failure | None]:
        """The leading pages that the host has, read-locked; none where the engine's own keeper fails to say: ranks that
        do not lead ask it on the stream of their agreement, which goes on."""
        try:
            return as_pages(self.controller.keeper.pages_of(hashes)), None
        except Exception as error:
            text = one_line(f"the keeper's pages_of: {type(error).__name__}: {error}")
            self._lines.exception("keepers", f"{self.rank.rank}: {text}")
            backend = "none" if self.storage is None else self.storage.name
            return as_pages([]), Failure.of(StorageFailed(text, metadata={"backend": backend, "status": "FAILED"}))

    def _check_start(self, before: Operation | None) -> None:
        """``before``: what the same request began: to ask again what became of it is no start."""
        if not self.rank.rank.leads:
            raise WrongRank(
                f"{self.rank} does not take starts: pp0/cp0/tp0 of its dp does"
                + (f", at {self.leader_address}" if self.leader_address else ""),
                metadata={
                    "expected": f"{self.rank.rank.engine}/dp{self.rank.rank.dp}/pp0/cp0/tp0",
                    "actual": str(self.rank.rank),
                    "address": self.leader_address,
                },
            )
        if self._draining and before is None:
            raise ServerDraining("this rank drains and begins nothing new", retry_after=1.0)

    def _storage_removed(self, keys: Sequence[str]) -> None:
        """On a thread of the backend: pages that it dropped, of this rank or of others."""
        self._tell_removed([page_hash for key in keys if (page_hash := self.keys.hash_of(key)) is not None])

    def _tell_removed(self, hashes: Sequence[str]) -> None:
        if self.config.listener is not None and hashes:
            self.config.listener(Tier.STORAGE, "removed", hashes, "")

    def _writes(self) -> IsWriter:
        if not self.namespace.replicated:
            return every_page
        own = self.rank.rank.tp

        def writes(page_hash: str) -> bool:
            return writer_of(page_hash, self._live_tp()) == own

        return writes

    def _live_tp(self) -> frozenset[int]:
        """Tensor-parallel ranks, this one included, that are known to live and hold the same pages."""
        own, live = self.rank.rank, self.agreement.live
        if live is None:
            return frozenset(range(self.layout.tp))
        same = (rank.tp for rank in live if (rank.pp, rank.cp) == (own.pp, own.cp))
        return frozenset({own.tp, *same})

    def _agreement(self) -> Agreement:
        if self.config.agreement is not None:
            return self.config.agreement
        if self.ranks == 1:
            return AloneAgreement()
        if self.rank.rank.leads:
            self.leader = LeaderAgreement(self.rank, self.layout, doubt=self.config.limits.doubt_timeout)
            return self.leader
        self.joined = JoinedAgreement(self.rank, self.layout, doubt=self.config.limits.doubt_timeout)
        return self.joined

    def _begin_for_the_leader(self, order: Order) -> None:
        if not self._draining:
            self._begin(order)

    def _end_for_the_leader(self, operation_id: str) -> None:
        self.controller.terminate(self.controller.book.get(operation_id))


def keys_of(config: PrefetchConfig, namespace: Namespace) -> Keys:
    """The storage keys of a rank's pages. Raises InvalidRequest for an unknown mode."""
    shape = config.shape
    parts = ".".join(f"{component.name}{component.layer_bytes}" for component in shape.components)
    identity = PageIdentity(
        model=namespace.model,
        revision=config.revision,
        dtype=namespace.dtype,
        # Two pages of one hash that differ in any of it do not fit into each other's place.
        layout=f"{namespace.layout}.{shape.layers}.{parts}",
        page_size=namespace.page_tokens,
        tp_rank=namespace.tp_rank,
        tp_size=namespace.tp_size,
        pp_rank=namespace.pp_rank,
        pp_size=namespace.pp_size,
        cp_rank=namespace.cp_rank,
        cp_size=namespace.cp_size,
        replicated=namespace.replicated,
    )
    return Keys(config.key_mode, identity)


def _namespace(config: PrefetchConfig, rank: RankId, layout: Layout) -> Namespace:
    shape = config.shape
    return Namespace(
        config.model,
        shape.dtype,
        config.host_layout.value,
        shape.page_tokens,
        rank.tp,
        layout.tp,
        rank.pp,
        layout.pp,
        rank.cp,
        layout.cp,
        shape.kind == "mla",
    )


def _storage_of(config: PrefetchConfig) -> StorageBackend | None:
    if isinstance(config.storage, str):
        return open_backend(config.storage, config.storage_config)
    return config.storage
