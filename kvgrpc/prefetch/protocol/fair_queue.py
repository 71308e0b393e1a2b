"""A queue of callers: the most urgent first, and among equals one caller after the other. Pure; not thread-safe."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by priority (a smaller number is more urgent), round robin over tenants, in order within a tenant."""

    def __init__(self) -> None:
        self._by_priority: dict[int, OrderedDict[str, deque[T]]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        for priority in sorted(self._by_priority):
            for waiting in self._by_priority[priority].values():
                yield from waiting

    def put(self, item: T, priority: int = 0, tenant: str = "") -> None:
        self._by_priority.setdefault(priority, OrderedDict()).setdefault(tenant, deque()).append(item)
        self._count += 1

    def pop(self) -> T:
        """The next item. Raises IndexError when there is none."""
        if not self._count:
            raise IndexError("the queue is empty")
        priority = min(self._by_priority)
        tenants = self._by_priority[priority]
        tenant, waiting = next(iter(tenants.items()))
        item = waiting.popleft()
        if waiting:
            tenants.move_to_end(tenant)
        else:
            del tenants[tenant]
            if not tenants:
                del self._by_priority[priority]
        self._count -= 1
        return item

    def clear(self) -> list[T]:
        """Empties it; what was there, in order."""
        items = list(self)
        self._by_priority.clear()
        self._count = 0
        return items
