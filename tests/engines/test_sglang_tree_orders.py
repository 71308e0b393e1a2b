"""Orders on a tree that stands for SGLang's. No engine is started: test_sglang_prefetch.py has the whole way."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from kvgrpc.engines.sglang.cache import served
from kvgrpc.engines.sglang.cache.hooks import Desk, Wakes
from kvgrpc.engines.sglang.cache.orders import ORDERS_OF_A_STEP, TOKENS_OF_A_STEP, CacheOrder, OrderKind, Told
from kvgrpc.engines.sglang.cache.outcomes import BroughtPages
from kvgrpc.engines.sglang.cache.served import SglangCache
from kvgrpc.engines.sglang.cache.tree import TreeOrders
from kvgrpc.errors import PeerUnreachable, StorageFailed
from kvgrpc.model import RankId, RankRef
from kvgrpc.prefetch.model import Namespace, OperationKind, OperationState, PrefetchLimits, Stop
from kvgrpc.prefetch.protocol.order import Order
from tests.engines.host_pools import PAGE

PROMPT = 4 * PAGE


class Tree:
    """SGLang's prefix tree, as far as one prefetch of an order looks at it. ``fails``: of looks for a prompt; ``near``:
    tokens of each that the host has; ``hit``: of those behind them that storage has."""

    page_size = PAGE
    enable_storage, hicache_storage_pass_prefix_keys, prefetch_threshold = True, False, 1
    tree_core = SimpleNamespace(is_eagle=False)

    def __init__(self) -> None:
        self.fails = self.near = 0
        self.hit = PAGE
        self.ongoing_prefetch: dict[Any, Any] = {}
        self.terminated: list[Any] = []
        self.ongoing_backup: dict[int, Any] = {}
        self.prefetch_loaded_tokens_by_reqid: dict[Any, int] = {}

    def match_prefix(self, params: Any) -> Any:
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no such node")
        return SimpleNamespace(device_prefix_len=0, host_hit_length=self.near, last_host_node=self.near)

    def is_root(self, node: Any) -> bool:
        return True

    def begin(self) -> None:
        """Storage has been asked, and the first tokens come."""
        (begun,) = self.ongoing_prefetch.values()
        begun.host_indices, begun.operation.completed_tokens = range(self.hit), 1

    def land(self, near: int) -> None:
        """SGLang has ended the only prefetch; ``near`` is what the host has now."""
        (handle,) = self.ongoing_prefetch
        self.ongoing_prefetch.clear()
        self.prefetch_loaded_tokens_by_reqid[handle] = self.hit
        self.near = near

    def check_prefetch_progress(self, handle: Any) -> None:
        self.land(self.near)

    def get_last_hash_value(self, node: Any) -> None:
        return None

    def prefetch_from_storage(self, handle: Any, *arguments: Any, **more: Any) -> None:
        operation = SimpleNamespace(
            completed_tokens=0, storage_hit_count=self.hit, mark_terminate=lambda: self.terminated.append(handle)
        )
        self.ongoing_prefetch[handle] = SimpleNamespace(operation=operation, host_indices=None)

    def release_aborted_request(self, handle: Any) -> None:
        pass


class BackedTree(Tree):
    """The same, whose host has a prompt in nodes of so many tokens; SGLang's thread writes when a test says so."""

    def __init__(self, *nodes: int) -> None:
        super().__init__()
        ends = [sum(nodes[: number + 1]) for number in range(len(nodes))]
        self.path = [SimpleNamespace(node_id=f"node-{end}", path_end=end) for end in ends]
        self.tree_core = SimpleNamespace(is_eagle=False, collect_path_info=lambda nodes: (self.path,))
        self.near = ends[-1]
        # One of SGLang's own, which no order began.
        self.ongoing_backup[7] = "another node", None
        self.waiting: list[Any] = []

    def is_root(self, node: Any) -> bool:
        return False

    def is_backuped(self, node: Any) -> bool:
        return True

    def write_backup_storage(self, node: Any) -> None:
        number = 100 + len(self.waiting)
        self.ongoing_backup[number] = node, None
        self.waiting.append(written(number, 0))

    def write(self, orders: TreeOrders, *taken: int, **pools: tuple[int, int]) -> None:
        """The next ones end, of each so many tokens were written; ``pools``: pages that were beside them, and all."""
        for tokens in taken:
            operation = self.waiting.pop(0)
            orders.note_written(written(operation.id, tokens, **pools))
            del self.ongoing_backup[operation.id]


