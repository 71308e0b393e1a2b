"""The prefix tree against a plain table of what is where, and its promises about locks, pins and eviction."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvgrpc.errors import InvalidRequest
from kvgrpc.prefetch.tree.prefix_tree import Node, PrefixTree
from tests.support import tree_scan
from tests.support.tree_scan import chain


def test_prompts_that_part_share_what_is_before() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("abcd"), [0, 1, 2, 3])
    assert tree.insert_device(chain("abxy"), [7, 8, 4, 5]) == [7, 8]
    assert tree.match(chain("abcd")).device == (0, 1, 2, 3)
    assert tree.match(chain("abxyz")).device == (0, 1, 4, 5)
    assert tree.match(chain("q")).pages == 0


def test_a_match_inside_a_run_splits_it_there() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("abcdef"), range(6))
    found = tree.match(chain("abc"))
    assert found.device == (0, 1, 2) and found.last is not None and len(found.last) == 3
    assert len(list(tree.nodes())) == 2


def test_host_pages_come_behind_what_is_cached_or_not_at_all() -> None:
    tree = PrefixTree()
    assert tree.insert_host(chain("abcd"), 2, [5, 6]) == [5, 6]
    tree.insert_device(chain("ab"), [0, 1])
    assert tree.insert_host(chain("abcd"), 2, [5, 6]) == []
    assert (tree.match(chain("abcd")).device, tree.match(chain("abcd")).host) == ((0, 1), (5, 6))
    assert tree.insert_host(chain("abcd"), 2, [8, 9]) == [8, 9]


def test_the_least_recently_used_end_goes_first() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("ab"), [0, 1])
    tree.insert_device(chain("cd"), [2, 3])
    tree.match(chain("ab"))
    assert [node.device for node in tree.device_victims(2, 0.0)] == [[2, 3]]


@pytest.mark.parametrize("used", [*itertools.permutations(("ab", "cd", "ef"))])
def test_of_several_ends_they_go_in_the_order_in_which_they_were_used(used: tuple[str, ...]) -> None:
    tree = PrefixTree()
    pages = {"ab": [0, 1], "cd": [2, 3], "ef": [4, 5]}
    for text, numbers in pages.items():
        tree.insert_device(chain(text), numbers)
    for text in used:
        tree.match(chain(text))
    assert [node.device for node in tree.device_victims(6, 0.0)] == [pages[text] for text in used]


def test_what_is_gone_takes_no_successor_with_it() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("ab"), [0, 1])
    gone = tree.match(chain("ab")).last
    assert gone is not None and tree.drop_device(gone) == [0, 1]
    tree.insert_device(chain("ab"), [2, 3])
    assert tree.drop_device(gone) == tree.drop_host(gone) == []
    assert tree.match(chain("ab")).device == (2, 3)


def test_no_more_goes_than_is_needed_and_of_a_run_its_end() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("abcd"), [0, 1, 2, 3])
    assert [node.device for node in tree.device_victims(1, 0.0)] == [[3]]
    assert [node.device for node in tree.device_victims(3, 0.0)] == [[3], [1, 2]]
    assert tree.match(chain("abcd")).device == (0, 1, 2, 3)


def test_on_the_host_too_an_end_goes_before_what_it_stands_on() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("ab"), [0, 1])
    tree.insert_device(chain("abcd"), [0, 1, 2, 3])
    tree.insert_host(chain("abcd"), 0, [5, 6, 7, 8])
    assert [node.host for node in tree.host_victims(3, 0.0)] == [[7, 8], [6]]


def test_a_less_urgent_priority_goes_before_what_is_older() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("ab"), [0, 1], priority=0)
    tree.insert_device(chain("cd"), [2, 3], priority=5)
    tree.match(chain("cd"))
    assert [node.device for node in tree.device_victims(2, 0.0)] == [[2, 3]]


def test_what_is_locked_or_pinned_stays_with_all_before_it() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("abcd"), range(4))
    tree.insert_device(chain("abxy"), [0, 1, 4, 5])
    last = tree.match(chain("abcd")).last
    tree.lock(last)
    assert [node.device for node in tree.device_victims(9, 0.0)] == [[4, 5]]
    tree.unlock(last)
    assert sum(len(node) for node in tree.device_victims(9, 0.0)) == 6
    assert tree.pin(chain("abcd"), until=10.0) == 4
    assert [node.device for node in tree.device_victims(9, 9.0)] == [[4, 5]]
    assert sum(len(node) for node in tree.device_victims(9, 10.0)) == 6


def test_a_lock_holds_across_a_split() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("abcdef"), range(6))
    last = tree.match(chain("abcdef")).last
    tree.lock(last)
    tree.match(chain("abc"))
    assert tree.device_victims(9, 0.0) == []
    tree.unlock(last)
    assert sum(len(node) for node in tree.device_victims(9, 0.0)) == 6


def test_unlocking_what_is_not_locked_is_an_error() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("ab"), [0, 1])
    with pytest.raises(InvalidRequest):
        tree.unlock(tree.match(chain("ab")).last)


def test_host_pages_that_the_device_does_not_need_go_first() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("ab"), [0, 1])
    tree.set_host(tree.match(chain("ab")).nodes[0], [0, 1])
    tree.insert_host(chain("cd"), 0, [2, 3])
    tree.match(chain("cd"))
    assert [node.host for node in tree.host_victims(2, 0.0)] == [[2, 3]]
    assert sum(len(node) for node in tree.host_victims(4, 0.0)) == 4


def test_what_is_on_its_way_is_neither_found_on_the_host_nor_evicted() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("ab"), [0, 1])
    node = tree.match(chain("ab")).nodes[0]
    tree.set_host(node, [3, 4], writing=True)
    assert tree.device_victims(2, 0.0) == [] and tree.host_victims(2, 0.0) == []
    tree.written(node)
    assert [each.hashes for each in tree.host_victims(2, 0.0)] == [chain("ab")]
    tree.drop_device(node)
    assert tree.match(chain("ab")).host == (3, 4)


def test_pages_that_are_computed_again_were_used() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("ab"), [0, 1])
    tree.insert_device(chain("cd"), [2, 3])
    tree.insert_device(chain("ab"), [0, 1])
    assert [node.device for node in tree.device_victims(4, 0.0)] == [[2, 3], [0, 1]]
    tree.insert_device(chain("cd"), [2, 3], priority=-1)
    tree.insert_device(chain("ab"), [0, 1])
    assert [node.device for node in tree.device_victims(4, 0.0)] == [[0, 1], [2, 3]], "the less urgent one first"


def test_uses_without_number_leave_the_queues_small_and_in_order() -> None:
    tree = PrefixTree()
    names = [chr(ord("a") + number) * 2 for number in range(20)]
    for number, name in enumerate(names):
        tree.insert_device(chain(name), [2 * number, 2 * number + 1])
    for number in range(5_000):
        tree.match(chain(names[number * 7 % 20]))
    assert len(tree._device_ends._heap) < 500
    assert [node.hashes for node in tree.device_victims(40, 0.0)] == [chain(names[n * 7 % 20]) for n in range(20)]


def test_priorities_hold_however_often_the_queue_is_tidied() -> None:
    tree, count = PrefixTree(), 200
    for number in range(count):
        tree.insert_device([f"{number}"], [number], priority=number * 37 % 101)
    for number in range(3_000):
        tree.match([f"{number * number % count}"])
    going = tree.device_victims(count, 0.0)
    assert len(going) == count and going == sorted(going, key=lambda node: (-node.priority, node.used))


def test_a_call_looks_at_what_goes_and_not_at_what_stays() -> None:
    tree, asked = PrefixTree(), []

    def wanted(node: Node) -> bool:
        asked.append(node)
        return True

    for number in range(2_000):
        tree.insert_device([f"{number}", f"{number}-"], [2 * number, 2 * number + 1])
    for name in range(1_000):
        tree.lock(tree.match([f"{name}"], touch=False).last)
    victims = tree.device_victims(6, 0.0, wanted)
    assert [node.hashes[0] for node in victims] == ["1000", "1001", "1002"] and asked == victims


PROMPTS = st.text("ab", min_size=1, max_size=6).map(chain)


class Table(RuleBasedStateMachine):
    """Any order of inserts and evictions: what a match finds is what a table of (hash -> page) says."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree()
        self.device: dict[str, int] = {}
        self.host: dict[str, int] = {}
        self.number = 0
        self.now = 0.0
        self.locked: list[Node] = []

    def pages(self, count: int) -> list[int]:
        self.number += count
        return list(range(self.number - count, self.number))

    @rule(hashes=PROMPTS)
    def compute(self, hashes: list[str]) -> None:
        pages = [self.device.get(each, page) for each, page in zip(hashes, self.pages(len(hashes)), strict=True)]
        assert self.tree.insert_device(hashes, pages) == []
        self.device.update(zip(hashes, pages, strict=True))

    @rule(hashes=PROMPTS)
    def compute_twice(self, hashes: list[str]) -> None:
        pages = self.pages(len(hashes))
        spare = self.tree.insert_device(hashes, pages)
        assert spare == [page for each, page in zip(hashes, pages, strict=True) if each in self.device]
        for each, page in zip(hashes, pages, strict=True):
            self.device.setdefault(each, page)

    @rule(hashes=PROMPTS)
    def arrive(self, hashes: list[str]) -> None:
        start = self.tree.match(hashes, touch=False).pages
        pages = self.pages(len(hashes) - start)
        spare = self.tree.insert_host(hashes, start, pages)
        for each, page in zip(hashes[start:], pages, strict=True):
            if page not in spare:
                assert each not in self.host
                self.host[each] = page

    @rule(count=st.integers(1, 5), really=st.booleans())
    def evict_device(self, count: int, really: bool) -> None:
        expected = tree_scan.device_victims(self.tree, count, self.now)
        victims = self.tree.device_victims(count, self.now)
        assert [node.hashes for node in victims] == expected
        for node in victims if really else []:
            self.forget(self.device, node, self.tree.drop_device(node))

    @rule(count=st.integers(1, 5), really=st.booleans())
    def evict_host(self, count: int, really: bool) -> None:
        expected = tree_scan.host_victims(self.tree, count, self.now)
        victims = self.tree.host_victims(count, self.now)
        assert [node.hashes for node in victims] == expected
        for node in victims if really else []:
            self.forget(self.host, node, self.tree.drop_host(node))

    @rule(hashes=PROMPTS)
    def lock(self, hashes: list[str]) -> None:
        last = self.tree.match(hashes).last
        if last is not None:
            self.tree.lock(last)
            self.locked.append(last)

    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        if self.locked:
            self.tree.unlock(self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1))))

    @rule(hashes=PROMPTS, seconds=st.integers(0, 5))
    def pin(self, hashes: list[str], seconds: int) -> None:
        self.tree.pin(hashes, self.now + seconds)

    @rule(seconds=st.integers(1, 3))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule(hashes=PROMPTS, priority=st.integers(-1, 1))
    def matter(self, hashes: list[str], priority: int) -> None:
        """A use that says how urgent it is."""
        pages = [self.device.get(each, page) for each, page in zip(hashes, self.pages(len(hashes)), strict=True)]
        assert self.tree.insert_device(hashes, pages, priority=priority) == []
        self.device.update(zip(hashes, pages, strict=True))

    @rule()
    def end_a_copy(self) -> None:
        for node in [node for node in self.tree.nodes() if node.writing][:1]:
            self.tree.written(node)

    @staticmethod
    def forget(table: dict[str, int], node: Node, pages: list[int]) -> None:
        assert [table.pop(each) for each in node.hashes] == pages

    @rule(hashes=PROMPTS, later=st.booleans())
    def write(self, hashes: list[str], later: bool) -> None:
        for node in self.tree.match(hashes).nodes:
            if node.device is not None and node.host is None:
                pages = self.pages(len(node))
                self.tree.set_host(node, pages, writing=later)
                self.host.update(zip(node.hashes, pages, strict=True))

    @rule(hashes=PROMPTS)
    def look(self, hashes: list[str]) -> None:
        found = self.tree.match(hashes)
        device = [self.device[each] for each in hashes[: len(found.device)]]
        assert list(found.device) == device
        behind = hashes[len(found.device) : found.pages]
        assert list(found.host) == [self.host[each] for each in behind]
        if found.pages < len(hashes) and len(found.device) == found.pages:
            assert hashes[found.pages] not in self.device

    @invariant()
    def it_holds_what_the_table_holds(self) -> None:
        assert self.tree.device_pages() == len(self.device) and self.tree.host_pages() == len(self.host)
        for node in self.tree.nodes():
            assert node.device is not None or node.host is not None or node.children
            assert node.parent is not None
            # The device is closed upwards.
            if node.device is not None and node.parent.parent is not None:
                assert node.parent.device is not None


TestAnyOrderOfPrompts = Table.TestCase
TestAnyOrderOfPrompts.settings = settings(max_examples=40, stateful_step_count=25)
