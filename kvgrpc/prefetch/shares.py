"""How much of a cache's operations one caller of the service may have open."""

from __future__ import annotations

from kvgrpc.errors import TooManyRequests
from kvgrpc.prefetch.protocol.operation import Operation
from kvgrpc.rpc.callers import caller

_RETRY_SECONDS = 1.0


class CallerShares:
    """Open operations by who began them (``Caller.name``). Belongs to one event loop."""

    def __init__(self, operations: int, pages: int) -> None:
        self._operations, self._pages = operations, pages
        self._open: dict[str, list[Operation]] = {}

    def check(self, pages: int) -> None:
        """Raises TooManyRequests where the caller has its share already."""
        known = self._still_open(caller().name)
        asked = sum(len(operation.hashes) for operation in known) + pages
        if len(known) >= self._operations:
            raise _too_many(self._operations, len(known) + 1, "cache operations of one caller")
        if asked > self._pages:
            raise _too_many(self._pages, asked, "pages of cache operations of one caller")

    def add(self, operation: Operation) -> None:
        """One that the caller began; a repeat of it counts once."""
        known = self._still_open(caller().name)
        if not operation.ended and operation not in known:
            self._open.setdefault(caller().name, known).append(operation)

    def _still_open(self, name: str) -> list[Operation]:
        left = [operation for operation in self._open.get(name, ()) if not operation.ended]
        if left:
            self._open[name] = left
        else:
            self._open.pop(name, None)
        return left


def _too_many(limit: int, value: int, scope: str) -> TooManyRequests:
    return TooManyRequests(
        f"{scope}: {value}, at most {limit}",
        metadata={"limit": limit, "value": value, "scope": scope},
        retry_after=_RETRY_SECONDS,
    )
