"""The place of a registry's rows: asynchronous, because that may be another process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from kvgrpc.model import RankRef
from kvgrpc.registry.model import EngineChange, Lease, RankRow
from kvgrpc.registry.table import EngineTable

OnChange = Callable[[Sequence[EngineChange]], None]


class Store(Protocol):
    """Keeps rows as long as their leases are renewed. All of it belongs to the event loop that ``start`` ran on.

    What ``register`` took is in ``table`` when it returns. The table may also change between two calls; each change is
    told to ``on_change`` on the loop, once, after it is in the table.
    """

    @property
    def registry_id(self) -> str:
        """Names the store: leases of another one are unknown here."""

    @property
    def ttl(self) -> float:
        """Seconds that a lease lives without a renewal."""

    @property
    def table(self) -> EngineTable:
        """The rows whose leases run, as far as this process knows. Read only, and not kept over an ``await``."""

    @property
    def warming_up_for(self) -> float:
        """Seconds until the absence of a row means something, as far as can be said; 0: it does now."""

    @property
    def healthy(self) -> bool:
        """True between ``start`` and ``close``, as long as its own tasks run; a store that is away changes nothing."""

    def rows_by_owner(self) -> Mapping[tuple[str, str], int]:
        """Rows by the name and the host of the caller that registered them, at whichever replica; those of nobody are
        left out."""

    async def start(self, on_change: OnChange) -> None:
        """Begins; leases do not run out before."""

    async def close(self) -> None:
        """Ends its tasks. Rows stay where they are."""

    async def register(self, rows: Sequence[RankRow]) -> Sequence[Lease]:
        """Takes all rows, or none, and renews those that are there already; leases in the order of the rows.

        Raises InvalidRequest (a rank twice), StaleEpoch, RegistrationShapeConflict, OldShapeStillLeased,
        TooManyRequests, StoreUnavailable.
        """

    async def keep_alive(self, lease_ids: Sequence[int]) -> list[int]:
        """Renews leases and returns those that are not known: gone, replaced, or of another store.

        Raises StoreUnavailable when it cannot tell.
        """

    async def deregister(self, refs: Iterable[RankRef]) -> int:
        """Removes the rows of exactly these incarnations and returns how many were there. Raises StoreUnavailable."""