def written(number: int, tokens: int, **pools: tuple[int, int]) -> Any:
    """An operation of SGLang's controller, as its thread leaves it."""
    return SimpleNamespace(
        id=number,
        completed_tokens=tokens,
        pool_transfers=[SimpleNamespace(name=name, keys=["key"] * wanted) for name, (_, wanted) in pools.items()],
        pool_storage_result=SimpleNamespace(extra_pool_hit_pages={name: done for name, (done, _) in pools.items()}),
    )


class Followed(BroughtPages):
    """Who follows pages that came, and what it heard: which order's, the last node, where they begin and end."""

    def __init__(self) -> None:
        super().__init__(None, lambda *told: None)
        self.heard: list[tuple[str, Any, int, int]] = []

    def follow(self, order: CacheOrder, node: Any, near: int, end: int) -> None:
        self.heard.append((order.number, node, near, end))


def ordered(kind: OrderKind, number: str, **more: Any) -> CacheOrder:
    return CacheOrder(kind, number, array("q", range(PROMPT)).tobytes(), **more)


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

    def test_one_whose_progress_cannot_be_read_is_told_once(self) -> None:
        tree, told = Tree(), list[Told]()
        orders = TreeOrders(tree, told.append)
        orders.do(ordered(OrderKind.PREFETCH, "a"))
        tree.begin()
        (begun,) = tree.ongoing_prefetch.values()
        del begun.operation.completed_tokens
        for _ in range(2):
            orders.look_after()
        assert [each.state for each in told] == [OperationState.QUERYING, OperationState.FAILED]

    def test_a_cut_of_one_that_the_tree_does_not_know_ends_it(self) -> None:
        told = list[Told]()
        TreeOrders(Tree(), told.append).do(CacheOrder(OrderKind.CUT, "gone", stop=Stop.DEADLINE))
        assert told == [Told("gone", OperationState.EXPIRED, Stop.DEADLINE)]

    def test_what_one_brings_begins_behind_what_was_there_and_is_followed_as_far_as_it_is_there(self) -> None:
        tree, told, followed = Tree(), list[Told](), Followed()
        tree.near, tree.hit = PAGE, 2 * PAGE
        orders = TreeOrders(tree, told.append, followed)
        orders.do(ordered(OrderKind.PREFETCH, "a"))
        tree.begin()
        orders.look_after()
        tree.land(near=3 * PAGE)
        orders.look_after()
        near, hit = PAGE, 2 * PAGE
        assert told == [
            Told("a", OperationState.QUERYING, near=near, done=near),
            Told("a", OperationState.TRANSFERRING, near=near, hit=hit, done=near + 1),
            Told("a", OperationState.DONE, near=near, hit=hit, done=near + hit),
        ]
        assert followed.heard == [("a", 3 * PAGE, PAGE, 3 * PAGE)]

    @pytest.mark.parametrize(
        ("there", "state"), [(2 * PAGE, OperationState.PARTIAL), (PAGE, OperationState.FAILED)], ids=["some", "all"]
    )
    def test_what_was_lost_again_before_it_was_looked_at_is_told(self, there: int, state: OperationState) -> None:
        tree, told, followed = Tree(), list[Told](), Followed()
        tree.near, tree.hit = PAGE, 2 * PAGE
        orders = TreeOrders(tree, told.append, followed)
        orders.do(ordered(OrderKind.PREFETCH, "a"))
        tree.land(near=there)
        orders.look_after()
        assert told[-1] == Told("a", state, Stop.PAGE_LOST, near=PAGE, hit=2 * PAGE, done=there)
        assert followed.heard == [("a", there, PAGE, there)]

    @pytest.mark.parametrize(
        ("stop", "state"), [(Stop.DEADLINE, OperationState.EXPIRED), (Stop.CANCELLED, OperationState.CANCELLED)]
    )
    def test_a_cut_ends_it_with_what_has_come_and_its_reason(self, stop: Stop, state: OperationState) -> None:
        tree, told = Tree(), list[Told]()
        orders = TreeOrders(tree, told.append)
        orders.do(ordered(OrderKind.PREFETCH, "a"))
        orders.do(CacheOrder(OrderKind.CUT, "a", stop=stop))
        assert told[-1] == Told("a", state, stop, hit=PAGE) and len(tree.terminated) == 1
        orders.do(CacheOrder(OrderKind.CUT, "a", stop=stop))
        assert told[-1] == Told("a", state, stop) and len(told) == 3, "ended once, and not known any more"


