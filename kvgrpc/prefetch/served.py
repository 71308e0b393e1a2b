"""The cache that PrefetchService serves: kvgrpc's own, or one that an engine keeps itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvgrpc.model import RankRef, Role, Tier
from kvgrpc.prefetch.agreement.leader import LeaderAgreement
from kvgrpc.prefetch.model import CacheFacts, Namespace, OperationKind, PrefetchLimits, Purged, TierUse
from kvgrpc.prefetch.protocol.book import OperationBook
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.prefetch.protocol.order import Order


class ServedCache(Protocol):
    """Of one rank. Calls come from the rank's event loop, and those that say "blocks" from threads beside it.

    An engine that cannot do what is asked raises FeatureDisabled, whose text says what it can.
    """

    rank: RankRef

    @property
    def role(self) -> Role: ...

    @property
    def namespace(self) -> Namespace: ...

    @property
    def leader(self) -> LeaderAgreement | None:
        """The leader with whom the ranks of a replica agree over JoinAgreement; None: there is none here."""

    @property
    def healthy(self) -> bool:
        """All that it stands on runs; storage that is away does not count."""

    @property
    def limits(self) -> PrefetchLimits: ...

    @property
    def pinnable(self) -> int | None:
        """Pages that callers may pin together; None: the engine bounds its pins itself, or has none."""

    @property
    def book(self) -> OperationBook:
        """Its operations."""

    def hash_tokens(
        self, tokens: Sequence[int], *, extra_key: str | None, cache_salt: str | None, bigram: bool
    ) -> Sequence[bytes]:
        """Names of the full pages of a prompt, 32 bytes each, as this cache has them. Blocks. Raises InvalidRequest."""

    def lookup(
        self, hashes: Sequence[str], timeout: float, *, extra_key: str = "", storage: bool = True
    ) -> tuple[int, int, int]:
        """Leading pages on the device; on device or host; anywhere. Blocks for at most ``timeout`` seconds."""

    def start(self, order: Order) -> Operation:
        """Begins it, or answers with what the same request id began."""

    def began(self, kind: OperationKind, request_id: str) -> Operation | None:
        """The operation that a request id began before, as long as that is remembered."""

    def terminate(self, operation: Operation) -> None:
        """Cuts it short; it ends when nothing moves its pages any more."""

    def use(self) -> list[TierUse]:
        """The use of each tier. Blocks."""

    def facts(self) -> CacheFacts: ...

    def purge(self, tiers: Sequence[Tier], extra_key: str | None, *, dry_run: bool, timeout: float) -> Purged:
        """Drops what nobody uses, or counts it. Blocks for about ``timeout`` seconds."""

    def pin(self, hashes: Sequence[str], seconds: float) -> int:
        """Keeps the leading pages that are here; how many those are."""

    def drain(self) -> None:
        """Begins nothing new from now on; what runs goes on."""

    def undrain(self) -> None:
        """Begins new ones again. Not after its end."""
