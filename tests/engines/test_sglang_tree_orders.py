"""Orders on a tree that stands for SGLang's. No engine is started: test_sglang_prefetch.py has the whole way."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from kvgrpc.engines.sglang.cache.orders import CacheOrder, OrderKind, Told
from kvgrpc.engines.sglang.cache.tree import TreeOrders
from kvgrpc.prefetch.model import OperationState, Stop
from tests.engines.host_pools import PAGE


class Tree:
    """SGLang's prefix tree, as far as one prefetch of an order looks at it. ``fails``: of looks for a prompt."""

    page_size = PAGE
    enable_storage, hicache_storage_pass_prefix_keys, prefetch_threshold = True, False, 1
    tree_core = SimpleNamespace(is_eagle=False)

    def __init__(self) -> None:
        self.fails = 0
        self.ongoing_prefetch: dict[Any, Any] = {}
        self.ongoing_backup: dict[int, Any] = {}
        self.prefetch_loaded_tokens_by_reqid: dict[Any, int] = {}

    def match_prefix(self, params: Any) -> Any:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no such node")
        return SimpleNamespace(device_prefix_len=0, host_hit_length=0, last_host_node=None)

    def is_root(self, node: Any) -> bool:
        return True

    def get_last_hash_value(self, node: Any) -> None:
        return None

    def prefetch_from_storage(self, handle: Any, *arguments: Any, **more: Any) -> None:
        operation = SimpleNamespace(completed_tokens=0, storage_hit_count=PAGE)
        self.ongoing_prefetch[handle] = SimpleNamespace(operation=operation, host_indices=None)

    def release_aborted_request(self, handle: Any) -> None:
        pass


def ordered(kind: OrderKind, number: str, **more: Any) -> CacheOrder:
    return CacheOrder(kind, number, array("q", range(2 * PAGE)).tobytes(), **more)


class TestOrdersOnATree:
    def test_one_that_ends_with_an_error_is_told_and_the_others_of_the_step_too(self) -> None:
        tree, told = Tree(), list[Told]()
        orders = TreeOrders(tree, told.append)
        for number in ("a", "b"):
            orders.do(ordered(OrderKind.PREFETCH, number))
        told.clear()
        tree.ongoing_prefetch.clear()
        tree.fails = 1
        orders.look_after()
        assert [(each.number, each.state) for each in told] == [
            ("a", OperationState.FAILED),
            ("b", OperationState.DECLINED),
        ]

    def test_a_cut_of_one_that_the_tree_does_not_know_ends_it(self) -> None:
        told = list[Told]()
        TreeOrders(Tree(), told.append).do(CacheOrder(OrderKind.CUT, "gone", stop=Stop.DEADLINE))
        assert told == [Told("gone", OperationState.EXPIRED, Stop.DEADLINE)]