class TestBackups:
    """Of a prompt whose pages lie in nodes of one page, one page and two."""

    NODES = (PAGE, PAGE, 2 * PAGE)

    @pytest.mark.parametrize(
        ("taken", "there", "state"),
        [
            ((PAGE, PAGE, 2 * PAGE), 4 * PAGE, OperationState.DONE),
            ((PAGE, PAGE, PAGE), 3 * PAGE, OperationState.PARTIAL),
            ((PAGE, 0, 2 * PAGE), PAGE, OperationState.PARTIAL),
            ((0, PAGE, 2 * PAGE), 0, OperationState.FAILED),
            ((0, 0, 0), 0, OperationState.FAILED),
        ],
        ids=["all", "some of the last", "not those in the middle", "not the first", "none"],
    )
    def test_what_storage_took_from_the_first_page_on_is_told(
        self, taken: tuple[int, ...], there: int, state: OperationState
    ) -> None:
        tree, told = BackedTree(*self.NODES), list[Told]()
        orders = TreeOrders(tree, told.append)
        orders.do(ordered(OrderKind.BACKUP, "a"))
        for tokens in taken:
            orders.look_after()
            assert [each.state for each in told] == [OperationState.TRANSFERRING], "it is not over"
            tree.write(orders, tokens)
        orders.look_after()
        stop, error = Stop.NONE, ""
        if there < PROMPT:
            stop, error = Stop.PAGE_LOST, f"storage took {there} of {PROMPT} tokens: the engine's log says why"
        assert told[1:] == [Told("a", state, stop, near=PROMPT, done=there, error=error)]
        orders.look_after()
        assert len(told) == 2, "ended once"

    def test_one_that_is_written_before_its_order_is_known_is_told_too(self) -> None:
        """SGLang's thread is as quick as it likes."""
        tree, told = BackedTree(PROMPT), list[Told]()
        orders = TreeOrders(tree, told.append)
        begin = tree.write_backup_storage

        def write_at_once(node: Any) -> None:
            begin(node)
            orders.note_written(written(tree.waiting[-1].id, PROMPT))

        tree.write_backup_storage = write_at_once  # type: ignore[method-assign]
        orders.do(ordered(OrderKind.BACKUP, "a"))
        orders.look_after()
        assert [each.state for each in told] == [OperationState.TRANSFERRING]
        tree.ongoing_backup.clear()
        orders.look_after()
        assert told[-1] == Told("a", OperationState.DONE, near=PROMPT, done=PROMPT)

    def test_one_without_its_pages_of_another_pool_is_not_there(self) -> None:
        tree, told = BackedTree(*self.NODES), list[Told]()
        orders = TreeOrders(tree, told.append)
        orders.do(ordered(OrderKind.BACKUP, "a"))
        tree.write(orders, PAGE, PAGE, mamba=(1, 1))
        tree.write(orders, 2 * PAGE, mamba=(1, 2))
        orders.look_after()
        assert (told[-1].state, told[-1].done) == (OperationState.PARTIAL, 2 * PAGE)

    def test_one_of_which_nobody_says_what_was_written_counts_as_not_there(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        tree, told = BackedTree(PROMPT), list[Told]()
        orders = TreeOrders(tree, told.append)
        orders.do(ordered(OrderKind.BACKUP, "a"))
        orders.note_written(SimpleNamespace(id=tree.waiting[0].id))
        tree.ongoing_backup.clear()
        orders.look_after()
        assert (told[-1].state, told[-1].done) == (OperationState.FAILED, 0)
        assert "does not say what storage took" in caplog.text

    def test_those_that_sglang_writes_by_itself_leave_nothing_behind(self) -> None:
        tree, told = BackedTree(PROMPT), list[Told]()
        orders = TreeOrders(tree, told.append)
        for number in range(200):
            orders.note_written(written(number, PROMPT))
        orders.look_after()
        assert not told
        orders.do(ordered(OrderKind.BACKUP, "a"))
        assert 0 < tree.waiting[0].id < 200
        tree.ongoing_backup.clear()
        orders.look_after()
        assert (told[-1].state, told[-1].done) == (OperationState.FAILED, 0), "nobody wrote this one"


class CountedTree(Tree):
    """The same, with pools of which the device has ``device`` tokens; ``counted``: how often they were asked."""

    def __init__(self, device: int = PROMPT) -> None:
        super().__init__()
        self.counted = 0
        self.token_to_kv_pool_allocator = SimpleNamespace(size=device, available_size=lambda: device)
        host = SimpleNamespace(size=device, available_size=lambda: device)
        self.cache_controller = SimpleNamespace(mem_pool_host=host, prefetch_tokens_occupied=0)

    def full_evictable_size(self) -> int:
        self.counted += 1
        return 0

    def full_protected_size(self) -> int:
        return 0


def desk_of(tree: Tree, wakes: Wakes | None = None) -> Desk:
    """As it is opened at a leading rank."""
    desk = Desk(tree, wakes)
    desk.cache = SglangCache(
        RankRef(RankId("engine"), 1),
        Namespace("model", "bfloat16", "page_first", PAGE),
        PrefetchLimits(threshold_tokens=PAGE),
        desk.questions,
        desk.count,
        lambda: None,
        page_bytes=1000,
        write_policy="write_through",
    )
    return desk


class TestDesk:
    def test_whoever_asks_a_scheduler_that_hangs_for_its_counts_leaves_nothing_more_behind(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tree = CountedTree()
        desk = desk_of(tree)
        assert desk.cache is not None
        monkeypatch.setattr(served, "_STEP_SECONDS", 0.001)
        for _ in range(20):
            with pytest.raises(PeerUnreachable, match="took no step"):
                desk.cache.use()
        assert tree.counted == 0
        last = desk.count()
        for _ in range(2):
            desk.step()
        assert tree.counted == 1 and last.result(0).device == PROMPT, "one answer for all who asked"
        asked = desk.count()
        desk.step()
        assert tree.counted == 2 and asked.done(), "who asks later hears of a later step"

    def test_a_sleeping_scheduler_comes_again_while_more_waits_than_a_step_takes(self) -> None:
        """With --sleep-on-idle SGLang polls for a second: 100 questions would take six of them."""
        poller = zmq.Poller()
        desk = desk_of(CountedTree(), Wakes(SimpleNamespace(poller=poller)))
        assert desk.cache is not None
        for number in range(2 * ORDERS_OF_A_STEP + 1):
            desk.questions.put(CacheOrder(OrderKind.LOOK, str(number)))
        tokens = list(range(TOKENS_OF_A_STEP))
        named = desk.cache.hash_tokens(tokens, extra_key=None, cache_salt=None, bigram=False)
        for _ in range(2):
            desk.cache.start(Order(kind=OperationKind.PREFETCH, hashes=tuple(each.hex() for each in named)))
        steps = 0
        while poller.poll(0):
            assert desk.take()
            steps += 1
        assert steps == 3 and not desk.take(), "each step takes a part, and the next one comes at once"

    def test_who_asks_hears_what_went_wrong_with_the_counts(self) -> None:
        tree = CountedTree()
        desk = desk_of(tree)
        del tree.token_to_kv_pool_allocator
        asked = desk.count()
        desk.step()
        with pytest.raises(StorageFailed, match="token_to_kv_pool_allocator"):
            asked.result(0)

    def test_counts_are_told_where_orders_cannot_be_looked_after(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tree = CountedTree()
        desk = desk_of(tree)
        monkeypatch.setattr(desk.orders, "look_after", _broken)
        asked = desk.count()
        desk.step()
        assert asked.result(0).device == PROMPT

    @pytest.mark.parametrize("what", ["take", "step"])
    def test_an_error_of_each_step_is_a_few_lines_in_the_log(
        self, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        desk = desk_of(CountedTree())
        monkeypatch.setattr(desk.orders, "look_after", _broken)
        monkeypatch.setattr(desk.cache, "take", _broken)
        for _ in range(100):
            getattr(desk, what)()
        lines = [record.getMessage() for record in caplog.records]
        assert 1 <= len(lines) <= 5 and all("in this step: it is broken" in line for line in lines)

    def test_so_is_one_of_each_answer(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        desk = desk_of(CountedTree())
        monkeypatch.setattr(desk.cache, "told", _broken)
        for number in range(100):
            desk.do([CacheOrder(OrderKind.CUT, str(number), stop=Stop.CANCELLED)])
        lines = [record.getMessage() for record in caplog.records]
        assert 1 <= len(lines) <= 5 and all("nobody was told of order" in line for line in lines)


def _broken(*arguments: Any) -> Any:
    raise RuntimeError("it is broken")
