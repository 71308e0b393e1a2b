"""Pages that orders brought are followed until a request used them or the host lost them, over a made-up tree."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvgrpc.engines.sglang.cache import outcomes
from kvgrpc.engines.sglang.cache.orders import CacheOrder, OrderKind
from kvgrpc.engines.sglang.cache.outcomes import BroughtPages

PAGE, PAGES = 16, 8
ALL = PAGES * PAGE


class Tree:
    """Nodes by number: the one above it, and where its tokens end."""

    def __init__(self) -> None:
        self.nodes: dict[int, tuple[int, int]] = {}
        self.ongoing_load_back: dict[int, Any] = {}
        self.tree_core = self

    def collect_path_info(self, nodes: Sequence[int]) -> list[list[Any]]:
        return [self._path(node) for node in nodes]

    def _path(self, node: int) -> list[Any]:
        if node == 0:
            return []
        above, end = self.nodes[node]
        return [*self._path(above), SimpleNamespace(node_id=node, path_end=end)]


class Followed:
    """An order brought eight pages, of which node 1 has all; ``told``: by its number, used and lost tokens."""

    def __init__(self, near: int = 0) -> None:
        self.tree, self.told = Tree(), dict[str, tuple[int, int]]()
        self.outcomes = BroughtPages(self.tree, self.tell)
        self.tree.nodes[1] = (0, ALL)
        self.follow("a", near)

    def follow(self, number: str, near: int = 0, end: int = ALL) -> None:
        order = CacheOrder(OrderKind.PREFETCH, number, array("q", range(ALL)).tobytes())
        self.outcomes.follow(order, 1, near, end)

    def tell(self, number: str, used: int, lost: int) -> None:
        before = self.told.get(number, (0, 0))
        self.told[number] = before[0] + used, before[1] + lost

    def split(self) -> None:
        """A request with half the prompt came: node 2 has that half now."""
        self.tree.nodes |= {2: (0, ALL // 2), 1: (2, ALL)}

    def load(self, node: int) -> None:
        """To the device, for a request. It is seen for two steps."""
        self.tree.ongoing_load_back[node] = None
        self.outcomes.note_loads()
        self.outcomes.note_loads()
        self.tree.ongoing_load_back.clear()

    def looks(self) -> list[str]:
        """The orders whose prompts are looked for, some time after the last look."""
        self.outcomes._looked_at = 0.0
        orders = self.outcomes.questions()
        assert all(order.kind is OrderKind.LOOK for order in orders)
        return [order.number for order in orders]


@pytest.fixture
def followed() -> Followed:
    return Followed()


def test_what_came_to_the_device_for_a_request_is_used_once(followed: Followed) -> None:
    followed.load(1)
    followed.load(1)
    assert followed.told == {"a": (ALL, 0)}
    del followed.tree.nodes[1]
    assert followed.looks() == [], "its end is known"


def test_what_was_there_before_the_order_is_not_its_own() -> None:
    followed = Followed(near=2 * PAGE)
    followed.tree.nodes |= {2: (0, PAGE), 1: (2, ALL)}
    followed.load(2)
    assert followed.told == {}
    followed.load(1)
    assert followed.told == {"a": (ALL - 2 * PAGE, 0)}


def test_an_order_that_brought_nothing_is_not_followed() -> None:
    followed = Followed(near=ALL)
    del followed.tree.nodes[1]
    assert followed.looks() == [] and followed.told == {}


def test_what_its_node_has_behind_it_is_not_its_own(followed: Followed) -> None:
    followed.follow("b", end=ALL // 2)
    followed.load(1)
    assert followed.told == {"a": (ALL, 0), "b": (ALL // 2, 0)}


def test_what_leaves_the_host_before_a_request_came_is_lost(followed: Followed) -> None:
    assert followed.looks() == []
    del followed.tree.nodes[1]
    assert followed.looks() == ["a"]
    assert followed.outcomes.found("a", 0, 0)
    assert followed.told == {"a": (0, ALL)}
    assert followed.looks() == []


def test_a_half_may_be_used_and_the_other_one_lost(followed: Followed) -> None:
    followed.split()
    followed.load(2)
    assert followed.told == {"a": (ALL // 2, 0)}
    del followed.tree.nodes[1]
    assert followed.looks() == ["a"]
    followed.outcomes.found("a", 2, ALL // 2)
    assert followed.told == {"a": (ALL // 2, ALL // 2)}


def test_a_half_that_is_left_is_followed_on(followed: Followed) -> None:
    followed.split()
    del followed.tree.nodes[1]
    followed.outcomes.found("a", 2, ALL // 2)
    assert followed.told == {"a": (0, ALL // 2)}
    followed.load(2)
    assert followed.told == {"a": (ALL // 2, ALL // 2)}


def test_a_half_that_came_to_the_device_when_the_other_one_had_just_gone_is_used(followed: Followed) -> None:
    """Both in one step: nobody knows yet that the half is a part of it."""
    followed.split()
    del followed.tree.nodes[1]
    followed.load(2)
    assert followed.told == {}
    assert followed.looks() == ["a"]
    followed.outcomes.found("a", 2, ALL // 2)
    assert followed.told == {"a": (ALL // 2, ALL // 2)}


def test_a_look_of_somebody_else_is_not_taken_for_one_of_these(followed: Followed) -> None:
    assert not followed.outcomes.found("a router's", 1, ALL)


def test_an_emptied_tree_has_lost_what_was_not_used(followed: Followed) -> None:
    followed.split()
    followed.load(2)
    followed.outcomes.forget()
    assert followed.told == {"a": (ALL // 2, ALL // 2)}


def test_looks_of_a_step_are_of_no_more_tokens_than_its_orders(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "TOKENS_OF_A_STEP", 2 * ALL)
    for number in "bc":
        followed.follow(number)
    del followed.tree.nodes[1]
    assert followed.looks() == ["a", "b"]
    monkeypatch.setattr(outcomes, "TOKENS_OF_A_STEP", ALL // 2)
    assert followed.looks() == ["a"], "one at least"


def test_a_load_is_noted_in_its_first_step_alone(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    followed.split()
    asked: list[Sequence[int]] = []
    collect = followed.tree.collect_path_info

    def noting(nodes: Sequence[int]) -> list[list[Any]]:
        asked.append(nodes)
        return collect(nodes)

    monkeypatch.setattr(followed.tree, "collect_path_info", noting)
    followed.load(2)
    assert asked == [[2], [1]], "the load's own path, and that of the order"


def test_looks_are_some_time_apart(followed: Followed) -> None:
    followed.outcomes.questions()
    del followed.tree.nodes[1]
    assert followed.outcomes.questions() == []


@pytest.mark.parametrize(("bound", "most"), [("MAX_FOLLOWED", 3), ("MAX_TOKENS", 3 * ALL)])
def test_of_too_many_the_oldest_are_followed_no_more(
    followed: Followed, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(outcomes, bound, most)
    for number in "bcde":
        followed.follow(number)
    followed.load(1)
    assert followed.told == dict.fromkeys("cde", (ALL, 0))
