"""The last rooms that failed, after the core has dropped them: people may still ask why."""

from __future__ import annotations

from kvgrpc.errors import Reason
from kvgrpc.transfer.protocol.types import RoomKey
from kvgrpc.transfer.tables import RoomRow


class PastRooms(dict[RoomKey, tuple[RoomRow, float]]):
    """Rows, each with the time at which it was kept. Where there are too many, the reason that has most loses its
    oldest: thousands of cancellations, daily business, leave the one failure that somebody looks for.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._of_reason: dict[object, dict[RoomKey, None]] = {}

    def keep(self, row: RoomRow, now: float) -> None:
        self._drop(row.key)
        self[row.key] = row, now
        self._of_reason.setdefault(_reason(row), {})[row.key] = None
        while len(self) > self._limit:
            most = max(self._of_reason.values(), key=lambda keys: len(keys))
            self._drop(next(iter(most)))

    def _drop(self, key: RoomKey) -> None:
        known = self.pop(key, None)
        if known is not None:
            del self._of_reason[_reason(known[0])][key]


def _reason(row: RoomRow) -> object:
    """One of ours; what a foreign peer made up is one together."""
    reason = row.failure.reason if row.failure is not None else None
    return reason if isinstance(reason, Reason) else None
