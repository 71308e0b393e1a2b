"""The end of the chunks that orders brought: used by a request, or gone from the host before one came."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence

from vllm.v1.kv_offload.base import OffloadKey

from kvgrpc.prefetch.orders import EngineOrders
from kvgrpc.prefetch.protocol.operation import Operation

MAX_FOLLOWED = 65_536
_LOOK_SECONDS = 0.25
_LOOKS = 256


class Outcomes:
    """Chunks past MAX_FOLLOWED are followed no more, the oldest first: they are told as neither."""

    def __init__(self, orders: EngineOrders) -> None:
        self._orders = orders
        self._followed: OrderedDict[OffloadKey, Operation] = OrderedDict()
        self._looked_at = 0.0

    def follow(self, operation: Operation, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self._followed[key] = operation
            self._followed.move_to_end(key)
        while len(self._followed) > MAX_FOLLOWED:
            self._followed.popitem(last=False)

    def on_used(self, keys: Collection[OffloadKey]) -> None:
        found = Counter(self._followed.pop(key) for key in keys if key in self._followed)
        for operation, used in found.items():
            self._orders.tell(operation, used=operation.used + used)

    @property
    def due(self) -> bool:
        """True if it is time for a look."""
        return bool(self._followed) and time.monotonic() - self._looked_at >= _LOOK_SECONDS

    def look(self, is_here: Callable[[OffloadKey], bool]) -> None:
        """At some of them, the ones first that were not looked at for longest."""
        self._looked_at = time.monotonic()
        for _ in range(min(_LOOKS, len(self._followed))):
            key, operation = self._followed.popitem(last=False)
            if is_here(key):
                self._followed[key] = operation
            else:
                self._orders.tell(operation, wasted=operation.wasted + 1)
