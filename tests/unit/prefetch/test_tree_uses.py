"""What the prefix tree counts: uses, which decide what stays, and pages, which must be as many as their hashes."""

from __future__ import annotations

import pytest

from kvgrpc.errors import InvalidRequest
from kvgrpc.prefetch.tree.prefix_tree import PrefixTree
from tests.support.tree_scan import chain


def test_what_was_computed_first_goes_first_where_nobody_asked_for_it_since() -> None:
    tree = PrefixTree()
    for first, text in enumerate(("ab", "cd", "ef")):
        tree.insert_device(chain(text), [2 * first, 2 * first + 1])
    assert [node.device for node in tree.device_victims(6, 0.0)] == [[0, 1], [2, 3], [4, 5]]


def test_to_be_computed_again_is_a_use() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("ab"), [0, 1])
    tree.insert_device(chain("cd"), [2, 3])
    tree.insert_device(chain("ab"), [0, 1])
    assert [node.device for node in tree.device_victims(2, 0.0)] == [[2, 3]]


def test_a_more_urgent_prompt_makes_what_it_shares_with_others_more_urgent() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("ab"), [0, 1], priority=5)
    tree.insert_device(chain("cd"), [2, 3], priority=3)
    tree.insert_device(chain("ab"), [0, 1], priority=1)
    tree.match(chain("cd"))
    assert [node.device for node in tree.device_victims(2, 0.0)] == [[2, 3]]


@pytest.mark.parametrize("tier", ["device", "host"])
def test_who_names_no_priority_is_as_urgent_as_0(tier: str) -> None:
    tree = PrefixTree()
    if tier == "device":
        tree.insert_device(chain("ab"), [0, 1])
        tree.insert_device(chain("cd"), [2, 3], priority=0)
    else:
        tree.insert_host(chain("ab"), 0, [0, 1])
        tree.insert_host(chain("cd"), 0, [2, 3], priority=0)
    assert {node.priority for node in tree.nodes()} == {0}


def test_each_match_is_one_hit_of_every_page_that_it_found() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("abcd"), range(4))
    tree.match(chain("abcd"))
    tree.match(chain("ab"))
    assert {text[-1]: node.hits for node in tree.nodes() for text in node.hashes} == {"a": 2, "b": 2, "c": 1, "d": 1}


@pytest.mark.parametrize("touch", [True, False])
def test_a_match_without_a_split_leaves_the_nodes_as_they_are(touch: bool) -> None:
    tree = PrefixTree()
    tree.insert_host(chain("abcd"), 0, range(4))
    assert tree.match(chain("ab"), touch=touch, split=False).host == (0, 1)
    assert [(len(node), node.hits) for node in tree.nodes()] == [(4, int(touch))]


def test_to_look_how_much_of_a_prompt_is_there_is_no_use_of_it() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("abcd"), range(4))
    tree.insert_host(chain("abcdef"), 4, [8, 9])
    tree.insert_device(chain("x"), [4])
    before = [(node.hashes, node.hits, node.used) for node in tree.nodes()]
    assert tree.leading(chain("abc")) == (3, 3)
    assert tree.leading(chain("abcdef")) == (4, 6)
    assert [(node.hashes, node.hits, node.used) for node in tree.nodes()] == before


def test_pages_that_are_not_as_many_as_their_hashes_are_refused() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("ab"), [0, 1])
    (node,) = tree.match(chain("ab")).nodes
    for pages in ([5], [5, 6, 7]):
        with pytest.raises(InvalidRequest):
            tree.insert_device(chain("xy"), pages)
        with pytest.raises(InvalidRequest):
            tree.insert_host(chain("abcd"), 2, pages)
        with pytest.raises(InvalidRequest):
            tree.set_host(node, pages)
        with pytest.raises(InvalidRequest):
            tree.set_device(node, pages)


def test_host_pages_of_several_runs_behind_what_is_cached_are_told_apart() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("abcdef"), range(6))
    tree.match(chain("abcd"))
    assert tree.insert_host(chain("abcdef"), 2, [12, 13, 14, 15]) == []
    assert {"".join(text[-1] for text in node.hashes): node.host for node in tree.nodes()} == {
        "ab": None,
        "cd": [12, 13],
        "ef": [14, 15],
    }


def test_host_pages_from_the_middle_of_a_run_are_kept_and_found() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("abcd"), range(4))
    assert tree.insert_host(chain("abcd"), 2, [8, 9]) == []
    assert tree.host_pages() == 2
    last = tree.match(chain("abcd")).last
    assert last is not None and tree.drop_device(last) == [2, 3]
    found = tree.match(chain("abcd"))
    assert (found.device, found.host) == ((0, 1), (8, 9))


def test_device_pages_are_counted_however_they_came() -> None:
    tree = PrefixTree()
    tree.insert_host(chain("ab"), 0, [0, 1])
    (node,) = tree.match(chain("ab")).nodes
    tree.set_device(node, [5, 6])
    assert (tree.device_pages(), tree.host_pages()) == (2, 2)
    tree.set_device(node, [7, 8])
    assert tree.device_pages() == 2
    tree.set_device(node, None)
    assert tree.device_pages() == 0


def test_one_page_that_is_missing_goes_from_where_the_device_has_it_too() -> None:
    tree = PrefixTree()
    tree.insert_device(chain("a"), [0])
    tree.insert_host(chain("a"), 0, [5])
    tree.insert_host(chain("bc"), 0, [6, 7])
    assert [node.host for node in tree.host_victims(3, 0.0)] == [[6, 7], [5]]


def test_pins_that_are_over_leave_nothing_however_few_look_at_them() -> None:
    tree = PrefixTree()
    for number in range(100):
        names = chain(f"{number:03}")
        tree.insert_host(names, 0, range(3))
        assert tree.pin(names[:2], until=10.0) == 2
        for node in tree.host_victims(3, now=11.0):
            tree.drop_host(node)
    tree.insert_host(chain("ab"), 0, [0, 1])
    tree.pin(chain("ab"), until=10.0)
    tree.pin(chain("ab"), until=0.0)
    assert len(tree._pinned) == 0 == tree.pinned_pages(now=0.0)
