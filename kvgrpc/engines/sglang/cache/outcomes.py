"""The end of the pages that orders brought: used by a request, or gone from the host before one came.

Used is what SGLang brings to the device for a request. Its tree has such a load until it takes its end, in the next
step or later; where the pages are is looked at by some 250 ms, which changes nothing in the tree.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvgrpc.engines.sglang.cache.orders import ORDERS_OF_A_STEP, TOKENS_OF_A_STEP, CacheOrder, OrderKind

MAX_FOLLOWED = 256
MAX_TOKENS = 1 << 20
"""Of the prompts that are followed, 8 bytes each."""
_LOOK_SECONDS = 0.25


@dataclass(slots=True)
class _Brought:
    """Tokens of a prompt from ``used`` to ``end``, of which ``node`` has the last. ``loads``: nodes that came to the
    device after that one was gone."""

    order: CacheOrder
    node: Any
    used: int
    end: int
    loads: set[Any] = field(default_factory=set)


class BroughtPages:
    """At the leading rank, in the scheduler's thread. ``tell`` hears how many more tokens of an order's prompt were
    used, and how many were lost: whole pages, for SGLang's nodes end with pages, and so does what it matches.

    Orders past the bounds are followed no more, the oldest first: what is left of them is told as neither.
    """

    def __init__(self, tree: Any, tell: Callable[[str, int, int], None]) -> None:
        self._tree = tree
        self._tell = tell
        self._followed: OrderedDict[str, _Brought] = OrderedDict()
        self._tokens = 0
        self._looked_at = 0.0
        # Loads that an earlier step has noted, until they end.
        self._noted: set[Any] = set()

    def follow(self, order: CacheOrder, node: Any, near: int, end: int) -> None:
        """``node``: the deepest that has the prompt's tokens up to ``end``; up to ``near`` they were there before."""
        if end <= near:
            return
        self._followed[order.number] = _Brought(replace(order, kind=OrderKind.LOOK), node, near, end)
        self._tokens += order.token_count
        while len(self._followed) > MAX_FOLLOWED or self._tokens > MAX_TOKENS:
            self._drop(next(iter(self._followed)))

    def note_loads(self) -> None:
        """In each step, before the tree takes the ends of loads."""
        loads = set(self._tree.ongoing_load_back) if self._followed else set()
        new, self._noted = loads - self._noted, loads
        if new:
            paths = self._tree.tree_core.collect_path_info(list(new))
            nodes = {step.node_id for path in paths for step in path}
            for brought in list(self._followed.values()):
                self._use(brought, nodes)

    def questions(self) -> list[CacheOrder]:
        """Looks for the prompts whose last node is gone, answered by ``found``: a part may be there, which only a match
        tells, and that counts as a use in SGLang's order of eviction, so all ranks do it in one step."""
        now = time.monotonic()
        if not self._followed or now < self._looked_at + _LOOK_SECONDS:
            return []
        self._looked_at = now
        found: list[CacheOrder] = []
        tokens = 0
        for each in self._followed.values():
            size = each.order.token_count
            if found and (len(found) == ORDERS_OF_A_STEP or tokens + size > TOKENS_OF_A_STEP):
                break
            if self._path(each) is None:
                found.append(each.order)
                tokens += size
        return found

    def found(self, number: str, node: Any, there: int) -> bool:
        """True if the look was one of ``questions``."""
        brought = self._followed.get(number)
        if brought is None:
            return False
        brought.node, loads, brought.loads = node, brought.loads, set()
        self._use(brought, loads)
        self._shorten(brought, there)
        return True

    def forget(self) -> None:
        """The tree was emptied."""
        for brought in list(self._followed.values()):
            self._shorten(brought, 0)

    def _use(self, brought: _Brought, nodes: set[Any]) -> None:
        path = self._path(brought)
        if path is None:
            brought.loads |= nodes
            return
        used = min(max((step.path_end for step in path if step.node_id in nodes), default=0), brought.end)
        if used > brought.used:
            self._tell(brought.order.number, used - brought.used, 0)
            brought.used = used
        self._shorten(brought, brought.end)

    def _path(self, brought: _Brought) -> Any:
        """Nodes from the root on to its last one; None where that is gone."""
        try:
            return self._tree.tree_core.collect_path_info([brought.node])[0]
        except KeyError:
            return None

    def _shorten(self, brought: _Brought, there: int) -> None:
        """Of its tokens those behind ``there`` are not on the host any more."""
        end = max(min(there, brought.end), brought.used)
        if end < brought.end:
            self._tell(brought.order.number, 0, brought.end - end)
            brought.end = end
        if end == brought.used:
            self._drop(brought.order.number)

    def _drop(self, number: str) -> None:
        brought = self._followed.pop(number, None)
        self._tokens -= 0 if brought is None else brought.order.token_count
