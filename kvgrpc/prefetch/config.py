"""One object that says what the hierarchical cache of a rank is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgrpc.errors import InvalidRequest
from kvgrpc.prefetch.model import PrefetchLimits, WritePolicy
from kvgrpc.prefetch.pools.shape import HostLayout, PageShape
from kvgrpc.prefetch.protocol.votes import Agreement
from kvgrpc.prefetch.storage.base import StorageBackend

if TYPE_CHECKING:
    from kvgrpc.prefetch.pools.device import DevicePool
    from kvgrpc.prefetch.tree.cache import CacheListener
    from kvgrpc.prefetch.tree.keeper import Keeper


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchConfig:
    """The ``prefetch`` of a RankConfig.

    Attributes:
        model, revision: name of the model and of its weights, parts of the storage keys.
        shape: what a page is made of (``PageShape.mha``, ``PageShape.mla``).
        host_pages: pages of the host pool.
        host_layout: how they lie; storage keys tell layouts apart.
        device: the engine's pages, for copies; None: no device tier here.
        io_backend: "kernel" or "direct", of those copies.
        write_policy, write_hits: when device pages go to the host; ``write_hits`` replaces the policy's own count.
        own_radix_cache: the engine has a prefix tree of its own and uses ``controller`` alone.
        keeper: that tree, as the controller asks it what the host has and gives it what arrives. None: what arrives
            waits in ``controller.keeper``, a ``CompletionQueue``, which knows of nothing else.
        storage: a backend's name ("file", "mooncake", an entry point), one that was opened before, or None: no storage.
        storage_config: of a backend that is opened by name: a mapping, JSON text, or "@file".
        backup: pages that reach the host are written to storage.
        key_mode: how storage keys are built: "kvgrpc", "sglang", "sglang-seed".
        limits: bounds, threshold, stop policy.
        agreement: how ranks agree, where it is not JoinAgreement: an open ``GlooAgreement``
            (kvgrpc.prefetch.agreement.gloo), which the engine closes. It serves the schedulers' own prefetches: remote
            starts need JoinAgreement to reach all ranks.
        leader: "host:port" of the rank with pp = cp = tp = 0 of the same dp, where a replica has several ranks; empty:
            looked up at the registry.
        listener: hears which pages came to a tier and which left it (``CacheListener``), with ``own_radix_cache`` of
            storage only; None: nobody does.
    """

    model: str
    shape: PageShape
    host_pages: int
    host_layout: HostLayout = HostLayout.PAGE_FIRST_DIRECT
    device: DevicePool | None = None
    io_backend: str = "kernel"
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH_SELECTIVE
    write_hits: int | None = None
    own_radix_cache: bool = False
    keeper: Keeper | None = None
    storage: str | StorageBackend | None = None
    storage_config: Mapping[str, object] | str | None = None
    backup: bool = True
    key_mode: str = "kvgrpc"
    revision: str = ""
    limits: PrefetchLimits = field(default_factory=PrefetchLimits)
    agreement: Agreement | None = None
    leader: str = ""
    listener: CacheListener | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.model) <= 256:
            raise InvalidRequest.of("prefetch.model", self.model, "1 to 256 characters")
        if not 1 <= self.host_pages < 2**31:
            raise InvalidRequest.of("prefetch.host_pages", self.host_pages, "1 to 2147483647")
        if self.io_backend not in ("kernel", "direct"):
            raise InvalidRequest.of("prefetch.io_backend", self.io_backend, "kernel or direct")
        if self.storage is None and self.storage_config is not None:
            raise InvalidRequest.of("prefetch.storage_config", "given", "None without a storage backend")
        if not isinstance(self.storage, (str, type(None))) and self.storage_config is not None:
            raise InvalidRequest.of("prefetch.storage_config", "given", "None for a backend that is open already")
        if self.keeper is not None and not self.own_radix_cache:
            raise InvalidRequest.of(
                "prefetch.keeper", "given", "None without own_radix_cache: the cache keeps its pages"
            )
        if self.write_hits is not None and self.write_hits < 1:
            raise InvalidRequest.of("prefetch.write_hits", self.write_hits, "at least 1")
